"""Matching, keeping, evicting and moving blocks: what the core guarantees whatever a cache policy says."""

from collections.abc import Collection, Mapping, Sequence

import pytest

from mini_infer.engine.kv_manager import KVManager
from mini_infer.engine.prefix_index import PrefixIndex, block_key, packed
from mini_infer.engine.request import Request
from mini_infer.errors import PluginError
from mini_infer.interfaces import BlockKey, CachedBlock, CachePolicy, CacheView, Demote, Promote, SamplingParams
from mini_infer.messages import EngineRequest
from mini_infer.plan import Copy

BLOCK = 4


class KeepAll(CachePolicy):
    """Keeps every block; evicts the oldest; asks for the copies that a test puts into ``asks``."""

    def __init__(self, host: int = 0) -> None:
        self.host = host
        self.asks: list[Demote | Promote] = []
        self.wanted: Sequence[tuple[BlockKey, str]] = ()
        self.lost: list[tuple[str, BlockKey]] = []

    def tiers(self) -> Mapping[str, int]:
        return {"host": self.host} if self.host else {}

    def keep(self, block: CachedBlock) -> bool:
        return True

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        return list(cached)[:count]

    def gone(self, tier: str, key: BlockKey) -> None:
        self.lost.append((tier, key))

    def wishes(self, view: CacheView) -> Sequence[Demote | Promote]:
        self.wanted = view.wanted
        return self.asks


def make(num_tokens: int, *, salt: str | None = None, first: int = 0, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs)
    spec = EngineRequest(
        request_id="r", prompt_token_ids=list(range(first, first + num_tokens)), params=params, cache_salt=salt
    )
    return Request(spec, arrival=0.0, deadline=None, token_ids=list(spec.prompt_token_ids))


def compute(kv: KVManager, request: Request) -> None:
    """All of a request's tokens, as if a step had run them."""
    kv.attach(request)
    assert kv.grow(request, len(request.token_ids)) is not None
    request.num_computed_tokens = len(request.token_ids)
    kv.commit(request)


def cached_run(kv: KVManager, num_tokens: int, **more: int) -> None:
    """A request comes, is computed and goes, leaving its full blocks behind."""
    request = make(num_tokens, **more)
    compute(kv, request)
    kv.release(request)


def test_a_hit_shares_full_blocks_and_ends_before_the_last_token() -> None:
    kv = KVManager(8, BLOCK, KeepAll())
    cached_run(kv, 9)  # two full blocks and one token
    same, shorter = make(9), make(8)
    assert len(kv.match(same)) == 2
    assert len(kv.match(shorter)) == 1, "the last token's logits are wanted, so its block is computed again"
    kv.attach(same)
    assert same.num_computed_tokens == 8
    kv.check_integrity([same])


def test_a_prompt_whose_logits_are_wanted_is_not_matched() -> None:
    kv = KVManager(8, BLOCK, KeepAll())
    cached_run(kv, 9)
    assert kv.match(make(9, prompt_logprobs=0)) == []


def test_salts_never_share() -> None:
    kv = KVManager(8, BLOCK, KeepAll())
    request = make(9, salt="a")
    compute(kv, request)
    kv.release(request)
    assert kv.match(make(9, salt="b")) == [] == kv.match(make(9))
    assert len(kv.match(make(9, salt="a"))) == 2


def test_a_colliding_key_is_a_miss() -> None:
    index = PrefixIndex()
    key = block_key(b"", packed([1, 2]), "")
    assert index.enter(key, "device", 1, packed([1, 2]), 0)
    assert index.find(key, "device", packed([1, 3])) is None
    assert index.find(key, "device", packed([1, 2])) == 1


def test_salt_and_parent_change_the_key() -> None:
    first = {block_key(b"", packed([1, 2]), salt) for salt in ("", "s", "s" * 64, "s" * 65)}
    second = {block_key(parent, packed([1, 2]), "") for parent in first}
    assert len(first | second) == 8


def test_two_holders_and_one_goes() -> None:
    kv = KVManager(8, BLOCK, KeepAll())
    one = make(9)
    compute(kv, one)
    two = make(9)
    kv.attach(two)
    assert two.block_ids == one.block_ids[:2]
    kv.release(one)
    kv.check_integrity([two])
    assert len(kv.match(make(9))) == 2, "still held, still matched"


def test_eviction_makes_room_and_a_wrong_choice_is_a_plugin_error() -> None:
    policy = KeepAll()
    kv = KVManager(4, BLOCK, policy)
    cached_run(kv, 8)
    newcomer = make(16, first=100)
    assert kv.grow(newcomer, 16) is not None
    assert len(policy.lost) == 2
    kv.check_integrity([newcomer])
    kv.release(newcomer)

    policy.evict = lambda tier, cached, count: [b"nonsense"] * count  # type: ignore[method-assign]
    kv = KVManager(4, BLOCK, policy)
    cached_run(kv, 16)
    with pytest.raises(PluginError, match="chose wrongly"):
        kv.grow(make(4, first=50), 4)


def test_nothing_is_matched_before_it_retires() -> None:
    kv = KVManager(8, BLOCK, KeepAll())
    request = make(9)
    compute(kv, request)
    kv.launched_step = 5
    kv.release(request)
    assert kv.match(make(9)) == []
    kv.complete(5)
    assert len(kv.match(make(9))) == 2


def demoted(kv: KVManager, policy: KeepAll) -> list[Copy]:
    """Both full blocks of a nine-token prompt, on their way to the host."""
    cached_run(kv, 9)
    first = block_key(b"", packed([0, 1, 2, 3]), "")
    policy.asks = [Demote(first, "host"), Demote(block_key(first, packed([4, 5, 6, 7]), ""), "host")]
    copies = kv.copies([], 0.0)
    policy.asks = []
    return copies


def test_demoted_blocks_leave_the_device_and_come_back() -> None:
    policy = KeepAll(host=4)
    kv = KVManager(4, BLOCK, policy)
    for copy in demoted(kv, policy):
        assert (copy.source.tier, copy.target.tier) == ("device", "host")
        kv.check_integrity([])
        kv.end_copy(copy.copy_id, done=True)
    assert kv.device.num_free == 4 and len(kv.pools["host"].cached) == 2

    waiting = make(9)
    assert kv.match(waiting) == []
    kv.copies([waiting], 0.0)
    assert [tier for _, tier in policy.wanted] == ["host", "host"]
    policy.asks = [Promote(key, tier) for key, tier in policy.wanted]
    copies = kv.copies([waiting], 0.0)
    policy.asks = []
    assert len(copies) == 2 and kv.is_loading(waiting)
    for copy in copies:
        kv.end_copy(copy.copy_id, done=True)
    assert not kv.is_loading(waiting) and len(kv.match(waiting)) == 2
    kv.check_integrity([])


def test_a_failed_demotion_changes_nothing_and_a_failed_promotion_forgets_the_source() -> None:
    policy = KeepAll(host=4)
    kv = KVManager(4, BLOCK, policy)
    for copy in demoted(kv, policy):
        kv.end_copy(copy.copy_id, done=False)
    assert len(kv.match(make(9))) == 2 and kv.pools["host"].num_free == 4

    for copy in demoted(kv, policy):
        kv.end_copy(copy.copy_id, done=True)
    waiting = make(9)
    kv.copies([waiting], 0.0)
    policy.asks = [Promote(key, tier) for key, tier in policy.wanted]
    for copy in kv.copies([waiting], 0.0):
        kv.end_copy(copy.copy_id, done=False)
    policy.asks = []
    kv.copies([waiting], 0.0)
    assert policy.wanted == [] and not kv.is_loading(waiting)
    kv.check_integrity([])


def test_a_request_waits_once_for_each_block() -> None:
    """Else a policy that moves blocks to and fro would hold it back for ever."""
    policy = KeepAll(host=4)
    kv = KVManager(4, BLOCK, policy)
    for copy in demoted(kv, policy):
        kv.end_copy(copy.copy_id, done=True)
    waiting, other = make(9), make(16, first=50)
    for loads in (True, False):
        kv.copies([waiting], 0.0)
        policy.asks = [Promote(key, tier) for key, tier in policy.wanted]
        copies = kv.copies([waiting], 0.0)
        policy.asks = []
        assert len(copies) == 2 and kv.is_loading(waiting) is loads
        for copy in copies:
            kv.end_copy(copy.copy_id, done=True)
        assert kv.grow(other, 16) is not None, "what was promoted is evicted again"
        kv.release(other)


def test_impossible_copies_are_dropped_and_unknown_tiers_refused() -> None:
    policy = KeepAll(host=1)
    kv = KVManager(4, BLOCK, policy)
    policy.asks = [Demote(b"unknown", "host"), Promote(b"unknown", "host")]
    assert kv.copies([], 0.0) == []
    policy.asks = [Demote(b"unknown", "moon")]
    with pytest.raises(PluginError, match="unknown tier 'moon'"):
        kv.copies([], 0.0)


def test_a_held_block_is_not_demoted() -> None:
    policy = KeepAll(host=4)
    kv = KVManager(4, BLOCK, policy)
    request = make(9)
    compute(kv, request)
    policy.asks = [Demote(block_key(b"", packed([0, 1, 2, 3]), ""), "host")]
    assert kv.copies([], 0.0) == []
