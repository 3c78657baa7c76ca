"""Shared by the tests of all kernels: where a kernel runs, its tolerance, derivatives, sentinels.

Without a GPU a kernel runs in xtrain.simulator, on tiny arrays; with a GPU on the GPU, on larger ones.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import linecache
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import xtrain.kernels
from xtrain import device, simulator
from xtrain.kernels.runtime import launch as _launch
from xtrain.simulator import KernelError
from xtrain.simulator.source import _translated

GPU = device.gpu_available()
SLOW = bool(os.environ.get("XTRAIN_SLOW"))
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
# more shapes and more planted bugs, which are slow in the simulator; .ci/run runs them too
only_slow = pytest.mark.skipif(not SLOW, reason="slow: XTRAIN_SLOW=1")
# a bug that is planted in a kernel shows that its tests can fail: in the simulator, not each time
planted_bugs = pytest.mark.skipif(GPU or not SLOW, reason="planted bugs: on a CPU, XTRAIN_SLOW=1")
# the network, or other people's tests: not part of the suite, .ci/run has a step for them
only_all = pytest.mark.skipif(os.environ.get("XTRAIN_SLOW") != "all", reason="XTRAIN_SLOW=all")


def pairs_of(values: list[list]) -> list[tuple]:
    """Return few of the combinations of one value of each list: each two values of different lists occur together."""
    combinations = list(itertools.product(*map(range, map(len, values))))
    pairs = {c: set(itertools.combinations(enumerate(c), 2)) for c in combinations}
    missing = set().union(*pairs.values())
    chosen = []
    while missing or not chosen:
        best = max(combinations, key=lambda c: len(pairs[c] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return [tuple(choice[i] for choice, i in zip(values, c)) for c in sorted(chosen)]


def pairwise(values: dict[str, list]):
    """Parametrize a test as `{names: values}` in pairs_of these values in the simulator, in all combinations on a GPU.

    names: one name or several, "x_dtype, dtype", as for pytest.mark.parametrize.
    """
    several = [("," in names) for names in values]
    choose = itertools.product if GPU else lambda *lists: pairs_of(list(lists))
    cases = []
    for combination in choose(*values.values()):
        parts = [value if more else (value,) for value, more in zip(combination, several)]
        cases.append(tuple(itertools.chain(*parts)))
    return pytest.mark.parametrize(", ".join(values), cases)


def to_kernel(array):
    """A copy of the array on the device of the kernels: the GPU if there is one, else the simulator."""
    return device.to_device(np.asarray(array, order="C"), "gpu") if GPU else simulator.sim(array)


def on_kernel(w, move=to_kernel):
    """A copy of a quantized matrix on the device of the kernels, or where `move` puts an array."""
    arrays = {name: move(a) for name, a in vars(w).items() if isinstance(a, np.ndarray)}
    return dataclasses.replace(w, **arrays)


def on_sim(w):
    """A copy of a quantized matrix in the simulator, also where there is a GPU."""
    return on_kernel(w, simulator.sim)


def to_host(array) -> np.ndarray:
    """The values as a NumPy array."""
    return np.asarray(device.to_numpy(array))


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Are two arrays equal bit for bit? (`assert a.tobytes() == b.tobytes()` takes pytest minutes to explain when it fails.)"""
    return a.tobytes() == b.tobytes()


def rng(*seed) -> np.random.Generator:
    """A NumPy generator."""
    return np.random.default_rng(seed)


def normal(seed, *shape, mean=0.3, scale=1.0, dtype=np.float32) -> np.ndarray:
    """Random numbers with a mean that is not zero, to detect a kernel that does not subtract or add a mean."""
    return (rng(seed).standard_normal(shape) * scale + mean).astype(dtype)


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


def single(*arrays) -> list:
    """The arrays in float32."""
    return [a.astype(np.float32) for a in arrays]


def double(*arrays) -> list:
    """The arrays in float64; None stays None."""
    return [None if a is None else a.astype(np.float64) for a in arrays]


def assert_as_good(kernel, exact, reference, floor=2e-7, what="", factor=2.0, scale=1e-30):
    """The kernel's error against float64 is at most twice that of the reference run in the kernel's dtype.

    floor: an allowed error of about two units in the last place of float32, relative to the largest
    exact value, or to `scale` if the result is a small difference of numbers of that size.
    """
    kernel, exact, reference = (to_host(a).astype(np.float64) for a in (kernel, exact, reference))
    assert kernel.shape == exact.shape, f"{what}: shape {kernel.shape}, expected {exact.shape}"
    if exact.size == 0:
        return
    error, allowed = np.abs(kernel - exact), np.abs(reference - exact).max()
    limit = factor * allowed + floor * max(np.abs(exact).max(), scale)
    worst = np.unravel_index(np.nanargmax(np.where(np.isnan(error), np.inf, error)), error.shape)
    assert not np.isnan(error).any() and error[worst] <= limit, (
        f"{what}: shape {kernel.shape}, worst at {tuple(int(i) for i in worst)}: kernel {kernel[worst]!r}, "
        f"exact {exact[worst]!r}, error {error[worst]:.3g} > {limit:.3g} (reference errs by {allowed:.3g})"
    )


def assert_directional(f, inputs, gradients, seed=0, tol=1e-6, step=1e-5):
    """(f(x + e v) - f(x - e v)) / 2e == <gradient, v> for a random direction v of each input, in float64.

    f(*inputs) -> float. gradients: one array per input, None where there is none.
    """
    for i, (x, gradient) in enumerate(zip(inputs, gradients)):
        if gradient is None:
            continue
        v = rng(seed, i).standard_normal(x.shape)
        v /= max(np.linalg.norm(v), 1e-30)
        moved = lambda e: f(*inputs[:i], x + e * v, *inputs[i + 1 :])  # noqa: B023
        numeric = (moved(step) - moved(-step)) / (2 * step)
        analytic = float((gradient * v).sum())
        size = max(abs(numeric), abs(analytic), float(np.linalg.norm(gradient)) * 0.1, 1e-3)
        assert abs(numeric - analytic) <= tol * size, (
            f"input {i}: numeric {numeric}, analytic {analytic}"
        )


@contextlib.contextmanager
def sentinels(monkeypatch, pad=64):
    """Add `pad` sentinel elements on both sides of every array that a launcher allocates; check them at the end."""
    blocks, allocate = [], _launch._allocate

    def guarded(like, shape, dtype):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        size = int(np.prod(shape))
        block = allocate(like, (size + 2 * pad,), dtype)
        block.view(np.uint8)[...] = 0x5A
        blocks.append((block, size))
        return block[pad : pad + size].reshape(shape)

    monkeypatch.setattr(_launch, "_allocate", guarded)
    yield
    monkeypatch.setattr(_launch, "_allocate", allocate)
    assert blocks, "the launcher allocated nothing through _launch.empty"
    for block, size in blocks:
        edges = to_host(block).view(np.uint8).reshape(size + 2 * pad, -1)
        untouched = (edges[:pad] == 0x5A).all() and (edges[pad + size :] == 0x5A).all()
        assert untouched, f"wrote outside an output of {size} elements"


def with_bug(thing, old: str, new: str, scope: dict) -> dict:
    """Run the source of a module or function in `scope`, with `old` (which occurs once) replaced by `new`. -> scope

    The simulator's reports show the changed lines.
    """
    source = inspect.getsource(thing)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    source, name = source.replace(old, new), f"<{old.strip()[:30]} -> {new.strip()[:30]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)
    return scope


@contextlib.contextmanager
def with_planted_bug(modules, name: str, old: str, new: str):
    """Replace a line of the function `name` of modules[0]; all modules that import it use the changed function meanwhile.

    Kernels that the modules' cached functions have made are made again, then and afterwards.
    """
    modules = list(dict.fromkeys(modules))
    function = getattr(modules[0], name)
    function = getattr(function, "__wrapped__", getattr(function, "py_func", function))
    broken = with_bug(function, old, new, dict(vars(modules[0])))[name]
    makers = {id(m): m for x in modules for m in vars(x).values() if hasattr(m, "cache_clear")}

    def forget():
        for translated in _translated.values():
            translated.clear()
        for maker in makers.values():
            maker.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        forget()
        for module in modules:
            if hasattr(module, name):
                patch.setattr(module, name, broken)
        try:
            yield
        finally:
            forget()


@functools.cache
def _run_once(check):
    check()


def assert_bug_is_found(check, modules, name: str, old: str, new: str):
    """Fail unless `check`, a function of a module, passes, and with a bug does not: by the simulator, or by wrong numbers.

    Without a bug it runs once for all bugs. The rest: with_planted_bug.
    """
    _run_once(check)
    with with_planted_bug(modules, name, old, new), pytest.raises((KernelError, AssertionError)):
        check()


def source_of(file: str) -> str:
    """The source of a module of xtrain.kernels, by its dotted name in it: "attention.flash_attention"."""
    return Path(xtrain.kernels.__file__).parent.joinpath(f"{file.replace('.', '/')}.py").read_text()


def load_changed(file: str, source: str, folder: Path, monkeypatch):
    """Replace the module xtrain.kernels.<file> by `source` until the test ends. -> the module

    The source is written to folder/<stem>.py, for tracebacks.
    """
    name = f"xtrain.kernels.{file}"
    package, _, stem = name.rpartition(".")
    path = folder / f"{stem}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.import_module(package), stem, module, raising=False)
    spec.loader.exec_module(module)
    return module
