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

GPU_SHARE_OF_LEFT = 0.9
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


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device has, in bytes; what the weights take is not free any more.

    Attributes:
        device: torch device string.
        free: by the device's own account.
        total: used or not.
        step: what the largest step takes of ``free``, measured; 0 on a CPU.
        runner: what the step runner will take of it.
    """

    device: str
    free: int
    total: int
    step: int = 0
    runner: int = 0

    @property
    def left(self) -> int:
        """What the KV cache may take."""
        return max(0, self.free - self.step - self.runner)

    def __str__(self) -> str:
        kept = ((self.step, "the largest step"), (self.runner, "the step runner"))
        beside = " and ".join(f"the {size(num_bytes)} of {whose}" for num_bytes, whose in kept if num_bytes)
        return f"{size(self.left)} are free on {self.device}" + (f" beside {beside}" if beside else "")

    def lower(self, setting: str) -> str:
        """Which settings to lower where ``setting`` asks for too much."""
        if not self.step:
            return f"lower {setting}"
        return f"lower {setting}, engine.max_num_batched_tokens or engine.max_num_seqs"


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


def longest_sequence(settings: "EngineSettings", model_max_len: int) -> int:
    """``max_model_len`` before it is seen what fits.

    Args:
        settings: the engine's.
        model_max_len: what the checkpoint was made for.

    Raises:
        ConfigError: it is set to more than that.
    """
    wanted = model_max_len if settings.max_model_len == "auto" else settings.max_model_len
    if wanted > model_max_len:
        raise ConfigError(
            f"engine.max_model_len {wanted} is more than the {model_max_len} tokens that the model was made for"
        )
    return wanted


def plan_kv_memory(
    settings: "EngineSettings",
    specs: "Sequence[KVCacheSpec]",
    *,
    block_size: int,
    memory: DeviceMemory,
    model_max_len: int,
) -> KVMemoryPlan:
    """Resolve ``num_kv_blocks``, ``kv_cache_memory`` and ``max_model_len`` together.

    Args:
        settings: the engine's.
        specs: one a layer.
        block_size: tokens a block.
        memory: the device's.
        model_max_len: what the checkpoint was made for.

    Raises:
        ConfigError: it does not fit.
    """
    per_block, wanted_len = block_bytes(specs, block_size), longest_sequence(settings, model_max_len)
    if per_block > memory.left:
        raise _does_not_fit(
            f"one block needs {size(per_block)}, {memory}: {memory.lower('engine.block_size')} or free memory"
        )
    num_blocks, why = _num_blocks(settings, per_block, settings.max_num_seqs * -(-wanted_len // block_size), memory)
    needed, given = (num_blocks + 1) * per_block, num_blocks * per_block
    if needed > memory.left:
        lower = memory.lower(why.partition(" ")[0])
        raise _does_not_fit(f"{num_blocks} blocks need {size(needed)}, {memory}: {lower}")
    max_model_len, shrunk = wanted_len, ""
    room = num_blocks * block_size
    if room < wanted_len and settings.max_model_len == "auto":
        max_model_len, shrunk = room, f" (shrunk from {wanted_len} to fit)"
    elif room < wanted_len and settings.num_kv_blocks is None:
        sequence = size(-(-wanted_len // block_size) * per_block)
        raise _does_not_fit(
            f"one sequence of engine.max_model_len {wanted_len} needs {sequence}, "
            f"{why} gives {size(given)}; {memory}: lower engine.max_model_len or raise engine.kv_cache_memory"
        )
    if num_blocks < 1:
        raise _does_not_fit(
            f"one block needs {size(per_block)}, {why} gives less: raise engine.kv_cache_memory or lower "
            "engine.block_size"
        )
    batch = min(settings.max_num_seqs, num_blocks // -(-max_model_len // block_size))
    note = (
        f"KV cache: {num_blocks} blocks of {block_size} = {room} tokens, {size(given)} ({why}); "
        f"max_model_len {max_model_len}{shrunk}; up to {batch} requests at full length"
    )
    if memory.step:
        note += f"; the largest step takes {size(memory.step)} (measured)"
    if memory.runner:
        note += f"; {size(memory.runner)} are kept for the step runner"
    return KVMemoryPlan(num_blocks, per_block, max_model_len, note)


def _num_blocks(settings: "EngineSettings", per_block: int, useful: int, memory: DeviceMemory) -> tuple[int, str]:
    """Blocks, and what says so. ``useful`` is what all requests together can fill."""
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks, "engine.num_kv_blocks"
    wanted, share = settings.kv_cache_memory, parse_share(settings.kv_cache_memory)
    if wanted == "auto" and memory.device == "cpu":
        num_bytes = min(CPU_MOST, int(memory.total * CPU_SHARE_OF_TOTAL), memory.left)
    elif wanted == "auto":
        num_bytes = int(memory.left * GPU_SHARE_OF_LEFT)
    elif share is not None:
        num_bytes = min(int(memory.left * share), memory.left - per_block)  # the null block's is not counted
    else:
        return parse_size(wanted) // per_block, "engine.kv_cache_memory"
    of = "" if share is None else f" of {size(memory.left)}"
    return min(num_bytes // per_block, useful), f"engine.kv_cache_memory = {wanted}{of}"


def _does_not_fit(why: str) -> ConfigError:
    return ConfigError(f"the KV cache does not fit: {why}")
