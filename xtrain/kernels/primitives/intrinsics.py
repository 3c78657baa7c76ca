"""Intrinsics: functions of a kernel that become PTX which the compiler cannot express itself.

An intrinsic is described once. `@intrinsic` turns a Python function that generates code into one
that kernels call:

    @intrinsic(value=uint32)
    def store_pair_shared(code, smem, i, value):
        code.store(code.address(smem, i, SHARED), [value], SHARED)

    @intrinsic(returns=int32, value=int32)
    def atomic_add_acq_rel(code, x, i, value):
        text = "atom.acq_rel.gpu.global.add.s32 $0, [$1], $2;"
        return code.asm(text, int32, [code.address(x, i, GLOBAL), value], memory=True)

`code` offers the few operations of llvm_code.py and mlir_code.py, one for each compiler (and
no_code.py for none): loads, stores, integer arithmetic, PTX. A parameter with a declared type is a
value of that type; the compiler converts what the kernel passes. Any other parameter is an Operand:
an array, or an index of any integer type. One PTX statement on numbers is shorter:

    prmt = instruction("prmt", "prmt.b32 $0, $1, $2, $3;", uint32, pure=True, a=uint32, b=uint32,
                       selector=uint32)

`xtrain.simulator.simulates` registers the Python implementation that the simulator runs.
"""

import inspect
from typing import Any, NamedTuple

from ..runtime.compiler import COMPILER, types

if COMPILER == "numba":
    from .llvm_code import Code, function_maker
elif COMPILER == "none":
    from .no_code import Code, function_maker  # type: ignore[assignment]
else:
    from .mlir_code import Code, function_maker  # type: ignore[assignment]

# address spaces
GLOBAL = 1
SHARED = 3
# the declared type of a parameter that must be a constant: the code generator gets its value
LITERAL = "literal"


class Operand(NamedTuple):
    """An argument of no declared type."""

    type: Any
    value: Any

    @property
    def is_bf16(self) -> bool:
        """True if the elements of this array are bf16. Kernels get them as uint16, see ptx.py."""
        return isinstance(self.type.dtype, types.Integer)


def intrinsic(returns=None, name=None, doc=None, parameters=None, **declared):
    """Decorate a code generator so that kernels can call it.

    returns: the type of the result; None: no result.
    name, doc, parameters: the intrinsic's, if they are not those of the function.
    declared: the types of parameters, or LITERAL.
    """

    def define(generate):
        names = parameters
        if names is None:
            names = list(inspect.signature(generate).parameters)[1:]

        def typing(typingctx, *argument_types):
            kinds = []
            constants = {}
            for parameter, argument_type in zip(names, argument_types):
                kind = declared.get(parameter, argument_type)
                if kind is LITERAL:
                    if not hasattr(argument_type, "literal_value"):
                        return None
                    constants[parameter] = argument_type.literal_value
                    kind = argument_type
                kinds.append(kind)

            def body(code, values):
                operands = []
                for parameter, kind, value in zip(names, kinds, values):
                    if parameter in declared:
                        operands.append(constants.get(parameter, value))
                    else:
                        operands.append(Operand(kind, value))
                return generate(code, *operands)

            return (returns or types.void)(*kinds), Code.generator(body, kinds)

        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        listed = [inspect.Parameter(n, positional) for n in ("typingctx", *names)]
        # setattr, because mypy knows no such attributes
        setattr(typing, "__signature__", inspect.Signature(listed))  # noqa: B010
        # The name is part of the cache key, see runtime/compile.py.
        typing.__name__ = typing.__qualname__ = name or generate.__name__
        typing.__module__ = generate.__module__
        typing.__doc__ = doc or generate.__doc__
        setattr(typing, "__wrapped__", generate)  # noqa: B010  where inspect finds the source
        literals = [i for i, n in enumerate(names) if declared.get(n) is LITERAL]
        setattr(typing, "literals", literals)  # noqa: B010  for the simulator
        return function_maker(typing)

    return define


def instruction(name, text, returns, doc=None, pure=False, memory=None, **arguments):
    """Return an intrinsic for one PTX statement on scalars.

    text: $0 is the result if there is one, then come the arguments.
    returns: the type of the result; None: no result.
    doc: its docstring.
    pure: it has no side effects.
    memory: the statement is not moved across loads and stores; by default if it is not pure.
    arguments: the types of its parameters, in their order.
    """
    if memory is None:
        memory = not pure

    def generate(code, *values):
        return code.asm(text, returns, values, effect=not pure, memory=memory)

    return intrinsic(returns, name, doc, list(arguments), **arguments)(generate)
