"""FlashAttention as it is installed: see the README beside this file. Importing this module imports nothing heavy."""

from typing import TYPE_CHECKING

from mini_infer.flash_attention import missing_flash_attention
from mini_infer.plugins import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import AttentionBackend

name = "flash-attn"
api_version = 0
provides = ("paged-kv", "multi-token-verify", "graph-safe")
missing = missing_flash_attention


@hookimpl
def attention_backends(context: "BuildContext") -> "Sequence[type[AttentionBackend]]":
    from mini_infer_plugins.flash_attn.paged_attention import backend_for

    return [backend_for(context.device, context.log)]
