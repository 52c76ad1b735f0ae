"""Which block holds which content: keys of full blocks, by tier.

Contract: a key stands for one sequence of tokens from the start (each key hashes its parent's), under one salt; on a
hit the tokens themselves are compared too, so a hash collision can cost a miss but never a wrong block. Only content
that was computed and accepted is entered. A key has at most one block a tier.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mini_infer.interfaces.cache_policy import BlockKey


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, which are hashed and compared in one go."""
    return array("q", token_ids).tobytes()


def block_key(parent: BlockKey, tokens: bytes, extra: str) -> BlockKey:
    """Content key of a block.

    Args:
        parent: key of the block before it, which carries ``extra`` on; empty for the first.
        tokens: the block's own, packed.
        extra: anything else that changes KV: tenant's salt, adapter.
    """
    digest = hashlib.blake2b(parent or hashlib.sha256(extra.encode()).digest(), digest_size=16)
    digest.update(tokens)
    return digest.digest()


@dataclass(slots=True)
class _Entry:
    tokens: bytes
    depth: int
    blocks: dict[str, int]  # tier -> block id


class PrefixIndex:
    """Keys to blocks and back."""

    def __init__(self) -> None:
        self._entries: dict[BlockKey, _Entry] = {}
        self._keys: dict[tuple[str, int], BlockKey] = {}

    def find(self, key: BlockKey, tier: str, tokens: bytes | None = None) -> int | None:
        """The block of ``tier`` that holds ``key``'s content; checked against ``tokens`` where given."""
        entry = self._entries.get(key)
        if entry is None or (tokens is not None and entry.tokens != tokens):
            return None
        return entry.blocks.get(tier)

    def key_of(self, tier: str, block_id: int) -> BlockKey | None:
        """The content of a block, if it was entered."""
        return self._keys.get((tier, block_id))

    def depth(self, key: BlockKey) -> int:
        """Blocks before it in its sequence."""
        return self._entries[key].depth

    def enter(self, key: BlockKey, tier: str, block_id: int, tokens: bytes, depth: int) -> bool:
        """A block holds ``key``'s content from now on. False if another block of the tier does already."""
        entry = self._entries.setdefault(key, _Entry(tokens, depth, {}))
        if tier in entry.blocks or entry.tokens != tokens:
            return False
        entry.blocks[tier] = block_id
        self._keys[tier, block_id] = key
        return True

    def copied(self, key: BlockKey, tier: str, block_id: int) -> bool:
        """A copy of ``key``'s content has arrived in another tier. False if one was there already, or it is gone."""
        entry = self._entries.get(key)
        return entry is not None and self.enter(key, tier, block_id, entry.tokens, entry.depth)

    def remove(self, tier: str, block_id: int) -> BlockKey | None:
        """A block's content is no longer there; its key, if it had one."""
        key = self._keys.pop((tier, block_id), None)
        if key is not None:
            entry = self._entries[key]
            del entry.blocks[tier]
            if not entry.blocks:
                del self._entries[key]
        return key

    def tiers(self, key: BlockKey) -> Iterator[tuple[str, int]]:
        """Where ``key``'s content lies: (tier, block id)."""
        entry = self._entries.get(key)
        return iter(()) if entry is None else iter(list(entry.blocks.items()))
