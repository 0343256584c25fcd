"""Who holds which block of the KV cache. Pure Python.

Enters: requests to take, share and release blocks. Leaves: block numbers. Guaranteed: a block is free or held by a known number of
holders, never both; releasing what is not held is an error at once; taking is all or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free = list(range(blocks - 1, -1, -1))  # popped from the end: low numbers first
        self._holders = [0] * blocks

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one holder each, or None when there are not that many."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert self._holders[block] == 0
            self._holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for blocks that are held."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer; a block without holders is free."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is released twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
