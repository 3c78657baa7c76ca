"""Grouped products: the references against calculus, the three versions of the kernels against float64, bits, planted bugs."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    assert_as_good,
    assert_directional,
    double,
    int32,
    normal,
    only_slow,
    planted_bugs,
    rng,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
    with_planted_bug,
)

from xtrain import device
from xtrain.kernels.experts import grouped_product as file
from xtrain.kernels.experts import grouped_product_hopper as hopper
from xtrain.kernels.experts import grouped_product_mma as mma
from xtrain.kernels.experts import grouped_product_tiled as tiled
from xtrain.kernels.experts.expert_order import TILE, ExpertOrder, expert_order_ref
from xtrain.kernels.experts.grouped_product import (
    grouped_product,
    grouped_product_dw,
    grouped_product_dw_ref,
    grouped_product_dx,
    grouped_product_dx_ref,
    grouped_product_ref,
)
from xtrain.simulator import AsyncError, DeadlockError, UninitializedError

BF16 = ml_dtypes.bfloat16
CAPABILITY = int(device.cupy().cuda.Device().compute_capability) if GPU else 90
# tiles of the wgmma version in the simulator: two tiles of columns, two rounds of the ring
SMALL = hopper.Tiles(columns=64, stages=2, blocks=1, passes=1, together=2)
VERSIONS = {"tiled": (tiled, np.float32), "tiled bf16": (tiled, BF16), "mma": (mma, BF16), "hopper": (hopper, BF16)}  # fmt: skip
NEEDS = {"mma": 80, "hopper": 90}
ROUTINGS = {
    "an expert without tokens": (int32([[2], [0], [2], [2]]), 3),
    "all tokens to one expert": (int32([[1]] * 5), 3),
    "more than a tile": (int32([[0]] * (TILE + 2)), 1),
}
if GPU:
    ROUTINGS["training"] = rng(0).integers(0, 16, (2000, 2)).astype(np.int32), 16
    ROUTINGS["uneven"] = (rng(1).integers(0, 30, (3000, 1)) ** 2 // 29).astype(np.int32), 32


@pytest.fixture
def use(monkeypatch):
    """-> use(version): the launchers use it, with small tiles in the simulator. -> dtype"""

    def switch(version):
        module, dtype = VERSIONS[version]
        if CAPABILITY < NEEDS.get(version, 0):
            pytest.skip(f"needs compute capability {NEEDS[version] / 10}")
        monkeypatch.setattr(file, "version", lambda left, right: module)
        if not GPU:
            monkeypatch.setattr(hopper, "TILES", dict.fromkeys(hopper.TILES, SMALL))
        return dtype

    return switch


def case(routing, O, I, dtype):  # noqa: E741
    """-> order, x, w, dy, old dw; rows of padding are zeros"""
    experts, E = ROUTINGS[routing]
    order = expert_order_ref(experts, E)
    padding = order.pairs_M < 0
    x, dy = (normal(i, padding.size, n, dtype=dtype) for i, n in enumerate((I, O)))
    x[padding] = 0
    dy[padding] = 0
    return order, x, normal(2, E, O, I, dtype=dtype), dy, normal(3, E, O, I)


def on_device(order):
    return ExpertOrder(*map(to_kernel, order))


def refs(order, x, w, dy, old):
    dw = grouped_product_dw_ref(dy, x, order)
    return grouped_product_ref(x, w, order), grouped_product_dx_ref(dy, w, order), dw, dw + old


def kernels(order, x, w, dy, old):
    order = on_device(order)
    x, w, dy = map(to_kernel, (x, w, dy))
    dw, more = (grouped_product_dw(dy, x, order, to_kernel(old), add) for add in (False, True))
    return grouped_product(x, w, order), grouped_product_dx(dy, w, order), dw, more


NAMES = ("y", "dx", "dw", "dw added")


def test_references_are_their_definition():
    order, x, w, dy, _ = (
        np.asarray(a, np.float64) if i else a
        for i, a in enumerate(case("an expert without tokens", 3, 5, np.float64))
    )
    y, dx, dw, _ = refs(order, x, w, dy, 0.0)
    for m, pair in enumerate(order.pairs_M):
        wanted = np.zeros(3)
        if pair >= 0:
            wanted = w[order.experts_T[m // TILE]] @ x[m]
        np.testing.assert_allclose(y[m], wanted, rtol=1e-12)
    assert not dw[1].any() and dw[0].any()
    loss = lambda x, w: float((grouped_product_ref(x, w, order) * dy).sum())
    rows = order.pairs_M >= 0
    assert_directional(lambda x, w: loss(x * rows[:, None], w), (x, w), (dx, dw))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("version", VERSIONS)
def test_against_float64(use, version, routing):
    dtype = use(version)
    O, I = (24, 72) if version in NEEDS else (5, 19)  # noqa: E741
    if GPU:
        O, I = (1408, 520) if version in NEEDS else (301, 130)  # noqa: E741
    order, *arrays = case(routing, O, I, dtype)
    exact = refs(order, *double(*arrays))
    rounded = (e.astype(dtype if i < 2 else np.float32) for i, e in enumerate(exact))
    for name, got, e, r in zip(NAMES, kernels(order, *arrays), exact, rounded, strict=True):
        assert_as_good(got, e, r, floor=4e-6, what=f"{version}: {name}")
    assert not to_host(kernels(order, *arrays)[0])[order.pairs_M < 0].any()
