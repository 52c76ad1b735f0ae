"""The core's own implementations keep the contract that third parties are held to."""

from mini_infer.reference.attention import ReferenceAttention
from mini_infer.reference.cache_policy import FreeAtOnce
from mini_infer.reference.scheduler import first_come_first_served
from mini_infer.sampling.sampler import ReferenceSampler
from mini_infer.testing import tiny_model
from mini_infer.testing.contracts import (
    attention_backend_suite,
    cache_policy_suite,
    model_adapter_suite,
    sampler_suite,
    scheduler_suite,
)
from mini_infer.testing.dense import DenseModel
from mini_infer.testing.toy_model import ToyAdapter

TestReferenceAttention = attention_backend_suite(ReferenceAttention)
TestFirstComeFirstServed = scheduler_suite(first_come_first_served)
TestFreeAtOnce = cache_policy_suite(FreeAtOnce)
TestReferenceSampler = sampler_suite(ReferenceSampler)
TestToyAdapter = model_adapter_suite(
    ToyAdapter,
    lambda: tiny_model("toy", layer_kinds=["full", "latent", "sliding"]),
    reference=lambda folder: DenseModel(folder).logits,
    refuses={"layer_kinds": ["no such kind"]},
)
