"""Ways to choose what is evicted, each O(log n) or better a block.

===============  ========================================================================================
``lru``          unused for longest
``lfu``          fewest hits, new blocks starting at what the last victim was worth, so that past fame fades
                 (LFU with dynamic ageing: Arlitt et al., Performance Evaluation Review 27(4), 2000)
``slru``         unused for longest of those never hit, then of the rest (Karedla et al., Computer 27(3), 1994)
``cost``         fewest tokens saved so far, halved for every ``half_life`` blocks since the last hit
===============  ========================================================================================
"""

import heapq
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable
from itertools import islice

from mini_infer.interfaces import BlockKey
from mini_infer_plugins.prefix_cache.policy import EvictionPolicy

_FEW = 1024  # stale entries that are not worth clearing away


class LeastRecent(EvictionPolicy):
    """The core offers blocks in the order in which they became idle: that is all there is to know."""

    def idle(self, key: BlockKey) -> None:
        """Nothing to note."""

    def hit(self, key: BlockKey) -> None:
        """Nothing to note."""

    def gone(self, key: BlockKey) -> None:
        """Nothing to note."""

    def choose(self, cached: Collection[BlockKey], count: int) -> list[BlockKey]:
        """The first."""
        return list(islice(cached, count))


class _ByWorth(EvictionPolicy):
    """The least of ``worth`` at the time when a block became idle; of equals the first that did."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, BlockKey]] = []
        self._entry: dict[BlockKey, int] = {}  # idle blocks' newest entries in the heap; others there are stale
        self._num_entries = 0
        self._hits: dict[BlockKey, int] = {}

    @abstractmethod
    def worth(self, key: BlockKey, hits: int) -> float:
        """Of a block that has become idle; at least that of any block behind it in its sequence."""

    def idle(self, key: BlockKey) -> None:
        """Weigh it."""
        self._num_entries += 1
        self._entry[key] = self._num_entries
        heapq.heappush(self._heap, (self.worth(key, self._hits.get(key, 0)), self._num_entries, key))
        if len(self._heap) > 2 * len(self._entry) + _FEW:
            self._heap = [item for item in self._heap if self._entry.get(item[2]) == item[1]]
            heapq.heapify(self._heap)

    def hit(self, key: BlockKey) -> None:
        """One more; it is idle no longer, and is weighed anew when it is."""
        self._hits[key] = self._hits.get(key, 0) + 1
        self._entry.pop(key, None)

    def gone(self, key: BlockKey) -> None:
        """Forget it."""
        self._hits.pop(key, None)
        self._entry.pop(key, None)

    def choose(self, cached: Collection[BlockKey], count: int) -> list[BlockKey]:
        """From the top of the heap, past what is stale or not cached yet."""
        chosen: list[BlockKey] = []
        later: list[tuple[float, int, BlockKey]] = []
        while len(chosen) < count:
            worth, entry, key = heapq.heappop(self._heap)
            if self._entry.get(key) != entry:
                continue
            if key in cached:
                chosen.append(key)
                self.evicted(worth)
            else:
                later.append((worth, entry, key))
        for item in later:
            heapq.heappush(self._heap, item)
        return chosen

    def evicted(self, worth: float) -> None:
        """A block of this worth goes. Nothing by default."""
        return


class LeastFrequent(_ByWorth):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def worth(self, key: BlockKey, hits: int) -> float:
        """Its hits on top of the age at which it became idle."""
        return self._age + hits

    def evicted(self, worth: float) -> None:
        """The cache grows as old as its victims."""
        self._age = max(self._age, worth)


class LeastWorth(_ByWorth):
    """See the module. Worth halves for all alike as time goes by, so its logarithm at time 0 orders them for good."""

    def __init__(self, half_life: int) -> None:
        super().__init__()
        self._half_life = half_life
        self._last_hit: dict[BlockKey, int] = {}

    def worth(self, key: BlockKey, hits: int) -> float:
        """log2 of (hits, and one for having been computed), plus the half-lives that had passed at its last hit."""
        return math.log2(1 + hits) + self._last_hit.setdefault(key, self._num_entries) / self._half_life

    def hit(self, key: BlockKey) -> None:
        """Worth twice as much as a half-life ago."""
        super().hit(key)
        self._last_hit[key] = self._num_entries

    def gone(self, key: BlockKey) -> None:
        """Forget it."""
        super().gone(key)
        self._last_hit.pop(key, None)


class Segmented(EvictionPolicy):
    """Blocks that were never hit, and protected ones that were; each in the order in which they became idle.

    Args:
        protected: largest share of the idle blocks that is protected; the oldest beyond it lose that.
    """

    def __init__(self, protected: float) -> None:
        self._share = protected
        self._probation: dict[BlockKey, None] = {}
        self._protected: dict[BlockKey, None] = {}
        self._was_hit: set[BlockKey] = set()

    def idle(self, key: BlockKey) -> None:
        """Into its segment, at the young end."""
        (self._protected if key in self._was_hit else self._probation)[key] = None
        while len(self._protected) > self._share * (len(self._protected) + len(self._probation)):
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            self._was_hit.discard(oldest)
            self._probation[oldest] = None

    def hit(self, key: BlockKey) -> None:
        """Protected from its next idle time on."""
        self._was_hit.add(key)
        self._leave(key)

    def gone(self, key: BlockKey) -> None:
        """Forget it."""
        self._was_hit.discard(key)
        self._leave(key)

    def choose(self, cached: Collection[BlockKey], count: int) -> list[BlockKey]:
        """The oldest of the unprotected, then of the others."""
        return list(islice((key for key in self._in_order() if key in cached), count))

    def _in_order(self) -> Iterable[BlockKey]:
        yield from self._probation
        yield from self._protected

    def _leave(self, key: BlockKey) -> None:
        self._probation.pop(key, None)
        self._protected.pop(key, None)
