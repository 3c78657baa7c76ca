"""The names in a kernel: what they refer to, and the expressions that are assigned to the local
ones."""

import ast
import builtins
import contextlib
import enum
import itertools

import numpy as np

from . import frontends
from .errors import KernelError, Site
from .scalars import typed
from .twins import twin

NAMESPACES = {"atomic", "shared", "local", "const"}
ARITHMETIC = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.LShift, ast.RShift,
    ast.UAdd, ast.USub,
)  # fmt: skip


def assignments(definition) -> dict:
    """name -> the expressions assigned to it. `for n in x`: x. `n += 1`: n + 1. `m, n = x.shape`:
    x.shape for both."""
    values: dict[str, list] = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _set(values, target, node.value)
        elif isinstance(node, ast.AugAssign):
            _set(values, node.target, ast.BinOp(node.target, node.op, node.value))
        elif isinstance(node, ast.For):
            _set(values, node.target, node.iter)
        elif isinstance(node, ast.NamedExpr):
            _set(values, node.target, node.value)
    return values


def _set(values, target, value):
    if isinstance(target, ast.Name):
        values.setdefault(target.id, []).append(value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        matching = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        if matching:
            elements = value.elts
        else:
            elements = [value] * len(target.elts)
        for name, element in zip(target.elts, elements):
            _set(values, name, element)


def parameters(definition) -> set:
    """Return the names of the parameters of a function definition."""
    return {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}


_BOOL = np.bool_
DYNAMIC = object()  # the value of a name that is not known before the kernel runs


def at(new, node):
    """Return the new syntax tree with the line and column of `node`."""
    return ast.fix_missing_locations(ast.copy_location(new, node))


class Names(ast.NodeTransformer):
    """Base of the rewriter in source.py: looks up the names in a function and creates new ones."""

    def __init__(self, function, name):
        code = function.__code__
        cells = (c.cell_contents for c in function.__closure__ or ())
        self.file = code.co_filename
        self.name = name
        self.locals = {*code.co_varnames, *code.co_cellvars}
        self.names = {
            **vars(builtins),
            **function.__globals__,
            **dict(zip(code.co_freevars, cells)),
        }
        self.scope = {"__name__": function.__module__}
        self.waits = False
        self.granule = 0
        self.views = False
        self.nested: set[str] = set()  # names of nested functions and lambdas
        self.in_lambda = False
        self.inner: dict[str, bool] = {}  # name of a nested function -> does it wait?
        self.numbers: set[str] = set()  # local names that are never a bool
        self.number_arrays: set[str] = set()  # local names of arrays without bools
        self.temporaries = itertools.count()

    # ------------------------------------------------------------------------- helpers
    def block(self, statements):
        """Rewrite a list of statements."""
        new = []
        for statement in statements:
            result = self.visit(statement)
            new += result if isinstance(result, list) else [result]
        return new

    def site(self, node, what):
        """Return a global that holds the Site of `node`. what: the array or the function there."""
        return self.constant(
            Site(self.file, node.lineno, node.col_offset, self.name, what), node, "site"
        )

    def error(self, node, message):
        """Return a KernelError at the line of `node`."""
        return KernelError(
            f"{self.name}, {message}",
            (Site(self.file, node.lineno, node.col_offset, self.name, ""),),
        )

    def constant(self, value, node, hint):
        """Return a global of the rewritten function that holds `value`."""
        name = f"_{hint}_{len(self.scope)}"
        self.scope[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def call(self, node, method, *args):
        """_t.method(*args)"""
        function = ast.Attribute(ast.Name("_t", ast.Load()), method, ast.Load())
        return at(ast.Call(function, list(args), []), node)

    def temporary(self):
        """Return a new local name."""
        return f"_temporary_{next(self.temporaries)}"

    @contextlib.contextmanager
    def inside(self, node, name):
        """Visit the body of a nested function: with its own local names, and self.waits for this
        function alone."""
        before = self.name, self.locals, self.waits, self.numbers, self.number_arrays
        names = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        names |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
        for n in ast.walk(node):
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                names.add(n.id)
        self.name = name
        self.locals = self.locals | names
        self.waits = False
        self.numbers = set()
        self.number_arrays = set()
        yield
        self.name, self.locals, self.waits, self.numbers, self.number_arrays = before

    def static(self, node):
        """Return the object that a global, a closure variable, an attribute or a member of one
        refers to; otherwise DYNAMIC."""
        if isinstance(node, ast.Name) and node.id not in self.locals:
            return self.names.get(node.id, DYNAMIC)
        if isinstance(node, ast.Attribute):
            owner = self.static(node.value)
            fp16 = frontends.has("fp16", owner)  # a class that is used as a module
            if owner is not DYNAMIC and (fp16 or not isinstance(owner, (np.ndarray, type))):
                return getattr(owner, node.attr, DYNAMIC)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.static(node.value)
            if isinstance(owner, enum.EnumMeta):
                return owner.__members__.get(node.slice.value, DYNAMIC)
        return DYNAMIC

    def cuda_name(self, node):
        """ "syncthreads" for cuda.syncthreads, "atomic_add" for cuda.atomic.add, None for anything
        else."""
        if isinstance(node, ast.Name):  # from numba.cuda import syncthreads
            value = self.static(node)
            home = getattr(value, "__module__", None) or ""
            named = home.startswith("numba") and frontends.has(node.id, value)
            return node.id if named else None
        if isinstance(node, ast.Attribute):
            if frontends.is_cuda(self.static(node.value)):
                return node.attr
            namespace = self.cuda_name(node.value)
            if namespace in NAMESPACES:
                return f"{namespace}_{node.attr}"
        return None

    def find_nested(self, definition):
        """Fill self.nested."""
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef):
                self.nested.add(node.name)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self.nested.update(t.id for t in node.targets if isinstance(t, ast.Name))

    def find_numbers(self, definition):
        """Fill self.numbers. Starts with all names and removes some, because `acc = acc + x[i]`
        alone decides nothing."""
        values = assignments(definition)
        size = None
        given = parameters(definition)
        self.number_arrays = {
            n for n in {*values} - given if all(map(self.makes_numbers, values[n]))
        }
        self.numbers = {*values} - parameters(definition)
        while size != len(self.numbers):
            size = len(self.numbers)
            self.numbers = {n for n in self.numbers if all(map(self.shows_number, values[n]))}

    def makes_numbers(self, node):
        """Is it cuda.shared.array(...) or cuda.local.array(...) with a dtype that is not bool?"""
        if not isinstance(node, ast.Call) or len(node.args) != 2 or node.keywords:
            return False
        scalar = getattr(twin(self.static(node.args[1])), "scalar", _BOOL)
        made = self.cuda_name(node.func) in ("shared_array", "local_array")
        return made and issubclass(scalar, np.number)

    def shows_number(self, node):
        """Does the expression's text show that it is not a bool? Then number() is not needed."""
        if isinstance(node, ast.Constant):
            return not isinstance(node.value, bool)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            return isinstance(node.op, (*ARITHMETIC, ast.Pow))
        if isinstance(node, ast.IfExp):
            return self.shows_number(node.body) and self.shows_number(node.orelse)
        if isinstance(node, ast.Call):
            function = self.static(node.func)
            return function is range or getattr(twin(function), "scalar", _BOOL) is not _BOOL
        if isinstance(node, ast.Subscript):
            of_numbers = isinstance(node.value, ast.Name) and node.value.id in self.number_arrays
            return of_numbers or (
                isinstance(node.value, ast.Attribute) and self.shows_number(node.value)
            )
        if isinstance(node, ast.Attribute) and node.attr in (
            "shape",
            "size",
            "ndim",
            "x",
            "y",
            "z",
        ):
            return self.static(node) is DYNAMIC  # of an array, of cuda.threadIdx
        name = isinstance(node, ast.Name) and node.id in self.numbers
        return name or isinstance(typed(self.static(node)), np.number)
