"""The state that sampling and the decoding step read and write, on the host and on the device."""

import collections
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import numpy as np

from ..device import Array, cupy, mapped_array, to_device
from .requests import Request


class DecodeBatch:
    """Some numbers for each of up to B sequences, and their block tables.

    Entry b of every column belongs to the sequence in slot b; entries of length -1 are idle. The
    columns are views of one block of memory, which the tables follow, so one copy uploads all of
    them. On the device the decoding step itself updates them, as the host does its own. The last
    tokens, `ids`, are on the device only: a step needs them before the host knows them.

    host, device: the columns by name, each (B,).
    host_tables, device_tables: the block tables, (B, M).
    """

    # lengths: tokens in the cache.  step: tokens drawn so far.  penalty_slot, mask_slot: its list of
    # penalties and its mask, -1: none.  Of a verifying step (verifying.py) alone: previous: entry of
    # the sequence's token before, if that is in the same pass, else -1; token: of the row.
    COLUMNS: ClassVar[dict[str, type]] = {
        "seed": np.int64,
        "random_stream": np.int64,
        "lengths": np.int32,
        "step": np.int32,
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
        "penalty_slot": np.int32,
        "mask_slot": np.int32,
        "adapter": np.int32,
        "previous": np.int32,
        "token": np.int32,
    }

    # the columns that a Request has too, and that stay as they are
    OPTIONS: ClassVar[tuple[str, ...]] = (
        "seed",
        "random_stream",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "adapter",
    )

    def __init__(self, B: int, M: int, device: str):
        end = B * sum(np.dtype(t).itemsize for t in self.COLUMNS.values())
        self.end_of_columns = end
        self.memory = Mirrored(end + 4 * B * M, device)
        self.host = self._columns(self.memory.host, B)
        self.device = self._columns(self.memory.device, B)
        self.host_tables = self.memory.host[end:].view(np.int32).reshape(B, M)
        self.device_tables: Array = self.memory.device[end:].view(np.int32).reshape(B, M)
        self.ids: Array = to_device(np.zeros(B, np.int32), device)
        self.edges: Array = to_device(np.arange(B + 1, dtype=np.int32), device)
        self.device_name = device
        self.host["top_p"][:] = 1
        self.host["previous"][:] = -1
        self.clear()

    @classmethod
    def _columns(cls, block: Array, B: int) -> dict[str, Array]:
        columns = {}
        end = 0
        for name, dtype in cls.COLUMNS.items():
            start = end
            end += B * np.dtype(dtype).itemsize
            columns[name] = block[start:end].view(dtype)
        return columns

    def clear(self) -> None:
        """Mark all entries as idle, on the host."""
        self.mark_idle_except([])

    def write(self, requests: list[Request]) -> None:
        """Write options and block tables of requests to the entries of their slots, on the host."""
        slots = [r.slot for r in requests]
        for name, values in zip(self.OPTIONS, zip(*map(_options, requests))):
            self.host[name][slots] = values
        penalty_slots = [r.slot if r.penalties.active else -1 for r in requests]
        self.host["penalty_slot"][slots] = penalty_slots
        mask_slots = [-1 if r.constraint is None else r.slot for r in requests]
        self.host["mask_slot"][slots] = mask_slots
        self.host_tables[slots] = -1
        longest = max([len(r.blocks) for r in requests])
        rows = [r.blocks + [-1] * (longest - len(r.blocks)) for r in requests]
        self.host_tables[slots, :longest] = rows

    def write_counters(
        self, slots: list[int], lengths: Sequence[int], steps: Sequence[int]
    ) -> None:
        """Write the columns that every token changes, on the host."""
        self.host["lengths"][slots] = lengths
        self.host["step"][slots] = steps

    def write_blocks(self, request: Request) -> None:
        """Write the blocks of a request that got some in addition, on the host."""
        self.host_tables[request.slot, : len(request.blocks)] = request.blocks

    def mark_idle_except(self, slots: list[int]) -> None:
        """Mark all other entries as idle, on the host."""
        idle = np.ones(len(self.host_tables), bool)
        idle[slots] = False
        self.host["lengths"][idle] = -1
        self.host["penalty_slot"][idle] = -1
        self.host["mask_slot"][idle] = -1
        self.host_tables[idle] = -1

    def upload(self, tables: int | None = None) -> None:
        """Copy the columns and the first tables, by default all, to the device."""
        self.memory.upload(0, self._end_of(tables))

    def upload_tables(self) -> None:
        """Copy the tables to the device."""
        self.memory.upload(self.end_of_columns)

    def _end_of(self, tables):
        """Return the byte after so many tables; None: that after all."""
        if tables is None:
            return None
        return self.end_of_columns + 4 * tables * self.host_tables.shape[1]

    def rows(self, slots: list[int]) -> dict[str, Array]:
        """Return a copy of these entries of the host's columns, on the device."""
        packed = np.concatenate([column[slots].view(np.uint8) for column in self.host.values()])
        return self._columns(to_device(packed, self.device_name), len(slots))

    def first(self, b: int) -> dict[str, Array]:
        """Return the first b entries of every column, on the device."""
        return {name: column[:b] for name, column in self.device.items()}


_options = attrgetter(*DecodeBatch.OPTIONS)


class Mirrored:
    """Bytes on the host and a copy on the device; `upload` copies.

    On a GPU it does not wait: the copy comes after the kernels launched before it and before those
    launched after it, and the host may write on at once.
    """

    BUFFERS = 4  # in pinned memory; one is used again when its copy has long ended

    def __init__(self, nbytes: int, device: str):
        self.host = np.zeros(nbytes, np.uint8)
        self.device: Array = to_device(self.host.copy(), device)
        self.buffers: collections.deque = collections.deque()
        if device == "gpu":
            for _ in range(self.BUFFERS):
                event = cupy().cuda.Event(disable_timing=True)
                event.record()
                self.buffers.append((*mapped_array((nbytes,), np.uint8), event))

    def upload(self, start: int = 0, end: int | None = None) -> None:
        """Copy bytes start to end."""
        part = slice(start, end)
        if not self.buffers:
            self.device[part] = self.host[part]
            return
        memory, memory_gpu, copied = self.buffers[0]
        copied.synchronize()
        memory[part] = self.host[part]
        self.device[part] = memory_gpu[part]
        copied.record()
        self.buffers.rotate(-1)
