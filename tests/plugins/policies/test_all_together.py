"""Every order, victim, chunk size and eviction with every other: each request gets the tokens that it gets alone."""

import os
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.testing.engines import make_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import check_traffic, random_traffic

NUM_TRAFFICS = 1000 if os.environ.get("MINI_INFER_TEST_FULL") == "1" else 30
VOCAB_SIZE = 256
PLUGINS = ["dynamic-batching", "chunked-prefill", "priority", "fair-share", "slo"]
ORDERS = ("arrival", "priority", "fair-share", "slo")
VICTIMS = ("last-arrived", "longest-remaining", "least-progress", "priority")
CHUNKS = ("whole-prompts", "chunked-prefill", "slo")
EVICTIONS = (None, "lru", "lfu", "slru", "cost")


def test_random_traffic() -> None:
    model = tiny_model("llama", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, head_dim=8)
    equality = Equality(reference_of(model))
    num_preemptions = num_cached = 0

    @settings(max_examples=NUM_TRAFFICS)
    @given(
        rng=st.randoms(use_true_random=False),
        order=st.sampled_from(ORDERS),
        victim=st.sampled_from(VICTIMS),
        chunks=st.sampled_from(CHUNKS),
        eviction=st.sampled_from(EVICTIONS),
        held_back=st.booleans(),
        overlap=st.booleans(),
    )
    def run(
        rng: Random, order: str, victim: str, chunks: str, eviction: str | None, held_back: bool, overlap: bool
    ) -> None:
        nonlocal num_preemptions, num_cached
        traffic = random_traffic(rng, VOCAB_SIZE)
        plugins = PLUGINS[not held_back :] + (["prefix-cache"] if eviction else [])
        plugin: dict[str, dict[str, Any]] = {"chunked-prefill": {"max_tokens_beside_decodes": rng.randint(1, 20)}}
        if eviction:
            plugin["prefix-cache"] = {"eviction": eviction}
        named = {"order": order, "victim": victim, "chunks": chunks, "overlap": overlap}
        engine = make_engine(model, plugins=plugins, plugin=plugin, **named, **traffic.engine).engine
        outputs = check_traffic(engine, traffic, equality)
        num_preemptions += engine.stats().num_preemptions
        num_cached += sum(output.num_cached_tokens for output in outputs.values())

    run()
    assert num_preemptions >= NUM_TRAFFICS / 2, f"{num_preemptions} preemptions: the engines were not tight"
    assert num_cached >= NUM_TRAFFICS, f"{num_cached} tokens were hits: the prompts share too little"
