"""The blocks of the KV cache: their holders, and their known tokens. Pure Python.

Enters: requests to take, hold and release blocks, and the tokens of full blocks. Leaves: block numbers. Guaranteed:
- a block is free or held by a known number of holders, never both; releasing what is not held is an error at once; taking is all or
  nothing;
- a block is found again only for the very tokens it holds behind the very tokens before them: contents are compared, not only hashed;
- a free block keeps its content until it is taken for something else; those released longest ago are taken first;
- a new pool knows no content: weights may have changed since the pool before it was used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

START = 0  # the number of the content before the first block
Content = tuple[int, tuple[int, ...]]  # the number of the content before, and a block's tokens


class BlockPool:
    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._empty = list(range(blocks - 1, -1, -1))  # free, content unknown; popped from the end: low numbers first
        self._kept: dict[int, None] = {}  # free, content known; released longest ago first
        self._holders = [0] * blocks
        self._known: dict[Content, int] = {}  # content -> block
        self._contents: dict[int, tuple[int, Content]] = {}  # block -> the content and its number, which is never used again
        self._last_number = START

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def used(self) -> int:
        return self.size - self.free

    def is_free(self, block: int) -> bool:
        return self._holders[block] == 0

    def take(self, count: int) -> list[int] | None:
        """Return `count` free blocks with one holder each, or None if there are fewer."""
        if count > self.free:
            return None
        taken = [self._empty.pop() if self._empty else self._forget_oldest() for _ in range(count)]
        for block in taken:
            assert self._holders[block] == 0
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held, or free with known content."""
        for block in blocks:
            assert self._holders[block] > 0 or block in self._kept, f"block {block} is free and its content is gone"
            self._kept.pop(block, None)
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder; a block without holders is free. Later blocks become free before earlier ones, without which they are
        useless."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released twice"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._contents:
                self._kept[block] = None
            else:
                self._empty.append(block)

    def find(self, before: int, tokens: tuple[int, ...]) -> int | None:
        """Return the block that holds these tokens after that content, or None."""
        return self._known.get((before, tokens))

    def content(self, block: int) -> int:
        """Return the number of a block's content, which must be known."""
        return self._contents[block][0]

    def remember(self, block: int, before: int, tokens: tuple[int, ...]) -> int:
        """Register the content of a held block that is full and will not be written again. Returns the number of its content; if another
        block is known to hold the same content, `find` keeps returning that one."""
        assert self._holders[block] > 0
        known = self._known.get((before, tokens))
        if known is not None:
            return self.content(known)
        if block in self._contents:  # the block followed one that is no longer known, though another block holds the same content
            self._forget(block)
        self._last_number += 1
        self._known[before, tokens] = block
        self._contents[block] = (self._last_number, (before, tokens))
        return self._last_number

    def _forget_oldest(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        _, content = self._contents.pop(block)
        del self._known[content]


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
