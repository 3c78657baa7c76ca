"""Both compilers on every kernel, without a GPU: registers, memory, instructions, compile time.

    python bench/bench_compilers.py [--mlir-python PATH] [--cards 7.5 8.0 9.0 12.0] [--only REGEX]
                                    [--keep FOLDER]

The kernels and their argument types are those that the tests compile
(tests/helpers/every_signature.py): all of them for the first card of FULL, one signature of each
kernel for the others. Each compiler runs in a process of its own, in the environment that its
option names; ptxas makes machine code from the PTX of both. One line per signature: value is the
number of instructions (16 bytes each, padding included) with numba-cuda-mlir for compute capability
9.0, peer_value that with numba-cuda; `cards` has everything: registers of a thread, bytes of local
memory (the stack frame), of them spilled, bytes of static shared memory, instructions, milliseconds
of CPU time. A compiler that fails on a kernel has the error there.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
COMPILERS = {"numba": "numba-cuda", "mlir": "numba-cuda-mlir"}
FULL = "9.0"


@dataclasses.dataclass
class Options:
    """Compile every kernel with both compilers and compare the machine code."""

    numba_python: str = sys.executable
    """Python of an environment with numba-cuda: pip install -e '.[compile]'"""
    mlir_python: str = sys.executable
    """Python of an environment with numba-cuda-mlir: pip install -e '.[mlir]'"""
    cards: tuple[str, ...] = (FULL, "7.5", "8.0", "12.0")
    """Compute capabilities"""
    only: str = ""
    """Kernels whose name this regular expression matches"""
    keep: Path | None = None
    """A folder for PTX and machine code: FOLDER/COMPILER-CARD/KERNEL.ptx, .cubin"""
    measure: str = ""
    """For the processes that it starts: numba or mlir"""


def code_bytes(cubin: bytes) -> int:
    """Return the bytes of the sections of a 64-bit ELF file that hold instructions."""
    (start,) = struct.unpack_from("<Q", cubin, 40)
    (size,) = struct.unpack_from("<H", cubin, 58)
    (count,) = struct.unpack_from("<H", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    return sum(h[5] for h in headers if h[2] & 4)  # SHF_EXECINSTR


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


# --------------------------------------------------------------------------- one compiler, one card
def to_ptx(compiler: str, kernel, signature) -> str:
    if compiler == "mlir":
        return kernel.compile(signature).metadata["ptx"]
    kernel.compile(signature)
    return kernel.overloads[signature]._codelibrary.get_asm_str()


def assemble(ptx: str, folder: Path, name: str) -> dict:
    """Return what ptxas reports for PTX, and the size of the code."""
    from offline import ptxas

    source = folder / f"{name}.ptx"
    target = folder / f"{name}.cubin"
    source.write_text(ptx)
    arch = re.findall(r"^\.target (\w+)", ptx, re.M)[0]
    command = [ptxas(), "-v", f"--gpu-name={arch}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()[:200]}")
    entry = done.stderr[done.stderr.index("Compiling entry") :]
    number = lambda pattern: int((re.findall(pattern, entry) or [0])[0])
    return {
        "registers": number(r"Used (\d+) registers"),
        "local": number(r"(\d+) bytes stack frame"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "shared": number(r"(\d+) bytes smem"),
        "instructions": code_bytes(target.read_bytes()) // 16,
    }


def measure(compiler: str, card: str, only: str, folder: Path) -> None:
    """Print one JSON line per signature."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    from every_signature import every_signature

    from xtrain.kernels.runtime import compile as kernel_compiler

    capability = tuple(map(int, card.split(".")))
    kernel_compiler.compile_for(capability)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set = set()
    for group, kernels in every_signature(capability).items():
        for i, (kernel, signature) in enumerate(kernels):
            name = kernel.py_func.__name__
            again = (kernel, signature) in seen or (card != FULL and name in seen)
            seen |= {(kernel, signature), name}
            if again or not re.search(only, name):
                continue
            types = ", ".join(str(kind).replace(", False, aligned=True", "") for kind in signature)
            line = {"name": name, "key": f"{group} {i}", "types": types}
            start = cpu_seconds()
            try:
                ptx = to_ptx(compiler, kernel, signature)
                line |= assemble(ptx, folder, f"{group} {i} {name}".replace(" ", "-"))
                line["ms"] = round(1e3 * (cpu_seconds() - start), 1)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(line), flush=True)


# ----------------------------------------------------------------------------- both
def collect(o: Options) -> dict:
    """Return {(name, key): {card: {compiler: measurements}}}."""
    measurements: dict = {}
    for card in o.cards:
        with tempfile.TemporaryDirectory() as temporary:
            running = {}
            for compiler in COMPILERS:
                folder = (o.keep or Path(temporary)) / f"{compiler}-{card}"
                command = [getattr(o, f"{compiler}_python"), __file__, "--measure", compiler]
                command += ["--cards", card, "--only", o.only, "--keep", str(folder)]
                paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
                environment = {
                    **os.environ,
                    "XTRAIN_COMPILER": compiler,
                    "PYTHONPATH": paths,
                    "OMP_NUM_THREADS": "1",
                }
                running[compiler] = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, text=True
                )
            # both at once: a process waits when its pipe is full
            with ThreadPoolExecutor() as readers:
                outputs = readers.map(lambda p: p.communicate()[0], running.values())
                texts = dict(zip(running, outputs))
            for compiler, process in running.items():
                for text in texts[compiler].splitlines():
                    line = json.loads(text)
                    kernel = line.pop("name"), line.pop("key"), line.pop("types")
                    measurements.setdefault(kernel, {}).setdefault(card, {})[compiler] = line
                if process.returncode:
                    raise SystemExit(f"{COMPILERS[compiler]} for {card} failed: see above")
    return measurements


def record(lines: list[dict]) -> None:
    """Append lines to results/bench_compilers.jsonl."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    common = {
        "gpu": None,
        "commit": os.environ.get("XTRAIN_COMMIT") or commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }
    folder = Path(os.environ.get("XTRAIN_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "bench_compilers.jsonl", "a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps({**line, **common}) + "\n")


def library_versions(o: Options) -> dict[str, str]:
    """Return the versions of the libraries in both environments."""
    names = ("numba", "numba-cuda", "numba-cuda-mlir", "nvidia-nvvm", "nvidia-cuda-nvcc")
    code = "import importlib.metadata as m, json\n"
    code += "print(json.dumps({d.name: d.version for d in m.distributions()}))"
    versions: dict[str, str] = {}
    for python in (o.mlir_python, o.numba_python):
        done = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE)
        installed = {n.lower().replace("_", "-"): v for n, v in json.loads(done.stdout).items()}
        versions |= {n: v for n, v in installed.items() if n in names}
    return versions


def main(o: Options) -> None:
    if o.measure and o.keep:
        return measure(o.measure, o.cards[0], o.only, o.keep)
    versions = library_versions(o)
    lines = []
    for (name, key, types), cards in collect(o).items():
        pair = cards.get(FULL, {})
        ours, theirs = (pair.get(c, {}).get("instructions") for c in ("mlir", "numba"))
        digest = hashlib.sha256(types.encode()).hexdigest()[:8]
        lines.append(
            {
                "bench": "bench_compilers",
                "name": name,
                "shape": key,
                "dtype": digest,
                "ms": pair.get("mlir", {}).get("ms"),
                "value": ours,
                "unit": "instructions",
                "peer": "numba-cuda",
                "peer_value": theirs,
                "ratio": round(ours / theirs, 3) if ours and theirs else None,
                "peak_gb": None,
                "types": types,
                "cards": cards,
                "versions": versions,
            }
        )
        failed = [
            f"{COMPILERS[c]} for {card}: {m['error']}"
            for card, pair in cards.items()
            for c, m in pair.items()
            if "error" in m
        ]
        print(f"{key} {name}: {ours} instructions, {theirs} with numba-cuda", *failed, sep="\n    ")
    record(lines)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
