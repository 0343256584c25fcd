"""Log-probs and entropies of tokens from hidden states and the output embedding, and their gradients, without the logits of a micro-batch.

Enters: hidden states [R, width], weight [vocabulary, width], perhaps a bias, target ids [R], and how products become logits. Leaves: the
log-prob of each target and, if requested, the entropy of each row, in float32 (float64 when the hidden states are).

Guaranteed:
- products are added up in float32 or better and never rounded before the softmax; only their gradient is rounded to the type of the hidden
  states, once;
- no more rows than `Rows` allows exist at a time, forward and backward;
- the gradient of the weight is added to its float32 accumulator (`main_grad`), inside the matrix product, where the weight has one;
- entropy "value" computes and saves nothing for a backward pass, "none" does not compute it;
- where several processes hold some rows of the weight each (`VocabularyPart`), logits are never gathered: two collectives of one to three
  numbers per row join what each has read of its own. Every process gets the same results, and its part of the hidden states' gradient.

Cost on CUDA: cuBLAS computes all products, one in the forward pass and three in the backward pass, which computes the logits again (unless
`keep`). Beside the products each logit costs one read of its 4 bytes forward (`_read_kernel`), and backward one read and one write of the
rounded gradient (`_gradient_kernel`). Each product that adds to the weight's gradient reads and writes the whole accumulator, so it runs on
as many rows as memory allows (`Rows.gradient`); logits take twice the bytes and are computed in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.footprint import Entropy, Rows
from fulltilt.kernels.dispatch import FLOATS, jit, runs_triton, tl, triton
from fulltilt.kernels.linear import add_product

BLOCK = 2048  # numbers of a row that a program holds at a time: 8 for each thread of 8 warps, two loads of 16 bytes


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """The rows of the output embedding that this process holds, if the vocabulary is divided (parallel/tensor.py)."""

    start: int  # the token of its first row
    vocabulary: int  # tokens of all parts together
    each: int  # rows of every part except the last, which may have fewer
    sum: Callable[[torch.Tensor], None]  # over all parts, in place
    most: Callable[[torch.Tensor], None]  # maximum over all parts, in place
    gather: Callable[[torch.Tensor], torch.Tensor]  # gathers a tensor of the same shape from each part -> [parts, *shape], in their order
    # While a CUDA graph is captured, collectives are not counted; each call of the function that this context yields counts them once.
    counted_apart: Callable[[], AbstractContextManager[Callable[[], None]]]
    not_captured: str | None = None  # why no CUDA graph can hold these functions


@dataclass(frozen=True)
class Call:
    """Settings of one call. The softmax is of product * scale * sharpness, or cap * tanh(product * scale / cap) * sharpness."""

    sharpness: float  # 1 / temperature
    scale: float
    cap: float | None
    rows: Rows
    entropy: Entropy = "gradient"
    keep: bool = False  # keep the forward pass's products for the backward pass, which otherwise computes them again
    part: VocabularyPart | None = None  # None: the weight is whole


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Inputs of the backward pass, one number per row."""

    targets: torch.Tensor  # int64 [R]: rows of the weight; outside of it if another process has the token
    normaliser: torch.Tensor  # log of the softmax's sum [R]
    entropy: torch.Tensor | None  # [R], if its gradient is needed
    of_logprobs: torch.Tensor | None  # gradients of the results [R], if a loss uses them
    of_entropy: torch.Tensor | None

    def __getitem__(self, rows: slice) -> BackwardInputs:
        found = (self.entropy, self.of_logprobs, self.of_entropy)
        return BackwardInputs(self.targets[rows], self.normaliser[rows], *(None if given is None else given[rows] for given in found))


# ---- products ----------------------------------------------------------------------------------------------------------------------


def product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return hidden @ weight.T + bias, in float32 or better."""
    found = multiply(hidden, weight.t(), out)
    return found if bias is None else found.add_(bias)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return left @ right with a result in float32 or better."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right, out=out)
    if not left.is_cuda:
        return torch.mm(left.float(), right.float(), out=out)
    if out is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


class Gradients:
    """Gradients of hidden states, weight and bias, collected part by part from the gradient of their product."""

    def __init__(self, needed: tuple[bool, ...], hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        self._of_weight: torch.Tensor | None = getattr(weight, "main_grad", None) if needed[1] else None
        self._accumulated = self._of_weight is not None
        if needed[1] and not self._accumulated:
            self._of_weight = torch.zeros_like(weight, dtype=wide)
        self._of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, part: slice, of_product: torch.Tensor) -> None:
        """Add the gradient of a part. `of_product` has the type of the hidden states."""
        if self._of_hidden is not None:
            # In float32 first: the sum over a vocabulary is split among processors, and their parts must not be added in bfloat16.
            self._of_hidden[part] = multiply(of_product, self._weight)
        if self._of_weight is not None:
            add_product(self._of_weight, of_product.t(), self._hidden[part])
        if self._of_bias is not None:
            self._of_bias += of_product.sum(0, dtype=self._of_bias.dtype)

    def results(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients for autograd, without those that an accumulator already has."""
        of_weight = None if self._of_weight is None or self._accumulated else self._of_weight.to(self._weight.dtype)
        of_bias = None if self._of_bias is None or self._bias is None else self._of_bias.to(self._bias.dtype)
        return self._of_hidden, of_weight, of_bias


class LinearProduct(torch.autograd.Function):
    """hidden @ weight.T + bias in float32 or better. The weight's gradient is added to its accumulator as in the fused op."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.parameters = weight, bias  # the objects themselves: a saved tensor may be returned without its accumulator
        return product(hidden, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_product: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        gradients = Gradients(ctx.needs_input_grad, hidden, *ctx.parameters)
        gradients.add(slice(None), of_product.to(hidden.dtype))
        return gradients.results()


# ---- the op ------------------------------------------------------------------------------------------------------------------------


class TokenLogprobs(torch.autograd.Function):
    """Log-probs [R], and entropies [R] or None, as one op of autograd."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, normaliser = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        entropy = None if call.entropy == "none" else torch.empty_like(logprobs)
        given, targets = targets, targets if call.part is None else targets - call.part.start
        size = call.rows.gradient if call.keep else call.rows.forward
        space, kept = None if call.keep else wide_space(hidden, weight, size), []
        for part in parts(len(hidden), size):
            logits = wide_space(hidden[part], weight, size) if space is None else space[: part.stop - part.start]
            product(hidden[part], weight, bias, logits)
            read(logits, targets[part], call, logprobs[part], normaliser[part], None if entropy is None else entropy[part])
            if call.keep:
                kept.append(logits)
        if call.part is not None:
            logprobs, normaliser, entropy = join_parts(call.part, given, len(weight), logprobs, normaliser, entropy)
        if entropy is not None and call.entropy == "value":
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, targets, normaliser, entropy if call.entropy == "gradient" else None, *kept)
        ctx.parameters, ctx.call = (weight, bias), call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, normaliser, entropy, *kept = ctx.saved_tensors
        if of_logprobs is None and of_entropy is None:
            return (None,) * 5
        (weight, bias), call = ctx.parameters, ctx.call
        tokens = BackwardInputs(
            targets, normaliser, entropy, *(None if given is None else given.contiguous() for given in (of_logprobs, of_entropy))
        )
        gradients = Gradients(ctx.needs_input_grad, hidden, weight, bias)
        of_product = torch.empty(min(len(hidden), call.rows.gradient), len(weight), dtype=hidden.dtype, device=hidden.device)
        space = wide_space(hidden[:0] if kept else hidden, weight, call.rows.logits)
        for index, part in enumerate(parts(len(hidden), call.rows.gradient)):
            for piece in parts(part.stop - part.start, call.rows.logits):
                rows = slice(part.start + piece.start, part.start + piece.stop)
                logits = kept[index][piece] if kept else product(hidden[rows], weight, bias, space[: rows.stop - rows.start])
                turn(logits, tokens[rows], call, of_product[piece])
            gradients.add(part, of_product[: part.stop - part.start])
        return *gradients.results(), None, None


def wide_space(hidden: torch.Tensor, weight: torch.Tensor, most: int) -> torch.Tensor:
    """Allocate memory for the logits of the rows, at most `most` at a time."""
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.empty(min(len(hidden), most), len(weight), dtype=wide, device=hidden.device)


def parts(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def read(
    logits: torch.Tensor, targets: torch.Tensor, call: Call, logprobs: torch.Tensor, normaliser: torch.Tensor, entropy: torch.Tensor | None
) -> None:
    """Fill log-probs, normalisers and entropies of some rows from their products."""
    if logits.dtype not in FLOATS or not runs_triton(logits):
        return read_reference(logits, targets, call, logprobs, normaliser, entropy)
    assert logits.stride(1) == 1 and all(t.is_contiguous() for t in (targets, logprobs, normaliser, entropy) if t is not None)
    rows, vocabulary = logits.shape
    _read_kernel[(rows,)](
        logits, targets, logprobs, normaliser, logprobs if entropy is None else entropy, logits.stride(0), vocabulary, *factors(call),
        CAPPED=call.cap is not None, ENTROPY=entropy is not None, BLOCK=block_of(vocabulary), num_warps=8,
    )  # fmt: skip


def turn(logits: torch.Tensor, tokens: BackwardInputs, call: Call, out: torch.Tensor) -> None:
    """Fill `out` with the gradient of some rows' products, in the type of the hidden states."""
    if logits.dtype not in FLOATS or not runs_triton(logits):
        out.copy_(gradient_reference(logits, tokens, call))
        return
    numbers = (tokens.entropy, tokens.of_logprobs, tokens.of_entropy)
    assert logits.stride(1) == out.stride(1) == 1
    assert all(t.is_contiguous() for t in (tokens.targets, tokens.normaliser, *numbers) if t is not None)
    rows, vocabulary = logits.shape
    block = block_of(vocabulary)
    blocks = triton.cdiv(vocabulary, block)
    _gradient_kernel[(rows * blocks,)](
        logits, tokens.targets, tokens.normaliser, *(tokens.normaliser if given is None else given for given in numbers), out,
        logits.stride(0), out.stride(0), vocabulary, blocks, *factors(call), CAPPED=call.cap is not None,
        LOGPROBS=tokens.of_logprobs is not None, ENTROPY=tokens.of_entropy is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip


def factors(call: Call) -> tuple[float, float]:
    """Return the factors on the product, and on the result of tanh."""
    return (call.scale * call.sharpness, 1.0) if call.cap is None else (call.scale / call.cap, call.cap * call.sharpness)


def block_of(vocabulary: int) -> int:
    return min(BLOCK, max(16, triton.next_power_of_2(vocabulary)))


# ---- a vocabulary in parts ---------------------------------------------------------------------------------------------------------


def join_parts(
    part: VocabularyPart, targets: torch.Tensor, rows: int, logprobs: torch.Tensor, normaliser: torch.Tensor, entropy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log-probs, normalisers and entropies over the whole vocabulary, from those over each part's own `rows` tokens.

    With e^n the sum of a part's exponentials, m the largest n and W = sum e^(n - m): a target's log-prob is l + (n - m) - log W, where l is
    the log-prob within its part, and the entropy is sum e^(n - m) (h - (n - m)) / W + log W, where h is the entropy of each part. Both do
    not depend on m, which needs no gradient. An entropy without a gradient gets none here."""
    top = normaliser.detach().clone()
    part.most(top)
    below = normaliser - top
    mass = below.exp()
    _, here = within(targets - part.start, rows)
    numbers = [mass, torch.where(here, logprobs + below, 0.0)]
    if entropy is not None:
        numbers.append(mass * (entropy - below) if entropy.requires_grad else mass.detach() * (entropy - below.detach()))
    sums = _Sum.apply(torch.stack(numbers), part)
    log_total = sums[0].log()
    _, known = within(targets, part.vocabulary)
    found = torch.where(known, sums[1] - log_total, float("nan"))
    if entropy is None:
        return found, top + log_total, None
    total, log_of_total, moment = (
        (sums[0], log_total, sums[2]) if entropy.requires_grad else (sums.detach()[0], log_total.detach(), sums.detach()[2])
    )
    return found, top + log_total, moment / total + log_of_total


def within(targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the targets as indices of `rows` rows, and which of them really are in that range."""
    return targets.clamp(0, rows - 1), (targets >= 0) & (targets < rows)


class _Sum(torch.autograd.Function):
    """Sums over all parts. All processes compute the same loss from the sum, so its gradient is the gradient of each part's number."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
        found = numbers.clone()
        part.sum(found)
        return found

    @staticmethod
    def backward(ctx: Any, of_sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return of_sums, None


# ---- references --------------------------------------------------------------------------------------------------------------------


def read_reference(
    logits: torch.Tensor, targets: torch.Tensor, call: Call, logprobs: torch.Tensor, normaliser: torch.Tensor, entropy: torch.Tensor | None
) -> None:
    values, _slope = bent(logits, call)
    normaliser.copy_(torch.logsumexp(values, dim=-1))
    chosen = targets if call.part is None else within(targets, logits.shape[1])[0]
    logprobs.copy_(values.gather(1, chosen[:, None])[:, 0] - normaliser)
    if entropy is not None:
        log_p = values.sub_(normaliser[:, None])
        entropy.copy_(-(log_p.exp().mul_(log_p)).sum(-1))


def gradient_reference(logits: torch.Tensor, tokens: BackwardInputs, call: Call) -> torch.Tensor:
    """Return the gradient of the products: d log p[target] / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""
    values, slope = bent(logits, call)
    log_p = values.sub_(tokens.normaliser[:, None])
    p = log_p.exp()
    if tokens.of_entropy is None or tokens.entropy is None:
        share = log_p.zero_()
    else:
        share = log_p.add_(tokens.entropy[:, None]).mul_(tokens.of_entropy[:, None])
    if tokens.of_logprobs is not None:
        share.add_(tokens.of_logprobs[:, None])
    gradient = p.mul_(share).neg_()
    if tokens.of_logprobs is not None:
        chosen, of_chosen = tokens.targets, tokens.of_logprobs
        if call.part is not None:
            chosen, here = within(chosen, logits.shape[1])
            of_chosen = of_chosen * here
        gradient[torch.arange(len(p), device=p.device), chosen] += of_chosen
    return gradient.mul_(slope)


def bent(logits: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the softmax's input as a new tensor, and its derivative by the product; tanh' = 1 - tanh^2."""
    inner, outer = factors(call)
    values = logits * inner
    if call.cap is None:
        return values, inner
    slope = values.tanh_().square().neg_().add_(1.0).mul_(inner * outer)
    return values.mul_(outer), slope


# ---- kernels -----------------------------------------------------------------------------------------------------------------------


@jit
def _tanh(x: tl.tensor) -> tl.tensor:
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)  # as in `sampling`; correct if the exponential is 0 or overflows


@jit
def _read_kernel(
    logits: tl.tensor, targets: tl.tensor, logprobs: tl.tensor, normaliser: tl.tensor, entropy: tl.tensor, stride: tl.tensor,
    vocabulary: tl.tensor, inner: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Read one row once in one program. Each lane keeps for its own columns the largest value m, the mass sum e^(x - m), and the moment sum
    e^(x - m) (x - m). Lanes are combined only at the end, so that no step waits for another thread."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    # Finite instead of -inf: so an empty lane's differences are numbers, and its mass vanishes beside any real one.
    largest = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + lane < vocabulary
        value = tl.load(logits + start + lane, mask=inside, other=0.0).to(tl.float32) * inner
        if CAPPED:
            value = _tanh(value) * outer
        value = tl.where(inside, value, -1e30)
        # Of the two exponentials of a running softmax, e^(old m - new m) and e^(x - new m), one is always 1.
        rise = value - largest
        small = tl.exp(-tl.abs(rise))
        fade = tl.where(rise > 0, small, 1.0)
        share = tl.where(rise > 0, 1.0, small)
        if ENTROPY:
            moment = fade * (moment - mass * tl.maximum(rise, 0.0)) + share * tl.minimum(rise, 0.0)
        mass = fade * mass + share
        largest = tl.maximum(largest, value)
    top = tl.max(largest, axis=0)
    fade = tl.exp(largest - top)
    total = tl.sum(fade * mass, axis=0)
    log_total = tl.log(total)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    chosen = tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32) * inner
    if CAPPED:
        chosen = _tanh(chosen) * outer
    tl.store(logprobs + row, chosen - top - log_total)
    tl.store(normaliser + row, top + log_total)
    if ENTROPY:
        tl.store(entropy + row, log_total - tl.sum(fade * (moment + mass * (largest - top)), axis=0) / total)


@jit
def _gradient_kernel(
    logits: tl.tensor, targets: tl.tensor, normaliser: tl.tensor, entropy: tl.tensor, of_logprobs: tl.tensor, of_entropy: tl.tensor,
    out: tl.tensor, stride: tl.tensor, out_stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor, inner: tl.tensor,
    outer: tl.tensor, CAPPED: tl.constexpr, LOGPROBS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one block of one row in one program. Programs of a row are neighbours."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    value = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * inner
    slope = inner
    if CAPPED:
        bend = _tanh(value)
        value = bend * outer
        slope = (1.0 - bend * bend) * (inner * outer)
    log_p = value - tl.load(normaliser + row)
    p = tl.exp(log_p)
    gradient = tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        gradient -= tl.load(of_entropy + row) * p * (log_p + tl.load(entropy + row))
    if LOGPROBS:
        of_target = tl.load(of_logprobs + row)
        gradient += of_target * (tl.where(column == tl.load(targets + row), 1.0, 0.0) - p)
    tl.store(out + row * out_stride + column, (gradient * slope).to(out.dtype.element_ty), mask=inside)
