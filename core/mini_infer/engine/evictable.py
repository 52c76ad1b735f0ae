"""What a cache policy may evict, as the core offers it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mini_infer.engine.block_pool import BlockPool, BlockState
from mini_infer.engine.prefix_index import PrefixIndex
from mini_infer.interfaces.cache_policy import BlockKey


@dataclass(frozen=True, slots=True)
class Evictable(Collection[BlockKey]):
    """Keys of a tier's cached blocks, looked up as they are asked for: there may be a hundred thousand."""

    index: PrefixIndex
    tier: str
    pool: BlockPool

    def __len__(self) -> int:
        return len(self.pool.cached)

    def __iter__(self) -> Iterator[BlockKey]:
        keys = (self.index.key_of(self.tier, block_id) for block_id in self.pool.cached)
        return (key for key in keys if key is not None)

    def __contains__(self, key: object) -> bool:
        block_id = self.index.find(key, self.tier) if isinstance(key, bytes) else None
        return block_id is not None and self.pool.state(block_id) is BlockState.CACHED
