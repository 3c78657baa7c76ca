"""The operations from which intrinsics.py generates code, as LLVM IR: for numba-cuda, with
llvmlite.
"""

from typing import Any

from llvmlite import ir
from numba import types

function_maker: Any
try:
    from numba.cuda.extending import intrinsic as function_maker
except ImportError:  # older releases
    from numba.extending import intrinsic as function_maker

__all__ = ["Code", "function_maker"]
I32, I64 = ir.IntType(32), ir.IntType(64)
LETTERS = {"i32": "r", "i64": "l", "float": "f"}  # of the constraints of inline PTX


def _arithmetic(name):
    def operation(self, a, b):
        return getattr(self.builder, name)(a, b if hasattr(b, "type") else ir.Constant(a.type, b))

    return operation


class Code:
    """Appends LLVM IR to the kernel.

    Kinds are Numba types; spaces are GLOBAL, SHARED or None (generic).
    """

    def __init__(self, context, builder):
        self.context = context
        self.builder = builder

    @classmethod
    def generator(cls, body, kinds):
        """Return Numba's code generator, which calls body(code, values)"""

        def generate(context, builder, sig, args):
            value = body(cls(context, builder), args)
            return context.get_dummy_value() if value is None else value

        return generate

    # ---------------------------------------------------- values; the second may be a Python number
    add, mul, fsub, fmul = (_arithmetic(name) for name in ("add", "mul", "fsub", "fmul"))
    and_, or_, xor, shl, lshr = (
        _arithmetic(name) for name in ("and_", "or_", "xor", "shl", "lshr")
    )

    def constant(self, number, kind=types.uint32):
        return ir.Constant(self.context.get_value_type(kind), number)

    def bitcast(self, value, kind):
        return self.builder.bitcast(value, self.context.get_value_type(kind))

    def resize(self, value, kind):
        """An integer of another width: zero-extended or truncated"""
        there = self.context.get_value_type(kind)
        change = self.builder.trunc if there.width < value.type.width else self.builder.zext
        return change(value, there)

    def int32(self, i):
        """The index i as 32 bits"""
        return i.value if i.value.type.width <= 32 else self.builder.trunc(i.value, I32)

    def int64(self, i):
        """The index i, or a Python integer, as 64 bits"""
        if isinstance(i, int):
            return ir.Constant(I64, i)
        if i.value.type.width >= 64:
            return i.value
        return (self.builder.sext if i.type.signed else self.builder.zext)(i.value, I64)

    def choose(self, condition, yes, no):
        """One of two 32-bit constants"""
        condition = self.context.is_true(self.builder, condition.type, condition.value)
        return self.builder.select(condition, self.constant(yes), self.constant(no))

    # ---------------------------------------------------------------- memory; no bounds are checked
    def _data(self, x):
        return self.context.make_array(x.type)(self.context, self.builder, value=x.value).data

    def registers(self, x, n):
        """The first n elements of a register array"""
        data = self._data(x)
        return [self.builder.load(self.builder.gep(data, [ir.Constant(I32, j)])) for j in range(n)]

    def set_registers(self, x, values):
        """The first elements of a register array become these values."""
        data = self._data(x)
        for j, value in enumerate(values):
            self.builder.store(value, self.builder.gep(data, [ir.Constant(I32, j)]))

    def pointer(self, x, i):
        """Pointer to x[i]"""
        return self.builder.gep(self._data(x), [self.int64(i)])

    def address(self, x, i, space):
        """The address of x[i] as an integer: 64 bits in global memory, 32 in shared memory"""
        if space == 1:
            return self.builder.ptrtoint(self._in_space(self.pointer(x, i), space), I64)
        base = self.builder.ptrtoint(self._in_space(self._data(x), space), I32)
        return self.add(base, self.mul(self.int32(i), x.type.dtype.bitwidth // 8))

    def _in_space(self, pointer, space):
        there = ir.PointerType(pointer.type.pointee, space)
        return self.builder.addrspacecast(pointer, there)

    def _vector(self, where, element, length, space):
        kind = ir.VectorType(element, length) if length else element
        if isinstance(where.type, ir.IntType):  # an address
            return self.builder.inttoptr(where, ir.PointerType(kind, space))
        where = self._in_space(where, space) if space else where
        return self.builder.bitcast(where, ir.PointerType(kind, space or 0))

    def load(self, where, kind, space=None, length=None, count=1):
        """`count` accesses of `length` neighbouring elements from a pointer or an address on -> a
        list of elements
        """
        element = self.context.get_value_type(kind)
        first = self._vector(where, element, length, space)
        values = []
        for k in range(count):
            at = self.builder.gep(first, [ir.Constant(I32, k)]) if length else first
            size = kind.bitwidth // 8 * (length or 1)
            loaded = self.builder.load(at, align=size if space else None)
            if not length:
                return [loaded]
            each = [ir.Constant(I32, j) for j in range(length)]
            values += [self.builder.extract_element(loaded, j) for j in each]
        return values

    def vector(self, values):
        """Several 32-bit values as one"""
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for j, value in enumerate(values):
            vector = self.builder.insert_element(vector, value, ir.Constant(I32, j))
        return vector

    def store(self, where, values, space=None, length=None):
        """Store values from a pointer or an address on, `length` to an access."""
        first = self._vector(where, values[0].type, length, space)
        for k in range(0, len(values), length or 1):
            value = values[k]
            at = first
            if length:
                value = self.vector(values[k : k + length])
                at = self.builder.gep(first, [ir.Constant(I32, k // length)])
            words = getattr(value.type, "count", 1)
            self.builder.store(value, at, align=4 * words if space else None)

    def dynamic_shared(self, name, alignment):
        """The address of the block's dynamic shared memory"""
        memory = self.builder.module.globals.get(name)
        if memory is None:
            kind = ir.ArrayType(ir.IntType(8), 0)
            memory = ir.GlobalVariable(self.builder.module, kind, name, addrspace=3)
            memory.linkage = "external"
            memory.align = alignment
        return self.builder.ptrtoint(memory, I32)

    # ------------------------------------------------------------------------- PTX
    def asm(self, text, returns=None, operands=(), effect=True, memory=False, tied=()):
        """One PTX statement. In the text, $0, $1 ... are the results, then the operands.

        returns: a kind, or a list of kinds, then the result is a list. effect: it must not be
        merged or removed. memory: loads and stores are not moved across it. tied: values that the
        first results have before.
        """
        several = isinstance(returns, list)
        kinds = returns if several else [returns] * (returns is not None)
        results = [self.context.get_value_type(kind) for kind in kinds]
        operands = [o if hasattr(o, "type") else self.constant(o) for o in operands]
        constraints = ["=" + LETTERS[str(kind)] for kind in results]
        constraints += [LETTERS[str(o.type)] for o in operands]
        constraints += [str(i) for i in range(len(tied))] + ["~{memory}"] * memory
        operands += tied
        if several:
            result = ir.LiteralStructType(results)
        else:
            result = results[0] if results else ir.VoidType()
        function = ir.FunctionType(result, [o.type for o in operands])
        statement = ir.InlineAsm(function, text, ",".join(constraints), side_effect=effect)
        out = self.builder.call(statement, operands)
        if several:
            return [self.builder.extract_value(out, j) for j in range(len(results))]
        return out if results else None
