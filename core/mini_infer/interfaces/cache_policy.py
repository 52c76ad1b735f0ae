"""CachePolicy: which computed blocks are kept, matched, evicted, moved to another tier. It never touches a count."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

BlockKey = bytes
"""Content key of a full block: hash of (parent's key, its tokens, extra)."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block with known content that lies in some tier."""

    key: BlockKey
    depth: int  # blocks before it in its sequence
    tier: str
    held: bool  # some request uses it now


@dataclass(frozen=True, slots=True)
class Demote:
    """Copy a cached device block that nobody holds to another tier; the device block is free once that is done."""

    key: BlockKey
    tier: str


@dataclass(frozen=True, slots=True)
class Promote:
    """Copy a cached block from a lower tier back to the device, where it is cached again; the lower tier keeps it."""

    key: BlockKey
    tier: str


@dataclass(frozen=True, slots=True)
class CacheView:
    """The pools once a step.

    Attributes:
        now: seconds, the engine's clock.
        num_free: free blocks by tier.
        num_total: blocks by tier.
        wanted: keys in lower tiers that waiting requests would hit, most important first.
    """

    now: float
    num_free: Mapping[str, int]
    num_total: Mapping[str, int]
    wanted: Sequence[tuple[BlockKey, str]]


class CachePolicy(ABC):
    """Policy over cached blocks. The core keeps the index, checks every wish, orders copies and frees blocks."""

    reuses: bool = True
    """False: nothing is ever matched or kept, and the core skips hashing."""

    def tiers(self) -> Mapping[str, int]:
        """Further tiers and their sizes in blocks, such as ``{"host": 4096}``. None by default."""
        return {}

    @abstractmethod
    def keep(self, block: CachedBlock) -> bool:
        """The last holder released a full block of known content: keep it cached (True) or free it."""

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """These blocks were matched by a request just now. Nothing by default."""
        return

    @abstractmethod
    def evict(self, tier: str, cached: Collection[BlockKey], count: int) -> Sequence[BlockKey]:
        """Choose ``count`` of ``cached`` (blocks of ``tier`` that nobody holds) to be dropped, in order.

        ``cached`` is in the order in which they became so, and may be large: it is walked lazily, and asked whether it
        holds a key at once. Blocks at either end of a copy are not among them.

        Fewer than ``count``, or others than offered, are a ``PluginError``.
        """

    def arrived(self, tier: str, key: BlockKey) -> None:
        """A copy brought a block to a tier, where nobody holds it yet. Nothing by default."""
        return

    def gone(self, tier: str, key: BlockKey) -> None:
        """A block left a tier: evicted, moved, or not to be trusted, be it one never heard of. Nothing by default."""
        return

    def wishes(self, view: CacheView) -> Sequence[Demote | Promote]:
        """Copies wanted now; the core drops those that cannot be had. None by default.

        Not asked while a request waits for blocks at either end of a copy, nor when there is no request at all.
        """
        return ()
