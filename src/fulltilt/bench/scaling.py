"""What the collectives of a step cost at sizes that nobody can try here: the tables of docs/scaling.md.

Enters: nothing; models, devices and the work of a step are in this file. Leaves: two tables on standard output, in Markdown. Guaranteed:
bytes are those of parallel/traffic.py, which equal what is counted; arithmetic is that of batching/cost.py; nothing is loaded or measured.

    python -m fulltilt.bench.scaling
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fulltilt.batching.cost import ModelSize, update_flops
from fulltilt.bench.roofline import DEVICES
from fulltilt.parallel.traffic import Learner, predict, sent_bytes
from fulltilt.shape import QWEN2, SHAPES, Shape

MODELS: dict[str, Mapping[str, Any]] = {
    "0.5B": SHAPES["0.5B"],
    "7B": SHAPES["7B"],
    "32B": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "70B": {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
}  # fmt: skip
GPUS = (8, 64, 1024)
OF_MACHINE = 8  # GPUs that NVLink joins
NVLINK = 900e9 / 2  # bytes per second that a GPU sends while it receives as many
NETWORK = 400e9 / 8  # bytes per second of one adapter, in each direction
MEMORY = 141e9  # bytes of an H200
FLOPS, SHARE = DEVICES[r"\bH200\b"].flops, 0.5  # FLOP/s of the device, and the share of them that passes reach
SAMPLES, PROMPT, RESPONSE, UPDATES = 512 * 16, 512, 1536, 4  # samples of a step, tokens of each, optimizer steps


@dataclass(frozen=True)
class Scale:
    """One model on some GPUs: each has all parameters and their gradients, and shares out masters and moments."""

    model: str
    gpus: int

    @property
    def shape(self) -> Shape:
        return Shape.from_config(MODELS[self.model])

    @property
    def parameters(self) -> int:
        return sum(self.shape.parameters_by_kind().values())

    @property
    def held_bytes(self) -> float:
        """Bytes on each GPU: parameters in bfloat16, gradients in float32, and its part of masters and two moments in float32."""
        return (2 + 4 + 12 / self.gpus) * self.parameters

    @property
    def compute_s(self) -> float:
        """Forward and backward passes over all samples of a step."""
        lengths = [PROMPT + RESPONSE] * SAMPLES
        flops = update_flops(ModelSize.of_shape(self.shape), lengths, SAMPLES * RESPONSE).total
        return flops / (self.gpus * FLOPS * SHARE)

    @property
    def moved(self) -> Mapping[str, int]:
        return predict([Learner({"bfloat16": [(self.parameters,)]}, UPDATES)], self.gpus)

    def collectives_s(self, adapters: int) -> float:
        """`adapters`: to the network, of each machine. A ring passes through every machine once for each of its adapters, and through all
        GPUs of the machine: the slower of the two links decides."""
        speed = NVLINK if self.gpus <= OF_MACHINE else min(NVLINK, adapters * NETWORK)
        return sent_bytes(self.moved, self.gpus) / speed


def table() -> Iterator[str]:
    heads = ("model", "GPUs", "held by each", "moved by each in a step", "passes", "collectives, 8 adapters", "collectives, 1 adapter")
    yield f"| {' | '.join([*heads, 'what binds'])} |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in MODELS:
        for gpus in GPUS:
            scale = Scale(model, gpus)
            times = [scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)]
            cells = [f"{scale.held_bytes / 1e9:.0f} GB", f"{sum(scale.moved.values()) / 1e9:.0f} GB", *map(in_seconds, times)]
            yield f"| {' | '.join([model, f'{gpus:,}', *cells, binding(scale)])} |"


def binding(scale: Scale) -> str:
    if scale.held_bytes > MEMORY:
        return "memory: it does not fit"
    compute, fast, slow = scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)
    if fast > compute:
        return "the network"
    return (
        "arithmetic"
        if slow < compute / 4 or scale.gpus <= OF_MACHINE
        else f"arithmetic; with 1 adapter {'the network' if slow > compute else 'both'}"
    )


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def main() -> None:
    for line in table():
        print(line)


if __name__ == "__main__":
    main()
