"""Norm, rotary embedding and gated product: the kernels against their references, and the references against transformers to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fulltilt.kernels import dispatch
from fulltilt.kernels import gated as gated_file
from fulltilt.kernels import rms_norm as norm_file
from fulltilt.kernels.gated import gated, gated_reference
from fulltilt.kernels.rms_norm import rms_norm, rms_norm_reference
from fulltilt.kernels.rotary import rotary, rotary_reference

DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"
# The interpreter cuts bfloat16 off where a GPU rounds to the nearest, so there float16 shows that rounding happens where it must.
EXACT = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
# Relative to the largest number compared; one rounding of bfloat16 is 2^-8, of float16 2^-11.
ALLOWED = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if DEVICE == "cuda" else 2**-5}
quick = settings(max_examples=8, deadline=None, derandomize=True)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: torch.Tensor, expected: torch.Tensor, allowed: float | None = None) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    scale = max(0.1, float(expected.abs().max()) if expected.numel() else 0.0)  # the gradient of a norm over one number is zero
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=allowed or ALLOWED[expected.dtype])


def gradients(op: Callable[..., torch.Tensor | tuple], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results and gradients of one weighted sum of them, each weight another."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in inputs]
    results = op(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    total = sum((result * random(*result.shape, dtype=result.dtype, seed=40 + place)).sum() for place, result in enumerate(results))
    total.backward()
    return [*(result.detach() for result in results), *(leaf.grad for leaf in leaves)]


# ---- references are transformers' own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
class TestReferences:
    def test_norm(self, dtype: torch.dtype) -> None:
        x, other = random(5, 24, dtype=dtype), random(5, 24, dtype=dtype, seed=1)
        module = LlamaRMSNorm(24, 1e-5).to(DEVICE, dtype)
        module.weight.data.copy_(random(24, dtype=dtype, seed=2))
        assert torch.equal(rms_norm_reference(x, module.weight, 1e-5), module(x))
        normed, total = rms_norm_reference(x, module.weight, 1e-5, other)
        assert torch.equal(total, other + x) and torch.equal(normed, module(other + x))

    def test_rotary(self, dtype: torch.dtype) -> None:
        q, k, angles = random(6, 4, 16, dtype=dtype), random(6, 2, 16, dtype=dtype, seed=1), random(6, 16, seed=2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        for found, expected in zip(rotary_reference(q, k, cos, sin), theirs, strict=True):
            assert torch.equal(found, expected[0].transpose(0, 1))

    @pytest.mark.parametrize(("activation", "name"), [("silu", "silu"), ("silu", "swish"), ("gelu_tanh", "gelu_pytorch_tanh")])
    def test_gated(self, dtype: torch.dtype, activation: str, name: str) -> None:
        both = random(7, 24, dtype=dtype)
        assert torch.equal(gated_reference(both, activation), ACT2FN[name](both[:, :12]) * both[:, 12:])


# ---- kernels are their references --------------------------------------------------------------------------------------------------


@pytest.mark.kernels
class TestNorm:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("residual", [False, True])
    def test_forward_and_backward(self, dtype: torch.dtype, residual: bool) -> None:
        inputs = [random(7, 20, dtype=dtype), 1 + 0.2 * random(20, dtype=dtype, seed=1), random(7, 20, dtype=dtype, seed=2)][: 2 + residual]
        op = lambda norm: lambda x, weight, other=None: norm(x, weight, 1e-5, other)  # noqa: E731
        found, expected = gradients(op(rms_norm), inputs), gradients(op(rms_norm_reference), inputs)
        assert len(found) == (5 if residual else 3)
        for one, other in zip(found, expected, strict=True):
            close(one, other, 4 * ALLOWED[dtype])  # gradients pass more roundings than results
        for one, other in zip(found[: 1 + residual], expected, strict=False):
            close(one, other)
        if dtype in EXACT and dtype != torch.float32:  # equal but where the mean, summed in another order, tips a rounding
            assert (found[0] == expected[0]).float().mean() > 0.97
        if residual and dtype in EXACT:
            assert torch.equal(found[1], expected[1])

    @quick
    @given(tokens=st.integers(0, 9), heads=st.integers(1, 5), width=st.integers(1, 40), apart=st.integers(0, 3), seed=st.integers(0, 99))
    def test_strided_heads(self, tokens: int, heads: int, width: int, apart: int, seed: int) -> None:
        """Views of a wider tensor, as heads of a fused projection are; rows that do not fill the last program."""
        whole = random(tokens, (heads + apart) * width, seed=seed)
        view = whole[:, apart * width :].unflatten(-1, (heads, width))
        weight = random(width, seed=seed + 1)
        other = random(tokens, heads, width, seed=seed + 2)
        close(rms_norm(view, weight, 1e-6), rms_norm_reference(view, weight, 1e-6))
        for found, expected in zip(rms_norm(view, weight, 1e-6, other), rms_norm_reference(view, weight, 1e-6, other), strict=True):
            close(found, expected)
        for found, expected in zip(
            gradients(lambda x, w: rms_norm(x.unflatten(-1, (heads, width))[:, :1], w, 1e-6), [whole[:, : heads * width], weight]),
            gradients(
                lambda x, w: rms_norm_reference(x.unflatten(-1, (heads, width))[:, :1], w, 1e-6), [whole[:, : heads * width], weight]
            ),
            strict=True,
        ):
            close(found, expected, 1e-5)

    def test_a_row_does_not_depend_on_the_batch(self) -> None:
        x, weight = random(11, 48), random(48, seed=1)
        assert torch.equal(rms_norm(x, weight, 1e-6)[4:5], rms_norm(x[4:5], weight, 1e-6))

    def test_weight_gradient_is_the_same_every_time_over_many_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(norm_file, "PROGRAMS", 2)
        inputs = [random(300, 64), random(64, seed=1)]
        once, again = (gradients(lambda x, w: rms_norm(x, w, 1e-6), inputs) for _ in range(2))
        expected = gradients(lambda x, w: rms_norm_reference(x, w, 1e-6), [tensor.double() for tensor in inputs])
        assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
        for one, other in zip(once, expected, strict=True):
            close(one, other.float(), 1e-5)

    def test_gradients_that_are_not_asked_for(self) -> None:
        x, weight, other = random(3, 16), random(16, seed=1), random(3, 16, seed=2)
        frozen = x.clone().requires_grad_()
        rms_norm(frozen, weight, 1e-6).sum().backward()
        expected = x.clone().requires_grad_()
        rms_norm_reference(expected, weight, 1e-6).sum().backward()
        close(frozen.grad, expected.grad, 1e-5)
        summed = x.clone().requires_grad_()
        rms_norm(summed, weight, 1e-6, other)[1].sum().backward()  # only the sum is used
        assert torch.equal(summed.grad, torch.ones_like(x))
        normed, total = rms_norm(summed, weight, 1e-6, other)
        assert normed.requires_grad and total.requires_grad
        with torch.no_grad():
            assert not rms_norm(summed, weight, 1e-6).requires_grad


@pytest.mark.kernels
class TestRotary:
    @pytest.mark.parametrize("dtype", EXACT)
    def test_forward_and_backward_to_the_bit(self, dtype: torch.dtype) -> None:
        """Ten heads of odd half width: neither fills its block."""
        q, k, angles = random(3, 10, 22, dtype=dtype), random(3, 2, 22, dtype=dtype, seed=1), random(3, 22, seed=2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = gradients(lambda q, k: rotary(q, k, cos, sin), [q, k])
        expected = gradients(lambda q, k: rotary_reference(q, k, cos, sin), [q, k])
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    @quick
    @given(tokens=st.integers(0, 4), heads=st.integers(1, 9), key_heads=st.integers(1, 9), half=st.integers(1, 20), seed=st.integers(0, 99))
    def test_views_of_a_fused_projection(self, tokens: int, heads: int, key_heads: int, half: int, seed: int) -> None:
        whole = random(tokens, (heads + 2 * key_heads) * 2 * half, seed=seed)
        angles = random(tokens, 2 * half, seed=seed + 1)

        def run(op: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
            def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                q, k, _ = x.unflatten(-1, (-1, 2 * half)).split([heads, key_heads, key_heads], dim=1)
                return op(q, k, angles.cos(), angles.sin())

            return gradients(split, [whole])

        found, expected = run(rotary), run(rotary_reference)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert all(states.is_contiguous() for states in found[:2])

    def test_gradients_that_lie_transposed(self) -> None:
        q, k, angles = random(4, 3, 8), random(4, 1, 8, seed=1), random(4, 8, seed=2)
        turned = lambda op: lambda q, k: tuple(x.permute(2, 1, 0).contiguous() for x in op(q, k, angles.cos(), angles.sin()))  # noqa: E731
        for one, other in zip(gradients(turned(rotary), [q, k]), gradients(turned(rotary_reference), [q, k]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.kernels
class TestGated:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("activation", gated_file.ACTIVATIONS)
    def test_forward_and_backward(self, dtype: torch.dtype, activation: str) -> None:
        both = 3 * random(5, 2 * 33, dtype=dtype)
        found = gradients(lambda x: gated(x, activation), [both])
        expected = gradients(lambda x: gated_reference(x, activation), [both])
        for one, other in zip(found, expected, strict=True):
            close(one, other)
            if activation == "silu" and dtype in EXACT and dtype != torch.float32:  # rounding takes away what the exponentials differ by
                assert (one == other).float().mean() > 0.99

    @quick
    @given(tokens=st.integers(0, 4), width=st.sampled_from([1, 7, 1024, 1025]), seed=st.integers(0, 99))
    def test_apart_and_together(self, tokens: int, width: int, seed: int) -> None:
        both = random(1, tokens, 2 * width, seed=seed)
        close(gated(both), gated_reference(both))
        gate, up = both.chunk(2, dim=-1)
        assert torch.equal(gated(gate, up=up), gated(both))
        apart = gradients(lambda gate, up: gated(gate, up=up), [gate.contiguous(), up.contiguous()])
        together = gradients(gated, [both])
        assert torch.equal(torch.cat(apart[1:], dim=-1), together[1])

    def test_large_numbers(self) -> None:
        gate = torch.tensor([[-1e4, -100.0, -80.0, 0.0, 80.0, 100.0, 1e4]], device=DEVICE)
        for activation in gated_file.ACTIVATIONS:
            found = gradients(lambda x, activation=activation: gated(x, activation), [torch.cat([gate, torch.ones_like(gate)], -1)])
            expected = gradients(
                lambda x, activation=activation: gated_reference(x, activation), [torch.cat([gate, torch.ones_like(gate)], -1)]
            )
            for one, other in zip(found, expected, strict=True):
                close(one, other)


@pytest.mark.gpu
def test_in_a_captured_graph() -> None:
    x, other, weight, angles = (
        random(*shape, dtype=torch.bfloat16, seed=seed) for seed, shape in enumerate([(5, 64)] * 2 + [(64,), (5, 16)])
    )
    run = lambda: (*rms_norm(x, weight, 1e-6, other), gated(x), *rotary(x.view(5, 4, 16), other.view(5, 4, 16), angles, angles))  # noqa: E731
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(random(5, 64, dtype=torch.bfloat16, seed=9))
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(captured, run(), strict=True))


# ---- where kernels cannot run ------------------------------------------------------------------------------------------------------


@pytest.mark.kernels
def test_float64_runs_the_reference() -> None:
    """In float32 the last digits would be gone."""
    x, weight, angles = random(3, 16).double(), random(16, seed=1).double(), random(3, 16, seed=2).double()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    assert torch.equal(gated(x), gated_reference(x)) and torch.equal(gated(x, up=x), gated_reference(torch.cat([x, x], -1)))
    assert torch.equal(rotary(x[:, None], x[:, None], angles, angles)[0], rotary_reference(x[:, None], x[:, None], angles, angles)[0])
