"""Reading a Hugging Face folder's safetensors files (github.com/huggingface/safetensors, the format's specification).

Contract: tensors come one at a time, shard by shard, each copied out of the file's map into memory of its own. A shard
that is missing or cut short is a ``ConfigError`` that names the file and a tensor in it. No pickle is ever opened.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig, WeightLoader

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsLoader(WeightLoader):
    """``load_format = "safetensors"``: one ``model.safetensors``, or shards with their index."""

    name: ClassVar[str] = "safetensors"

    def accepts(self, path: Path) -> bool:
        return path.is_dir() and ((path / INDEX).is_file() or any(path.glob("*.safetensors")))

    def weights(self, path: Path, config: ModelConfig) -> "Iterator[tuple[str, torch.Tensor]]":
        found = sorted(shards(path).items())
        for shard, names in found:
            check_shard(path / shard, names)
        for shard, names in found:
            yield from read_shard(path / shard, names)


def shards(folder: Path) -> dict[str, list[str] | None]:
    """The folder's shards by file name, each with the tensors that the index says it has (None: all in it).

    Raises:
        ConfigError: there are none, or the index cannot be read.
    """
    index = folder / INDEX
    if index.is_file():
        by_shard: dict[str, list[str] | None] = {}
        for tensor, shard in _weight_map(index).items():
            names = by_shard.setdefault(shard, [])
            assert names is not None
            names.append(tensor)
        return by_shard
    if (folder / SINGLE).is_file():
        return {SINGLE: None}
    found = [file.name for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]
    if not found:
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        reason = f"; {pickles[0]} is a pickle, which can run code and is never opened" if pickles else ""
        raise ConfigError(f"{folder} holds no safetensors file{reason}")
    return dict.fromkeys(found)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = dict(content["weight_map"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{index} is no index of safetensors files ({error}); fetch it again") from error
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConfigError(f"{index} names the shard {shard!r}, which is no file of the same folder")
    return weight_map


def check_shard(file: Path, names: list[str] | None) -> None:
    """Raise ConfigError if a file is missing or cut short; only its header is read, so big folders fail at once."""
    if not file.is_file():
        tensor = f" with the tensor {names[0]}" if names else ""
        raise ConfigError(f"the weights file {file}{tensor} is missing; fetch it again")
    try:
        reason = damage(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if reason:
        raise ConfigError(f"{file} cannot be read: {reason}; fetch it again")


def read_shard(file: Path, names: list[str] | None) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of one file, copies on the CPU.

    Raises:
        ConfigError: the file is damaged, or lacks a tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            held = opened.keys()
            if absent := set(names or ()).difference(held):
                raise ConfigError(f"{file} lacks the tensor {min(absent)}, which the index says is there")
            for name in names or held:
                yield name, opened.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; fetch it again") from error


def damage(file: Path) -> str | None:
    """What a cut file lacks, in a few words; None if it is whole, or damaged in another way than by its length."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        data_start = 8 + int.from_bytes(opened.read(8), "little")
        if size < max(data_start, 9):
            return f"it ends within its header, after {size} bytes"
        try:
            header: dict[str, Any] = json.loads(opened.read(data_start - 8))
            ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            return None
    cut = sorted((end, name) for name, end in ends.items() if data_start + end > size)
    if not cut:
        return None
    return f"it ends after {size} of {data_start + max(ends.values())} bytes, within the tensor {cut[0][1]}"
