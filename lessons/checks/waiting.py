"""Reading how a kernel waits for other blocks: questions for Attempt.read, without answers."""

import ast
import inspect
import textwrap
import types

from xtrain.kernels.primitives import ptx


def events(kernel):
    """What a kernel does, in the order of its source, device functions of the reader included.

    -> [(event, is it in an `if`?), ...]: "write" to the first parameter, "barrier", "fence", "add" in order, "atomic", "acquire"
    """
    function, out = kernel.py_func, []
    first = next(iter(inspect.signature(function).parameters))

    def visit(node, scope, inside, depth):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            visit(node.value, scope, inside, depth)
            for target in getattr(node, "targets", None) or [node.target]:
                subscript = isinstance(target, ast.Subscript)
                if subscript and getattr(target.value, "id", "") == first:
                    out.append(("write", inside))
            return
        if isinstance(node, ast.Call):
            for argument in node.args:
                visit(argument, scope, inside, depth)
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            thing = scope.get(name)
            known = {ptx.load_acquire: "acquire", ptx.atomic_add_release: "add"}
            plain = getattr(thing, "py_func", None)
            if event := next((v for k, v in known.items() if thing is k), None):
                out.append((event, inside))
            elif name.startswith("syncthreads"):
                out.append(("barrier", inside))
            elif name == "threadfence":
                out.append(("fence", inside))
            elif "atomic" in ast.unparse(called):
                out.append(("atomic", inside))
            elif isinstance(plain, types.FunctionType) and depth < 5:
                enter(plain, inside, depth + 1)
            return
        if isinstance(node, ast.If):
            visit(node.test, scope, inside, depth)
            for child in (*node.body, *node.orelse):
                visit(child, scope, True, depth)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, scope, inside, depth)

    def enter(function, inside, depth):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):
            return
        for child in tree.body[0].body:
            visit(child, function.__globals__, inside, depth)

    enter(function, False, 0)
    return out


def sets_back(kernel):
    """Does the kernel assign a constant to an element of a parameter whose name begins with count?"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.py_func)))
    return any(
        isinstance(n, ast.Assign)
        and isinstance(n.value, ast.Constant)
        and any(ast.unparse(t).startswith("count_") and "[" in ast.unparse(t) for t in n.targets)
        for n in ast.walk(tree)
    )


def compares_equal(kernel):
    """Does a while loop of the kernel compare with == or !=?"""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.py_func)))
    tests = [n.test for n in ast.walk(tree) if isinstance(n, ast.While)]
    return any(
        isinstance(t, ast.Compare) and isinstance(t.ops[0], (ast.Eq, ast.NotEq)) for t in tests
    )
