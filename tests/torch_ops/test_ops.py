"""Every op of xtrain.torch: values, gradients, opcheck, layouts, streams, torch.compile.

On the CPU the NumPy references run, inside xt.simulated() the kernels. With a GPU all tests run there too (`gpu`).
"""

import contextlib
import re
import time

import pytest
import torch
from checks import assert_as_good
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import (
    CASES,
    outputs,
    plain_attention,
    plain_rmsnorm,
    plain_rope,
    random,
    tables,
    with_gradients,
)

import xtrain.torch as xt
from xtrain.torch.arrays import LARGE

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
places = pytest.mark.parametrize("place", ["cpu", GPU])
cases = pytest.mark.parametrize("name", CASES)
only_gpu = pytest.mark.gpu


def same(a, b) -> bool:
    """Are two lists of tensors equal bit for bit?"""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def as_good(ours, exact, plain, scale=1.0):
    """Each error is at most twice that of plain PyTorch in the same dtype."""
    assert len(ours) == len(exact) == len(plain)
    for i, (a, e, p) in enumerate(zip(ours, exact, plain)):
        values = (x.detach().double().cpu().numpy() for x in (a, e, p))
        assert_as_good(*values, what=f"result {i}", scale=scale, floor=1e-6)


def leaf(x):
    """A new leaf of autograd with the memory of x."""
    return x.detach().requires_grad_(x.requires_grad)


def seen(look):
    """A mode that calls look(op, arguments); inside, `xt.call` calls the ops of torch.library."""

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            look(func, args)
            return func(*args, **(kwargs or {}))

    return Spy()


@cases
@places
def test_the_op_and_the_direct_call_are_the_same(name, place):
    case = CASES[name]
    names = []
    with seen(lambda func, args: names.append(func.name())):
        through_torch = with_gradients(case.op, case.make(device=place))
    assert f"xtrain::{case.opname}" in names
    assert same(with_gradients(case.op, case.make(device=place)), through_torch)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["cpu", "simulator", GPU])
def test_values_and_gradients(name, dtype, place):
    case = CASES[name]
    N = case.simulated if place == "simulator" else 6
    if dtype not in case.dtypes:
        pytest.skip("not a dtype of this op")  # so there is nothing to compare
    if not N:
        pytest.skip("too slow in the simulator")  # its kernel has tests in tests/kernels
    if place == "simulator" and case.opname == "attention" and dtype == torch.float32:
        pytest.skip(
            "too slow in the simulator"
        )  # bf16 runs; this one is in tests/kernels/attention
    device = "cuda" if place == "cuda" else "cpu"
    make = lambda dtype: case.make(N, dtype, device)
    rounded = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in make(dtype)
    ]
    leaves = [
        x.detach().requires_grad_(i in case.floats()) if isinstance(x, torch.Tensor) else x
        for i, x in enumerate(rounded)
    ]
    exact = with_gradients(case.plain, leaves)
    with xt.simulated() if place == "simulator" else contextlib.nullcontext():
        ours = with_gradients(case.op, make(dtype))
    as_good(ours, exact, with_gradients(case.plain, make(dtype)))
    assert [x.dtype for x in ours] == [x.dtype for x in with_gradients(case.plain, make(dtype))]


@cases
def test_reference_against_finite_differences(name):
    case = CASES[name]
    inputs = case.make(4, torch.float64)
    if not case.once:
        assert torch.autograd.gradcheck(case.op, inputs, fast_mode=True)
    loss = lambda *x: sum((y * (i + 1)).sin().sum() for i, y in enumerate(outputs(case.op(*x))))
    wanted = case.floats()
    grads = torch.autograd.grad(loss(*inputs), [inputs[i] for i in wanted])
    v = [random(i, *g.shape).double() for i, g in enumerate(grads)]
    moved = lambda e: [
        x + e * v[wanted.index(i)] if i in wanted else x for i, x in enumerate(inputs)
    ]
    with torch.no_grad():
        numeric = (loss(*moved(1e-5)) - loss(*moved(-1e-5))) / 2e-5
    torch.testing.assert_close(sum((g * d).sum() for g, d in zip(grads, v)), numeric)


@cases
@places
def test_opcheck(name, place):
    """On the arguments with which the function calls its op."""
    case = CASES[name]
    op = getattr(torch.ops.xtrain, case.opname).default
    ops = [op]
    if not case.once:
        ops.append(getattr(torch.ops.xtrain, f"{case.opname}_backward").default)
    calls = []

    with seen(lambda func, args: calls.append((func, args)) if func in ops else None):
        with_gradients(case.op, case.make(4, device=place))
    assert len(calls) == len(ops)
    for func, args in calls:
        floats = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point()
        fixed = func is not op  # the backward op has no gradient of its own
        args = [x.detach().clone().requires_grad_(not fixed) if floats(x) else x for x in args]
        for i, argument in enumerate(func._schema.arguments):
            if argument.name in ("cos", "sin", "inv_count"):  # have no gradient
                args[i] = args[i] if args[i] is None else args[i].detach()
        torch.library.opcheck(func, tuple(args))


@cases
@places
def test_each_gradient_alone(name, place):
    case = CASES[name]
    whole = with_gradients(case.op, case.make(device=place))
    results = len(whole) - len(case.floats())
    for k, wanted in enumerate(case.floats()):
        inputs = case.make(device=place, grad=False)
        inputs[wanted].requires_grad_()
        assert same(with_gradients(case.op, inputs)[results:], [whole[results + k]])


@cases
@places
def test_one_result_alone(name, place):
    """Results without a gradient count as zero."""
    case = CASES[name]
    for i in range(len(outputs(case.op(*case.make(device=place))))):
        found = []
        for function in (case.op, case.plain):
            inputs = case.make(device=place)
            wanted = [inputs[j] for j in case.floats()]
            y = outputs(function(*inputs))[i]
            grads = torch.autograd.grad(y.sum(), wanted, allow_unused=True)
            found.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted)])
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@cases
@places
def test_second_derivatives_are_refused(name, place):
    case = CASES[name]
    inputs = case.make(device=place)
    wanted = [inputs[i] for i in case.floats()]
    y = sum(y.pow(2).sum() for y in outputs(case.op(*inputs)))
    with pytest.raises(RuntimeError, match=r"^xtrain::\w+ has no second derivative: call"):
        first = torch.autograd.grad(y, wanted, create_graph=True)
        sum(g.sum() for g in first).backward()


@cases
@places
def test_any_layout(name, place):
    """Strided and misaligned inputs, and gradients that are strided, give the bits of contiguous ones."""
    case = CASES[name]
    expected = with_gradients(case.op, case.make(device=place))

    def strided(x):
        return torch.stack((x, x), -1)[..., 0]

    def misaligned(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
        return flat.copy_(x.reshape(-1)).view(x.shape)

    for change in (strided, misaligned):
        inputs = case.make(device=place, grad=False)
        for i in case.floats():
            inputs[i] = change(inputs[i]).requires_grad_()
        assert same(with_gradients(case.op, inputs), expected)
    grads = []
    for change in (torch.Tensor.expand, lambda *a: torch.Tensor.expand(*a).contiguous()):
        inputs = case.make(device=place)
        results = outputs(case.op(*inputs))
        ones = [change(torch.ones((), device=place), y.shape) for y in results]
        grads.append(torch.autograd.grad(results, [inputs[i] for i in case.floats()], ones))
    assert same(*grads)


@cases
@places
def test_no_tokens(name, place):
    case = CASES[name]
    ours, plain = (with_gradients(f, case.make(0, device=place)) for f in (case.op, case.plain))
    assert [x.shape for x in ours] == [x.shape for x in plain]
    for x in ours[-len(case.floats()) :]:
        assert not x.any()  # gradients of weights


@cases
@places
def test_results_can_be_changed_in_place(name, place):
    """As a Trainer does with the loss: no result is a view that autograd refuses to change."""
    case = CASES[name]
    for y in outputs(case.op(*case.make(device=place))):
        y.mul_(2)


@cases
@places
def test_the_same_bits_twice(name, place):
    case = CASES[name]
    first, second = (with_gradients(case.op, case.make(device=place)) for _ in range(2))
    assert same(first, second)


@pytest.mark.parametrize("name", ["residual_rmsnorm", pytest.param("rope", marks=only_gpu)])
@pytest.mark.parametrize("place", ["cpu", GPU])
def test_compiled_without_a_graph_break(name, place):
    case = CASES[name]
    backend = "inductor" if place == "cuda" else "aot_eager"
    function = lambda *inputs: tuple(2 * y for y in outputs(case.op(*inputs)))
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    found = [with_gradients(f, case.make(device=place)) for f in (function, compiled)]
    assert same(*found)


def test_compiled_with_lengths_that_depend_on_data(monkeypatch):
    """The tokens that count, as a loss or a packed row picks them."""
    monkeypatch.setattr(torch._dynamo.config, "capture_dynamic_output_shape_ops", True)

    def attend(q, ids):
        q = q[:, ids.nonzero()[:, 0]]
        return xt.attention(q, q, q) + xt.attention(q, q, q, window=2)

    def loss(x, w, ids):
        chosen = ids.nonzero()[:, 0]
        return xt.linear_cross_entropy(xt.rmsnorm(x[chosen], w[0]), w, ids[chosen])

    ids = torch.tensor([0, 1, 2, 0, 3, 4])
    for function, inputs in (
        (attend, (random(1, 1, 6, 2, 16), ids)),
        (loss, (random(1, 6, 16), random(2, 9, 16), ids)),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*inputs), function(*inputs))


def test_the_second_backward_of_a_loss_is_refused():
    """The first one has multiplied the gradients in place."""
    x = random(1, 4, 24).requires_grad_()
    loss = xt.cross_entropy(x, torch.arange(4))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_modes_in_which_torch_calls_the_op():
    """A batch of gradients, vmap and a trace: the direct call would compute something else, or fail."""
    w = torch.ones(8)
    x = random(1, 3, 2, 8)
    expected = plain_rmsnorm(x, w)
    torch.testing.assert_close(torch.vmap(lambda x: xt.rmsnorm(x, w))(x), expected)
    traced = torch.jit.trace(xt.rmsnorm, (torch.ones(3, 2, 8), w), check_trace=False)
    torch.testing.assert_close(traced(x, w), expected)
    x.requires_grad_()
    ours, theirs = (
        torch.autograd.grad(f(x, w), x, random(2, 5, *x.shape), is_grads_batched=True)[0]
        for f in (xt.rmsnorm, plain_rmsnorm)
    )
    torch.testing.assert_close(ours, theirs)
    q = torch.empty(1, 4, 2, 16, device="meta")
    assert xt.attention(q, q, q).shape == q.shape


@cases
@pytest.mark.parametrize("way", ["vjp", "vmap of grad", "grad of vmap"])
def test_transforms_of_torch_func(name, way):
    """Gradients, also one for each of a batch, and again from the same vjp."""
    case = CASES[name]
    inputs = case.make(grad=False)
    wanted = case.floats()[0]

    def loss(function):
        def of(x):
            given = [x if i == wanted else a for i, a in enumerate(inputs)]
            return sum(y.float().sin().sum() for y in outputs(function(*given)))

        return of

    def gradients(function):
        x = inputs[wanted]
        both = torch.stack((x, x / 2))
        if way == "vmap of grad":
            return torch.vmap(torch.func.grad(loss(function)))(both)
        if way == "grad of vmap":
            return torch.func.grad(lambda both: torch.vmap(loss(function))(both).sum())(both)
        _, vjp = torch.func.vjp(loss(function), x)
        return torch.stack([vjp(torch.tensor(factor))[0] for factor in (3.0, 1.0)])

    ours, theirs = gradients(case.op), gradients(case.plain)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"^xtrain::\w+ has no second derivative: call"):
        torch.func.grad(lambda x: torch.func.grad(loss(case.op))(x).sum())(inputs[wanted])


def test_functionalize_and_an_empty_batch():
    w = torch.ones(8)
    x = random(1, 2, 8)
    norm = lambda x: xt.rmsnorm(x, w)
    assert torch.equal(torch.func.functionalize(norm)(x), norm(x))
    with pytest.raises(ValueError, match="xtrain::rmsnorm is called by vmap for a batch of 0"):
        torch.vmap(torch.func.grad(lambda x: norm(x).sum()))(x[:0])


def test_inference_mode():
    x = random(1, 1, 4, 2, 16)
    documents = torch.tensor([0, 2, 4])
    with torch.inference_mode():
        found = xt.attention(x, x, x, cu_seqlens=documents)
    torch.testing.assert_close(found, plain_attention(x, x, x, cu_seqlens=documents))


def test_forward_mode_is_refused():
    w = torch.ones(8)
    x = random(1, 2, 8)
    message = r"^xtrain::rmsnorm has no forward-mode derivative: use backward$"
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        xt.rmsnorm(forward_ad.make_dual(x, x), w)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(lambda x: xt.rmsnorm(x, w), (x,), (x,))
    with forward_ad.dual_level():
        torch.testing.assert_close(xt.rmsnorm(x, w), plain_rmsnorm(x, w))


def test_an_argument_without_a_gradient():
    x = random(1, 4, 2, 8).requires_grad_()
    cos, sin = (t.requires_grad_() for t in tables(4, 8))
    y = xt.rope(x, cos.detach(), sin.detach())
    torch.testing.assert_close(y, plain_rope(x, cos, sin))
    with pytest.raises(RuntimeError, match=r"^xtrain::rope has no gradient of cos: detach it$"):
        xt.rope(x, cos, sin).sum().backward()


# ----------------------------------------------------------------------------- mistakes
def test_bad_input():
    x, w = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"^rmsnorm: weight has shape \(7,\), expected \(8\)$"):
        xt.rmsnorm(x, w[:7])
    with pytest.raises(TypeError, match=r"^rmsnorm: x is float16, expected float32 or bfloat16$"):
        xt.rmsnorm(x.half(), w)
    with pytest.raises(TypeError, match=r"no kernels for tensors of torch\.complex64"):
        xt.rmsnorm(x.to(torch.complex64), w)
    with pytest.raises(ValueError, match="gate has 7 columns"):
        xt.swiglu(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"positions 0 to 9, the tables hold 0 to 7"):
        xt.rope(torch.ones(10, 1, 4), torch.ones(8, 2), torch.ones(8, 2), torch.arange(10))
    with pytest.raises(ValueError, match=r"^rope: x has shape \(2, 8\), expected at least 3 axes$"):
        xt.rope(x, torch.ones(8, 2), torch.ones(8, 2))
    with pytest.raises(TypeError, match=r"must be on one device, got one on meta$"):
        xt.rmsnorm(x, w.to("meta"))
    with pytest.raises(ValueError, match=r"^count is 0, and the loss is divided by it$"):
        xt.cross_entropy(x, torch.ones(2).long(), 0)
    with pytest.raises(ValueError, match=r"^count has shape \(2,\), expected one number$"):
        xt.cross_entropy(x, torch.ones(2).long(), torch.ones(2))
    with pytest.raises(ValueError, match=r"^linear_logprobs: -1 rows at a time, expected at least"):
        xt.linear_logprobs(x, x, torch.ones(2).long(), rows=-1)
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        xt.rmsnorm(x.to_sparse(), w)


WRONG_SHAPES = {
    "rmsnorm: weight has shape (7,), expected (8)": (xt.rmsnorm, (2, 8), (7,)),
    "rmsnorm: x has shape (), expected at least 1 axis": (xt.rmsnorm, (), (1,)),
    "residual_rmsnorm: r has shape (3, 8), expected (2, 8)": (xt.residual_rmsnorm, (2, 8), (3, 8), (8,)),
    "residual_rmsnorm: r has shape (6, 8), expected (2, 3, 8)": (xt.residual_rmsnorm, (2, 3, 8), (6, 8), (8,)),
    "swiglu: up has shape (2, 7), expected (2, 8)": (xt.swiglu, (2, 8), (2, 7)),
    "geglu: gate has 7 columns, expected gate and up of equal width": (xt.geglu, (2, 7)),
    "rope: T = 4 positions, the tables hold 3": (xt.rope, (4, 2, 8), (3, 4), (3, 4)),
    "rope: cos has shape (4, 3), expected (any, 4)": (xt.rope, (4, 2, 8), (4, 3), (4, 3)),
    "norm_rope: weight has shape (7,), expected (8)": (xt.norm_rope, (4, 2, 8), (7,), (4, 4), (4, 4)),
    "qk_norm_rope: qkv has shape (4, 40), expected (any, 32)": (
        lambda qkv, cos, sin: xt.qk_norm_rope(qkv, None, None, cos, sin, 2, 1), (4, 40), (4, 4), (4, 4),
    ),
    "attention: 3 query heads cannot share 2 key heads: q (1, 4, 3, 16), k (1, 4, 2, 16)": (
        xt.attention, (1, 4, 3, 16), (1, 4, 2, 16), (1, 4, 2, 16),
    ),
    "attention: 4 causal queries need at least 4 keys: q (1, 4, 2, 16), k (1, 3, 2, 16)": (
        xt.attention, (1, 4, 2, 16), (1, 3, 2, 16), (1, 3, 2, 16),
    ),
    "linear_cross_entropy: weight has shape (10, 7), expected (any, 8)": (
        xt.linear_cross_entropy, (4, 8), (10, 7), 4,
    ),
    "cross_entropy: targets has shape (3,), expected (4)": (xt.cross_entropy, (4, 8), 3),
    "softmax: 4 causal positions need at least 4 keys, got 3": (lambda s: xt.softmax(s, causal=True), (4, 3)),
    "embedding: weight has shape (10,), expected (any, any)": (lambda w, ids: xt.embedding(ids, w), (10,), 3),
    "linear_logprobs: tokens has shape (3,), expected (4)": (xt.linear_logprobs, (4, 8), (10, 8), 3),
    "token_logprobs: tokens has shape (3,), expected (4)": (xt.token_logprobs, (4, 8), 3),
    "sample: logits has shape (8,), expected (any, any)": (xt.sample, (8,)),
    "sample: an option has shape (3,), expected one number, or 2": (xt.sample, (2, 8), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_SHAPES)
def test_wrong_shapes(message):
    """The same sentence for tensors, on the device "meta", and for the tensors of torch.compile."""
    function, *shapes = WRONG_SHAPES[message]

    def run(device):
        make = lambda s: torch.ones(s, device=device, dtype=torch.long if type(s) is int else None)
        return function(*map(make, shapes))

    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            run(device)
    with FakeTensorMode(), pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run("cpu")


def test_negative_views():
    """torch keeps the sign of c.conj().imag apart from its memory."""
    c = torch.complex(random(1, 1, 4, 2, 16), random(2, 1, 4, 2, 16))
    q = c.conj().imag
    assert q.is_neg()
    assert torch.equal(xt.attention(q, q, q), xt.attention(*[q.resolve_neg()] * 3))
    assert torch.equal(xt.rmsnorm(q, torch.ones(16)), xt.rmsnorm(q.resolve_neg(), torch.ones(16)))


@pytest.mark.parametrize("argument", [dict(eps=None), dict(eps="1e-6")])
def test_an_argument_of_another_type(argument):
    """Torch says what is wrong; the direct call, which checks no schema, computed NaN."""
    with pytest.raises(RuntimeError, match="Expected a value of type 'float' for argument 'eps'"):
        xt.rmsnorm(torch.ones(2, 8), torch.ones(8), **argument)


def test_bad_documents():
    q = random(1, 1, 6, 2, 16)
    run = lambda *numbers, **options: xt.attention(
        q, q, q, cu_seqlens=torch.tensor(numbers), **options
    )
    order = r"^attention: cu_seqlens must begin with 0, not decrease, and not exceed 6$"
    for numbers in ((2, 4, 6), (0, 4, 2, 6), (0, 3, 9)):
        with pytest.raises(ValueError, match=order):
            run(*numbers)
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.float32 of shape \(3,\), expected"):
        run(0.0, 2.0, 6.0)
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.int64 of shape \(1, 3\), expected"):
        run([0, 2, 6])
    with pytest.raises(ValueError, match=r"^attention: give cu_seqlens or starts, not both$"):
        run(0, 2, 6, starts=torch.zeros(1, 6, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"cu_seqlens is a list, expected a tensor of integers$"):
        xt.attention(q, q, q, cu_seqlens=[0, 2, 6])
    for options in (dict(window=3), dict(cu_seqlens=torch.tensor([0, 6]))):
        with pytest.raises(
            ValueError, match=r"^attention: a window or documents need causal=True$"
        ):
            xt.attention(q, q, q, causal=False, **options)
    with pytest.raises(RuntimeError, match="Expected a value of type 'int' for argument 'window'"):
        xt.attention(q, q, q, window=2.5)


def test_registering_one_s_own_op():
    """The example of register.py, a launcher for NumPy alone."""
    scale_backward = xt.register_op(
        "test_ops::scale_backward(Tensor dy, Tensor x, float factor) -> Tensor dx",
        lambda dy, x, factor: dy * dy.dtype.type(factor),
    )
    scale = xt.register_op(
        "test_ops::scale(Tensor x, float factor) -> Tensor y",
        lambda x, factor: x * x.dtype.type(factor),
        fake=lambda x, factor: torch.empty_like(x),
        backward=scale_backward,
    )
    x = torch.ones(3, 2, requires_grad=True)
    scale(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), 3.0))
    torch.library.opcheck(scale, (x, 3.0))
    with pytest.raises(ValueError, match=r"^test_ops::total has a list of tensors and a backward:"):
        xt.register_op(
            "test_ops::total(Tensor[] x) -> Tensor y", sum, fake=sum, backward=lambda x: {}
        )
    with pytest.raises(ValueError, match="no namespace"):
        xt.register_op("scale(Tensor x) -> Tensor y", lambda x: x)
    with pytest.raises(ValueError, match=r"result without a name: write -> Tensor y$"):
        xt.register_op("test_ops::nameless(Tensor x) -> Tensor", lambda x: x, fake=sum)
    with pytest.raises(ValueError, match=r"keywords only: leave out the \*$"):
        xt.register_op("test_ops::words(Tensor x, *, int n) -> Tensor y", lambda x: x, fake=sum)
    with pytest.raises(TypeError, match="is not an op of register_op: call it as torch does"):
        xt.call(torch.ops.aten.sin.default, x)
    with pytest.raises(ValueError, match="backward of test_ops::twice: z is neither"):
        xt.register_op(
            "test_ops::twice(Tensor x) -> Tensor y",
            lambda x: x * 2,
            fake=torch.empty_like,
            backward=xt.register_op(
                "test_ops::twice_backward(Tensor dy, Tensor x, Tensor z) -> Tensor dx", lambda *a: a
            ),
        )


def test_an_op_is_registered_again():
    """As a cell of a notebook that runs twice."""

    def cell(factor):
        return xt.register_op(
            "test_ops::times(Tensor x) -> Tensor y",
            lambda x: factor * x,
            fake=torch.empty_like,
            backward=lambda dy: {"x": factor * dy},
        )

    cell(2)
    times = cell(3)
    x = torch.ones(3, requires_grad=True)
    torch.library.opcheck(times, (x,))
    times(x).sum().backward()
    assert times(x).tolist() == x.grad.tolist() == [3, 3, 3]


def test_mistakes_in_an_op_of_one_s_own():
    def register(name, launcher, **options):
        schema = f"test_ops::{name}(Tensor x) -> Tensor y"
        return xt.register_op(schema, launcher, fake=torch.empty_like, **options)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        TypeError, match="nothing: the launcher returned 0 arrays, the schema has 1"
    ):
        register("nothing", lambda x: None)(x.detach())
    for name, backward, returned in (
        ("other_name", lambda dy: {"X": dy}, r"\['X'\]"),
        ("no_dict", lambda dy: dy, "Tensor"),
    ):
        y = register(name, lambda x: 2 * x, backward=backward)(x)
        with pytest.raises(TypeError, match=rf"{name} returned {returned}, expected a dict, arg"):
            y.sum().backward()
    y = register("without", lambda x: 2 * x, backward=lambda dy: {})(x)
    with pytest.raises(RuntimeError, match=r"^test_ops::without has no gradient of x: detach it$"):
        y.sum().backward()


# ----------------------------------------------------------------------------- only with a GPU
@only_gpu
@cases
def test_on_a_side_stream(name):
    """A kernel reads what torch has written on the stream, and torch what the kernel has written."""
    case = CASES[name]
    expected = with_gradients(case.op, case.make(device="cuda"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs = case.make(device="cuda", grad=False)
        late = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        for i, x in enumerate(inputs):
            if isinstance(x, torch.Tensor):
                late[i].copy_(x)
        for i in case.floats():
            late[i].requires_grad_()
        found = [y.clone() for y in with_gradients(case.op, late)]
    stream.synchronize()
    assert same(found, expected)


@only_gpu
@cases
def test_in_a_cuda_graph(name):
    case = CASES[name]
    inputs = case.make(device="cuda")
    expected = with_gradients(case.op, inputs)
    grads = [torch.ones_like(y) for y in outputs(case.op(*inputs))]
    wanted = [inputs[i] for i in case.floats()]
    run = lambda: torch.autograd.grad(outputs(case.op(*inputs)), wanted, grads)
    torch.cuda.synchronize()  # another stream reads inputs and grads
    with torch.cuda.stream(torch.cuda.Stream()):
        plain = run()
    torch.cuda.synchronize()
    # New leaves: the thread of the backward pass may still hold the graph of an earlier pass, and in
    # it the stream of that pass.
    inputs = [leaf(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    wanted = [inputs[i] for i in case.floats()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, plain)
    assert same(with_gradients(case.op, inputs), expected)


@only_gpu
def test_the_logits_are_freed_before_the_gradient_is_rounded():
    """N and V are large, so that the sums and their bf16 copy are less than the logits of a chunk."""
    N, C, V = 4096, 256, 1 << 16
    x, weight = (torch.randn(n, C, device="cuda", dtype=torch.bfloat16) for n in (N, V))
    targets = torch.zeros(N, dtype=torch.int64, device="cuda")
    x.requires_grad_()
    weight.requires_grad_()
    xt.linear_cross_entropy(x, weight, targets)  # compiles, and makes the workspaces
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = xt.linear_cross_entropy(x, weight, targets)
    chunk = 2048 * V * 2
    sums = V * C * 4
    assert chunk >= LARGE
    assert torch.cuda.max_memory_allocated() - before <= chunk + sums + sums // 4
    loss.backward()
    assert torch.isfinite(weight.grad).all()


@only_gpu
@cases
def test_results_are_memory_of_torch(name):
    import cupy

    case = CASES[name]
    inputs = case.make(device="cuda")
    with_gradients(case.op, inputs)  # compiles
    torch.cuda.synchronize()
    pool = cupy.get_default_memory_pool()
    before, used = torch.cuda.memory_allocated(), pool.used_bytes()
    results = with_gradients(case.op, inputs)
    segments = torch.cuda.memory_snapshot()
    for x in results:
        places = [s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in segments]
        assert any(places) or not x.numel()
    assert pool.used_bytes() == used
    del results, x
    for _ in range(100):  # the thread of the backward pass releases its last tensors a little later
        if torch.cuda.memory_allocated() <= before:
            return
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= before


@only_gpu
def test_under_autocast():
    """Products in bf16, norms with float32 weights: the dtypes of torch's own norm under autocast."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    w = torch.ones(64, device="cuda", requires_grad=True)
    a = torch.randn(64, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = xt.rmsnorm(x @ a, w)
        z = xt.swiglu(y @ a, y @ a)
    assert z.dtype == torch.bfloat16
    z.float().sum().backward()
    assert a.grad.dtype == x.grad.dtype == w.grad.dtype == torch.float32


@only_gpu
def test_tensors_on_two_devices():
    with pytest.raises(TypeError, match="on one device"):
        xt.rmsnorm(torch.ones(2, 8, device="cuda"), torch.ones(8))
