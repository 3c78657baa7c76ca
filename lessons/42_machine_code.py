# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 42 Reading PTX, SASS and a profile
#
# *About 75 minutes. You need [lesson 12](12_bf16.ipynb) and [lesson 31](31_hardware.ipynb).*
#
# **The question.** A kernel is six lines of Python. Which instructions does the GPU execute for them, how does one find out, and do they
# explain the time that was measured?
#
# You will count the instructions of a listing, compute from it the bytes that a thread moves, find the loops in machine code, and compare
# two limits, of memory and of instructions, with measurements of an H200. All listings are real. They were made without a GPU: a compiler
# needs none.

# %% tags=["install"]
# On Google Colab (a free T4 is enough) this fetches xtrain. Anywhere else it does nothing.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("setup.cfg"):
    clone = "git clone -q --depth 1 https://github.com/OWNER/xtrain xtrain"
    subprocess.run(f"{clone} && pip install -q -e './xtrain[gpu12]'", shell=True, check=True)
    os.chdir("xtrain")
    sys.path.insert(0, os.getcwd())

# %% tags=["imports"]
import math
import re
from collections import Counter

from numba import cuda, float32

from xtrain import lesson

# %% [markdown]
# ## From Python to the GPU
#
# Numba types the function, LLVM optimizes it, and NVVM writes **PTX**, a text for a machine with any number of registers, portable between GPUs.
# Then `ptxas` translates PTX into **SASS**, the instructions of one generation, with real registers. `cuda.compile_ptx(function, types)` gives the first, the
# programs `ptxas` and `nvdisasm` of the CUDA toolkit the second. The example:


# %% tags=["listing"]
@cuda.jit
def careless_kernel(y_n, x_n):
    i = cuda.grid(1)
    if i < y_n.size:
        y_n[i] = 0.5 * x_n[i] + y_n[i]


# %% [markdown]
# Its PTX for compute capability 9.0 (numba-cuda 0.30.4, CUDA 13.5). The arguments come in pieces: `param_2` is `y_n.size`, `param_4` the address of y,
# `param_5` its length again, for indices that count from the end; 11 and 12 are those of x.

# %%
CARELESS = """
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<4>;
    .reg .f64 %fd<4>;
    .reg .b64 %rd<20>;
    ld.param.u64 %rd6, [careless_kernel_param_2];
    ld.param.u64 %rd2, [careless_kernel_param_4];
    ld.param.u64 %rd3, [careless_kernel_param_5];
    ld.param.u64 %rd4, [careless_kernel_param_11];
    ld.param.u64 %rd5, [careless_kernel_param_12];
    mov.u32 %r1, %tid.x;
    cvt.s64.s32 %rd7, %r1;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mul.wide.s32 %rd8, %r2, %r3;
    add.s64 %rd1, %rd8, %rd7;
    setp.ge.s64 %p1, %rd1, %rd6;
    @%p1 bra $L__BB0_2;
    cvta.to.global.u64 %rd9, %rd2;
    shr.s64 %rd10, %rd1, 63;
    and.b64 %rd11, %rd10, %rd5;
    add.s64 %rd12, %rd11, %rd1;
    cvta.to.global.u64 %rd13, %rd4;
    shl.b64 %rd14, %rd12, 2;
    add.s64 %rd15, %rd13, %rd14;
    ld.global.f32 %f1, [%rd15];
    cvt.f64.f32 %fd1, %f1;
    and.b64 %rd16, %rd10, %rd3;
    add.s64 %rd17, %rd16, %rd1;
    shl.b64 %rd18, %rd17, 2;
    add.s64 %rd19, %rd9, %rd18;
    ld.global.f32 %f2, [%rd19];
    cvt.f64.f32 %fd2, %f2;
    fma.rn.f64 %fd3, %fd1, 0d3FE0000000000000, %fd2;
    cvt.rn.f32.f64 %f3, %fd3;
    st.global.f32 [%rd19], %f3;
$L__BB0_2:
    ret;
}
"""
print(CARELESS.strip())

# %% [markdown]
# | PTX | what it does |
# |---|---|
# | `.reg .f64 %fd<4>;` | declares registers: this kernel has some for float64 |
# | `ld.param.u64 %rd6, [...]` | reads an argument, from constant memory |
# | `mul.wide.s32`, `add.s64` | `cuda.grid(1)`: block size x block + thread, in 64 bits |
# | `setp.ge.s64 %p1`, `@%p1 bra` | sets a predicate; jumps where it is true: `if i < y_n.size` |
# | `shr.s64 ..., 63`, `and.b64`, `add.s64` | Python's rule for negative indices: adds the length if i < 0 |
# | `shl.b64 ..., 2`, `add.s64` | 4 i bytes, added to the address of the array |
# | `ld.global.f32`, `st.global.f32` | reads, writes one float32 |
# | `cvt.f64.f32`, `fma.rn.f64`, `cvt.rn.f32.f64` | **the carelessness**: 0.5 is a float64 in Python, so the sum is one, too |
#
# The last row is the first thing to look for. A GPU for games has one float64 unit for 64 of float32 (2 and 128 results per multiprocessor and cycle at compute
# capability 8.9: CUDA programming guide, table of arithmetic throughput), and the result is the same here.
#
# ## Exercise 42.1: count the instructions


# %% tags=["exercise"]
def opcodes(ptx):
    """-> a dict from opcode to how often it occurs in the listing.

    An instruction is a line like `ld.global.f32 %f1, [%rd15];`, perhaps with a predicate in front:
    `@%p1 bra $L__BB0_2;` or `@!%p1 ...`. Its opcode is the first word after that, without `;`. No
    instructions: empty lines, braces, labels (they end with a colon), comments (they begin with
    //), and directives, which begin with a dot.
    """
    # YOUR CODE


# %%
lesson.check("42.1", opcodes)

# %% [markdown]
# <details><summary>Hint</summary>
#
# For each `line.split()`: skip it if it is empty, or its first word is a brace, ends with ":" or begins with "." or "//". If the first word begins with "@", the
# opcode is the second one. `rstrip(";")` for `ret;`.
#
# </details>


# %% tags=["solution"]
# Solution 42.1
def opcodes_solution(ptx):
    """-> a dict from opcode to how often it occurs in the listing.

    An instruction is a line like `ld.global.f32 %f1, [%rd15];`, perhaps with a predicate in front:
    `@%p1 bra $L__BB0_2;` or `@!%p1 ...`. Its opcode is the first word after that, without `;`. No
    instructions: empty lines, braces, labels (they end with a colon), comments (they begin with
    //), and directives, which begin with a dot.
    """
    counts = Counter()
    for line in ptx.splitlines():
        words = line.split()
        if not words or words[0] in ("{", "}") or words[0].startswith((".", "//")):
            continue
        if words[0].endswith(":"):
            continue
        if words[0].startswith("@"):
            words = words[1:]
        counts[words[0].rstrip(";")] += 1
    return dict(counts)


opcodes = lesson.yours(opcodes, opcodes_solution)


# %% [markdown]
# The remedy of [lesson 12](12_bf16.ipynb), `float32(0.5)`, and its listing:


# %% tags=["listing"]
@cuda.jit
def careful_kernel(y_n, x_n):
    i = cuda.grid(1)
    if i < y_n.size:
        y_n[i] = float32(0.5) * x_n[i] + y_n[i]


# %%
CAREFUL = """
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<4>;
    .reg .b64 %rd<20>;
    ld.param.u64 %rd6, [careful_kernel_param_2];
    ld.param.u64 %rd2, [careful_kernel_param_4];
    ld.param.u64 %rd3, [careful_kernel_param_5];
    ld.param.u64 %rd4, [careful_kernel_param_11];
    ld.param.u64 %rd5, [careful_kernel_param_12];
    mov.u32 %r1, %tid.x;
    cvt.s64.s32 %rd7, %r1;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %ctaid.x;
    mul.wide.s32 %rd8, %r2, %r3;
    add.s64 %rd1, %rd8, %rd7;
    setp.ge.s64 %p1, %rd1, %rd6;
    @%p1 bra $L__BB0_2;
    cvta.to.global.u64 %rd9, %rd2;
    shr.s64 %rd10, %rd1, 63;
    and.b64 %rd11, %rd10, %rd5;
    add.s64 %rd12, %rd11, %rd1;
    cvta.to.global.u64 %rd13, %rd4;
    shl.b64 %rd14, %rd12, 2;
    add.s64 %rd15, %rd13, %rd14;
    ld.global.f32 %f1, [%rd15];
    and.b64 %rd16, %rd10, %rd3;
    add.s64 %rd17, %rd16, %rd1;
    shl.b64 %rd18, %rd17, 2;
    add.s64 %rd19, %rd9, %rd18;
    ld.global.f32 %f2, [%rd19];
    fma.rn.f32 %f3, %f1, 0f3F000000, %f2;
    st.global.f32 [%rd19], %f3;
$L__BB0_2:
    ret;
}
"""
before = opcodes(CARELESS)
after = opcodes(CAREFUL)
print(f"{sum(before.values())} instructions before, {sum(after.values())} after")
for name in sorted(before.keys() | after.keys()):
    if before.get(name, 0) != after.get(name, 0):
        print(f"{name:18} {before.get(name, 0)} -> {after.get(name, 0)}")

# %% [markdown]
# ## Exercise 42.2: bytes of a thread
#
# A kernel that moves data is judged by its bytes. The listing names them: `ld.global.f32` reads 4. A vector instruction moves several numbers at once,
# `ld.global.v4.f32` reads 16 bytes ([lesson 2](02_memory.ipynb)).


# %% tags=["exercise"]
def traffic(counts):
    """-> read, written: the bytes that one execution of each instruction moves, global memory only.

    counts: what 42.1 returns. Words of an opcode are separated by dots. `ld`, followed by `global`,
    reads, `st`, followed by `global`, writes. The last word is the type, a letter and the number of
    bits: f32, u64, b16, s8. v2 or v4 among the words: two or four numbers.
    """
    # YOUR CODE


# %%
lesson.check("42.2", traffic)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `words = name.split(".")`, and the bytes are `int(words[-1][1:]) // 8`, times 2 or 4 if "v2" or "v4" is in `words`, times the count.
#
# </details>


# %% tags=["solution"]
# Solution 42.2
def traffic_solution(counts):
    """-> read, written: the bytes that one execution of each instruction moves, global memory only.

    counts: what 42.1 returns. Words of an opcode are separated by dots. `ld`, followed by `global`,
    reads, `st`, followed by `global`, writes. The last word is the type, a letter and the number of
    bits: f32, u64, b16, s8. v2 or v4 among the words: two or four numbers.
    """
    moved = {"ld": 0, "st": 0}
    for name, count in counts.items():
        words = name.split(".")
        if words[0] in moved and words[1] == "global":
            many = 2 if "v2" in words else 4 if "v4" in words else 1
            moved[words[0]] += count * many * int(words[-1][1:]) // 8
    return moved["ld"], moved["st"]


traffic = lesson.yours(traffic, traffic_solution)


# %%
print("bytes read and written by a thread:", *traffic(after))

# %% [markdown]
# ## SASS
#
# PTX is not what runs. `ptxas` divides registers, orders instructions so that loads begin early, and uses what the generation has. `careful_kernel` for a Hopper GPU, each
# line with its address:

# %%
SASS = """
/*0000*/      LDC R1, c[0x0][0x28];
/*0010*/      S2R R2, SR_TID.X;
/*0020*/      ULDC UR4, c[0x0][0x0];
/*0030*/      S2R R5, SR_CTAID.X;
/*0040*/      SHF.R.S32.HI R3, RZ, 0x1f, R2;
/*0050*/      IMAD.WIDE R2, R5, UR4, R2;
/*0060*/      ULDC.64 UR4, c[0x0][0x220];
/*0070*/      ISETP.GE.U32.AND P0, PT, R2, UR4, PT;
/*0080*/      ISETP.GE.AND.EX P0, PT, R3, UR5, PT, P0;
.L_x_1:
/*0090*/  @P0 EXIT;
/*00a0*/      SHF.R.S32.HI R5, RZ, 0x1f, R3.reuse;
/*00b0*/      ULDC.64 UR4, c[0x0][0x270];
/*00c0*/      ULDC.64 UR6, c[0x0][0x238];
/*00d0*/      SHF.R.S32.HI R7, RZ, 0x1f, R3;
/*00e0*/      LOP3.LUT R9, R5.reuse, UR4, RZ, 0xc0, !PT;
/*00f0*/      LOP3.LUT R5, R5, UR6, RZ, 0xc0, !PT;
/*0100*/      LOP3.LUT R11, R7, UR5, RZ, 0xc0, !PT;
/*0110*/      ULDC.64 UR4, c[0x0][0x268];
/*0120*/      IADD3 R6, P0, R2, R9, RZ;
/*0130*/      LOP3.LUT R7, R7, UR7, RZ, 0xc0, !PT;
/*0140*/      ULDC.64 UR6, c[0x0][0x230];
/*0150*/      IADD3 R0, P1, R2, R5, RZ;
/*0160*/      IMAD.X R5, R3, 0x1, R11, P0;
/*0170*/      LEA R4, P0, R6, UR4, 0x2;
/*0180*/      IMAD.X R3, R3, 0x1, R7, P1;
/*0190*/      LEA R2, P1, R0, UR6, 0x2;
/*01a0*/      LEA.HI.X R5, R6, UR5, R5, 0x2, P0;
/*01b0*/      ULDC.64 UR4, c[0x0][0x208];
/*01c0*/      LEA.HI.X R3, R0, UR7, R3, 0x2, P1;
/*01d0*/      LDG.E R4, desc[UR4][R4.64];
/*01e0*/      LDG.E R7, desc[UR4][R2.64];
/*01f0*/      FFMA R7, R4, 0.5, R7;
/*0200*/      STG.E desc[UR4][R2.64], R7;
.L_x_2:
/*0210*/      EXIT;
.L_x_0:
/*0220*/      BRA `(.L_x_0);
"""
print(SASS.strip())

# %% [markdown]
# | SASS | what it does |
# |---|---|
# | `R2`, `UR4`, `P0` | a register of a thread; a *uniform* one, the same for the whole warp; a predicate |
# | `S2R R2, SR_TID.X`, `c[0x0][0x220]` | reads the thread's index; an argument in constant memory |
# | `IMAD.WIDE`, `ISETP`, `@P0 EXIT` | the index, its comparison, the end for threads past the end |
# | `SHF.R.S32.HI`, `LOP3.LUT` | negative indices again: 64-bit integers are pairs of registers, so all this is done in halves |
# | `LEA`, `LEA.HI.X` | address + 4 i, lower and upper half |
# | `LDG.E`, `STG.E` | load and store of 32 bits; 16 bytes would be `LDG.E.128` |
# | `FFMA` | the one instruction that computes |
# | `BRA` to itself at the end | padding that is never reached |
#
# Of 34 instructions one computes, three move data, and most compute addresses. Does that matter? For one element per thread the addresses are needed once. In a loop they are
# needed in every turn.
#
# ## Loops
#
# A kernel that adds up every 65,536th element, and the loop in its machine code (the compiler has made two: this one for the last few elements, and
# one that takes several at a time):


# %% tags=["listing"]
@cuda.jit
def sums_kernel(y_n, x_n):
    i = cuda.grid(1)
    acc = float32(0.0)
    while i < x_n.size:
        acc += x_n[i]
        i += 65536
    y_n[cuda.grid(1)] = acc


# %%
LOOP = """
/*0220*/      IMAD.MOV.U32 R8, RZ, RZ, RZ;
/*0230*/      IMAD.MOV.U32 R21, RZ, RZ, RZ;
/*0240*/      IMAD.MOV.U32 R20, RZ, RZ, R0;
/*0250*/      IMAD.MOV.U32 R3, RZ, RZ, R2;
.L_x_4:
/*0260*/      SHF.R.S32.HI R5, RZ, 0x1f, R3.reuse;
/*0270*/      SHF.R.S32.HI R6, RZ, 0x1f, R3;
/*0280*/      LOP3.LUT R5, R5, UR10, RZ, 0xc0, !PT;
/*0290*/      LOP3.LUT R6, R6, UR11, RZ, 0xc0, !PT;
/*02a0*/      IADD3 R5, P1, R20, R5, RZ;
/*02b0*/      IMAD.X R6, R3, 0x1, R6, P1;
/*02c0*/      LEA R4, P1, R5, UR12, 0x2;
/*02d0*/      LEA.HI.X R5, R5, UR13, R6, 0x2, P1;
/*02e0*/      LDG.E R4, desc[UR6][R4.64];
/*02f0*/      IADD3 R7, P1, R7, -0x1, RZ;
/*0300*/      IADD3 R20, P2, R20, 0x10000, RZ;
/*0310*/      IADD3.X R8, R8, -0x1, RZ, P1, !PT;
/*0320*/      ISETP.NE.U32.AND P1, PT, R7, RZ, PT;
/*0330*/      IMAD.X R3, RZ, RZ, R3, P2;
/*0340*/      ISETP.NE.AND.EX P1, PT, R8, RZ, PT, P1;
/*0350*/      FADD R21, R4, R21;
/*0360*/  @P1 BRA `(.L_x_4);
.L_x_3:
/*0370*/      BSYNC B1;
"""
print(LOOP.strip())

# %% [markdown]
# A loop is a jump backwards, `@P1 BRA` to a label above. Its body is everything from the label to the jump: here 17 instructions, for one load and one addition. The load is the
# ninth, and the `FADD` that needs it comes seven later: the compiler has put what it could in between.
#
# ## Exercise 42.3: find the loops


# %% tags=["exercise"]
def loops(sass):
    """-> the loops, a list of (first address, last address), in the order of the last address.

    sass: lines `/*0260*/ SHF.R ...;` with a hexadecimal address, and labels `.L_x_4:` on lines of
    their own, which stand for the address of the next instruction. A loop is a BRA to a label whose
    address is below its own: from there to the BRA. (A BRA to itself is none.) In a BRA the label
    stands as `(.L_x_4). There may be a predicate in front.
    """
    # YOUR CODE


# %%
lesson.check("42.3", loops)

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two passes. First a dict from label to address: remember the labels that you meet, and give all of them the address of the next instruction.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `re.match(r"/\*(\w+)\*/", line.strip())` finds the address, `int(..., 16)` its number. `re.search(r"BRA `\((\S+)\)", line)` finds the label of a jump.
#
# </details>


# %% tags=["solution"]
# Solution 42.3
def loops_solution(sass):
    """-> the loops, a list of (first address, last address), in the order of the last address.

    sass: lines `/*0260*/ SHF.R ...;` with a hexadecimal address, and labels `.L_x_4:` on lines of
    their own, which stand for the address of the next instruction. A loop is a BRA to a label whose
    address is below its own: from there to the BRA. (A BRA to itself is none.) In a BRA the label
    stands as `(.L_x_4). There may be a predicate in front.
    """
    places = {}
    waiting = []
    jumps = []
    for line in map(str.strip, sass.splitlines()):
        if line.endswith(":"):
            waiting.append(line[:-1])
            continue
        address = re.match(r"/\*(\w+)\*/", line)
        if not address:
            continue
        here = int(address[1], 16)
        places.update(dict.fromkeys(waiting, here))
        waiting = []
        jump = re.search(r"BRA `\((\S+)\)", line)
        if jump:
            jumps.append((jump[1], here))
    return [(places[label], here) for label, here in jumps if places.get(label, here) < here]


loops = lesson.yours(loops, loops_solution)


# %%
for name, listing in (("careful_kernel", SASS), ("sums_kernel", LOOP)):
    found = loops(listing)
    print(name, [f"{a:#x} to {b:#x}: {(b - a) // 16 + 1} instructions" for a, b in found])
kinds = {"addresses and index": 0, "the loop itself": 0, "load": 0, "addition": 0}
for line in LOOP.partition(".L_x_4:")[2].partition(".L_x_3")[0].split(";"):
    if "LDG" in line:
        kinds["load"] += 1
    elif "FADD" in line:
        kinds["addition"] += 1
    elif re.search(r"R7|R8, -0x1|BRA|R8, RZ", line):
        kinds["the loop itself"] += 1
    elif "/*" in line:
        kinds["addresses and index"] += 1
lesson.figures.bars(kinds, "instructions of one turn of the loop")

# %% [markdown]
# ## Measure: what is the limit?
#
# Two limits can be computed from a listing. **Memory**: the bytes of all threads over the bandwidth. **Issue**: a multiprocessor has four parts ([lesson 31](31_hardware.ipynb)), and each
# issues at most one instruction of one warp per cycle. So all instructions of all warps need at least
#
# $$t = \frac{\text{warps} \cdot \text{instructions}}{4 \cdot \text{multiprocessors} \cdot \text{clock}}$$
#
# A warp is issued as a whole: a block of 40 threads is two warps, and one of 1 thread is one.
#
# ## Exercise 42.4: two limits


# %% tags=["exercise"]
def limits(n, threads, instructions, nbytes, card):
    """-> issue, memory: the least seconds by each limit, floats.

    n: elements, one per thread. threads: of a block; the last block may have threads past the end,
    whose warps are issued, too. instructions: of a warp. nbytes: that each element moves.
    card: dict with "multiprocessors", "clock" in 1/s and "bandwidth" in bytes/s.
    """
    # YOUR CODE


# %%
lesson.check("42.4", limits)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `blocks = math.ceil(n / threads)`, and a block has `math.ceil(threads / 32)` warps.
#
# </details>


# %% tags=["solution"]
# Solution 42.4
def limits_solution(n, threads, instructions, nbytes, card):
    """-> issue, memory: the least seconds by each limit, floats.

    n: elements, one per thread. threads: of a block; the last block may have threads past the end,
    whose warps are issued, too. instructions: of a warp. nbytes: that each element moves.
    card: dict with "multiprocessors", "clock" in 1/s and "bandwidth" in bytes/s.
    """
    warps = math.ceil(n / threads) * math.ceil(threads / 32)
    issue = warps * instructions / (4 * card["multiprocessors"] * card["clock"])
    return issue, n * nbytes / card["bandwidth"]


limits = lesson.yours(limits, limits_solution)


# %% [markdown]
# The measurements are those of lessons 1 and 31: an addition of two arrays, whose kernel has about as many instructions as the one above, and moves 12 bytes per element, too. The
# clock is taken as 1.8 GHz, the bandwidth as that of the best row of a copy, 4 TB/s.

# %%
H200 = dict(multiprocessors=132, clock=1.8e9, bandwidth=4e12)
records = {n: lesson.record(f"bench_lessons/add_block_{n}/fp32") for n in (1, 8, 32, 64, 128, 256)}
elements = int(records[1]["shape"].removeprefix("n="))
print("threads   issue, ms   memory, ms   measured, ms   of the larger limit")
for n, r in records.items():
    issue, memory = limits(elements, n, 34, 12, H200)
    print(f"{n:7} {1e3 * issue:11.3f} {1e3 * memory:12.3f} {r['ms']:14.3f}", end="")
    print(f" {max(issue, memory) / r['ms'] * 1e3:21.0%}")
print(lesson.records.machine(list(records.values())))

# %% [markdown]
# With 256 threads memory is the limit, and the kernel comes close to it; the issue limit is far away, so the instructions for addresses cost nothing. They hide behind the memory.
# With one thread per block, 31 of 32 lanes of each warp are empty, and the issue limit is already twelve times that of memory. But the measured time is far above *both*. Then neither
# bytes nor instructions are the reason, and it has to be looked for elsewhere: the GPU starts blocks one after the other (lesson 31).
#
# That is how to read a profile: compute the limits that you know, take the largest, and if the time is far above it, look for what you have left out: latency with too little in
# flight, starts of blocks, barriers, atomics, launches. `ncu` prints the same two limits as "Memory Throughput" and "Compute (SM) Throughput"; [read a
# profile](howto/read_a_profile.md) says how to get one from xtrain.
#
# **The improvement**, where the issue limit counts: fewer instructions per byte. Several elements per thread share the index and its checks, 16-byte accesses need a quarter of the loads
# and addresses, and 32-bit indices half of the integer instructions.
#
# ## The library's kernel
#
# xtrain's tests read PTX in the same way: in every kernel they look for float64, and in some for the 16-byte stores that they promise. Such an access is
# `load4` in this function:

# %%
from xtrain.kernels.primitives import flat

lesson.source(flat.load)

# %% [markdown]
# ## What did not help
#
# *Reading PTX to find out how many registers a kernel takes.* `%rd<20>` is the number of names, of a machine without a limit. `ptxas -v` says how many registers there are, and what is spilled.
#
# *Counting instructions to compare two memory-bound kernels.* The one with fewer is not faster, as the table shows.
#
# *Removing the padding after EXIT*, or the loop to itself. It is never executed.
#
# ## More exercises
#
# 1. `careless_kernel` has three conversions and one `fma.rn.f64`. In which case does it give another result than `careful_kernel`?
# 2. In the loop above, which instructions would disappear if i were an unsigned 32-bit integer?
# 3. A kernel has 34 instructions per element and runs on a card with 40 multiprocessors, 1.6 GHz and 0.3 TB/s (a T4). Which limit counts?
#
# <details><summary>Solutions</summary>
#
# 1: 0.5 x is exact in both, unless x is tiny, and the fma rounds once in both; float64 rounds to 53 bits and then to 24. The two can differ only when the first rounding makes a
# tie of something that was none. 2: Those for negative indices, `SHF` and `LOP3`, and the upper halves, `IMAD.X`, `IADD3.X`, `ISETP...EX`. 3: Per element issue takes
# 34 / 32 / (4 · 40 · 1.6e9) = 4.2 ps, memory 12 / 0.3e12 = 40 ps: memory, even more so.
#
# </details>
#
# ## Sources
#
# - NVIDIA, *PTX ISA*: every instruction and its types.
# - NVIDIA, *CUDA Binary Utilities*: `cuobjdump`, `nvdisasm`, and a list of SASS opcodes without further explanation.
# - NVIDIA, *Kernel Profiling Guide* (Nsight Compute): what the throughputs mean.
