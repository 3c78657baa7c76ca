"""The local names of a kernel, and all that they are set to."""

import ast


def assignments(definition) -> dict:
    """name -> expressions. A loop's name: what is looped over. n += 1: n + 1. m, n = x.shape: x.shape for both."""
    values = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                _set(values, target, node.value)
        elif isinstance(node, ast.AugAssign):
            _set(values, node.target, ast.BinOp(node.target, node.op, node.value))
        elif isinstance(node, ast.For):
            _set(values, node.target, node.iter)
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            _set(values, node.target, node.value)
    return values


def _set(values, target, value):
    if isinstance(target, ast.Name):
        values.setdefault(target.id, []).append(value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        alone = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
        parts = value.elts if alone else [value] * len(target.elts)
        for name, part in zip(target.elts, parts):
            _set(values, name, part)


def parameters(definition) -> set:
    return {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
