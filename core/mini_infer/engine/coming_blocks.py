"""Blocks whose content is on its way: a planned or launched step fills them with tokens that are known already.

Contract: steps run in order, and in each layer of a step all keys and values are written before any are read. So a
block of a prompt may be shared from the moment its step is planned, also within that step. It leaves here when its
content is in the index, or when its owner gives it up; whoever else holds it goes on. A step that fails takes along all
that was planned with or after it.
"""

from dataclasses import dataclass

from mini_infer.interfaces.cache_policy import BlockKey


@dataclass(frozen=True, slots=True)
class _Coming:
    owner: int
    block_id: int
    tokens: bytes


class ComingBlocks:
    """Such blocks by their content's key; of several with the same content the first counts."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, _Coming] = {}
        self._owned: dict[int, list[BlockKey]] = {}  # by id of the owner

    def add(self, owner: object, key: BlockKey, block_id: int, tokens: bytes) -> None:
        """A step of ``owner`` will fill a block."""
        if key not in self._blocks:
            self._blocks[key] = _Coming(id(owner), block_id, tokens)
            self._owned.setdefault(id(owner), []).append(key)

    def find(self, key: BlockKey, tokens: bytes) -> int | None:
        """The block that is to hold these tokens."""
        coming = self._blocks.get(key)
        return None if coming is None or coming.tokens != tokens else coming.block_id

    def remove(self, key: BlockKey) -> None:
        """The content is in the index."""
        self._blocks.pop(key, None)

    def forget(self, owner: object) -> None:
        """``owner`` gives its blocks up."""
        for key in self._owned.pop(id(owner), ()):
            coming = self._blocks.get(key)
            if coming is not None and coming.owner == id(owner):
                del self._blocks[key]
