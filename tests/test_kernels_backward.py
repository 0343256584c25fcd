"""The backward pass of packed attention against autograd's on the reference, in Triton's interpreter or compiled, and beside flash's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from variants import sample_cases

import fulltilt.model.attention as attention
from fulltilt.kernels.packed_backward import TILE, packed_backward, parts_of
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model.attention import Packed, Scoring, flash, packed
from fulltilt.model.load import load_model
from fulltilt.model.verify import run_packed
from fulltilt.schema import ModelConfig
from fulltilt.shape import Recompute

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], *, scale: float, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithms of sums of exponentials [heads, T], document by document, in float32 or better; for autograd."""
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    outputs, norms, first = [], [], 0
    for length in lengths:
        mine = slice(first, first + length)
        scores = torch.einsum("qhw,khw->hqk", q[mine].to(wide), k[mine].to(wide).repeat_interleave(group, 1)) * scale
        gap = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        scores = scores.masked_fill(~((gap >= 0) if window is None else (gap >= 0) & (gap < window)), -torch.inf)
        outputs.append(torch.einsum("hqk,khw->qhw", scores.softmax(-1), v[mine].to(wide).repeat_interleave(group, 1)))
        norms.append(scores.logsumexp(-1))
        first += length
    return torch.cat(outputs).to(q.dtype), torch.cat(norms, 1)


def documents(lengths: Sequence[int], heads: int, key_heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as views of one projection, and the gradient of the output."""
    random = torch.Generator().manual_seed(3)
    states = torch.randn(sum(lengths), heads + 2 * key_heads, width, generator=random).to(DEVICE, dtype)
    of_out = torch.randn(sum(lengths), heads, width, generator=random).to(DEVICE, dtype)
    return *states.split((heads, key_heads, key_heads), dim=1), of_out


def run(states: Sequence[torch.Tensor], lengths: Sequence[int], **scoring: Any) -> tuple[torch.Tensor, ...]:
    return packed_backward(*states, torch.from_numpy(parts_of(lengths)).to(DEVICE), **scoring)


@pytest.mark.kernels
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    group=st.sampled_from([1, 3]),
    width=st.sampled_from([16, 40]),
    window=st.sampled_from([None, 1, 23, 64, 65, 500]),
)
def test_gradients_equal_those_of_the_reference(lengths, group, width, window) -> None:
    q, k, v, of_out = documents(lengths, 2 * group, 2, width, torch.float32)
    leaves = [states.clone().requires_grad_() for states in (q, k, v)]
    scoring = {"scale": width**-0.5, "window": window}
    out, norms = packed_attention_reference(*leaves, lengths, **scoring)
    wanted = torch.autograd.grad(out, leaves, of_out)
    found = run((of_out, q, k, v, out.detach(), norms.detach().contiguous()), lengths, **scoring)
    for one, other in zip(found, wanted, strict=True):
        assert one.is_contiguous() and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums of some hundred products in another order


@pytest.mark.kernels
def test_no_other_document_is_used() -> None:
    """Not even if it is NaN."""
    lengths, before = [70, 5, 90], 75
    q, k, v, of_out = documents(lengths, 2, 1, 16, torch.float32)
    out, norms = packed_attention_reference(q, k, v, lengths, scale=0.25)
    given = (of_out, q, k, v, out)
    found = run((*given, norms.contiguous()), lengths, scale=0.25)
    spoiled = [tensor.clone() for tensor in given]
    for tensor in spoiled:
        tensor[before:] = torch.nan
    norms[:, before:] = torch.nan
    again = run((*spoiled, norms.contiguous()), lengths, scale=0.25)
    for one, other in zip(found, again, strict=True):
        assert one[:before].equal(other[:before]) and other[before:].isnan().any()


def test_parts_with_the_most_to_read_come_first() -> None:
    of_keys, of_queries = parts_of([5, 0, 2 * TILE + 1])
    assert of_keys.tolist() == [[5, 0, 129, 64], [5, 64, 129, 64], [0, 0, 5, 0], [5, 128, 129, 64]]
    assert of_queries.tolist() == [[5, 128, 129, 64], [5, 64, 129, 64], [0, 0, 5, 0], [5, 0, 129, 64]]
    assert parts_of([]).shape == (2, 0, 4) and parts_of([0]).shape == (2, 0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(14, 2, 64), (12, 2, 128), (28, 4, 128), (8, 8, 64), (16, 4, 96), (8, 2, 256)])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_as_near_to_the_truth_as_flash_is(heads: int, key_heads: int, width: int, window: int | None, dtype: torch.dtype) -> None:
    """Through the one attention function; the output has flash's bits, and gradients their own bits again. Wider heads are flash's own."""
    lengths = [1, 1024, 700, 0, 2000, 130]
    *views, of_out = documents(lengths, heads, key_heads, width, dtype)
    leaves = [states.clone().requires_grad_() for states in views]
    exact = [states.double().requires_grad_() for states in views]
    wide, _ = packed_attention_reference(*exact, lengths, scale=width**-0.5, window=window)
    truth = torch.autograd.grad(wide, exact, of_out.double())

    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    theirs = flash(*leaves, bounds, bounds, max(lengths), max(lengths), Scoring(width**-0.5, window))[0]
    context = Packed.of(bounds.cpu().numpy(), DEVICE)
    ours = packed(*leaves, context, Scoring(width**-0.5, window))
    assert ours.equal(theirs)
    of_theirs = torch.autograd.grad(theirs, leaves, of_out)
    of_ours, again = (torch.autograd.grad(ours, leaves, of_out, retain_graph=True) for _ in range(2))
    for one, same, other, right in zip(of_ours, again, of_theirs, truth, strict=True):
        assert one.equal(same) or width > 128
        off, flash_off = ((found.double() - right).norm() / right.norm() for found in (one, other))
        assert off < 1.1 * flash_off + 1e-4, f"{off:.2e} off, flash {flash_off:.2e}"


# --- the operations of torch around it, which a GPU runs, with the reference in place of flash attention


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, norms = packed_attention_reference(q, k, v, bounds.diff().tolist(), scale=others[-1].scale, window=others[-1].window)
        return out.contiguous(), norms.float().contiguous()

    monkeypatch.setattr(attention, "flash", flash)
    monkeypatch.setattr(attention, "flash_runs", lambda q, scoring: scoring.softcap is None)


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU runs the operations themselves in test_gpu.py")
def test_the_operation_keeps_torchs_rules(as_on_a_gpu: None) -> None:
    lengths = [5, 70]
    q, k, v, of_out = (states.contiguous() for states in documents(lengths, 4, 2, 16, torch.float32))
    bounds, parts = torch.tensor([0, 5, 75], dtype=torch.int32), torch.from_numpy(parts_of(lengths))
    leaves = [states.requires_grad_() for states in (q, k, v)]
    rules = ("test_schema", "test_autograd_registration")  # it is never traced: compiled layers call attention between their parts
    torch.library.opcheck(attention.packed_flash, (*leaves, bounds, parts, 70, 0.25, None), test_utils=rules)
    out, norms = attention.packed_flash(*leaves, bounds, parts, 70, 0.25, None)
    assert not norms.requires_grad
    saved = [states.detach() for states in (of_out, q, k, v, out, norms)]
    wanted = packed_backward(*saved, parts, scale=0.25)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, of_out), wanted))


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU runs the operations themselves in test_gpu.py")
@pytest.mark.parametrize("kind", sample_cases(["none", "selective", "full"], "selective"))
def test_a_model_learns_through_the_operations(kind: Any, as_on_a_gpu: None, model_folders: Any) -> None:
    """As it does through torch's attention on the CPU, whatever is recomputed."""
    model = load_model(ModelConfig(path=str(model_folders("qwen2")), dtype="float32"), torch.device("cpu"))
    texts = [
        torch.randint(0, models.VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).numpy() for length in (3, 80, 65)
    ]

    def gradients() -> torch.Tensor:
        model.zero_grad()
        sum(states.square().sum() for states in run_packed(model, texts)[0]).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "flash_runs", lambda *_: False)
        wanted = gradients()
    apply_recompute(model, Recompute(kind))
    assert (gradients() - wanted).abs().max() < 1e-4 * wanted.abs().max()
