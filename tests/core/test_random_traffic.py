"""Any traffic through a small engine gives each request the tokens that it gets alone: the toy model's groups."""

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.interfaces import SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.testing.engines import make_engine, run_engine, tiny_model
from mini_infer.testing.reference import Equality, reference_of
from mini_infer.testing.traffic import check_traffic, random_traffic

NUM_TRAFFICS = 100 if os.environ.get("MINI_INFER_TEST_FULL") == "1" else 10
VOCAB_SIZE = 256


@pytest.mark.parametrize("kinds", [("full", "full"), ("sliding", "latent")], ids="-".join)
def test_random_traffic(kinds: tuple[str, ...]) -> None:
    model = tiny_model("toy", vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, layer_kinds=list(kinds))
    equality = Equality(reference_of(model))
    num_preemptions = 0

    @settings(max_examples=NUM_TRAFFICS)
    @given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
    def run(rng: Random, overlap: bool) -> None:
        nonlocal num_preemptions
        traffic = random_traffic(rng, VOCAB_SIZE)
        engine = make_engine(model, overlap=overlap, **traffic.engine).engine
        check_traffic(engine, traffic, equality)
        num_preemptions += engine.stats().num_preemptions

    run()
    assert num_preemptions >= NUM_TRAFFICS / 2, f"{num_preemptions} preemptions: the engines were not tight"


@pytest.mark.parametrize("budget", [100, 300, 700])
def test_a_long_prompt_is_scored_whole(budget: int) -> None:
    """Log-probabilities of prompts are made in stretches, and in as many steps as the budget asks for."""
    model = tiny_model("toy", vocab_size=VOCAB_SIZE, hidden_size=32, head_dim=8, max_position_embeddings=800)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    prompt = Random(budget).choices(range(VOCAB_SIZE), k=650)
    requests = [EngineRequest(request_id=str(n), prompt_token_ids=prompt[:n], params=params) for n in (650, 2, 1, 258)]
    engine = make_engine(model, max_num_seqs=4, max_num_batched_tokens=budget).engine
    Equality(reference_of(model)).check(requests, run_engine(engine, requests))
