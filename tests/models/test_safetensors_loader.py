"""Reading safetensors folders: shards, damage, and pickles that are never opened."""

import json
from pathlib import Path

import pytest
import torch

from mini_infer.errors import ConfigError
from mini_infer.interfaces import ModelConfig
from mini_infer.model.loading import choose_loader
from mini_infer.testing.models import save_shards
from mini_infer_models.safetensors.loader import SafetensorsLoader

CONFIG = ModelConfig({}, torch.float32, "cpu", 16, 16)
TENSORS = {f"layer.{i}.weight": torch.full((32, 8), float(i)) for i in range(6)}
TENSORS["half"] = torch.ones(3, dtype=torch.bfloat16)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(SafetensorsLoader().weights(folder, CONFIG))


@pytest.fixture(params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_shards(tmp_path, TENSORS, request.param)
    return tmp_path


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def test_brings_every_tensor_in_its_own_dtype(folder: Path) -> None:
    found = read(folder)
    assert found.keys() == TENSORS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_tensors_outlive_the_file(folder: Path) -> None:
    found = read(folder)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"\0" * file.stat().st_size)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_shards_without_an_index_are_all_read(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, 3)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout of the same weights")
    assert read(tmp_path).keys() == TENSORS.keys()


def test_a_cut_file_is_named_with_the_tensor(folder: Path) -> None:
    file = shard(folder)
    content = file.read_bytes()
    file.write_bytes(content[:-1500])
    with pytest.raises(
        ConfigError, match=rf"{file.name} cannot be read: it ends after .* within the tensor layer\.\d"
    ) as e:
        read(folder)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("keep", "message"), [(100, "ends within its header"), (3, "ends within its header"), (0, "ends")]
)
def test_a_file_cut_in_its_header(keep: int, message: str, folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=rf"{file.name} cannot be read: .*{message}"):
        read(folder)


def test_a_damaged_header(folder: Path) -> None:
    file = shard(folder)
    content = bytearray(file.read_bytes())
    content[8:40] = b"x" * 32
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file.name} cannot be read"):
        read(folder)


@pytest.mark.parametrize("header", ["[" * 100_000, '{"a": {"data_offsets": ["x", "y"]}}'], ids=["deep", "text"])
def test_a_header_that_makes_no_sense(header: str, tmp_path: Path) -> None:
    content = len(header).to_bytes(8, "little") + header.encode()
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read: .*; fetch it again"):
        read(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_shards(tmp_path, TENSORS)

    def locked(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)  # root may read all
    with pytest.raises(ConfigError, match=r"\.safetensors cannot be read: Permission denied$"):
        read(tmp_path)


def test_a_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, 3)
    shard(tmp_path).unlink()
    with pytest.raises(
        ConfigError, match=r"model-00003-of-00003.safetensors with the tensor layer.2.weight is missing"
    ):
        read(tmp_path)


def test_an_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    save_shards(tmp_path, TENSORS, 3)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"model-00001-of-00003.safetensors lacks the tensor ghost"):
        read(tmp_path)


@pytest.mark.parametrize("content", ["not JSON", "[]", "{}", '{"weight_map": {"a": "../elsewhere.safetensors"}}'])
def test_a_bad_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"index\.json"):
        read(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    loader = SafetensorsLoader()
    assert not loader.accepts(tmp_path)
    for attempt in (lambda: choose_loader([loader], tmp_path), lambda: read(tmp_path)):
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin.* pickle"):
            attempt()


def test_accepts_by_name(tmp_path: Path, folder: Path) -> None:
    loader = SafetensorsLoader()
    assert loader.accepts(folder)
    assert choose_loader([loader], folder) is loader
    assert choose_loader([loader], folder, "safetensors") is loader
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not loader.accepts(empty)
    with pytest.raises(ConfigError, match=r"no weights that a loader knows \(loaders: safetensors\)"):
        choose_loader([loader], empty)
    with pytest.raises(ConfigError, match="load_format 'gguv' is unknown; known: auto, safetensors"):
        choose_loader([loader], folder, "gguv")
