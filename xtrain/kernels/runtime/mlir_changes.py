"""What xtrain changes in numba-cuda-mlir.

Release 0.6 generates wrong code for a few functions, and slow code for loops. This file is written
for that release, whose MLIR is not a stable API. known_issues.md has the measurements.
"""

import dataclasses
import functools
import operator
import re

from numba_cuda_mlir import cuda, lowering_utilities, mlir_optimization, types
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm, memref, nvvm
from numba_cuda_mlir.extending import lower_builtin, refresh_registries
from numba_cuda_mlir.lowering.builtins import _get_range_object, lower_max, lower_min
from numba_cuda_mlir.lowering.cuda import _shfl_sync_lowering, cuda_shared_memory
from numba_cuda_mlir.lowering.math import _operator_mapping
from numba_cuda_mlir.lowering_utilities import (
    IterResult,
    RangeObject,
    _memref_index_offset,
    index_of,
    memref_data_pointer,
)
from numba_cuda_mlir.lowering_utilities.context import get_context
from numba_cuda_mlir.mlir_lowering import MLIRLower
from numba_cuda_mlir.numba_cuda.types import NamedTupleClass

DYNAMIC = -(2**31)  # marks an index of llvm.getelementptr that is a value
DYNAMIC_SIZE = -(2**63)  # marks a size, stride or offset of a memref that is a value

# A forked process would wait forever for the threads of its parent's pool.
get_context().enable_multithreading(False)


# ----------------------------------------------------------------------------- passes
# NVVM keeps in local memory what it cannot prove to be registers. So variables become registers
# before any pass merges blocks that load different ones, and device functions are left to NVVM,
# which optimizes each before it inlines it.
_release_pipeline = mlir_optimization.get_base_pipeline
REGISTERS = "gpu.module(gpu.func(sroa,mem2reg),func.func(sroa,mem2reg)),"


def _pipeline() -> str:
    return _release_pipeline().replace("builtin.module(", f"builtin.module({REGISTERS}", 1)


mlir_optimization.get_base_pipeline = _pipeline
mlir_optimization.get_inline_pipeline = lambda: "canonicalize"


# When NVVM inlines a function that calls another one, memory that is allocated after that call is
# no longer allocated at the function's start: the kernel then saves and restores its stack pointer,
# which takes registers.
_release_patterns = mlir_optimization.run_pre_codegen_patterns


def _patterns(module):
    _release_patterns(module)
    for operation in mlir_optimization._get_single_gpu_module(module).bodyRegion.blocks[0]:
        function = operation.operation
        if function.name == "llvm.func" and len(function.regions[0].blocks):
            _allocate_first(function.regions[0].blocks)


def _allocate_first(blocks):
    """Move the allocations of a constant size to the function's start."""
    start = ir.InsertionPoint.at_block_begin(blocks[0])
    for block in blocks:
        for operation in list(block.operations):
            old = operation.operation
            size = old.operands[0].owner if old.name == "llvm.alloca" else None
            if getattr(size, "name", "") == "llvm.mlir.constant":
                size = size.clone(ip=start)
                new = old.clone(ip=start)
                new.operands[0] = size.result
                old.result.replace_all_uses_with(new.result)
                old.erase()


mlir_optimization.run_pre_codegen_patterns = _patterns


# ----------------------------------------------------------------------------- indices of threads
# The release reads threadIdx and blockIdx by PTX with side effects. So NVVM reads them again for
# each use, computes what depends on them in each iteration of a loop, and does not know that they
# are not negative. Calls of the intrinsics tell it. That makes decoding 2 % faster. Other kernels
# stay as released: dim384 trains 0.4 to 1.9 % slower with calls, because more registers are taken.
CALLED = re.compile("gemv_tensor_kernel|decode_attention_kernel")
SPECIAL_REGISTER = re.compile(r"nvvm\.read\.ptx\.sreg\.n?(cta|t)id\.[xyz]")
_release_translation = mlir_optimization._call_llvm70_capi


def _translation(module, *args, **options):
    if CALLED.search(" ".join(_names(_functions(module)))):
        with module.context, ir.Location.unknown():
            _call_intrinsics(module)
    return _release_translation(module, *args, **options)


def _call_intrinsics(module):
    reads: list = []

    def collect(operation):
        if SPECIAL_REGISTER.fullmatch(operation.name):
            reads.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for operation in reads:
        name = f"llvm.{operation.name}"
        kind = operation.results[0].type
        functions = _functions(module)
        if name not in _names(functions):
            with ir.InsertionPoint.at_block_begin(functions):
                llvm.LLVMFuncOp(name, ir.TypeAttr.get(ir.Type.parse("!llvm.func<i32 ()>")))
        with ir.InsertionPoint(operation):
            callee = ir.FlatSymbolRefAttr.get(name)
            none = ir.DenseI32ArrayAttr.get([])
            call = llvm.CallOp(kind, [], [], none, callee=callee)
        operation.results[0].replace_all_uses_with(call.result)
        operation.erase()


def _functions(module):
    return mlir_optimization._get_single_gpu_module(module).bodyRegion.blocks[0]


def _names(block) -> list[str]:
    return [op.attributes["sym_name"].value for op in block if "sym_name" in op.attributes]


mlir_optimization._call_llvm70_capi = _translation


# ----------------------------------------------------------------------------- loops
# NVVM unrolls a loop if it finds the number of iterations: the release's iterators count with a
# condition, and put the next element and "is there one" into memory that they allocate in the loop.
def _constant(number, kind):
    return arith.ConstantOp(kind, ir.IntegerAttr.get(kind, number)).result


def _no_overflow(operation, a, b):
    return operation(a, b, overflowFlags=ir.Attribute.parse("#arith.overflow<nsw>")).result


class _Range(RangeObject):
    def next(self):
        value = self.iter
        count = self.count
        is_valid = arith.CmpIOp(arith.CmpIPredicate.sgt, count, _constant(0, count.type)).result
        next_count = _no_overflow(arith.SubIOp, count, _constant(1, count.type))
        next_value = _no_overflow(arith.AddIOp, value, self.step)
        memref.StoreOp(next_count, self._memref, [index_of(3)])
        memref.StoreOp(next_value, self._memref, [index_of(4)])
        return IterResult(value, is_valid)


@lower_builtin(range, types.Number)
@lower_builtin(range, types.Number, types.Number)
@lower_builtin(range, types.Number, types.Number, types.Number)
def _range(builder, target, args, kwargs):
    builder.store_var(target, _Range(builder, *_get_range_object(builder, args)))


def _next_of_tuple(self):
    index = self.index
    constant = lambda number: _constant(number, index.type)
    is_valid = arith.CmpIOp(arith.CmpIPredicate.slt, index, constant(self._count)).result
    # After the last element, the last one again: a load without a condition.
    i = arith.MinUIOp(index, constant(self._count - 1)).result
    if self._uses_llvm:
        pointer = llvm.getelementptr(
            llvm.PointerType.get(), self._tuple_storage, [i], [DYNAMIC], self._element_type, None
        )
        value = llvm.load(res=self._element_type, addr=pointer)
    else:
        i = arith.IndexCastOp(ir.IndexType.get(), i).result
        value = memref.LoadOp(self._tuple_storage, [i]).result
    next_index = _no_overflow(arith.AddIOp, index, constant(1))
    memref.StoreOp(next_index, self._index_memref, [index_of(0)])
    return IterResult(value, is_valid)


lowering_utilities.UniTupleIterObject.next = _next_of_tuple


# ----------------------------------------------------------------------------- arrays
# The release takes the offset and every stride of an array from the arguments: an index costs a
# multiplication and an addition of 64 bits. The last stride of a contiguous array is 1, and that of
# a kernel begins at its pointer. That of a device function may be a row of another one, with an
# offset.
_release_argument = MLIRLower.from_argument


def _argument(self, kind, value):
    value = _release_argument(self, kind, value)
    if isinstance(kind, types.Array) and kind.layout == "C" and kind.ndim > 0:
        return _contiguous(value, self._is_kernel)
    return value


def _contiguous(x, is_kernel):
    """Return the same array, with constants for the last stride and a kernel's offset."""
    index = ir.IndexType.get()
    rank = x.type.rank
    _, offset, *metadata = memref.ExtractStridedMetadataOp(x).results
    if is_kernel:
        offset = _constant(0, index)
    sizes = metadata[:rank]
    strides = [*metadata[rank:-1], _constant(1, index)]
    one_value = ir.DenseI64ArrayAttr.get([DYNAMIC_SIZE])
    rank_values = ir.DenseI64ArrayAttr.get([DYNAMIC_SIZE] * rank)
    layout = [offset], sizes, strides, one_value, rank_values, rank_values
    return memref.ReinterpretCastOp(x.type, x, *layout).result


MLIRLower.from_argument = _argument


# ----------------------------------------------------------------------------- operators
# In the release, x != x is False for a NaN: it compares floats as "ordered and not equal".
_not_equal = functools.partial(arith.cmpf, arith.CmpFPredicate.UNE)
_operators = _operator_mapping()
_operators[operator.ne] = dataclasses.replace(_operators[operator.ne], float=_not_equal)


# ----------------------------------------------------------------------------- named tuples
_release_call = MLIRLower.lower_call_expr_assign


def _call(self, target, function, args, kws, expr=None):
    """Make a named tuple, which the release can pass and read but not make."""
    kind = self.get_numba_type(function.name)
    if not isinstance(kind, NamedTupleClass):
        return _release_call(self, target, function, args, kws, expr)
    by_name = dict(kws)
    fields = kind.instance_class._fields[len(args) :]
    self.lower_build_tuple_expr_assign(target, [*args, *(by_name[f] for f in fields)])


MLIRLower.lower_call_expr_assign = _call


# ----------------------------------------------------------------------------- functions
def declare_dynamic_shared(builder, name: str, alignment: int) -> None:
    """Declare an array in shared memory whose size the launch determines."""
    block = builder.mlir_gpu_module.bodyRegion.blocks[0]
    if name not in _names(block):
        with ir.InsertionPoint.at_block_begin(block):
            kind = ir.Type.parse("!llvm.array<0 x i8>")
            linkage = ir.Attribute.parse("#llvm.linkage<external>")
            llvm.GlobalOp(kind, name, linkage, addr_space=3, alignment=alignment)


@lower_builtin(cuda.shared.array, types.Number, types.DTypeSpec)
def _shared_array(builder, target, args, kwargs):
    """Declare dynamic shared memory as an array without elements.

    The release declares it as a variable of one byte: the kernel's other shared arrays overlap with
    it.
    MLIR takes an array of no elements that is declared already, if it is in shared memory and its
    alignment is 16.
    """
    if getattr(builder.get_numba_type(args[0].name), "literal_value", None) == 0:
        declare_dynamic_shared(builder, "xtrain_dynamic_shared_16", 16)
    cuda_shared_memory(builder, target, args, kwargs)


@lower_builtin(cuda.threadfence)
def _threadfence(builder, target, args, kwargs):
    """Generate the code of threadfence, which the release lacks."""
    llvm.inline_asm(None, [], "membar.gl;", "~{memory}", has_side_effects=True)
    builder.store_var(target, None)


@lower_builtin(cuda.atomic.add, types.Array, types.Number, types.Number)
@lower_builtin(cuda.atomic.add, types.Array, types.UniTuple, types.Number)
@lower_builtin(cuda.atomic.add, types.Array, types.Tuple, types.Number)
def _atomic_add(builder, target, args, kwargs):
    """Add to an array in global or in shared memory.

    In a device function, the release takes the array for one in global memory.
    """
    x, index, value = builder.load_vars(args)
    element = ir.MemRefType(x.type).element_type
    i = _memref_index_offset(x, list(index) if isinstance(index, tuple) else [index])
    pointer = llvm.getelementptr(
        llvm.PointerType.get(), memref_data_pointer(x), [i], [DYNAMIC], element, None
    )
    kind = llvm.AtomicBinOp.fadd if isinstance(element, ir.FloatType) else llvm.AtomicBinOp.add
    value = builder.mlir_convert(value, element)
    builder.store_var(target, llvm.atomicrmw(kind, pointer, value, llvm.AtomicOrdering.monotonic))


def _shuffle(function, kind):
    """Make a shuffle pass on all of a 64-bit integer or a float64.

    The release passes on the lower 32 bits of the integer, and the float rounded to float32.
    """

    @lower_builtin(function, types.Integer, types.Number, types.Integer)
    def generate(builder, target, args, kwargs):
        value = builder.load_var(args[1])
        if value.type.width != 64:
            return _shfl_sync_lowering(builder, target, args, kwargs, kind)
        i32, i64 = (ir.IntegerType.get_signless(width) for width in (32, 64))
        mask, lane = (builder.mlir_convert(builder.load_var(args[i]), i32) for i in (0, 2))
        last = _constant(0 if kind == nvvm.ShflKind.up else 31, i32)
        is_integer = value.type == i64
        bits = value if is_integer else arith.BitcastOp(i64, value).result
        half = _constant(32, i64)
        upper_bits = arith.ShRUIOp(bits, half).result

        def shuffle_low_half(x):
            low = arith.TruncIOp(i32, x).result
            return arith.ExtUIOp(i64, nvvm.shfl_sync(mask, low, lane, last, kind)).result

        low = shuffle_low_half(bits)
        high = shuffle_low_half(upper_bits)
        result = arith.OrIOp(low, arith.ShLIOp(high, half).result).result
        if not is_integer:
            result = arith.BitcastOp(value.type, result).result
        builder.store_var(target, result)


for _function, _kind in (
    (cuda.shfl_sync, nvvm.ShflKind.idx),
    (cuda.shfl_up_sync, nvvm.ShflKind.up),
    (cuda.shfl_down_sync, nvvm.ShflKind.down),
    (cuda.shfl_xor_sync, nvvm.ShflKind.bfly),
):
    _shuffle(_function, _kind)


def _extreme(function, release, signed_op, unsigned_op):
    """Make `function`, max or min, compare unsigned integers as such.

    The release compares the bits of all integers as signed ones.
    """

    @lower_builtin(function, types.Integer, types.Integer)
    def generate(builder, target, args, kwargs):
        signed = [builder.get_numba_type(arg.name).signed for arg in args]
        if all(signed):
            return release(builder, target, args, kwargs)
        values = [builder.load_var(arg) for arg in args]
        width = max(value.type.width for value in values)
        if any(signed):
            width = 64  # as Numba: uint32 and int32 are compared as int64
        common = ir.IntegerType.get_signless(width)
        for i, value in enumerate(values):
            if value.type.width < width:
                extend = arith.ExtSIOp if signed[i] else arith.ExtUIOp
                values[i] = extend(common, value).result
        operation = signed_op if any(signed) else unsigned_op
        builder.store_var(target, operation(*values).result)


_extreme(max, lower_max, arith.MaxSIOp, arith.MaxUIOp)
_extreme(min, lower_min, arith.MinSIOp, arith.MinUIOp)

refresh_registries(typing=False)
