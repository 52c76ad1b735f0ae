"""Attention by FlashInfer: see the README beside this file. Importing this module imports nothing heavy."""

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import AttentionBackend

name = "flashinfer"
api_version = 0
provides = ("paged-kv", "multi-token-verify")
extra = "flashinfer"


class Settings(BaseModel):
    """The table ``[plugin.flashinfer]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Literal["fa2", "fa3"] = Field(
        default="fa2",
        description="kernels for rows of several tokens: fa2 runs from compute capability 8.0 on; fa3 on 9.0 only, is "
        "faster there, and takes the headers of a whole CUDA toolkit to compile",
    )


@hookimpl
def attention_backends(context: "BuildContext") -> "Sequence[type[AttentionBackend]]":
    from mini_infer_plugins.flashinfer.paged_attention import FlashInferAttention, FlashInferAttention3

    fa3 = context.settings_of(name, Settings).prompts == "fa3"
    return [FlashInferAttention3 if fa3 else FlashInferAttention]
