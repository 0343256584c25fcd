"""The product of few rows: the kernel against torch, and on a GPU, to the bit, against the same rows among many."""

from __future__ import annotations

import pytest
import torch

from fulltilt.kernels import linear as module
from fulltilt.kernels.dispatch import INTERPRETED, interpreted, triton
from fulltilt.kernels.linear import few_rows, linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(triton is None or (DEVICE == "cpu" and not INTERPRETED), reason="triton is not installed")


@needs_kernels
@pytest.mark.parametrize(("rows", "outer", "inner"), [(1, 5, 100), (3, 40, 256), (17, 33, 300), (70, 16, 128)])
@pytest.mark.parametrize("biased", [False, True])
def test_kernel_is_the_product(rows: int, outer: int, inner: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer) if biased else None
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    moved = [None if tensor is None else tensor.to(DEVICE) for tensor in (x, weight, bias)]
    if DEVICE == "cuda":
        got = few_rows(*moved)
    else:
        with interpreted():
            got = few_rows(*moved)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)


def test_elsewhere_it_is_torchs_own() -> None:
    x, weight, bias = torch.randn(2, 3, 4096), torch.randn(8, 4096), torch.randn(8)
    with torch.no_grad():
        assert linear(x, weight, bias).equal(torch.nn.functional.linear(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("inner", "outer"), [(4864, 896), (8960, 1536), (18944, 3584), (3584, 3584)])
def test_a_row_does_not_depend_on_how_many_there_are(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(8192, inner, device="cuda").bfloat16()
    weight = (torch.randn(outer, inner, device="cuda") * 0.02).bfloat16()
    with torch.no_grad():
        many = linear(x, weight)
        for rows in (1, 8, 16, 17, 32, 64, 128, 129, 256, module.MANY - 1, module.MANY, 512, 640, 768, 1024):
            assert linear(x[:rows], weight).equal(many[:rows]), rows
