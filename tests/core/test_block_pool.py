"""The block pool as a state machine: after every operation the books balance against a model kept in plain sets."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_infer.engine.block_pool import BlockPool, BlockState
from mini_infer.errors import EngineError

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Random requests, steps and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: dict[int, int] = {}
        self.retiring: dict[int, tuple[int, bool]] = {}
        self.copying: set[int] = set()
        self.launched = self.read = 0

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        blocks = self.pool.allocate(count)
        assert 0 not in blocks and len(set(blocks)) == count
        assert not set(blocks) & (self.held.keys() | self.retiring.keys() | self.copying)
        free_before = set(blocks) | {b for b in range(1, NUM_BLOCKS + 1) if self.pool.state(b) is BlockState.FREE}
        assert blocks == sorted(free_before)[:count], "low ids are handed out first"
        self.held.update(dict.fromkeys(blocks, 1))

    @precondition(lambda self: self.held or self.pool.cached)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted({*self.held, *self.pool.cached})))
        self.pool.hold(block_id)
        self.held[block_id] = self.held.get(block_id, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.held)))
        assert self.pool.is_last_holder(block_id) == (self.held[block_id] == 1)
        self.pool.release(block_id, keep=keep, after_step=self.launched)
        self.held[block_id] -= 1
        if not self.held[block_id]:
            del self.held[block_id]
            self.retiring[block_id] = (self.launched, keep)

    @rule()
    def launch(self) -> None:
        self.launched += 1

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.read = data.draw(st.integers(self.read, self.launched))
        self.pool.complete(self.read)
        for block_id, (step, keep) in list(self.retiring.items()):
            if step <= self.read:
                del self.retiring[block_id]
                assert self.pool.state(block_id) is (BlockState.CACHED if keep else BlockState.FREE)

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data(), stays=st.booleans())
    def copy_out(self, data: st.DataObject, stays: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.pool.cached)))
        self.pool.start_copy(block_id)
        with pytest.raises(EngineError):
            self.pool.hold(block_id)
        self.copying.add(block_id)

    @precondition(lambda self: self.pool.num_free > 0)
    @rule()
    def copy_in(self) -> None:
        self.copying.add(self.pool.reserve())

    @precondition(lambda self: self.copying)
    @rule(data=st.data(), keep=st.booleans())
    def end_copy(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.copying)))
        self.copying.remove(block_id)
        self.pool.end_copy(block_id, keep=keep)

    @precondition(lambda self: self.pool.cached)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.pool.cached)))
        self.pool.drop(block_id)
        assert self.pool.state(block_id) is BlockState.FREE

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity(dict(self.held))
        pool = self.pool
        counted = pool.num_free + len(self.held) + len(pool.cached) + len(self.copying) + pool.num_retiring
        assert counted == NUM_BLOCKS
        assert pool.num_retiring == len(self.retiring)


TestPool = PoolMachine.TestCase


def test_a_leak_and_a_double_owner_are_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.check_integrity({first: 1, second: 1})
    with pytest.raises(EngineError, match="held blocks"):
        pool.check_integrity({first: 1})
    with pytest.raises(EngineError, match="counts 1 holders, 2 hold it"):
        pool.check_integrity({first: 1, second: 2})


def test_releasing_a_free_block_is_refused() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.release(block_id, keep=False, after_step=0)
    with pytest.raises(EngineError, match="released while retiring"):
        pool.release(block_id, keep=False, after_step=0)
