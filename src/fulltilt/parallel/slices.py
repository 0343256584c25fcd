"""The cuts of a model's parameters under tensor parallelism, found in the structure of its modules.

Enters: a whole Hugging Face model, or a critic or reward model, with its adapters. Leaves: a `SliceTable`, which takes a member's part of a
whole tensor, puts parts together again, and joins gradients. Guaranteed: assembling is the inverse of taking parts; a module that is not
known to compute correctly in parts is refused by name.

    queries, keys, values, gate, up    rows; of heads, keys and values duplicated where there are fewer heads than members
    the projections behind them        columns; their biases are whole
    stacked experts                    the same, within each expert; or by expert, so that each member has some of them whole
    embeddings                         rows, of which the last member may have fewer
    norms, routers, a critic's score   whole
    adapters                           rows of B where the layer is cut by rows, columns of A where it is cut by columns; the other is whole
    adapters on whole experts          with their experts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.model import lora
from fulltilt.model.attention import UnsupportedModel
from fulltilt.model.experts import has_interface, projections
from fulltilt.model.load import shape_of
from fulltilt.model.scalar import ScalarModel, decoder_layers
from fulltilt.parallel.cuts import Cut, CutSection, even, expert_counts, require_legal, require_legal_experts, vocabulary_rows

KEY = "train.tensor_parallel"
REMEDY = "Set {} = 1, or use a model of another architecture"
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"), ("o_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
ROUTERS = ("gate", "shared_expert_gate")  # choose experts for all tokens on every member


@dataclass(frozen=True)
class SliceTable:
    """The cuts of a model's parameters, by name: for loading, for gathering whole tensors, and for their gradients."""

    size: int
    cuts: Mapping[str, Cut]

    def local_slice(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a member's part of a whole tensor; a view, if the part is one stretch."""
        return take_part(self.cuts[name], whole, rank)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the parts of all members; copies must be equal."""
        return join(self.cuts[name], parts)

    def join_gradients(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole gradient from those that all members have before `sum_shared`."""
        return join(self.cuts[name], parts, add=True)


def take_part(cut: Cut, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a member's part of a whole tensor; a view, if the part is one stretch."""
    found = [whole.narrow(cut.dim, part.start, len(part)) for part in cut.parts(rank)]
    return found[0] if len(found) == 1 else torch.cat(found, cut.dim)


def join(cut: Cut, parts: Sequence[torch.Tensor], *, add: bool = False) -> torch.Tensor:
    """Return the whole tensor from the parts of all members. `add`: whether to sum numbers that several members hold; otherwise they are
    equal."""
    shape = list(parts[0].shape)
    shape[cut.dim] = cut.length
    whole = parts[0].new_zeros(shape)
    for rank, own in enumerate(parts):
        ranges = cut.parts(rank)
        for part, given in zip(ranges, own.split([len(each) for each in ranges], cut.dim), strict=True):
            target = whole.narrow(cut.dim, part.start, len(part))
            target.copy_(target + given if add else given)
    return whole


def slice_table(model: torch.nn.Module, size: int, *, whole_experts: bool = False, key: str = KEY, remedy: str | None = None) -> SliceTable:
    """Return the table of a whole model, with its adapters. `whole_experts`: whether each member has some whole experts, rather than a part
    of every expert. `key`: the setting that gives the size, for messages. `remedy`: the setting that leaves this model whole, if it is
    another one."""
    shape = shape_of(model.config)  # type: ignore[arg-type]
    require_legal(shape, size, key, whole_experts=whole_experts)
    if whole_experts and expert_counts(shape):
        require_legal_experts(shape, size, key.replace("tensor_parallel", "expert_parallel"))
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied embedding has two names
    plain = {name: parameter for name, parameter in parameters.items() if ".lora_" not in name}
    try:
        blocks = {module: block for block in parallel_blocks(model) for module in block.modules()}
        cuts = {name: cut_of(model, blocks, name, parameter, size, whole_experts=whole_experts) for name, parameter in plain.items()}
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}. {REMEDY.format(remedy or key)}") from None
    if len(cuts) < len(parameters):
        cuts |= adapter_cuts(model, cuts, size)
    return SliceTable(size, {name: cuts[name] for name in parameters})


def cut_of(
    model: torch.nn.Module, blocks: Mapping[torch.nn.Module, Any], name: str, parameter: torch.Tensor, size: int, *, whole_experts: bool
) -> Cut:
    """Return how a parameter is cut. `blocks`: the attention or feed-forward layer that each module belongs to."""
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    short, block = lora.plain_name(name).split(".")[-2], blocks.get(owner)
    if owner in embeddings_of(model):
        return Cut(0, (CutSection(len(parameter), vocabulary_rows(len(parameter), size)),))
    if has_interface(owner):
        cut = whole_expert_cut if whole_experts else expert_cut
        return cut(owner, name, leaf, parameter, size)
    if block is not None and isinstance(owner, torch.nn.Linear) and short in ROWS:
        return Cut(0, row_sections(block, name, owner, short, size))
    if block is not None and isinstance(owner, torch.nn.Linear) and short in COLUMNS:
        if short == "o_proj" and owner.in_features != head_counts(block)[0] * block.head_dim:
            raise refusal(name, owner)
        return Cut.rows(owner.in_features, size, dim=1) if leaf == "weight" else Cut.whole(len(parameter), size)  # a bias is added once
    of_a_head = short in HEAD_NORMS and parameter.shape == (getattr(block, "head_dim", None),)
    of_tokens = block is None and parameter.shape == (model.config.get_text_config().hidden_size,)  # type: ignore[union-attr, operator]
    of_a_router = block is not None and short in ROUTERS
    if of_a_head or of_tokens or of_a_router or owner is getattr(model, "score", None):
        return Cut.whole(len(parameter), size)
    raise refusal(name, owner)


def row_sections(block: Any, name: str, layer: Any, short: str, size: int) -> tuple[CutSection, ...]:
    """Return the sections of a block's projection that is cut by rows."""
    rows = layer.out_features
    if short in ("gate_proj", "up_proj"):
        return (even(rows, size),)
    if short == "gate_up_proj":
        return (even(rows // 2, size),) * 2
    width = block.head_dim
    heads, key_heads = head_counts(block)
    queries, keys = even(heads * width, size, width), even(key_heads * width, size, width)
    found = {"q_proj": (queries,), "qkv_proj": (queries, keys, keys)}.get(short, (keys,))
    if sum(section.length for section in found) != rows:
        raise refusal(name, layer)
    return found


def expert_cut(experts: Any, name: str, leaf: str, parameter: torch.Tensor, size: int) -> Cut:
    """Return the cut of stacked experts: [experts, out, in], or [experts, in, out] where they are transposed."""
    outer, inner = (2, 1) if experts.is_transposed else (1, 2)
    if leaf == "down_proj":
        return Cut.rows(parameter.shape[inner], size, dim=inner)
    if leaf == "gate_up_proj" and experts.is_concatenated:
        return Cut(outer, (even(parameter.shape[outer] // 2, size),) * 2)
    if leaf == "up_proj":
        return Cut.rows(parameter.shape[outer], size, dim=outer)
    raise refusal(name, experts)


def whole_expert_cut(experts: Any, name: str, leaf: str, parameter: torch.Tensor, size: int) -> Cut:
    """Return the cut of stacked experts and their biases, by expert."""
    stacks = {f"{stack}{end}" for stack in projections(experts) for end in ("", "_bias")}
    if leaf not in stacks or len(parameter) != experts.num_experts or experts.num_experts % size:
        raise refusal(name, experts)
    return Cut.rows(len(parameter), size)


def whole_adapter_cuts(experts: int, rank: int, size: int) -> dict[str, Cut]:
    """Return the cuts of adapters of stacked experts, by expert. peft numbers the ranks of all experts: expert by expert in A, rank by rank
    in B."""
    return {"A": Cut.rows(experts * rank, size), "B": Cut(1, (even(experts, size),) * rank)}


def adapter_cuts(model: torch.nn.Module, cuts: Mapping[str, Cut], size: int) -> dict[str, Cut]:
    """Return the cuts of adapters. A layer cut by rows has its rows of B, and all of A; one cut by columns has its columns of A, and all of
    B."""
    found: dict[str, Cut] = {}
    plain = {lora.plain_name(name): cut for name, cut in cuts.items()}
    for name, layer in lora.adapted(model):
        cut, stacked = plain[f"{lora.plain_name(name)}.{lora.target_of(layer)}"], has_interface(layer.get_base_layer())
        weights = {side: getattr(layer, f"lora_{side}")[lora.NAME].weight for side in "AB"}
        own = {side: Cut.whole(len(weight), size) for side, weight in weights.items()}
        if stacked and cut.dim == 0:
            own = whole_adapter_cuts(layer.num_experts, layer.r[lora.NAME], size)
        elif cut != Cut.whole(cut.length, size):
            outer = (2 if layer.get_base_layer().is_transposed else 1) if stacked else 0
            own |= {"B": cut.at(0)} if cut.dim == outer else {"A": cut.at(1)}
        found |= {f"{name}.lora_{side}.{lora.NAME}.weight": each for side, each in own.items()}
    return found


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    found: torch.nn.Module = (model.body if isinstance(model, ScalarModel) else model).base_model  # type: ignore[assignment]
    return found


def embeddings_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the input embedding, and the output embedding if there is one."""
    found = [body_of(model).get_input_embeddings()]  # type: ignore[operator]
    return found if isinstance(model, ScalarModel) else [*found, model.get_output_embeddings()]  # type: ignore[operator]


def parallel_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the attention and feed-forward layers, of whose results members compute parts."""
    for layer in decoder_layers(model, "it cannot be divided"):
        yield from (block for block in layer.children() if any(is_cut_by_columns(name) for name, _ in block.named_parameters()))


def is_cut_by_columns(name: str) -> bool:
    """Return whether this is the name of a layer whose results are summed over members, or of a parameter of such a layer."""
    return not {*COLUMNS}.isdisjoint(name.split("."))


def head_counts(block: Any) -> tuple[int, int]:
    """Return the query heads and key-value heads of an attention layer."""
    heads = block.config.num_attention_heads
    return heads, getattr(block.config, "num_key_value_heads", None) or heads


def refusal(name: str, module: torch.nn.Module) -> UnsupportedModel:
    return UnsupportedModel(f"{name} ({type(module).__name__}) cannot be divided among the members of a tensor-parallel group")
