"""The operations from which intrinsics.py generates code, as LLVM IR.

For numba-cuda, with llvmlite.
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
I32 = ir.IntType(32)
I64 = ir.IntType(64)
LETTERS = {"i32": "r", "i64": "l", "float": "f"}  # of the constraints of inline PTX


def _arithmetic(name):
    def operation(self, a, b):
        if not hasattr(b, "type"):  # a Python number
            b = ir.Constant(a.type, b)
        return getattr(self.builder, name)(a, b)

    return operation


class Code:
    """Append LLVM IR to the kernel.

    Kinds are Numba types; spaces are GLOBAL, SHARED or None (generic).
    """

    def __init__(self, context, builder):
        self.context = context
        self.builder = builder

    @classmethod
    def generator(cls, body, kinds):
        """Return Numba's code generator, which calls body(code, values)."""

        def generate(context, builder, sig, args):
            value = body(cls(context, builder), args)
            return context.get_dummy_value() if value is None else value

        return generate

    # ---------------------------------------------------- values; the second may be a Python number
    add = _arithmetic("add")
    mul = _arithmetic("mul")
    fsub = _arithmetic("fsub")
    fmul = _arithmetic("fmul")
    and_ = _arithmetic("and_")
    or_ = _arithmetic("or_")
    xor = _arithmetic("xor")
    shl = _arithmetic("shl")
    lshr = _arithmetic("lshr")

    def constant(self, number, kind=types.uint32):
        return ir.Constant(self.context.get_value_type(kind), number)

    def bitcast(self, value, kind):
        return self.builder.bitcast(value, self.context.get_value_type(kind))

    def resize(self, value, kind):
        """Zero-extend or truncate an integer to another width."""
        target = self.context.get_value_type(kind)
        if target.width < value.type.width:
            return self.builder.trunc(value, target)
        return self.builder.zext(value, target)

    def int32(self, i):
        """Return the index i as 32 bits."""
        if i.value.type.width <= 32:
            return i.value
        return self.builder.trunc(i.value, I32)

    def int64(self, i):
        """Return the index i, or a Python integer, as 64 bits."""
        if isinstance(i, int):
            return ir.Constant(I64, i)
        if i.value.type.width >= 64:
            return i.value
        if i.type.signed:
            return self.builder.sext(i.value, I64)
        return self.builder.zext(i.value, I64)

    def choose(self, condition, yes, no):
        """Return one of two 32-bit constants."""
        condition = self.context.is_true(self.builder, condition.type, condition.value)
        return self.builder.select(condition, self.constant(yes), self.constant(no))

    # ---------------------------------------------------------------- memory; no bounds are checked
    def _data(self, x):
        return self.context.make_array(x.type)(self.context, self.builder, value=x.value).data

    def registers(self, x, n):
        """Return the first n elements of a register array."""
        data = self._data(x)
        return [self.builder.load(self.builder.gep(data, [ir.Constant(I32, j)])) for j in range(n)]

    def set_registers(self, x, values):
        """Set the first elements of a register array to these values."""
        data = self._data(x)
        for j, value in enumerate(values):
            self.builder.store(value, self.builder.gep(data, [ir.Constant(I32, j)]))

    def pointer(self, x, i):
        """Return a pointer to x[i]."""
        return self.builder.gep(self._data(x), [self.int64(i)])

    def address(self, x, i, space):
        """Return the address of x[i] as an integer: 64 bits in global, 32 in shared memory."""
        if space == 1:
            return self.builder.ptrtoint(self._in_space(self.pointer(x, i), space), I64)
        base = self.builder.ptrtoint(self._in_space(self._data(x), space), I32)
        return self.add(base, self.mul(self.int32(i), x.type.dtype.bitwidth // 8))

    def _in_space(self, pointer, space):
        return self.builder.addrspacecast(pointer, ir.PointerType(pointer.type.pointee, space))

    def _vector(self, location, element, length, space):
        kind = ir.VectorType(element, length) if length else element
        if isinstance(location.type, ir.IntType):  # an address
            return self.builder.inttoptr(location, ir.PointerType(kind, space))
        if space:
            location = self._in_space(location, space)
        return self.builder.bitcast(location, ir.PointerType(kind, space or 0))

    def load(self, location, kind, space=None, length=None, count=1):
        """Return the elements of `count` accesses from a pointer or an address on.

        length: neighbouring elements of an access; None: one element, and one access.
        """
        first = self._vector(location, self.context.get_value_type(kind), length, space)
        alignment = None
        if space:
            alignment = kind.bitwidth // 8 * (length or 1)
        if not length:
            return [self.builder.load(first, align=alignment)]
        values = []
        for k in range(count):
            pointer = self.builder.gep(first, [ir.Constant(I32, k)])
            loaded = self.builder.load(pointer, align=alignment)
            indices = [ir.Constant(I32, j) for j in range(length)]
            values += [self.builder.extract_element(loaded, j) for j in indices]
        return values

    def vector(self, values):
        """Return several 32-bit values as one."""
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for j, value in enumerate(values):
            vector = self.builder.insert_element(vector, value, ir.Constant(I32, j))
        return vector

    def store(self, location, values, space=None, length=None):
        """Store values from a pointer or an address on, `length` to an access."""
        first = self._vector(location, values[0].type, length, space)
        for k in range(0, len(values), length or 1):
            value = values[k]
            pointer = first
            if length:
                value = self.vector(values[k : k + length])
                pointer = self.builder.gep(first, [ir.Constant(I32, k // length)])
            words = getattr(value.type, "count", 1)
            self.builder.store(value, pointer, align=4 * words if space else None)

    def dynamic_shared(self, name, alignment):
        """Return the address of the block's dynamic shared memory."""
        memory = self.builder.module.globals.get(name)
        if memory is None:
            kind = ir.ArrayType(ir.IntType(8), 0)
            memory = ir.GlobalVariable(self.builder.module, kind, name, addrspace=3)
            memory.linkage = "external"
            memory.align = alignment
        return self.builder.ptrtoint(memory, I32)

    # ------------------------------------------------------------------------- PTX
    def asm(self, text, returns=None, operands=(), effect=True, memory=False, tied=()):
        """Add one PTX statement. In the text, $0, $1 ... are the results, then the operands.

        returns: a kind, or a list of kinds, then the result is a list.
        effect: it must not be merged or removed.
        memory: loads and stores are not moved across it.
        tied: values that the first results have before.
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
