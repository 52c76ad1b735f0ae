"""PromptTiles: launches ``prompts_kernel`` where it runs: on Hopper, in 16 bits, over heads of 64 or 128 dims."""

from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mini_infer_plugins.triton_attention.prompt_kernels import BLOCK_N, HALF, TILE, prompts_kernel, step_sizes_kernel

if TYPE_CHECKING:
    from mini_infer.forward_batch import ForwardBatch, StepShape
    from mini_infer.interfaces import KVCacheSpec
    from mini_infer.layers import Attention

_LOG2_E = 1.4426950408889634
_DTYPES = {"bfloat16": gl.bfloat16, "float16": gl.float16}


def find_prompt_tiles(spec: "KVCacheSpec", device: str, block_size: int) -> "PromptTiles | None":
    """None where the kernel does not run."""
    hopper = device.startswith("cuda") and torch.cuda.get_device_capability(device)[0] == 9
    serves = spec.dtype in _DTYPES and spec.head_dim in (64, 128) and BLOCK_N.value % block_size == 0
    return PromptTiles(spec, device, block_size) if hopper and serves else None


class PromptTiles:
    """A step's rows, uniform rows of one query each and prompts, in one launch that a graph may hold."""

    def __init__(self, spec: "KVCacheSpec", device: str, block_size: int) -> None:
        self._spec, self._block_size = spec, block_size
        self._counter = torch.zeros(2, dtype=torch.int32, device=device)
        self._step_sizes = torch.zeros(3, dtype=torch.int32, device=device)
        self._num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        dtype = _DTYPES[spec.dtype]
        self._queries = gl.NVMMASharedLayout.get_default_for([HALF.value, spec.head_dim], dtype)
        self._pages = gl.NVMMASharedLayout.get_default_for([block_size, HALF.value], dtype)

    def prepare(self, shape: "StepShape") -> None:
        """Before a step, or the replay of one of as many tokens."""
        decode_rows = shape.num_decode_rows if shape.decode_query_len == 1 else 0
        rows = shape.num_rows - decode_rows
        tiles = (shape.num_tokens - decode_rows) // TILE.value + rows
        step_sizes_kernel[(1,)](self._step_sizes, decode_rows, shape.num_rows, tiles, num_warps=1)

    def __call__(self, layer: "Attention", query: torch.Tensor, out: torch.Tensor, batch: "ForwardBatch") -> None:
        """Write ``out``; both are contiguous [num_tokens, num_heads, head_dim], the query rotated."""
        tokens, heads, dim = query.shape
        cache, half = layer.kv_cache, HALF.value
        prompts_kernel[(self._num_programs,)](
            TensorDescriptor(query, [tokens, heads * dim], [heads * dim, 1], [half, dim], self._queries),
            TensorDescriptor(query, [tokens * heads, dim], [dim, 1], [half, dim], self._queries),
            TensorDescriptor(cache, [cache.numel() // dim, dim], [dim, 1], [self._block_size, half], self._pages),
            out, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, self._counter, layer.scale * _LOG2_E,
            self._step_sizes, batch.block_table.stride(0), cache.shape[1],
            HEADS=heads, KV_HEADS=self._spec.num_kv_heads, HEAD_DIM=dim, BLOCK_SIZE=self._block_size,
            WINDOW=self._spec.sliding_window or 0, num_warps=4,
        )  # fmt: skip
