"""Any traffic through a small engine gives each request the tokens that it gets alone: Llama and Qwen, both loops."""

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.testing.engines import make_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import check_traffic, random_traffic

FULL = os.environ.get("MINI_INFER_TEST_FULL") == "1"
NUM_TRAFFICS = {"llama": 500, "qwen2": 500, "qwen3": 100} if FULL else {"llama": 25, "qwen2": 25, "qwen3": 5}
VOCAB_SIZE = 256
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}


@pytest.mark.parametrize("family", NUM_TRAFFICS)
def test_random_traffic(family: str) -> None:
    model = tiny_model(family, **SIZES)
    equality = Equality(reference_of(model))
    num_preemptions = 0

    @settings(max_examples=NUM_TRAFFICS[family])
    @given(rng=st.randoms(use_true_random=False))
    def run(rng: Random) -> None:
        nonlocal num_preemptions
        traffic = random_traffic(rng, VOCAB_SIZE)
        for overlap in (False, True):
            engine = make_engine(model, overlap=overlap, **traffic.engine).engine
            check_traffic(engine, traffic, equality)
            num_preemptions += engine.stats().num_preemptions

    run()
    assert num_preemptions >= NUM_TRAFFICS[family], f"{num_preemptions} preemptions: the engines were not tight"
