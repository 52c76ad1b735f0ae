"""Random weights: in place, repeatable, of the wanted spread, for any module."""

from pathlib import Path

import torch
from torch import nn

from mini_infer.model.config import make_model_config
from mini_infer.model.loading import choose_loader, load_module
from mini_infer.testing.models import tiny_config
from mini_infer_models.qwen2.model import Qwen2Adapter
from mini_infer_models.random_weights.loader import RandomLoader
from mini_infer_models.safetensors.loader import SafetensorsLoader


def load(loader: RandomLoader, dtype: str = "float32") -> nn.Module:
    config = make_model_config(tiny_config("qwen2", hidden_size=128, num_hidden_layers=1), device="cpu", dtype=dtype)
    return load_module(Qwen2Adapter(), loader, Path("no such folder"), config)


def test_every_parameter_is_set() -> None:
    for name, parameter in load(RandomLoader(std=0.1, seed=3)).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert 0.05 < parameter.std() < 0.2, name


def test_even_noise() -> None:
    for name, parameter in load(RandomLoader(uniform=0.001, seed=3)).named_parameters():
        assert 0.0009 < parameter.abs().max() <= 0.001, name
        assert abs(parameter.mean()) < 0.0002, name


def test_the_seed_decides() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([p.flatten() for p in load(RandomLoader(seed=seed)).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_bfloat16() -> None:
    assert {p.dtype for p in load(RandomLoader(), "bfloat16").parameters()} == {torch.bfloat16}


def test_chosen_by_name_only(tmp_path: Path) -> None:
    loaders = [RandomLoader(), SafetensorsLoader()]
    (tmp_path / "model.safetensors").touch()
    assert choose_loader(loaders, tmp_path) is loaders[1]
    assert choose_loader(loaders, tmp_path, "random") is loaders[0]
