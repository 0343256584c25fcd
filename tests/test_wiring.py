"""Settings and checks that other rooms are tested to have do reach a run: whatever is taken out of the loop's wiring, a test misses it.

Runs of one step on a tiny model, in this process wherever that can show it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from test_loggers import Stuck
from test_reward_model import other_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, HyperCLOVAXConfig, LlamaConfig, PreTrainedConfig

from fulltilt.algo.build import build
from fulltilt.cluster import making, sizes, worker
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.cluster.checks import refuse, wrong_settings
from fulltilt.cluster.shelf import build_row, specify_rows
from fulltilt.footprint import HeadOptions, head_bytes
from fulltilt.loop.experience import training_sampling, validate
from fulltilt.loop.run import Progress, Run
from fulltilt.model.scalar import ScalarModel
from fulltilt.observe import loggers
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.records import Group, LossSums, MiniBatch, Prompt, Sample, Score, UserError
from fulltilt.rollout.collect import ScoredGroup, collect
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.schema import Config, keys
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

ModelFolders = Callable[[str], Path]
ONE = ("run.eval_every=0", "run.eval_before=false", "run.save_every=0", "run.steps=1")
ON_POLICY = (*ONE, "algorithm.minibatches_per_step=1")
NO_REFERENCE = "algorithm.kl_coef=0.0"
END = 1  # the tests' tokenizer pads with it too

REWARDS = '''
import zlib


def fingerprint(solution_str):
    """Another response, another number."""
    return zlib.crc32(solution_str.encode()) / 2**32


def truth(ground_truth):
    return float(ground_truth)


def huge(solution_str):
    """A reward as large as is allowed: the norm of a gradient times it is no number in float32."""
    return 1e36 * (zlib.crc32(solution_str.encode()) % 2)
'''


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return prepared(tmp_path / "folder", model_folders("qwen2"))


def prepared(folder: Path, model: Path) -> Path:
    runs.make(folder, model)
    (folder / "more.py").write_text(REWARDS)
    return folder


def one_step(folder: Path, *overrides: str) -> dict[str, Any]:
    runs.train(folder, *ONE, *overrides)
    (line,) = runs.metrics(folder)
    return line


def save_model(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


@contextlib.contextmanager
def parts_of(folder: Path, config: Config) -> Iterator[RunParts]:
    with contextlib.chdir(folder):
        parts = assemble(config)
        try:
            yield parts
        finally:
            parts.close()


def silent() -> Console:
    said = io.StringIO()
    return Console(stdout=said, stderr=said, terminal=False)


# -- how samples are drawn --------------------------------------------------------------------------------------------------------------


def test_trainer_and_reference_see_the_rollouts_temperature(folder: Path) -> None:
    """The engine's log-probs are at the temperature; the actor's and the reference's of the same model agree only at the same one."""
    line = one_step(folder, "rollout.temperature=0.7", "algorithm.minibatches_per_step=1")
    assert line["rollout_corr/logprob_abs_gap"] < 1e-4
    assert abs(line["actor/kl_loss"]) < 1e-6
    responses = [row["response"] for row in runs.rollouts(folder, 1)]
    shutil.rmtree(folder / "run")
    one_step(folder, "rollout.temperature=1.0")
    assert responses != [row["response"] for row in runs.rollouts(folder, 1)]


@pytest.mark.parametrize("restriction", ["rollout.top_k=1", "rollout.top_p=0.000001"])
def test_restrictions_reach_the_sampler(folder: Path, restriction: str) -> None:
    """With one candidate a token the samples of a group are all alike, though the temperature is 1."""
    one_step(folder, restriction)
    groups: dict[int, set[str]] = {}
    for row in runs.rollouts(folder, 1):
        groups.setdefault(row["uid"], set()).add(row["response"])
    assert [len(responses) for responses in groups.values()] == [1, 1, 1, 1]
    assert len(set.union(*groups.values())) > 1


def test_end_tokens_of_the_generation_config_reach_the_engine(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Here every small letter ends a response, though model config and tokenizer name only </s>."""
    model = shutil.copytree(model_folders("qwen2"), tmp_path / "many-ends")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    ids = models.tokenizer().convert_tokens_to_ids(letters)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [END, *ids]}))
    folder = prepared(tmp_path / "folder", model)
    one_step(folder)
    rows = runs.rollouts(folder, 1)
    ended = [row for row in rows if row["finish"] == "stop" and row["response"][-1:] in letters]
    assert len(ended) >= 4
    assert all(row["response_tokens"] <= 16 for row in ended) and min(row["response_tokens"] for row in ended) < 16
    assert not any(character in letters for row in rows for character in row["response"][:-1])


def validation(folder: Path, parts: RunParts, *overrides: str) -> float:
    config = runs.read_config(folder, "reward.function=more.py:fingerprint", NO_REFERENCE, *overrides)
    with contextlib.chdir(folder):
        found = validate(config, parts, silent()).metrics
    assert found[f"val-core/less/reward/mean@{config.eval.samples_per_prompt}"] == found["val/reward/mean"]
    return found["val/reward/mean"]


def test_validation_samples_as_the_eval_section_says(folder: Path) -> None:
    """Greedy at first, whatever the rollout does; sampled if a temperature is set, and greedy again if that leaves one candidate."""
    alike = partial(pytest.approx, abs=1e-12)
    with parts_of(folder, runs.read_config(folder, "reward.function=more.py:fingerprint", NO_REFERENCE)) as parts:
        greedy = validation(folder, parts)
        assert validation(folder, parts, "rollout.temperature=1.3") == alike(greedy)
        warm = ("eval.temperature=1.0", "rollout.top_k=1", "rollout.top_p=0.000001")
        one, four = (validation(folder, parts, *warm, f"eval.samples_per_prompt={samples}") for samples in (1, 4))
        assert one != alike(greedy) and four != alike(greedy) and one != alike(four)
        for restriction in ("eval.top_k=1", "eval.top_p=0.000001"):
            for samples in (1, 4):
                assert validation(folder, parts, "eval.temperature=1.0", restriction, f"eval.samples_per_prompt={samples}") == alike(greedy)


def test_validation_of_a_run_takes_the_first_prompts(folder: Path) -> None:
    """The answers are 99, 100 and 101."""
    before = ("run.eval_before=true", "reward.function=more.py:truth", "run.steps=1", "eval.temperature=0.9", "eval.samples_per_prompt=2")
    for overrides, mean in (((), 100), (("eval.max_prompts=2",), 99.5)):
        runs.train(folder, *before, *overrides, f"run.dir=run-{mean}")
        first = json.loads((folder / f"run-{mean}" / "metrics.jsonl").read_text().splitlines()[0])
        assert (first["step"], first["val-core/less/reward/mean@2"]) == (0, mean)


# -- which model ------------------------------------------------------------------------------------------------------------------------


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        runs.train(folder, *ONE, *overrides)
    assert not (folder / "run").exists()
    return str(caught.value)


def test_a_reward_for_a_source_that_no_row_has_is_refused(folder: Path) -> None:
    assert "no row has the data source 'sum'" in refused(folder, 'reward.sources={ sum = "more.py:truth" }')


def evaluated(folder: Path, *arguments: str) -> dict[str, Any]:
    ended = runs.command_here(folder, "eval", "run.toml", "--json", *arguments)
    assert ended.code == 0, ended.error
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_evaluation_asks_nothing_of_what_only_training_uses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward for a source that is in the training data alone, and a logger that could not start."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    options = ('reward.sources={ sums = "more.py:fingerprint" }', "reward.function=more.py:truth", 'log.to=["wandb"]')
    assert evaluated(folder, *options)["val/reward/mean"] == 100
    checked = runs.command_here(folder, "train", "run.toml", "--check", *options)
    assert checked.code == 2 and "log.to: wandb has no API key" in checked.error


def test_evaluation_says_what_training_would_refuse(folder: Path) -> None:
    ended = runs.command_here(folder, "eval", "run.toml", "--json", "train.offload_optimizer=true", "train.entropy_recompute=false")
    assert ended.code == 0, ended.error
    assert "a training run would be refused: train.offload_optimizer: true, but the run is on the CPU" in ended.error
    assert "a training run would be refused: train.entropy_recompute: false, but the loss has no entropy bonus" in ended.error
    assert "would be refused" not in runs.command_here(folder, "eval", "run.toml", "--json").error


def test_no_remedy_is_refused_itself(folder: Path) -> None:
    """A bonus can be added to the loss of a rollout, not to that of SFT."""
    remedy = "Remove the key, or set algorithm.entropy_coef above 0"
    for name, ends in (("grpo", remedy), ("sft", "nothing is kept for its gradient. Remove the key")):
        config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": name}})
        config = config.model_copy(update={"train": config.train.model_copy(update={"entropy_recompute": False})})
        with pytest.raises(UserError) as caught:
            refuse(wrong_settings(config, build(config), "cpu"))
        assert str(caught.value).endswith(ends)


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    """A reward model with random weights."""
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**{**models.SMALL, "vocab_size": 320, "num_labels": 1}))
    model.save_pretrained(tmp_path / "judge")
    other_tokenizer().save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


def test_a_template_that_no_prompt_goes_through_is_refused_and_evaluation_need_not_use_it(folder: Path, judge: Path) -> None:
    (folder / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}~{% endfor %}")
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("workers = 1\n", ""))
    options = ("reward.function=reward_model", f"reward_model.path={judge}", "reward_model.chat_template=template.jinja")
    assert refused(folder, *options).startswith("reward_model.chat_template: every prompt is a plain string")
    asked = [{"role": "user", "content": "2+3?"}]
    runs.write_rows(folder / "train.jsonl", [{"prompt": asked, "ground_truth": "5"}] * 4)
    with parts_of(folder, runs.read_config(folder, *options)) as parts:
        assert parts.worker.roles["reward_model"]
    assert "val/reward/mean" in evaluated(folder, *options)


@pytest.fixture
def scaled_logits(tmp_path: Path) -> Path:
    """A model whose own logits are not its output layer's: trained as if they were, it would learn something else."""
    return save_model(HyperCLOVAXConfig(**models.SMALL, logits_scaling=1.2), tmp_path / "hyperclovax")


def test_a_run_verifies_its_model(tmp_path: Path, scaled_logits: Path) -> None:
    message = refused(prepared(tmp_path / "folder", scaled_logits), NO_REFERENCE)
    assert "HyperCLOVAXForCausalLM" in message and "logits" in message


def test_a_run_verifies_its_reference(folder: Path, scaled_logits: Path) -> None:
    assert "HyperCLOVAXForCausalLM" in refused(folder, f"ref.path={scaled_logits}")


@pytest.mark.parametrize("role", ["model", "ref"])
def test_a_run_refuses_a_tokenizer_larger_than_a_model(folder: Path, tmp_path: Path, role: str) -> None:
    small = save_model(LlamaConfig(**{**models.SMALL, "vocab_size": 90}), tmp_path / "small")
    tokens = len(models.tokenizer())
    assert tokens > 90
    message = refused(folder, f"{role}.path={small}", *([NO_REFERENCE] if role == "model" else []))
    assert f"the tokenizer has {tokens} tokens but the model's embedding only 90 rows" in message


def renamed(model: Path, folder: Path) -> Path:
    """The same model, whose tokenizer has two characters in each other's place."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    return folder


def without_tokenizer(model: Path, folder: Path) -> Path:
    return shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*token*", "*.jinja"))


# Each role that reads the actor's tokens, and what gives a run the role.
READERS = {"ref": (), "critic": ("algorithm.name=ppo", NO_REFERENCE)}


@pytest.mark.parametrize("role", READERS)
def test_a_role_that_reads_other_text_in_the_same_tokens_is_refused(
    folder: Path, tmp_path: Path, model_folders: ModelFolders, role: str
) -> None:
    other = renamed(model_folders("llama"), tmp_path / "renamed")
    message = refused(folder, *READERS[role], f"{role}.path={other}")
    assert message.startswith(f"{role}.path: {other} has another tokenizer than model.path")
    with parts_of(folder, runs.read_config(folder, *READERS[role], f"{role}.path={model_folders('llama')}")) as parts:
        assert parts.worker.roles[role].model.config.model_type == "llama"  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # of the second, transformers makes up a tokenizer
def test_a_role_without_a_tokenizer_is_taken_to_read_the_actors_tokens(
    folder: Path, tmp_path: Path, model_folders: ModelFolders, family: str
) -> None:
    other = without_tokenizer(model_folders(family), tmp_path / "without")
    for role, options in READERS.items():
        with parts_of(folder, runs.read_config(folder, *options, f"{role}.path={other}")) as parts:
            assert parts.worker.roles[role].model.config.model_type == family  # type: ignore[attr-defined]
    assert refused(folder, NO_REFERENCE, f"model.path={other}").startswith("model.path: ")


@pytest.mark.parametrize("role", READERS)
def test_a_role_with_a_shorter_context_than_the_longest_sample_is_refused(folder: Path, tmp_path: Path, role: str) -> None:
    """The longest prompt has six tokens, and a response sixteen."""
    for positions in (21, 22):
        other = save_model(LlamaConfig(**{**models.SMALL, "max_position_embeddings": positions}), tmp_path / f"{positions}")
        options = (*READERS[role], f"{role}.path={other}")
        if positions == 21:
            # Before anything is loaded: none of its weights are there.
            save_file({name: torch.zeros(40_000) for name in "abc"}, other / "model.safetensors", metadata={"format": "pt"})
            message = refused(folder, *options)
            assert message.startswith("rollout.max_new_tokens: ") and "needs 22" in message
            assert f"the model of {role}.path was made for 21 positions" in message
        else:
            with parts_of(folder, runs.read_config(folder, *options)) as parts:
                assert parts.plan.steps == 16


def test_another_reference_is_used(folder: Path, tmp_path: Path) -> None:
    """At the first update the divergence from the run's own start is nothing; from a model with other weights it is not."""
    other = models.save("qwen2", tmp_path / "other", seed=1)
    own = one_step(folder, "algorithm.minibatches_per_step=1")["actor/kl_loss"]
    shutil.rmtree(folder / "run")
    apart = one_step(folder, "algorithm.minibatches_per_step=1", f"ref.path={other}")["actor/kl_loss"]
    assert abs(own) < 1e-6 and apart > 0.05


def test_the_revision_of_a_hub_name_is_the_one_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache as a download leaves it, with one revision: model, tokenizer and end tokens can only come from there."""
    snapshot = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "second").write_text(snapshot)
    model = models.save("llama", cached / "snapshots" / snapshot, seed=3)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = prepared(tmp_path / "folder", model)
    named = ("model.path=someone/tiny", NO_REFERENCE, "train.lr=1e-12")
    assert "someone/tiny" in refused(folder, *named)
    runs.train(folder, *ONE, *named, "model.revision=second")
    trained, started = runs.parameters(runs.checkpoints(folder)[1]), AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, values in trained.items():
        torch.testing.assert_close(values, started[name], rtol=0, atol=1e-6)


# -- the rollout ------------------------------------------------------------------------------------------------------------------------


def test_a_rollout_that_breaks_gives_the_cache_back(folder: Path) -> None:
    config = runs.read_config(folder, *ON_POLICY)
    with parts_of(folder, config) as parts:
        engine, held = parts.worker.engine, list[int]()
        assert isinstance(engine, NativeEngine)

        def broken(group: Group) -> None:
            held.append(engine.runner.held_bytes)
            raise RuntimeError("the reward is gone")

        with pytest.raises(RuntimeError, match="the reward is gone"):
            collect(parts.crew.generate, parts.train_data.items[:4], training_sampling(config), 0, broken)
        assert len(held) == 1 and held[0] > 0 == engine.runner.held_bytes


# -- the update -------------------------------------------------------------------------------------------------------------------------


def test_the_update_has_the_engines_memory_and_trains_the_sampled_end(folder: Path) -> None:
    """The tokenizer pads with its end token: a mask made by looking for padding would leave the sampled end out."""
    config = runs.read_config(folder, *ON_POLICY, "algorithm.samples_per_prompt=24", "run.save_rollouts=96")
    with parts_of(folder, config) as parts:
        engine, trainer = parts.worker.engine, parts.worker.trainers["actor"]
        assert isinstance(engine, NativeEngine) and trainer and engine.tokenizer.pad_token_id == engine.tokenizer.eos_token_id == END
        held: list[tuple[str, int]] = []
        batches: list[MiniBatch] = []
        really_release, really_accumulate = engine.release, trainer.accumulating

        def release() -> None:
            held.append(("release", engine.runner.held_bytes))
            really_release()

        def accumulating(batch: MiniBatch, passes: int = 0) -> Generator[None, None, LossSums]:
            held.append(("update", engine.runner.held_bytes))
            batches.append(batch)
            return really_accumulate(batch, passes)

        engine.release, trainer.accumulating = release, accumulating  # type: ignore[method-assign]
        store = CheckpointStore(Path("run") / "checkpoints", config.run.keep)
        loggers = open_loggers(config.log, Path(config.run.dir), {}, 0)
        Run(config, parts, store, Progress(), silent(), loggers).rl_step(1)
        assert max(size for _, size in held) > 0
        assert [size for name, size in held if name == "update"] == [0]
        validate(config, parts, silent())
        assert engine.runner.held_bytes == 0
    ended = sum(row["finish"] == "stop" for row in runs.rollouts(folder, 1))
    trained = np.concatenate([micro.ids[micro.trained] for micro in batches[0].micro_batches])
    assert ended > 0 and int((trained == END).sum()) == ended


def test_rows_train_every_sampled_token_and_no_other() -> None:
    prompt = Prompt(uid=0, ids=np.array([5, END, 6]), text="")
    sample = Sample(0, np.array([7, 8, END]), np.array([-1, -2, -3], dtype=np.float32), "stop", "")
    kept = ScoredGroup(Group(prompt, (sample,)), (Score(0.5),), step=3)
    algorithm = build(Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}}))
    (spec,) = specify_rows([kept], algorithm, step=4, exclude_errors=True)
    row = build_row(kept.group, spec)
    assert (row.reward, row.lag) == (0.5, 1)
    assert row.ids.tolist() == [5, END, 6, 7, 8, END]
    assert row.mask.tolist() == [False, False, False, True, True, True]
    assert row.rollout_logprobs is not None and row.rollout_logprobs.tolist() == [0, 0, 0, -1, -2, -3]


def test_a_gradient_that_is_not_finite_is_said_and_counted(folder: Path) -> None:
    """The largest rewards, and advantages that are not divided by their spread: numbers all, but the gradient has no finite norm."""
    said = runs.train(folder, *ON_POLICY, NO_REFERENCE, "reward.function=more.py:huge", "algorithm.normalize_by_std=false").said
    assert "warning: 1 of 1 optimizer steps of the actor had a gradient that is not finite: parameters were left as they were" in said
    (line,) = runs.metrics(folder)
    assert (line["actor/skipped_updates"], line["actor/updates"]) == (1, 1)
    checkpoint = runs.checkpoints(folder)[1]
    assert runs.state(checkpoint)["skipped"] == 1
    started = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(values, started[name]) for name, values in runs.parameters(checkpoint).items())


# -- memory -----------------------------------------------------------------------------------------------------------------------------


def test_the_plan_asks_the_head_itself_for_its_bytes(folder: Path) -> None:
    with parts_of(folder, runs.read_config(folder)) as parts:
        facts = sizes.role_facts(parts.worker.actor.model, learns=True)
        body = parts.worker.actor.model.base_model
    width = facts.shape.width
    scalar = sizes.role_facts(ScalarModel(body, torch.nn.Linear(width, 1)), learns=True)
    assert facts.vocabulary_head and not scalar.vocabulary_head
    differing = ({}, {"fused": False}, {"entropy_chunk": 3}, {"entropy_recompute": False}, {"recompute": False})
    for options in (HeadOptions(**given) for given in differing):
        keys = {"fused_head": options.fused, "entropy_chunk": options.entropy_chunk, "entropy_recompute": options.entropy_recompute}
        keys |= {"head_recompute": options.recompute}
        for entropy in ("gradient", "value"):
            expected = head_bytes(50, models.VOCABULARY, width, options, itemsize=4, entropy=entropy).peak  # type: ignore[arg-type]
            assert facts.head_bytes(50, keys, entropy == "gradient") == expected and scalar.head_bytes(50, keys, True) == 0


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nIn all there are")


def test_a_device_that_is_full_is_told_with_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step, so that the first is kept; and while parts are made and validated."""
    accumulating = Trainer.accumulating
    calls = iter([accumulating, accumulating])
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "accumulating", lambda *given: next(calls, out_of_memory)(*given))
        with pytest.raises(UserError, match=r"^out of memory.*: CUDA out of memory. Tried to allocate 2.00 GiB. \w+ .*train\.") as caught:
            runs.train(folder, *ONE, "algorithm.minibatches_per_step=2", "run.steps=2")
        # The frames of the error would hold what filled the memory.
        assert all(each is None or each.__traceback__ is None for each in (caught.value.__cause__, caught.value.__context__))
    with monkeypatch.context() as patched:
        patched.setattr(making, "make_roles", out_of_memory)
        with pytest.raises(UserError, match=r"^out of memory in set-up: .* Set train\.offload_optimizer = true"):
            runs.train(folder, *ONE, "run.dir=other")
        assert not (folder / "other").exists()
    monkeypatch.setattr(Policy, "annotate", out_of_memory)
    monkeypatch.setattr("fulltilt.loop.experience.sample_groups", out_of_memory)
    with pytest.raises(UserError, match=r"^out of memory in eval: .* Set a smaller rollout\.kv_bytes"):
        runs.train(folder, "run.dir=third", "run.eval_before=true")


def test_a_full_device_names_the_keys_of_its_phase() -> None:
    for phase in TIMING_NAMES:
        with pytest.raises(UserError, match=rf"^out of memory in {phase}: CUDA out of memory") as caught, worker.enough_memory(phase):
            out_of_memory()
        named = re.findall(r"\b[a-z_]+\.(?!md\b)[a-z_]+\b", str(caught.value))
        assert named and set(named) <= keys().keys(), phase


def test_a_full_host_is_told_too() -> None:
    told = r"^out of memory in rollout: .*(memory: you tried|MemoryError).* Set a smaller rollout\.kv_bytes"
    for ask in (lambda: torch.empty(2**58, dtype=torch.uint8), lambda: [None] * 2**58):
        with pytest.raises(UserError, match=told), worker.enough_memory("rollout"):
            ask()
    with pytest.raises(RuntimeError, match="shape"), worker.enough_memory("rollout"):
        torch.zeros(2).reshape(3)


# -- stop and go on ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_resumed_run_keeps_its_budgets_on_a_fuller_machine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory would plan a smaller KV cache and with it other shapes. A new run there does; one killed before its first checkpoint is
    not new."""
    runs.train(folder, *ONE)
    kept = runs.state(runs.checkpoints(folder)[1])["budgets"]
    killed = runs.copy(folder, tmp_path / "killed")
    shutil.rmtree(killed / "run" / "checkpoints")
    monkeypatch.setattr(making, "free_bytes", lambda device: 400_000)
    assert "resuming from step 1" in runs.train(folder, *ONE, "run.steps=2").said
    assert runs.state(runs.checkpoints(folder)[2])["budgets"] == kept
    assert "resuming" not in runs.train(killed, *ONE).said
    assert runs.state(runs.checkpoints(killed)[1])["budgets"] == kept
    runs.train(folder, *ONE, "run.dir=new")
    assert runs.state(folder / "new" / "checkpoints" / "step-00000001")["budgets"]["kv_blocks"] < kept["kv_blocks"]


@pytest.mark.long
def test_a_run_does_not_go_on_with_other_rows(folder: Path) -> None:
    runs.train(folder, *ONE)
    before = runs.contents(folder / "run")
    path = folder / "train.jsonl"
    path.write_text(path.read_text().replace("5+15=", "5+16="))
    with pytest.raises(UserError, match=r"^data\.train: its rows are not those that the run in run was started with"):
        runs.train(folder, *ONE, "run.steps=2")
    assert runs.contents(folder / "run") == before
    assert "resuming although the rows of data.train changed" in runs.train(folder, *ONE, "run.steps=2", "run.resume=force").said


@pytest.mark.parametrize("column", ["ground_truth", "data_source", "extra_info"])
def test_a_run_does_not_go_on_with_rows_that_are_judged_otherwise(judged_once: Path, column: str) -> None:
    path = judged_once / "train.jsonl"
    before = path.read_text()
    try:
        rows = [json.loads(line) for line in before.splitlines()]
        rows[5] |= {column: {"hint": "count"} if column == "extra_info" else "21"}
        runs.write_rows(path, rows)
        with pytest.raises(UserError, match=r"^data\.train: its rows are not those that the run in run was started with"):
            runs.train(judged_once, *ONE, "run.steps=2")
    finally:
        path.write_text(before)


@pytest.fixture(scope="module")
def judged_once(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """A run of one step, which its tests leave as it is."""
    folder = prepared(tmp_path_factory.mktemp("judged") / "folder", model_folders("qwen2"))
    runs.train(folder, *ONE)
    return folder


@pytest.mark.long
def test_validation_may_ask_for_longer_responses_on_a_resume(folder: Path) -> None:
    """The checkpoint's KV cache is for one sample as long as those of the first step were: two blocks, and one to spare."""
    options = (*ONE, "algorithm.samples_per_prompt=2", "rollout.max_seqs=1", "run.eval_every=1", "eval.max_prompts=1")
    runs.train(folder, *options)
    kept = runs.state(runs.checkpoints(folder)[1])["budgets"]
    assert kept["kv_blocks"] == 3
    said = runs.train(folder, *options, "run.steps=2", "eval.max_new_tokens=60").said
    assert "resuming from step 1" in said and "val/reward/mean" in runs.metrics(folder)[1]
    assert runs.state(runs.checkpoints(folder)[2])["budgets"] == {**kept, "kv_blocks": 5}


def test_ctrl_c_in_the_last_step_has_nothing_left_to_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the parameters have moved, so that the step is made whole; then the run is done, and says so."""
    validate = Run._validate

    def stop(run: Run, step: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGINT)
        return validate(run, step)

    monkeypatch.setattr(Run, "_validate", stop)
    for code in (130, 0):
        ended = runs.command_here(folder, "train", "run.toml", *ONE, "run.eval_every=1", "run.steps=2")
        assert ended.code == code, ended.error
        assert ("done: 2 steps" in ended.out) == (code == 0) and ("stopped after step 1 and saved" in ended.error) == (code == 130)
    assert list(runs.checkpoints(folder)) == [1, 2]


class Told(Stuck):
    """A logger that keeps what it is told of the run's end."""

    def __init__(self) -> None:
        super().__init__()
        self.come_back.set()
        self.finished: list[bool] = []

    def close(self, finished: bool) -> None:
        self.finished.append(finished)


@pytest.mark.long
def test_a_run_that_was_stopped_is_not_called_finished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, validate = Told(), Run._validate
    monkeypatch.setitem(loggers.KINDS, "tensorboard", lambda opening: told)  # type: ignore[misc]

    def stop_once(run: Run, step: int) -> dict[str, float]:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return validate(run, step)

    monkeypatch.setattr(Run, "_validate", stop_once)
    for steps, interrupted in ((1, True), (2, False)):
        summary = runs.train(folder, "run.eval_before=false", "run.eval_every=1", "run.steps=2", 'log.to=["tensorboard"]').summary
        assert (summary.steps, summary.interrupted) == (steps, interrupted)
        assert told.finished.pop() is not interrupted and told.finished == []


def wait_for(holds: Callable[[], bool], process: runs.Started, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < end, "it ended, or did not come so far"
        time.sleep(0.02)


@pytest.mark.long
def test_a_second_ctrl_c_stops_at_once_without_saving(folder: Path) -> None:
    """The parameters of step 1 have moved and its validation takes minutes: the first Ctrl-C waits, the second does not."""
    slow = ("reward.function=reward.py:slow_from", "reward.args={ first_slow = 99, seconds = 60 }", "reward.timeout_s=100")
    options = ("--json", "run.eval_before=false", "run.eval_every=1", "data.shuffle=false", *slow)
    process = runs.start(folder, "train", "run.toml", *options, first=runs.tell_of_validation)
    said = folder / "said.txt"
    try:
        wait_for((folder / "validating").exists, process)
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: "Ctrl-C again stops at once" in said.read_text(), process)
        assert process.poll() is None
        begin = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=100)
        assert time.monotonic() - begin < 100 and process.returncode == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
    assert "Traceback" not in said.read_text() and "saved" not in said.read_text().replace("without saving", "")
    assert not runs.checkpoints(folder)
    assert (folder / "run" / "metrics.jsonl").read_text() == ""
