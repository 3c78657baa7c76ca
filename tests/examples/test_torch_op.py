"""examples/torch_op.py, the example of lessons/howto/torch_op.md."""

import sys
from pathlib import Path

import pytest
import torch

import xtrain.torch
from xtrain.simulator import OutOfBoundsError, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch_op
from torch_op import relu_squared


# [start:tests]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_against_reference(dtype):
    x = torch.randn(5, 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    with xtrain.torch.simulated():
        y = relu_squared(x)  # the kernel, every thread of it, checked
    torch.testing.assert_close(y, relu_squared(x))  # the reference


def test_gradient_and_registration():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(relu_squared, x)
    torch.library.opcheck(relu_squared, [x.detach().float().requires_grad_()])


# [end:tests]


def test_a_missing_bounds_check_is_reported():
    """What the page says of a kernel without its bounds check."""
    source = Path(torch_op.__file__).read_text(encoding="utf-8")
    with simulate():  # keeps the source of generated code
        broken = {}
        exec(source.replace("example::", "broken::").replace("i < y.size", "True"), broken)
    with xtrain.torch.simulated(), pytest.raises(OutOfBoundsError, match="element 6"):
        broken["relu_squared"](torch.ones(6))
