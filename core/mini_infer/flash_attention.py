"""FlashAttention as it is installed, whichever build that is, behind one way to call it.

FlashAttention-3 (Shah et al., arXiv 2407.08608) serves compute capability 9, FlashAttention-2 (Dao, arXiv 2307.08691)
8.0 and newer. Their builds differ in names, in arguments and in the blocks that they take::

    module                 is                                   blocks            writes into a given output
    vfa3                   FlashAttention-3's kernels alone     any               yes
    flash_attn_interface   FlashAttention-3                     any               no
    flash_attn             flash-attn 2                         multiples of 256  no

Contract: importing this module imports none of them. The first in this order that is installed and runs on the card is
used. What a call launches depends on sizes and bounds that the host gives, never on the lengths themselves, so a call
over uniform rows may be captured in a device graph.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mini_infer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mini_infer.interfaces import KVCacheSpec

_LONGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of ``FlashAttention.__call__``."""

    query: "torch.Tensor"
    keys: "torch.Tensor"
    values: "torch.Tensor"
    out: "torch.Tensor"
    cu_seqlens_q: "torch.Tensor"
    seq_lens: "torch.Tensor"
    max_query_len: int
    max_seq_len: int
    block_table: "torch.Tensor | None"
    scale: float
    window: int
    uniform: bool

    @property
    def common(self) -> dict[str, Any]:
        """What all of the builds' functions in Python call alike."""
        window_size = (-1, -1) if self.window < 0 else (self.window, 0)
        return {"softmax_scale": self.scale, "causal": True, "window_size": window_size}


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """Causal attention of packed rows over paged keys and values, by one build."""

    _run: "Callable[[_Call], None]"

    def __call__(
        self,
        query: "torch.Tensor",
        keys: "torch.Tensor",
        values: "torch.Tensor",
        out: "torch.Tensor",
        *,
        cu_seqlens_q: "torch.Tensor",
        seq_lens: "torch.Tensor",
        max_query_len: int,
        max_seq_len: int,
        block_table: "torch.Tensor | None",
        scale: float,
        window: int,
        uniform: bool = False,
    ) -> None:
        """Write ``out`` [num_tokens, num_heads, head_dim] of the rows' tokens.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            keys: [num_blocks, block_size, num_kv_heads, head_dim], any strides but the last; without ``block_table``
                [num_tokens, num_kv_heads, head_dim], laid out like ``query``.
            values: as ``keys``.
            out: as ``query``; tokens of other rows stay as they are.
            cu_seqlens_q: [num_rows + 1] int32, where each row's tokens begin.
            seq_lens: [num_rows] int32.
            max_query_len: of any row.
            max_seq_len: an upper bound for any row.
            block_table: [num_rows, width] int32, or None if rows have no keys but those of this step.
            scale: on the scores.
            window: keys to the left that a query sees, or -1 for all.
            uniform: each row has ``max_query_len`` tokens, and there are no other tokens.
        """
        call = _Call(
            query, keys, values, out, cu_seqlens_q, seq_lens, max_query_len, max_seq_len, block_table, scale, window,
            uniform,
        )  # fmt: skip
        self._run(call)


@dataclass(frozen=True, slots=True)
class FlashBuild:
    """One way in which FlashAttention comes.

    Attributes:
        module: what is imported.
        title: what people call it.
        block_multiple: paged calls take blocks of a multiple of so many tokens.
        majors: first numbers of the compute capabilities that it runs on; empty for all from 8 on.
        adapt: the common function, of the imported module.
    """

    module: str
    title: str
    block_multiple: int
    majors: tuple[int, ...]
    adapt: "Callable[[Any], Callable[[_Call], None]]"

    def __str__(self) -> str:
        return f"{self.title} (module {self.module})"

    @property
    def is_installed(self) -> bool:
        """Whether there is such a module; it is not imported."""
        return find_spec(self.module) is not None

    def runs_on(self, major: int) -> bool:
        """Whether it has kernels for cards of this compute capability."""
        return major in self.majors if self.majors else major >= 8

    def load(self) -> FlashAttention:
        """Import it.

        Raises:
            ConfigError: it is broken.
        """
        try:
            return FlashAttention(self.adapt(import_module(self.module)))
        except (ImportError, OSError, AttributeError) as e:
            raise ConfigError(f"{self} is installed but cannot be used: {' '.join(str(e).split())}") from e


def missing_flash_attention() -> str | None:
    """What is missing if no build is installed, in one line; nothing is imported."""
    if any(build.is_installed for build in _BUILDS):
        return None
    return f"it needs one of {', '.join(map(str, _BUILDS))}: pip install 'mini-infer[flash]'"


def find_build(device: str) -> FlashBuild:
    """The installed build for a card.

    Raises:
        ConfigError: none is installed, or none of them runs there.
    """
    import torch

    missing = missing_flash_attention()
    if missing is not None:
        raise ConfigError(missing)
    major, minor = torch.cuda.get_device_capability(device)
    installed = [build for build in _BUILDS if build.is_installed]
    for build in installed:
        if build.runs_on(major):
            return build
    raise ConfigError(f"{', '.join(map(str, installed))} does not run on compute capability {major}.{minor}")


def misfit(spec: "KVCacheSpec") -> str | None:
    """What no build can do for such a cache, in one line, or None."""
    if spec.dtype not in ("float16", "bfloat16"):
        return f"FlashAttention does float16 and bfloat16, not {spec.dtype}"
    if spec.head_dim % 8 or spec.head_dim > _LONGEST_HEAD:
        return f"FlashAttention does head dims that are multiples of 8 up to {_LONGEST_HEAD}, not {spec.head_dim}"
    return None


def build_for_any_block(device: str) -> FlashBuild | None:
    """The installed build that takes blocks of any size on a card, or None."""
    import torch

    major, _ = torch.cuda.get_device_capability(device)
    return next((b for b in _BUILDS if b.is_installed and b.runs_on(major) and b.block_multiple == 1), None)


def find_flash_attention(spec: "KVCacheSpec", device: str) -> FlashAttention | None:
    """FlashAttention-3 over blocks of any size, or None if there is none or it cannot serve this cache.

    Raises:
        ConfigError: it is installed but broken.
    """
    build = None if misfit(spec) is not None else build_for_any_block(device)
    return None if build is None else build.load()


def _kernels_of_3(module: Any) -> "Callable[[_Call], None]":
    return partial(_call_kernels_of_3, module.fwd)


def _call_kernels_of_3(fwd: Any, call: _Call) -> None:
    """The operator as vLLM's build has it; its arguments have no names but their order."""
    paged = call.block_table is not None
    fwd(
        call.query, call.keys, call.values, None, None, None, call.out,
        call.cu_seqlens_q, None if paged else call.cu_seqlens_q, None, None, call.seq_lens if paged else None,
        call.max_query_len, call.max_seq_len, call.block_table, None, None, None, None, None, None, None, None,
        call.scale, True, call.window, -1 if call.window < 0 else 0, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip


def _version_3(module: Any) -> "Callable[[_Call], None]":
    return partial(_call_version_3, module.flash_attn_with_kvcache, module.flash_attn_varlen_func)


def _call_version_3(with_kvcache: Any, varlen: Any, call: _Call) -> None:
    starts, longest = call.cu_seqlens_q, call.max_query_len
    if call.block_table is None:
        found = varlen(call.query, call.keys, call.values, starts, starts, longest, longest, **call.common)
    else:
        found = with_kvcache(
            call.query, call.keys, call.values, cache_seqlens=call.seq_lens, page_table=call.block_table,
            cu_seqlens_q=starts, max_seqlen_q=longest, **call.common,
        )  # fmt: skip
    _put(found, call)


def _version_2(module: Any) -> "Callable[[_Call], None]":
    return partial(_call_version_2, module.flash_attn_with_kvcache, module.flash_attn_varlen_func)


def _call_version_2(with_kvcache: Any, varlen: Any, call: _Call) -> None:
    starts, longest, table = call.cu_seqlens_q, call.max_query_len, call.block_table
    if table is None:
        found = varlen(call.query, call.keys, call.values, starts, starts, longest, longest, **call.common)
    elif call.uniform:  # this call splits long sequences over the card, the next does not
        rows = call.query.view(-1, longest, *call.query.shape[1:])
        found = with_kvcache(
            rows, call.keys, call.values, cache_seqlens=call.seq_lens, block_table=table, **call.common
        ).flatten(0, 1)
    else:
        key_starts = starts.new_zeros(len(starts))
        key_starts[1:] = call.seq_lens.cumsum(0)
        found = varlen(
            call.query, call.keys, call.values, starts, key_starts, longest, call.max_seq_len, block_table=table,
            **call.common,
        )  # fmt: skip
    _put(found, call)


def _put(found: Any, call: _Call) -> None:
    """Copy the rows' tokens of what a build gave, which in some versions is the first of several things."""
    import torch

    found = found[0] if isinstance(found, tuple) else found
    if call.uniform:
        call.out.copy_(found)
        return
    token = torch.arange(len(call.out), device=call.out.device)
    asked = (token >= call.cu_seqlens_q[0]) & (token < call.cu_seqlens_q[-1])
    torch.where(asked[:, None, None], found, call.out, out=call.out)


_BUILDS = (
    FlashBuild("vfa3", "FlashAttention-3's kernels", 1, (9,), _kernels_of_3),
    FlashBuild("flash_attn_interface", "FlashAttention-3", 1, (9,), _version_3),
    FlashBuild("flash_attn", "flash-attn 2", 256, (), _version_2),
)
