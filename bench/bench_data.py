"""Tokenizing a large text: MB/s and peak memory of a whole `prepare`, in a process of its own.

    python bench/bench_data.py [--gigabytes 1] [--vocab-size 16384] [--folder FOR_THE_TEXT]

The text is Python's standard library again and again, with its words exchanged at random, so that
no block repeats: about half of it is one document without a line break, the rest a folder of files.
peak_gb is the largest resident set of the process (VmHWM, so Linux only), with Python and its
libraries, of which `import_gb`; value counts all passes: reading, training the tokenizer, encoding,
writing. again_s is a second start with the same text. peer_value: what the `tokenizers` library
encodes per second when it is given 4 MB of the same text in pieces, without reading or writing.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parents[1]
FILES = 64

MEASURE = """
import json, sys, time
def peak():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9
from xtrain.data.dataset import prepare
imported = peak()
began = {}
start = time.perf_counter()
def progress(fraction, text):
    began.setdefault(text.split(",")[0], time.perf_counter() - start)
corpus = prepare(sys.argv[1], int(sys.argv[2]), sys.argv[3], progress=progress)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "import_gb": imported,
    "peak_gb": peak(),
    "began": began,
    "bytes": corpus.bytes,
    "tokens": corpus.train_tokens + corpus.val_tokens,
    "documents": corpus.documents,
    "folder": str(corpus.folder),
    "vocab_size": corpus.vocab_size,
}))
"""
ALONE = """
import sys, time
from pathlib import Path
from xtrain.data.pieces import Cutter
from xtrain.data.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[2])
with open(sys.argv[1], encoding="utf-8") as file:
    text = file.read(4 << 20)
pieces = [piece for piece, _ in Cutter(tokenizer.rule).add(text, True)]
times = []
for _ in range(5):
    start = time.perf_counter()
    tokenizer._backend.encode_batch_fast(pieces, add_special_tokens=False)
    times.append(time.perf_counter() - start)
print(len(text.encode()) / 1e6 / sorted(times)[2])
"""


def write_text(folder: Path, n_bytes: int, seed: int = 0) -> None:
    """Write about n_bytes: one file without line breaks, and FILES with them."""
    from xtrain.data.documents import Documents

    rng = np.random.default_rng(seed)
    source = "".join(text for text, _ in Documents())[:32_000_000]
    tokens = re.findall(r"\w+|\W+", source)
    words = sorted({token for token in tokens if token[0].isalnum()})

    def block() -> str:
        """Return about 1 MB: a random part of the source, with a fifth of its words replaced."""
        n = 250_000
        first = int(rng.integers(len(tokens) - n))
        part = tokens[first : first + n]
        new = rng.random(n) < 0.2
        other = rng.integers(len(words), size=n)
        for i, token in enumerate(part):
            if new[i] and token[0].isalnum():
                part[i] = words[other[i]]
        return "".join(part)

    with open(folder / "one_line.txt", "w", encoding="utf-8") as file:
        while file.tell() < n_bytes // 2:
            file.write(block().replace("\n", " "))
    for i in range(FILES):
        with open(folder / f"{i:03d}.txt", "w", encoding="utf-8") as file:
            while file.tell() < n_bytes // 2 // FILES:
                file.write(block())


def run(code: str, *arguments: object) -> str:
    """Return the output of a Python process in the checkout."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument(
        "--folder", type=Path, help="where the text and the cache are written, and then removed"
    )
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        (work / "text").mkdir()
        write_text(work / "text", int(arguments.gigabytes * 1e9))
        load_before = os.getloadavg()
        what = (work / "text", arguments.vocab_size, work / "cache")
        first = json.loads(run(MEASURE, *what))
        load_after = os.getloadavg()
        again = json.loads(run(MEASURE, *what))
        alone = float(run(ALONE, work / "text" / "one_line.txt", first["folder"]))
    finally:
        shutil.rmtree(work)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    line = {
        "bench": "bench_data",
        "name": "tokenize",
        "shape": f"{first['bytes']} bytes, {first['documents']} documents",
        "dtype": "text",
        "ms": round(1e3 * first["seconds"], 1),
        "value": round(first["bytes"] / 1e6 / first["seconds"], 3),
        "unit": "MB/s",
        "peer": "tokenizers alone, 4 MB",
        "peer_value": round(alone, 3),
        "ratio": round(first["bytes"] / 1e6 / first["seconds"] / alone, 4),
        "peak_gb": round(first["peak_gb"], 3),
        "import_gb": round(first["import_gb"], 3),
        "tokens": first["tokens"],
        "vocab_size": first["vocab_size"],
        "began_s": {name: round(seconds, 1) for name, seconds in first["began"].items()},
        "again_s": round(again["seconds"], 3),
        "again_peak_gb": round(again["peak_gb"], 3),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "load_after": load_after,
        "gpu": None,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tokenizers": importlib.metadata.version("tokenizers"),
        },
        "commit": os.environ.get("XTRAIN_COMMIT") or commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
    }
    folder = Path(os.environ.get("XTRAIN_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "bench_data.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
