"""Facts for the plan, and the sizes that follow from it.

Enters: a device, the loaded models, the plan's budgets. Leaves: the records that plan.py decides by, the engine's limits, and how large
micro-batches are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from fulltilt.batching.pack import MicroSizing
from fulltilt.cluster.loading import Fusing, Models
from fulltilt.config import ActorConfig, Config, CriticConfig, RefConfig, RewardModelConfig
from fulltilt.kernels.linear import LOW, trial_bytes
from fulltilt.kernels.paged_attention import workspace_numbers
from fulltilt.kernels.sampling import DecodeProgress, Workspace
from fulltilt.memory.host import free_host_bytes
from fulltilt.model import load
from fulltilt.model.attention import LayerShape
from fulltilt.model.experts import why_not_captured
from fulltilt.model.fuse import check_fused, is_fused
from fulltilt.model.heads import Entropy, Head, HeadOptions, head_bytes
from fulltilt.model.scalar import ScalarModel
from fulltilt.plan import Budgets, Facts, RoleFacts, Room, given_settings, longest_response, most_seqs, uses_graphs
from fulltilt.rollout.decode import BURST, TABLE_STEP, sizes_up_to
from fulltilt.rollout.engine import EngineLimits
from fulltilt.rollout.runner import bytes_per_token

GRAPH_BYTES = 8 << 20  # that the driver keeps for a captured graph of a few hundred kernels, generously
THREADS = torch.get_num_threads()  # as torch chose them: an earlier run of this process may have changed the number since


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


def find_room(device: torch.device, models: Models, longest: int, learners: Collection[str]) -> Room:
    """What `auto` is decided by."""
    roles = {"ref": RoleFacts(0)} | {role: role_facts(model) for role, model in models.own.items()}
    return Room(
        device=device.type,
        device_bytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0,
        host_bytes=free_bytes(torch.device("cpu")),
        longest=longest,
        roles={role: facts if role in learners else replace(facts, trained=0) for role, facts in roles.items()},
    )


def role_facts(model: torch.nn.Module) -> RoleFacts:
    body = model.body if isinstance(model, ScalarModel) else model
    assert isinstance(body, PreTrainedModel)
    text = body.config.get_text_config()
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    parameters = list(model.parameters())
    return RoleFacts(
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        itemsize=body.dtype.itemsize,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        inner=experts * (getattr(text, "num_experts_per_tok", None) or 1),
        heads_width=head_width * (heads + 2 * (getattr(text, "num_key_value_heads", None) or heads)),
        fused=check_fused(body).left_alone is None,
        head=None if body is not model else partial(head_peak, body),
    )


def head_peak(model: PreTrainedModel, tokens: int, keys: Mapping[str, Any], entropy_gradient: bool) -> int:
    """Most bytes of the vocabulary head's temporaries, where all tokens are trained on."""
    weight, options = (
        Head.of(model).weight,
        HeadOptions(keys["fused_head"], keys["entropy_chunk"], keys["entropy_recompute"], keys["head_recompute"] is not False),
    )
    vocabulary, width = weight.shape
    entropy: Entropy = "gradient" if entropy_gradient else "value"
    return head_bytes(tokens, vocabulary, width, options, dtype=weight.dtype, device=weight.device.type, entropy=entropy).peak


def find_facts(
    config: Config, device: torch.device, actor: PreTrainedModel, layers: Mapping[int, LayerShape], longest: int,
    steps_per_epoch: int, fusing: Fusing,
) -> Facts:  # fmt: skip
    """What the plan must know."""
    rows = most_seqs(config, device.type, config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt)
    return Facts(
        device=device.type,
        free_bytes=free_bytes(device),
        parameters=sum(parameter.numel() for parameter in actor.parameters()),
        cores=THREADS,
        threads_given="OMP_NUM_THREADS" in os.environ,
        context_limit=load.context_limit(actor.config),
        kv_bytes_per_token=bytes_per_token(layers, actor.dtype),
        longest=longest,
        steps_per_epoch=steps_per_epoch,
        decode_bytes=decode_bytes(config, actor, layers, rows, longest + longest_response(config), device.type),
        graph_sizes=len(sizes_up_to(rows)),
        not_captured=why_not_captured(actor),
        layers=fusing.words(),
    )


def decode_bytes(config: Config, model: PreTrainedModel, layers: Mapping[int, LayerShape], rows: int, longest: int, device: str) -> int:
    """About what decoding `rows` samples of up to `longest` tokens at once holds beside the KV cache: logits, where each sample stands,
    and on CUDA the kernels' workspaces, a layer's temporaries, and what captured graphs keep."""
    text, vocabulary = model.config.get_text_config(), len(Head.of(model).weight)
    blocks = -(-(longest + BURST) // config.rollout.block_tokens) + TABLE_STEP
    found = 4 * rows * (vocabulary + blocks) + bytes_of(DecodeProgress.make(rows, BURST, "meta"))
    if device != "cuda":
        return found
    heads, itemsize, sizes = text.num_attention_heads, model.dtype.itemsize, sizes_up_to(rows)
    of_attention = 4 * max(
        workspace_numbers(size, heads, shape.key_heads, shape.head_width, itemsize, blocks * config.rollout.block_tokens)
        for size in sizes
        for shape in set(layers.values())
    )
    of_sampling = bytes_of(Workspace.make(rows, vocabulary, "meta"))
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    of_layer = 2 * rows * itemsize * (4 * text.hidden_size + 3 * inner)  # twice, for pieces of a pool that do not fit the next size
    of_graphs = GRAPH_BYTES * 2 * len(sizes) if uses_graphs(config, device) else 0  # with top-k and top-p, and without
    of_trials = trial_bytes(text.hidden_size, 2 * inner, itemsize) if model.dtype in LOW and is_fused(model) else 0
    return found + of_attention + of_sampling + of_layer + of_graphs + of_trials


def bytes_of(record: DecodeProgress | Workspace) -> int:
    return sum(tensor.nbytes for tensor in vars(record).values())


def update_sizes(config: Config, budgets: Budgets) -> dict[str, MicroSizing]:
    of_role = {"actor": budgets.token_budget, "critic": budgets.critic_token_budget}
    return {name: sizing(config, name, budget) for name, budget in of_role.items()}


def forward_sizes(config: Config, budgets: Budgets) -> dict[str, MicroSizing]:
    of_role = {
        "actor": budgets.forward_token_budget,
        "ref": budgets.ref_token_budget,
        "critic": budgets.critic_forward_token_budget,
        "reward_model": budgets.reward_model_token_budget,
    }
    return {name: sizing(config, name, budget) for name, budget in of_role.items()}


def sizing(config: Config, role: str, budget: int) -> MicroSizing:
    section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig = getattr(config, role)
    return MicroSizing(section.dynamic_batch, budget, section.micro_batch, packing=given_settings(config, role)["packing"])


def limits(config: Config, budgets: Budgets, device: torch.device, longest_prompt: int) -> EngineLimits:
    return EngineLimits(
        blocks=budgets.kv_blocks,
        block_tokens=config.rollout.block_tokens,
        max_seqs=budgets.max_seqs,
        max_batched_tokens=budgets.max_batched_tokens,
        chunked_prefill=config.rollout.chunked_prefill,
        prefix_sharing=config.rollout.prefix_sharing,
        cuda_graphs=uses_graphs(config, device.type),
        graphs_required=config.rollout.cuda_graphs is True,
        longest=longest_prompt + longest_response(config),
    )
