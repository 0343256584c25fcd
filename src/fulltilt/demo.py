"""The demo: a small random model learns to add, on this machine alone.

Enters: a folder. Leaves: in it a model with its own tokenizer, data, two run folders (SFT warm-up, then GRPO) and `summary.json`. The demo
takes the same path as every run: files on disk, the same configuration, the same loop. Nothing is downloaded. Guaranteed: nothing is
deleted or overwritten; an earlier demo in the folder is moved, with whatever was changed or added inside it, to `before-1/`, `before-2/`,
...
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt import loop
from fulltilt.folders import DEMO_MARKER, move_aside, refuse_foreign, use_usual_modes
from fulltilt.observe.console import Console
from fulltilt.records import UserError

LARGEST = 9  # the numbers to add are 0 to 9
RIGHT, WRONG = 9, 11  # how often each sum is right and wrong in the warm-up data
SFT_STEPS = 700
GRPO_STEPS = 90
LEARNED = 0.9  # the reward that the demo must reach
WRITTEN = ("model", "data", "sft", "grpo", "warm", "reward.py", "sft.toml", "grpo.toml", "summary.json")

REWARD = '''"""1 for the right sum, 0 otherwise."""


def score(solution_str, ground_truth):
    return float(solution_str.strip() == str(ground_truth))
'''

SFT = """[model]
path = "{folder}/model"

[data]
train = "{folder}/data/sft.jsonl"
max_prompt_tokens = 16

[algorithm]
name = "sft"
prompts_per_step = 250

[train]
lr = 3e-3
warmup_steps = 10
schedule = "cosine"

[run]
dir = "{folder}/sft"
steps = {sft_steps}
device = "cpu"
"""

GRPO = """[model]
path = "{folder}/warm"

[data]
train = "{folder}/data/train.jsonl"
max_prompt_tokens = 16

[algorithm]
name = "grpo"
prompts_per_step = 64
samples_per_prompt = 8

[rollout]
max_new_tokens = 6

[reward]
function = "{folder}/reward.py:score"

[train]
lr = 5e-4
warmup_steps = 5

[run]
dir = "{folder}/grpo"
steps = {grpo_steps}
device = "cpu"
save_rollouts = 64
"""


@dataclass(frozen=True)
class DemoSummary:
    reward_first: float
    reward_last: float
    seconds: float  # seconds of both stages, and of making the model and the data
    tokens_per_s: float


def run(folder: Path, console: Console) -> DemoSummary:
    begin = time.perf_counter()
    warm = warm_up(folder, console)
    console.note(f"2. GRPO: the model answers, and learns only whether it was right ({folder / 'grpo.toml'})")
    learned = train(folder / "grpo.toml", console)
    assert learned.reward_first is not None and learned.reward_last is not None
    seconds = time.perf_counter() - begin
    summary = DemoSummary(learned.reward_first, learned.reward_last, seconds, (warm.tokens + learned.tokens) / seconds)
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    for line in what_it_learned(folder / "grpo" / "rollouts"):
        console.note(line)
    return summary


def warm_up(folder: Path, console: Console) -> loop.Summary:
    """Make the files of both runs, and in `warm/` a model that knows the form of an answer: everything before reinforcement learning."""
    if aside := prepare(folder):
        console.note(f"the earlier demo in {folder} was moved to {aside}, with everything in it")
    for name, text in (("sft", SFT), ("grpo", GRPO)):
        filled = text.format(folder=folder.as_posix(), sft_steps=SFT_STEPS, grpo_steps=GRPO_STEPS)
        (folder / f"{name}.toml").write_text(filled, encoding="utf-8")
    console.note(f"1. supervised warm-up: a random model learns from sums, many of them wrong ({folder / 'sft.toml'})")
    warm = train(folder / "sft.toml", console)
    shutil.copytree(folder / "sft" / "checkpoints" / f"step-{SFT_STEPS:08d}" / "model", folder / "warm")
    return warm


def train(path: Path, console: Console) -> loop.Summary:
    summary = loop.train(configuration.load(path), console)
    if summary.interrupted:
        raise KeyboardInterrupt
    return summary


def prepare(folder: Path) -> Path | None:
    """Write the model, the tokenizer, the data and the reward, as a user would provide them. Returns the folder of an earlier demo after it
    was moved, if there was one."""
    refuse_foreign(folder, DEMO_MARKER, "--dir")
    try:
        # These files and folders may be edited by the user, so they are moved; everything else in the folder is not touched.
        aside = move_aside([path for name in WRITTEN if os.path.lexists(path := folder / name)], folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DEMO_MARKER).touch()
        (folder / "data").mkdir()
    except OSError as error:
        raise UserError(f"--dir: {folder} cannot be written: {error.strerror or error}. Choose another folder") from error
    make_model(folder / "model")
    use_usual_modes(folder / "model")
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    write_lines(folder / "data" / "sft.jsonl", sloppy_sums(pairs))
    tasks = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "addition"} for a, b in pairs]
    write_lines(folder / "data" / "train.jsonl", tasks)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    return aside


def sloppy_sums(pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return data that teaches the form of an answer and a habit of wrong answers, which reinforcement learning then corrects."""
    chance = random.Random(0)
    rows = []
    for a, b in pairs:
        others = [total for total in range(2 * LARGEST + 1) if total != a + b]
        answers = [a + b] * RIGHT + chance.sample(others, WRONG)
        rows += [{"prompt": f"{a}+{b}=", "response": str(answer)} for answer in answers]
    return rows


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = save_tokenizer(folder, "0123456789+=", begins=True)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)


def save_tokenizer(folder: Path, characters: str, *, begins: bool) -> int:
    """Save a tokenizer with one token per character. `begins`: every text begins with <s>. Returns the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", "<unk>", *characters]
    inner = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)
    return len(tokens)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def what_it_learned(rollouts: Path) -> list[str]:
    """Return a few samples of the first step and of the last, for comparison."""
    files = sorted(rollouts.glob("step-*.jsonl"))
    lines = []
    for title, path in (("first step", files[0]), ("last step ", files[-1])):
        samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        shown = {sample["uid"]: sample for sample in samples}
        answers = [f"{s['prompt'].removeprefix('<s>')}{s['response']}{' ' if s['reward'] else ' (wrong) '}" for s in shown.values()]
        lines.append(f"{title}:  " + " ".join(answers[:8]))
    return lines
