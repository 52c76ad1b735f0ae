"""Probe: a prefix cache with a host tier. ``slow_copies`` makes its copies take two steps."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from mini_infer.interfaces import BlockKey, CachedBlock, CachePolicy, CacheView, Demote, Promote
from mini_infer.plugins import hookimpl


class TieredCache(CachePolicy):
    """What nobody holds goes to the host, the least recently used first, and comes back when somebody waits for it."""

    def __init__(self) -> None:
        self.idle: dict[str, dict[BlockKey, None]] = defaultdict(dict)  # by tier, in order of last use
        self.num_hits = self.num_evicted = 0

    def tiers(self) -> dict[str, int]:
        return {"host": 16}

    def keep(self, block: CachedBlock) -> bool:
        self.idle[block.tier][block.key] = None
        return True

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.num_hits += 1
            self.idle["device"].pop(key, None)

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        self.num_evicted += count
        return sorted(cached, key=list(self.idle[tier]).index)[:count]  # fails if the core told too little

    def arrived(self, tier: str, key: BlockKey) -> None:
        self.idle[tier][key] = None

    def gone(self, tier: str, key: BlockKey) -> None:
        self.idle[tier].pop(key, None)

    def wishes(self, view: CacheView) -> list[Demote | Promote]:
        demoted = [Demote(key, "host") for key in list(self.idle["device"])[:2]]
        return [*(Promote(key, tier) for key, tier in view.wanted), *demoted]


class Probe:
    name = "tiered-cache"
    api_version = 0

    def __init__(self) -> None:
        self.made = TieredCache()

    @hookimpl
    def cache_policy(self, context: object) -> TieredCache:
        return self.made
