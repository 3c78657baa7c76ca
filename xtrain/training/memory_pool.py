"""CuPy's memory pool, counted without memory. See memory_plan.py."""

import bisect
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    """A range of the pool's memory. left, right: its neighbours in one allocation on the GPU.

    entry: where it is in Pool.free_blocks; None while it is in use.
    """

    size: int
    left: "Block | None" = None
    right: "Block | None" = None
    entry: "tuple[int, int, Block] | None" = None


class Pool:
    """CuPy's memory pool: best fit, the rest of a block is split off, free neighbours are joined.

    reserved: bytes taken from the GPU.
    most: its maximum so far.
    free_blocks: (size, serial number, block), sorted.
    """

    def __init__(self) -> None:
        self.reserved = self.most = self.serial = 0
        self.free_blocks: list[tuple[int, int, Block]] = []

    def allocate(self, size: int) -> Block:
        """Return the smallest free block of at least `size` bytes, split to that size; else a new
        one from the GPU."""
        i = bisect.bisect_left(self.free_blocks, size, key=lambda entry: entry[0])
        if i == len(self.free_blocks):
            self.reserved += size
            self.most = max(self.most, self.reserved)
            return Block(size)
        block = self._remove(self.free_blocks[i][2])
        if block.size > size:
            remainder = Block(block.size - size, block, block.right)
            if remainder.right is not None:
                remainder.right.left = remainder
            block.size, block.right = size, remainder
            self._add(remainder)
        return block

    def free(self, block: Block) -> None:
        """Return a block to the pool."""
        if block.right is not None and block.right.entry:
            block = self._join(block, block.right)
        if block.left is not None and block.left.entry:
            block = self._join(block.left, block)
        self._add(block)

    def free_all_blocks(self) -> None:
        """Return allocations that are free as a whole to the GPU, as CuPy's method of this name."""
        for _, _, block in list(self.free_blocks):
            if block.left is None and block.right is None:
                self.reserved -= self._remove(block).size

    def _join(self, left, right):
        for block in (left, right):
            if block.entry:
                self._remove(block)
        left.size = left.size + right.size
        left.right = right.right
        if right.right is not None:
            right.right.left = left
        return left

    def _add(self, block):
        self.serial += 1
        block.entry = (block.size, self.serial, block)
        bisect.insort(self.free_blocks, block.entry, key=lambda entry: entry[:2])

    def _remove(self, block):
        self.free_blocks.pop(
            bisect.bisect_left(self.free_blocks, block.entry[:2], key=lambda entry: entry[:2])
        )
        block.entry = None
        return block
