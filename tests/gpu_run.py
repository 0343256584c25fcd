"""A whole GRPO run of a real shape on this machine's GPU, with random weights: seconds by phase and peak memory.

    python tests/gpu_run.py --folder DIR --out FILE.json [--steps 4] [--prompts 64] [--samples 8] [--new-tokens 256]

Needs nothing from outside: a model of Qwen2.5-0.5B's shape, the tests' tokenizer, prompts of random letters and a reward that counts
letters. It is a check that everything fits together on CUDA, not a benchmark against others.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

SHAPE = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
RUN = """[model]
path = "{folder}/model"
[data]
train = "{folder}/train.jsonl"
[algorithm]
prompts_per_step = {prompts}
samples_per_prompt = {samples}
kl_coef = 0.001
minibatches_per_step = 2
[rollout]
max_new_tokens = {new_tokens}
[reward]
function = "{folder}/reward.py:score"
[run]
dir = "{folder}/run"
steps = {steps}
save_every = 2
keep = 1
"""


def prepare(folder: Path, arguments: argparse.Namespace) -> Path:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE), dtype=torch.bfloat16).save_pretrained(folder / "model")
    models.tokenizer().save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    prompts = ("".join(random.choice(list("abcdef "), random.integers(96, 512))) for _ in range(4 * arguments.prompts))
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": prompt, "ground_truth": ""}) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text("def score(solution_str):\n    return len(solution_str) / 100\n")
    (folder / "run.toml").write_text(RUN.format(**vars(arguments)))
    return folder / "run.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("steps", 4), ("prompts", 64), ("samples", 8), ("new-tokens", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    run = prepare(arguments.folder, arguments)
    done = subprocess.run(
        [sys.executable, "-m", "fulltilt.cli", "train", str(run), "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    figures = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "steps": [json.loads(line) for line in done.stdout.splitlines()],
    }
    arguments.out.write_text(json.dumps(figures, indent=1))
    for step in figures["steps"]:
        print({name: round(value, 4) for name, value in step.items() if name.startswith(("timing_s", "perf", "rollout", "actor"))})


if __name__ == "__main__":
    main()
