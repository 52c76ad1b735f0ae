"""The KV cache's size, and what is said where memory does not suffice."""

from typing import Any

import pytest
import torch

from mini_infer.build.kv_memory import expect_weights_fit, memory_errors_in_plain_words, plan_kv_memory
from mini_infer.errors import ConfigError
from mini_infer.interfaces import KVCacheSpec
from mini_infer.settings import EngineSettings

SPECS = [KVCacheSpec("full", 2, 16, 16, "float32")] * 2
BLOCK = 16 * 2 * 2 * 2 * 16 * 4  # tokens x layers x (key, value) x heads x width x bytes


def plan(**engine: Any) -> Any:
    settings = EngineSettings(**engine)
    block_size = settings.block_size or 16
    return plan_kv_memory(settings, SPECS, block_size=block_size, device="cpu", model_max_len=128)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    found = plan(num_kv_blocks=3)
    assert (found.num_blocks, found.block_bytes, found.max_model_len) == (3, BLOCK, 48)
    assert "shrunk from 128" in found.note
    assert plan(num_kv_blocks=3, max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            {"num_kv_blocks": 10**9},
            r"1000000000 blocks need 7629 GiB, .* free on cpu: lower engine\.num_kv_blocks$",
        ),
        ({"kv_cache_memory": "99TiB"}, r"need .* GiB, .* GiB are free on cpu: lower engine\.kv_cache_memory$"),
        (
            {"kv_cache_memory": "0"},
            r"one block needs 8 KiB, .* raise engine\.kv_cache_memory or lower",
        ),
        ({"block_size": 10**12}, r"one block needs .* are free on cpu: lower engine\.block_size or free memory$"),
        (
            {"kv_cache_memory": "16KiB", "max_model_len": 128},
            r"lower engine\.max_model_len or raise",
        ),
    ],
)
def test_what_does_not_fit_says_which_setting_to_change(engine: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^the KV cache does not fit: .*{told}"):
        plan(**engine)


def test_a_share_of_what_is_free_after_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_infer.build.kv_memory.free_memory", lambda device: (100 * BLOCK, 200 * BLOCK))
    engine = EngineSettings(kv_cache_memory="0.5")
    for reserved, num_blocks in ((0, 50), (60 * BLOCK, 20)):
        found = plan_kv_memory(engine, SPECS, block_size=16, device="cuda:0", model_max_len=128, reserved=reserved)
        assert found.num_blocks == num_blocks
        assert ("480 KiB are kept for steps, as measured" in found.note) == bool(reserved)
    engine = EngineSettings(num_kv_blocks=50)
    with pytest.raises(ConfigError, match=r"50 blocks need 408 KiB, 320 KiB are free on cuda:0: lower engine\.num_kv_"):
        plan_kv_memory(engine, SPECS, block_size=16, device="cuda:0", model_max_len=128, reserved=60 * BLOCK)


def test_weights_are_counted_before_memory_is_asked_for() -> None:
    with torch.device("meta"):
        huge, small = torch.nn.Linear(2**22, 2**22), torch.nn.Linear(2, 2)
    expect_weights_fit(small, "cpu")
    with pytest.raises(ConfigError, match=r"weights need 6\.554e\+04 GiB, .* are free on cpu: free memory, or choose"):
        expect_weights_fit(huge, "cpu")


def test_memory_that_ran_out_is_one_plain_line() -> None:
    with pytest.raises(ConfigError, match=r"^memory ran out while the engine was"), memory_errors_in_plain_words():
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="something else"), memory_errors_in_plain_words():
        raise RuntimeError("something else")
