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

`backward` may also be a function of torch: its parameters have such names, and it returns a dict,
argument -> gradient.

The launcher's arguments are arrays in place of tensors (arrays.py); lists of tensors are lists of
arrays. CPU tensors run what the launcher does with NumPy arrays, CUDA tensors what it does with
CuPy arrays. It returns new arrays, in the order of the results. Arguments that the schema marks as
changed, `Tensor(a!) x`, are changed in place.

On a GPU the launches of a launcher that only allocates, multiplies and launches are recorded once
for each layout of the arguments and repeated (launches.py). So let it choose them by its arguments
alone. A float that it hands to `launch`, through as_float32 if it may be an integer, may be another
in each call; with a float that it computes with, or compares, each value is recorded.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from .arrays import NoMemory, flattened, run_launcher
from .launches import Repeatable, aligned

_libraries: dict[str, torch.library.Library] = {}  # by op, which exists as long as its Library


def register_op(
    schema: str,
    launcher: Callable,
    *,
    fake: Callable | None = None,
    backward: Any = None,
    gradients: dict[str, str] | None = None,
    strided: Sequence[str] = (),
) -> Any:
    """Register a torch.library op and return it.

    schema: "NAMESPACE::NAME(Tensor x, float eps) -> (Tensor y, Tensor rstd)", with a name for
        every result.
    launcher: called with arrays in place of tensors; returns one array, a tuple of them, or None.
    fake: called with the arguments of the op; returns empty tensors with the shapes and dtypes of
        the results. May be left out if every result is dNAME, and then has the shape of NAME, an
        argument; and if there is no result.
    backward: the op that computes the gradients, made by this function, or a function of tensors;
        None: no gradient.
    gradients: of arguments whose gradient has another name than dNAME: argument -> result of
        backward.
    strided: names of the arguments that may be arrays that are not contiguous; of others the
        launcher gets contiguous copies.
    Gradients get the dtypes of their arguments. An op of this name is replaced, so a cell of a
    notebook may run again. Raises ValueError if a name in the schema of backward is neither an
    argument nor a result of the op, or if an op with a backward has a list of tensors.
    """
    qualified = schema.partition("(")[0].strip()
    namespace, _, name = qualified.partition("::")
    if not name:
        raise ValueError(f"the op {schema!r} has no namespace: begin with NAMESPACE::NAME")
    if qualified in _libraries:
        _libraries.pop(qualified)._destroy()
    library = _libraries[qualified] = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema.replace(qualified, name, 1))
    op = getattr(getattr(torch.ops, namespace), name).default
    arguments = op._schema.arguments
    if any(a.kwarg_only for a in arguments):
        raise ValueError(f"{qualified} has arguments that are keywords only: leave out the *")
    if not all(r.name for r in op._schema.returns):
        raise ValueError(f"{qualified} has a result without a name: write -> Tensor y")
    changed = {i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write}
    dense = {i for i, a in enumerate(arguments) if a.name not in strided} - changed
    gradient_of = _gradient_dtypes(op)
    lists = any("List[" in str(a.type) for a in arguments)  # also of numbers: no part of a key
    if changed or lists:
        compute: Callable = _as_usual(qualified, launcher, changed, dense)
    else:
        compute = Repeatable(launcher, frozenset(range(len(arguments))) - dense)
    run = _implementation(qualified, compute, len(op._schema.returns), gradient_of)
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    torch.library.register_fake(qualified, fake or _fake_gradients(op, gradient_of), lib=library)
    if changed:
        library.impl(name, _in_place(op, changed), "Autograd", with_keyset=True)
        return op
    if backward is None:
        formula, setup = _refuse(qualified), None
    else:
        formula, setup = _formula(op, backward, gradients or {})
    torch.library.register_autograd(qualified, formula, setup_context=setup, lib=library)
    kinds = tuple([_kinds(str(a.type)) for a in arguments])
    transformed = _transformed(op, setup, formula)
    _direct[op] = _Direct(run, _function(name, run, setup, formula), transformed, kinds)
    return op


def call(op: Any, *arguments: Any) -> Any:
    """Call an op of register_op: op(*arguments), in a third of the host time.

    In eager mode, with plain tensors, this runs the launcher without torch's dispatcher, which
    takes longer than a small kernel. While torch.compile or another mode traces, it calls the op.
    Raises TypeError for another op.
    """
    direct = _direct.get(op)
    if direct is None:
        raise TypeError(f"call: {op} is not an op of register_op: call it as torch does")
    if forward_ad._current_level >= 0:
        _check_tangents(op, arguments)
    transformed = _are_functorch_transforms_active()
    if transformed and not is_compiling() and not _is_functionalizing():
        return direct.transformed.apply(*arguments)
    if (
        transformed
        or is_compiling()
        or _get_tracing_state()
        or _len_torch_dispatch_stack()
        or len(arguments) != len(direct.kinds)
    ):
        return op(*arguments)
    with_gradient = False
    on_device = False
    for a, kinds in zip(arguments, direct.kinds):
        kind = type(a)
        if kind not in kinds:
            return op(*arguments)
        if kind is Tensor or kind is Parameter:
            with_gradient = with_gradient or a.requires_grad
            on_device = on_device or a.is_cuda or a.is_cpu
    if not on_device:
        return op(*arguments)
    try:
        if with_gradient and torch.is_grad_enabled():
            return direct.function.apply(*arguments)
        return direct.run(*arguments)
    except NoMemory:  # a batch of tensors inside vmap, or a sparse one
        return op(*arguments)


def _is_functionalizing():
    """Is the innermost transform torch.func.functionalize, which takes no autograd.Function?"""
    functorch = torch._C._functorch
    kind = functorch.peek_interpreter_stack().key()
    return kind == functorch.TransformType.Functionalize


@dataclasses.dataclass(frozen=True)
class _Direct:
    """What `call` runs in place of an op."""

    run: Callable
    function: Any  # torch.autograd.Function
    transformed: Any  # the same for torch.func, which cannot differentiate an op of torch.library
    kinds: tuple[frozenset, ...]  # the types of each argument


_direct: dict[Any, _Direct] = {}


def _kinds(schema_type: str) -> frozenset:
    """Return the types of values that `call` takes for an argument of this type of the schema."""
    types_of = {
        "Tensor": (Tensor, Parameter),
        "float": (float, int),
        "int": (int,),
        "bool": (bool,),
    }
    types = types_of.get(schema_type.removeprefix("Optional[").removesuffix("]"), ())
    return frozenset((*types, type(None)) if schema_type.startswith("Optional[") else types)


def _check_tangents(op, arguments):
    for x in arguments:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op._schema.name} has no forward-mode derivative: use backward"
            )


def _function(name, run, setup, formula):
    """Return the autograd.Function that computes what the op computes."""

    def forward(ctx, *arguments):
        results = run(*arguments)
        if setup is not None:
            setup(ctx, arguments, results)
        return results

    methods = {"forward": staticmethod(forward), "backward": staticmethod(formula)}
    return type(name, (torch.autograd.Function,), methods)


def _transformed(op, setup, formula):
    """Return the autograd.Function for the transforms of torch.func: grad, vjp, vmap, jacrev."""

    def vmap(info, in_dims, *arguments):
        """Call it for each of the batch: a launcher does not know the axis."""
        if not info.batch_size:
            raise ValueError(f"{op._schema.name} is called by vmap for a batch of 0")
        rows = []
        for i in range(info.batch_size):
            given = [
                a if axis is None else a.select(axis, i) for a, axis in zip(arguments, in_dims)
            ]
            rows.append(transformed.apply(*given))
        if isinstance(rows[0], tuple):
            return tuple([torch.stack(row) for row in zip(*rows)]), (0,) * len(rows[0])
        return torch.stack(rows), 0

    def backward(ctx, *grads):
        """In copies: a vjp may be called again, and the formula may work in place."""
        saved = [None if x is None else x.clone() for x in ctx.saved_tensors]
        return formula(ctx, *grads, saved=saved)

    methods = {
        "forward": staticmethod(lambda *arguments: op(*arguments)),
        "setup_context": staticmethod(setup or (lambda ctx, arguments, results: None)),
        "backward": staticmethod(backward),
        "vmap": staticmethod(vmap),
    }
    transformed = type(op._schema.name, (torch.autograd.Function,), methods)
    return transformed


def _implementation(qualified, compute, count, gradient_of):
    """Return the function that computes the op for tensors on the CPU or a GPU."""

    def run(*arguments):
        results = compute(arguments)
        if len(results) != count:
            raise TypeError(
                f"{qualified}: the launcher returned {len(results)} arrays, the schema has {count}"
            )
        for i, argument in gradient_of.items():
            like = arguments[argument]
            if like is not None and results[i].dtype != like.dtype:
                results[i] = results[i].to(like.dtype)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    return run


def _as_usual(qualified, launcher, changed, dense):
    """Return the function that calls the launcher of an op that is not repeated."""

    def compute(arguments):
        given = list(arguments)
        for i in changed:
            _check_in_place(qualified, given[i])
        for i in dense:
            given[i] = _aligned(given[i])
        return run_launcher(launcher, given)

    return compute


def _aligned(x):
    """Return contiguous, aligned tensors; others as they are."""
    if isinstance(x, Tensor):
        return aligned(x)
    return [_aligned(y) for y in x] if isinstance(x, (list, tuple)) else x


def _check_in_place(qualified, tensors):
    for x in flattened([tensors]):
        if isinstance(x, Tensor) and not x.is_contiguous():
            raise ValueError(
                f"{qualified}: a tensor that is changed in place has shape {tuple(x.shape)} and is "
                "not contiguous: copy it first"
            )


def _in_place(op, changed):
    """Return the implementation, above those of the devices, of an op that changes arguments."""

    def call(keyset, *arguments):
        tensors = [x for x in flattened(arguments) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise RuntimeError(
                f"{op._schema.name} changes tensors in place and has no gradient: call it inside "
                "torch.no_grad()"
            )
        for x in flattened([arguments[i] for i in changed]):
            if isinstance(x, Tensor):
                torch.autograd.graph.increment_version(x)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return call


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

    def formula(ctx, *grads, saved=None):
        raise RuntimeError(f"{qualified} {reason}")

    return formula


def _formula(op, backward, gradients):
    """Return backward and setup_context of an op for torch.library.register_autograd.

    The values that backward needs are, in this order, gradients of results, saved tensors, and
    other saved values; `order` is their order among its arguments.
    """
    arguments = [a.name for a in op._schema.arguments]
    results = [r.name for r in op._schema.returns]
    kinds = {a.name: str(a.type) for a in op._schema.arguments}
    names, optional, compute, complete = _backward_names(op, backward, gradients)
    if any("List" in kind and "Tensor" in kind for kind in kinds.values()):
        raise ValueError(
            f"{op._schema.name} has a list of tensors and a backward: make each tensor an argument"
        )
    tensors = [n for n in names if n in results or "Tensor" in kinds.get(n, "")]
    others = [n for n in names if n in arguments and n not in tensors]
    given = [n for n in names if n not in tensors and n not in others]
    for name in given:
        if name[:1] != "d" or name[1:] not in results:
            raise ValueError(
                f"the backward of {op._schema.name}: {name} is neither an argument or a result of "
                "the op, nor d and the name of a result"
            )
    place = {name: i for i, name in enumerate((*arguments, *results))}
    saved = [place[n] for n in tensors]
    kept = [place[n] for n in others]
    outputs = [results.index(n[1:]) for n in given]
    constant = [k for k in range(len(results)) if k not in outputs]
    order = [(*given, *tensors, *others).index(n) for n in names]

    def setup_context(ctx, inputs: Sequence[Any], output: Any):
        found = output if isinstance(output, tuple) else (output,)
        values = (*inputs, *found)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[found[k] for k in constant])
        ctx.save_for_backward(*[values[i] for i in saved])
        ctx.others = [values[i] for i in kept]
        if len(given) > 1:  # one of them may be missing
            ctx.layouts = [(found[k].shape, found[k].dtype, found[k].device) for k in outputs]

    def formula(ctx, *grads, saved=None):
        values = [grads[k] for k in outputs]
        missing = [i for i, g in enumerate(values) if g is None]
        if len(missing) == len(values):
            return (None,) * len(arguments)
        for i in missing:
            if given[i] not in optional:
                shape, dtype, device = ctx.layouts[i]
                values[i] = torch.zeros(shape, dtype=dtype, device=device)
        values += ctx.saved_tensors if saved is None else saved
        values += ctx.others
        found = compute(*[values[i] for i in order])
        if complete:
            return found
        wanted = []
        for name, x, needs in zip(arguments, found, ctx.needs_input_grad):
            if not needs:
                x = None  # torch refuses a gradient of None
            elif x is None:
                raise RuntimeError(f"{op._schema.name} has no gradient of {name}: detach it")
            wanted.append(x)
        return tuple(wanted)

    return formula, setup_context


def _backward_names(op, backward, gradients):
    """Return what a formula needs to know of the backward of an op.

    That is the names that it needs, those of them that may be None, a function of the named values
    that returns a gradient, or None, for each argument, as a tuple, and whether every tensor among
    the arguments always has one.
    """
    inputs = [a.name for a in op._schema.arguments]
    if not hasattr(backward, "_schema"):
        names = list(inspect.signature(backward).parameters)

        def compute_checked(*values):
            if _are_functorch_transforms_active():  # which always differentiate with create_graph
                return once.apply(*values)
            tensors = [x for x in values if isinstance(x, Tensor)]
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                refuse(None)
            return compute_gradients(*values)

        def refuse(ctx, *grads):
            raise RuntimeError(
                f"{op._schema.name} has no second derivative: call backward without create_graph"
            )

        def compute_gradients(*values):
            found = backward(*values)
            if not isinstance(found, dict) or not found.keys() <= set(inputs):
                given = list(found) if isinstance(found, dict) else type(found).__name__
                raise TypeError(
                    f"the backward of {op._schema.name} returned {given}, expected a dict, "
                    f"argument -> gradient, with the arguments {', '.join(inputs)}"
                )
            return tuple([found.get(name) for name in inputs])

        methods = {
            "forward": staticmethod(compute_gradients),
            "setup_context": staticmethod(lambda ctx, inputs, output: None),
            "backward": staticmethod(refuse),
            "generate_vmap_rule": True,
        }
        once = type(op._schema.name, (torch.autograd.Function,), methods)
        return names, (), compute_checked, False
    arguments = backward._schema.arguments
    names = [a.name for a in arguments]
    optional = {a.name for a in arguments if str(a.type).startswith("Optional")}
    results = [r.name for r in backward._schema.returns]
    source = [gradients.get(name, f"d{name}") for name in inputs]
    places = [results.index(name) if name in results else None for name in source]
    kinds = [str(a.type) for a in op._schema.arguments]
    complete = all(
        kind == "Tensor" if place is not None else "Tensor" not in kind
        for kind, place in zip(kinds, places)
    )

    def compute(*values):
        found = call(backward, *values)
        if not isinstance(found, tuple):
            found = (found,)
        return tuple([None if i is None else found[i] for i in places])

    return names, optional, compute, complete
