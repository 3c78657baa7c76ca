"""Every kernel of xtrain with the argument types that its launchers use: what both compilers must compile.

test_compile_mlir.py compiles them with numba-cuda-mlir; the files from which the lists come compile them with numba-cuda.
bench/bench_compilers.py compares the two.
"""

import ast
import functools
import sys
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import primitive_examples

from xtrain import simulator
from xtrain.kernels import fp8, fp8_norm
from xtrain.kernels.attention import flash_attention, flash_attention_hopper_bwd
from xtrain.kernels.runtime import compiler, launch
from xtrain.simulator import sim

BF16 = ml_dtypes.bfloat16
TESTS = Path(__file__).parents[1]
KERNELS = Path(fp8.__file__).parent


def launched(launch_all) -> list[tuple]:
    """-> [(kernel, argument types)] of everything that launch_all() launches; nothing is run"""
    found = {}

    def note(kernel, grid, block, *args, **options):
        found[kernel, tuple(map(launch.numba_type, args))] = None

    with mock.patch.object(simulator, "run", note):
        launch_all()
    return list(found)


def launch_fp8() -> None:
    """Call every launcher of fp8.py, and fp8_norm for two widths."""
    full = lambda *shape: sim(np.ones(shape, BF16))
    for kind in fp8.DTYPES:
        state = (np.ones(1, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int64))
        slot, T = fp8.Slot(*map(sim, state), kind), fp8.TILE
        fp8.fp8(full(T, 2 * T), slot, True)
        fp8.fp8_swiglu(full(T, 4 * T), slot, True)
        fp8.fp8_swiglu_bwd(full(T, T), full(T, 2 * T), slot, True)
        rows = (np.ones(T, np.int64), np.ones(T, np.float32))
        inv_count = sim(np.ones(1, np.float32))
        fp8.fp8_cross_entropy(full(T, T), *map(sim, rows), T, inv_count, slot, True)
        for C, add in ((768, True), (2048, False)):
            x = sim(np.ones((T, C), np.float32))
            fp8_norm.fp8_norm(x, full(T, C) if add else None, sim(x[0]), 1e-6, slot, True)
    kinds = (np.float32, np.int32, np.float32, np.int64, np.int64)
    fp8.update_scales(*(sim(np.zeros(2, t)) for t in kinds))


def of_compiler(kind):
    """A type of Numba as a type of the compiler that XTRAIN_COMPILER names"""
    if hasattr(kind, "ndim"):
        return compiler.types.Array(of_compiler(kind.dtype), kind.ndim, kind.layout)
    return getattr(compiler.types, str(kind))


def every_signature(card: tuple[int, int]) -> dict[str, list[tuple]]:
    """-> {group: [(kernel, argument types)]} of the kernels that run on a GPU of this compute capability"""
    for folder in ("kernels", "kernels/attention", "kernels/experts", "serving"):
        if str(TESTS / folder) not in sys.path:
            sys.path.append(str(TESTS / folder))
    import test_compile
    import test_engine_compile
    import test_exact_decode_attention as exact_decoding
    import test_flash_attention_compile as tensor_cores
    import test_flash_attention_hopper_compile as hopper
    import test_grouped_product_compile as products

    dtypes = [np.float32] + [BF16] * (card >= (8, 0))
    everything, found = test_compile.launch_everything, {}
    # Older GPUs have no kernels that overlap, nor wgmma; what only wgmma needs is below.
    overlap, hopper_off = card >= (9, 0), mock.patch.object(flash_attention, "HOPPER", False)
    with mock.patch.object(launch, "_overlap", overlap), hopper_off:
        for t in dtypes:
            found[f"training {np.dtype(t).name}"] = launched(functools.partial(everything, t))
        found["engine"] = launched(functools.partial(test_engine_compile.launch_engine, dtypes))
    if card == (9, 0):
        with mock.patch.object(launch, "_overlap", overlap):
            found["exact decoding"] = launched(exact_decoding.launch_all)
    if card >= (8, 0):
        found["attention"] = [
            (tensor_cores.fa.make_kernel(kind, *rest, 0)[0], tensor_cores.SIGNATURES[kind])
            for kind, *rest in tensor_cores.ONE_OF_EACH
        ]
    if card >= (8, 9):
        found["fp8"] = launched(launch_fp8)
    if card == (9, 0):
        found["wgmma"] = [
            (hopper.MAKERS[kind](*rest, 0), hopper.SIGNATURES[kind])
            for kind, *rest in hopper.ONE_OF_EACH
        ] + [
            (flash_attention_hopper_bwd.make_statistics_kernel(D)[0], hopper.STATISTICS)
            for D in (64, 128)
        ]
        found["wgmma"] += products.KERNELS.values()
        found["primitives"] = list(primitive_examples.launched().values())
    for group in ("attention", "wgmma"):
        if group in found:
            found[group] = [(kernel, tuple(map(of_compiler, s))) for kernel, s in found[group]]
    if card < (8, 0):  # no bf16: such an array is passed as uint16
        half = lambda signature: any(str(getattr(k, "dtype", k)) == "uint16" for k in signature)
        found = {group: [p for p in pairs if not half(p[1])] for group, pairs in found.items()}
    return found


def kernels_in_source() -> set[tuple[str, str]]:
    """-> (module, name) of every function below xtrain/kernels that cuda.jit compiles as a kernel"""
    found = set()
    for path in KERNELS.rglob("*.py"):
        module = ".".join(["xtrain.kernels", *path.relative_to(KERNELS).with_suffix("").parts])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", ()):
                text = ast.unparse(decorator)
                if text.split("(")[0] in ("cuda.jit", "kernel") and "device=True" not in text:
                    found.add((module, node.name))
    return found
