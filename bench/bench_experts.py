"""The kernels of a mixture of experts: products next to PyTorch's and to dense ones, rows to copies.

    python bench/bench_experts.py [--shapes few many] [--skewed] [--only products rows decoding codes]
                                  [--weights full int8 fp8 int4 nf4]

Tokens choose K of E experts at random, or with --skewed so that one expert gets many more than
another. `value` is the rate without the padding, 2 P I O / ms for P = N K pairs. Peer: torch._grouped_mm
on P rows without padding, whose weight gradients are bf16 (ours float32). A record has also the
rate of cuBLAS for one product of P rows, `dense`.

Rows: what is not a product, in GB/s of the bytes that must move, next to a copy of as many. Decoding:
expert_gemv, in GB/s of the experts that are read, each once; with --weights also of codes, and codes for
all tokens: products of dequantized matrices next to those of the same arrays in bf16.
"""

import argparse
from dataclasses import dataclass, replace

import cupy as cp
import numpy as np
import torch
from _timing import copy_ms, gpu_ms, graph_ms, record

from xtrain.kernels.cast import BFLOAT16, cast_fwd
from xtrain.kernels.experts import expert_rows, expert_swiglu, routing
from xtrain.kernels.experts.expert_gemv import MOST_ROWS, MOST_ROWS_QUANTIZED, expert_gemv
from xtrain.kernels.experts.expert_order import expert_order
from xtrain.kernels.experts.grouped_product import (
    grouped_product,
    grouped_product_dw,
    grouped_product_dx,
)
from xtrain.kernels.gemm import linear_into, matmul
from xtrain.kernels.quantize import KINDS, quantize


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


def measure_rows(name: str, shape: Shape, skewed: bool) -> None:
    """Measure everything around the products."""
    N = shape.tokens
    E = shape.experts
    K = shape.per_token
    C, F = shape.width, shape.hidden
    experts = choose_experts(shape, skewed)
    order = expert_order(experts, E)
    M = order.pairs_M.size
    P = N * K
    numbers = cp.random.default_rng(0)
    logits = numbers.standard_normal((N, E), dtype=np.float32)
    weights = numbers.random((N, K), dtype=np.float32)
    one = cp.ones(1, np.float32)
    x, y = draw(N, C), draw(M, C)
    g, gu = draw(M, F), draw(M, 2 * F)
    losses = order.counts_E, 0.01, 0.001
    cases = {  # a call, and the bytes that it must move
        "routing": (lambda: routing.routing(logits, K), 4 * N * (E + 2 * K)),
        "routing_bwd": (
            lambda: routing.routing_bwd(weights, logits, experts, weights),
            4 * N * (2 * E + 3 * K),
        ),
        "router_loss": (lambda: routing.router_loss(logits, *losses), 4 * N * E),
        "router_loss_bwd": (lambda: routing.router_loss_bwd(one, logits, *losses), 8 * N * E),
        "order": (lambda: expert_order(experts, E), 4 * (3 * P + M)),
        "gather": (lambda: expert_rows.gather_rows(x, order), 2 * C * (P + N)),
        "sum": (lambda: expert_rows.sum_rows(y, order), 2 * C * (P + N)),
        "swiglu": (lambda: expert_swiglu.expert_swiglu(gu, weights, order), 2 * P * 3 * F),
        "swiglu_bwd": (
            lambda: expert_swiglu.expert_swiglu_bwd(g, gu, weights, order),
            2 * P * 6 * F,
        ),
    }
    for kernel, (call, nbytes) in cases.items():
        ms = graph_ms(call)[0]
        record(
            "bench_experts", f"{name}.{kernel}", shape=f"N={N} E={E} K={K} C={C} F={F}", dtype="bf16",
            ms=ms, value=1e-6 * nbytes / ms, unit="GB/s", peer="copy",
            peer_value=1e-6 * nbytes / copy_ms(nbytes),
        )  # fmt: skip


def codes_of(w, kind: str):
    """Return matrices (E, O, I) in codes of this kind; "full": as they are."""
    return w if kind == "full" else quantize(w.reshape(-1, w.shape[-1]), kind)


def measure_decoding(name: str, shape: Shape, kind: str) -> None:
    """Measure the experts of 1 to 8 tokens, of codes of this kind to 64."""
    E = shape.experts
    K = shape.per_token
    C = shape.width
    F = shape.hidden
    matrices = [codes_of(draw(*n), kind) for n in ((E, 2 * F, C), (E, C, F))]
    whole = sum(m.nbytes for m in matrices)
    most = MOST_ROWS if kind == "full" else MOST_ROWS_QUANTIZED
    for N in (n for n in (1, 4, 8, 16, 32, 64) if n <= most):
        x = draw(N, C)
        logits = cp.random.default_rng(N).standard_normal((N, E), dtype=np.float32)
        experts, weights = routing.routing(logits, K)
        nbytes = len(np.unique(experts.get())) * whole // E
        ms = graph_ms(lambda x=x, w=weights, e=experts: expert_gemv(x, w, e, *matrices))[0]
        record(
            "bench_experts", f"{name}.decoding", shape=f"N={N} E={E} K={K} C={C} F={F}",
            dtype="bf16" if kind == "full" else kind, ms=ms, value=1e-6 * nbytes / ms, unit="GB/s",
            peer="copy", peer_value=1e-6 * nbytes / copy_ms(nbytes),
        )  # fmt: skip


def measure_codes(name: str, shape: Shape, skewed: bool, kind: str) -> None:
    """Measure products with codes of gate_up, for all tokens and for few."""
    E = shape.experts
    outputs = 2 * shape.hidden
    w = draw(E, outputs, shape.width)
    codes = codes_of(w, kind)
    for tokens in (shape.tokens, 64):
        order = expert_order(choose_experts(replace(shape, tokens=tokens), skewed), E)
        x = draw(order.pairs_M.size, shape.width)
        P = tokens * shape.per_token
        ms, dense = (graph_ms(lambda w=w: grouped_product(x, w, order))[0] for w in (codes, w))  # noqa: B023
        rate = lambda ms: 2e-9 * P * outputs * shape.width / ms  # noqa: B023
        record(
            "bench_experts", f"{name}.codes", shape=f"P={P} E={E} O={outputs} I={shape.width}",
            dtype=kind, ms=ms, value=rate(ms), unit="TFLOP/s", peer="bf16", peer_value=rate(dense),
        )  # fmt: skip


PARTS = ("products", "rows", "decoding", "codes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["few", "many"])
    parser.add_argument("--skewed", action="store_true", help="experts are chosen unevenly")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--weights", nargs="+", choices=["full", *KINDS], default=["full"])
    options = parser.parse_args()
    for name in options.shapes:
        shape = SHAPES[name]
        if "rows" in options.only:
            measure_rows(name, shape, options.skewed)
        for kind in options.weights:
            if "decoding" in options.only:
                measure_decoding(name, shape, kind)
            if "codes" in options.only and kind != "full":
                measure_codes(name, shape, options.skewed, kind)
        if "products" not in options.only:
            continue
        measure(f"{name}.gate_up", shape, options.skewed, 2 * shape.hidden, shape.width)
        measure(f"{name}.down", shape, options.skewed, shape.width, shape.hidden)


if __name__ == "__main__":
    main()
