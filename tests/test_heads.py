"""The head: every option gives the same numbers and gradients, in the bytes that `head_bytes` says; kernels against their references."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from itertools import product as every
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import sample_cases

from fulltilt.footprint import CUDA_BYTES, HeadOptions, Rows, head_bytes, rows_at_once
from fulltilt.kernels import dispatch
from fulltilt.kernels import token_logprobs as kernels
from fulltilt.kernels.token_logprobs import BackwardInputs, Call
from fulltilt.model.heads import Head, LogitShape, plain_entropy, token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"
SHAPES = [LogitShape(), LogitShape(scale=0.4), LogitShape(scale=2.0, cap=1.5)]
OPTIONS = [HeadOptions(*given) for given in every((True, False), (None, 5), (True, False))]
OPTIONS += [HeadOptions(recompute=False), HeadOptions(entropy_chunk=5, recompute=False)]
ROWS, VOCABULARY, WIDTH = 23, 50, 6
rows_of_a_chunk = pytest.mark.parametrize("numbers", [4 * VOCABULARY, 1 << 26], ids=["chunks of 4", "one chunk"])


def name(value: Any) -> str | None:
    if isinstance(value, HeadOptions):
        kept = "keep" if not value.entropy_recompute else "recompute" if value.recompute else "keep all"
        return f"{'fused' if value.fused else 'plain'}, chunk {value.entropy_chunk}, {kept}"
    return str(value) if isinstance(value, LogitShape) else None


def inputs(dtype: torch.dtype = torch.float64, *, biased: bool = True, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, bias or not, targets."""
    source = torch.Generator().manual_seed(seed)
    sizes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if biased else []))
    tensors = [torch.randn(*size, generator=source, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]
    return *tensors, torch.randint(0, VOCABULARY, (ROWS,), generator=source)


def textbook(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, shape: LogitShape, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.t() + (0 if bias is None else bias)) * shape.scale
    logits = logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
    """Each row weighs otherwise, in both terms."""
    place = torch.arange(len(logprobs), dtype=logprobs.dtype, device=logprobs.device)
    return (logprobs * (place + 0.5).sin()).sum() + (0 if entropy is None else (entropy * (place * 1.7).cos()).sum())


def near(found: torch.Tensor | None, expected: torch.Tensor, allowed: float = 1e-9) -> None:
    assert found is not None and found.shape == expected.shape and found.dtype == expected.dtype
    assert float((found.detach() - expected.detach()).norm()) <= allowed * float(expected.detach().norm())


# ---- the same numbers, whatever the options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("temperature", sample_cases([1.0, 0.7], 0.7))
@rows_of_a_chunk
def test_values_and_gradients_are_the_textbooks(
    numbers: int, temperature: float, biased: bool, shape: LogitShape, options: HeadOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", numbers)
    *tensors, targets = inputs(biased=biased)
    hidden, weight, bias = tensors if biased else (*tensors, None)
    expected = textbook(hidden, weight, bias, targets, shape, temperature)
    by_all = torch.autograd.grad(loss(*expected), tensors, retain_graph=True)
    by_logprobs = torch.autograd.grad(loss(expected[0], None), tensors)
    for entropy in ("gradient", "value", "none"):
        found = token_logprobs(hidden, Head(weight, bias, shape), targets, temperature, options, entropy=entropy)
        near(found[0], expected[0])
        if entropy == "none":
            assert found[1] is None
        else:
            near(found[1], expected[1])
            assert found[1].requires_grad is (entropy == "gradient")
        gradients = torch.autograd.grad(loss(found[0], found[1] if entropy == "gradient" else None), tensors)
        for ours, theirs in zip(gradients, by_all if entropy == "gradient" else by_logprobs, strict=True):
            near(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("shape", sample_cases(SHAPES, SHAPES[2]), ids=name)
def test_gradients_are_those_of_the_values(shape: LogitShape, options: HeadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", 22)
    torch.manual_seed(0)
    tensors = tuple(torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 4), (11, 4), (11,)))
    targets = torch.randint(0, 11, (5,))

    def head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden, Head(weight, bias, shape), targets, 0.7, options)

    assert torch.autograd.gradcheck(head, tensors, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_a_tied_weight_gets_both_gradients(options: HeadOptions) -> None:
    """The embedding's through autograd, the head's from the op; in float64 both come back, in bfloat16 the head's is accumulated."""
    found = []
    for head in (
        lambda *given: token_logprobs(*given, options),
        lambda h, head, t, _: textbook(h, head.weight, None, t, LogitShape(), 0.7),
    ):
        weight = torch.nn.Parameter(inputs()[1].detach().clone())
        ids = torch.arange(ROWS) % VOCABULARY
        hidden = torch.nn.functional.embedding(ids, weight).tanh()
        loss(*head(hidden, Head(weight, None), ids.flip(0), 0.7)).backward()
        found.append(weight.grad)
    near(*found)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_gradients_of_one_result_alone(options: HeadOptions) -> None:
    *tensors, targets = inputs()
    for place in (0, 1):
        found = torch.autograd.grad(token_logprobs(tensors[0], Head(*tensors[1:]), targets, 0.7, options)[place].sum(), tensors)
        expected = torch.autograd.grad(textbook(*tensors, targets, LogitShape(), 0.7)[place].sum(), tensors)
        for ours, theirs in zip(found, expected, strict=True):
            near(ours, theirs)


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_no_rows_and_frozen_weights(options: HeadOptions) -> None:
    hidden, weight, bias, targets = inputs()
    logprobs, entropy = token_logprobs(hidden[:0], Head(weight, bias), targets[:0], 1.0, options)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert float(weight.grad.abs().sum()) == 0
    frozen = weight.detach()
    loss(*token_logprobs(hidden, Head(frozen, None), targets, 1.0, options)).backward()
    near(hidden.grad, torch.autograd.grad(loss(*textbook(hidden, frozen, None, targets, LogitShape(), 1.0)), hidden)[0])


# ---- where the weight's gradient goes ----------------------------------------------------------------------------------------------


@contextmanager
def saved_elsewhere() -> Iterator[None]:
    """As with activations that go to the host: what is saved comes back as another tensor."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        yield


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@pytest.mark.parametrize("hooks", [False, True])
def test_the_accumulator_gets_the_weights_gradient(hooks: bool, options: HeadOptions) -> None:
    hidden, weight, targets = inputs(torch.bfloat16, biased=False)
    weight.main_grad = torch.ones(VOCABULARY, WIDTH)
    if hooks:
        with saved_elsewhere():
            total = loss(*token_logprobs(hidden, Head(weight, None), targets, 0.7, options))
    else:
        total = loss(*token_logprobs(hidden, Head(weight, None), targets, 0.7, options))
    total.backward()
    assert weight.grad is None and hidden.grad.dtype == torch.bfloat16
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = torch.autograd.grad(loss(*textbook(*exact, None, targets, LogitShape(), 0.7)), exact)
    # One rounding to bfloat16 of what each gradient is summed from, and one of the hidden states' own: 2^-9 each, relative.
    near(weight.main_grad.double() - 1, expected[1], 2**-8)
    near(hidden.grad.double(), expected[0], 2**-8)


# ---- bytes -------------------------------------------------------------------------------------------------------------------------


class Created(TorchDispatchMode):
    """Largest tensor that an operation makes, in bytes, gradients of weight and hidden states aside; and how often each one ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.__name__] = self.calls.get(func.__name__, 0) + 1
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given and made.shape[-1:] != (WIDTH,):
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def saved_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """What autograd holds after a forward pass, each storage once."""
    storages: dict[int, int] = {}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    return sum(storages.values()), result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
@rows_of_a_chunk
def test_the_largest_temporary_is_as_the_formula_says(
    numbers: int, options: HeadOptions, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", numbers)
    hidden, weight, targets = inputs(dtype, biased=False)
    expected = head_bytes(ROWS, VOCABULARY, WIDTH, options, itemsize=dtype.itemsize, device="cpu")
    with Created() as created:
        loss(*token_logprobs(hidden, Head(weight, None), targets, 1.0, options)).backward()
    assert created.largest == expected.largest
    whole = ROWS * VOCABULARY * dtype.itemsize
    assert (expected.largest < whole) is (options.fused and (options.entropy_chunk is not None or numbers < ROWS * VOCABULARY))


@pytest.mark.parametrize("chunk", [None, 5, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_the_entropys_temporaries_are_of_its_chunk(fused: bool, chunk: int | None) -> None:
    options = HeadOptions(fused, chunk)
    hidden, weight, targets = inputs(biased=False)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    with Created() as created:
        if fused:
            token_logprobs(hidden, Head(weight, None), targets, 1.0, options)
        else:
            plain_entropy(logits, options)
    assert created.largest == (chunk or ROWS) * VOCABULARY * 8


@pytest.mark.parametrize("entropy", ["gradient", "value"])
@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_peak_is_as_the_formula_says(options: HeadOptions, entropy: Any, tmp_path: Path) -> None:
    """By torch's record of its allocations. Wide logits, so that gradients and numbers of rows are small beside them."""
    rows, vocabulary, width = 16, 4096, 2
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, of_rows = token_logprobs(hidden, Head(weight, None), torch.zeros(rows, dtype=torch.int64), 1.0, options, entropy=entropy)
        loss(logprobs, of_rows if entropy == "gradient" else None).backward()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event.get("name") == "[memory]"]
    peak = max(accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))
    expected = head_bytes(rows, vocabulary, width, options, itemsize=4, device="cpu", entropy=entropy).peak
    assert expected <= peak <= expected + 3 * weight.nbytes


@pytest.mark.parametrize("options", OPTIONS, ids=name)
@rows_of_a_chunk
def test_bytes_saved_for_the_backward_pass(numbers: int, options: HeadOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", numbers)
    hidden, weight, targets = inputs(biased=False)
    least, _alive = saved_bytes(
        lambda: token_logprobs(hidden, Head(weight, None), targets, 1.0, replace(options, recompute=True), entropy="none")
    )
    saved = {}
    for entropy in ("gradient", "value", "none"):
        saved[entropy], _alive = saved_bytes(
            lambda entropy=entropy: token_logprobs(hidden, Head(weight, None), targets, 1.0, options, entropy=entropy)
        )
    assert saved["value"] == saved["none"]
    for entropy in ("gradient", "value"):
        of_entropy = entropy == "gradient" and not options.entropy_recompute
        whole = of_entropy or (options.fused and not options.recompute)  # logits or softmax of all rows; and a number of each row
        number = entropy == "gradient" and (options.fused or of_entropy)
        assert saved[entropy] - least == ROWS * 8 * (VOCABULARY * whole + number)


@pytest.mark.parametrize("entropy", ["gradient", "value", "none"])
def test_what_is_kept_is_not_made_again(entropy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 make 6 products of each kind: logits, those of the backward pass, gradient of the hidden states (mm), of the weight."""
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", 4 * VOCABULARY)
    hidden, weight, targets = inputs(biased=False)
    counts = []
    for options in (HeadOptions(), HeadOptions(entropy_recompute=False), HeadOptions(recompute=False)):
        with Created() as created:
            token_logprobs(hidden, Head(weight, None), targets, 1.0, options, entropy=entropy)[0].sum().backward()
        counts.append((sum(count for name, count in created.calls.items() if name.startswith("mm.")), created.calls["addmm_.default"]))
    assert counts == [(18, 6), (12 if entropy == "gradient" else 18, 6), (12, 6)]


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", 4 * VOCABULARY)
    hidden, weight, targets = inputs(biased=False)
    with torch.no_grad(), Created() as created:
        token_logprobs(hidden, Head(weight, None), targets, 1.0, HeadOptions(entropy_recompute=False, recompute=False))
    assert created.calls["empty.memory_format"] == 3 and created.calls["empty_like.default"] == 1  # one chunk's logits, and results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [97, 32_000, 50_257, 151_936, 262_144, 1 << 24])
def test_chunks_on_a_gpu(vocabulary: int, dtype: torch.dtype) -> None:
    for rows, chunk in every((0, 1, 300, 16_384, 65_536), (None, 100, 1_000)):
        size = rows_at_once(rows, vocabulary, HeadOptions(entropy_chunk=chunk), dtype.itemsize, "cuda", False)
        assert 1 <= size.logits <= size.gradient and size.forward >= 1
        assert max(size.forward, size.gradient) <= (chunk or 1 << 30)
        live = max(min(rows, size.forward) * 4, min(rows, size.logits) * 4 + min(rows, size.gradient) * dtype.itemsize) * vocabulary
        assert live <= CUDA_BYTES < 2**30
        assert head_bytes(rows, vocabulary, 64, HeadOptions(entropy_chunk=chunk), itemsize=dtype.itemsize).peak == live


def test_chunks_of_the_largest_batch_are_large() -> None:
    """What each product costs beside its arithmetic falls with the rows: 65,536 tokens of 151,936 entries."""
    assert rows_at_once(65_536, 151_936, HeadOptions(), 2, "cuda", False) == Rows(1536, 512, 2176)
    assert rows_at_once(18_700, 151_936, HeadOptions(), 2, "cuda", True) == Rows(1536, 512, 9472)
    assert rows_at_once(18_700, 151_936, HeadOptions(entropy_chunk=3000), 2, "cuda", True).gradient <= 3000


# ---- kernels -----------------------------------------------------------------------------------------------------------------------


def tokens_of(logits: torch.Tensor, call: Call, logprobs: bool = True, entropy: bool = True) -> BackwardInputs:
    rows, vocabulary = logits.shape
    source = torch.Generator().manual_seed(1)
    numbers = [torch.randn(rows, generator=source).to(logits.device) for _ in range(2)]
    targets = torch.randint(0, vocabulary, (rows,), generator=source).to(logits.device)
    normaliser, of_row = torch.empty_like(numbers[0]), torch.empty_like(numbers[0])
    kernels.read_reference(logits, targets, call, torch.empty_like(of_row), normaliser, of_row)
    return BackwardInputs(
        targets, normaliser, of_row if entropy else None, numbers[0] if logprobs else None, numbers[1] if entropy else None
    )


def call_of(shape: LogitShape, **more: Any) -> Call:
    return Call(1 / 0.7, shape.scale, shape.cap, Rows(4, 2, 3), **more)


@pytest.mark.kernels
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("vocabulary", sample_cases([1, 5, 50, kernels.BLOCK, 2 * kernels.BLOCK + 77], 5, 2 * kernels.BLOCK + 77))
class TestKernels:
    def test_read(self, vocabulary: int, shape: LogitShape) -> None:
        torch.manual_seed(vocabulary)
        # Rows of size 3; of size 30 and far from 0; of one likely entry; all equal.
        logits = torch.randn(4, vocabulary) * torch.tensor([3.0, 30.0, 1.0, 0.0])[:, None] + torch.tensor([0.0, 500.0, 0.0, -7.0])[:, None]
        logits[2, vocabulary // 2] += 25
        logits, call = logits.to(DEVICE), call_of(shape)
        targets = torch.tensor([0, vocabulary - 1, vocabulary // 2, vocabulary // 3], device=DEVICE)
        exact = [torch.empty(4, dtype=torch.float64, device=DEVICE) for _ in range(3)]
        kernels.read_reference(logits.double(), targets, call, *exact)
        for entropy in (True, False):
            found = [torch.full((4,), 9.0, device=DEVICE) for _ in range(3)]
            kernels.read(logits, targets, call, found[0], found[1], found[2] if entropy else None)
            for ours, theirs in zip(found[: 3 if entropy else 2], exact, strict=False):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=2e-4)  # at 700 a float32 is 3e-5 off
            assert entropy or float(found[2].min()) == 9.0

    @pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True)], ids=str)
    def test_gradient(self, terms: tuple[bool, bool], vocabulary: int, shape: LogitShape) -> None:
        torch.manual_seed(vocabulary)
        logits, call = (torch.randn(3, vocabulary) * 3).to(DEVICE), call_of(shape)
        tokens = tokens_of(logits, call, *terms)
        expected = kernels.gradient_reference(logits, tokens, call)
        for dtype, allowed in ((torch.float32, 1e-5), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)):  # the interpreter cuts off
            out = torch.empty(3, vocabulary + 3, dtype=dtype, device=DEVICE)[:, :vocabulary]  # rows need not be dense
            kernels.turn(logits, tokens, call, out)
            scale = max(0.1, float(expected.abs().max()))
            torch.testing.assert_close(out.float() / scale, expected / scale, rtol=0, atol=allowed)


@pytest.mark.kernels
def test_a_target_outside_the_vocabulary_shows() -> None:
    logits, call = torch.randn(3, 50, device=DEVICE), call_of(LogitShape())
    found = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    kernels.read(logits, torch.tensor([50, -100, 3], device=DEVICE), call, *found)
    assert found[0].isnan().tolist() == [True, True, False] and bool(torch.stack(found[1:]).isfinite().all())


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", sample_cases([torch.float32, torch.bfloat16], torch.bfloat16, long=[torch.float32]), ids=str)
@pytest.mark.parametrize("options", [options for options in OPTIONS if options.fused], ids=name)
def test_the_op_through_kernels(options: HeadOptions, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    hidden, weight, bias, targets = (tensor.detach().to(DEVICE) for tensor in given)
    tensors = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    shape = LogitShape(0.9, 4.0)
    found = token_logprobs(hidden, Head(weight, bias, shape), targets, 0.7, options)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = textbook(*exact, targets, shape, 0.7)
    for ours, theirs in zip(found, expected, strict=True):
        near(ours.double(), theirs, 3e-6)  # a GPU divides and takes exponentials to 2 units in the last place
    gradients = torch.autograd.grad(loss(*found), tensors)
    for ours, theirs in zip(gradients, torch.autograd.grad(loss(*expected), exact), strict=True):
        # bfloat16: roundings of 2^-9, which the interpreter makes by cutting off.
        near(ours.double(), theirs, 1e-5 if dtype == torch.float32 else 2**-6)


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.gpu
QWEN = {"0.5B": 896, "1.5B": 1536, "7B": 3584}


def large(rows: int, vocabulary: int, width: int) -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = torch.nn.Parameter((torch.randn(vocabulary, width, device="cuda") * 3 / width**0.5).bfloat16())
    weight.main_grad = torch.zeros(vocabulary, width, device="cuda")
    return hidden, weight, torch.randint(0, vocabulary, (rows,), device="cuda")


@gpu
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(cap=30.0)], ids=name)
@pytest.mark.parametrize(
    "options",
    [*OPTIONS[:1], HeadOptions(entropy_recompute=False), HeadOptions(recompute=False), HeadOptions(entropy_chunk=100), OPTIONS[4]],
    ids=name,
)
def test_bfloat16_against_float64(options: HeadOptions, shape: LogitShape) -> None:
    hidden, weight, targets = large(700, 30_001, 896)  # an odd vocabulary: rows of logits are not aligned
    found = token_logprobs(hidden, Head(weight, None, shape), targets, 0.7, options)
    loss(*found).backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = textbook(*exact, None, targets, shape, 0.7)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of 896 products in float32; logits of size 4 in bfloat16 would be off by 0.01.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-4)
    of_hidden, of_weight = torch.autograd.grad(loss(*expected), exact)
    near(hidden.grad.double(), of_hidden, 2**-7)  # two roundings of 2^-9
    near(weight.main_grad.double(), of_weight, 2**-7)
    assert weight.grad is None


@gpu
def test_the_accumulator_adds_up_on_cuda() -> None:
    hidden, weight, targets = large(600, 4096, 256)
    weight.main_grad.fill_(3.0)
    for _ in range(2):
        loss(*token_logprobs(hidden, Head(weight, None), targets, 1.0)).backward()
    twice = weight.main_grad - 3.0
    weight.main_grad.zero_()
    loss(*token_logprobs(hidden, Head(weight, None), targets, 1.0)).backward()
    near(twice, 2 * weight.main_grad, 1e-4)  # sums around 3 in float32


@gpu
@pytest.mark.parametrize("entropy", ["gradient", "none"])
def test_peak_beside_inputs_and_gradients_is_under_a_gibibyte(entropy: Any) -> None:
    rows, vocabulary, width = 65_536, 151_936, QWEN["0.5B"]
    hidden, weight, targets = large(rows, vocabulary, width)
    small = token_logprobs(hidden[:256], Head(weight, None), targets[:256], 1.0, entropy=entropy)[0]
    small.sum().backward()  # cuBLAS takes its workspace, kernels are compiled
    hidden.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = token_logprobs(hidden, Head(weight, None), targets, 1.0, entropy=entropy)
    loss(*found).backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes
    print("head, bytes beside inputs and gradients:", extra, "by formula:", head_bytes(rows, vocabulary, width, entropy=entropy))
    assert extra < 2**30
    assert extra < 1.05 * head_bytes(rows, vocabulary, width, entropy=entropy).peak  # beside it: numbers of rows, and of hidden states


@gpu
@pytest.mark.parametrize("size", QWEN)
def test_no_temporary_of_the_weights_size(size: str) -> None:
    """The product is added to the accumulator inside the matrix product: with few rows, nothing as large as the weight exists."""
    hidden, weight, targets = large(64, 151_936, QWEN[size])
    for measured in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(*token_logprobs(hidden, Head(weight, None), targets, 1.0)).backward()
        torch.cuda.synchronize()
        assert not measured or torch.cuda.max_memory_allocated() - before < weight.numel() * 2
