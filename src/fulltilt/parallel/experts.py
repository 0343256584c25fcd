"""Expert parallelism: the workers of a group divide the experts of every layer among themselves, and send tokens to their experts.

Enters: a loaded Hugging Face model with stacked experts, or a critic or reward model, with its adapters. Leaves: the same model, whose
stacks, their biases and their adapters are this worker's experts, under their names, as plain parameters, and an `ExpertSplit`; everything
else stays whole, and the same object. Guaranteed: each worker calls the model on its own tokens, whatever the tokens of the others and
their number, and gets what the whole model computes for them. No token is dropped: a worker receives as many rows as routers send it, and
an expert's rows are in the order of workers and tokens, as if one process had the tokens of all. All workers of a group must make the same
passes; a worker with nothing to compute runs a filler. Every collective runs in the model's own order and again in a recomputed layer. A
worker that has run out of memory continues with them until the others have ended their passes: it sends only rows that it has announced, as
zeros, and zeros in place of the results that others wait for.

Gradients: a worker's gradients of its experts are those of its whole group's tokens; they must be summed over the workers that have the
same experts in other groups. Its gradients of all other parameters are those of its own tokens; they must be summed over all workers.

    a layer                     forward                         backward
    number of rows              all-to-all, the host reads it   -
    rows to their experts       all-to-all                      all-to-all, back
    results to their tokens     all-to-all                      all-to-all, back
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from fulltilt.model import lora
from fulltilt.model.attention import UnsupportedModel
from fulltilt.model.experts import SPLIT, Route, SplitExperts, has_interface, projections, run_sorted, runs_here, weighted_sum
from fulltilt.model.load import shape_of
from fulltilt.parallel.cuts import Cut, require_legal_experts
from fulltilt.parallel.parts import ModelPart, cut_parameters, shapes_of
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.sequence import exchange
from fulltilt.parallel.slices import REMEDY, SliceTable, whole_adapter_cuts

KEY = "train.expert_parallel"


# ---- splitting a model -----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ExpertSplit(ModelPart):
    """This worker's part of a model whose experts are divided among the workers of a group."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters that are cut: their gradients are those of the whole group's tokens."""
        return frozenset(name for name, cut in self.table.cuts.items() if not cut.shared)


@torch.no_grad()
def split_experts(model: torch.nn.Module, ranks: Ranks, key: str = KEY) -> ExpertSplit:
    """Divide the experts of a whole model among the workers of a group. Call it before the optimizer is made. `key`: the setting that gives
    the number of workers, for messages."""
    assert not ranks.alone
    found = ExpertSplit(model, expert_table(model, ranks.size, key=key), ranks, shapes_of(model))
    hand_over(model, ExpertExchange(ranks), ranks.size)
    cut_parameters(model, found.table, ranks.rank)
    return found


def hand_over(model: torch.nn.Module, runner: SplitExperts, size: int) -> None:
    """Have `runner` run the experts of a model, which are divided evenly among `size` workers."""
    for _, layer in stacked_adapters(model):
        layer.num_experts //= size
    for _, module in expert_modules(model):
        module.num_experts //= size
        setattr(module, SPLIT, runner)


def expert_table(model: torch.nn.Module, size: int, *, key: str = KEY, remedy: str | None = None) -> SliceTable:
    """Return how a whole model's parameters are cut: experts and their adapters by expert. Refuses modules whose experts cannot be found in
    their parameters. `key` and `remedy`: as in `slice_table`."""
    require_legal_experts(shape_of(model.config), size, key)  # type: ignore[arg-type]
    otherwise = REMEDY.format(remedy or key)
    cuts = {name: Cut.whole(len(parameter), size) for name, parameter in model.named_parameters(remove_duplicate=False)}
    modules = list(expert_modules(model))
    if not modules:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its experts in stacks, so they cannot be divided. {otherwise}")
    for prefix, module in modules:
        assert runs_here(module) and not hasattr(module, SPLIT), f"{prefix} does not run through run_experts, or is divided already"
        stacks = {f"{name}{end}" for name in projections(module) for end in ("", "_bias")}
        for leaf, parameter in module.named_parameters():
            if leaf not in stacks or len(parameter) != module.num_experts or module.num_experts % size:
                raise UnsupportedModel(
                    f"{prefix}.{leaf} ({type(module).__name__}) of the shape {list(parameter.shape)} cannot be divided by expert. "
                    f"{otherwise}"
                )
            cuts[f"{prefix}.{leaf}"] = Cut.rows(len(parameter), size)
    for prefix, layer in stacked_adapters(model):
        own = whole_adapter_cuts(layer.num_experts, layer.r[lora.NAME], size)
        cuts |= {f"{prefix}.lora_{side}.{lora.NAME}.weight": cut for side, cut in own.items()}
    return SliceTable(size, cuts)


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in model.named_modules() if has_interface(module))


def stacked_adapters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield peft's layers with adapters on stacked experts."""
    if any(".lora_" in name for name, _ in model.named_parameters()):
        yield from ((name, layer) for name, layer in lora.adapted(model) if has_interface(layer.get_base_layer()))


# ---- tokens between workers ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ExpertExchange:
    """Runs the experts of a layer together with the other workers. Worker i has the i-th stretch of every layer's experts."""

    ranks: Ranks
    waits: bool = field(default=True, init=False)  # the host reads how many rows go where, so no CUDA graph can hold it

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertExchange:
        return self  # a copy of the model uses the same group

    def run(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Run a layer's experts. `chosen` [T, k]: numbers of experts, counted over all workers."""
        if self.ranks.progress.dropped:
            return self._run_nothing(module, hidden_states, shares)
        return self._run_sent(module, hidden_states, chosen, shares)

    def _run_sent(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        size, experts = self.ranks.size, module.num_experts
        home = Route.of(chosen, size * experts)  # sorts rows by expert, and so by worker
        sent = torch.diff(home.ends, prepend=home.ends.new_zeros(1)).view(size, experts)
        received, out, back = self._announce(module, sent)
        rows = _Sent.apply(home.sort(hidden_states, chosen.shape[-1]), out, back, self.ranks, "rows")
        results = self._run_own(module, rows, received)
        return weighted_sum(home.unsort(_Sent.apply(results, back, out, self.ranks, "results")), shares).to(hidden_states.dtype)

    def _run_nothing(self, module: Any, hidden_states: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return zeros, with zero gradients for everything that `_run_sent` has gradients for. Experts compute nothing."""
        none = hidden_states.new_zeros(self.ranks.size, module.num_experts, dtype=torch.int32)  # the type of `Route.ends`
        _, out, back = self._announce(module, none)
        rows = _SentNothing.apply(hidden_states, out, back, self.ranks, "rows")
        results = _SentNothing.apply(self._run_own(module, rows, none), back, out, self.ranks, "results")
        return weighted_sum(F.pad(results, (0, 0, 0, shares.numel())), shares).to(hidden_states.dtype)

    def _announce(self, module: Any, sent: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Tell each worker how many rows it gets for each of its experts [size, experts]. Returns how many come from each worker, and the
        sums that go to each worker and come from it. A worker that has abandoned the pass repeats the numbers that it announced for this
        layer, which others expect where the layer is recomputed."""
        progress = self.ranks.progress
        with progress.collective("announcement") as takes_part:
            if takes_part:
                if progress.dropped and module in progress.told:
                    sent, _ = progress.told[module]
                progress.told[module] = sent, exchange(sent, self.ranks)
        sent, received = progress.told[module]
        out, back = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        return received, out, back

    def _run_own(self, module: Any, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Run each row through its expert, which is one of this worker's. Rows are in the order of workers and experts; `received` [size,
        experts] counts them."""
        experts = module.num_experts
        if not len(rows):  # torch's grouped product needs a row on CUDA; this row belongs to no expert
            nothing = Route.of(received.new_full((1,), experts), experts, all_live=False)
            return run_sorted(module, F.pad(rows, (0, 0, 0, 1)), nothing)[:0]
        numbers = torch.arange(experts, device=rows.device).repeat(self.ranks.size)
        here = Route.of(numbers.repeat_interleave(received.flatten(), output_size=len(rows)), experts)
        return here.unsort(run_sorted(module, here.sort(rows), here))


@dataclass(frozen=True, eq=False)
class OwnExperts:
    """Runs the experts of a member of a tensor-parallel group, for the tokens of the whole group, which every member has. Results cover
    only its own experts: they are summed over members after the layer, like those of all its other parts."""

    rank: int
    waits: bool = field(default=False, init=False)

    def run(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Run a layer's experts. `chosen` [T, k]: numbers of experts, counted over all members."""
        return weighted_sum(run_stretch(module, hidden_states, chosen, self.rank), shares).to(hidden_states.dtype)


def run_stretch(module: Any, tokens: torch.Tensor, chosen: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the results [T * k, width] of the module's experts, which are the `rank`-th stretch of all; zeros where other experts were
    chosen. The number of computed rows does not depend on the choices, so that a CUDA graph can hold it."""
    number = chosen.long() - rank * module.num_experts
    here = (number >= 0) & (number < module.num_experts)
    route = Route.of(torch.where(here, number, module.num_experts), module.num_experts, all_live=False)
    return route.unsort(run_sorted(module, route.sort(tokens, chosen.shape[1]), route))


class _Sent(torch.autograd.Function):
    """Exchanges rows with other workers: sends `out` rows to each, and receives `back` rows from each. Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, out: Sequence[int], back: Sequence[int], ranks: Ranks, what: str) -> torch.Tensor:
        ctx.out, ctx.back, ctx.ranks, ctx.what = out, back, ranks, what
        with ranks.progress.collective(what):
            return exchange(rows, ranks, (out, back))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.ranks.progress.collective(f"gradients of {ctx.what}"):
            return exchange(of_rows, ctx.ranks, (ctx.back, ctx.out)), None, None, None, None


class _SentNothing(torch.autograd.Function):
    """Replaces `_Sent` in an abandoned pass: sends as many rows of zeros as other workers expect, and drops the rows that it receives. The
    result has no rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, out: Sequence[int], back: Sequence[int], ranks: Ranks, what: str) -> torch.Tensor:
        ctx.out, ctx.back, ctx.ranks, ctx.what, ctx.count = out, back, ranks, what, len(rows)
        return exchange_nothing(rows, ranks, (out, back), what)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange_nothing(of_rows, ctx.ranks, (ctx.back, ctx.out), f"gradients of {ctx.what}")
        return of_rows.new_zeros(ctx.count, of_rows.shape[1]), None, None, None, None


def exchange_nothing(like: torch.Tensor, ranks: Ranks, counts: tuple[Sequence[int], Sequence[int]], what: str) -> torch.Tensor:
    """Return no rows, after an exchange of zeros if this worker has not made the exchange before."""
    with ranks.progress.collective(what) as takes_part:
        if takes_part:
            exchange(like.new_zeros(sum(counts[0]), like.shape[1]), ranks, counts)
        return like.new_zeros(0, like.shape[1])
