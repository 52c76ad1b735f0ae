"""The KV cache's size, and what is said where memory does not suffice."""

import gc
from typing import Any

import pytest
import torch

from mini_infer.build import builder
from mini_infer.build.kv_memory import (
    DeviceMemory,
    expect_weights_fit,
    free_memory,
    memory_errors_in_plain_words,
    plan_kv_memory,
)
from mini_infer.build.largest_step import largest_plan, peak_bytes, run_step
from mini_infer.errors import ConfigError
from mini_infer.interfaces import BatchLimits, KVCacheSpec
from mini_infer.settings import EngineSettings
from mini_infer.testing import make_engine

SPECS = [KVCacheSpec("full", 2, 16, 16, "float32")] * 2
BLOCK = 16 * 2 * 2 * 2 * 16 * 4  # tokens x layers x (key, value) x heads x width x bytes
GIB = 2**30
CARD = DeviceMemory("cuda:0", 10 * GIB, 16 * GIB, step=3 * GIB, runner=GIB)


def plan(memory: DeviceMemory | None = None, model_max_len: int = 128, **engine: Any) -> Any:
    settings = EngineSettings(**engine)
    memory = memory or DeviceMemory("cpu", *free_memory("cpu"))
    return plan_kv_memory(
        settings, SPECS, block_size=settings.block_size or 16, memory=memory, model_max_len=model_max_len
    )


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


def test_a_gpu_gives_nine_tenths_of_what_the_largest_step_leaves() -> None:
    found = plan(CARD, model_max_len=2**17)
    assert found.num_blocks == int(0.9 * 6 * GIB) // BLOCK
    assert found.note == (
        "KV cache: 707788 blocks of 16 = 11324608 tokens, 5.4 GiB (engine.kv_cache_memory = auto); max_model_len "
        "131072; up to 86 requests at full length; the largest step takes 3 GiB (measured); 1 GiB are kept for the "
        "step runner"
    )
    assert plan(CARD, max_num_seqs=2).num_blocks == 2 * 128 // 16, "no more than can be filled"


def test_a_share_is_one_of_what_is_left() -> None:
    found = plan(CARD, model_max_len=2**17, kv_cache_memory="0.5")
    assert found.num_blocks == 3 * GIB // BLOCK
    assert "3 GiB (engine.kv_cache_memory = 0.5 of 6 GiB)" in found.note
    assert "up to 48 requests at full length" in found.note
    assert plan(CARD, model_max_len=2**17, kv_cache_memory="1.0").num_blocks == 6 * GIB // BLOCK - 1, "the null block"
    assert plan(CARD, max_num_seqs=2, kv_cache_memory="0.5").num_blocks == 2 * 128 // 16, "no more than can be filled"


@pytest.mark.parametrize("engine", [{"kv_cache_memory": "7GiB"}, {"num_kv_blocks": 7 * GIB // BLOCK}])
def test_what_is_set_must_fit_beside_the_largest_step(engine: dict[str, Any]) -> None:
    (setting,) = engine
    with pytest.raises(ConfigError) as refused:
        plan(CARD, **engine)
    assert str(refused.value) == (
        "the KV cache does not fit: 917504 blocks need 7 GiB, 6 GiB are free on cuda:0 beside the 3 GiB of the largest "
        f"step and the 1 GiB of the step runner: lower engine.{setting}, engine.max_num_batched_tokens or "
        "engine.max_num_seqs"
    )


def test_a_card_with_no_room_for_one_sequence() -> None:
    tiny = DeviceMemory("cuda:0", 10 * BLOCK, GIB, step=5 * BLOCK)
    with pytest.raises(
        ConfigError, match=r"one sequence .* 128 needs 64 KiB, .* are free on cuda:0 beside the 40 KiB of"
    ):
        plan(tiny, max_model_len=128)
    assert plan(tiny).max_model_len == 4 * 16
    with pytest.raises(
        ConfigError, match=r"one block needs 8 KiB, 0 B are free .*: lower engine\.block_size, engine\.max"
    ):
        plan(DeviceMemory("cuda:0", 10 * BLOCK, GIB, step=GIB))


@pytest.mark.parametrize(
    ("rows", "tokens", "blocks", "drafts", "lens"),
    [
        (4, 18, 100, 0, [5, 5, 4, 4]),
        (4, 3, 100, 0, [1, 1, 1]),
        (2, 100, 2, 0, [17, 17]),  # a sequence may end right after the first block
        (2, 10, 100, 3, [2, 2]),
        (4, 3, 100, 7, [1]),
    ],
)
def test_the_largest_step_fills_the_budget(rows: int, tokens: int, blocks: int, drafts: int, lens: list[int]) -> None:
    made = largest_plan(BatchLimits(rows, tokens, blocks, 16), drafts)
    assert [grant.num_tokens for grant in made.grants] == lens == [len(row.token_ids) for row in made.new]
    assert all(grant.samples for grant in made.grants)
    assert made.num_tokens <= tokens


def test_the_largest_step_runs_over_the_null_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build as it goes on a GPU, its memory made up."""
    taken = []

    def peak(run: Any, device: str) -> int:
        run()
        taken.append(device)
        return GIB

    monkeypatch.setattr(builder, "is_measured", lambda device: True)
    monkeypatch.setattr(builder, "peak_bytes", peak)
    monkeypatch.setattr(builder, "free_memory", lambda device: (2 * GIB, 8 * GIB))
    built = make_engine("toy", max_num_seqs=3, max_num_batched_tokens=50, kv_cache_memory="0.5")
    assert taken == ["cpu"]
    (note,) = [line for line in built.log if line.startswith("KV cache")]
    assert "(engine.kv_cache_memory = 0.5 of 1 GiB)" in note and "the largest step takes 1 GiB (measured)" in note
    with pytest.raises(ConfigError, match="1 GiB are free on cpu beside the 1 GiB of the largest step: lower engine"):
        make_engine("toy", kv_cache_memory="1.5GiB")


def test_the_peak_is_what_the_allocator_held(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 12)
    assert peak_bytes(lambda: done.append("run"), "cuda:0") == 7
    assert done == ["empty_cache", "reset_peak_memory_stats", "run", "empty_cache"]

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.raises(
        ConfigError, match=r"^the largest step does not fit .* on cuda:0: lower engine\.max_num_batched"
    ):
        peak_bytes(too_large, "cuda:0")


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


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_largest_step_is_measured_on_a_gpu(drafts: int) -> None:
    gc.collect()  # what an engine before this one has left is no room that the step finds
    built = make_engine("toy", device="cuda", max_num_seqs=8, max_num_batched_tokens=256)
    (note,) = [line for line in built.log if line.startswith("KV cache")]
    assert "(measured)" in note
    worker = built.engine._executor._inner._worker  # type: ignore[attr-defined]
    plan = largest_plan(BatchLimits(8, 256, 512 // 16, 16), drafts)
    assert peak_bytes(lambda: run_step(worker, plan), "cuda:0") < GIB
