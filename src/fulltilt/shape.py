"""Sizes of a model, computed from its config.json or from a name: parameters, keys and values, and what layers keep for a backward pass.

Enters: a mapping as config.json has it, a folder that holds one, or the name of one of `SHAPES`. Leaves: a frozen `Shape`. Guaranteed:
nothing is loaded and neither torch nor transformers is imported; for the families of `FAMILIES` the number of parameters and of keys and
values is exactly that of the model that transformers builds. A family that is not in the table has no known number of parameters
(`UnknownParameters`), which a run takes from its loaded model instead; all other sizes are those of a model with Llama's structure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fulltilt.records import UserError
from fulltilt.words import shortened

Kind = Literal["embedding", "attention", "mlp", "norms", "head"]


class UnknownParameters(UserError):
    """The number of parameters of this family is not known without its weights."""


@dataclass(frozen=True)
class ModelFamily:
    """Differences of a family of models from the structure of Llama: attention, then a gated product, each after a norm, without biases."""

    tied: bool = False  # whether the output embedding is the input embedding, if config.json does not say
    qkv_bias: bool | str = "attention_bias"  # whether queries, keys and values have biases, or the key of config.json that says so
    output_bias: bool | str = "attention_bias"  # whether the projection after attention has a bias, or the key of config.json that says so
    mlp_bias: bool | str = False
    norms: int = 2  # norms over the hidden states in a layer
    head_norms: bool | str = False  # whether queries and keys have norms
    whole_head_norms: bool = False  # these norms are over all heads of a token at once, not over each head
    wide_norms: bool = False  # norms stay in float32 until they are multiplied by their weight
    fused: bool = False  # whether fulltilt runs its layers with few kernels (model/fuse.py)
    joined: bool = False  # one projection for queries, keys and values, and one for gate and up


NO_BIAS = ModelFamily(qkv_bias=False, output_bias=False)
GEMMA = ModelFamily(tied=True, norms=4, wide_norms=True)
FAMILIES = {
    "llama": ModelFamily(mlp_bias="mlp_bias", fused=True),
    "mistral": replace(NO_BIAS, fused=True),
    "qwen2": ModelFamily(qkv_bias=True, output_bias=False, fused=True),
    "qwen3": ModelFamily(head_norms=True, fused=True),
    "qwen2_moe": ModelFamily(qkv_bias="qkv_bias", output_bias=False),
    "qwen3_moe": ModelFamily(head_norms=True),
    "mixtral": NO_BIAS,
    "gemma2": GEMMA,
    "gemma3_text": replace(GEMMA, head_norms=True),
    "phi3": replace(NO_BIAS, joined=True),
    "granite": ModelFamily(mlp_bias="mlp_bias"),
    "smollm3": ModelFamily(tied=True, mlp_bias="mlp_bias"),
    "olmo2": ModelFamily(head_norms=True, whole_head_norms=True),
}

QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": QWEN2 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "1.5B": QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "32B": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "70B": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    # 8.0 million parameters in the proportions of 0.5B: heads of 64, grouped keys, 26% of all weights in the vocabulary.
    "small": QWEN2 | {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 8192, "tie_word_embeddings": True,
    },
    "135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
    },
    # 2.7 billion parameters in the proportions of Qwen3-30B-A3B, 0.5 of them used by a token: a mixture of experts that one GPU can train.
    "2.7B-A0.5B": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "tie_word_embeddings": False, "sliding_window": None, "max_position_embeddings": 32768,
    },
}  # fmt: skip

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Sizes that config.json may give as a list with a value for each layer.
PER_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size")
MOST, MOST_LAYERS = 1 << 40, 10_000  # larger than in any model: larger numbers are mistakes, which would take memory and time


@dataclass(frozen=True)
class Experts:
    count: int
    active: int  # experts that a token is sent to
    inner: int  # width of an expert's gated product
    shared_inner: int = 0  # width of the shared expert that every token is sent to; 0: there is none


@dataclass(frozen=True)
class DecoderLayer:
    heads: int
    key_heads: int
    head_width: int
    inner: int  # width of the gated product, if there are no experts
    experts: Experts | None = None

    @property
    def queries(self) -> int:
        """Numbers in a token's queries."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Numbers in a token's keys; its values have as many."""
        return self.key_heads * self.head_width


@dataclass(frozen=True)
class LayerDivision:
    """Division of a model's layers among workers. The default: none."""

    members: int = 1  # workers of a tensor-parallel group
    experts: int = 1  # workers that hold all experts together
    whole_experts: bool = False  # whether a member has some of the experts whole, and rows of zeros for the tokens of others
    arriving: float = 1.0  # rows that arrive at a worker's experts for each one that it sends: 1 on average, if routers are balanced

    def own(self, layer: DecoderLayer) -> DecoderLayer:
        """Return the heads and columns that a member of a tensor-parallel group has."""
        experts, size = layer.experts, self.members
        if experts:
            inner = experts.inner if self.whole_experts else experts.inner // size
            experts = replace(experts, inner=inner, shared_inner=experts.shared_inner // size)
        heads, key_heads = (max(1, count // size) for count in (layer.heads, layer.key_heads))
        return replace(layer, heads=heads, key_heads=key_heads, inner=layer.inner // size, experts=experts)


WHOLE_LAYERS = LayerDivision()


@dataclass(frozen=True)
class Recompute:
    """The layers that are computed again in the backward pass, and how much of them is kept (memory/recompute.py)."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None  # block: number of first layers; uniform: layers per unit. None: all layers, one by one
    method: Literal["block", "uniform"] = "block"

    def units(self, count: int) -> list[range]:
        """Return the layers, of a model's `count`, that are computed again together."""
        if self.kind == "none":
            return []
        size, stop = (self.layers or 1, count) if self.method == "uniform" else (1, self.layers or count)
        return [range(first, min(first + size, count)) for first in range(0, stop, size)]


@dataclass(frozen=True)
class Shape:
    model_type: str
    vocabulary: int
    width: int  # numbers of a hidden state
    layers: tuple[DecoderLayer, ...]
    tied: bool  # the output embedding is the input embedding
    positions: int | None  # positions that the model was made for; None: config.json does not say
    family: ModelFamily | None = None  # the model's family, with the biases and norms of this model; None: not in the table

    @staticmethod
    def named(name: str) -> Shape:
        if name not in SHAPES:
            raise UserError(f"{name!r} is not a named shape. Choose from {', '.join(SHAPES)}, or give a folder with a config.json")
        return Shape.from_config(SHAPES[name])

    @staticmethod
    def read(folder: str | Path) -> Shape:
        """Return the shape of the model in a folder."""
        path = Path(folder) / "config.json"
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(given, dict):
                raise ValueError(f"it holds a JSON {type(given).__name__}, not an object")
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read as the configuration of a model: {error}. Give a folder with a config.json") from error
        return Shape.from_config(given)

    @staticmethod
    def from_config(given: Mapping[str, Any]) -> Shape:
        text = given.get("text_config")
        config: Mapping[str, Any] = text if text and isinstance(text, Mapping) else given
        if missing := [key for key in NEEDED if config.get(key) is None]:
            raise UserError(f"config.json: {', '.join(missing)} is missing, so the model's sizes are unknown. Use a model that has it")
        model_type = str(config.get("model_type", ""))
        family = FAMILIES.get(model_type)
        tied = config.get("tie_word_embeddings")
        return Shape(
            model_type=model_type,
            vocabulary=size_of(config, "vocab_size"),
            width=size_of(config, "hidden_size"),
            layers=tuple(layer_of(config, index) for index in range(size_of(config, "num_hidden_layers", most=MOST_LAYERS))),
            tied=bool(family and family.tied) if tied is None else tied,
            positions=None if config.get("max_position_embeddings") is None else size_of(config, "max_position_embeddings"),
            family=family and with_config(family, config),
        )

    # ---- parameters ----------------------------------------------------------------------------------------------------------------

    def parameters_by_kind(self) -> dict[Kind, int]:
        family = self.known_family()
        mlp = sum(count for layer in self.layers for name, count in self._layer_parameters(layer) if name.startswith("mlp."))
        attention = sum(count for layer in self.layers for name, count in self._layer_parameters(layer) if name.startswith("self_attn."))
        return {
            "embedding": self.vocabulary * self.width,
            "attention": attention,
            "mlp": mlp,
            "norms": (family.norms * len(self.layers) + 1) * self.width,
            "head": 0 if self.tied else self.vocabulary * self.width,
        }

    def lora_parameters(self, rank: int, targets: Iterable[str] | Literal["all-linear"], stacked: Iterable[str] = ()) -> int:
        """Return the number of parameters of adapters. `targets`: ends of the names of linear layers; `stacked`: ends of the names of
        stacked experts."""
        return sum(rank * (inner + outer) * copies for _, _, (inner, outer, copies) in self.adapted(targets, stacked))

    def adapted(
        self, targets: Iterable[str] | Literal["all-linear"], stacked: Iterable[str] = ()
    ) -> Iterator[tuple[int, str, tuple[int, int, int]]]:
        """Yield the matrices that adapters are put on: the layer's index, the name, and the size as in `products`."""
        linear = ("",) if targets == "all-linear" else tuple(f".{end}" for end in targets)
        of_experts = tuple(f".{end}" for end in stacked)
        for index, layer in enumerate(self.layers):
            for name, sizes in self.products(layer).items():
                if f".model.layers.{index}.{name}".endswith(linear if sizes[2] == 1 else of_experts):
                    yield index, name, sizes

    def products(self, layer: DecoderLayer) -> dict[str, tuple[int, int, int]]:
        """Return the matrices of a layer that adapters can be put on: numbers in, numbers out, and how many are in one parameter."""
        family, w, inner = self.known_family(), self.width, layer.inner
        qkv = {"qkv_proj": layer.queries + 2 * layer.keys} if family.joined else {
            "q_proj": layer.queries, "k_proj": layer.keys, "v_proj": layer.keys
        }  # fmt: skip
        found = {f"self_attn.{name}": (w, outer, 1) for name, outer in qkv.items()} | {"self_attn.o_proj": (layer.queries, w, 1)}
        if layer.experts is None:
            gates = {"gate_up_proj": 2 * inner} if family.joined else {"gate_proj": inner, "up_proj": inner}
            return found | {f"mlp.{name}": (w, outer, 1) for name, outer in gates.items()} | {"mlp.down_proj": (inner, w, 1)}
        experts = layer.experts
        found |= {"mlp.experts.gate_up_proj": (w, 2 * experts.inner, experts.count)}
        found |= {"mlp.experts.down_proj": (experts.inner, w, experts.count)}
        if shared := experts.shared_inner:
            found |= {f"mlp.shared_expert.{name}": (w, shared, 1) for name in ("gate_proj", "up_proj")}
            found |= {"mlp.shared_expert.down_proj": (shared, w, 1), "mlp.shared_expert_gate": (w, 1, 1)}
        return found

    def matrices(self, layer: DecoderLayer) -> int:
        """Return the number of a layer's matrices as they are stored: each expert has its own, and the two inputs of a gated product are
        separate."""
        return sum(copies * (2 if name.endswith("experts.gate_up_proj") else 1) for name, (_, _, copies) in self.products(layer).items())

    def expert_parameters(self, layer: DecoderLayer) -> int:
        """Return the number of parameters of all experts of a layer, without the shared expert."""
        return sum(
            inner * outer * copies for name, (inner, outer, copies) in self.products(layer).items() if name.startswith("mlp.experts.")
        )

    def _layer_parameters(self, layer: DecoderLayer) -> Iterator[tuple[str, int]]:
        """Yield weights, biases, routers and norms of queries and keys, by name; the norms of hidden states are counted elsewhere."""
        family = self.known_family()
        for name, (inner, outer, copies) in self.products(layer).items():
            biased = family.mlp_bias if name.startswith("mlp.") else family.output_bias if name.endswith("o_proj") else family.qkv_bias
            yield name, copies * (inner * outer + (outer if biased else 0))
        if layer.experts:
            yield "mlp.gate", layer.experts.count * self.width
        if family.head_norms:
            yield "self_attn.norms", layer.queries + layer.keys if family.whole_head_norms else 2 * layer.head_width

    def known_family(self) -> ModelFamily:
        if self.family is None:
            raise UnknownParameters(
                f"config.json: the structure of {self.model_type or 'a model without model_type'} is not known, so its parameters cannot "
                f"be counted without its weights. Known are {', '.join(FAMILIES)}"
            )
        return self.family

    # ---- keys and values, activations ----------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return sum(2 * layer.keys * itemsize for layer in self.layers)

    def kept_bytes(
        self, itemsize: int, *, fused: bool, recompute: Recompute = Recompute(), division: LayerDivision = WHOLE_LAYERS,  # noqa: B008 (frozen)
    ) -> int:  # fmt: skip
        """Return the bytes that a token of a micro-batch holds from the forward pass until its backward pass, without the head's own
        temporaries. If members of a group divide layers, a token is one of a member's own: it holds as many bytes as all members' tokens at
        its place."""
        units = recompute.units(len(self.layers))
        again = {index for unit in units for index in unit}
        kept = [layer for index, layer in enumerate(self.layers) if index not in again]
        whole = sum(self.layer_bytes(layer, itemsize, fused=fused, division=division) for layer in kept)
        inputs = len(units) * itemsize * self.width
        if recompute.kind == "selective":
            inputs += sum(self.product_bytes(self.layers[index], itemsize, division) for index in again)
        # After the layers: the last norm, and its results that the head reads. Before them: token ids, and angles of positions; for members
        # of a group also which tokens are theirs to embed.
        angles = 2 * itemsize * max((layer.head_width for layer in self.layers), default=0)
        members = division.members
        of_head = (members - 1) * itemsize * self.width + (members if members > 1 else 0)
        return whole + inputs + self._norm_bytes(itemsize, fused=fused) + of_head + members * (2 * 8 + angles)

    def _norm_bytes(self, itemsize: int, *, fused: bool) -> int:
        """Return the bytes that a norm keeps: a fused norm its input, its output and a factor; transformers' own its input in float32, the
        normed input, and its output."""
        wide = max(4, itemsize)
        normed = wide if self.family and self.family.wide_norms else itemsize
        return (itemsize + (itemsize if fused else wide + normed)) * self.width + 4

    def layer_bytes(self, layer: DecoderLayer, itemsize: int, *, fused: bool, division: LayerDivision = WHOLE_LAYERS) -> int:
        """Return the bytes that a layer keeps of a token without recompute: the inputs of its operations' gradients.

        Attention keeps queries, keys, values, its output and a normaliser for each head. A fused gated product keeps its two inputs and its
        output; transformers' own also the activated gate. Members of a group have norms of their own tokens, and heads and columns of all
        of them, with the tensors that are gathered before each block."""
        family, wide, members, layer = self.family or ModelFamily(), max(4, itemsize), division.members, division.own(layer)
        norms = family.norms * self._norm_bytes(itemsize, fused=fused) + (members - 1) * 2 * itemsize * self.width
        found = 2 * itemsize * (layer.queries + layer.keys) + 4 * layer.heads
        if family.head_norms:  # fused norms keep the product of all projections, of which queries and keys are parts
            normed = layer.queries + layer.keys
            found += itemsize * (normed + layer.keys) if fused else (wide + (wide if family.wide_norms else itemsize)) * normed
            found += 4 * (1 if family.whole_head_norms else layer.heads + layer.key_heads)
        if layer.experts is None:
            return norms + members * (found + (3 if fused else 4) * itemsize * layer.inner)
        experts = layer.experts
        # Kept: a row for each expert that a token is sent to, before and after it, the row's place in the order of experts, and the
        # router's results. If experts are divided, the rows that arrive are those of other workers' tokens, and have an order of their own.
        results, arrived = (
            itemsize * self.width + 2 * 8,
            itemsize * (self.width + 3 * experts.inner) + (2 * 8 if division.experts > 1 else 0),
        )
        rows = experts.active * results + int(experts.active * division.arriving * arrived)
        router = 4 * experts.count + experts.active * (8 + 4 + itemsize)
        shared = 4 * itemsize * experts.shared_inner + 2 * itemsize * self.width if experts.shared_inner else 0
        return norms + members * (found + rows + router + shared)

    def product_bytes(self, layer: DecoderLayer, itemsize: int, division: LayerDivision = WHOLE_LAYERS) -> int:
        """Return the bytes of a token's results of matrix products and attention, except for the product at a layer's end that is only
        added: a selectively recomputed layer keeps them beside its input."""
        # Members of a group add the sums of these products.
        added, layer = (self.family or ModelFamily()).norms == 2 and division.members == 1, division.own(layer)
        found = itemsize * (2 * layer.queries + 2 * layer.keys + self.width) + 4 * layer.heads
        if layer.experts is None:
            return division.members * (found + itemsize * (2 * layer.inner + (0 if added else self.width)))
        experts = layer.experts
        shared = 2 * experts.shared_inner + self.width + 1 if experts.shared_inner else 0
        rows = int(experts.active * division.arriving * (2 * experts.inner + self.width))
        return division.members * (found + itemsize * (rows + experts.count + shared))


def with_config(family: ModelFamily, config: Mapping[str, Any]) -> ModelFamily:
    """Return the family with every key of config.json that it names looked up."""
    keys = ("qkv_bias", "output_bias", "mlp_bias", "head_norms")
    found = {key: bool(config.get(given)) for key in keys if isinstance(given := getattr(family, key), str)}
    return replace(family, **found)  # type: ignore[arg-type]


def size_of(config: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    found = default if config.get(key) is None else config[key]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= most:
        raise UserError(f"config.json: {key} is {shortened(repr(found), 40)}, which is not a possible number. Correct it")
    return found


def layer_of(config: Mapping[str, Any], index: int) -> DecoderLayer:
    own = layer_config(config, index)
    heads, width = size_of(own, "num_attention_heads"), size_of(config, "hidden_size")
    inner = size_of(own, "intermediate_size", 4 * width)
    return DecoderLayer(
        heads=heads,
        key_heads=size_of(own, "num_key_value_heads", heads),
        head_width=size_of(own, "head_dim", width // heads),
        inner=inner,
        experts=experts_of(own, index, inner),
    )


def layer_config(config: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the configuration of one layer: its overrides (`per_layer_config`), and its own values of sizes that are listed for each
    layer."""
    overrides = config.get("per_layer_config") or {}
    try:
        own = {**config, **overrides.get(str(index), {})}
        return own | {key: own[key][index] for key in PER_LAYER if isinstance(own.get(key), list | tuple)}
    except (AttributeError, IndexError, TypeError) as error:
        raise UserError(f"config.json: the sizes of layer {index} cannot be read: {error}. Give one for each layer") from error


def experts_of(config: Mapping[str, Any], index: int, inner: int) -> Experts | None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count or index in (config.get("mlp_only_layers") or ()) or (index + 1) % (config.get("decoder_sparse_step") or 1):
        return None
    active = size_of(config, "num_experts_per_tok", config.get("top_k_experts") or 1)
    shared = config.get("shared_expert_intermediate_size") or 0
    return Experts(count, active, size_of(config, "moe_intermediate_size", inner), shared)
