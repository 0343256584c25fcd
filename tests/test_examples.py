"""Examples and pages say what is true: files parse, commands exist, runs train, metrics are the ones listed.

`python tests/test_examples.py` writes examples/demo anew from src/fulltilt/demo.py.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import typer
from transformers import AutoModelForSequenceClassification

from fulltilt import config as configuration
from fulltilt import demo, loop
from fulltilt.cli import app
from fulltilt.observe.console import Console
from fulltilt.schema import Config

ROOT = Path(__file__).parents[1]
RUN_FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/**/*.toml"))
PAGES = sorted(path.relative_to(ROOT).as_posix() for folder in ("*.md", "docs/*.md", "examples/**/*.md") for path in ROOT.glob(folder))

# What a reader has made or downloaded by the time a page speaks of it. All else that a page names must really be there.
MODELS_OF_THE_READER = (
    "models/mine",
    "models/mine-reward",
    "models/Qwen2.5-0.5B-Instruct",
    "models/SmolLM2-135M-Instruct",
    "runs/mine/checkpoints/step-00000030/model",
    "runs/chat-sft/checkpoints/step-00000015/model",
    "runs/gsm8k-sft/checkpoints/step-00000232/model",
    "runs/gsm8k/sft/checkpoints/step-00000348/model",
)
ADAPTER_OF_THE_READER = "adapters/mine"
OTHER_PROGRAMS = {"export", "git", "mkdir", "pip", "source"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. The text above it ends with the name of its file and a colon, or its first line is a comment with it."""

    page: str
    number: int
    kind: str
    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks_of(page: str) -> list[Block]:
    fenced = r"(?:`(mine/\S+)`:\n\n)?^```(\w*)\n(.*?)^```$"  # a name beside the fence would not be shown by a rendered page
    found = re.findall(fenced, (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [Block(page, number, kind, file or first_comment(text), text) for number, (file, kind, text) in enumerate(found, 1)]


def first_comment(text: str) -> str:
    named = re.match(r"# (mine/\S+)\n", text)
    return named[1] if named else ""


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(kind: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.kind == kind]


def commands() -> list[Any]:
    """Every command line of a shell block, and every `fulltilt ...` inside a sentence or a table, also behind an environment variable."""
    found = {(block.page, line) for block in BLOCKS if block.kind == "sh" for line in block.text.splitlines() if line.strip()}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found |= {(page, line) for line in re.findall(r"`((?:[A-Z_]+=\S+ )?fulltilt [^`\n]+)`", text)}
    return [pytest.param(line, id=f"{page}: {line}") for page, line in sorted(found)]


def demo_files() -> dict[Path, str]:
    """The demo's run files as it writes them into its default folder."""
    numbers = {name.lower(): value for name, value in vars(demo).items() if name.isupper()}
    values = {"folder": "runs/demo", **numbers}
    folder = ROOT / "examples" / "demo"
    return {folder / "sft.toml": demo.SFT.format(**values), folder / "grpo.toml": demo.GRPO.format(**values)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the reader has done what the pages say: demo, GSM8K, mathematics, the README's own run."""
    place = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "examples", place / "examples")
    demo.prepare(place / "runs" / "demo")
    shutil.copytree(place / "runs" / "demo" / "model", place / "runs" / "demo" / "warm")
    prepare_gsm8k(place)
    prepare_math(place)
    for block in BLOCKS:
        if block.file:
            (place / block.file).parent.mkdir(exist_ok=True)
            (place / block.file).write_text(block.text, encoding="utf-8")
    shutil.copy(place / "mine" / "run.toml", place / "RUN.toml")
    (place / "mine" / "template.jinja").touch()
    for folder in MODELS_OF_THE_READER:
        (place / folder).mkdir(parents=True)
        (place / folder / "config.json").write_text("{}", encoding="utf-8")
    (place / ADAPTER_OF_THE_READER).mkdir(parents=True)
    (place / ADAPTER_OF_THE_READER / "adapter_config.json").write_text("{}", encoding="utf-8")
    return place


def prepare_gsm8k(place: Path) -> None:
    rows = [json.dumps({"question": f"What is 7 plus {n}?", "answer": f"7+{n}=<<7+{n}={7 + n}>>{7 + n}\n#### {7 + n}"}) for n in range(4)]
    source = place / "downloaded"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    runpy.run_path(str(place / "examples" / "gsm8k" / "prepare.py"))["prepare"](source, place / "data" / "gsm8k")


def prepare_math(place: Path) -> None:
    prepare = runpy.run_path(str(place / "examples" / "math" / "prepare.py"))["prepare"]
    rows = [json.dumps({"problem": f"What is {n} / 8?", "answer": rf"It is $\boxed{{\frac{{{n}}}{{8}}}}$."}) for n in range(4)]
    (place / "downloaded" / "math.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for split in ("train", "val"):
        prepare(place / "downloaded" / "math.jsonl", place / "data" / "math" / f"{split}.parquet", "problem", "answer", "math")


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    # The GSM8K runs name a model of the hub, which these would refuse.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return place


def load(path: str | Path, *overrides: str) -> Config:
    return configuration.load(path, overrides)


def test_there_is_something_to_test() -> None:
    assert {Path(path).parent.name for path in RUN_FILES} >= {"demo", "gsm8k", "custom_reward", "chat", "math"}
    assert {block.file for block in BLOCKS if block.file} >= {"mine/run.toml", "mine/reward.py", "mine/train.jsonl"}
    assert [page for page in PAGES if re.search(r"^```\w+ ", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)] == []
    assert len(commands()) > 20


@pytest.mark.parametrize("path", RUN_FILES)
def test_every_example_parses(path: str, there: Path) -> None:
    assert load(path).run.dir.startswith("runs/")


@pytest.mark.parametrize("path", sorted(demo_files()), ids=lambda path: path.name)
def test_the_demo_examples_are_what_the_demo_writes(path: Path) -> None:
    remedy = "examples/demo differs from src/fulltilt/demo.py; write it anew with: PYTHONPATH=src python tests/test_examples.py"
    assert path.is_file() and path.read_text(encoding="utf-8") == demo_files()[path], remedy


@pytest.mark.parametrize("block", blocks("toml"))
def test_every_toml_block_parses(block: Block, there: Path) -> None:
    """A block that shows some sections only is completed with what such a run needs."""
    needed = {"model": {"path": "models/mine"}, "data": {"train": "mine/train.jsonl"}, "run": {"steps": 1}}
    needed |= {"reward_model": {"path": "models/mine-reward"}} if "reward_model" in block.text else {}
    configuration.parse(needed | tomllib.loads(block.text), origin=str(block))


@pytest.mark.parametrize("block", blocks("json"))
def test_every_json_block_holds_rows(block: Block) -> None:
    assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_block_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("line", commands())
def test_every_command_exists(line: str, there: Path) -> None:
    words = [word for word in shlex.split(line, comments=True) if not word.startswith("[")]
    program, *arguments = words[1:] if re.fullmatch(r"[A-Z_]+=\S+", words[0]) else words
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    elif program == "python":
        assert any((folder / arguments[0]).is_file() for folder in (there, ROOT))  # made by an example, or in the repository
    elif program == "fulltilt":
        check_own_command(arguments)
    else:
        assert program in OTHER_PROGRAMS


def check_own_command(arguments: list[str]) -> None:
    """The subcommand takes these options, and its run file these overrides."""
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    context = group.commands[name].make_context(name, rest)
    if "overrides" in context.params and context.params["run"] is not None:  # plan takes a table or a description instead
        load(context.params["run"], *context.params["overrides"] or ())


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]
    assert not missing


# Each example with a model that fits here and numbers that make it two steps; everything else is as shipped.
SMALL = ("run.device=cpu", "run.save_every=0", "data.max_prompt_tokens=400")
TWO_STEPS, AN_EPOCH = ("run.steps=2", "algorithm.prompts_per_step=2"), ("run.epochs=1", "algorithm.prompts_per_step=2")
SAMPLED = ("algorithm.minibatches_per_step=1", "rollout.max_new_tokens=8")
GROUPS = (*SAMPLED, "algorithm.samples_per_prompt=2")
FEWER: dict[str, tuple[str, ...]] = {
    "examples/chat/ppo.toml": (*TWO_STEPS, *SAMPLED, "reward_model.path=runs/tiny-reward", "algorithm.critic_warmup=1"),
    "examples/chat/sft.toml": ("run.epochs=1", "algorithm.prompts_per_step=12", "run.eval_every=1"),
    "examples/gsm8k/dapo.toml": (*TWO_STEPS, *GROUPS, "algorithm.overlong_buffer=4"),
    "examples/gsm8k/grpo.toml": (*AN_EPOCH, *GROUPS),
    "examples/gsm8k/lora.toml": (*AN_EPOCH, *GROUPS, "lora.rank=2", "lora.alpha=4"),
    "examples/gsm8k/ppo.toml": (*AN_EPOCH, *SAMPLED, "run.eval_every=1"),
    "examples/gsm8k/sft.toml": (*AN_EPOCH, "run.eval_every=1"),
    "examples/gsm8k/smollm2/dapo.toml": (*TWO_STEPS, *GROUPS, "algorithm.overlong_buffer=4", "algorithm.prompts_per_round=2"),
    "examples/gsm8k/smollm2/grpo.toml": (*TWO_STEPS, *GROUPS),
    "examples/gsm8k/smollm2/ppo.toml": (*TWO_STEPS, *GROUPS, "algorithm.critic_warmup=1"),
    "examples/gsm8k/smollm2/sft.toml": (*AN_EPOCH, "run.eval_every=1"),
    "examples/math/dapo.toml": (
        *TWO_STEPS, *GROUPS, "algorithm.overlong_buffer=4", "algorithm.prompts_per_round=2", "algorithm.max_rounds=2",
        "eval.samples_per_prompt=2",
    ),
}  # fmt: skip


def test_every_example_with_a_model_of_its_own_is_run() -> None:
    made_here = {path for path in RUN_FILES if path.startswith(("examples/demo/", "examples/custom_reward/"))}
    assert FEWER.keys() == set(RUN_FILES) - made_here


@pytest.fixture(scope="module")
def small_models(place: Path) -> Path:
    """The same place, with a policy whose template ends every turn, and a reward model of another family."""
    models.save("qwen2", place / "runs" / "tiny")
    talks = models.tokenizer()
    talks.chat_template = models.TEMPLATE.replace("\n{% endfor %}", "{{ eos_token }}\n{% endfor %}")
    talks.save_pretrained(place / "runs" / "tiny")
    shape = models.FAMILIES["llama"]()
    shape.num_labels = 1
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(place / "runs" / "tiny-reward")
    models.tokenizer().save_pretrained(place / "runs" / "tiny-reward")
    return place


def load_small(place: Path, path: str, into: str = "trained") -> Config:
    folder = f"run.dir=runs/{into}/{Path(path).parent.name}-{Path(path).stem}"
    return load_in(place, path, "model.path=runs/tiny", folder, *SMALL, *FEWER[path])


@pytest.mark.long
@pytest.mark.parametrize("path", FEWER)
def test_every_example_trains(path: str, small_models: Path) -> None:
    config = load_small(small_models, path)
    lines = metrics_of(small_models, config)
    steps = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line.get("reward/errors", 0) == 0 for line in steps)
    validated = [name for name in ("val/loss", "val/reward/mean") if name in lines[0]]
    assert bool(validated) == config.run.eval_before
    assert (small_models / config.run.dir / "checkpoints" / "step-00000002" / "model").is_dir()


OF_SEVERAL_WORKERS = r"communication/|driver/|sync/|memory_spread_gib/|timing_s/workers/|\w+/load_spread$|rollout/time_spread$"


@pytest.fixture(scope="module")
def measured(place: Path, small_models: Path) -> dict[str, list[dict[str, Any]]]:
    """Metrics of the README's own run and of some examples, each cut to a few steps that use all that can be switched on."""
    runs = {
        "readme": load_in(
            place, "mine/run.toml", "run.dir=runs/first", "run.steps=1", "run.device=cpu", "algorithm.samples_per_prompt=4",
            "algorithm.loss=kl_cov", "algorithm.rejection=token_k1", "algorithm.rejection_bounds=2",
        ),
        "grpo": load_in(
            place, "examples/custom_reward/run.toml", "run.steps=2", "run.save_every=1", "run.eval_every=1",
            "algorithm.minibatches_per_step=2", "algorithm.kl_coef=0.1", "algorithm.samples_per_prompt=4",
        ),
        "sft": load_in(place, "examples/demo/sft.toml", "run.steps=1", "data.val=runs/demo/data/sft.jsonl", "run.eval_every=1"),
        "ppo": load_small(place, "examples/chat/ppo.toml", "measured"),
        "dapo": load_small(place, "examples/math/dapo.toml", "measured"),
    }  # fmt: skip
    return {name: metrics_of(place, config) for name, config in runs.items()}


def load_in(place: Path, path: str, *overrides: str) -> Config:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return load(path, *overrides)


def metrics_of(place: Path, config: Config) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        loop.train(config, Console(quiet=True))
        return [json.loads(line) for line in (Path(config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_readme_run_trains_with_its_own_reward(measured: dict[str, list[dict[str, Any]]]) -> None:
    (step,) = measured["readme"]
    assert step["reward/errors"] == 0 and 0 <= step["critic/score/mean"] <= 1 and step["actor/updates"] == 1


def test_the_custom_reward_is_called_with_its_arguments(measured: dict[str, list[dict[str, Any]]]) -> None:
    first, second = measured["grpo"]
    assert first["reward/errors"] == 0 and second["actor/updates"] == 2
    assert {name for name in first if name.startswith("reward/parts/")} == {"reward/parts/one_digit", "reward/parts/whole_sum"}


# Names that hold a user's word or number, as the page writes them; of `acc` it says that it is as the reward.
FORMS = {
    r"(?<=/rollout_rs_)(token|seq_sum|seq_mean|seq_max|group_\w+)_k\d(?=_)": "CRITERION",
    r"^reward/parts/.*": "reward/parts/NAME",
    r"^(val-\w+)/.+/([^/]+)/(\w+)@\d+": r"\1/SOURCE/\2/\3@N",
    r"/SOURCE/acc/": "/SOURCE/reward/",
    r"/SOURCE/(?!reward/)[^/]+/": "/SOURCE/NAME/",
    r"^(predicted/)?memory_gib/[^/]+/": r"\1memory_gib/PHASE/",
}
ON_A_GPU = {"perf/max_memory_allocated_gb", "perf/gpu_utilization", "memory_gib/reserved", "budget/NAME"} | {
    f"memory_gib/PHASE/{what}" for what in ("peak", "activations", "other", "host")
}
ON_A_GPU |= {"predicted/timing_s/PHASE", "predicted/timing_s/step", "predicted/memory_gib/PHASE/peak"}


def test_the_metrics_page_lists_what_runs_write_and_nothing_else(measured: dict[str, list[dict[str, Any]]]) -> None:
    written = {name for lines in measured.values() for line in lines for name in line if "/" in name}
    for pattern, form in FORMS.items():
        written = {re.sub(pattern, form, name) for name in written}
    rows = [line for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    # Memory of a GPU, what several workers do, and votes on answers: none of these models gives one.
    elsewhere = ON_A_GPU | {name for name in listed if "/maj@" in name or re.match(OF_SEVERAL_WORKERS, name)}
    assert listed - elsewhere == written - elsewhere


if __name__ == "__main__":
    for file, text in demo_files().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")
