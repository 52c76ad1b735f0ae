"""The physical KV blocks of one tier: who holds them, and when they may be used again.

Contract, true after every call: free + held + cached + copying + retiring = total; no block is in two states; block 0
of the device is the null block, which padding rows use and nobody owns. A released block is *retiring* until the last
launched step that could name it is complete; only then is it free or cached::

      allocate                release (last holder)             complete(step)
    FREE ──────────> HELD ──────────────────────────> RETIRING ────────────────> FREE, or CACHED if it is kept
                      ^  hold (a hit)                                               │
                      └─────────────────────────── CACHED <─────────────────────────┘
    CACHED ── start_copy ──> COPYING ── end_copy ──> CACHED or FREE        (a copy's source)
    FREE   ── reserve ─────> COPYING ── end_copy ──> CACHED or FREE        (a copy's target)
"""

import heapq
from collections import deque
from enum import Enum

from mini_infer.errors import EngineError


class BlockState(Enum):
    """Where a block is in its life."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    COPYING = "copying"
    RETIRING = "retiring"


class BlockPool:
    """Blocks 1 to ``num_blocks`` of a tier; low ids are handed out first, so that the pool can shrink at its tail."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks + 1))
        self._state = [BlockState.FREE] * (num_blocks + 1)
        self._holders = [0] * (num_blocks + 1)
        self._retiring: deque[tuple[int, int, bool]] = deque()  # (step, block id, keep), steps ascending
        self.cached: dict[int, None] = {}  # block ids in the order in which they became cached
        self.num_copying = 0

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can give now."""
        return len(self._free)

    @property
    def num_retiring(self) -> int:
        """Blocks that become free or cached when launched steps complete."""
        return len(self._retiring)

    def state(self, block_id: int) -> BlockState:
        """Where a block is in its life."""
        return self._state[block_id]

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks, now held once each; the caller has checked ``num_free``."""
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block_id in blocks:
            self._state[block_id] = BlockState.HELD
            self._holders[block_id] = 1
        return blocks

    def hold(self, block_id: int) -> None:
        """One more holder of a held or cached block."""
        if self._state[block_id] is BlockState.CACHED:
            del self.cached[block_id]
            self._state[block_id] = BlockState.HELD
        elif self._state[block_id] is not BlockState.HELD:
            raise EngineError(f"block {block_id} is {self._state[block_id].value}; only held or cached can be shared")
        self._holders[block_id] += 1

    def is_last_holder(self, block_id: int) -> bool:
        """Whether ``release`` would leave the block with nobody."""
        return self._holders[block_id] == 1

    def release(self, block_id: int, *, keep: bool, after_step: int) -> None:
        """One holder less; with the last, the block retires until ``complete(after_step)``.

        Args:
            block_id: a held block.
            keep: cache it afterwards instead of freeing it (last holder only).
            after_step: the last launched step.
        """
        if self._state[block_id] is not BlockState.HELD:
            raise EngineError(f"block {block_id} was released while {self._state[block_id].value}")
        self._holders[block_id] -= 1
        if self._holders[block_id] == 0:
            self._state[block_id] = BlockState.RETIRING
            self._retiring.append((after_step, block_id, keep))

    def complete(self, step: int) -> None:
        """Step ``step`` and all before it have been read: what they named is free or cached."""
        while self._retiring and self._retiring[0][0] <= step:
            _, block_id, keep = self._retiring.popleft()
            self._settle(block_id, keep)

    def drop(self, block_id: int) -> None:
        """A cached block becomes free."""
        if self._state[block_id] is not BlockState.CACHED:
            raise EngineError(f"block {block_id} was evicted while {self._state[block_id].value}")
        del self.cached[block_id]
        self._settle(block_id, keep=False)

    def start_copy(self, block_id: int) -> None:
        """A cached block becomes a copy's source: neither matched nor evicted until ``end_copy``."""
        del self.cached[block_id]
        self._state[block_id] = BlockState.COPYING
        self.num_copying += 1

    def reserve(self) -> int:
        """A free block becomes a copy's target."""
        block_id = heapq.heappop(self._free)
        self._state[block_id] = BlockState.COPYING
        self.num_copying += 1
        return block_id

    def end_copy(self, block_id: int, *, keep: bool) -> None:
        """A copy's source or target becomes cached or free."""
        self.num_copying -= 1
        self._settle(block_id, keep)

    def _settle(self, block_id: int, keep: bool) -> None:
        if keep:
            self._state[block_id] = BlockState.CACHED
            self.cached[block_id] = None
        else:
            self._state[block_id] = BlockState.FREE
            heapq.heappush(self._free, block_id)

    def count(self, state: BlockState) -> int:
        """How many blocks are in a state, counted one by one."""
        return sum(s is state for s in self._state[1:])

    def check_integrity(self, held: dict[int, int]) -> None:
        """Prove the accounting against who really holds what.

        Args:
            held: holders by block id, counted from the requests' own tables.

        Raises:
            EngineError: naming the first block that is wrong.
        """
        free, retiring = set(self._free), [b for _, b, _ in self._retiring]
        if len(free) != len(self._free) or len(set(retiring)) != len(retiring):
            raise EngineError("a block is free or retiring twice")
        expected = {
            BlockState.FREE: free,
            BlockState.RETIRING: set(retiring),
            BlockState.CACHED: set(self.cached),
            BlockState.HELD: set(held),
        }
        for state, blocks in expected.items():
            actual = {b for b in range(1, self.num_blocks + 1) if self._state[b] is state}
            if actual != blocks:
                raise EngineError(f"{state.value} blocks are {sorted(actual)}, but should be {sorted(blocks)}")
        for block_id, holders in held.items():
            if self._holders[block_id] != holders:
                raise EngineError(f"block {block_id} counts {self._holders[block_id]} holders, {holders} hold it")
        if self.count(BlockState.COPYING) != self.num_copying:
            raise EngineError("the number of copying blocks is off")
