"""GPUs that are not there: what torch would say of them, for the errors that are told before one is used."""

from typing import Any

import pytest
import torch


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch,
    count: int = 1,
    *,
    capability: tuple[int, int] = (9, 0),
    name: str = "Some Card",
    arch_list: tuple[str, ...] = ("sm_75", "sm_80", "sm_90"),
    init_error: Exception | None = None,
) -> None:
    """Let torch be built with CUDA and see ``count`` GPUs; ``init_error`` is what its start raises."""

    def init() -> None:
        if init_error is not None:
            raise init_error

    answers: dict[str, Any] = {
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "get_arch_list": lambda: list(arch_list),
        "init": init,
    }
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, answer)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
