"""Rewrites the expressions of a kernel: names, numbers, operators and elements of arrays.

source.py has the rest, calls and statements.
"""

import ast
from difflib import get_close_matches

import numpy as np

from . import frontends
from .names import ARITHMETIC, DYNAMIC, Names, at
from .scalars import number, promote, promote_if_known, typed
from .thread import Thread
from .twins import floor_divide, modulo, power, shift_left, shift_right, twin

_VOTES = ("all_sync", "any_sync", "eq_sync", "ballot_sync")
_MATCHES = ("match_any_sync", "match_all_sync")
PARAMETERS = {  # of the functions that wait for other threads
    "syncthreads": (),
    **dict.fromkeys(("syncthreads_and", "syncthreads_or", "syncthreads_count"), ("predicate",)),
    "activemask": (),
    "syncwarp": ("mask",),
    **dict.fromkeys(_VOTES, ("mask", "predicate")),
    **dict.fromkeys(_MATCHES, ("mask", "value")),
    "shfl_sync": ("mask", "value", "src_lane"),
    "shfl_up_sync": ("mask", "value", "delta"),
    "shfl_down_sync": ("mask", "value", "delta"),
    "shfl_xor_sync": ("mask", "value", "lane_mask"),
}
_CHECKED = {
    ast.FloorDiv: floor_divide,
    ast.Mod: modulo,
    ast.LShift: shift_left,
    ast.RShift: shift_right,
}


class Expressions(Names):
    """A visit_X method returns the new syntax tree of a node of type X."""

    def typed_like(self, node):
        """Return an expression that has the type of `node` and reads no memory; None if the source
        does not show the type."""
        if isinstance(node, (ast.Constant, ast.Name)) or self.static(node) is not DYNAMIC:
            return self.visit(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self.call(node, "element", self.visit(node.value))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self.typed_like(node.operand)
        if isinstance(node, ast.BinOp):
            sides = self.typed_like(node.left), self.typed_like(node.right)
            if None not in sides:
                return self.binary(node, *sides)
        if isinstance(node, ast.Call):
            scalar = getattr(twin(self.static(node.func)), "scalar", None)
            if scalar is None:
                return None
            return self.constant(scalar(1), node, "one")
        return None

    # ------------------------------------------------------------------------- names and numbers
    def visit_Name(self, node):
        value = self.static(node)
        name = self.cuda_name(node)
        if name is not None:  # from numba.cuda import syncthreads
            return self.cuda_attribute(node, name) or self.object(value, node, name)
        if self.inner.get(node.id) and isinstance(node.ctx, ast.Load):
            raise self.error(
                node, f"{node.id} waits for other threads: call it, but do not pass it on"
            )
        if isinstance(node.ctx, ast.Store) or value is DYNAMIC:
            return node
        return self.object(value, node, node.id)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Store):
            raise self.error(node, f"{ast.unparse(node)} = ... does not compile here")
        of_array = isinstance(node.value, ast.Name) and self.static(node.value) is DYNAMIC
        if of_array and node.attr == "flat":
            text = f"{ast.unparse(node)} is not simulated: use {ast.unparse(node.value)}.ravel()"
            raise self.error(node, text)
        self.views = self.views or (node.attr == "view" and self.static(node) is DYNAMIC)
        value = self.static(node)
        name = self.cuda_name(node)
        if name is not None and (new := self.cuda_attribute(node, name)):
            return new
        if value is DYNAMIC:
            return self.generic_visit(node)
        return self.object(value, node, node.attr)

    def cuda_attribute(self, node, name):
        """Return the replacement of cuda.<name>; None if it needs none, such as cuda.libdevice."""
        if isinstance(node, ast.Name) and frontends.needs_module(self.static(node)):
            raise self.error(node, f"Numba does not compile a bare {node.id}: write cuda.{name}")
        if hasattr(Thread, name):
            return at(ast.Attribute(ast.Name("_t", ast.Load()), name, ast.Load()), node)
        if name in PARAMETERS:
            raise self.error(node, f"cuda.{name} is a function: write cuda.{name}()")
        value = self.static(node)
        if twin(value) is not value:
            return None
        bare = frontends.first().cuda
        if isinstance(node, ast.Attribute):
            owner = self.static(node.value)
        else:
            owner = bare
        if isinstance(node, ast.Attribute):
            attribute = node.attr
        else:
            attribute = name
        near = get_close_matches(attribute, dir(owner), 1)
        text = f"{ast.unparse(node)} is not simulated"
        if near and not hasattr(owner, attribute):
            text += f"; did you mean {ast.unparse(node).removesuffix(attribute)}{near[0]}?"
        raise self.error(node, text)

    def object(self, value, node, hint):
        """Return a global or closure variable."""
        if isinstance(value, np.ndarray):  # Numba copies a global array into constant memory
            return self.call(
                node, "const_array_like", self.site(node, hint), self.constant(value, node, hint)
            )
        if isinstance(value, (list, dict, set)):
            kind = type(value).__name__
            raise self.error(node, f"{hint} is a {kind}: use numbers, tuples and arrays")
        return self.constant(twin(value), node, hint)

    def visit_Constant(self, node):
        if isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return self.constant(typed(node.value), node, "literal")
        return node

    # ------------------------------------------------------------------------- expressions
    def visit_UnaryOp(self, node):
        literal = None
        if isinstance(node.operand, ast.Constant):
            literal = node.operand.value
        if isinstance(node.op, ast.USub) and isinstance(literal, (int, float)):
            return self.constant(typed(-literal), node, "literal")
        operand = self.visit(node.operand)
        if isinstance(node.op, ARITHMETIC) and not self.shows_number(node.operand):
            operand = self.number(operand)
        return at(ast.UnaryOp(node.op, operand), node)

    def visit_BinOp(self, node):
        numbers = self.shows_number(node.left) or self.shows_number(node.right)
        return self.binary(node, self.visit(node.left), self.visit(node.right), numbers)

    def binary(self, node, left, right, numbers=False):
        """`left node.op right` for rewritten expressions. numbers: one of them is known not to be a
        bool."""
        if isinstance(node.op, ast.Pow):
            return at(ast.Call(self.constant(power, node, "power"), [left, right], []), node)
        op: ast.operator = node.op
        if isinstance(op, ARITHMETIC) and not numbers:
            left = self.number(left)
        checked = _CHECKED.get(type(op))
        if checked and not self.fits(
            op, node.value if isinstance(node, ast.AugAssign) else node.right
        ):
            args = [left, right if numbers else self.number(right)]
            return at(ast.Call(self.constant(checked, node, "checked"), args, []), node)
        return at(ast.BinOp(left, op, right), node)

    def fits(self, op, node):
        """Does the source show that this divisor is not zero, or this number of bits less than
        64?"""
        if isinstance(node, ast.Attribute):
            name = self.cuda_name(node.value)
        else:
            name = None
        if name in ("blockDim", "gridDim") or self.cuda_name(node) == "warpsize":
            return isinstance(op, (ast.FloorDiv, ast.Mod))
        if isinstance(node, ast.Constant):
            value = node.value
        else:
            value = self.static(node)
        if not isinstance(value, (int, float, np.number)):
            return False
        if isinstance(op, (ast.LShift, ast.RShift)):
            return 0 <= value < 64
        return value != 0

    def number(self, expression):
        """number(expression): a bool becomes an integer."""
        return at(
            ast.Call(self.constant(number, expression, "number"), [expression], []), expression
        )

    def visit_IfExp(self, node):
        """Both sides get their common type in Numba: `x if c else 0.0` is float64 for a float32
        x."""
        likes = {"body": self.typed_like(node.orelse), "orelse": self.typed_like(node.body)}
        node = self.generic_visit(node)
        for side, like in likes.items():
            if like is not None:
                helper = promote
                if not (isinstance(like, ast.Name) and like.id in self.scope):  # not a constant
                    no_arguments = ast.arguments([], [], None, [], [], None, [])
                    like = ast.Lambda(no_arguments, like)
                    helper = promote_if_known
                args = [getattr(node, side), like]
                promoted = ast.Call(self.constant(helper, node, "promote"), args, [])
                setattr(node, side, at(promoted, node))
        return node

    def visit_Subscript(self, node):
        if (value := self.static(node)) is not DYNAMIC:  # Colour["RED"]
            return self.object(value, node, "member")
        if isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides"):
            return at(ast.Subscript(self.visit(node.value), self.index(node.slice), node.ctx), node)
        site = self.site(node, ast.unparse(node.value))
        array = self.visit(node.value)
        index = self.index(node.slice)
        axes = []
        if isinstance(index, ast.Tuple):
            axes = index.elts
        if len(axes) == 2 and not any(isinstance(i, ast.Starred) for i in axes):
            return self.call(node, "load_2d", array, *axes, site)
        return self.call(node, "load", array, index, site)

    def index(self, node):
        """Return a rewritten index. Literals stay Python integers, because Thread.load converts the
        index to one anyway."""
        if isinstance(node, ast.Constant):
            return node
        literal = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        if literal:
            value = getattr(node.operand, "value", None)
        else:
            value = self.static(node)
        if isinstance(value, int) and not isinstance(value, bool):  # a negative one may be meant
            return at(ast.Constant(-value if literal else int(value)), node)
        if isinstance(node, ast.Tuple):
            return at(ast.Tuple([self.index(e) for e in node.elts], ast.Load()), node)
        if isinstance(node, ast.Slice):
            ends = [
                ast.Constant(None) if e is None else self.index(e)
                for e in (node.lower, node.upper, node.step)
            ]
            return at(ast.Call(self.constant(slice, node, "slice"), ends, []), node)
        return self.visit(node)
