"""The recipe's small version: a tiny model with random weights, few rows, few steps.

It shows that every stage works, not how good a model becomes: SFT learns the solutions of a few problems nearly by heart, and GRPO then
makes the right ones likelier. Problems that it has not seen it cannot solve.
"""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

from prepare import SPLITS, equations

from fulltilt.data.files import read_rows

ROWS = 16  # of each file
BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OVERRIDES = (
    "run.device=cpu",
    "sft.algorithm.prompts_per_step=16",
    "sft.run.epochs=70",
    "sft.train.lr=3e-3",
    "sft.run.save_every=20",
    "sft.run.eval_every=30",
    *(
        f"{stage}.{setting}"
        for stage in ("grpo", "dapo", "ppo")
        for setting in (
            "run.steps=8",
            "algorithm.prompts_per_step=16",
            "algorithm.samples_per_prompt=8",
            "rollout.max_new_tokens=64",
            "train.lr=1e-4",
            "run.save_every=2",
            "run.eval_every=4",
        )
    ),
    "dapo.algorithm.prompts_per_round=16",
    "dapo.algorithm.overlong_buffer=8",
    "ppo.algorithm.critic_warmup=2",
    "ppo.critic.lr=3e-4",
)


def model(source: Path, folder: Path) -> Path:
    """A folder with a tokenizer made from the rows' text, and a Llama of two layers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if folder.is_dir():
        return folder
    rows = [row for split in SPLITS for row, _ in islice(read_rows(source / f"{split}.jsonl"), ROWS)]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        (text for row in rows for text in (row["question"], equations(row["answer"]) or "")),
        trainers.BpeTrainer(
            vocab_size=1024, special_tokens=[BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BEGIN, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1, pad_token_id=1, tie_word_embeddings=True,
    )  # fmt: skip
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    LlamaForCausalLM(shape).save_pretrained(partial)
    partial.rename(folder)
    return folder
