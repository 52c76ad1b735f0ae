"""The profile run, with the CPU in a GPU's place: what it runs, and that it leaves nothing behind."""

import json
from typing import Any

import pytest
import torch

from mini_infer.build import profile_run
from mini_infer.layers import Attention
from mini_infer.model.config import make_model_config
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.sampling.state import SamplingState
from mini_infer.testing import tiny_model
from mini_infer.testing.toy_model import ToyAdapter


class Meter:
    """``torch.cuda``'s memory statistics: each question is answered with one more MiB."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, device: Any = None) -> int:
        self.asked += 1
        return self.asked * 2**20


class Watched(ReferenceSampler):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[int] = []

    def sample(self, logits: torch.Tensor, rows: Any, state: SamplingState) -> torch.Tensor:
        self.drawn.append(logits.shape[0])
        return super().sample(logits, rows, state)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    meter = Meter()
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, meter)
    return meter


def test_the_largest_step_and_drawing_for_every_request(meter: Meter) -> None:
    described = json.loads((tiny_model("toy") / "config.json").read_text())
    config = make_model_config(described, device="cpu", dtype="float32")
    model: Any = ToyAdapter().build(config)
    seen: list[int] = []
    forward = model.forward
    model.forward = lambda ids, positions, batch: (seen.append(len(ids)), forward(ids, positions, batch))[1]
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    state = SamplingState(4, config.vocab_size, "cpu", invalid_token_ids=[])
    before = {name: column.clone() for name, column in vars(state).items() if isinstance(column, torch.Tensor)}
    sampler = Watched()
    taken = profile_run.measure_step(model, layers, sampler, state, num_tokens=100, num_rows=4, device="cpu")
    assert taken == 2**20
    assert seen == [100] and sampler.drawn == [4]
    assert not any("backend" in vars(layer) for layer in layers)
    assert not state.sampled_slots
    for name, column in before.items():
        assert torch.equal(getattr(state, name), column), name
