"""Numbers at the edge of what is legal and far beyond it, for every numeric key: refused by name and range, or obeyed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from variants import sample_cases

from fulltilt.config import parse
from fulltilt.plan.make import plan_of
from fulltilt.records import UserError
from fulltilt.schema import Config, keys, legal_values, toml_value
from fulltilt.shape import Shape

NUMERIC = [key for key, field in keys().items() if "number" in legal_values(field)]
BEYOND = [0, -1, 1e308, 2**31, 2**63, 2**64, 10**30, 10**4000, 1e-308, -0.0, math.nan, math.inf, "1e400"]

# Settings under which keys have an effect that do not always have one. Each key is tried under the first that it goes with.
SAMPLED: dict[str, Any] = {
    "algorithm.samples_per_prompt": 2,
    "algorithm.prompts_per_step": 2,
    "algorithm.kl_coef": 0.1,
    "algorithm.reward_kl_coef": 0.1,
    "algorithm.reward_kl_target": 0.1,
    "algorithm.dynamic_sampling": True,
    "algorithm.overlong_buffer": 2,
    "data.val": "val.jsonl",
    "eval.temperature": 1.0,
    "lora.rank": 2,
    "reward.function": "reward.py:score",
    "reward.on_error": "score",
    "rollout.max_new_tokens": 4,
    "run.eval_every": 1,
    "run.steps": 1,
    "train.schedule": "cosine",
    "train.recompute": "full",
}
IN_STEPS: dict[str, Any] = {
    "algorithm.aggregation": "seq-mean-token-sum-norm",
    "algorithm.samples_per_prompt": 2,
    "algorithm.prompts_per_step": 2,
    "algorithm.kl_coef": 0.1,
    "rollout.max_new_tokens": 4,
    "run.steps": 1,
    **{f"{role}.dynamic_batch": False for role in ("actor", "ref")},
    **{f"{role}.micro_batch": 2 for role in ("actor", "ref")},
}
FEW: dict[str, Any] = {"algorithm.samples_per_prompt": 2, "algorithm.prompts_per_step": 2, "rollout.max_new_tokens": 4, "run.steps": 1}
CRITIC: dict[str, Any] = {"algorithm.name": "ppo", "algorithm.prompts_per_step": 2, "algorithm.samples_per_prompt": 2, "run.steps": 2}


@pytest.fixture(autouse=True)
def _own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable that lets tests share cores, a thousand workers are refused; with it they would be started."""
    monkeypatch.delenv("FULLTILT_SHARE_DEVICES", raising=False)


CONTEXTS: list[dict[str, Any]] = [
    SAMPLED,
    IN_STEPS,
    {**CRITIC, "rollout.max_new_tokens": 4},
    {**CRITIC, "rollout.max_new_tokens": 4, "critic.dynamic_batch": False, "critic.micro_batch": 2},
    {"algorithm.name": "sft", "data.train": "sft.jsonl", "algorithm.prompts_per_step": 2, "run.steps": 1},
    {"reward.function": "reward_model", "reward_model.path": "model", "run.steps": 1},
    {
        "reward.function": "reward_model",
        "reward_model.path": "model",
        "reward_model.dynamic_batch": False,
        "reward_model.micro_batch": 2,
        "run.steps": 1,
    },
    {"algorithm.prompts_per_step": 2, "algorithm.samples_per_prompt": 2, "rollout.max_new_tokens": 4, "run.epochs": 1},
    {**SAMPLED, "cluster.workers": 2, "train.shard": "hybrid"},
    {**FEW, "algorithm.loss": "clip_cov"},
    {**FEW, "algorithm.loss": "kl_cov"},
    {**FEW, "algorithm.loss": "sapo"},
    {**FEW, "algorithm.advantage": "gdpo"},
    {**FEW, "algorithm.rejection": "token_k1"},
]


def as_value(key: str, number: Any) -> Any:
    """The number in the form that the key takes it."""
    if key == "train.betas":
        return [number, number]
    if key == "algorithm.reward_parts":
        return {"a": number}
    if key == "cluster.roles":
        return {"critic": number}
    return {"gsm8k": number} if key == "reward.function" else {"a": {"gsm8k": number}} if key == "reward.sources" else number


def tables(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, "run": {"device": "cpu"}}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def mistakes(settings: dict[str, Any]) -> list[str] | Config:
    try:
        return parse(tables(settings), origin="run.toml")
    except UserError as error:
        return str(error).splitlines()[1:]


@functools.cache
def context_of(key: str) -> dict[str, Any]:
    for context in CONTEXTS:
        for usual in (2, 0.5, 1):
            if isinstance(mistakes({**context, key: as_value(key, usual)}), Config):
                return context
    raise AssertionError(f"no context in which {key} has an effect: add one")


@pytest.fixture
def folder(tmp_path: Path, model_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs.make(tmp_path / "folder", model_folders("qwen2")))
    return tmp_path / "folder"


@pytest.mark.parametrize("key", NUMERIC)
def test_numbers_far_out_are_refused_by_name_and_range_or_planned_with(folder: Path, key: str) -> None:
    context = context_of(key)
    for number in BEYOND:
        found = mistakes({**context, key: as_value(key, number)})
        if not isinstance(found, Config):
            told = [text for text in found if key in text]
            assert told and any(word in told[0] for word in ("number", "Use", "Lower", "Remove", "Set")), (number, found)
            continue
        assert isinstance(number, int | float) and math.isfinite(number) and abs(number) < 2**63, number
        for device, device_bytes in (("cpu", 0), ("cuda", 80 << 30)):
            try:
                plan = plan_of(Shape.named("small"), found, device=device, device_bytes=device_bytes, host_bytes=16 << 30, longest=8)
            except UserError as error:
                assert len(str(error)) < 1000
            else:
                assert all(isinstance(text, str) for text in plan.words)


# ---- runs ------------------------------------------------------------------------------------------------------------------------------


# Their greatest values only make a run long: it works until it is stopped.
MUCH_WORK = {
    *("algorithm.samples_per_prompt", "algorithm.epochs", "algorithm.max_rounds"),
    *("eval.samples_per_prompt", "run.steps", "run.epochs"),
}


COUNT = itertools.count()


def edges(key: str) -> Iterator[Any]:
    """The least and the greatest legal number."""
    bounds: dict[str, Any] = {}

    def walk(annotation: Any, metadata: Any) -> None:
        bounds.update({name: getattr(bound, name) for bound in metadata for name in ("gt", "ge", "lt", "le") if hasattr(bound, name)})
        for inside in getattr(annotation, "__args__", ()):
            extra = getattr(inside, "__metadata__", ())
            walk(inside, [each for one in extra for each in getattr(one, "metadata", [one])])

    field = keys()[key]
    walk(field.annotation, [*field.metadata, *[each for one in getattr(field.annotation, "__metadata__", ()) for each in one.metadata]])
    yield bounds["ge"] if "ge" in bounds else math.nextafter(bounds["gt"], math.inf)
    yield bounds["le"] if "le" in bounds else math.nextafter(bounds["lt"], 0) if "lt" in bounds else 10_000.0


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def start_run(folder: Path, settings: dict[str, Any], seconds: int) -> None:
    given = tables({**settings, "run.dir": f"run-{next(COUNT)}"})
    lines = [f"[{section}]\n" + "".join(f"{name} = {toml_value(value)}\n" for name, value in own.items()) for section, own in given.items()]
    Path("run.toml").write_text("\n".join(lines))
    with at_most(seconds):
        runs.train(folder)


def run_together(folder: Path, context: dict[str, Any], numbers: dict[str, Any], seconds: int = 240) -> None:
    """One run obeys them all, or refuses. Without the one that a refusal names, the others are tried again; else in smaller parts."""
    try:
        start_run(folder, {**context, **numbers}, seconds)
    except UserError as error:
        assert 0 < len(str(error)) < 2000
        named = [key for key in numbers if key in str(error)]
        others = [key for key in numbers if key not in named]
        half = len(others) if named else len(others) // 2
        alone = [[key] for key in named] if len(named) > 1 else []  # one of them may be there as the remedy of the other
        for part in filter(None, (others[:half], others[half:], *alone) if len(numbers) > 1 else ()):
            run_together(folder, context, {key: numbers[key] for key in part}, seconds)


# The reward model's numbers are those of the other roles.
TRIED = [number for number, context in enumerate(CONTEXTS) if context.get("reward.function") != "reward_model"]
AT_ONCE = 6


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("edge", [0, 1], ids=["least", "greatest"])
@pytest.mark.parametrize("context", sample_cases(TRIED, 0, 2))
def test_runs_with_the_least_and_the_greatest_numbers(folder: Path, context: int, edge: int) -> None:
    own = CONTEXTS[context]
    numbers = {key: as_value(key, list(edges(key))[edge]) for key in NUMERIC if context_of(key) is own}
    long = {key for key in numbers if edge == 1 and key in MUCH_WORK}
    short = [key for key in numbers if key not in long]
    assert numbers, "no number is tried in this context: remove it"
    groups = -(-len(short) // AT_ONCE)
    for start in range(groups):  # neighbours in different runs, for they have most to do with each other
        run_together(folder, own, {key: numbers[key] for key in short[start::groups]})
    for key in long:
        with contextlib.suppress(TimeoutError):
            run_together(folder, own, {key: numbers[key]}, 5)
