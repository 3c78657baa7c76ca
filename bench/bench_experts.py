"""The three products of a mixture of experts next to PyTorch's, and to dense ones.

    python bench/bench_experts.py [--shapes few many] [--skewed]

Tokens choose K of E experts at random, or with --skewed so that one expert gets many more than
another. `value` is the rate without the padding, 2 P I O / ms for P = N K pairs. Peer: torch._grouped_mm
on P rows without padding, whose weight gradients are bf16 (ours float32). A record has also the
rate of cuBLAS for one product of P rows, `dense`.
"""

import argparse
from dataclasses import dataclass

import cupy as cp
import numpy as np
import torch
from _timing import gpu_ms, graph_ms, record

from xtrain.kernels.cast import BFLOAT16, cast_fwd
from xtrain.kernels.experts.expert_order import expert_order
from xtrain.kernels.experts.grouped_product import (
    grouped_product,
    grouped_product_dw,
    grouped_product_dx,
)
from xtrain.kernels.gemm import linear_into, matmul


@dataclass(frozen=True)
class Shape:
    tokens: int
    experts: int
    per_token: int
    width: int  # C of the model
    hidden: int  # F of an expert


SHAPES = {
    "few": Shape(tokens=8192, experts=16, per_token=2, width=2048, hidden=1408),
    "few16k": Shape(tokens=16384, experts=16, per_token=2, width=2048, hidden=1408),
    "many": Shape(tokens=16384, experts=128, per_token=8, width=2048, hidden=768),
}


def draw(*shape):
    """Return standard normal numbers in bf16."""
    numbers = cp.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)
    return cast_fwd(numbers, BFLOAT16)


def choose_experts(shape: Shape, skewed: bool):
    """Return (tokens, per_token) int32. Skewed: expert e is 1 / (1 + e / 4) times as likely."""
    chance = 1 / (1 + np.arange(shape.experts) / 4) if skewed else np.ones(shape.experts)
    noise = np.random.default_rng(0).gumbel(size=(shape.tokens, shape.experts)) + np.log(chance)
    chosen = np.argsort(-noise, 1)[:, : shape.per_token]
    return cp.asarray(np.ascontiguousarray(chosen, np.int32))


def torch_products(x, w, dy, counts):
    """Return PyTorch's three products of P rows in the order of experts."""
    tensor = lambda a: torch.from_dlpack(a.view(np.int16)).view(torch.bfloat16)
    x, w, dy = map(tensor, (x, w, dy))
    offsets = torch.as_tensor(np.cumsum(counts), dtype=torch.int32, device="cuda")
    grouped = torch._grouped_mm
    return (
        lambda: grouped(x, w.transpose(1, 2), offs=offsets),
        lambda: grouped(dy, w, offs=offsets),
        lambda: grouped(dy.T, x, offs=offsets),
    )


def measure(name: str, shape: Shape, skewed: bool, outputs: int, inputs: int) -> None:
    """Measure the products with matrices (outputs, inputs)."""
    order = expert_order(choose_experts(shape, skewed), shape.experts)
    E = shape.experts
    P = shape.tokens * shape.per_token
    M = order.pairs_M.size
    used = (order.pairs_M >= 0)[:, None]
    zero = cp.zeros(1, BFLOAT16)
    rows = lambda n: cp.where(used, draw(M, n).view(np.uint16), zero.view(np.uint16)).view(BFLOAT16)
    x = rows(inputs)
    dy = rows(outputs)
    w = draw(E, outputs, inputs)
    dw = cp.empty(w.shape, np.float32)
    ours = (
        lambda: grouped_product(x, w, order),
        lambda: grouped_product_dx(dy, w, order),
        lambda: grouped_product_dw(dy, x, order, dw),
        lambda: grouped_product_dw(dy, x, order, dw, accumulate=True),
    )
    packed_x = draw(P, inputs)
    packed_dy = draw(P, outputs)
    theirs = torch_products(packed_x, w, packed_dy, order.counts_E.get())
    y = cp.empty((P, outputs), BFLOAT16)
    dx = cp.empty((P, inputs), BFLOAT16)
    dense = (
        lambda: linear_into(y, packed_x, w[0]),
        lambda: matmul(dx, packed_dy, w[0]),
        lambda: matmul(dw[0], packed_dy, packed_x, trans_a=True),
    )
    text = f"P={P} E={E} O={outputs} I={inputs}" + " skewed" * skewed
    rate = lambda ms: 2e-9 * P * inputs * outputs / ms
    for i, product in enumerate(("forward", "dx", "dw", "dw+=")):
        ms = graph_ms(ours[i])[0]
        peer = rate(gpu_ms(theirs[min(i, 2)])[0])
        cublas = rate(graph_ms(dense[min(i, 2)])[0])
        record(
            "bench_experts", f"{name}.{product}", shape=text, dtype="bf16", ms=ms, value=rate(ms),
            unit="TFLOP/s", peer="torch._grouped_mm", peer_value=peer, dense=round(cublas, 1),
        )  # fmt: skip
        print(f"    dense {cublas:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["few", "many"])
    parser.add_argument("--skewed", action="store_true", help="experts are chosen unevenly")
    options = parser.parse_args()
    for name in options.shapes:
        shape = SHAPES[name]
        measure(f"{name}.gate_up", shape, options.skewed, 2 * shape.hidden, shape.width)
        measure(f"{name}.down", shape, options.skewed, shape.width, shape.hidden)


if __name__ == "__main__":
    main()
