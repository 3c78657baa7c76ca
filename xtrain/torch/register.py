"""Make a PyTorch op of a launcher: `register_op`.

    scale_backward = register_op(
        "mine::scale_backward(Tensor dy, Tensor x, float factor) -> Tensor dx",
        lambda dy, x, factor: scale_fwd(dy, factor),
    )
    scale = register_op(
        "mine::scale(Tensor x, float factor) -> Tensor y",
        scale_fwd,  # takes NumPy arrays (the reference), CuPy arrays and SimArrays (the kernel)
        fake=lambda x, factor: torch.empty_like(x),
        backward=scale_backward,
    )

The names in the two schemas are the formula of the gradient. An argument of the backward op is

    dNAME     the gradient of NAME, a result of the forward op
    NAME      an argument or a result of the forward op, which is saved

and its results are dNAME, the gradients of arguments of the forward op. A result of the forward op
without a gradient in the backward op is not differentiable.

The launcher's arguments are arrays in place of tensors (arrays.py); lists of tensors are lists of
arrays. CPU tensors run what the launcher does with NumPy arrays, CUDA tensors what it does with
CuPy arrays. It returns new arrays, in the order of the results. Arguments that the schema marks as
changed, `Tensor(a!) x`, are changed in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arrays import run_on_cpu, run_on_gpu

_libraries: dict[str, torch.library.Library] = {}  # an op exists as long as its Library


def register_op(
    schema: str,
    launcher: Callable,
    *,
    fake: Callable | None = None,
    backward: Any = None,
    gradients: dict[str, str] | None = None,
    strided: bool = False,
) -> Any:
    """Register a torch.library op and return it.

    schema: "NAMESPACE::NAME(Tensor x, float eps) -> (Tensor y, Tensor rstd)", with a name for
        every result.
    launcher: called with arrays in place of tensors; returns one array, a tuple of them, or None.
    fake: called with the arguments of the op; returns empty tensors with the shapes and dtypes of
        the results. May be left out if every result is dNAME, and then has the shape of NAME, an
        argument; and if there is no result.
    backward: the op that computes the gradients, made by this function; None: no gradient.
    gradients: of arguments whose gradient has another name than dNAME: argument -> result of
        backward.
    strided: the launcher accepts arrays that are not contiguous; else it gets copies of them.
    Gradients get the dtypes of their arguments. Raises ValueError if a name in the schema of
    backward is neither an argument nor a result of the op.
    """
    qualified = schema.partition("(")[0].strip()
    namespace, _, name = qualified.partition("::")
    if not name:
        raise ValueError(f"the op {schema!r} has no namespace: begin with NAMESPACE::NAME")
    library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(schema.replace(qualified, name, 1))
    op = getattr(getattr(torch.ops, namespace), name).default
    arguments = op._schema.arguments
    changed = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    gradient_of = _gradient_dtypes(op)
    for key, run in (("CPU", run_on_cpu), ("CUDA", run_on_gpu)):
        call = _implementation(qualified, launcher, run, changed, strided, gradient_of)
        library.impl(name, call, key)
    torch.library.register_fake(qualified, fake or _fake_gradients(op, gradient_of), lib=library)
    if backward is None:
        formula, setup = _refuse(qualified), None
    else:
        formula, setup = _formula(op, backward, gradients or {})
    torch.library.register_autograd(qualified, formula, setup_context=setup, lib=library)
    return op


def _implementation(qualified, launcher, run, changed, strided, gradient_of):
    """Return the function that torch calls with the tensors of a device."""

    def call(*arguments):
        given = list(arguments)
        for i, a in enumerate(given):
            if changed[i]:
                _check_in_place(qualified, a)
            elif isinstance(a, torch.Tensor) and not strided:
                given[i] = a.contiguous()
        results = run(launcher, given)
        for i, argument in gradient_of.items():
            if arguments[argument] is not None:
                results[i] = results[i].to(arguments[argument].dtype)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _check_in_place(qualified, tensors):
    for x in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if isinstance(x, torch.Tensor) and not x.is_contiguous():
            raise ValueError(
                f"{qualified}: a tensor that is changed in place has shape {tuple(x.shape)} and is "
                "not contiguous: copy it first"
            )


def _gradient_dtypes(op) -> dict[int, int]:
    """Return result -> argument for the results dNAME of arguments NAME."""
    position = {a.name: i for i, a in enumerate(op._schema.arguments)}
    names = [r.name for r in op._schema.returns]
    return {i: position[n[1:]] for i, n in enumerate(names) if n[:1] == "d" and n[1:] in position}


def _fake_gradients(op, gradient_of):
    """Return the fake implementation of an op whose results are gradients of its arguments."""
    count = len(op._schema.returns)
    if len(gradient_of) < count:
        raise ValueError(f"{op._schema.name}: give `fake`, which makes empty results")

    def fake(*arguments):
        results = [arguments[gradient_of[i]] for i in range(count)]
        results = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in results]
        if not results:
            return None
        return results[0] if count == 1 else tuple(results)

    return fake


def _refuse(qualified):
    """Return a formula for an op without a gradient."""
    if qualified.endswith("_backward"):
        reason = "has no second derivative: call backward without create_graph"
    else:
        reason = "has no gradient: call it inside torch.no_grad(), or on x.detach()"

    def formula(ctx, *grads):
        raise RuntimeError(f"{qualified} {reason}")

    return formula


def _formula(op, backward, gradients):
    """Return backward and setup_context of an op for torch.library.register_autograd."""
    forward_schema = op._schema
    inputs = [a.name for a in forward_schema.arguments]
    outputs = [r.name for r in forward_schema.returns]
    needed = backward._schema.arguments
    optional = {a.name for a in needed if str(a.type).startswith("Optional")}
    results = [r.name for r in backward._schema.returns]
    saved: list[str] = []
    for a in needed:
        if a.name in inputs or a.name in outputs:
            saved.append(a.name)
        elif a.name[1:] not in outputs or a.name[:1] != "d":
            raise ValueError(
                f"{backward._schema.name}: {a.name} is neither an argument or a result of "
                f"{forward_schema.name} nor d and the name of a result"
            )
    names = [a.name for a in needed]
    wanted = [gradients.get(name, f"d{name}") for name in inputs]
    differentiable = [f"d{name}" in names for name in outputs]

    def setup_context(ctx, inputs: Sequence[Any], output: Any):
        results = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*forward_names, *outputs), (*inputs, *results)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y, d in zip(results, differentiable) if not d))
        ctx.others = {n: values[n] for n in saved if not isinstance(values[n], torch.Tensor)}
        ctx.tensors = [n for n in saved if n not in ctx.others]
        ctx.save_for_backward(*(values[n] for n in ctx.tensors))
        ctx.like = {f"d{n}": (y.shape, y.dtype, y.device) for n, y in zip(outputs, results)}

    def formula(ctx, *grads):
        values = dict(zip(ctx.tensors, ctx.saved_tensors)) | ctx.others
        for name, grad in zip(outputs, grads):
            key = f"d{name}"
            if grad is None and key in names and key not in optional:
                shape, dtype, device = ctx.like[key]
                grad = torch.zeros(shape, dtype=dtype, device=device)
            values[key] = grad
        found = backward(*(values[n] for n in names))
        found = dict(zip(results, found if isinstance(found, tuple) else (found,)))
        wants = zip(wanted, ctx.needs_input_grad)
        return tuple(found.get(name) if needs else None for name, needs in wants)

    forward_names = tuple(inputs)
    return formula, setup_context
