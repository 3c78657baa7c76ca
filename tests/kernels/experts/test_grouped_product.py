"""Grouped products: the references against calculus, the three versions of the kernels against float64, bits, planted bugs."""

import ml_dtypes
import numpy as np
import pytest
from checks import (
    GPU,
    SLOW,
    assert_as_good,
    assert_directional,
    double,
    int32,
    normal,
    on_kernel,
    planted_bugs,
    rng,
    same_bytes,
    sentinels,
    to_host,
    to_kernel,
    with_planted_bug,
)

from xtrain import batch_invariant, device
from xtrain.kernels.experts import expert_order
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
from xtrain.kernels.gemm import linear_fwd
from xtrain.kernels.primitives.tensor_cores import add_products
from xtrain.kernels.quantize import KINDS, dequantize, quantize
from xtrain.simulator import AsyncError, DeadlockError, KernelError, RaceError, UninitializedError

BF16 = ml_dtypes.bfloat16
CAPABILITY = int(device.cupy().cuda.Device().compute_capability) if GPU else 90
# tiles of the wgmma version in the simulator: two tiles of columns, two rounds of the ring
SMALL = hopper.Tiles(columns=64, stages=2, blocks=1, parts=1, together=2)
VERSIONS = {"tiled": (tiled, np.float32), "tiled bf16": (tiled, BF16), "mma": (mma, BF16), "hopper": (hopper, BF16)}  # fmt: skip
NEEDS = {"mma": 80, "hopper": 90}
ROUTINGS = {
    "two experts, one without tokens, one tile unused": (int32([[2]] * 70 + [[0]]), 3),
    "all tokens to one expert": (int32([[1]] * 5), 2),
    "more than a tile": (int32([[0]] * (TILE + 2)), 1),
}
if GPU:
    ROUTINGS["training"] = rng(0).integers(0, 16, (2000, 2)).astype(np.int32), 16
    ROUTINGS["uneven"] = (rng(1).integers(0, 30, (3000, 1)) ** 2 // 29).astype(np.int32), 32
FIRST, *REST = ROUTINGS


@pytest.fixture
def use(monkeypatch):
    """-> use(version): the launchers use it, with small tiles in the simulator. -> dtype"""

    def switch(version):
        module, dtype = VERSIONS[version]
        if NEEDS.get(version, 0) > CAPABILITY:
            pytest.skip(
                f"needs compute capability {NEEDS[version] / 10}"
            )  # other GPUs lack its mma
        monkeypatch.setattr(file, "version", lambda *arrays: module)
        if not GPU:
            monkeypatch.setattr(hopper, "TILES", dict.fromkeys(hopper.TILES, SMALL))
        return dtype

    return switch


@pytest.fixture
def short_steps(monkeypatch):
    """The tiled kernels take 4 terms at a time, not 16, since the simulator computes also those that are missing."""
    if GPU:
        yield
        return
    monkeypatch.setattr(tiled, "BK", 4)
    makers = tiled.make_kernel, tiled.make_load
    for make in makers:
        make.cache_clear()
    yield
    for make in makers:
        make.cache_clear()


@pytest.fixture(scope="module")
def right():
    """-> the results that the kernels without bugs have computed well"""
    return {}


NAMES = ("y", "dx", "dw", "dw added")


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


def kernels(order, x, w, dy, old, names=NAMES):
    """-> the results of these names"""
    order = on_device(order)
    x, w, dy = map(to_kernel, (x, w, dy))
    products = {
        "y": lambda: grouped_product(x, w, order),
        "dx": lambda: grouped_product_dx(dy, w, order),
        "dw": lambda: grouped_product_dw(dy, x, order, to_kernel(old)),
        "dw added": lambda: grouped_product_dw(dy, x, order, to_kernel(old), accumulate=True),
    }
    return [products[name]() for name in names]


def test_references_are_their_definition():
    order, x, w, dy, _ = (
        np.asarray(a, np.float64) if i else a for i, a in enumerate(case(FIRST, 3, 5, np.float64))
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


def check(version, dtype, routing):
    O, I = (72, 24) if version in NEEDS else (5, 19)  # noqa: E741
    if GPU:
        O, I = (1408, 520) if version in NEEDS else (301, 130)  # noqa: E741
    order, *arrays = case(routing, O, I, dtype)
    exact = refs(order, *double(*arrays))
    rounded = (e.astype(dtype if i < 2 else np.float32) for i, e in enumerate(exact))
    found = kernels(order, *arrays)
    for name, got, e, r in zip(NAMES, found, exact, rounded, strict=True):
        assert_as_good(got, e, r, floor=4e-6, what=f"{version}: {name}")
    assert not to_host(found[0])[order.pairs_M < 0].any()


@pytest.mark.parametrize("version", ["tiled", "mma", "hopper"])
def test_against_float64(use, version):
    check(version, use(version), FIRST)


@pytest.mark.skipif(not GPU and not SLOW, reason="slow: XTRAIN_SLOW=1")
@pytest.mark.parametrize("routing", REST)
@pytest.mark.parametrize("version", VERSIONS)
def test_more_routings(use, version, routing):
    if not GPU and version == "tiled bf16" and routing == "more than a tile":
        # that "tiled" checks with this routing; "tiled bf16" has all others
        pytest.skip("only loads and stores differ from those of float32")
    check(version, use(version), routing)


@pytest.mark.skipif(GPU, reason="the number of blocks of a GPU is given")
def test_a_block_computes_several_tiles(use, monkeypatch):
    dtype = use("hopper")
    monkeypatch.setattr(hopper, "multiprocessors", lambda x: 2)
    check("hopper", dtype, FIRST)


@pytest.mark.parametrize("version", ["mma", "hopper"])
def test_bits_of_a_row_depend_on_nothing_else(use, version):
    """They are those of a chain of 16 terms each, whoever else is in the batch: of cuBLAS's products on a GPU."""
    use(version)
    O, I = (1408, 520) if GPU else (8, 40)  # noqa: E741
    w = to_kernel(normal(0, 3, O, I, dtype=BF16))
    token = normal(1, 1, I, dtype=BF16)
    found = []
    for experts in (int32([[2]]), int32([[0], [2], [2]])):
        order = expert_order_ref(experts, 3)
        x = np.where((order.pairs_M >= 0)[:, None], normal(2, order.pairs_M.size, I), 0).astype(
            BF16
        )
        slot = order.slots_NK[-1, 0]
        x[slot] = token
        found.append(to_host(grouped_product(to_kernel(x), w, on_device(order)))[slot])
    if GPU:
        with batch_invariant():
            chain = to_host(linear_fwd(to_kernel(token), w[2]))[0]
    else:
        chain = np.zeros((1, O), np.float32)
        for k in range(0, I, 16):
            a, b = (x[:, k : k + 16].astype(np.float32) for x in (token, w[2]))
            chain = add_products(chain, a, b.T)
        chain = chain[0].astype(BF16)
    assert all(same_bytes(row, chain) for row in found)


@pytest.mark.parametrize("version", ["tiled", "hopper"])
def test_no_tokens_and_sentinels(use, monkeypatch, version):
    dtype = use(version)
    order = expert_order_ref(np.zeros((0, 2), np.int32), 2)
    x = normal(0, 0, 8, dtype=dtype)
    w = normal(1, 2, 8, 8, dtype=dtype)
    old = normal(2, 2, 8, 8)
    monkeypatch.undo()  # version() itself chooses
    y, dx, dw, more = kernels(order, x, w, x, old)
    assert (
        y.shape == dx.shape == (0, 8)
        and not to_host(dw).any()
        and np.array_equal(to_host(more), old)
    )
    if not GPU:
        monkeypatch.setattr(hopper, "TILES", dict.fromkeys(hopper.TILES, SMALL))
    with sentinels(monkeypatch):
        order, x, w, *_ = case("all tokens to one expert", 8, 8, dtype)
        grouped_product(to_kernel(x), to_kernel(w), on_device(order))


# ----------------------------------------------------------------------------- codes
def with_codes(version, dtype, routing, kind, widths=None):
    """-> order, x, dy, the codes of w, the array that they stand for, where kernels run"""
    O, I = widths or ((72, 24) if version in NEEDS else (5, 7))  # noqa: E741
    order, x, w, dy, _ = case(routing, O, I, dtype)
    codes = quantize(w.reshape(-1, I), kind)
    dense = dequantize(codes).reshape(w.shape)
    return on_device(order), to_kernel(x), to_kernel(dy), on_kernel(codes), to_kernel(dense)


@pytest.mark.parametrize("kind", KINDS)
def test_references_compute_with_what_codes_stand_for(kind):
    order, x, w, dy, _ = case(FIRST, 3, 5, np.float32)
    codes = quantize(w.reshape(-1, 5), kind)
    dense = dequantize(codes).reshape(w.shape)
    found, wanted = (
        (grouped_product(x, m, order), grouped_product_dx(dy, m, order)) for m in (codes, dense)
    )
    for a, b in zip(found, wanted, strict=True):
        assert same_bytes(a, b) and np.abs(a).max() > 0


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "version, kind, buffer",
    [("tiled", "int4", 1), ("tiled", "int8", 2 * 5 * 7 * 4), ("mma", "nf4", 1), ("hopper", "int8", 1), ("hopper", "fp8", 1 << 30)],
)  # fmt: skip
def test_codes_have_the_bits_of_what_they_stand_for(
    use, short_steps, monkeypatch, version, kind, buffer, routing
):
    """A matrix at a time, two, or all: other experts' rows stay, padding and unused tiles are zeros."""
    if routing != FIRST and not (GPU or SLOW):
        pytest.skip("slow: XTRAIN_SLOW=1")  # FIRST has an empty expert, padding and an unused tile
    if not GPU and routing == "more than a tile" and version != "hopper":
        # nothing is left out or divided then; "hopper" checks it here, a GPU all of them
        pytest.skip("one expert: its matrix is all of them")
    widths = (8, 24) if version == "mma" and not GPU else None
    order, x, dy, *matrices = with_codes(version, use(version), routing, kind, widths)
    monkeypatch.setattr(file, "BUFFER", buffer)
    found, wanted = (
        (grouped_product(x, m, order), grouped_product_dx(dy, m, order)) for m in matrices
    )
    for a, b in zip(found, wanted, strict=True):
        assert same_bytes(to_host(a), to_host(b))
        assert not to_host(a)[to_host(order.pairs_M) < 0].any()


@planted_bugs
@pytest.mark.parametrize(
    "module, name, old, new",
    [
        (tiled, "make_is_other", "== OTHER", "== OTHER - 1"),
        (tiled, "make_is_other", "ROWS // TILE", "ROWS // (2 * TILE)"),
        (expert_order, "experts_between_kernel", "between_T[t] = e - first", "between_T[t] = e"),
        (expert_order, "experts_between_kernel", "e < last", "e <= last"),
        (expert_order, "experts_between_kernel", "UNUSED if e < 0 and first == 0 else OTHER", "OTHER"),
        (file, "_multiply", "first * O, part", "0, part"),
        (file, "_multiply", "part.counts_E)", "order.counts_E[: last - first])"),
        (hopper, "make_consumer", "steps > 0 or (not ADDED and e != OTHER)", "not ADDED or steps > 0"),
    ],
)  # fmt: skip
def test_planted_bugs_of_codes(use, short_steps, right, monkeypatch, module, name, old, new):
    version = "hopper" if module is hopper else "tiled"
    dtype = use(version)
    monkeypatch.setattr(file, "BUFFER", 1)  # also in the changed copy of a function
    # whose counts are others than those of the first expert
    routing = "all tokens to one expert" if "counts_E" in old else FIRST

    order, x, _, codes, dense = with_codes(version, dtype, routing, "int8")

    def check():
        y = to_host(grouped_product(x, codes, order))
        assert same_bytes(y, right[version, routing])

    if (version, routing) not in right:
        right[version, routing] = to_host(grouped_product(x, dense, order))
        check()
    modules = [module, mma] if module is tiled else [module, file]
    with with_planted_bug(modules, name, old, new), pytest.raises((KernelError, AssertionError)):
        check()


def test_which_version():
    wide, odd = (to_kernel(normal(0, 8, n, dtype=BF16)) for n in (8, 9))
    best = {9: hopper, 8: mma}.get(CAPABILITY // 10, tiled)
    assert file.version(wide, wide, wide) is best and file.version(wide, odd, wide) is tiled
    assert file.version(*[to_kernel(normal(0, 4, 8))] * 3) is tiled


def test_wrong_arguments():
    order, x, w, dy, old = case(FIRST, 4, 8, np.float32)
    with pytest.raises(ValueError, match=r"x.*\(384, 7\)"):
        grouped_product(x[:, 1:].copy(), w, order)
    with pytest.raises(ValueError, match="counts"):
        grouped_product_dx(dy, w[:2].copy(), order)
    with pytest.raises(TypeError, match=r"x.*bfloat16"):
        grouped_product_dw(dy, x.astype(BF16), order, old)
    codes = quantize(w.reshape(-1, 8), "int8")
    with pytest.raises(ValueError, match="w has 11 rows, which 3 experts do not divide"):
        grouped_product(x, codes.rows(0, 11), order)
    with pytest.raises(TypeError, match=r"x is bfloat16, expected float32"):
        grouped_product(x.astype(BF16), codes, order)


# ----------------------------------------------------------------------------- planted bugs
WRONG = None  # no report, but wrong numbers
BUGS = {
    "expert of the tile before": ("make_locate", "experts[m]", "experts[max(m - 1, 0)]", WRONG, "y"),
    "off-by-one segment": ("make_locate", "e, first[e], steps", "e, first[e] + 1, steps", WRONG, "dw"),
    "stale count": ("make_locate", "counts[e] + BK", "counts[0] + BK", WRONG, "dw"),
    "one step too few": ("make_locate", "(K + BK - 1) // BK", "K // BK", WRONG, "y"),
    "rows of the tile before": ("make_producer", "column, k, sequence)", "row, k, sequence)", WRONG, "y"),
    "stage not waited for": ("make_producer", "mbarrier_wait(base + FREE + 8 * stage, ((it // STAGES) & 1) ^ 1)", "pass", AsyncError, "dx"),
    "bytes of one operand": ("make_producer", "LEFT_BYTES + RIGHT_BYTES)", "LEFT_BYTES)", KernelError, "y"),
    "step read before it has come": ("make_consumer", "mbarrier_wait(base + FULL + 8 * stage, (it // STAGES) & 1)\n                left", "left", UninitializedError, "y"),
    "stage given back too early": ("make_consumer", "wait_but_one()", "pass", AsyncError, "dx"),
    "last stage kept": ("make_consumer", "if steps > 0:\n", "if steps > 9:\n", DeadlockError, "dx"),
    "sums read before they are complete": ("make_consumer", "wait(acc)\n", "pass\n", AsyncError, "y"),
    "sums of the tile before": ("make_consumer", "acc[i] = float32(0.0)", "acc[i] += float32(0.0)", UninitializedError, "y"),
    "rows of another warpgroup": ("make_consumer", "(warp_id() >> 2) * WARPGROUP_BYTES", "0", WRONG, "y"),
    "left operand not transposed": ("make_consumer", "True, product.left_transposed", "True, False", AsyncError, "dw"),
    "padding passed over and not given back": ("make_consumer", "            mbarrier_arrive(base + FREE + 8 * stage)\n", "            pass\n", DeadlockError, "dx"),
    "half a tile passed over": ("make_consumer", "64 * (warp_id() >> 2) >= end", "128 * (warp_id() >> 2) >= end", WRONG, "y"),
    "rows overwritten while they leave": ("make_tile_store", "done()  # of the part before, or the previous tile", "pass", AsyncError, "dx"),
    "end before the stores are read": ("make_consumer", "        stores_done()\n", "        pass\n", AsyncError, "y"),
    "gradient of a matrix without tokens not written": ("make_consumer", "steps > 0 or (not ADDED and e != OTHER)", "steps > 0", WRONG, "dw"),
    "matrix of another expert": ("make_consumer", "sequence = int32(e)", "sequence = int32(2)", RaceError, "dw"),
    "columns of the part before": ("make_tile_store", "FIRST = part * WIDTH", "FIRST = 0", RaceError, "dw"),
}  # fmt: skip


@planted_bugs
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs(use, right, bug):
    name, old, new, expected, result = BUGS[bug]
    order, x, w, dy, old_dw = case(FIRST, 72, 24 if result != "dx" else 72, use("hopper"))
    arrays = double(x, w, dy, old_dw)
    exact = refs(order, *arrays)[NAMES.index(result)]

    def error():
        (got,) = kernels(order, x, w, dy, old_dw, [result])
        return np.abs(to_host(got).astype(np.float64) - exact).max() / np.abs(exact).max()

    with with_planted_bug([hopper], name, old, new):
        if expected is WRONG:
            assert not error() < 1e-2
        else:
            with pytest.raises(expected):
                error()
    if result not in right:  # without a bug once for each result
        assert error() < 1e-2
        right[result] = True
