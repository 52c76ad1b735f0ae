"""What holds for all tests: one thread, no download, repeatable Hypothesis, and counts by ``MINI_INFER_TEST_FULL``."""

import os

import pytest
from hypothesis import HealthCheck, settings

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

for name, examples in (("quick", 60), ("full", 500)):
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=SLOW_IS_FINE,
    )
settings.load_profile("full" if FULL else "quick")

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wants_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if wants_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in wants_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if not FULL:
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="only in make test-full"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
