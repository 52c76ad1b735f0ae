"""How much memory the KV cache takes: from settings, the model's layers and what is free, to a number of blocks.

Contract: nothing is allocated here. What does not fit is a ``ConfigError`` that says what is needed, what is free and
which setting to lower. ``max_model_len = "auto"`` shrinks to what fits; a number never does.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mini_infer.errors import ConfigError
from mini_infer.settings import parse_share, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from mini_infer.interfaces.model import KVCacheSpec
    from mini_infer.settings import EngineSettings

GPU_SHARE_OF_FREE = 0.9
CPU_SHARE_OF_TOTAL = 0.1
CPU_MOST = 2 * 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class KVMemoryPlan:
    """The pool's size.

    Attributes:
        num_blocks: null block not counted.
        block_bytes: of all layers.
        max_model_len: resolved.
        note: one line for the start log.
    """

    num_blocks: int
    block_bytes: int
    max_model_len: int
    note: str


def size(num_bytes: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def block_bytes(specs: "Sequence[KVCacheSpec]", block_size: int) -> int:
    """Bytes of one block in every layer."""
    return block_size * sum(spec.numbers_per_token * _BYTES[spec.dtype] for spec in specs)


def free_memory(device: str) -> tuple[int, int]:
    """(free, total) bytes of a device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, total
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), total


def expect_weights_fit(on_paper: "nn.Module", device: str) -> None:
    """Refuse a model before its memory is asked for: an operating system may grant what it cannot give.

    Raises:
        ConfigError: its parameters are larger than what is free.
    """
    needed, (free, _) = sum(parameter.nbytes for parameter in on_paper.parameters()), free_memory(device)
    if needed > free:
        raise ConfigError(
            f"the model does not fit: its weights need {size(needed)}, {size(free)} are free on {device}: "
            "free memory, or choose a smaller model or engine.dtype"
        )


@contextmanager
def memory_errors_in_plain_words() -> "Iterator[None]":
    """Raises: ConfigError: where torch or Python found no memory."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for the CPU.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ConfigError(
            "memory ran out while the engine was built: lower engine.max_model_len, engine.max_num_seqs, "
            "engine.max_num_batched_tokens or the KV cache's size, or choose a smaller model"
        ) from error


def plan_kv_memory(
    settings: "EngineSettings",
    specs: "Sequence[KVCacheSpec]",
    *,
    block_size: int,
    device: str,
    model_max_len: int,
    reserved: int = 0,
) -> KVMemoryPlan:
    """Resolve ``num_kv_blocks``, ``kv_cache_memory`` and ``max_model_len`` together.

    Args:
        settings: the engine's.
        specs: one a layer.
        block_size: tokens a block.
        device: torch device string.
        model_max_len: what the checkpoint was made for.
        reserved: bytes that must stay free for steps and plugins, as measured.

    Raises:
        ConfigError: it does not fit.
    """
    per_block = block_bytes(specs, block_size)
    free, total = free_memory(device)
    free = max(0, free - reserved)
    wanted_len = model_max_len if settings.max_model_len == "auto" else settings.max_model_len
    if wanted_len > model_max_len:
        raise ConfigError(
            f"engine.max_model_len {wanted_len} is more than the {model_max_len} tokens that the model was made for"
        )
    if per_block > free:
        raise ConfigError(
            f"the KV cache does not fit: one block needs {size(per_block)}, {size(free)} are free on {device}: "
            "lower engine.block_size or free memory"
        )
    useful = settings.max_num_seqs * -(-wanted_len // block_size)
    if settings.num_kv_blocks is not None:
        num_blocks, why = settings.num_kv_blocks, "engine.num_kv_blocks"
    elif (share := parse_share(settings.kv_cache_memory)) is not None:
        num_blocks, why = min(int(free * share) // per_block, useful), "engine.kv_cache_memory"
    elif settings.kv_cache_memory != "auto":
        num_blocks, why = parse_size(settings.kv_cache_memory) // per_block, "engine.kv_cache_memory"
    elif device == "cpu":
        budget = min(CPU_MOST, int(total * CPU_SHARE_OF_TOTAL), free)
        num_blocks, why = min(budget // per_block, useful), "engine.kv_cache_memory = auto"
    else:
        num_blocks, why = min(int(free * GPU_SHARE_OF_FREE) // per_block, useful), "engine.kv_cache_memory = auto"
    needed = (num_blocks + 1) * per_block
    if needed > free:
        raise ConfigError(
            f"the KV cache does not fit: {num_blocks} blocks need {size(needed)}, {size(free)} are free on {device}: "
            f"lower {why.partition(' ')[0]}"
        )
    max_model_len, shrunk = wanted_len, ""
    room = num_blocks * block_size
    if room < wanted_len and settings.max_model_len == "auto":
        max_model_len, shrunk = room, f" (shrunk from {wanted_len} to fit)"
    elif room < wanted_len and settings.num_kv_blocks is None:
        blocks_needed = -(-wanted_len // block_size)
        raise ConfigError(
            f"the KV cache does not fit: one sequence of engine.max_model_len {wanted_len} needs "
            f"{size(blocks_needed * per_block)}, {why} gives {size(num_blocks * per_block)} of {size(free)} free on "
            f"{device}: lower engine.max_model_len or raise engine.kv_cache_memory"
        )
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache does not fit: one block needs {size(per_block)}, {why} gives less: "
            "raise engine.kv_cache_memory or lower engine.block_size"
        )
    note = (
        f"KV cache: {num_blocks} blocks of {block_size} = {room} tokens, {size(num_blocks * per_block)} ({why}); "
        f"max_model_len {max_model_len}{shrunk}; {max(1, room // max_model_len)} requests at full length"
        + (f"; {size(reserved)} are kept for steps, as measured" if reserved else "")
    )
    return KVMemoryPlan(num_blocks, per_block, max_model_len, note)
