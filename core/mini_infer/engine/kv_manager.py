"""Blocks of requests: allocate, match, release, move between tiers. The core's half of caching.

Contract: a ``CachePolicy`` only says what to keep, evict and move; every count is kept here. A block held by two
requests is full and never written. A hit ends before the first position whose logits are wanted. All KV groups share
block ids: one id names a slice of every layer's cache, so a request has one block table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.engine.asking import Asking
from mini_infer.engine.block_pool import BlockPool, BlockState
from mini_infer.engine.coming_blocks import ComingBlocks
from mini_infer.engine.evictable import Evictable
from mini_infer.engine.prefix_index import PrefixIndex, block_key, packed
from mini_infer.engine.request import Request
from mini_infer.errors import EngineError, PluginError
from mini_infer.interfaces.cache_policy import BlockKey, CachedBlock, CachePolicy, CacheView, Demote, Promote
from mini_infer.plan import DEVICE_TIER, BlockRef, Copy


@dataclass(frozen=True, slots=True)
class _Move:
    key: BlockKey
    source: BlockRef
    target: BlockRef


class KVManager:
    """Every block of every tier, on behalf of the requests.

    Args:
        num_blocks: blocks of the device tier, the null block not counted.
        block_size: tokens a block.
        policy: what to keep and move.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: CachePolicy) -> None:
        self.block_size = block_size
        self.policy = policy
        self._asking = Asking("cache policy", policy)
        self.device = BlockPool(num_blocks)
        self.pools = {DEVICE_TIER: self.device} | {tier: BlockPool(size) for tier, size in policy.tiers().items()}
        self.launched_step = 0
        self._completed_step = 0
        self._index = PrefixIndex()
        self._coming = ComingBlocks()
        self._moves: dict[int, _Move] = {}  # by copy id
        self._arriving: dict[BlockKey, int] = {}  # copy ids
        self._next_copy_id = 1

    @property
    def num_evictable(self) -> int:
        """Cached device blocks that nobody holds."""
        return len(self.device.cached)

    @property
    def copying(self) -> bool:
        """Whether copies between tiers are under way."""
        return bool(self._moves)

    @property
    def num_settling(self) -> int:
        """Device blocks that come free or cached by themselves: retiring, or at either end of a copy."""
        return self.device.num_retiring + self.device.num_copying

    # -- requests -----------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> list[int]:
        """Device blocks that hold the first tokens of a waiting request, or will by then; nothing is held yet."""
        if not self.policy.reuses:
            return []
        blocks = []
        for key, tokens in zip(self._matchable_keys(request), request.block_tokens, strict=False):
            block_id = self._index.find(key, DEVICE_TIER, tokens)
            if block_id is None:
                block_id = self._coming.find(key, tokens)
            if block_id is None or self.device.state(block_id) not in (BlockState.HELD, BlockState.CACHED):
                break
            blocks.append(block_id)
        return blocks

    def is_loading(self, request: Request) -> bool:
        """Whether the block that would lengthen its hit is on its way to the device.

        It waits once for each block, so that a policy which moves blocks to and fro cannot hold it back for ever.
        """
        if not self._arriving or not self.policy.reuses:
            return False
        keys = self._matchable_keys(request)
        num_matched = len(self.match(request))
        copy_id = self._arriving.get(keys[num_matched]) if num_matched < len(keys) else None
        if copy_id is None or self._moves[copy_id].target.tier != DEVICE_TIER:
            return False
        return request.awaited_copies.setdefault(num_matched, copy_id) == copy_id

    def attach(self, request: Request) -> None:
        """Give a waiting request its hit: it holds those blocks, and their tokens count as computed."""
        blocks = self.match(request)
        for block_id in blocks:
            self.device.hold(block_id)
        pairs = zip(request.block_keys, blocks, strict=False)
        if known := [key for key, block in pairs if self._index.find(key, DEVICE_TIER) == block]:
            with self._asking:
                self.policy.touch(known)
        request.block_ids = blocks
        request.num_keyed_blocks = len(blocks)
        request.num_computed_tokens = len(blocks) * self.block_size

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the request lacks for ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(request.block_ids))

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks so that the request has room for ``num_tokens``; None if there are not enough."""
        missing = self.num_missing(request, num_tokens)
        shortage = missing - self.device.num_free
        if shortage > self.num_evictable:
            return None
        if shortage > 0:
            self._evict(DEVICE_TIER, shortage)
        new = self.device.allocate(missing)
        request.block_ids.extend(new)
        return new

    def expect(self, request: Request, num_tokens: int) -> None:
        """A step was planned after which ``num_tokens`` of the request are computed: others may share them at once."""
        if not self.policy.reuses:
            return
        num_full = min(num_tokens, len(request.token_ids)) // self.block_size
        if num_full > request.num_keyed_blocks:
            self._extend_keys(request, num_full)
            for depth in range(request.num_keyed_blocks, num_full):
                key, tokens = request.block_keys[depth], request.block_tokens[depth]
                self._coming.add(request, key, request.block_ids[depth], tokens)

    def commit(self, request: Request) -> None:
        """Enter the blocks that became full of computed, accepted tokens."""
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full <= request.num_keyed_blocks or not self.policy.reuses:
            return
        self._extend_keys(request, num_full)
        for depth in range(request.num_keyed_blocks, num_full):
            key, tokens = request.block_keys[depth], request.block_tokens[depth]
            self._index.enter(key, DEVICE_TIER, request.block_ids[depth], tokens, depth)
            self._coming.remove(key)
        request.num_keyed_blocks = num_full

    def release(self, request: Request) -> None:
        """Take every block from a request; each may be kept, if it is full, known and was the last hold."""
        for block_id in reversed(request.block_ids):  # tails go first: a chain is evicted from its end
            keep = False
            if self.device.is_last_holder(block_id):
                key = self._index.key_of(DEVICE_TIER, block_id)
                if key is not None:
                    with self._asking:
                        keep = self.policy.keep(CachedBlock(key, self._index.depth(key), DEVICE_TIER, held=False))
                    if not keep:
                        self._index.remove(DEVICE_TIER, block_id)
            self.device.release(block_id, keep=keep, after_step=self.launched_step)
        request.block_ids = []
        request.num_keyed_blocks = 0
        self._coming.forget(request)
        self.device.complete(self._completed_step)

    def distrust(self, request: Request) -> None:
        """What a request's blocks hold may be wrong: it is known content no more, so it is neither matched nor kept."""
        for key in request.block_keys[: request.num_keyed_blocks]:
            for tier, block_id in self._index.tiers(key):
                state = self.pools[tier].state(block_id)
                if state in (BlockState.HELD, BlockState.CACHED):
                    self._forget(BlockRef(tier, block_id))
                if state is BlockState.CACHED:
                    self.pools[tier].drop(block_id)

    def complete(self, step_id: int) -> None:
        """Steps up to ``step_id`` have been read."""
        self._completed_step = step_id
        self.device.complete(step_id)

    # -- tiers --------------------------------------------------------------------------------------------------------

    def copies(self, waiting: Sequence[Request], now: float) -> list[Copy]:
        """The copies that the policy wants and that can be had, pinned and ready for a plan."""
        if len(self.pools) == 1:
            return []
        view = CacheView(
            now=now,
            num_free={tier: pool.num_free for tier, pool in self.pools.items()},
            num_total={tier: pool.num_blocks for tier, pool in self.pools.items()},
            wanted=[found for request in waiting for found in self._wanted(request)],
        )
        with self._asking:
            wishes = list(self.policy.wishes(view))
        copies = (self._start(wish) for wish in wishes)
        return [copy for copy in copies if copy is not None]

    def end_copy(self, copy_id: int, *, done: bool) -> None:
        """A copy is over on every rank. A demoted block leaves the device; a failed copy changes nothing but time."""
        move = self._moves.pop(copy_id)
        del self._arriving[move.key]
        arrived = done and self._index.copied(move.key, move.target.tier, move.target.block_id)
        self.pools[move.target.tier].end_copy(move.target.block_id, keep=arrived)
        if arrived:
            with self._asking:
                self.policy.arrived(move.target.tier, move.key)
        demoted = move.source.tier == DEVICE_TIER
        stays = (not arrived) if demoted else done  # a source that cannot be read is not tried again
        if not stays:
            self._forget(move.source)
        self.pools[move.source.tier].end_copy(move.source.block_id, keep=stays)

    def _start(self, wish: Demote | Promote) -> Copy | None:
        source_tier, target_tier = (DEVICE_TIER, wish.tier) if isinstance(wish, Demote) else (wish.tier, DEVICE_TIER)
        if source_tier not in self.pools or target_tier not in self.pools or source_tier == target_tier:
            raise PluginError(
                f"cache policy {type(self.policy).__name__} asked for a copy to unknown tier {wish.tier!r}"
            )
        source = self._index.find(wish.key, source_tier)
        taken = self._index.find(wish.key, target_tier) is not None or wish.key in self._arriving
        if source is None or taken or self.pools[source_tier].state(source) is not BlockState.CACHED:
            return None
        self.pools[source_tier].start_copy(source)  # pinned before room is made: it must not be its own victim
        target_pool = self.pools[target_tier]
        if target_pool.num_free == 0 and target_pool.cached:
            self._evict(target_tier, 1)
        if target_pool.num_free == 0:
            self.pools[source_tier].end_copy(source, keep=True)
            return None
        target = target_pool.reserve()
        move = _Move(wish.key, BlockRef(source_tier, source), BlockRef(target_tier, target))
        copy_id, self._next_copy_id = self._next_copy_id, self._next_copy_id + 1
        self._moves[copy_id] = move
        self._arriving[wish.key] = copy_id
        return Copy(copy_id, move.source, move.target, self.launched_step)

    def _wanted(self, request: Request) -> list[tuple[BlockKey, str]]:
        keys = self._matchable_keys(request)
        wanted = []
        for depth in range(len(self.match(request)), len(keys)):
            lower = [tier for tier, _ in self._index.tiers(keys[depth]) if tier != DEVICE_TIER]
            if not lower:
                break
            wanted.append((keys[depth], lower[0]))
        return wanted

    def _evict(self, tier: str, count: int) -> None:
        pool = self.pools[tier]
        cached = Evictable(self._index, tier, pool)
        with self._asking:
            chosen = list(self.policy.evict(tier, cached, count))[:count]
        if len(set(chosen)) != count or not all(key in cached for key in chosen):
            name = type(self.policy).__name__
            raise PluginError(f"cache policy {name} was asked for {count} of {len(cached)} blocks and chose wrongly")
        for key in chosen:
            block_id = self._index.find(key, tier)
            assert block_id is not None
            self._forget(BlockRef(tier, block_id))
            pool.drop(block_id)

    def _forget(self, block: BlockRef) -> None:
        key = self._index.remove(block.tier, block.block_id)
        if key is not None:
            with self._asking:
                self.policy.gone(block.tier, key)

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _matchable_keys(self, request: Request) -> list[BlockKey]:
        """Keys of the blocks that a hit may cover: none at or past the first position whose logits are wanted."""
        wants_prompt = request.spec.params.prompt_logprobs is not None
        num_blocks = 0 if wants_prompt else (len(request.token_ids) - 1) // self.block_size
        self._extend_keys(request, num_blocks)
        return request.block_keys[:num_blocks]

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        keys, tokens, size = request.block_keys, request.block_tokens, self.block_size
        if len(keys) >= num_blocks:
            return
        new = packed(request.token_ids[len(keys) * size : num_blocks * size])
        width = len(new) // (num_blocks - len(keys))
        parent, salt = keys[-1] if keys else b"", request.spec.cache_salt or ""
        for first in range(0, len(new), width):
            tokens.append(new[first : first + width])
            parent = block_key(parent, tokens[-1], salt)
            keys.append(parent)

    # -- proof --------------------------------------------------------------------------------------------------------

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Prove the accounting of every tier (``BlockPool.check_integrity``) and of the index."""
        held: dict[int, int] = {}
        for request in requests:
            for block_id in request.block_ids:
                held[block_id] = held.get(block_id, 0) + 1
        for tier, pool in self.pools.items():
            pool.check_integrity(held if tier == DEVICE_TIER else {})
            for block_id in pool.cached:
                if self._index.key_of(tier, block_id) is None:
                    raise EngineError(f"block {block_id} of tier {tier} is cached without known content")
