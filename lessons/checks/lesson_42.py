"""Exercises of lesson 42: opcodes and bytes of PTX, loops of SASS, two limits."""

import math
import re
from collections import Counter

import numpy as np

from .attempt import exercise
from .lesson_27 import judged
from .lesson_40 import Numbers, two

PTX = """{
    .reg .pred %p<2>;
    ld.param.u64 %rd2, [k_param_4];
    mov.u32 %r1, %tid.x;
    @%p1 bra $L__BB0_2;
    ld.global.f32 %f1, [%rd15];
    ld.global.f32 %f2, [%rd19];
$L__BB0_1:
    .pragma "nounroll";
    // fma.rn.f64 in a comment
    fma.rn.f32 %f3, %f1, 0f3F000000, %f2;
    @!%p1 bra $L__BB0_1;

    st.global.f32 [%rd19], %f3;
$L__BB0_2:
    ret;
}"""


# ----------------------------------------------------------------------------- opcodes
def words_of(line):
    words = line.split()
    return words if words and words[0] not in "{}" and words[0][0] not in "./" and words[0][-1] != ":" else []  # fmt: skip


def counted(ptx, name=lambda words: words[words[0][0] == "@"].rstrip(";"), words_of=words_of):
    return dict(Counter(name(words) for words in map(words_of, ptx.splitlines()) if words))


def without(test):
    """A mistake: lines of this kind count as instructions. test: of their first word"""
    return lambda line: words_of(line) or (line.split() if line.split() and test(line.split()[0]) else [])  # fmt: skip


OPCODES = {
    "A predicate is no opcode: `@%p1 bra` is a `bra`.": lambda p: counted(p, lambda w: w[0].rstrip(";")),
    "Lines with a predicate are instructions, too: `@%p1 bra`.": lambda p: counted(p, words_of=lambda line: words_of(line) if line.split()[:1] and line.split()[0][0] != "@" else []),
    "`@!%p1` is a predicate, too.": lambda p: counted(p, lambda w: w[w[0].startswith("@%")].rstrip(";")),
    "The semicolon does not belong to the opcode: `ret`.": lambda p: counted(p, lambda w: w[w[0][0] == "@"]),
    "Lines that begin with a dot are directives, for the assembler.": lambda p: counted(p, words_of=without(lambda w: w[0] == ".")),
    "A label ends with a colon, and is no instruction.": lambda p: counted(p, words_of=without(lambda w: w[-1] == ":")),
    "Comments begin with //.": lambda p: counted(p, words_of=without(lambda w: w.startswith("//"))),
    "A brace is no instruction.": lambda p: counted(p, words_of=without(lambda w: w in "{}")),
    "An opcode has its types with it: `ld.global.f32`, not `ld`.": lambda p: counted(p, lambda w: w[w[0][0] == "@"].rstrip(";").split(".")[0]),
    "Each opcode counts as often as it occurs.": lambda p: dict.fromkeys(counted(p), 1),
}  # fmt: skip


def listing(rng):
    """A listing of random lines."""
    kinds = ["ld.global.f32 %f1, [%rd1];", "st.global.v4.f32 [%rd1], {%f1, %f2, %f3, %f4};", "add.s64 %rd1, %rd2, %rd3;", "@%p1 bra $L__BB0_1;", "@!%p2 bra $L__BB0_2;",
             "ret;", ".reg .f32 %f<4>;", "$L__BB0_1:", "// ld.global.f32", "", "{", "}", "bra.uni $L__BB0_3;", "fma.rn.f64 %fd1, %fd2, %fd3, %fd4;", "@%p3 st.global.u8 [%rd1], %r1;"]  # fmt: skip
    chosen = [kinds[i] for i in rng.integers(0, len(kinds), int(rng.integers(6, 14)))]
    return "\n".join("    " * int(rng.integers(0, 2)) + line for line in chosen)


@exercise(
    "42.1", "opcodes",
    first_step="for line in ptx.splitlines(): words = line.split(). Which first words are no instructions?",
    hints={
        "IndexError": "A line may be empty: then line.split() has no first word.",
        "KeyError": "A Counter begins at 0, a dict needs get(name, 0).",
    },
    kernel=False,
)  # fmt: skip
def opcodes(e):
    texts = [PTX, "", "ret;", *(listing(e.rng) for _ in range(8))]
    cases = [(f"the listing\n{t}\n", (t,)) for t in texts]

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the dict.")
        e.need(isinstance(got, dict), f"Return a dict, got {type(got).__name__}.")
        return {k: int(v) for k, v in got.items()}

    def other(arguments, want, got):
        name = next((n for n in [*want, *got] if want.get(n, 0) != got.get(n, 0)), None)
        if name is None:
            return f"The dict has {next(n for n in got if n not in want)!r}, which is not an opcode of the listing."
        return f"{name!r} occurs {want.get(name, 0)} times, the dict says {got.get(name, 0)}."

    judged(e, cases, read, counted, OPCODES, other)


# ----------------------------------------------------------------------------- bytes
def moved(counts, vector=lambda w: 2 if "v2" in w else 4 if "v4" in w else 1, bits=lambda w: int(w[-1][1:]) // 8, where=("global",), weigh=lambda n: n, swap=False, ops=("ld", "st")):  # fmt: skip
    found = dict.fromkeys(("ld", "st"), 0)
    for name, n in counts.items():
        words = name.split(".")
        if words[0] in ops and words[1] in where:
            found[words[0]] += weigh(n) * vector(words) * bits(words)
    return tuple(found.values())[:: -1 if swap else 1]


TRAFFIC = {
    "Only global memory counts: `ld.param` and `ld.shared` read elsewhere.": tuple(lambda c, where=("global", *more): moved(c, where=where) for more in (("param", "shared", "local"), ("param", "shared"), ("param", "local"), ("shared", "local"), ("param",), ("shared",), ("local",))),
    "Only ld and st count: other instructions, such as atom.global, are neither.": tuple(
        lambda c, op=op: moved(c | {f"{op}.global.u32": c.get("atom.global.add.u32", 0)}) for op in ("ld", "st")
    ),
    "v4 moves four numbers, v2 two.": lambda c: moved(c, vector=lambda w: 1),
    "v2 moves two numbers.": lambda c: moved(c, vector=lambda w: 4 if "v4" in w else 1),
    "v4 moves four numbers.": lambda c: moved(c, vector=lambda w: 2 if "v2" in w else 1),
    "f32 has 32 bits, which are 4 bytes.": lambda c: moved(c, bits=lambda w: int(w[-1][1:])),
    "Not every type has 4 bytes: the number in the last word says how many bits.": lambda c: moved(c, bits=lambda w: 4),
    "An opcode counts as often as the dict says.": lambda c: moved(c, weigh=lambda n: 1),
    "Return read first, then written.": lambda c: moved(c, swap=True),
    "Stores are missing: `st.global` writes.": lambda c: moved(c, ops=("ld",)),
}  # fmt: skip


@exercise(
    "42.2", "traffic",
    first_step="words = name.split('.'). Is words[0] ld or st, and words[1] global?",
    hints={
        "IndexError": "Some opcodes have one word, such as ret: look at words[0] first.",
        "ValueError": "The last word is a letter and the bits: int(words[-1][1:]). Other opcodes, such as bra, have none.",
    },
    kernel=False,
)  # fmt: skip
def traffic(e):
    names = ["ld.global.f32", "ld.global.v4.f32", "ld.global.nc.v2.u32", "ld.global.u8", "ld.global.b16", "ld.param.u64", "ld.shared.f32", "st.global.f32",
             "st.global.v4.b32", "st.global.v2.u64", "st.shared.f32", "add.s64", "ret", "bra", "cvt.f64.f32", "st.global.s16", "atom.global.add.u32", "ld.local.u32", "st.local.f32"]  # fmt: skip
    fixed = [{"ld.global.f32": 2, "st.global.f32": 1, "ld.param.u64": 5, "ret": 1}, {}, {"ret": 1, "bra.uni": 2}, dict.fromkeys(names, 1)]  # fmt: skip
    for _ in range(6):
        fixed.append({n: int(e.rng.integers(1, 4)) for n in names if e.rng.random() < 0.5})
    cases = [(f"counts {c}", (c,)) for c in fixed]

    def read(got):
        read, written = e.several(got, "read", "written")
        for name, x in (("read", read), ("written", written)):
            e.need(np.ndim(x) == 0 and np.isreal(x), f"{name} must be one number, got {x!r}.")
        return (float(read), float(written))

    judged(e, cases, read, moved, TRAFFIC, lambda *_: "Bytes = count x 1, 2 or 4 numbers x bits / 8, of ld.global and st.global.")  # fmt: skip


# ----------------------------------------------------------------------------- loops
LOOP = """/*0000*/ S2R R2, SR_TID.X;
/*0010*/ @P0 BRA `(.L_x_9);
.L_x_4:
/*0020*/ LDG.E R4, desc[UR6][R4.64];
/*0030*/ FADD R21, R4, R21;
/*0040*/ @P1 BRA `(.L_x_4);
.L_x_9:
/*0050*/ EXIT;
.L_x_0:
/*0060*/ BRA `(.L_x_0);"""
NESTED = """.L_x_1:
.L_x_5:
/*0090*/ MOV R1, R2;
.L_x_2:
/*00a0*/ @!P1 BRA `(.L_x_2);
/*00b0*/ @!P1 BRA `(.L_x_2);
/*00c0*/ BRA `(.L_x_3);
/*00d0*/ @P2 BRA `(.L_x_1);
.L_x_3:
/*00e0*/ EXIT;"""


def found(sass, keep=lambda to, here: to < here, base=16, pattern=r"BRA `\((\S+)\)", order=lambda x: x, after=0, clear=True):  # fmt: skip
    places = {}
    waiting = []
    jumps = []
    for line in map(str.strip, sass.splitlines()):
        if line.endswith(":"):
            waiting.append(line[:-1])
        elif address := re.match(r"/\*(\w+)\*/", line):
            here = int(address[1], base)
            places.update(dict.fromkeys(waiting, here + after))
            waiting = [] if clear else waiting
            if jump := re.search(pattern, line):
                jumps.append((jump[1], here))
    return order([(places[t], h) for t, h in jumps if t in places and keep(places[t], h)])


def last_label(sass):
    """A mistake: of labels that follow each other, only the last one gets the address."""
    lines = [line.strip() for line in sass.splitlines()]
    kept = [a for a, b in zip(lines, [*lines[1:], ""]) if not (a.endswith(":") and b.endswith(":"))]
    return found("\n".join(kept))


LOOPS = {
    "A BRA to itself is no loop.": lambda s: found(s, keep=lambda to, here: to <= here),
    "A jump forwards is no loop: the label's address must be below that of the BRA.": (lambda s: found(s, keep=lambda to, here: to != here), lambda s: found(s, keep=lambda to, here: True), lambda s: found(s, keep=lambda to, here: to > here)),
    "A BRA with a predicate in front is a BRA.": lambda s: found(s, pattern=r"\*/ +BRA `\((\S+)\)"),
    "Only a BRA that has a predicate is found.": lambda s: found(s, pattern=r"P\d BRA `\((\S+)\)"),
    "`@!P1` is a predicate, too.": lambda s: found(s, pattern=r"(?<!!P\d) BRA `\((\S+)\)"),
    "First the address of the label, then that of the BRA.": lambda s: [x[::-1] for x in found(s)],
    "In the order of the last address.": lambda s: found(s, order=sorted),
    "A label stands for the address of the instruction after it.": (lambda s: found(s, after=16), lambda s: found(s, after=-16), lambda s: found(s, clear=False)),
    "Addresses are hexadecimal: int(text, 16).": lambda s: found(s, base=10),
    "The last address is that of the BRA, not the one after it.": lambda s: [(a, b + 16) for a, b in found(s)],
    "Several labels may stand for the same address: keep all that were met since the last instruction.": last_label,
    "Return all loops, not only the first.": lambda s: found(s)[:1],
    "These are the numbers of instructions: return the addresses.": lambda s: [(b - a) // 16 + 1 for a, b in found(s)],
}  # fmt: skip


def machine_code(rng):
    lines = []
    labels = [f".L_x_{i}" for i in range(4)]
    places = sorted(rng.choice(10, 4).tolist())
    for i in range(10):
        lines += [f"{labels[k]}:" for k in range(4) if places[k] == i]
        front = str(rng.choice(["", "@P0 ", "@!P1 "]))
        code = f"BRA `({labels[int(rng.integers(4))]})" if rng.random() < 0.4 else "FADD R1, R2, R3"  # fmt: skip
        lines.append(f"/*{16 * i + 0x80:04x}*/ {front}{code};")
    return "\n".join(lines)


@exercise(
    "42.3", "loops",
    first_step="a dict from each label to the address of the next instruction; then every BRA: is its label's address below its own?",
    hints={
        "ValueError": "Addresses are hexadecimal: int(text, 16).",
        "KeyError": "A label may come after the jump: collect all labels first.",
        "AttributeError": "re.match and re.search return None where nothing is found, such as on a label's line.",
    },
    kernel=False,
)  # fmt: skip
def loops(e):
    texts = [LOOP, NESTED, "", *(machine_code(e.rng) for _ in range(8))]
    cases = [(f"the listing\n{t}\n", (t,)) for t in texts]

    def read(got):
        e.need(got is not None, "Nothing is returned: end with `return` and the list of loops.")
        e.need(isinstance(got, (list, tuple)), f"Return a list, got {type(got).__name__}.")
        for pair in got:
            e.need(not isinstance(pair, str) and np.size(pair) in (1, 2) and np.asarray(pair).dtype.kind in "iu",
                   f"A loop is (first address, last address), two whole numbers; the list contains {pair!r}.")  # fmt: skip
        return [tuple(map(int, pair)) if np.size(pair) == 2 else int(pair) for pair in got]

    judged(e, cases, read, found, LOOPS, lambda *_: "A loop goes from the address of the label to the BRA below it.")  # fmt: skip


# ----------------------------------------------------------------------------- limits
def least(n, threads, instructions, nbytes, card, warps=lambda n, t: math.ceil(n / t) * math.ceil(t / 32), parts=4, swap=False, memory=lambda n, b, card: n * b / card["bandwidth"]):  # fmt: skip
    rate = parts * card["multiprocessors"] * card["clock"]
    found = (warps(n, threads) * instructions / rate, memory(n, nbytes, card))
    return Numbers(found[:: -1 if swap else 1])


LIMITS = {
    "An instruction is issued for a warp, not for each thread: count warps.": lambda *a: least(*a, warps=lambda n, t: n),
    "A warp is issued as a whole, also if the block has fewer threads: ceil(threads / 32) per block.": (lambda *a: least(*a, warps=lambda n, t: n / 32), lambda *a: least(*a, warps=lambda n, t: math.ceil(n / 32))),
    "Blocks are whole: ceil(n / threads).": (lambda *a: least(*a, warps=lambda n, t: n / t * math.ceil(t / 32)), lambda *a: least(*a, warps=lambda n, t: n // t * math.ceil(t / 32))),
    "Warps are whole: ceil(threads / 32).": (lambda *a: least(*a, warps=lambda n, t: math.ceil(n / t) * t / 32), lambda *a: least(*a, warps=lambda n, t: math.ceil(n / t) * (t // 32))),
    "These are the warps of one block: there are ceil(n / threads) blocks.": lambda *a: least(*a, warps=lambda n, t: math.ceil(t / 32)),
    "These are the blocks: each has ceil(threads / 32) warps.": lambda *a: least(*a, warps=lambda n, t: math.ceil(n / t)),
    "A multiprocessor has four parts, each of which issues an instruction per cycle.": lambda *a: least(*a, parts=1),
    "Return issue first, then memory.": lambda *a: least(*a, swap=True),
    "nbytes are those of one element: n * nbytes.": lambda *a: least(*a, memory=lambda n, b, card: b / card["bandwidth"]),
    "The clock is missing: a cycle takes 1 / clock seconds.": lambda n, t, i, b, card: Numbers((least(n, t, i, b, card)[0] * card["clock"], n * b / card["bandwidth"])),
    "These are milliseconds: return seconds.": lambda *a: Numbers(1e3 * x for x in least(*a)),
    "Bytes are moved for the n elements, not for threads past the end.": lambda n, t, i, b, card: least(n, t, i, b, card, memory=lambda n, b, card: math.ceil(n / t) * t * b / card["bandwidth"]),
    "Seconds are bytes over the bandwidth, not the other way round.": lambda *a: least(*a, memory=lambda n, b, card: card["bandwidth"] / (n * b)),
}  # fmt: skip


@exercise(
    "42.4", "limits",
    first_step="how many blocks are there, and how many warps does each have? Both are whole numbers.",
    kernel=False,
)  # fmt: skip
def limits(e):
    card = dict(multiprocessors=132, clock=1.8e9, bandwidth=4e12)
    fixed = [
        (1 << 24, 256, 34, 12, card),
        (1000, 1, 10, 8, card),
        (1000, 40, 34, 12, card),
        (97, 96, 20, 4, card),
    ]
    for _ in range(5):
        own = dict(multiprocessors=int(e.rng.integers(10, 150)), clock=float(e.rng.integers(10, 20)) * 1e8, bandwidth=float(e.rng.integers(2, 40)) * 1e11)  # fmt: skip
        fixed.append((int(e.rng.integers(100, 10**6)), int(e.rng.integers(1, 300)), int(e.rng.integers(5, 60)), int(e.rng.integers(1, 17)), own))  # fmt: skip
    cases = [(f"n {n}, threads {t}, instructions {i}, nbytes {b}, card {c}", (n, t, i, b, c)) for n, t, i, b, c in fixed]  # fmt: skip
    other = lambda *_: (
        "issue: warps x instructions / (4 x multiprocessors x clock). memory: n x nbytes / bandwidth."
    )
    judged(e, cases, lambda got: two(e, got, "issue", "memory"), least, LIMITS, other)
