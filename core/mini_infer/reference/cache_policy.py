"""The reference ``CachePolicy``: a block that nobody holds is free at once; nothing is ever matched."""

from collections.abc import Collection, Sequence

from mini_infer.interfaces.cache_policy import BlockKey, CachedBlock, CachePolicy


class FreeAtOnce(CachePolicy):
    """Keeps nothing, so the core hashes nothing."""

    reuses = False

    def keep(self, block: CachedBlock) -> bool:
        """Never."""
        return False

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        """Nothing is cached, so nothing is asked."""
        return list(cached)[:count]
