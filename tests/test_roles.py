"""Critic, reward model, reference and adapters in real runs: what one role is told by another is what transformers and peft alone say.

Runs of a few steps on tiny models, in this process wherever that can show it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import peft
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from test_loggers import metric_name, wandb_records
from test_resume import cut_back
from test_reward_model import CHAT, other_tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from variants import sample_cases

from fulltilt.cluster.assembly import assemble
from fulltilt.loop.experience import validate
from fulltilt.loop.run import Progress, Run
from fulltilt.model.lora import adapted
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import Loggers, open_loggers
from fulltilt.observe.validation import sample_rows
from fulltilt.presets import PRESETS
from fulltilt.records import LossSums, MicroBatch, MiniBatch, Row, UserError
from fulltilt.training.checkpoint import CheckpointStore, write_manifest

ModelFolders = Callable[[str], Path]

QUICK = ("run.eval_every=0", "run.eval_before=false", "run.save_every=0")
ONE = (*QUICK, "run.steps=1")
NO_KL = "algorithm.kl_coef=0.0"
IGNORE_FAILED = 'health.ignore=["all-rewards-failed", "all-clipped"]'
PPO = ("algorithm.name=ppo", NO_KL, "critic.lr=2e-3")
PLAIN_RATE = ("train.schedule=constant", "train.warmup_steps=0", "train.weight_decay=0.0")
# As in test_run.py: with eps far above every gradient, AdamW is as good as SGD and rounding stays rounding.
LIKE_SGD = ("train.eps=1.0", "train.lr=0.5", "critic.lr=0.5", "train.clip_grad=0.0", *PLAIN_RATE)
ADAPTERS = ("lora.rank=4", "train.lr=2e-2")

MORE_REWARDS = '''
import zlib


def fingerprint(solution_str):
    """Another response, another number."""
    return zlib.crc32(solution_str.encode()) / 2**32


def not_between(solution_str, ground_truth, first, last):
    """Fails on some questions."""
    if first <= int(ground_truth) <= last:
        raise RuntimeError("not these")
    return fingerprint(solution_str)


def but_not(solution_str, ground_truth, refused):
    """Fails on one response to each question."""
    if refused.get(ground_truth) == solution_str:
        raise RuntimeError("not this one")
    return fingerprint(solution_str)
'''


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return prepared(tmp_path / "folder", model_folders("qwen3"))


def prepared(folder: Path, model: Path, tables: Mapping[str, Mapping[str, Any]] = runs.GRPO) -> Path:
    runs.make(folder, model, tables)
    (folder / "more.py").write_text(MORE_REWARDS)
    return folder


def one_step(folder: Path, *overrides: str) -> dict[str, Any]:
    runs.train(folder, *ONE, *overrides)
    (line,) = runs.metrics(folder)
    return line


def silent() -> Console:
    said = io.StringIO()
    return Console(stdout=said, stderr=said, terminal=False)


@dataclass
class Watched:
    """A run that is stepped by hand, with what went through it."""

    run: Run
    rows: list[list[Row]] = field(default_factory=list)  # of each step, advantages included
    pieces: dict[str, list[int]] = field(default_factory=dict)  # micro-batches of each role's mini-batches
    passes: Counter[str] = field(default_factory=Counter)  # of each role, without gradient


@contextlib.contextmanager
def watched(folder: Path, *overrides: str) -> Iterator[Watched]:
    config = runs.read_config(folder, *overrides)
    with contextlib.chdir(folder), contextlib.closing(assemble(config)) as parts:
        rows: list[list[Row]] = []
        really = parts.algorithm.advantage

        def advantage(given: Sequence[Row]) -> list[Row]:
            rows.append(really(given))
            return rows[-1]

        store = CheckpointStore(Path("run") / "checkpoints", config.run.keep)
        assert parts.samples
        parts.samples.algorithm = replace(parts.algorithm, advantage=advantage)
        seen = Watched(Run(config, parts, store, Progress(), silent(), open_loggers(config.log, Path("run"), {}, 0)), rows)
        for trainer in parts.worker.trainers.values():
            count_pieces(trainer, seen.pieces.setdefault(trainer.role.name, []))
        for role in (role for name, role in parts.worker.roles.items() if name in ("critic", "reward_model")):
            count_passes(role, seen.passes)
        yield seen


def count_passes(role: Any, counts: Counter[str]) -> None:
    really = role.annotate

    def annotate(micro: MicroBatch) -> torch.Tensor:
        counts[role.name] += 1
        return really(micro)  # type: ignore[no-any-return]

    role.annotate = annotate


def count_pieces(trainer: Any, counts: list[int]) -> None:
    really = trainer.accumulating

    def accumulating(batch: MiniBatch, passes: int = 0) -> Generator[None, None, LossSums]:
        counts.append(len(batch.micro_batches))
        return really(batch, passes)  # type: ignore[no-any-return]

    trainer.accumulating = accumulating


def logprobs_of(model: Any, rows: Sequence[Row]) -> list[np.ndarray]:
    """By the model's own forward, one row at a time; entry t speaks of token t."""
    with torch.no_grad():
        return [
            np.concatenate([[0.0], model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()])
            for ids in (torch.from_numpy(row.ids) for row in rows)
        ]


def assert_annotated(rows: Sequence[Row], name: str, expected: Sequence[np.ndarray]) -> None:
    """A per-token field of rows, where they are trained, is what was computed otherwise; and it is nothing elsewhere."""
    for row, numbers in zip(rows, expected, strict=True):
        found = getattr(row, name)
        np.testing.assert_allclose(found[row.mask], numbers[row.mask], rtol=0, atol=1e-5)
        assert not found[~row.mask].any()


def save_classifier(config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A reward model with random weights, as transformers would find it."""
    torch.manual_seed(4)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- critic -----------------------------------------------------------------------------------------------------------------------------

CRITIC_METRICS = [
    "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr", "critic/values/mean",
    "critic/values/max", "critic/values/min", "critic/returns/mean", "critic/returns/max", "critic/returns/min",
    "critic/vf_explained_var", "timing_s/values", "timing_s/update_critic", "timing_per_token_ms/values",
    "timing_per_token_ms/update_critic",
]  # fmt: skip


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of another family and width than the actor, with the actor's tokenizer."""
    config = LlamaConfig(**{**models.SMALL, "hidden_size": 48, "num_hidden_layers": 1})
    return save_classifier(config, tmp_path_factory.mktemp("wider") / "model", models.tokenizer())


def values_of(body: Any, score: torch.Tensor, rows: Sequence[Row]) -> list[np.ndarray]:
    """By transformers' own body, one row at a time: the head's number at the token before."""
    with torch.no_grad():
        numbers = [body(input_ids=torch.from_numpy(row.ids)[None]).last_hidden_state[0] @ score[0] for row in rows]
    return [np.concatenate([[0.0], each[:-1].numpy()]) for each in numbers]


def test_ppo_has_a_critic_with_phases_and_metrics(folder: Path) -> None:
    line = one_step(folder, *PPO)
    assert [name for name in CRITIC_METRICS if name not in line] == []
    assert (line["critic/updates"], line["critic/skipped_updates"]) == (2, 0)
    assert line["critic/grad_norm"] > 0
    # A new head says 0 of everything: nothing is explained yet, and with lambda 1 the returns are the rewards.
    assert (line["critic/values/max"], line["critic/values/min"], line["critic/vf_explained_var"]) == (0, 0, 0)
    assert line["critic/returns/max"] == pytest.approx(line["critic/rewards/max"])
    assert "timing_s/ref" not in line


def test_a_critics_head_has_the_width_of_its_bodys_results(tmp_path: Path) -> None:
    """OPT-350m projects its last states from the width of its layers to that of its embedding."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, do_layer_norm_before=False, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    models.tokenizer().save_pretrained(tmp_path / "model")
    with watched(prepared(tmp_path / "folder", tmp_path / "model"), *PPO, *PLAIN_RATE) as seen:
        seen.run.rl_step(1)
        line = seen.run.rl_step(2)
        assert line["critic/grad_norm"] > 0 and line["critic/values/mean"] != 0
        assert seen.run.parts.worker.roles["critic"].model.score.in_features == 16


def test_without_a_critic_there_is_none_of_it(folder: Path) -> None:
    line = one_step(folder)
    assert [name for name in CRITIC_METRICS if name in line] == []
    tensors = load_file(runs.checkpoints(folder)[1] / "trainer.safetensors")
    assert not any(name.startswith("critic/") for name in tensors)
    assert runs.state(runs.checkpoints(folder)[1])["critic"] is None


def test_values_are_those_of_transformers_body_and_the_stored_head(folder: Path, wider: Path) -> None:
    """A reward model's head is kept, whatever its width is; the update moves body and head."""
    body, score = AutoModel.from_pretrained(wider, attn_implementation="eager"), load_file(wider / "model.safetensors")["score.weight"]
    with watched(folder, *PPO, f"critic.path={wider}") as seen:
        line = seen.run.rl_step(1)
        (rows,) = seen.rows
        assert_annotated(rows, "values", values_of(body, score, rows))
        told = np.concatenate([row.values[row.mask] for row in rows if row.values is not None])
        assert np.std(told) > 0.05
        assert line["critic/values/mean"] == pytest.approx(told.mean())
        critic = seen.run.parts.worker.roles["critic"]
        assert critic and critic.model.config.hidden_size == 48
        assert not torch.equal(critic.model.score.weight, score)
        moved = [name for name, tensor in critic.model.body.state_dict().items() if not torch.equal(tensor, body.state_dict()[name])]
        assert moved == list(body.state_dict())


def test_values_of_the_next_step_are_those_of_what_was_learned(folder: Path) -> None:
    """A new head on the actor's own model. The critic's body is another copy than the actor's: theirs part at the first step."""
    with watched(folder, *PPO, *PLAIN_RATE) as seen:
        seen.run.rl_step(1)
        parts = seen.run.parts
        assert parts.worker.roles["critic"] and parts.worker.roles["critic"].model.body is not parts.worker.actor.model
        body = AutoModel.from_pretrained(folder / "model", attn_implementation="eager")
        body.load_state_dict(parts.worker.roles["critic"].model.body.state_dict())
        score = parts.worker.roles["critic"].model.score.weight.detach().clone()
        line = seen.run.rl_step(2)
        assert_annotated(seen.rows[1], "values", values_of(body, score, seen.rows[1]))
        assert abs(line["critic/values/mean"]) > 1e-3
        own, actors = body.state_dict(), AutoModel.from_pretrained(folder / "model").state_dict()
        assert not all(torch.equal(own[name], actors[name]) for name in own)


def test_a_critics_learning_rate_is_its_own(folder: Path) -> None:
    """Adam's first step is the learning rate in every entry, and the head starts at nothing."""
    own = ("critic.lr=12e-3", "critic.warmup_steps=4", "critic.weight_decay=0.0", "critic.clip_grad=0.0", "train.lr=1e-4")
    line = one_step(folder, *PPO, *PLAIN_RATE, "algorithm.minibatches_per_step=1", *own)
    assert (line["critic/lr"], line["actor/lr"]) == (3e-3, 1e-4)
    tensors = load_file(runs.checkpoints(folder)[1] / "trainer.safetensors")
    torch.testing.assert_close(tensors["critic/parameter/score.weight"].abs(), torch.full((1, 32), 3e-3), rtol=1e-2, atol=0)


def test_the_warm_up_updates_the_critic_alone(folder: Path) -> None:
    options = (*PPO, "run.steps=3", "run.save_every=1", "run.keep=3", "run.eval_every=0", "run.eval_before=false", "train.schedule=linear")
    runs.train(folder, *options, "train.warmup_steps=0", "algorithm.critic_warmup=2")
    first, second, third = (runs.checkpoints(folder)[step] for step in (1, 2, 3))
    started = load_file(folder / "model" / "model.safetensors")
    for checkpoint in (first, second):
        assert all(torch.equal(tensor, started[name]) for name, tensor in runs.parameters(checkpoint).items())
    assert not any(torch.equal(tensor, started[name]) for name, tensor in runs.parameters(third).items())
    assert [runs.state(checkpoint)["updates"] for checkpoint in (first, second, third)] == [0, 0, 2]
    assert [runs.state(checkpoint)["critic"]["updates"] for checkpoint in (first, second, third)] == [2, 4, 6]
    before, after = (load_file(checkpoint / "trainer.safetensors") for checkpoint in (first, second))
    learned = [name for name in before if name.startswith("critic/parameter/")]
    assert len(learned) > 20 and not any(torch.equal(before[name], after[name]) for name in learned)

    lines = runs.metrics(folder)
    for line in lines[:2]:
        assert line["critic/updates"] == 2 and "timing_s/update_critic" in line
        names = set(line) - {"actor/forward_pad_tokens"}  # its log-probs are computed all the same
        assert not any(name.startswith("actor/") or name == "timing_s/update_actor" for name in names)
    assert (lines[2]["actor/updates"], lines[2]["critic/updates"]) == (2, 2)
    # The actor's schedule spans its own two updates, the critic's its six: all and half of the peak; a third and a sixth of it.
    assert lines[2]["actor/lr"] == pytest.approx(2e-3 * 3 / 4)
    assert lines[2]["critic/lr"] == pytest.approx(2e-3 * (1 / 3 + 1 / 6) / 2)


def critic_and_actor(folder: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], dict[str, list[int]], int]:
    """Both roles after two steps, how their updates were cut, and the passes that gave the critic's values."""
    with watched(folder, *PPO, *LIKE_SGD, *overrides) as seen:
        for step in (1, 2):
            seen.run.rl_step(step)
        parts = seen.run.parts
        assert parts.worker.roles["critic"]
        roles = {"actor": parts.worker.actor.model, "critic": parts.worker.roles["critic"].model}
        tensors = {f"{role}/{name}": tensor for role, model in roles.items() for name, tensor in model.state_dict().items()}
        return tensors, seen.pieces, seen.passes["critic"]


@pytest.mark.matrix
def test_how_the_critic_is_cut_does_not_show(folder: Path) -> None:
    expected, whole, passes = critic_and_actor(folder)
    assert set(whole["critic"]) == {1} and passes == 2
    ways = (
        ("critic.token_budget=50", "critic.forward_token_budget=30"),
        ("critic.dynamic_batch=false", "critic.micro_batch=3"),
    )
    for way in ways:
        found, cut, passes = critic_and_actor(folder, *way)
        assert cut["actor"] == whole["actor"] and min(cut["critic"]) > 2 and passes > 10
        apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
        assert apart < 1e-5, way
    started = load_file(folder / "model" / "model.safetensors")
    for role, prefix in (("actor", ""), ("critic", "body.")):
        name = "model.layers.0.mlp.up_proj.weight"
        moved = expected[f"{role}/{prefix}{name.removeprefix('model.') if prefix else name}"] - started[name]
        assert float(moved.abs().max()) > 1e-3, role


def test_a_critic_that_cannot_read_the_actors_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    AutoModelForCausalLM.from_config(LlamaConfig(**{**models.SMALL, "vocab_size": 90})).save_pretrained(small)
    with pytest.raises(UserError, match=r"the tokenizer has \d+ tokens but the model's embedding only 90 rows"):
        runs.train(folder, *ONE, *PPO, f"critic.path={small}")
    assert not (folder / "run").exists()


def test_a_warm_up_that_outlasts_the_run_is_refused_also_in_epochs(folder: Path) -> None:
    """An epoch is four steps."""
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("steps = 16\n", "epochs = 1\n", 1))
    with pytest.raises(UserError, match=r"^algorithm\.critic_warmup: only the critic .* first 4 steps, and the run has 4\. Lower it"):
        runs.train(folder, *QUICK, *PPO, "algorithm.critic_warmup=4")
    assert not (folder / "run").exists()
    with watched(folder, *PPO, "algorithm.critic_warmup=3") as seen:
        assert seen.run.parts.plan.steps == 4


def test_both_schedules_end_with_the_run_although_steps_are_left_out(folder: Path) -> None:
    """Two updates a step. Step 1 is the critic's alone, and in steps 2 and 3 every reward fails. Of the actor's eight updates three are its
    warm-up, of the critic's ten; what is left falls to nothing."""
    options = ("data.shuffle=false", "reward.function=more.py:not_between", "reward.args={ first = 16, last = 44 }", IGNORE_FAILED)
    said = runs.train(folder, *QUICK, *PPO, *options, "run.steps=5", "algorithm.critic_warmup=1", "train.schedule=linear").said
    assert said.count("the critic's update is left out") == said.count("the actor's update is left out") == 2
    first, *failed, fourth, fifth = runs.metrics(folder)
    assert "actor/updates" not in first and [(line["critic/updates"], line["actor/updates"]) for line in failed] == [(0, 0)] * 2
    assert first["critic/lr"] == pytest.approx(2e-3 * (1 / 3 + 2 / 3) / 2)
    assert [line["critic/lr"] for line in (fourth, fifth)] == pytest.approx([2e-3 * (4 / 7 + 3 / 7) / 2, 2e-3 * (2 / 7 + 1 / 7) / 2])
    assert [line["actor/lr"] for line in (fourth, fifth)] == pytest.approx([2e-3 * (4 / 5 + 3 / 5) / 2, 2e-3 * (2 / 5 + 1 / 5) / 2])


@pytest.mark.long
def test_a_critic_that_joins_later_starts_anew(folder: Path) -> None:
    """A new head says 0 of everything; one that has learned does not."""
    runs.train(folder, *ONE, NO_KL)
    forced = runs.train(folder, *QUICK, *PPO, "run.steps=2", "run.resume=force").said
    assert "the checkpoint holds no critic: a new one is started" in forced
    again = runs.train(folder, *QUICK, *PPO, "run.steps=3").said
    assert "starts anew" not in again
    _, second, third = runs.metrics(folder)
    assert (second["critic/updates"], second["critic/values/max"], second["critic/values/min"]) == (2, 0, 0)
    assert third["critic/values/max"] != 0


def forget(checkpoint: Path, *keys: str) -> None:
    """As a version that did not know these keys would have saved it."""
    state = runs.state(checkpoint)
    assert state.keys() >= set(keys)
    (checkpoint / "state.json").write_text(json.dumps({key: value for key, value in state.items() if key not in keys}))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, state["step"])


def test_a_checkpoint_of_a_version_that_knew_less_is_gone_on_from(tmp_path: Path, model_folders: ModelFolders) -> None:
    expected = prepared(tmp_path / "expected", model_folders("qwen3"))
    options = (*QUICK, "run.save_every=1", "run.steps=2")
    runs.train(expected, *options)
    folder = runs.copy(expected, tmp_path / "resumed")
    cut_back(folder, 1)
    forget(runs.checkpoints(folder)[1], "surplus", "reward_kl_coef", "health", "critic")
    said = runs.train(folder, *options).said
    assert "resuming from step 1" in said and "critic" not in said
    assert runs.without_clock(runs.metrics(folder)) == runs.without_clock(runs.metrics(expected))
    runs.assert_equal_checkpoints(runs.checkpoints(folder)[2], runs.checkpoints(expected)[2])


def test_a_checkpoint_that_knows_of_no_critic_gives_none(folder: Path) -> None:
    runs.train(folder, *ONE, *PPO)
    forget(runs.checkpoints(folder)[1], "critic")
    assert "the checkpoint holds no critic: a new one is started" in runs.train(folder, *QUICK, *PPO, "run.steps=2").said
    assert runs.metrics(folder)[1]["critic/values/max"] == 0


def test_a_step_in_which_every_reward_fails_leaves_the_critic_alone_too(folder: Path) -> None:
    line = one_step(folder, *PPO, "reward.function=reward.py:always_fails", IGNORE_FAILED)
    assert (line["critic/updates"], line["actor/updates"], line["reward/excluded"]) == (0, 0, 16)
    assert (line["reward/calls"], line["reward/failed_calls"], line["reward/retries"]) == (16, 16, 0)
    assert not load_file(runs.checkpoints(folder)[1] / "trainer.safetensors")["critic/parameter/score.weight"].any()


# -- reward model -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """A reward model of another family than the actor, with a tokenizer and a template of its own, and transformers' view of it."""

    folder: Path
    model: Any
    tokenizer: Any

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        with torch.no_grad():
            return [float(self.model(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in texts]

    def plain(self, sampled: Sequence[Mapping[str, Any]]) -> list[float]:
        """Of prompts that are strings: one text, and an end where the response has one."""
        ends = {"stop": [self.tokenizer.eos_token_id], "length": []}
        return self.scores([self.tokenizer(each["prompt"] + each["response"])["input_ids"] + ends[each["finish"]] for each in sampled])

    def chat(self, sampled: Sequence[Mapping[str, Any]], template: str | None = None) -> list[float]:
        """Of `MESSAGES`: a finished conversation, as the reward model's template writes it."""
        spoken = [[*MESSAGES, {"role": "assistant", "content": each["response"]}] for each in sampled]
        return self.scores([self.tokenizer.apply_chat_template(each, chat_template=template, return_dict=False) for each in spoken])


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two and three?"}]


JUDGED: dict[str, Any] = {**runs.GRPO, "reward": {"function": "reward_model"}}  # there is no function to have workers


@pytest.fixture
def judged(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return prepared(tmp_path / "folder", model_folders("qwen3"), JUDGED)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    tokenizer = other_tokenizer(CHAT)
    config = LlamaConfig(**{**models.SMALL, "vocab_size": len(tokenizer) + 4, "bos_token_id": 0, "eos_token_id": 3})
    folder = save_classifier(config, tmp_path_factory.mktemp("judge") / "model", tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return Judge(folder, model, AutoTokenizer.from_pretrained(folder))


def close(found: Sequence[float], expected: Sequence[float]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "passes"),
    [
        ((), 1),
        (("reward_model.forward_token_budget=20",), 16),
        (("reward_model.dynamic_batch=false", "reward_model.micro_batch=3"), 6),
    ],
)
def test_the_reward_is_transformers_score_of_the_same_text(judged: Path, judge: Judge, way: tuple[str, ...], passes: int) -> None:
    with watched(judged, f"reward_model.path={judge.folder}", "rollout.max_new_tokens=40", *way) as seen:
        line = seen.run.rl_step(1)
    assert seen.passes["reward_model"] == passes
    sampled = runs.rollouts(judged, 1)
    assert {each["finish"] for each in sampled} == {"stop", "length"}
    expected = judge.plain(sampled)
    assert np.std(expected) > 0.1
    close([each["reward"] for each in sampled], expected)
    close([each["parts"]["reward_model"] for each in sampled], expected)
    assert line["critic/score/mean"] == line["critic/rewards/mean"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert line["reward/parts/reward_model"] == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_reward_model_and_a_function_are_added_by_their_weights(folder: Path, judge: Judge) -> None:
    function = 'reward.function={ "more.py:fingerprint" = 0.5, reward_model = -2.0 }'
    one_step(folder, function, f"reward_model.path={judge.folder}", "algorithm.name=rloo")
    sampled = runs.rollouts(folder, 1)
    expected = judge.plain(sampled)
    close([each["parts"]["reward_model"] for each in sampled], expected)
    prints = [each["parts"]["fingerprint"] for each in sampled]
    assert len(set(prints)) > 8
    close([each["reward"] for each in sampled], [0.5 * one - 2.0 * other for one, other in zip(prints, expected, strict=True)])


def test_a_reward_model_for_some_data_sources(folder: Path, judge: Judge) -> None:
    """Groups with and without it lie side by side: each score must find its own."""
    rows = [{"prompt": f"{n}*2=", "ground_truth": str(n), "data_source": ("sums", "judged")[n % 2]} for n in range(8)]
    runs.write_rows(folder / "train.jsonl", rows)
    options = ("data.shuffle=false", "reward.sources={ judged = 'reward_model', less = 'reward_model' }")
    one_step(folder, *options, f"reward_model.path={judge.folder}")
    sampled = runs.rollouts(folder, 1)
    assert [each["data_source"] for each in sampled] == (["sums"] * 4 + ["judged"] * 4) * 2
    judged = [each for each in sampled if each["data_source"] == "judged"]
    close([each["reward"] for each in judged], judge.plain(judged))
    for each in sampled:
        assert set(each["parts"]) == ({"reward_model"} if each in judged else {"letters", "truth"})


@pytest.mark.parametrize("own_template", [False, True])
def test_messages_are_written_by_the_reward_models_template_in_training_and_validation(
    judged: Path, judge: Judge, own_template: bool
) -> None:
    template = "{% for m in messages %}{{ m['content'] }}~{% endfor %}" if own_template else None
    (judged / "template.jinja").write_text(template or "")
    for name in ("train", "val"):
        runs.write_rows(judged / f"{name}.jsonl", [{"prompt": MESSAGES, "ground_truth": "5", "data_source": "chat"}] * 4)
    options = ("data.max_prompt_tokens=64", f"reward_model.path={judge.folder}")
    options += ("reward_model.chat_template=template.jinja",) if own_template else ()
    with watched(judged, *options) as seen:
        seen.run.rl_step(1)
        found = validate(seen.run.config, seen.run.parts, silent())
    sampled = runs.rollouts(judged, 1)
    assert sampled[0]["prompt"] == "<s>s:Be brief.\nu:two and three?\na:"
    close([each["reward"] for each in sampled], judge.chat(sampled, template))
    columns, samples = sample_rows(found.groups, found.scores, seen.run.config.log.val_samples)
    shown = [dict(zip(columns, sample, strict=True)) for sample in samples]
    expected = judge.chat(shown, template)
    close([each["reward"] for each in shown], expected)
    assert found.metrics["val-core/chat/reward/mean@1"] == pytest.approx(np.mean(expected), abs=1e-5)


def hollow(model: Path, folder: Path) -> Path:
    """A model whose file of weights is intact and holds none of them."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: torch.zeros(40_000) for name in "abc"}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_reward_model_without_a_head_is_refused_before_the_actor_loads(judged: Path, model_folders: ModelFolders, tmp_path: Path) -> None:
    """The actor's weights are not even there."""
    options = (*ONE, f"model.path={hollow(judged / 'model', tmp_path / 'hollow')}")
    with pytest.raises(UserError, match=r"^reward_model\.path: .* has no score head \(score\.weight\): it is not a reward model"):
        runs.train(judged, *options, f"reward_model.path={model_folders('llama')}")
    assert not (judged / "run").exists()


def test_a_reward_model_that_cannot_write_the_prompts_is_refused_before_the_actor_loads(judged: Path, tmp_path: Path) -> None:
    dumb = save_classifier(LlamaConfig(**{**models.SMALL, "vocab_size": 320}), tmp_path / "dumb", other_tokenizer(None))
    runs.write_rows(judged / "val.jsonl", [{"prompt": MESSAGES, "ground_truth": "5"}])
    options = (
        *ONE,
        f"model.path={hollow(judged / 'model', tmp_path / 'hollow')}",
        f"reward_model.path={dumb}",
        "data.max_prompt_tokens=64",
    )
    with pytest.raises(UserError, match=r"the reward model's tokenizer has no chat template"):
        runs.train(judged, *options)


@pytest.mark.parametrize("on_error", ["exclude", "score"])
def test_a_sample_that_the_reward_model_cannot_read_is_a_failed_reward(judged: Path, tmp_path: Path, on_error: str) -> None:
    """One token of the response in three is no text, so that the texts have many lengths."""
    config = LlamaConfig(**{**models.SMALL, "max_position_embeddings": 14})
    short = save_classifier(config, tmp_path / "short", models.tokenizer())
    options = (f"reward_model.path={short}", f"reward.on_error={on_error}", 'health.ignore=["reward-errors"]')
    options += ("reward.error_score=-4.0",) if on_error == "score" else ()
    said = runs.train(judged, *QUICK, *options, "run.steps=2").said
    model = AutoModelForSequenceClassification.from_pretrained(short, attn_implementation="eager").eval()
    judge = Judge(short, model, models.tokenizer())
    for step, line in enumerate(runs.metrics(judged), 1):
        sampled = runs.rollouts(judged, step)
        ends = {"stop": 1, "length": 0}
        lengths = [len(judge.tokenizer(each["prompt"] + each["response"])["input_ids"]) + ends[each["finish"]] for each in sampled]
        read = [each for each, tokens in zip(sampled, lengths, strict=True) if tokens <= 14]
        unread = [(each, tokens) for each, tokens in zip(sampled, lengths, strict=True) if tokens > 14]
        assert len(read) > 2 and len(unread) > 2
        close([each["reward"] for each in read], judge.plain(read))
        for each, tokens in unread:
            assert each["error"] == f"the reward model reads at most 14 tokens, prompt and response have {tokens} in its tokenizer"
            assert each["reward"] == (-4.0 if on_error == "score" else 0.0)
        assert (line["reward/errors"], line["reward/excluded"]) == (len(unread), 0 if on_error == "score" else len(unread))
        assert line["critic/score/mean"] == pytest.approx(np.mean(judge.plain(read)), abs=1e-5) and line["actor/grad_norm"] > 0
        assert f"warning: {len(unread)} of 16 samples could not be scored: {unread[0][0]['error']}" in said


def test_an_empty_response_to_a_prompt_of_one_token(judged: Path, wider: Path) -> None:
    """Of one token nothing can be said. The model has more rows than the tokenizer tokens: many responses are no text."""
    runs.write_rows(judged / "train.jsonl", [{"prompt": str(n), "ground_truth": "5"} for n in range(4)])
    line = one_step(judged, f"reward_model.path={wider}", "rollout.max_new_tokens=1")
    sampled = runs.rollouts(judged, 1)
    empty = [each for each in sampled if not each["response"] and each["finish"] == "length"]
    assert 0 < len(empty) < 16 and line["reward/errors"] == len(empty)
    for each in sampled:
        expected = "prompt and response are less than two tokens of the reward model" if each in empty else None
        assert (each["error"], each["reward"] != 0) == (expected, each not in empty)


def test_a_reward_model_learns_nothing_and_trains_the_actor(judged: Path, judge: Judge) -> None:
    with watched(judged, f"reward_model.path={judge.folder}") as seen:
        line = seen.run.rl_step(1)
        held = seen.run.parts.worker.roles["reward_model"]
        assert held and not any(parameter.requires_grad for parameter in held.model.parameters())
        assert line["actor/grad_norm"] > 0 and line["reward/groups_with_variance"] == 1
        assert all(torch.equal(tensor, judge.model.model.state_dict()[name]) for name, tensor in held.model.body.state_dict().items())


# -- KL in the reward -------------------------------------------------------------------------------------------------------------------

REWARD_KL = (NO_KL, "algorithm.reward_kl_coef=0.3", "algorithm.minibatches_per_step=1")


def test_the_penalty_of_each_token_is_taken_off_the_reward(folder: Path, tmp_path: Path) -> None:
    """Against a reference of other weights, so that there is something to take off in the first step."""
    other = models.save("qwen3", tmp_path / "other", seed=1)
    with watched(folder, *REWARD_KL, f"ref.path={other}") as seen:
        line = seen.run.rl_step(1)
    (rows,) = seen.rows
    old, ref = (logprobs_of(models.reference(path), rows) for path in (folder / "model", other))
    assert_annotated(rows, "old_logprobs", old)
    assert_annotated(rows, "ref_logprobs", ref)
    divergences = [(own - others)[row.mask] for row, own, others in zip(rows, old, ref, strict=True)]
    scores = [sample["reward"] for sample in runs.rollouts(folder, 1)]
    totals = []
    for row, divergence, score in zip(rows, divergences, scores, strict=True):
        expected = -0.3 * divergence
        expected[-1] += score
        assert row.token_rewards is not None
        np.testing.assert_allclose(row.token_rewards[row.mask], expected, rtol=0, atol=1e-5)
        totals.append(expected.sum())
    assert line["critic/rewards/mean"] == pytest.approx(np.mean(totals), abs=1e-4)
    assert line["critic/score/mean"] == pytest.approx(np.mean(scores))
    assert abs(line["critic/rewards/mean"] - line["critic/score/mean"]) > 0.1
    assert line["actor/reward_kl_penalty"] == pytest.approx(np.mean([each.mean() for each in divergences]), abs=1e-5)
    assert line["actor/reward_kl_penalty_coeff"] == 0.3
    assert "actor/kl_loss" not in line and "timing_s/ref" in line and "timing_s/old_log_prob" in line
    # GRPO's advantages are of the whole reward.
    group = np.array(totals[:4])
    expected_advantages = (group - group.mean()) / (group.std(ddof=1) + 1e-6)
    found = [row.advantages[row.mask][0] for row in rows[:4] if row.advantages is not None]
    np.testing.assert_allclose(found, expected_advantages, rtol=0, atol=1e-3)


@pytest.mark.parametrize("target", sample_cases([None, 1e-4, 10.0], 10.0))
def test_the_weight_of_the_penalty_follows_its_target(folder: Path, target: float | None) -> None:
    adaptive = () if target is None else (f"algorithm.reward_kl_target={target}", "algorithm.reward_kl_horizon=80")
    runs.train(folder, *QUICK, *REWARD_KL, "run.steps=4", "run.save_every=1", "train.lr=2e-2", *adaptive)
    lines = runs.metrics(folder)
    expected = 0.3
    for line in lines:
        assert line["actor/reward_kl_penalty_coeff"] == pytest.approx(expected, rel=1e-12)
        if target is not None:
            expected *= 1 + min(0.2, max(-0.2, line["actor/reward_kl_penalty"] / target - 1)) * 16 / 80
    assert runs.state(runs.checkpoints(folder)[4])["reward_kl_coef"] == pytest.approx(expected, rel=1e-12)
    assert math.copysign(1, expected - 0.3) == {None: 1, 1e-4: 1, 10.0: -1}[target]


@pytest.mark.long
def test_a_fixed_weight_is_the_configurations_whatever_was_saved(folder: Path) -> None:
    runs.train(folder, *ONE, *REWARD_KL)
    runs.train(folder, *QUICK, *REWARD_KL, "run.steps=2", "algorithm.reward_kl_coef=0.7", "run.resume=force")
    assert [line["actor/reward_kl_penalty_coeff"] for line in runs.metrics(folder)] == [0.3, 0.7]
    with watched(folder, *REWARD_KL) as seen:
        seen.run.progress = Progress(reward_kl_coef=0.7)
        assert seen.run.rl_step(1)["actor/reward_kl_penalty_coeff"] == 0.3


@pytest.mark.matrix
def test_a_weight_that_follows_its_target_starts_anew_when_it_is_set_anew(folder: Path) -> None:
    def weight(steps: int, *overrides: str) -> float:
        runs.train(folder, *QUICK, *REWARD_KL, f"run.steps={steps}", "algorithm.reward_kl_target=10.0", *overrides)
        found: float = runs.metrics(folder)[-1]["actor/reward_kl_penalty_coeff"]
        return found

    short = "algorithm.reward_kl_horizon=80"
    assert weight(1, short) == 0.3
    second = weight(2, short)
    assert second < 0.3
    assert weight(3, short, "train.lr=1e-3", "run.resume=force") < second
    assert weight(4, "train.lr=1e-3", "algorithm.reward_kl_horizon=160", "run.resume=force") == 0.3


# -- ReMax and overlong responses -------------------------------------------------------------------------------------------------------


def greedy(folder: Path, number: int) -> tuple[str, int]:
    """The response to a question of the training data and its tokens, as transformers alone writes it."""
    tokenizer = models.tokenizer()
    ids = tokenizer(f"{number}+{3 * number}=", return_tensors="pt")["input_ids"]
    out = models.reference(folder / "model").generate(input_ids=ids, max_new_tokens=16, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    return str(tokenizer.decode(out, skip_special_tokens=True)), len(out)


def fingerprint(text: str) -> float:
    found: dict[str, Any] = {}
    exec(MORE_REWARDS, found)
    return float(found["fingerprint"](text))


REMAX = ("algorithm.name=remax", NO_KL, "data.shuffle=false")


def test_remax_compares_with_the_greedy_sample(folder: Path) -> None:
    with watched(folder, *REMAX, "reward.function=more.py:fingerprint") as seen:
        line = seen.run.rl_step(1)
    (rows,) = seen.rows
    expected = [fingerprint(greedy(folder, number)[0]) for number in range(4)]
    assert len(set(expected)) > 1
    assert [row.baseline for row in rows] == pytest.approx(np.repeat(expected, 4))
    for row in rows:
        assert row.advantages is not None
        np.testing.assert_allclose(row.advantages[row.mask], row.reward - row.baseline, rtol=1e-6)
    # The greedy samples are no part of the batch, nor of what is said of it.
    assert len(rows) == len(runs.rollouts(folder, 1)) == line["reward/samples"] == 16
    assert len({sample["response"] for sample in runs.rollouts(folder, 1)}) > 8


@pytest.mark.parametrize("on_error", ["exclude", "score"])
def test_a_failed_baseline(folder: Path, on_error: str) -> None:
    """The reward fails on the greedy responses to the second and the fourth question."""
    refused = {str(4 * number): greedy(folder, number)[0] for number in (1, 3)}
    arguments = ", ".join(f"{json.dumps(truth)} = {json.dumps(text)}" for truth, text in refused.items())
    options = ("reward.function=more.py:but_not", f"reward.args={{ refused = {{ {arguments} }} }}", f"reward.on_error={on_error}")
    options += ("reward.error_score=-4.0",) if on_error == "score" else ()
    with watched(folder, *REMAX, *options) as seen:
        line = seen.run.rl_step(1)
    (rows,) = seen.rows
    assert all(sample["error"] is None for sample in runs.rollouts(folder, 1))
    if on_error == "exclude":
        assert [row.group for row in rows] == [0] * 4 + [2] * 4
        assert (line["reward/excluded"], line["actor/updates"]) == (8, 2)
    else:
        assert [row.baseline for row in rows if row.group in (1, 3)] == [-4.0] * 8
        assert line["reward/excluded"] == 0


def overlong(tokens: int) -> float:
    return -0.5 * max(0, tokens - 6) / 10


OVERLONG = ("algorithm.overlong_buffer=10", "algorithm.overlong_penalty=0.5")


@pytest.mark.parametrize("name", sample_cases([name for name, preset in PRESETS.items() if preset.rollout], "dapo", "ppo", "remax"))
def test_long_responses_lose_with_every_algorithm(folder: Path, name: str) -> None:
    line = one_step(folder, f"algorithm.name={name}", NO_KL, *OVERLONG, "run.seed=4")
    sampled = runs.rollouts(folder, 1)
    lost = [overlong(sample["response_tokens"]) for sample in sampled]
    assert len(sampled) == 16 and min(lost) == -0.5 < max(lost)
    assert line["critic/score/mean"] == pytest.approx(np.mean([sample["reward"] for sample in sampled]))
    assert line["critic/rewards/mean"] - line["critic/score/mean"] == pytest.approx(np.mean(lost))
    assert line["critic/rewards/min"] == pytest.approx(min(sample["reward"] + each for sample, each in zip(sampled, lost, strict=True)))


def test_a_long_greedy_sample_loses_too(folder: Path) -> None:
    """Else every sample of ReMax would be compared with more than the greedy one got."""
    with watched(folder, *REMAX, *OVERLONG, "reward.function=more.py:fingerprint") as seen:
        seen.run.rl_step(1)
    (rows,) = seen.rows
    expected = [fingerprint(text) + overlong(tokens) for text, tokens in (greedy(folder, number) for number in range(4))]
    assert [row.baseline for row in rows] == pytest.approx(np.repeat(expected, 4))


# -- adapters ---------------------------------------------------------------------------------------------------------------------------

LORA: dict[str, Any] = {**runs.GRPO, "lora": {"rank": 4}, "reward": {"function": "more.py:fingerprint", "workers": 1}}
FAST = ("train.lr=2e-2", "train.schedule=constant", "train.warmup_steps=0")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> dict[str, Path]:
    """The same run of three steps, exported as an adapter and as a whole model."""
    made = {}
    for export in ("adapter", "merged"):
        made[export] = prepared(tmp_path_factory.mktemp(export) / "folder", model_folders("qwen3"), LORA)
        said = runs.train(made[export], *QUICK, *FAST, "run.steps=3", f"lora.export={export}").said
        assert "LoRA: 4,480 of " in said  # rank 4, 2 layers, 560 rows and columns of matrices in each
    return made


@pytest.fixture
def lora_folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return prepared(tmp_path / "folder", model_folders("qwen3"), LORA)


def test_only_adapters_are_trained(lora_folder: Path) -> None:
    with watched(lora_folder, *FAST) as seen:
        parts = seen.run.parts
        before = {name: tensor.clone() for name, tensor in parts.worker.actor.model.state_dict().items()}
        for step in (1, 2):
            line = seen.run.rl_step(step)
            assert line["rollout_corr/logprob_abs_gap"] < 1e-5, "rollout and update do not run the same layers"
        after = parts.worker.actor.model.state_dict()
        assert {name for name in before if not torch.equal(before[name], after[name])} == {name for name in before if ".lora_" in name}
        started = load_file(lora_folder / "model" / "model.safetensors")
        held = {name.replace(".base_layer", ""): tensor for name, tensor in after.items() if ".lora_" not in name}
        assert held.keys() == started.keys() and all(torch.equal(held[name], started[name]) for name in started)
        assert all((layer.lora_B["default"].weight.abs() > 1e-3).any() for _, layer in adapted(parts.worker.actor.model))


def test_a_checkpoint_holds_adapters_and_nothing_of_the_base(adapters: dict[str, Path]) -> None:
    tensors = load_file(runs.checkpoints(adapters["adapter"])[3] / "trainer.safetensors")
    kinds = {"parameter", "exp_avg", "exp_avg_sq", "step"}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}  # no groups are carried over
    assert {name.partition("/")[0] for name in tensors} == kinds and all(".lora_" in name for name in tensors)
    exported = load_file(runs.checkpoints(adapters["adapter"])[3] / "model" / "adapter_model.safetensors")
    assert len(exported) == len(tensors) / len(kinds)
    for name, tensor in exported.items():
        stored = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(tensor, tensors[f"parameter/{stored}"])


def test_both_exports_are_the_trained_model(adapters: dict[str, Path]) -> None:
    """As peft and transformers load them, and as the run itself sees it: they give the next step's rollout its log-probs."""
    assert runs.without_clock(runs.metrics(adapters["adapter"])) == runs.without_clock(runs.metrics(adapters["merged"]))
    folders = {export: runs.checkpoints(folder)[3] / "model" for export, folder in adapters.items()}
    # transformers would load an adapter's folder too, with its base.
    assert {"model.safetensors", "adapter_config.json"} & {path.name for path in folders["merged"].iterdir()} == {"model.safetensors"}
    base = models.reference(adapters["adapter"] / "model")
    through_peft = peft.PeftModel.from_pretrained(models.reference(adapters["adapter"] / "model"), folders["adapter"])
    merged, report = AutoModelForCausalLM.from_pretrained(folders["merged"], output_loading_info=True, attn_implementation="eager")
    assert not any(report.values())
    config = runs.read_config(adapters["adapter"], *QUICK, *FAST, "run.steps=4")
    with contextlib.chdir(adapters["adapter"]):
        found = CheckpointStore(Path("run") / "checkpoints", 2).latest()
        with contextlib.closing(assemble(config, found)) as parts:
            own = parts.worker.actor.model
            ids = torch.arange(5, 45)
            with torch.no_grad():
                expected = merged(ids[None]).logits
                torch.testing.assert_close(through_peft(ids[None]).logits, expected, rtol=0, atol=1e-5)
                assert (base(ids[None]).logits - expected).abs().max() > 0.1
            for name, parameter in own.named_parameters():
                if parameter.requires_grad:
                    assert torch.equal(parameter, through_peft.base_model.model.get_parameter(name))


def test_evaluation_of_the_latest_checkpoint_is_of_the_trained_adapter(adapters: dict[str, Path], tmp_path: Path) -> None:
    def evaluated(folder: Path, *arguments: str) -> dict[str, Any]:
        ended = runs.command_here(folder, "eval", "run.toml", "--json", *arguments)
        assert ended.code == 0, ended.error
        return json.loads(ended.out)  # type: ignore[no-any-return]

    whole = prepared(tmp_path / "whole", runs.checkpoints(adapters["merged"])[3] / "model", {**LORA, "lora": {}})
    base, exported = evaluated(adapters["adapter"])["val/reward/mean"], evaluated(whole)["val/reward/mean"]
    for folder in adapters.values():
        latest = evaluated(folder, "--latest")
        assert latest["step"] == 3 and latest["val/reward/mean"] == exported != base


@pytest.mark.parametrize("key", ["rank=8", "alpha=100.0", "targets=['q_proj']"])
def test_adapters_are_not_evaluated_as_others(adapters: dict[str, Path], key: str) -> None:
    refused = runs.command_here(adapters["adapter"], "eval", "run.toml", "--latest", f"lora.{key}")
    assert refused.code == 2
    assert f"run holds a run with other values of lora.{key.partition('=')[0]}. Give those to evaluate its adapters" in refused.error


def test_the_reference_is_the_actor_without_adapters(lora_folder: Path) -> None:
    """Once the adapters have moved, it still says what the base model says; the actor does not, and has them again afterwards."""
    with watched(lora_folder, *FAST) as seen:
        parts = seen.run.parts
        assert parts.worker.roles["ref"] and parts.worker.roles["ref"].model is parts.worker.actor.model
        base = models.reference(lora_folder / "model")
        for step in (1, 2):
            line = seen.run.rl_step(step)
            rows = seen.rows[-1]
            expected = logprobs_of(base, rows)
            assert_annotated(rows, "ref_logprobs", expected)
        apart = [np.abs(row.old_logprobs - own)[row.mask].max() for row, own in zip(rows, expected, strict=True)]
        assert max(apart) > 0.05 and line["actor/kl_loss"] > 1e-3
        assert line["rollout_corr/logprob_abs_gap"] < 1e-5


def test_a_run_starts_from_an_adapter_and_refers_to_it(adapters: dict[str, Path], lora_folder: Path) -> None:
    """The run that made the adapter goes on; the one that starts from it validates alike, and its reference has the adapter too."""
    adapter = runs.checkpoints(adapters["adapter"])[3] / "model"
    latest = json.loads(runs.command_here(adapters["adapter"], "eval", "run.toml", "--json", "--latest").out)
    options = ("run.steps=2", "run.eval_every=0", "run.save_every=0", *FAST, f"lora.path={adapter}", "algorithm.minibatches_per_step=1")
    runs.train(lora_folder, *options)
    before, first, second = runs.metrics(lora_folder)
    assert before["val/reward/mean"] == latest["val/reward/mean"]
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and second["actor/kl_loss"] > 1e-4
    start, end = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, runs.checkpoints(lora_folder)[2] / "model"))
    assert start.keys() == end.keys() and not any(torch.equal(start[name], end[name]) for name in start)


def test_another_reference_beside_adapters(lora_folder: Path, tmp_path: Path) -> None:
    other = models.save("qwen3", tmp_path / "other", seed=1)
    with watched(lora_folder, *FAST, f"ref.path={other}") as seen:
        seen.run.rl_step(1)
    assert_annotated(seen.rows[0], "ref_logprobs", logprobs_of(models.reference(other), seen.rows[0]))


@pytest.mark.parametrize("of_critic", [True, False])
def test_a_critic_with_and_without_adapters(lora_folder: Path, of_critic: bool) -> None:
    with watched(lora_folder, *PPO, *FAST, f"lora.critic={str(of_critic).lower()}") as seen:
        parts = seen.run.parts
        assert parts.worker.roles["critic"]
        before = {name: tensor.clone() for name, tensor in parts.worker.roles["critic"].model.state_dict().items()}
        for step in (1, 2):
            seen.run.rl_step(step)
        after = parts.worker.roles["critic"].model.state_dict()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved == {name for name in before if not of_critic or ".lora_" in name or name == "score.weight"}
        assert any(".lora_" in name for name in after) == of_critic
        saved = {name.removeprefix("critic/parameter/") for name in parts.worker._tensors() if name.startswith("critic/parameter/")}
        assert saved == moved


def test_layers_by_their_full_names_are_adapted_in_actor_and_critic(lora_folder: Path) -> None:
    """The critic's body has no language head, and its layers no `model.` before them."""
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    with watched(lora_folder, *PPO, *FAST, f"lora.targets={json.dumps(names)}") as seen:
        parts = seen.run.parts
        assert parts.worker.roles["critic"]
        assert [name for name, _ in adapted(parts.worker.actor.model)] == names
        assert [name for name, _ in adapted(parts.worker.roles["critic"].model.body)] == [name.removeprefix("model.") for name in names]
        assert seen.run.rl_step(1)["critic/grad_norm"] > 0


# -- every algorithm, resumed -----------------------------------------------------------------------------------------------------------

OWN_FUNCTIONS = '''
import numpy as np


def centred(rewards, groups, clip_high):
    """Reward minus the mean of its group, held at `clip_high`."""
    means = {group: rewards[groups == group].mean() for group in groups}
    return [np.clip(reward - means[group], -clip_high, clip_high) for reward, group in zip(rewards, groups)]


def plain(terms):
    return -(terms.logprobs - terms.old_logprobs).exp() * terms.advantages
'''

# Beside its name: what gives it state of its own to bring back.
RESUMED: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm.kl_coef=0.05",),
    "dr_grpo": (),
    "dapo": ("algorithm.prompts_per_round=3", "run.seed=8"),
    "ppo": ("algorithm.critic_warmup=1", "critic.lr=2e-3"),
    "rloo": ("algorithm.epochs=2",),
    "reinforce++": ("algorithm.kl_coef=0.05",),
    "reinforce++_baseline": ("algorithm.kl_coef=0.05",),
    "remax": (),
    "gspo": (),
    "cispo": ("algorithm.entropy_coef=0.01",),
    "sft": (),
}
ADAPTIVE = ("algorithm.reward_kl_coef=0.3", "algorithm.reward_kl_target=1e-4", "algorithm.reward_kl_horizon=80")
OWN = ("algorithm.advantage=own.py:centred", "algorithm.loss=own.py:plain", "algorithm.clip_high=0.3")
VARIANTS: dict[str, tuple[str, ...]] = {
    **{name: (f"algorithm.name={name}", *options) for name, options in RESUMED.items()},
    "adaptive KL in the reward": ("algorithm.name=grpo", *ADAPTIVE),
    "adaptive KL in PPO's reward, with adapters": (*PPO, *ADAPTIVE, "lora.rank=4"),
    "a whole critic beside adapters": (*PPO, "lora.rank=4", "lora.critic=false"),
    "functions of one's own": ("algorithm.name=rloo", *OWN),
    "functions of one's own beside a critic": (*PPO, *OWN),
    "SFT with adapters": ("algorithm.name=sft", "lora.rank=4"),
    "a merged export": ("algorithm.name=rloo", "lora.rank=4", "lora.export=merged"),
}


# A critic and adapters with an adaptive weight; no rollout. Those of LONG bring back the other kinds of state: a reference, carried groups.
DEFAULT = ("adaptive KL in PPO's reward, with adapters", "sft")
LONG = ("dapo", "ppo", "grpo", "rloo", "a whole critic beside adapters", "functions of one's own beside a critic", "a merged export")


def test_every_algorithm_is_resumed() -> None:
    assert RESUMED.keys() == PRESETS.keys() and VARIANTS.keys() >= set(DEFAULT)


@pytest.mark.parametrize(
    "name",
    [
        *DEFAULT,
        *(pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.matrix) for name in VARIANTS if name not in DEFAULT),
    ],
)
def test_it_resumes_exactly(tmp_path: Path, model_folders: ModelFolders, name: str) -> None:
    """`make test` runs two variants, `make check` one for each kind of state and some others, `make check-all` all."""
    options = ("run.steps=4", "run.save_every=2", "run.keep=2", "run.eval_every=3", *VARIANTS[name])
    sft = "algorithm.name=sft" in options
    expected = prepared(tmp_path / "expected", model_folders("qwen3"), runs.SFT if sft else {**runs.GRPO, "algorithm": SMALL_STEPS})
    (expected / "own.py").write_text(OWN_FUNCTIONS)
    assert runs.train(expected, *options).summary.steps == 4
    folder = runs.copy(expected, tmp_path / "resumed")
    cut_back(folder, 2)
    assert "resuming from step 2" in runs.train(folder, *options).said
    runs.assert_equal_runs(folder, expected)
    assert_has_state(expected, name)


SMALL_STEPS = {"prompts_per_step": 4, "samples_per_prompt": 3, "minibatches_per_step": 2}


def assert_has_state(folder: Path, name: str) -> None:
    """What the variant is there for was in the checkpoint that the run went on from; else it proved little."""
    saved = runs.state(runs.checkpoints(folder)[4])
    tensors = load_file(runs.checkpoints(folder)[4] / "trainer.safetensors")
    critic = [key for key in tensors if key.startswith("critic/parameter/")]
    if name == "dapo":
        assert runs.metrics(folder)[2]["rollout/groups_carried"] == len(runs.state(runs.checkpoints(folder)[2])["surplus"]) > 0
    if "KL" in name:
        coefficients = [line["actor/reward_kl_penalty_coeff"] for line in runs.metrics(folder)[1:]]
        assert len(set(coefficients)) == 4 and saved["reward_kl_coef"] not in coefficients
    if name == "ppo":
        assert len(critic) > 20 and (saved["updates"], saved["critic"]["updates"]) == (6, 8)
    if "adapters" in name:
        assert any(".lora_" in key for key in tensors)
    if name == "a whole critic beside adapters":
        assert critic and not any(".lora_" in key for key in critic)


def test_functions_of_ones_own_are_the_ones_that_train(folder: Path) -> None:
    (folder / "own.py").write_text(OWN_FUNCTIONS)
    with watched(folder, "algorithm.name=rloo", NO_KL, *OWN, "reward.function=more.py:fingerprint", "train.lr=2e-2") as seen:
        line = seen.run.rl_step(1)
    (rows,) = seen.rows
    for group in range(4):
        members = [row for row in rows if row.group == group]
        mean = np.mean([row.reward for row in members])
        for row in members:
            assert row.advantages is not None
            np.testing.assert_allclose(row.advantages[row.mask], np.clip(row.reward - mean, -0.3, 0.3), rtol=0, atol=1e-6)
    # The second mini-batch is off policy, and the function of one's own does not clip.
    assert line["actor/ppo_kl"] != 0 and "actor/pg_clipfrac" not in line and line["actor/grad_norm"] > 0


def test_an_advantage_of_ones_own_is_not_asked_where_every_reward_failed(folder: Path) -> None:
    (folder / "own.py").write_text(OWN_FUNCTIONS + "\n\ndef best(rewards):\n    return rewards - rewards.max()\n")
    line = one_step(folder, *PPO, "algorithm.advantage=own.py:best", "reward.function=reward.py:always_fails", IGNORE_FAILED)
    assert (line["critic/updates"], line["actor/updates"], line["reward/excluded"]) == (0, 0, 16)


# -- loggers ----------------------------------------------------------------------------------------------------------------------------

Lines = dict[int, dict[str, float]]
LOGGED = ("run.steps=4", "run.save_every=2", "run.eval_every=2")


def lines_of_tensorboard(folder: Path) -> Lines:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines: Lines = {}
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            assert name not in lines.setdefault(event.step, {}), "a step that was made again is there twice"
            lines[event.step][name] = event.value
    return lines


def lines_of_wandb(folder: Path) -> Lines:
    from wandb.proto.wandb_internal_pb2 import Record

    lines: Lines = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in map(Record.FromString, wandb_records(path)):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            if items:  # of a step that was made again, the later file has the last word
                step = items["_step"]
                lines[step] = {name: value for name, value in items.items() if not name.startswith(("_", "val/samples"))}
    return lines


def lines_of_mlflow(folder: Path) -> Lines:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("fulltilt").experiment_id])
    lines: Lines = {}
    for key in run.data.metrics:
        for metric in sorted(client.get_metric_history(run.info.run_id, key), key=lambda metric: metric.timestamp):
            lines.setdefault(metric.step, {})[metric_name(key)] = metric.value  # of a step that was made again, the later one
    return lines


def lines_of_trackio(folder: Path) -> Lines:
    (path,) = (folder / "trackio").glob("*.db")
    lines: Lines = {}
    with contextlib.closing(sqlite3.connect(path)) as database:
        for step, text in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(text).items():
                if name != "val/samples":
                    assert name not in lines.setdefault(step, {}), "a step that was made again is there twice"
                    lines[step][name] = value
    return lines


READERS = {"tensorboard": lines_of_tensorboard, "wandb": lines_of_wandb, "mlflow": lines_of_mlflow, "trackio": lines_of_trackio}


def assert_logged(folder: Path, name: str) -> None:
    """Step by step what the logger's own files say is what metrics.jsonl says."""
    expected = {line.pop("step"): line for line in runs.metrics(folder)}
    assert list(expected) == [0, 1, 2, 3, 4] and "val/reward/mean" in expected[0] and "nonfinite" not in str(expected)
    if name == "tensorboard":  # its scalars are float32
        expected = {step: {key: float(np.float32(value)) for key, value in line.items()} for step, line in expected.items()}
    found = READERS[name](folder / "run")
    if name == "mlflow":  # forgets nothing: the step after a checkpoint and a validation tells of these only when it was made first
        assert found[3]["timing_s/save_checkpoint"] > 0
        for key in [key for key in found[3] if "/save_checkpoint" in key or key.startswith("memory_gib/testing/")]:
            del found[3][key]
            expected[3].pop(key, None)
    assert found == expected


@pytest.mark.long
def test_a_run_logs_what_it_writes_also_when_it_is_resumed(folder: Path) -> None:
    logged = (*LOGGED, 'log.to=["tensorboard"]')
    runs.train(folder, *logged)
    assert_logged(folder, "tensorboard")
    cut_back(folder, 2)
    assert "resuming from step 2" in runs.train(folder, *logged).said
    assert_logged(folder, "tensorboard")
    shown = sorted((folder / "run" / "tensorboard").glob("events.out.tfevents.*"))
    assert any(b"val/samples" in path.read_bytes() for path in shown)


@pytest.mark.matrix
def test_every_logger_gets_every_number_also_when_the_run_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, for some loggers take their settings once per process."""
    for key in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "WANDB_DIR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(folder))
    logged = (*LOGGED, f"log.to={json.dumps(list(READERS))}")
    for attempt in range(2):
        ended = runs.command_forked(folder, "train", "run.toml", *logged)
        assert ended.code == 0 and "log.to" not in ended.error, ended.error
        for name in READERS:
            assert_logged(folder, name)
        if not attempt:
            cut_back(folder, 2)


class Slow:
    """A logger that takes its time, and notes which checkpoints there are afterwards."""

    id, hint, has = None, "", 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.go_on = threading.Event()
        self.got: list[tuple[int, list[int]]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self.go_on.wait(200)
        self.got.append((step, list(runs.checkpoints(self.folder))))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self, finished: bool) -> None: ...


def test_a_checkpoint_waits_for_the_loggers(folder: Path) -> None:
    """What they have not got when it is saved, a kill afterwards would keep from them for good."""
    with watched(folder) as seen, Loggers(pytest.fail) as loggers:
        slow = Slow(folder)
        loggers.add("slow", lambda: slow, required=True)
        seen.run.loggers = loggers
        loggers.log(1, seen.run.rl_step(1))
        assert slow.got == []
        threading.Timer(0.3, slow.go_on.set).start()
        seen.run.save()
        assert slow.got == [(1, [])] and list(runs.checkpoints(folder)) == [1]


def test_a_logger_that_cannot_be_is_refused_before_the_model_loads(folder: Path) -> None:
    refused = runs.command_here(folder, "train", "run.toml", "--check", "log.project=mine")
    assert refused.code == 2 and "log.project: log.to names no logger" in refused.error


# -- types of numbers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_run_in_float64(tmp_path: Path, model_folders: ModelFolders, family: str) -> None:
    line = one_step(runs.make(tmp_path / "folder", model_folders(family)), "model.dtype=float64")
    assert line["rollout_corr/logprob_abs_gap"] < 1e-6 and line["actor/grad_norm"] > 0
    assert line["actor/skipped_updates"] == 0


def test_ppo_with_adapters_runs_in_bfloat16(lora_folder: Path) -> None:
    """The adapters and the critic's have float32 masters, which a checkpoint keeps; a score head is float32 anyway."""
    line = one_step(lora_folder, *PPO, *FAST, "model.dtype=bfloat16")
    assert line["rollout_corr/logprob_abs_gap"] < 0.05  # 8 bits of mantissa
    assert (line["actor/skipped_updates"], line["critic/skipped_updates"]) == (0, 0)
    tensors = load_file(runs.checkpoints(lora_folder)[1] / "trainer.safetensors")
    kinds = {name.rpartition("/")[0] for name in tensors if "lora_" in name or "score" in name}
    assert {"master", "critic/master", "critic/parameter"} <= kinds and "parameter" not in kinds
    assert all(tensor.dtype == torch.float32 for name, tensor in tensors.items() if "surplus" not in name)


# -- health -----------------------------------------------------------------------------------------------------------------------------


def test_a_mistake_in_validation_does_not_forget_for_how_long_a_rule_has_held(folder: Path) -> None:
    options = ("run.eval_before=false", "run.eval_every=2", "run.save_every=0", "run.steps=4", "health.entropy_floor=100.0")
    with pytest.raises(UserError, match="not_a_number"):
        runs.train(folder, *options, "reward.sources={ less = 'reward.py:not_a_number' }")
    assert runs.state(runs.checkpoints(folder)[2])["health"]["entropy-collapse"] >= 1
