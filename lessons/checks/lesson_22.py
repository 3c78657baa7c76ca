"""Exercises of lesson 22: weights in and out, and finding where two implementations diverge."""

import json
import struct

import numpy as np

from .attempt import exercise

KINDS = {"F32": np.float32, "I64": np.int64, "F16": np.float16}


def safetensors(tensors):
    """-> the bytes of a .safetensors file"""
    header, body = {}, b""
    names = {np.dtype(v): k for k, v in KINDS.items()}
    for name, a in tensors.items():
        raw = a.tobytes()
        header[name] = {
            "dtype": names[a.dtype],
            "shape": list(a.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    about = {"__metadata__": {"format": "pt"}}
    # the header lists the tensors in another order than the data
    text = json.dumps(about | dict(reversed(header.items()))).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


@exercise(
    "22.1", "read_safetensors",
    first_step="the first 8 bytes are a little-endian number n; the next n bytes are JSON; everything after that is data.",
    hints={
        "KeyError": "The header entry __metadata__ is not a tensor: skip it.",
        "JSONDecodeError": "The header is the n bytes after the first 8: data[8 : 8 + n].",
        "UnicodeDecodeError": "This is not the header. n is a little-endian number ('<Q'), and the header is data[8 : 8 + n].",
        "ValueError": "The number of bytes does not match shape and type: the type of a tensor is KINDS[...] of its 'dtype', and its bytes go "
        "from 8 + n + begin to 8 + n + end.",
        "TypeError": "struct.unpack returns a tuple even for one number: use its element [0].",
    },
    kernel=False,
)  # fmt: skip
def read_safetensors(e):
    a = np.asarray(e.normal(2, 3))
    fixed = (
        {},
        {"w": a},
        {"w": a, "b": np.arange(4, dtype=np.int64)},
        {
            "n": np.asarray(e.normal(3)).astype(np.float16),
            "w": a,
            "one": np.asarray(e.normal(1)).reshape(()),
            "empty": np.empty((0, 3), np.float32),
        },
    )

    def draw(rng):
        kinds = list(KINDS.values())
        some = {
            f"layer.{i}": rng.normal(size=tuple(rng.integers(1, 5, i % 3 + 1))) for i in range(4)
        }
        return {n: (100 * x).astype(kinds[rng.integers(3)]) for n, x in some.items()}

    for tensors in e.cases(fixed, draw):
        data = safetensors(tensors)
        got = e.call(
            data,
            case=f"tensors {', '.join(f'{n} {x.shape} {x.dtype}' for n, x in tensors.items())}",
        )
        e.need(isinstance(got, dict), "Return a dict: {name: array}.")
        e.need(
            "__metadata__" not in got,
            "The header entry __metadata__ is not a tensor: skip it.",
        )
        e.need(
            set(got) == set(tensors), f"The names are {sorted(got)}; expected {sorted(tensors)}."
        )
        for name, want in tensors.items():
            x = np.asarray(got[name])
            e.need(
                x.dtype == want.dtype,
                f"{name} has type {x.dtype}; the header says {want.dtype}.",
            )
            e.need(
                x.shape == want.shape,
                f"{name} has shape {x.shape}; the header says {want.shape}.",
            )
            e.need(
                np.array_equal(x, want),
                f"{name} has wrong values. data_offsets count from the END of the header, from byte 8 + n of the file. (The header may list the tensors "
                "in another order than the data.)",
            )


@exercise(
    "22.2", "pairs_to_halves",
    first_step="within a head, Meta's rows are (plane 0, first), (plane 0, second), (plane 1, first), ...; put all first members before all second ones.",
    kernel=False,
)  # fmt: skip
def pairs_to_halves(e):
    draw = lambda rng: (rng.integers(2, 5), 2 * rng.integers(2, 6), rng.integers(2, 5))
    for H, D, C in e.cases(((1, 6, 3), (2, 6, 4), (3, 8, 1)), draw):
        w = np.asarray(e.normal(H * D, C))
        got = e.call(w.copy(), H, case=f"w ({H * D}, {C}), {H} heads of {D}")
        by = lambda order: np.concatenate([w[h * D : (h + 1) * D][order] for h in range(H)])
        order = np.concatenate([np.arange(0, D, 2), np.arange(1, D, 2)])
        inverse = np.argsort(order)
        whole = np.concatenate([np.arange(0, H * D, 2), np.arange(1, H * D, 2)])
        # in place: the lower halves are overwritten before the upper ones are read
        written = w.reshape(H, D, C).copy()
        written[:, : D // 2] = written[:, 0::2].copy()
        written[:, D // 2 :] = written[:, 1::2].copy()
        e.same("w", got, by(order), {
            "This is w itself: its rows must be reordered.": w,
            "This is the opposite direction, halves to pairs.": by(inverse) if not np.array_equal(inverse, order) else np.empty(0),
            "The columns were reordered: the channels of a head are ROWS of w.": np.concatenate([w[:, 0::2], w[:, 1::2]], 1) if C > 1 else np.empty(0),
            "Rows were overwritten before they were read, because a slice is a view. Work on a copy, or build a new array.":
                written.reshape(H * D, C),
            "Heads come first: the rows are (H, D / 2, 2), in this order.":
                w.reshape(D // 2, 2, H, C).swapaxes(0, 1).reshape(H * D, C) if H > 1 else np.empty(0),
            "The heads were mixed: reorder only within each head of D rows.": w[whole] if H > 1 else np.empty(0),
        })  # fmt: skip


@exercise(
    "22.3", "first_parting",
    first_step="loop over the stages in order; compare the difference of each, relative to the largest value of theirs, with the tolerance.",
    kernel=False,
)  # fmt: skip
def first_parting(e):
    theirs = {
        n: np.asarray(e.normal(3, 4, mean=m, scale=s)).copy()
        for n, m, s in (
            ("embedding", 0, 1e-2), ("layer 0", 0, 1.0), ("layer 1", 0, 1e3), ("final norm", 0.3, 1.0), ("logits", -10, 1.0),
        )
    }  # fmt: skip
    theirs["final norm"][1, 2] = 1e-6

    def case(what, want, why, **changes):
        ours = {n: a.copy() for n, a in theirs.items()}
        for name, change in changes.items():
            ours[name.replace("_", " ")][1, 2] += change
        got = e.call(ours, theirs, 1e-4, case=what)
        e.need(
            got is None or isinstance(got, str),
            f"It returns {got!r}: return the NAME of a stage, or None.",
        )
        e.need(got == want, f"It returns {got!r}; expected {want!r}.\n{why}")

    case("two equal models, all of whose logits are negative", None,
         "Nothing differs by more than the tolerance: return None. (The largest value is the largest magnitude, np.abs(...).max().)")  # fmt: skip
    case("a rounding error of 1e-6 at a value of 1e-6", None,
         "Compute the difference relative to the largest value of the STAGE, not to each value: a value near 0 would exceed any tolerance by rounding.",
         final_norm=1e-6)  # fmt: skip
    case(
        "a rounding error of 1e-6 in layer 0",
        None,
        "A rounding error is not a divergence: the tolerance allows for it.",
        layer_0=1e-6,
    )
    case(
        "a difference of 0.01 in layer 1, whose values are in the thousands",
        None,
        "Compute the difference relative to the largest value of that stage.",
        layer_1=0.01,
    )
    case(
        "a difference of 1e-4 in the embedding, whose values are near 0.01",
        "embedding",
        "Compute the difference relative to the largest value of that stage.",
        embedding=1e-4,
    )
    case("a difference of 0.1 in the logits, which are all negative", "logits",
         "The largest value is the largest magnitude, np.abs(...).max().", logits=0.1)  # fmt: skip
    case(
        "a value in layer 0 that is too small by 0.1",
        "layer 0",
        "A difference may have either sign: use np.abs.",
        layer_0=-0.1,
    )
    case("layer 0 and everything after it differ", "layer 0", "Return the FIRST stage that differs; later stages inherit its difference.",
         layer_0=0.1, layer_1=300.0, final_norm=1.0, logits=1.0)  # fmt: skip
    case("one value in layer 0 that is too large by 0.0005", "layer 0", "The LARGEST difference of a stage counts, not the mean.",
         layer_0=5e-4)  # fmt: skip
    case("a NaN in layer 1", "layer 1", "A NaN counts as a difference, but `nan > tolerance` is False: test `not difference <= tolerance`.",
         layer_1=np.nan)  # fmt: skip
    first, factor = int(e.rng.integers(1, 5)), 10.0 ** e.rng.uniform(-3, 3)
    theirs = {f"stage {i}": e.rng.normal(size=(2, 5)) * factor for i in range(5)}
    ours = {n: a + factor * (0.01 * (i >= first) + 1e-7) for i, (n, a) in enumerate(theirs.items())}
    want = f"stage {first}"
    got = e.call(ours, theirs, 1e-4, case=f"random numbers; from {want} on they differ")
    e.need(got == want, f"It returns {got!r}; expected {want!r}.")
