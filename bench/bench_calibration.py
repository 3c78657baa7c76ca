"""Perplexity of a published model in four bits, rounded and calibrated. Runs without a GPU, too.

    python bench/bench_calibration.py [--weights int4 nf4] [--rows 64] [--mixed]

The model is SmolLM2-135M-Instruct (tests/real/fetch.py). Text 1 is the topics of Python's help(), text
2 the pages of lessons/howto: of each up to 8 windows of 512 tokens, the last ones of text 1 and the
first ones of text 2. Calibration reads `rows` windows of the rest of text 1, evenly spread; with
--mixed 3/8 of them are windows of lessons/notes instead. Appends a record for each kind to
results/real.jsonl: perplexities with full, rounded and calibrated weights, and bits of a weight.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from _records import append

from xtrain.data.tokenizer import Tokenizer
from xtrain.device import cache_folder, resolve_device
from xtrain.kernels.quantize import dequantize, quantize
from xtrain.nn.autograd import no_grad
from xtrain.nn.model import Transformer
from xtrain.nn.quantized import linear_weights
from xtrain.nn.rounding import round_weights

LESSONS = Path(__file__).parents[1] / "lessons"
MODEL = cache_folder() / "real" / "SmolLM2-135M-Instruct"
T = 512
MIXED = 3 / 8  # of the rows, from another kind of text


def pages(folder: str) -> str:
    """Return the pages of a folder of lessons as one text."""
    return "\n\n".join(p.read_text("utf-8") for p in sorted((LESSONS / folder).glob("*.md")))


def windows(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return a text's tokens in rows of T, without the last incomplete one."""
    ids = np.array(tokenizer.encode(text), np.int32)
    return ids[: len(ids) // T * T].reshape(-1, T)


def spread(rows: np.ndarray, n: int) -> np.ndarray:
    """Return n rows, evenly spread."""
    return rows[np.linspace(0, len(rows) - 1, n).astype(int)]


def perplexity(model: Transformer, rows: np.ndarray) -> float:
    """Return that of all tokens but the first of each row."""
    with no_grad():
        nats = [float(model.loss(row[None, :-1], row[None, 1:]).data) for row in rows]
    return float(np.exp(np.mean(nats)))


def quantized(model: Transformer, texts: list[np.ndarray], kind: str) -> tuple[list[float], float]:
    """Round every matrix to its codes. Return the perplexities, and the bits of a weight."""
    size = 0
    nbytes = 0
    for _, weight in linear_weights(model):
        codes = quantize(weight.data, kind)
        weight.data = dequantize(codes)
        size += codes.size
        nbytes += codes.nbytes
    return [round(perplexity(model, rows), 4) for rows in texts], round(8 * nbytes / size, 3)


def main() -> None:
    """Measure and append records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="+", default=["int4", "nf4"])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--mixed", action="store_true")
    options = parser.parse_args()
    device = resolve_device("auto")
    tokenizer = Tokenizer.load(MODEL / "tokenizer.json")
    one = windows(tokenizer, "\n\n".join(topics[name] for name in sorted(topics)))
    texts = [one[-options.windows :], windows(tokenizer, pages("howto"))[: options.windows]]
    others = round(options.rows * MIXED) if options.mixed else 0
    rows = spread(one[: -options.windows - 1], options.rows - others)
    if others:
        rows = np.concatenate([rows, spread(windows(tokenizer, pages("notes")), others)])
    full = None
    for kind in options.weights:
        model = Transformer.from_pretrained(MODEL, device, trainable=False)
        full = full or [round(perplexity(model, text), 4) for text in texts]
        round_weights(model, rows, kind)
        calibrated, bits = quantized(model, texts, kind)
        model = Transformer.from_pretrained(MODEL, device, trainable=False)
        rounded, _ = quantized(model, texts, kind)
        line = {
            "bench": "real",
            "name": f"perplexity, weights {kind}, rounded and calibrated",
            "full": full,
            "rounded": rounded,
            "calibrated": calibrated,
            "bits": bits,
            "calibration_tokens": int(rows.size),
            "mixed": options.mixed,
            "tokens": int(texts[0].size),
            "window": T,
            "device": device,
        }
        append(line)
        for label, perplexities in (("rounded", rounded), ("calibrated", calibrated)):
            rise = ", ".join(f"{100 * (x / y - 1):+.1f} %" for x, y in zip(perplexities, full))
            print(f"{kind}, {bits} bits, {label}: {rise}", flush=True)


if __name__ == "__main__":
    main()
