"""Checks of an attempt's source before it runs: is the gap still empty, does the library do the work?"""

import ast
import contextlib
import inspect
import re
import textwrap
import types

import numpy as np

GAP = "YOUR CODE"


def is_empty(source):
    """Whether the gap is unchanged: only a docstring and assignments to names."""
    try:
        body = ast.parse(source).body[0].body
    except (SyntaxError, AttributeError, IndexError):
        return False
    text = lambda s: isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
    names = (ast.Name, ast.Tuple)
    given = lambda s: (
        GAP in source and isinstance(s, ast.Assign) and isinstance(s.targets[0], names)
    )
    return all(isinstance(s, ast.Pass) or text(s) or given(s) for s in body)


def unwritten_helper(function) -> str:
    """The name of another function of the reader that this one uses and whose gap is still empty, or ""."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a lambda
        return ""
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for name in sorted(names - set(function.__code__.co_varnames)):
        helper = function.__globals__.get(name)
        helper = getattr(helper, "py_func", helper)
        if not isinstance(helper, types.FunctionType) or helper is function:
            continue
        with contextlib.suppress(OSError):
            source = textwrap.dedent(inspect.getsource(helper))
            if GAP in source and is_empty(source):
                return name
    return ""


def without_comments(source) -> str:
    """A function's source without comments and without strings that stand alone."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    alone = lambda s: isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [s for s in node.body if not alone(s)] or [ast.Pass()]
    return ast.unparse(tree)


def divergent_barrier(source) -> str | None:
    """The line of the first cuda.syncthreads() in an `if` or a loop that threads take differently, or None.

    A value differs from thread to thread if it is computed from threadIdx, laneid or cuda.grid.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    differs = {"threadIdx", "laneid", "grid"}

    def depends(node):
        names = {getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(node)}
        return bool(names & differs)

    assigned = [n for n in ast.walk(tree) if isinstance(n, (ast.Assign, ast.AugAssign, ast.For))]
    for _ in assigned:  # until nothing is added, which takes at most one round per assignment
        for n in assigned:
            if depends(n.iter if isinstance(n, ast.For) else n.value):
                targets = n.targets if isinstance(n, ast.Assign) else [n.target]
                stored = (x for t in targets for x in ast.walk(t) if isinstance(x, ast.Name))
                differs |= {x.id for x in stored if not isinstance(x.ctx, ast.Load)}
    for branch in ast.walk(tree):
        test = branch.iter if isinstance(branch, ast.For) else getattr(branch, "test", None)
        if isinstance(branch, (ast.If, ast.While, ast.For)) and depends(test):
            for n in ast.walk(branch):
                if isinstance(n, ast.Attribute) and n.attr.startswith("syncthreads"):
                    return f"{ast.unparse(branch).splitlines()[0]} ... {ast.unparse(n)}()"
    return None


def cast_constants(line) -> set:
    """The values of all float32(...) in a line of source, or a part of it, that have only literals in them, as
    float32(2.0**-6): the compiler computes them.
    """
    literal = (ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    found = set()
    for start in re.finditer(r"\bfloat32\(", line):
        ends = (i for i in range(start.end(), len(line)) if line[i] == ")")
        for end in ends:
            try:
                tree = ast.parse(line[start.end() : end].strip(), mode="eval")
            except SyntaxError:
                continue
            if all(isinstance(n, literal) for n in ast.walk(tree)):
                with contextlib.suppress(ArithmeticError, TypeError):
                    found.add(float(eval(compile(tree, "constant", "eval"), {})))
            break
    return found


LIBRARY = ("xtrain", __package__)  # the packages whose functions an exercise may not use


def library_name(function, allow=frozenset()) -> str | None:
    """The first name that refers to xtrain, in the reader's code or in other functions of the reader that it calls."""
    seen, todo = set(), [function]
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):
            continue
        cells = dict(
            zip(
                function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ())
            )
        )
        scope = {**function.__globals__, **cells}
        for (
            name
        ) in function.__code__.co_varnames:  # a variable of its own, whatever else has the name
            scope.pop(name, None)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", None) or "", *(a.name for a in node.names)]
                if any(n.split(".")[0] == "xtrain" for n in names):
                    return ast.unparse(node)
            found = _resolve(node, scope)
            if found is None:
                continue
            home = home_of(found)
            if (
                home.split(".")[0] in LIBRARY
                and getattr(node, "attr", getattr(node, "id", "")) not in allow
            ):
                if isinstance(found, types.ModuleType) and _allowed_attribute(tree, node, allow):
                    continue
                return ast.unparse(node)
            plain = getattr(found, "py_func", found)
            if isinstance(plain, types.FunctionType) and plain.__globals__ is function.__globals__:
                todo.append(plain)
    return None


def _allowed_attribute(tree, module, allow):
    """Whether every use of the module is module.name with an allowed name."""
    parents = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.value is module]
    return bool(parents) and all(p.attr in allow for p in parents)


def _resolve(node, scope):
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, scope)
        return None if owner is None else getattr(owner, node.attr, None)
    return None


def home_of(thing):
    """The name of the module that defines an object. "numba" for what the simulator has in Numba's place."""
    if isinstance(thing, types.ModuleType):
        home = thing.__name__
    else:
        thing = getattr(thing, "py_func", getattr(thing, "func", thing))
        home = getattr(thing, "__module__", None)
    if not isinstance(home, str):
        return ""
    return "numba" if home.startswith("xtrain.simulator.own_") else home


def named_types(function) -> list[str]:
    """The types, dtypes and modules that words of a function's source name in its file."""
    kinds = (type, np.dtype, types.ModuleType)
    scope = getattr(function, "__globals__", {})
    words = re.findall(r"\w+", without_comments(textwrap.dedent(inspect.getsource(function))))
    return [repr(x) for x in map(scope.get, words) if isinstance(x, kinds)]
