"""The probes that implement a first-rank interface pass its contract suite, as anybody's would."""

from random import Random

from tests.contracts.chaos import ChaoticCache, ChaoticScheduler
from tests.contracts.tiered_cache import TieredCache
from tests.contracts.two_kv_groups import FixedAttention

from mini_infer.testing.contracts import attention_backend_suite, cache_policy_suite, scheduler_suite

TestFixedAttention = attention_backend_suite(FixedAttention)
TestTieredCache = cache_policy_suite(TieredCache, num_traffics=3)
TestChaoticCache = cache_policy_suite(lambda: ChaoticCache(Random(0)), num_traffics=3)
TestChaoticScheduler = scheduler_suite(lambda: ChaoticScheduler(Random(0)), num_traffics=3)
