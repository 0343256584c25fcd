"""Sharding of a model's parameters across workers, applied to a plain model from outside. No other file does it.

Enters: a loaded Hugging Face model, or a critic or reward model, with its adapters and perhaps fused layers, and a `Sharing`. Leaves: the
same model, each parameter of which is a shard, a range of rows (FSDP2); during a pass one decoder layer at a time has whole parameters.
Fused kernels stay; projections that ran as one product run one by one. Guaranteed: passes compute in the type that the model had; shards of
parameters that learn, and sums of their gradients over workers, are float32 or better; gradients are sums, not means; every parameter keeps
its name; every collective is counted in `Ranks.moved`. All workers must make the same number of passes, each through the whole model and
inside `in_one_pass`; a worker that abandons a pass completes it (parallel/progress.py).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from fulltilt.model.arrays import is_shard, local
from fulltilt.model.experts import has_interface
from fulltilt.model.forward import ONE_PASS
from fulltilt.model.fuse import separate
from fulltilt.model.scalar import ScalarModel, decoder_layers
from fulltilt.parallel.layout import RowLayout
from fulltilt.parallel.progress import PassProgress
from fulltilt.parallel.ranks import Ranks, gather_into, reduce_into
from fulltilt.records import UserError

GATHER, REDUCE = "gather", "reduce"  # kinds of exchange of a unit


@dataclass(frozen=True, eq=False)
class Sharing:
    """How parameters are sharded. Workers are in groups of equal size, and each group has every parameter once."""

    everyone: Ranks
    group: Ranks  # the workers of this worker's group
    mesh: DeviceMesh
    reshard_after_forward: bool = True  # free the whole parameters of a layer between its forward and its backward pass
    forward_prefetch: bool = True  # gather a layer's parameters before the previous layer begins to compute
    experts: Sharing | None = None  # given where experts are divided: how workers with the same experts shard these

    @property
    def first(self) -> bool:
        """Whether this worker's group is the first one."""
        return self.everyone.rank < self.group.size


def share(
    ranks: Ranks, device: str, size: int | None = None, *, reshard_after_forward: bool = True, forward_prefetch: bool = True
) -> Sharing:
    """Describe sharding across these workers. `size`: workers in a group; None: all are one group."""
    knobs = reshard_after_forward, forward_prefetch
    if size is None or size == ranks.size:
        assert ranks.group is not None
        return Sharing(ranks, ranks, DeviceMesh.from_group(ranks.group, device), *knobs)
    assert ranks.size % size == 0, f"{ranks.size} workers are no groups of {size}"
    mesh = mesh_of(ranks, device, size)
    group = replace(ranks, rank=ranks.rank % size, size=size, group=mesh["shard"].get_group())
    return Sharing(ranks, group, mesh, *knobs)


def with_experts(sharing: Sharing, replicas: Ranks, device: str) -> Sharing:
    """Add the sharding of experts. `replicas`: the workers that have the same experts, which may be this worker alone. All workers must
    call this at the same time."""
    if replicas.alone:
        replicas = replace(replicas, group=replicas.group_of("alone", replicas.numbers))
    return replace(sharing, experts=share(replicas, device))


def mesh_of(ranks: Ranks, device: str, size: int) -> DeviceMesh:
    """Return the mesh of workers in groups of `size`. Only a group's own workers make it, because workers with other roles do not come
    here; every worker makes its group of replicas first."""
    places = torch.tensor(ranks.numbers).view(-1, size)
    names = ("replicate", "shard")
    lines = [next(line for line in found.tolist() if ranks.number in line) for found in (places.t(), places)]
    groups = [ranks.group_of(name, line) for name, line in zip(names, lines, strict=True)]
    return DeviceMesh.from_group(groups, device, mesh=places, mesh_dim_names=names)


@dataclass(eq=False)
class Shards:
    """This worker's view of a sharded model."""

    model: torch.nn.Module
    sharing: Sharing
    types: Mapping[str, torch.dtype]  # by parameter: the type to compute with, which the parameter had before it was sharded
    units: Sequence[FSDPModule]  # the modules whose parameters become whole together, the whole model last
    apart: frozenset[str] = frozenset()  # names of the parameters of divided experts
    version: int = 0  # how many times the parameters were changed

    def own(self) -> dict[str, torch.Tensor]:
        """Return this worker's numbers of each parameter, flat."""
        return {name: local(parameter).detach().view(-1) for name, parameter in self.model.named_parameters()}

    def group_of(self, name: str) -> Ranks:
        """Return the workers across which a parameter is sharded."""
        return self.sharing.experts.group if self.sharing.experts and name in self.apart else self.sharing.group

    def layout(self, names: Sequence[str]) -> RowLayout:
        """Return the layout of parameters that are sharded across the same workers."""
        parameters = dict(self.model.named_parameters())
        sizes = {self.group_of(name).size for name in names} or {self.sharing.group.size}
        assert len(sizes) == 1
        return RowLayout({name: tuple(parameters[name].shape) for name in names}, sizes.pop())

    def rest(self) -> None:
        """Free whole parameters that a pass without gradient has left."""
        for unit in self.units:
            unit.reshard()

    @property
    def progress(self) -> PassProgress:
        return self.sharing.everyone.progress

    @property
    def may_give_up(self) -> bool:
        """Whether a pass in which this worker runs out of memory can be completed: torch 2.13 or later can make a model forget such a
        pass."""
        return hasattr(self.units[-1], "reset_iter_state")

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Enclose a pass that takes part in the remaining collectives of the last pass, which this worker has abandoned, and which must
        have been of the same kind. Afterwards, sums of gradients are meaningless on every worker."""
        root, progress = self.units[-1], self.progress
        # Passes without gradient leave parameters whole, which later ones do not gather again.
        whole = [number for number, unit in enumerate(self.units) if any(not is_shard(own) for own in unit_parameters(unit))]
        progress.made.update(dict.fromkeys([(number, GATHER) for number in whole if not progress.made[number, GATHER]], 1))
        summed = [number for number, _ in enumerate(self.units) if progress.made[number, REDUCE]]
        root.reset_iter_state()
        for number in summed:  # the sum over groups, which follows the one inside a group, is not repeated either
            self.units[number].set_requires_all_reduce(False, recurse=False)
        try:
            yield
        finally:
            for number in summed:
                self.units[number].set_requires_all_reduce(True, recurse=False)
        if summed:
            root.reset_iter_state()  # drops what was still to be summed

    def gather_of(self, unit: int) -> CountedGather:
        """Make the collective that gathers a unit's parameters."""
        return CountedGather(self.sharing.everyone.moved, self.progress, unit)


def shard(model: torch.nn.Module, sharing: Sharing) -> Shards:
    """Shard all parameters of a model, which computes as before. Call it before the optimizer is made."""
    separate(model)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    computing: Any = model.dtype
    require_one_type(model, types)
    layers = decoder_layers(model, 'its parameters cannot be shared out layer by layer. Set train.shard = "optimizer"')
    of_score = [model.score] if isinstance(model, ScalarModel) else []
    experts = {module: name for name, module in expert_units(model)} if sharing.experts else {}
    for module in (*experts, *layers, *of_score, model):
        widen(module)
        wide = torch.promote_types(computing, torch.float32)
        policy = MixedPrecisionPolicy(wide if module in of_score else computing, reduce_dtype=wide, cast_forward_inputs=False)
        # Parameters outside the layers are needed first and last: freeing them in between would save nothing.
        reshard = sharing.reshard_after_forward and module is not model
        mesh = sharing.experts.mesh if sharing.experts and module in experts else sharing.mesh
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    units = list(units_of(model))
    for number, unit in enumerate(units):
        sum_gradients(unit, number, sharing)
    apart = frozenset(f"{prefix}.{name}" for module, prefix in experts.items() for name, _ in module.named_parameters())
    if sharing.forward_prefetch:
        for module, following in itertools.pairwise((model, *layers)):
            assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
            module.set_modules_to_forward_prefetch([following])
    setattr(model, ONE_PASS, call)
    register_fsdp_forward_method(model, ONE_PASS)
    model.computing_type = computing  # type: ignore[assignment]
    return Shards(model, sharing, types, units, apart)


def expert_units(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the stacks of experts, each with the adapters around it."""
    inside = ""
    for name, module in model.named_modules():
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if has_interface(base) and not (inside and name.startswith(inside)):
            inside = f"{name}."
            yield name, module


def require_one_type(model: torch.nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Refuse a model with parameters of several types. Gathered parameters are all of one type: a parameter of another type would be
    rounded in passes, but not in rollouts."""
    usual: Any = model.dtype
    for name, own in types.items():
        if own != usual and not (isinstance(model, ScalarModel) and name.startswith("score.")):
            kept, others = (str(each).removeprefix("torch.") for each in (own, usual))
            raise UserError(
                f"the model keeps {name} in {kept} and its other parameters in {others}, which cannot be shared out yet. "
                'Set train.shard = "optimizer"'
            )


def call(compute: Callable[[], Any]) -> Any:
    return compute()


def widen(module: torch.nn.Module) -> None:
    """Make parameters that learn their own masters, of float32 or better. They get their own memory, because others may read that of the
    loaded model."""
    for parameter in module.parameters():
        if parameter.requires_grad and not is_shard(parameter):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def unit_parameters(unit: FSDPModule) -> Iterator[torch.nn.Parameter]:
    assert isinstance(unit, torch.nn.Module)
    yield from unit.parameters()


def units_of(model: torch.nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in reversed(list(model.modules())) if isinstance(module, FSDPModule))


def sum_gradients(unit: FSDPModule, number: int, sharing: Sharing) -> None:
    """Sum gradients over workers rather than averaging them, and count the unit's collectives. `number`: the unit's place among those of
    the model."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    if hasattr(unit, "set_reduce_scatter_unused_params"):  # torch 2.13: workers whose tokens have not reached an expert add zeros for it
        unit.set_reduce_scatter_unused_params(True)
    moved, progress = sharing.everyone.moved, sharing.everyone.progress
    unit.set_custom_all_gather(CountedGather(moved, progress, number))  # type: ignore[arg-type]
    replicated = sharing.group.size < sharing.everyone.size
    unit.set_custom_reduce_scatter(CountedReduce(moved, progress, number, replicated=replicated))  # type: ignore[arg-type]


class Allocating:
    """Allocates memory for collectives, as FSDP2 requires."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(Allocating):
    def __init__(self, moved: Counter[str], progress: PassProgress, unit: int) -> None:
        self.moved, self.progress, self.unit = moved, progress, unit

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        with self.progress.collective((self.unit, GATHER)) as takes_part:
            if not takes_part:  # any finite numbers will do
                output_tensor.zero_()
                return None
            self.moved["all-gather"] += output_tensor.nbytes
            with self.progress.sending():
                return gather_into(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduce(Allocating):
    def __init__(self, moved: Counter[str], progress: PassProgress, unit: int, *, replicated: bool) -> None:
        self.moved, self.progress, self.unit, self.replicated = moved, progress, unit, replicated

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with self.progress.collective((self.unit, REDUCE)) as takes_part:
            if not takes_part:
                output_tensor.zero_()
                return None
            self.moved["reduce-scatter"] += input_tensor.nbytes
            self.moved["all-reduce"] += output_tensor.nbytes if self.replicated else 0  # over the groups, in the all-reduce that follows
            with self.progress.sending():
                return reduce_into(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
