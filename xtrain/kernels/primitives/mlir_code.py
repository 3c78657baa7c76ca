"""The operations of llvm_code.py as MLIR: for numba-cuda-mlir.

Written for its release 0.6, whose MLIR is not a stable API.
"""

import math

from numba_cuda_mlir import types
from numba_cuda_mlir._mlir import ir
from numba_cuda_mlir._mlir.dialects import arith, llvm, memref
from numba_cuda_mlir.extending import intrinsic, refresh_registries
from numba_cuda_mlir.lowering_utilities import memref_data_pointer

from ..runtime.mlir_changes import DYNAMIC, declare_dynamic_shared

__all__ = ["Code", "function_maker"]
LETTERS = {"i32": "r", "i64": "l", "f32": "f"}


def function_maker(typing):
    """Return an intrinsic, also for one that is defined after the first kernel was compiled."""
    made = intrinsic(typing)
    refresh_registries(target=False, include_uninitialized_cuda=False)
    return made


def _type(kind):
    """Return the MLIR type of a number of this kind."""
    return ir.F32Type.get() if kind == types.float32 else ir.IntegerType.get_signless(kind.bitwidth)


def _constant(number, kind):
    if isinstance(kind, ir.FloatType):
        return arith.ConstantOp(kind, ir.FloatAttr.get(kind, number)).result
    half = 1 << (kind.width - 1)
    signed = (int(number) + half) % (2 * half) - half
    return arith.ConstantOp(kind, ir.IntegerAttr.get(kind, signed)).result


def _integer(value, width, signed):
    """Return an integer in another width."""
    target = ir.IntegerType.get_signless(width)
    if value.type.width == width:
        return value
    if value.type.width > width:
        return arith.TruncIOp(target, value).result
    if signed:
        return arith.ExtSIOp(target, value).result
    return arith.ExtUIOp(target, value).result


def _arithmetic(operation):
    def generate(self, a, b):
        if not isinstance(b, ir.Value):  # a Python number
            b = _constant(b, a.type)
        return operation(a, b).result

    return generate


class Code:
    """Append MLIR to the kernel. The methods are those of llvm_code.Code."""

    def __init__(self, builder):
        self.builder = builder

    @classmethod
    def generator(cls, body, kinds):
        def generate(builder, target, args, kwargs):
            values = []
            for argument, kind in zip(args, kinds):
                value = builder.load_var(argument)
                if isinstance(kind, (types.Integer, types.Float)):
                    passed = builder.get_numba_type(argument.name)
                    if isinstance(passed, types.Float) or isinstance(kind, types.Float):
                        value = builder.mlir_convert(value, _type(kind))
                    else:
                        value = _integer(value, kind.bitwidth, getattr(passed, "signed", False))
                values.append(value)
            builder.store_var(target, body(cls(builder), values))

        return generate

    # ------------------------------------------------------------------------- values
    add = _arithmetic(arith.AddIOp)
    mul = _arithmetic(arith.MulIOp)
    fsub = _arithmetic(arith.SubFOp)
    fmul = _arithmetic(arith.MulFOp)
    and_ = _arithmetic(arith.AndIOp)
    or_ = _arithmetic(arith.OrIOp)
    xor = _arithmetic(arith.XOrIOp)
    shl = _arithmetic(arith.ShLIOp)
    lshr = _arithmetic(arith.ShRUIOp)

    def constant(self, number, kind=types.uint32):
        return _constant(number, _type(kind))

    def bitcast(self, value, kind):
        target = _type(kind)
        if value.type == target:
            return value
        return arith.BitcastOp(target, value).result

    def resize(self, value, kind):
        return _integer(value, kind.bitwidth, False)

    def int32(self, i):
        return _integer(i.value, 32, i.type.signed)

    def int64(self, i):
        if isinstance(i, int):
            return _constant(i, ir.IntegerType.get_signless(64))
        return _integer(i.value, 64, i.type.signed)

    def choose(self, condition, yes, no):
        value = condition.value
        if value.type.width != 1:
            zero = _constant(0, value.type)
            value = arith.CmpIOp(arith.CmpIPredicate.ne, value, zero).result
        return arith.SelectOp(value, self.constant(yes), self.constant(no)).result

    # ------------------------------------------------------------------------- memory
    def _index(self, x, j):
        """Return the indices of element j of a register array of one or more dimensions."""
        shape = list(ir.MemRefType(x.value.type).shape)
        index = []
        for k in range(len(shape)):
            below = math.prod(shape[k + 1 :])
            index.append(j // below % (shape[k] if k else j + 1))
        kind = ir.IndexType.get()
        return [arith.ConstantOp(kind, ir.IntegerAttr.get(kind, i)).result for i in index]

    def registers(self, x, n):
        return [memref.LoadOp(x.value, self._index(x, j)).result for j in range(n)]

    def set_registers(self, x, values):
        for j, value in enumerate(values):
            memref.StoreOp(value, x.value, self._index(x, j))

    def pointer(self, x, i):
        element = ir.MemRefType(x.value.type).element_type
        return self._at(memref_data_pointer(x.value), self.int64(i), element)

    def _at(self, pointer, i, element):
        return llvm.getelementptr(pointer.type, pointer, [i], [DYNAMIC], element, None)

    def address(self, x, i, space):
        if space == 1:
            pointer = self._in_space(self.pointer(x, i), space)
            return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)
        pointer = self._in_space(memref_data_pointer(x.value), space)
        base = llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)
        return self.add(base, self.mul(self.int32(i), x.type.dtype.bitwidth // 8))

    def _in_space(self, pointer, space):
        if not space:
            return pointer
        return llvm.addrspacecast(llvm.PointerType.get(space), pointer)

    def _first(self, location, space):
        if isinstance(location.type, ir.IntegerType):
            return llvm.inttoptr(llvm.PointerType.get(space), location)
        return self._in_space(location, space)

    def _access(self, first, k, kind):
        """Return a pointer to access number k from `first` on."""
        if k == 0:
            return first
        return self._at(first, self.int64(k), kind)

    def load(self, location, kind, space=None, length=None, count=1):
        element = _type(kind)
        nbytes = kind.bitwidth // 8
        first = self._first(location, space)
        if not length:
            return [llvm.load(element, first, alignment=nbytes)]
        values = []
        loaded = ir.VectorType.get([length], element)
        for k in range(count):
            pointer = self._access(first, k, loaded)
            value = llvm.load(loaded, pointer, alignment=nbytes * (length if space else 1))
            values += [llvm.extractelement(value, self.constant(j)) for j in range(length)]
        return values

    def vector(self, values):
        vector = llvm.mlir_undef(ir.VectorType.get([len(values)], values[0].type))
        for j, value in enumerate(values):
            vector = llvm.insertelement(vector, value, self.constant(j))
        return vector

    def store(self, location, values, space=None, length=None):
        first = self._first(location, space)
        for k in range(0, len(values), length or 1):
            value = values[k]
            if length:
                value = self.vector(values[k : k + length])
            pointer = self._access(first, k // (length or 1), value.type)
            words = math.prod(getattr(value.type, "shape", ()))
            llvm.store(value, pointer, alignment=4 * words if space else None)

    def dynamic_shared(self, name, alignment):
        declare_dynamic_shared(self.builder, name, alignment)
        memory = llvm.mlir_addressof(llvm.PointerType.get(3), name)
        return llvm.ptrtoint(ir.IntegerType.get_signless(32), memory)

    # ------------------------------------------------------------------------- PTX
    def asm(self, text, returns=None, operands=(), effect=True, memory=False, tied=()):
        several = isinstance(returns, list)
        kinds = returns if several else [returns] * (returns is not None)
        results = [_type(kind) for kind in kinds]
        operands = [o if isinstance(o, ir.Value) else self.constant(o) for o in operands]
        constraints = ["=" + LETTERS[str(kind)] for kind in results]
        constraints += [LETTERS[str(o.type)] for o in operands]
        constraints += [str(i) for i in range(len(tied))] + ["~{memory}"] * memory
        result = results[0] if results else None
        if several:
            result = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, results))})>")
        operands = [*operands, *tied]
        out = llvm.inline_asm(
            result, operands, text, ",".join(constraints), has_side_effects=effect
        )
        if several:
            return [llvm.extractvalue(kind, out, [j]) for j, kind in enumerate(results)]
        return out if results else None
