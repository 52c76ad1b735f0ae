"""Paged attention in Triton: see the README beside this file. Importing this module imports nothing heavy."""

from typing import TYPE_CHECKING

from mini_infer.flash_attention import build_for_any_block
from mini_infer.plugins import hookimpl
from mini_infer.triton_needs import expect_triton, missing_triton

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mini_infer.build_context import BuildContext
    from mini_infer.interfaces import AttentionBackend

name = "triton-attention"
api_version = 0
provides = ("paged-kv", "multi-token-verify", "graph-safe")
missing = missing_triton


@hookimpl
def attention_backends(context: "BuildContext") -> "Sequence[type[AttentionBackend]]":
    if context.device.startswith("cuda"):  # elsewhere another backend serves
        expect_triton(name, context.device)
        by = build_for_any_block(context.device) or "its own kernels: no FlashAttention-3 is installed for this card"
        context.log(f"triton-attention: in 16 bits, steps with prompts by {by}")
    from mini_infer_plugins.triton_attention.paged_attention import TritonAttention

    return [TritonAttention]
