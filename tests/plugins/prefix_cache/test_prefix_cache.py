"""Blocks shared by content: the contract, tokens as without, what is computed again and what is not."""

import os
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.testing.contracts import cache_policy_suite
from mini_infer.testing.engines import assert_idle, make_engine, run_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import check_traffic, random_traffic
from mini_infer_plugins.prefix_cache.eviction import LeastFrequent, LeastRecent, LeastWorth, Segmented
from mini_infer_plugins.prefix_cache.policy import PrefixCache

NUM_TRAFFICS = 100 if os.environ.get("MINI_INFER_TEST_FULL") == "1" else 8
VOCAB_SIZE, BLOCK = 256, 16
EVICTIONS = ("lru", "lfu", "slru", "cost")

TestLru = cache_policy_suite(lambda: PrefixCache(LeastRecent()))
TestLfu = cache_policy_suite(lambda: PrefixCache(LeastFrequent()))
TestSlru = cache_policy_suite(lambda: PrefixCache(Segmented(0.8)))
TestCost = cache_policy_suite(lambda: PrefixCache(LeastWorth(64)))


def engine_of(eviction: str = "lru", model: Any = "llama", plugins: tuple[str, ...] = (), **engine: Any) -> Any:
    plugin = {"prefix-cache": {"eviction": eviction}}
    return make_engine(model, plugins=["prefix-cache", *plugins], plugin=plugin, **engine).engine


def request(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params)


def tokens(seed: int, count: int) -> list[int]:
    return Random(seed).choices(range(VOCAB_SIZE), k=count)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_random_traffic(eviction: str) -> None:
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, head_dim=8)
    equality = Equality(reference_of(model))
    num_cached = 0

    @settings(max_examples=NUM_TRAFFICS)
    @given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), chunks=st.booleans())
    def run(rng: Random, overlap: bool, chunks: bool) -> None:
        nonlocal num_cached
        traffic = random_traffic(rng, VOCAB_SIZE)
        plugins = ("chunked-prefill",) if chunks else ()
        engine = engine_of(eviction, model, plugins, overlap=overlap, **traffic.engine)
        num_cached += sum(output.num_cached_tokens for output in check_traffic(engine, traffic, equality).values())

    run()
    assert num_cached > NUM_TRAFFICS, f"{num_cached} tokens were hits: the prompts share too little"


@pytest.mark.parametrize("plugins", [(), ("cpu-attention", "cpu-kernels", "chunked-prefill")], ids=["plain", "cpu"])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_arrive_together_share_what_they_have_in_common(overlap: bool, plugins: tuple[str, ...]) -> None:
    """One computes it, also where a chunk ends in its midst; each of the others its own end alone."""
    stem = tokens(1, 5 * BLOCK)
    requests = [request(str(i), stem + tokens(10 + i, 3)) for i in range(4)] + [request("same", stem + tokens(10, 3))]
    for budget in (512, 60):
        engine = engine_of(plugins=plugins, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=8)
        outputs = run_engine(engine, requests)
        Equality(reference_of(tiny_model("llama"))).check(requests, outputs)
        cached = [outputs[r.request_id].num_cached_tokens for r in requests]
        assert cached[0] == 0
        assert all(num >= (5 if budget == 512 else 3) * BLOCK for num in cached[1:]), cached
        assert_idle(engine)


def test_a_prompt_that_is_cached_whole_computes_its_last_token() -> None:
    engine = engine_of()
    prompt = tokens(2, 4 * BLOCK + 1)
    run_engine(engine, [request("a", prompt)])
    again = run_engine(engine, [request("b", prompt)])["b"]
    assert again.num_cached_tokens == 4 * BLOCK
    shorter = run_engine(engine, [request("c", prompt[: 4 * BLOCK])])["c"]
    assert shorter.num_cached_tokens == 3 * BLOCK, "its last token's logits are wanted, so its last block is computed"


def test_a_chat_computes_little_more_than_its_new_tokens() -> None:
    """Answers are hits too: eight turns, of which each begins with all turns before it."""
    engine = engine_of(max_model_len=512)
    history: list[int] = []
    computed = new = 0
    for turn in range(8):
        added = tokens(turn, 30)
        prompt = history + added
        output = run_engine(engine, [request(str(turn), prompt, max_tokens=20)])[str(turn)]
        computed += len(prompt) - output.num_cached_tokens
        new += len(added) + (20 if turn else 0)
        history = prompt + list(output.token_ids)
    assert computed <= 1.15 * new + 8, f"{computed} computed, {new} new"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_prefix_in_use_outlives_a_stream_of_strangers(eviction: str) -> None:
    """Hit now and then; those that come by once would fill the cache several times over."""
    engine = engine_of(eviction, num_kv_blocks=24, max_model_len=128)
    stem = tokens(3, 3 * BLOCK)
    hits = 0
    for index in range(40):
        run_engine(engine, [request(f"stranger{index}", tokens(100 + index, 2 * BLOCK + 2))])
        if index % 4 == 0:
            hits += run_engine(engine, [request(str(index), stem + tokens(index, 2))])[str(index)].num_cached_tokens > 0
    assert hits == 9, f"{hits} of 9: only the first may miss"


def test_what_was_hit_outlives_what_was_used_last() -> None:
    """All but lru: a prefix that was hit twice stays although strangers came after it."""
    for eviction in ("lfu", "slru", "cost"):
        engine = engine_of(eviction, num_kv_blocks=24, max_model_len=128)
        stem = tokens(3, 3 * BLOCK)
        for index in range(3):
            run_engine(engine, [request(str(index), stem + tokens(index, 2))])
        for index in range(9):
            run_engine(engine, [request(f"stranger{index}", tokens(100 + index, 2 * BLOCK + 2))])
        last = run_engine(engine, [request("last", stem + tokens(9, 2))])["last"]
        assert last.num_cached_tokens == 3 * BLOCK, eviction


def test_tenants_do_not_share() -> None:
    engine = engine_of()
    prompt = tokens(4, 3 * BLOCK + 1)
    run_engine(engine, [request("a", prompt)])
    params = SamplingParams(max_tokens=1)
    other = EngineRequest(request_id="b", prompt_token_ids=prompt, params=params, cache_salt="other")
    assert run_engine(engine, [other])["b"].num_cached_tokens == 0
