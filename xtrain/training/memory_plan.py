"""How much memory does a training step take? Run it without any, and count.

A Ghost has the shape, the type and the life of a CuPy array, and no memory. Inside `planning()`
ghosts take CuPy's place: the model, autograd and every launcher run as they do on a GPU, the
launches do nothing. What is left of the step is which arrays it asks for and when it drops them,
which is the plan: any model size, in milliseconds, without a GPU. It knows no formula for
activations that could differ from the code.

    peak       the most bytes that arrays had at one time
    reserved   what CuPy's memory pool takes from the GPU for that: it splits blocks and joins them
               again, and holes remain

The steps are eager, as the first ones of a run are. A captured step allocates the same arrays.

Outside the pool are the CUDA context and the kernels' code (OUTSIDE, measured), and for several GPUs NCCL's buffers.
"""

import bisect
import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import device
from ..config import ModelConfig, TrainConfig
from ..kernels.gemm import WORKSPACE, _handle
from ..nn import autograd
from ..nn.autograd import Tensor
from ..nn.model import Transformer
from ..nn.observers import watch_launches, watch_ops
from .run import Run

STEPS = 3  # the first makes what stays from step to step
UNIT = 512  # bytes: CuPy's pool rounds up to whole ones
OUTSIDE = (
    0.7e9  # bytes that a process has on an H200 before its first array: context, cuBLAS, kernels
)
KINDS = {  # what an op's forward allocates, in words; other ops go by their own names
    "Embedding": "residual stream and norms",
    "RMSNorm": "residual stream and norms",
    "ResidualRMSNorm": "residual stream and norms",
    "AddNormLinear": "residual stream and projections",
    "Linear": "outputs of projections",
    "QKNormRope": "queries, keys, values",
    "Attention": "attention",
    "SwiGLU": "SwiGLU",
    "SwiGLULinear": "outputs of projections",
    "CrossEntropy": "logits",
    "LinearCrossEntropy": "gradients of the head",
}


# ----------------------------------------------------------------------------- what a graph keeps
def saved_bytes(root: Tensor) -> int:
    """Bytes that the graph behind `root` keeps for backward. Views count once, as the memory they are part of; leaves
    (parameters and the tensors that one started from) do not count."""
    kept, leaves, seen, nodes = {}, set(), set(), [root.node]
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for edge in filter(None, node.ctx.edges):
            nodes.append(edge.node)
            if edge.leaf is not None:
                leaves |= {id(_owner(edge.leaf.data)), id(_owner(edge.leaf.value))}
        for array in node.ctx.saved:
            if hasattr(array, "nbytes"):
                owner = _owner(array)
                kept[id(owner)] = owner.nbytes
    return sum(size for owner, size in kept.items() if owner not in leaves)


def _owner(array):
    while getattr(getattr(array, "base", None), "nbytes", None) is not None:
        array = array.base
    return array


# ----------------------------------------------------------------------------- counting
class Pool:
    """CuPy's memory pool: the smallest free block that is large enough, split; free neighbours are joined.

    reserved: bytes taken from the GPU.  most: the most there were at any time.
    """

    def __init__(self):
        self.reserved, self.most, self.free_blocks, self.serial = 0, 0, [], 0

    def take(self, size: int) -> SimpleNamespace:
        i = bisect.bisect_left(self.free_blocks, (size,))
        if i == len(self.free_blocks):
            self.reserved += size
            self.most = max(self.most, self.reserved)
            return SimpleNamespace(size=size, left=None, right=None, free=None)
        block = self._remove(self.free_blocks[i][2])
        if block.size > size:
            rest = SimpleNamespace(size=block.size - size, left=block, right=block.right, free=None)
            if rest.right is not None:
                rest.right.left = rest
            block.size, block.right = size, rest
            self._add(rest)
        return block

    def give(self, block: SimpleNamespace) -> None:
        if block.right is not None and block.right.free:
            block = self._join(block, block.right)
        if block.left is not None and block.left.free:
            block = self._join(block.left, block)
        self._add(block)

    def empty(self) -> None:
        """Give blocks that are whole and free back to the GPU."""
        for _, _, block in list(self.free_blocks):
            if block.left is None and block.right is None:
                self.reserved -= self._remove(block).size

    def _join(self, left, right):
        for block in (left, right):
            if block.free:
                self._remove(block)
        left.size, left.right = left.size + right.size, right.right
        if right.right is not None:
            right.right.left = left
        return left

    def _add(self, block):
        self.serial += 1
        block.free = (block.size, self.serial, block)
        bisect.insort(self.free_blocks, block.free)

    def _remove(self, block):
        self.free_blocks.pop(bisect.bisect_left(self.free_blocks, block.free[:2]))
        block.free = None
        return block


class Meter:
    """Counts what ghosts would occupy, by kind, and remembers the fullest moment.

    kinds: bytes at that moment.  op: what was being computed.  kept: bytes when the first backward began.
    timeline: ((op, way, layer), bytes by kind) at every change, if wanted.
    """

    def __init__(self, logits_width: int):
        self.pool, self.now, self.live, self.peak = Pool(), Counter(), 0, 0
        self.kinds, self.kept, self.op, self.logits_width = {}, {}, "", logits_width
        self.scope, self.timeline = [("", "", "")], None  # op, way, layer

    def kind_of(self, shape: tuple) -> str:
        op, way, _ = self.scope[-1]
        if len(shape) == 2 and shape[1] == self.logits_width:
            return "logits"
        if not op:
            return "other"
        return KINDS.get(op, op) if way == "forward" else "gradients of activations"

    def change(self, kind: str, size: int) -> None:
        self.now[kind] += size
        self.live += size
        if self.live > self.peak:
            self.peak, self.kinds, self.op = (
                self.live,
                dict(self.now),
                " ".join(filter(None, self.scope[-1])),
            )
        if self.timeline is not None:
            self.timeline.append((self.scope[-1], dict(self.now)))

    @contextlib.contextmanager
    def note(self, op: str, way: str, layer: str) -> Iterator[None]:
        if way == "backward" and not self.kept:
            self.kept = dict(self.now)
        self.scope.append((op, way, layer))
        yield
        self.scope.pop()


class Allocation:
    """Memory that one or several ghosts share. It goes when the last of them goes."""

    def __init__(self, meter: Meter, shape: tuple, itemsize: int):
        self.meter, self.kind = meter, meter.kind_of(shape)
        self.size = -(-math.prod(shape) * itemsize // UNIT) * UNIT
        self.block = meter.pool.take(self.size) if self.size else None
        meter.change(self.kind, self.size)

    def rename(self, kind: str) -> None:
        self.meter.change(self.kind, -self.size)
        self.meter.change(kind, self.size)
        self.kind = kind

    def __del__(self):
        if self.block is not None:
            self.meter.pool.give(self.block)
            self.meter.change(self.kind, -self.size)


# ----------------------------------------------------------------------------- arrays without memory
class Ghost:
    """What xtrain's GPU path asks of a CuPy array, except values. Anything else is an AttributeError."""

    device = SimpleNamespace(id=-1, compute_capability="90")
    data = SimpleNamespace(ptr=0)

    def __init__(
        self, allocation: Allocation, shape: tuple, dtype: Any, strides: tuple | None = None
    ):
        self.allocation, self.shape, self.dtype = allocation, tuple(shape), np.dtype(dtype)
        self.ndim, self.size, self.itemsize = len(shape), math.prod(shape), self.dtype.itemsize
        self.nbytes, dense = self.size * self.itemsize, _dense(shape, self.itemsize)
        self.strides = dense if strides is None else strides
        apart = [s for s, n in zip(self.strides, shape) if n > 1]
        contiguous = not self.size or apart == [s for s, n in zip(dense, shape) if n > 1]
        self.flags = SimpleNamespace(c_contiguous=contiguous)

    def _new(self, dtype=None) -> "Ghost":
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        allocation = Allocation(self.allocation.meter, self.shape, dtype.itemsize)
        return Ghost(allocation, self.shape, dtype)

    def copy(self) -> "Ghost":
        return self._new()

    def astype(self, dtype, copy: bool = True) -> "Ghost":
        return self if not copy and self.dtype == dtype else self._new(dtype)

    def view(self, dtype) -> "Ghost":
        *outer, last = self.shape
        return Ghost(
            self.allocation, (*outer, last * self.itemsize // np.dtype(dtype).itemsize), dtype
        )

    def reshape(self, *shape) -> "Ghost":
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(self.size // known if n == -1 else n for n in shape)
        if math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} into {shape}")
        if not self.flags.c_contiguous:
            strides = _strides_without_copy(self, shape)
            if strides is not None:
                return Ghost(self.allocation, shape, self.dtype, strides)
        whole = self if self.flags.c_contiguous else self.copy()
        return Ghost(whole.allocation, shape, self.dtype)

    def __getitem__(self, where) -> "Ghost":
        where = where if isinstance(where, tuple) else (where,)
        if Ellipsis in where:
            i = where.index(Ellipsis)
            missing = self.ndim - (len(where) - 1)
            where = where[:i] + (slice(None),) * missing + where[i + 1 :]
        where += (slice(None),) * (self.ndim - len(where))
        shape, strides = [], []
        for index, n, stride in zip(where, self.shape, self.strides):
            if isinstance(index, slice):
                shape.append(len(range(*index.indices(n))))
                strides.append(stride * (index.step or 1))
        return Ghost(self.allocation, tuple(shape), self.dtype, tuple(strides))

    def __setitem__(self, where, value) -> None:
        pass

    def fill(self, value) -> None:
        pass


def _strides_without_copy(x, shape):
    """Of a view of another shape, None where there is none: NumPy's rule, asked of one byte seen over and over."""
    there = np.lib.stride_tricks.as_strided(np.empty(1, np.uint8), x.shape, x.strides)
    view = there.view()
    try:
        view.shape = shape
    except AttributeError:  # it would need a copy
        return None
    return view.strides


def _dense(shape, itemsize):
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _Cupy:
    """What xtrain asks of the module cupy."""

    def __init__(self, meter: Meter):
        self.meter, self.zeros = meter, self.empty
        attributes = {  # of an H200
            "MultiProcessorCount": 132,
            "L2CacheSize": 60 << 20,
            "MaxSharedMemoryPerBlockOptin": 227 * 1024,
            "MaxSharedMemoryPerMultiprocessor": 228 * 1024,
        }
        self.cuda = SimpleNamespace(
            Device=lambda _=None: SimpleNamespace(
                attributes=attributes, id=-1, compute_capability="90"
            ),
            runtime=SimpleNamespace(getDevice=lambda: -1),
        )
        self.lib = SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=self.as_strided))

    def empty(self, shape, dtype=np.float32) -> Ghost:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        return Ghost(Allocation(self.meter, shape, np.dtype(dtype).itemsize), shape, dtype)

    def asarray(self, x) -> Ghost:
        return self.empty(x.shape, x.dtype)

    def as_strided(self, x: Ghost, shape, strides) -> Ghost:
        return Ghost(x.allocation, shape, x.dtype, strides)


@contextlib.contextmanager
def planning(logits_width: int) -> Iterator[Meter]:
    """Inside, the device "gpu" is made of ghosts, whether there is a GPU or not."""
    meter = Meter(logits_width)
    module, real = _Cupy(meter), device.cupy
    workspace = []

    def multiply(*_):
        if not workspace:  # made at the first product; see gemm.py
            workspace.append(module.empty(WORKSPACE, np.uint8))
            workspace[0].allocation.rename("workspace of cuBLAS")

    def put(new, old):
        for name, other in list(sys.modules.items()):
            if name.startswith("xtrain.") and getattr(other, "cupy", None) is old:
                other.cupy = new

    fake = lambda: module
    put(fake, real)
    try:
        with watch_launches(lambda *_: None, multiply):
            yield meter
    finally:
        put(real, fake)  # also in modules that were imported meanwhile
        for key in [key for key in autograd._units if key[0] is Ghost]:
            del autograd._units[key]


# ----------------------------------------------------------------------------- the plan
@dataclass(frozen=True)
class Plan:
    """The memory of one training step on one GPU, in bytes.

    kinds: at the fullest moment.  kept: after the first forward pass, waiting for backward.  op: where the peak is.
    timeline: (op, way, layer), bytes by kind, over the last step.
    """

    peak: int
    reserved: int
    op: str
    kinds: dict[str, int]
    kept: dict[str, int]
    timeline: list


def plan(
    config: ModelConfig,
    batch: int,
    seq_len: int,
    precision: str = "fp32",
    recompute: str = "none",
    accumulate: int = 1,
) -> Plan:
    """batch: sequences per forward pass. accumulate: forward passes per optimizer step."""
    with planning(config.padded_vocab_size) as meter:
        run = _run(config, batch, seq_len, precision, recompute, accumulate)
        arena, optimizer = run.model.arena, run.optimizer
        for name, array in (
            ("weights", arena.weights), ("bf16 copy of the weights", arena.half), ("gradients", arena.grads),
            ("moments", optimizer.m), ("moments", optimizer.v),
        ):  # fmt: skip
            if array is not None:
                array.allocation.rename(name)
        with watch_ops(run.model, meter.note):
            for _ in range(STEPS):
                meter.timeline = []
                meter.pool.empty()  # as graph.py does
                _step(run)
        timeline, meter.timeline = meter.timeline, None
    kinds, kept = ({k: n for k, n in x.items() if n} for x in (meter.kinds, meter.kept))
    return Plan(meter.peak, meter.pool.most, meter.op, kinds, kept, timeline)


def measure(
    config: ModelConfig,
    batch: int,
    seq_len: int,
    precision: str = "fp32",
    recompute: str = "none",
    accumulate: int = 1,
) -> int:
    """The same steps on the GPU. -> the most bytes that CuPy's pool took, to be compared with Plan.reserved."""
    gpu = device.cupy().cuda
    _handle(gpu.runtime.getDevice())  # its workspace lies in another pool, always
    pool = gpu.MemoryPool()
    with gpu.using_allocator(pool.malloc):
        run = _run(config, batch, seq_len, precision, recompute, accumulate)
        most = 0
        for _ in range(STEPS):
            pool.free_all_blocks()
            _step(run)
            most = max(most, pool.total_bytes())
        return most + WORKSPACE


def _run(config, batch, seq_len, precision, recompute, accumulate):
    c = TrainConfig(
        batch=batch * accumulate, micro_batch=batch, seq_len=seq_len, steps=2, lr=1e-3, warmup=0,
        precision=precision, recompute=recompute, graph=False,
    )  # fmt: skip
    model = Transformer(config, None, "gpu", precision, recompute)
    return Run(c, model, SimpleNamespace(loader=lambda *_: None))


def _step(run):
    c, zeros = run.config, device.cupy().zeros
    ids, targets = (zeros((c.batch, c.seq_len), np.int32) for _ in range(2))
    run.train_step(ids, targets, zeros(3, np.float32))


def parameters(config: ModelConfig) -> int:
    """Numbers in the arena, padding included."""
    with planning(config.padded_vocab_size):
        return Transformer(config, None, "gpu").arena.weights.size


def zero1(plan: Plan, ranks: int) -> float:
    """Bytes reserved on each of so many GPUs when they divide moments and float32 master weights
    among them (Rajbhandari et al. 2020, stage 1). In fp32 the weights are what the forward pass
    reads: they stay whole."""
    divided = plan.kinds["moments"]
    if "bf16 copy of the weights" in plan.kinds:
        divided += plan.kinds["weights"]
    return plan.reserved - divided * (1 - 1 / ranks)


def largest(fits: Callable[[int], bool], most: int = 1 << 16) -> int:
    """The largest batch that fits, 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measured_timeline(step: Callable[[], Any]) -> list[int]:
    """step() on the GPU -> bytes in use in CuPy's pool after each of its allocations and releases."""
    cp = device.cupy()
    points = [cp.get_default_memory_pool().used_bytes()]

    class Hook(cp.cuda.MemoryHook):
        name = "xtrain"

        def malloc_postprocess(self, mem_size, **_):
            points.append(points[-1] + mem_size)

        def free_postprocess(self, mem_size, **_):
            points.append(points[-1] - mem_size)

    with Hook():
        step()
    return points
