"""PrefixCache: every full block of known content is kept until its room is wanted.

Contract: what is matched, and every count, is the core's; this says "keep", and an ``EvictionPolicy`` which block goes.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from mini_infer.interfaces import BlockKey, CachedBlock, CachePolicy


class EvictionPolicy(ABC):
    """Which idle block goes first. It hears of blocks in the order in which the core releases them: tails first.

    Of two blocks of equal worth the one that was released first goes, so a chain is eaten from its end: what comes
    before a block in its sequence was hit whenever the block was, and is released after it.
    """

    @abstractmethod
    def idle(self, key: BlockKey) -> None:
        """The last holder has let go of a block."""

    @abstractmethod
    def hit(self, key: BlockKey) -> None:
        """A request uses a block's content again, whether it was idle or not."""

    @abstractmethod
    def gone(self, key: BlockKey) -> None:
        """A block is cached no more; it may never have been idle."""

    @abstractmethod
    def choose(self, cached: Collection[BlockKey], count: int) -> list[BlockKey]:
        """``count`` of ``cached``. An idle block that is not in it will be a step later."""


class PrefixCache(CachePolicy):
    """See the module."""

    def __init__(self, eviction: EvictionPolicy) -> None:
        self._eviction = eviction

    def keep(self, block: CachedBlock) -> bool:
        """Always."""
        self._eviction.idle(block.key)
        return True

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """They count as used."""
        for key in keys:
            self._eviction.hit(key)

    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        """As the eviction policy chooses."""
        return self._eviction.choose(cached, count)

    def gone(self, tier: str, key: BlockKey) -> None:
        """It is forgotten."""
        self._eviction.gone(key)
