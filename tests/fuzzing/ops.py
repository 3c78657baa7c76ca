"""Every public launcher with arrays of any shape, dtype and layout.

Arguments are generated from their names: x_NC has the axes N and C, and an argument called H is the
length of the axis H. Each axis has one length, so the arguments fit, until one of them is changed: an
axis, the dtype, the layout. A launcher may compute, or refuse with a `raise` of its own. An error that
NumPy raises within a computation is a finding: there, the kernel would read outside an array.
"""

import importlib
import inspect
import linecache
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import strategies as st

import xtrain.kernels
from xtrain.kernels import embedding
from xtrain.kernels.cast import BFLOAT16
from xtrain.simulator import RaceError, sim

from .drive import Refused, Target

HELPERS = re.compile(
    r"_|make_|values_of|check_|shared_|refuse_|choose|flat_inputs|gpu_of|in_place|positions_for|multiprocessors|.*(_bytes|_ref|_kernel)$"
)
INT32 = {
    "ids", "lengths", "edges", "history", "tables", "blocks", "offsets", "positions", "rows", "top_k", "step", "plan", "row",
}  # fmt: skip
UINT8 = {"k_codes", "v_codes"}
INT64 = {"targets", "seed", "sequence"}
FLOATS = (1e-5, 0.5, 1.0, 0.0, -1.0, float("nan"), float("inf"))
INTS = (1, 2, 4, 0, -1, 7, 128, 2**31, 2**40)
LENGTHS = (1, 2, 3, 4, 5, 8, 16, 0)
SHORT = (
    1,
    2,
    3,
    4,
    5,
    2,
    3,
    0,
)  # for the simulator, which needs minutes for 16 heads of 16 sequences
# shapes that the name alone does not give
AXES = {
    ("qk_norm_rope_fwd", "qkv"): lambda d: (d["N"], (d["H"] + 2 * d["G"]) * d["D"]),
    ("qk_norm_rope_bwd", "qkv"): lambda d: (d["N"], (d["H"] + 2 * d["G"]) * d["D"]),
    ("qk_norm_rope_bwd", "dqkv"): lambda d: (d["N"], (d["H"] + 2 * d["G"]) * d["D"]),
    ("qk_norm_rope_bwd", "rstd"): lambda d: (d["N"], d["H"] + d["G"]),
    ("decode_attention", "qkv"): lambda d: (d["B"], (d["H"] + 2 * d["G"]) * d["D"]),
    ("matmul", "out"): lambda d: (d["N"], d["V"]),
    ("matmul", "a"): lambda d: (d["N"], d["C"]),
    ("matmul", "b"): lambda d: (d["C"], d["V"]),
}

# packages and files without a launcher of an op, which other files use
HIDDEN = re.compile(
    r"\.(primitives|runtime)\.|_(bwd|bwd_\w+|dkdv|parts|table|loops|tensor_cores|kernels)$"
)


def launchers() -> Iterator[tuple[str, Callable]]:
    for module in pkgutil.walk_packages(xtrain.kernels.__path__, "xtrain.kernels."):
        if module.ispkg or HIDDEN.search(module.name):
            continue
        content = importlib.import_module(module.name)
        for name, f in vars(content).items():
            ours = inspect.isfunction(f) and f.__module__ == content.__name__
            if not ours or HELPERS.match(name):
                continue
            names = inspect.signature(f).parameters
            scalars = [p for n, p in names.items() if not _is_array(n) and n != "dtype"]
            kinds = (int, float, bool, int | None, embedding.EmbeddingPlan | None)
            plain = all(
                p.annotation in kinds or isinstance(p.default, (bool, float)) for p in scalars
            )
            if plain and any(map(_is_array, names)) and not name.startswith("use_"):
                yield name, f


def _is_array(name):
    return name in ("x", "y", "dy", "a", "b", "out") or re.search(r"_[A-Z0-9n]+$", name) is not None


def arguments_for(name: str, f: Callable, lengths, changes, table=LENGTHS) -> dict:
    """lengths: of the axes, indices into table. changes: (argument, kind, where, what)."""
    d = {
        c: table[lengths[i % len(lengths)] % len(table)]
        for i, c in enumerate("ABCDEFGHIKLNOPQRSTVXYn")
    }
    d["N"] = d["B"] * d["T"] if lengths[0] % 2 else d["N"]
    d["H"] = d["G"] * (1 + lengths[1] % 2)
    d["D"] += d["D"] % 2
    d["E"] = d["A"] + 1
    if name in ("decode_attention", "context_attention") and lengths[0] % 3:
        d["S"] = 16  # the kernels accept only multiples of it
    d["P"] = max(d["P"], d["V"], d["S"], d["T"], d["N"])
    if "rope" in name or name == "decode_attention":
        d["R"] = d["D"] // 2
    elif "softmax" in name:
        d["R"] = d["T"] * (1 + lengths[1] % 2)
    values, rng = {}, np.random.default_rng(lengths[0])
    parameters = inspect.signature(f).parameters
    for i, (n, p) in enumerate(parameters.items()):
        given = p.default is p.empty or lengths[i % len(lengths)] % 3 == 0
        if given and n == "dtype":
            values[n] = (np.float32, BFLOAT16)[lengths[0] % 2]
        elif given:
            values[n] = _array(name, n, d, rng) if _is_array(n) else _scalar(n, d, p)
    names = list(values)
    for which, kind, where, what in changes:
        n = names[which % len(names)]
        if n != "dtype":
            values[n] = _changed(values[n], kind, where, what, parameters[n].default, table)
    return values


def _array(op, name, d, rng):
    stem, _, axes = name.rpartition("_")
    if (op, stem or name) in AXES:
        shape = AXES[op, stem or name](d)
    elif not stem:
        shape = (d["N"], d["C"])
    else:
        parts = re.findall(r"\d*[A-Zn]|\d+", axes)
        shape = tuple(int(re.match(r"\d*", p)[0] or 1) * d.get(p[-1], 1) for p in parts)
    if stem == "edges":
        return np.array([i * d["N"] // max(1, d["A"]) for i in range(d["A"])] + [d["N"]], np.int32)
    if stem in INT64 or stem in INT32:
        high = max(1, min(d["V"], d["S"], d["R"]))
        return rng.integers(0, high, shape, np.int64 if stem in INT64 else np.int32)
    if stem in UINT8:
        return rng.integers(0, 127, shape, np.uint8)
    return rng.standard_normal(shape).astype(BFLOAT16 if stem == "half" else np.float32)


def _scalar(name, d, parameter):
    if name in d:
        return d[name]
    if parameter.default not in (None, parameter.empty):
        return parameter.default
    sizes = {
        "vocab_size": d["V"],
        "vocab": d["V"],
        "n_decay": d["n"],
        "longest": d["N"],
        "limit": 2,
        "rows": 2,
        "repeats": 2,
    }
    return sizes.get(name, True if name == "causal" else 0.5)


def _changed(value, kind, where, what, default, table):
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, np.ndarray):
        others = INTS if isinstance(value, int) else FLOATS
        return others[what % len(others)]
    if kind == 0 and value.ndim:  # another length
        shape = list(value.shape)
        shape[where % value.ndim] = table[what % len(table)]
        return np.resize(value, shape) if value.size else np.ones(shape, value.dtype)
    if kind == 1:  # an axis more or less
        return value[None] if what % 2 or not value.ndim else value.reshape(-1)
    if kind == 2:
        return value.astype(
            (np.float32, BFLOAT16, np.float64, np.int32, np.int64, np.float16, np.bool_)[what % 7]
        )
    if kind == 3 and value.ndim:  # not contiguous
        return np.repeat(value, 2, axis=-1)[..., ::2]
    if kind == 4 and value.dtype.kind == "i":  # invalid ids
        return value + INTS[what % len(INTS)] % 2**31 - 3
    if kind == 5 and value.dtype.kind == "f" and value.size:
        value = value.copy()
        value.flat[where % value.size] = FLOATS[what % len(FLOATS)]
        return value
    return None if default is None else value


def own_refusal(error: BaseException) -> bool:
    """Was it raised by a `raise` statement in xtrain, with a message?"""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = linecache.getline(frame.filename, frame.lineno).strip().startswith("raise")
    return (
        isinstance(error, (ValueError, TypeError))
        and "xtrain" in frame.filename
        and raised
        and bool(str(error))
    )


def target(device: str) -> Target:
    """device: "cpu": the references; "sim": the kernels in the simulator, which detects out-of-bounds accesses."""
    ops = list(launchers())

    def call(value, folder):
        which, lengths, changes = value
        name, f = ops[which % len(ops)]
        given = arguments_for(name, f, lengths, changes, SHORT if device == "sim" else LENGTHS)
        if device == "sim":
            given = {n: sim(v) if isinstance(v, np.ndarray) else v for n, v in given.items()}
        try:
            with np.errstate(all="ignore"):
                f(**given)
        except (NotImplementedError, MemoryError) as error:  # 2^40 rows do not fit in memory
            raise Refused(name) from error
        except RaceError as error:
            if name not in ("append_kv", "append_codes", "dequantize_blocks", "decode_attention"):
                raise
            raise Refused(f"{name}: a place that is named twice, which is not allowed") from error
        except (ValueError, TypeError) as error:
            if not own_refusal(error):
                shapes = {
                    n: (v.shape, str(v.dtype)) if isinstance(v, np.ndarray) else v
                    for n, v in given.items()
                }
                raise AssertionError(f"{name}{shapes}: {type(error).__name__}: {error}") from error
            raise Refused(f"{name} {error}") from error

    small = st.integers(0, 63)
    change = st.tuples(small, st.integers(0, 6), small, small)
    return Target(
        st.tuples(
            st.integers(0, len(ops) - 1),
            st.lists(small, min_size=3, max_size=9),
            st.lists(change, max_size=2),
        ),
        call,
    )


def shapes() -> Target:
    return target("cpu")


def kernels() -> Target:
    return target("sim")


TARGETS = {"shapes": shapes, "kernels": kernels}
