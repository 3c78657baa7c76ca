"""Rewrites the source of a kernel so that one thread of it is a Python generator.

    cuda.threadIdx.x                 _t.threadIdx.x              _t is the Thread, a new first parameter
    a[i, j]                          _t.load(a, (i, j), site)
    a[i] = v                         _t.store(a, i, v, site)
    while a < b:                     while turn() and a < b:     turn = _t.turns(site), which counts
    cuda.syncthreads()               (yield ("syncthreads", site, ()))
    cuda.shfl_xor_sync(m, v, 16)     (yield ("shfl_xor_sync", site, (m, v, int64(16))))
    block_sum(v, scratch)            (yield from block_sum(_t, v, scratch))     a device function that waits
    square(v)                        square(_t, v)                              a device function that does not
    0.5, C, math.exp, min            float64(0.5), int64(C), their replacements (twins.TWINS)

File names and line numbers are kept, so tracebacks, pdb and breakpoints show the original source.
Globals and closure variables are read once, when the kernel first runs in the simulator; Numba
freezes them when it compiles.
"""

import ast
import builtins
import contextlib
import dis
import inspect
import linecache
import math
import threading
import types
import weakref
from typing import NamedTuple

import numpy as np

from . import frontends, refused, settings
from .errors import KernelError
from .expressions import PARAMETERS, Expressions
from .intrinsics import INTRINSICS
from .names import NAMESPACES, at, parameters
from .signatures import device_call
from .thread import Thread
from .twins import learn, twin

SPIN = "spin"  # the request of a thread that waits in a loop
GRID_SYNC = "grid.sync"  # the request of a thread in cuda.cg.this_grid().sync()
BLOCK_BARRIERS = {
    GRID_SYNC,
    "syncthreads",
    "syncthreads_and",
    "syncthreads_or",
    "syncthreads_count",
}


class Translated(NamedTuple):
    """A rewritten kernel or device function."""

    function: types.FunctionType  # called with (thread, *args)
    waits: bool  # it waits for other threads somewhere, so it is a generator
    granule: int  # bytes; divides the element size of every dynamic shared array in it
    views: bool  # it views the bytes of an array as another dtype somewhere
    device_only: KernelError | None  # why it cannot be launched as a kernel


# ----------------------------------------------------------------------------- translation
# with and without pauses
_translated: dict[bool, weakref.WeakKeyDictionary] = {
    pauses: weakref.WeakKeyDictionary() for pauses in (False, True)
}
_lock = threading.RLock()  # of the threads of the host


def translate(function, pauses=False) -> Translated:
    """Rewrite a function: the `py_func` of a @cuda.jit function. Cached. Returns None while the
    function is being rewritten (a recursive call). Raises KernelError for what Numba does not
    compile.

    pauses: a thread may let others run before an atomic (schedules.py).
    """
    done = _translated[pauses]
    with _lock:
        if function not in done:
            learn()
            done[function] = None  # in progress
            try:
                done[function] = _translate(function, pauses)
            finally:
                if done[function] is None:
                    del done[function]
        return done[function]


def freeze(function):
    """Rewrite a function that is declared with its types now, because Numba compiles it now: later
    changes of its globals have no effect.

    A function that names something that does not exist yet, such as itself, is left for later. What
    Numba does not compile is reported at the launch.
    """
    loads = {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}
    is_complete = loads <= {*function.__globals__, *vars(builtins)}
    try:
        is_complete = is_complete and all(
            c.cell_contents is not None for c in function.__closure__ or ()
        )
    except ValueError:  # an empty cell
        is_complete = False
    if is_complete:
        with contextlib.suppress(KernelError):
            translate(function)
            if settings.current().schedules > 1:
                translate(function, True)


def _translate(function, pauses):
    definition = _definition(function)
    rewriter = _Rewriter(function, definition.name)
    rewriter.pauses = pauses
    definition.decorator_list = []
    _strip_annotations(definition)
    device_only = refused.check(rewriter, definition)
    rewriter.find_numbers(definition)
    rewriter.find_nested(definition)
    arguments = definition.args
    (arguments.posonlyargs or arguments.args).insert(0, ast.arg("_t"))
    if ast.get_docstring(definition) is not None:
        definition.body[0] = ast.Pass()
    definition.body = rewriter.block(definition.body)
    # Python has evaluated the defaults: their names may mean something else inside the function.
    values = function.__defaults__ or (), function.__kwdefaults__ or {}
    arguments.defaults = [rewriter.object(v, definition, "default") for v in values[0]]
    names = [a.arg for a in arguments.kwonlyargs]
    arguments.kw_defaults = [
        rewriter.object(values[1][n], definition, n) if n in values[1] else None for n in names
    ]
    module = ast.fix_missing_locations(ast.Module([definition], []))
    scope = rewriter.scope
    exec(compile(module, function.__code__.co_filename, "exec"), scope)
    return Translated(
        scope[definition.name], rewriter.waits, rewriter.granule, rewriter.views, device_only
    )


def _definition(function) -> ast.FunctionDef:
    """Return the syntax tree of a function. A lambda becomes a function with a return statement."""
    if function.__name__ == "<lambda>":
        return _lambda(function)
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError as error:
        raise KernelError(
            f"no source for {function.__name__}: define it in a file or a notebook cell"
        ) from error
    nested = lines[0][0].isspace()
    tree = ast.parse("if 1:\n" * nested + "".join(lines))
    ast.increment_lineno(tree, first - 1 - nested)
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))


def _lambda(function):
    code = function.__code__
    tree = ast.parse("".join(linecache.getlines(code.co_filename, function.__globals__)) or "0")
    lambdas = [
        n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno
    ]
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    lambdas = [n for n in lambdas if {*names} == parameters(n)]
    if len(lambdas) != 1:
        raise KernelError(
            f"no source for the lambda in line {code.co_firstlineno} of {code.co_filename}: use def"
        )
    (node,) = lambdas
    definition = ast.FunctionDef(
        "lambda_", node.args, [at(ast.Return(node.body), node.body)], [], None
    )
    return at(definition, node)


def _strip_annotations(definition):
    """Remove all type annotations: Numba ignores them, and their names need not exist when the
    kernel runs."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            node.returns = None
            return self.generic_visit(node)

        def visit_arg(self, node):
            node.annotation = None
            return node

        def visit_AnnAssign(self, node):
            self.generic_visit(node)
            if node.value is None:
                return at(ast.Pass(), node)
            return at(ast.Assign([node.target], node.value), node)

    Strip().visit(definition)


class _Rewriter(Expressions):
    """The rewriting of one function. A visit_X method returns the new syntax tree of a node of type
    X. pauses: as for `translate`."""

    pauses = False

    # ------------------------------------------------------------------------- calls
    def visit_Call(self, node):
        name = self.cuda_name(node.func)
        function = self.static(node.func)
        if name in PARAMETERS:
            return self.wait(node, name)
        if name is not None and name.partition("_")[0] in NAMESPACES:
            if name == "shared_array":
                kind = None
                if len(node.args) > 1:
                    kind = twin(self.static(node.args[1]))
                self.granule = math.gcd(
                    self.granule, getattr(getattr(kind, "dtype", None), "itemsize", 1)
                )
            if "atomic" in name and (node.keywords or not node.args):
                text = "takes an array, an index and a value, without keywords"
                raise self.error(node, f"{ast.unparse(node.func)} {text}")
            if "atomic" in name:
                self.visit(node.func)  # raises an error for an unknown atomic
            site = self.site(node, ast.unparse(node.args[0]) if "atomic" in name else name)
            if "atomic" in name and len(node.args) > 1:
                index = self.index(node.args[1])
            else:
                index = None
            node = self.generic_visit(node)
            if index is not None:
                node.args[1] = index
            node.args.insert(0, site)
            if "atomic" in name and self.pauses and not self.in_lambda:
                return self.after_pause(node, site)
            return node
        if _hashable(function) and function in INTRINSICS:
            return self.intrinsic(node, function)
        if hasattr(function, "py_func"):
            return device_call(self, node, function)
        if any(function is f.cuda.cg.this_grid for f in frontends.known()):
            return self.call(node, "this_grid")
        if isinstance(node.func, ast.Attribute) and node.func.attr == "sync" and not node.args:
            return self.request(node, GRID_SYNC, [])
        if isinstance(function, np.ufunc) and len(node.args) > function.nin:
            site = self.site(node, ast.unparse(node))
            f = self.object(function, node, "ufunc")
            return self.call(node, "ufunc", site, f, *map(self.visit, node.args))
        if self.is_value(node.func):
            return self.apply(node, self.visit(node.func))
        simulated = twin(function) is not function or hasattr(Thread, name or "")
        if isinstance(function, types.FunctionType) and not simulated:
            text = (
                f"{function.__name__} is a Python function: decorate it with @cuda.jit(device=True)"
            )
            if frontends.owns(function):
                text = f"{ast.unparse(node.func)} is not simulated"
            raise self.error(node, text)
        if isinstance(node.func, ast.Name) and self.inner.get(node.func.id):
            self.waits = True
            node.args = [self.visit(a) for a in node.args]
            node.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
            return at(ast.YieldFrom(node), node)
        new = self.generic_visit(node)
        return self.folded(new, function)

    def after_pause(self, node, site):
        """`(_t.pause(site) and (yield SPIN), node)[1]`"""
        self.waits = True
        spin = ast.Tuple([ast.Constant(SPIN), site, ast.Tuple([], ast.Load())], ast.Load())
        pause = ast.BoolOp(ast.And(), [self.call(node, "pause", site), ast.Yield(spin)])
        both = ast.Tuple([pause, node], ast.Load())
        return at(ast.Subscript(both, ast.Constant(1), ast.Load()), node)

    def is_value(self, node):
        """Is the called function a parameter, a variable or an element of a tuple, and not a nested
        function?"""
        if isinstance(node, ast.Subscript):
            return not self.in_lambda
        local = isinstance(node, ast.Name) and node.id in self.locals
        return local and node.id not in self.nested and not self.in_lambda

    def apply(self, node, function):
        """`(yield from _t.apply(function, ...))`"""
        self.waits = True
        site = self.site(node, ast.unparse(node.args[0]) if node.args else "")
        call = self.call(node, "apply", site, function, *map(self.visit, node.args))
        call.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        return at(ast.YieldFrom(call), node)

    def folded(self, node, function):
        """A cast of a constant, such as float32(0.5), is computed once."""
        if (
            hasattr(twin(function), "scalar")
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
        ):
            value = self.scope.get(node.args[0].id)
            if isinstance(value, np.generic):
                return self.constant(twin(function)(value), node, "literal")
        return node

    def wait(self, node, name):
        """Return a call of a barrier or a warp function: the scheduler sends its result."""
        wanted = PARAMETERS[name]
        given = {k.arg: k.value for k in node.keywords}
        known = name.startswith(("shfl", "syncthreads")) and set(given) == {
            *wanted[len(node.args) :]
        }
        args = [*node.args, *(given[k] for k in wanted if known and k in given)]
        optional = name == "syncwarp" and not args
        if (given and not known) or (len(args) != len(wanted) and not optional):
            takes = f"takes ({', '.join(wanted)}), in this order and without keywords"
            raise self.error(node, f"cuda.{name} {takes}: this call is {ast.unparse(node)}")
        return self.request(node, name, args)

    def request(self, node, name, args):
        """`(yield (name, site, args))`"""
        self.waits = True
        args = at(ast.Tuple([self.visit(a) for a in args], ast.Load()), node)
        request = [at(ast.Constant(name), node), self.site(node, name), args]
        return at(ast.Yield(at(ast.Tuple(request, ast.Load()), node)), node)

    def intrinsic(self, node, function):
        """Return a call of a function that `simulates` registered."""
        for position in getattr(
            function, "literals", ()
        ):  # arguments that Numba needs as constants
            if not isinstance(node.args[position], (ast.Constant, ast.Name)):
                text = f"argument {position + 1} must be one constant: give it a name outside"
                raise self.error(node, f"{ast.unparse(node)}: {text}")
        simulated, collective = INTRINSICS[function]
        if collective:
            request = self.request(node, ast.unparse(node.func), node.args)
            request.value.elts[0] = self.constant(simulated, node, "intrinsic")
            return request
        simulated = self.constant(simulated, node, "intrinsic")
        site = self.site(node, ast.unparse(node))
        call = self.call(node, "intrinsic", simulated, site, *map(self.visit, node.args))
        call.keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        return call

    def device_function(self, node, function):
        """Return a call of a @cuda.jit function."""
        translated = translate(function, self.pauses)
        if translated is None:  # it calls itself, perhaps by way of another function
            later = self.constant(self.static(node.func), node, function.__name__)
            return self.apply(node, later)
        args = [ast.Name("_t", ast.Load()), *map(self.visit, node.args)]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        called = self.constant(translated.function, node, function.__name__)
        result = at(ast.Call(called, args, keywords), node)
        self.granule = math.gcd(self.granule, translated.granule)
        self.views = self.views or translated.views
        if translated.waits:
            self.waits = True
            return at(ast.YieldFrom(result), node)
        return result

    def visit_For(self, node):
        node.iter = self.each(node.iter)
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_While(self, node):
        """`turn = _t.turns(site)` before the loop, and `while turn() and ...`. In a loop that may
        wait for another thread, turn() may be False: `while (turn() or (yield SPIN)) and ...`.
        """
        turn = self.temporary()
        site = self.site(node, f"while {ast.unparse(node.test)}")
        inside = [n for part in (node.test, *node.body) for n in ast.walk(part)]
        waits = any(map(self.accesses_memory, inside))
        stores = any(isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) for n in inside)
        only_waits = waits and not stores and self.only_looks(node.body)
        facts = (at(ast.Constant(fact), node) for fact in (waits, stores, only_waits))
        start = ast.Assign([ast.Name(turn, ast.Store())], self.call(node, "turns", site, *facts))
        count = ast.Call(ast.Name(turn, ast.Load()), [], [])
        node = self.generic_visit(node)
        if waits:
            self.waits = True
            request = ast.Tuple([ast.Constant(SPIN), site, ast.Tuple([], ast.Load())], ast.Load())
            count = ast.BoolOp(ast.Or(), [count, ast.Yield(request)])
        node.test = at(ast.BoolOp(ast.And(), [count, node.test]), node)
        return [at(start, node), node]

    def only_looks(self, body):
        """Does each iteration do the same until another thread writes? It has `pass`,
        cuda.nanosleep, `if ...: break`, and variables that do not depend on the iteration before.
        """
        inside = [n for s in body for n in ast.walk(s)]
        names = [n for n in inside if isinstance(n, ast.Name)]
        assigned = {n.id for n in names if isinstance(n.ctx, ast.Store)}

        def looks(statement):
            if isinstance(statement, ast.If):
                return not statement.orelse and all(
                    isinstance(s, ast.Break) for s in statement.body
                )
            if isinstance(statement, ast.Assign):
                used = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
                plain = all(isinstance(t, ast.Name) for t in statement.targets)
                return plain and not used & assigned
            call = None
            if isinstance(statement, ast.Expr):
                call = statement.value
            sleeps = isinstance(call, ast.Call) and self.cuda_name(call.func) == "nanosleep"
            return sleeps or isinstance(statement, ast.Pass)

        return all(map(looks, body))

    def accesses_memory(self, node):
        """May the expression read memory that another thread writes?"""
        if isinstance(node, ast.Subscript):
            return isinstance(node.ctx, ast.Load) and not isinstance(node.value, ast.Attribute)
        if isinstance(node, ast.AugAssign):
            return isinstance(node.target, ast.Subscript)
        if isinstance(node, ast.Call):
            function = self.static(node.func)
            cuda_name = self.cuda_name(node.func) or ""
            called = hasattr(function, "py_func") or cuda_name.startswith("atomic")
            called = called or self.is_value(node.func)
            return called or (_hashable(function) and function in INTRINSICS)
        return False

    def visit_MatchValue(self, node):
        """Unchanged: Python does not allow a name here, and a literal compares equal as it is."""
        return node

    def each(self, node):
        """The iterable of a loop. An array's elements are read one by one, when the loop reaches
        them."""
        if not isinstance(node, ast.Call):
            site = self.site(node, ast.unparse(node))
            return self.call(node, "each", self.visit(node), site)
        function = self.static(node.func)
        if function is zip or function is enumerate:
            args = [self.each(a) for a in node.args]
            return at(ast.Call(self.visit(node.func), args, []), node)
        return self.visit(node)

    # ------------------------------------------------------------------------- nested functions
    def visit_FunctionDef(self, node):
        if node.decorator_list:
            raise self.error(node, f"{node.name} has a decorator: move it out of the kernel")
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        with self.inside(node, node.name):
            pauses = self.pauses
            self.pauses = False  # it may be passed on
            node.body = self.block(node.body)
            self.pauses = pauses
            waits = self.waits
        self.inner[node.name] = waits or self.inner.get(node.name, False)
        return node

    def visit_Lambda(self, node):
        with self.inside(node, "lambda"):
            before = self.in_lambda
            self.in_lambda = True
            node.body = self.visit(node.body)
            self.in_lambda = before
            if self.waits:
                raise self.error(node, "a lambda that waits for other threads: use def")
        return node

    # ------------------------------------------------------------------------- statements
    def visit_Return(self, node):
        """An early return is recorded, for the report if other threads wait for this one."""
        if node.value is not None:
            return self.generic_visit(node)
        left = ast.Attribute(ast.Name("_t", ast.Load()), "left", ast.Store())
        return [at(ast.Assign([left], self.site(node, "return")), node), node]

    def store(self, target, value):
        """Return a statement for `target[...] = value` or `target.name = value`; value is a
        rewritten expression."""
        if isinstance(target, ast.Attribute):
            site = self.site(target, ast.unparse(target))
            args = self.visit(target.value), at(ast.Constant(target.attr), target), value, site
            return ast.copy_location(ast.Expr(self.call(target, "store_field", *args)), target)
        site = self.site(target, ast.unparse(target.value))
        args = self.visit(target.value), self.index(target.slice), value, site
        return ast.copy_location(ast.Expr(self.call(target, "store", *args)), target)

    def visit_Assign(self, node):
        inside = [n for t in node.targets for n in ast.walk(t)]
        if not any(isinstance(n, (ast.Subscript, ast.Attribute)) for n in inside):
            return self.generic_visit(node)
        value = self.visit(node.value)
        if len(node.targets) == 1 and isinstance(node.targets[0], (ast.Subscript, ast.Attribute)):
            return self.store(node.targets[0], value)
        name = self.temporary()
        new = [at(ast.Assign([ast.Name(name, ast.Store())], value), node)]
        for target in node.targets:
            new += self.unpack(target, at(ast.Name(name, ast.Load()), node))
        return new

    def unpack(self, target, value):
        """`a, x[i] = value`: unpacks the tuple first, then stores the elements of x."""
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            return [self.store(target, value)]
        if isinstance(target, ast.Name):
            return [at(ast.Assign([target], value), target)]
        names = [self.temporary() for _ in target.elts]
        unpacked = ast.Tuple([ast.Name(n, ast.Store()) for n in names], ast.Store())
        new = [at(ast.Assign([unpacked], value), target)]
        for name, element in zip(names, target.elts):
            new += self.unpack(element, at(ast.Name(name, ast.Load()), element))
        return new

    def visit_AugAssign(self, node):
        target = node.target
        if isinstance(target, ast.Attribute):  # r.x += 1 is r["x"] += 1
            name = at(ast.Constant(target.attr), target)
            target = at(ast.Subscript(target.value, name, ast.Store()), target)
        if not isinstance(target, ast.Subscript):
            old = at(ast.Name(target.id, ast.Load()), node)
            value = self.visit_BinOp(at(ast.BinOp(old, node.op, node.value), node))
            return at(ast.Assign([target], value), node)
        array = self.temporary()
        index = self.temporary()
        new: list[ast.stmt] = [
            ast.Assign([ast.Name(array, ast.Store())], self.visit(target.value)),
            ast.Assign([ast.Name(index, ast.Store())], self.index(target.slice)),
        ]
        site = self.site(target, ast.unparse(target.value))
        element = ast.Name(array, ast.Load()), ast.Name(index, ast.Load())
        old = self.call(node, "load", *element, site)
        value = self.binary(node, old, self.visit(node.value), self.shows_number(node.value))
        new.append(ast.Expr(self.call(node, "store", *element, value, site)))
        return [at(statement, node) for statement in new]


def _hashable(x):
    try:
        hash(x)
    except TypeError:
        return False
    return True
