"""Published tables of step times, compared with the predictions of the models of memory and time.

Enters: CSV files such as those of tests/data/published, whose rows are runs of verl with Megatron or FSDP training and vLLM rollout.
Leaves: `TableRow`s, each a `RunDescription` with its measured numbers, and the comparison. Guaranteed: headers and cells may have any case
and spelling; a row that cannot be read is reported and does not stop the others; a prediction uses only the settings of its row, and the
tokens that its throughput gives; that a run did not run out of memory is used only if its table leaves out what decides it (`as_it_fits`),
and then its memory is not judged. If a table gives no throughput, all of its rows of one model and limit share one mean response length,
which is chosen once so that the median row's update takes as long as predicted.

`FACTS` has the facts that such tables leave out, by the algorithm in the file's name.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from fulltilt.batching.cost import ModelSize, update_flops
from fulltilt.hardware import GPUS_PER_MACHINE, Cluster
from fulltilt.records import UserError
from fulltilt.schema import shown
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import VERL
from fulltilt.tune.description import LAYOUT_WORDS, RANGES, Backend, BatchDescription, EngineDescription, RunDescription, TrainLayout
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import MemoryModel, memory_of
from fulltilt.tune.shapes import find_shape, named_shape
from fulltilt.tune.time_model import StepSeconds, seconds_of, update_seconds
from fulltilt.tune.values import MOST

Default = TypeVar("Default")

TIMES = ("step", "rollout", "generation", "update_actor", "old_logp", "ref_logp", "reshard")


@dataclass(frozen=True)
class TableFacts:
    """Facts from the scripts of a table's runs, which its columns leave out."""

    reference: bool
    offload: bool  # if no column says otherwise
    fused_head: bool
    fused_rope: bool  # if no row says otherwise
    entropy: bool
    graphs: bool
    memory_share: tuple[float, float] = (0.6, 0.6)  # an engine's share of memory: on one machine, and on several
    samples: int = 16
    micro_batch: int = 2  # if batches are not dynamic
    forward_micro_batch: int = 4


# Source: the run scripts, as tests/data/published/README.md quotes them. Megatron rows of DAPO ignore the request for recompute; FSDP
# obeys.
FACTS = {
    "grpo": TableFacts(reference=True, offload=False, fused_head=True, fused_rope=True, entropy=False, graphs=False),
    "dapo": TableFacts(
        reference=False, offload=True, fused_head=False, fused_rope=False, entropy=True, graphs=True, memory_share=(0.6, 0.8)
    ),
}
FULL = Recompute("full", 1, "uniform")
USUAL_TOKENS = 20480  # tokens of a micro-batch, if a table does not give them
OTHERS = replace(FACTS["dapo"], reference=True)

# The columns that are read, with patterns of their headers in lower case with single spaces; the first header that matches counts.
HEADERS = {
    "number": r"(number|no|id|row|#|index)",
    "backend": r"(backend|framework|engine|strategy|train backend)",
    "model": r"(model|model name|base model)",
    "gpu": r"(gpu|gpu type|device|hardware|accelerator)",
    "gpus": r"(num gpus?|n gpus?|gpus|gpu num|gpu count|number of gpus|world size)",
    "nodes": r"(nodes?|num nodes|nnodes|n nodes)",
    "train_parallel": r"(train parallel\w*|train(ing)? (layout|parallelism)|actor parallel\w*|parallel)",
    "infer_parallel": r"(infer\w* parallel\w*|rollout parallel\w*|gen\w* parallel\w*|rollout tp|infer\w* tp|gen tp)",
    "offload": r"(offload|offloading|param offload)",
    "recompute": r"(recompute\w*|gradient checkpointing|checkpointing|recomputation)",
    "dynamic": r"(dynamic batch|dynamic batch size|dynamic bsz|use dynamic bsz)",
    "memory_share": r"(gpu memory util\w*|gpu util\w*|mem util\w*|memory share)",
    "step": r"(step|step time|time per step|total|timing step)",
    "rollout": r"(rollout|gen|timing gen)",
    "generation": r"(generation|generate|generate sequences)",
    "update_actor": r"(update actor|update|actor update|train|train time)",
    "old_logp": r"(old logp|old log ?probs?|logp|log ?probs?)",
    "ref_logp": r"(ref|ref logp|ref log ?probs?|reference)",
    "reshard": r"(reshard|resharding|sync|weight sync)",
    "throughput": r"(throughput|tokens s gpu|tokens per second per gpu|tgs)",
    "mfu": r"(mfu|mfu actor)",
    "other": r"(other|others|notes?|remarks?|comment|options)",
    "most_prompt": r"(max prompt len\w*|prompt len\w*|max prompt)",
    "most_response": r"(max response len\w*|response len\w*|max response)",
    "mean_response": r"(mean response len\w*|avg response len\w*|average response len\w*|response length mean|mean length)",
    "prompts": r"(bs|batch size|train bs|train batch size|global bs)",
    "minibatch": r"(mini bs|mini batch size|ppo mini batch size|mini batch)",
    "samples": r"(n|rollout n|samples per prompt|n resp per prompt|n samples|group size|responses)",
    "actor_batch": r"(.*(micro|token|budget).*(actor|update|train).*|micro bs dynamic max token|.*(actor|update).*(micro|token|budget).*)",
    "logp_batch": r"(.*(micro|token|budget).*log ?p.*|.*log ?p.*(micro|token|budget).*)",
}


@dataclass(frozen=True)
class TableRow:
    number: str
    table: str
    run: RunDescription
    measured: Mapping[str, float]  # seconds of the columns of TIMES that the row has
    ran_out: bool  # whether the run ran out of memory
    ran: bool  # whether the row has a measured number
    layout: str
    tokens: float | None = None  # mean tokens of a sample, if the table gives them
    unstated: frozenset[str] = frozenset()  # settings that the table leaves out: "recompute", "engine"
    adapted: bool = False  # settings that the table leaves out were chosen so that the run fits
    mfu: float | None = None


@dataclass(frozen=True)
class PublishedTable:
    path: Path
    rows: Sequence[TableRow]
    skipped: Sequence[str] = ()  # rows that could not be read, and why

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError(f"--table {self.path}: no row can be read. {'; '.join(self.skipped[:3]) or 'It has none'}")


@dataclass(frozen=True)
class RowPrediction:
    row: TableRow
    memory: MemoryModel
    seconds: StepSeconds

    @property
    def times(self) -> dict[str, float]:
        """Predicted seconds under the table's names."""
        found = {"step": self.seconds.total, "rollout": self.seconds.rollout, "generation": self.seconds.generation.total}
        found |= {"update_actor": self.seconds.update.total, "old_logp": self.seconds.old_logprob.total}
        found |= {"ref_logp": self.seconds.ref_logprob.total} if self.row.run.reference else {}
        return found | {"reshard": self.seconds.sync.causes.get("parameters to the engine", 0.0)}

    @property
    def verdict(self) -> bool | None:
        """Whether the prediction that the run fits, or does not, is right; None: the row does not say, or was made to fit."""
        if not (self.row.ran or self.row.ran_out) or (self.row.adapted and self.memory.fits):
            return None
        return self.memory.fits != self.row.ran_out


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


def read_table(path: Path, *, facts: TableFacts | None = None, hardware: str | None = None, shape: str | None = None) -> PublishedTable:
    """Read a table. `hardware`: GPUs to predict all rows for, instead of the table's; `shape`: the model of all rows, by name or as
    a folder, instead of those that cells or the file's name have."""
    named = None if shape is None else named_shape(shape)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--table {path}: cannot be read: {getattr(error, 'strerror', error)}. Give a CSV file") from error
    reader = csv.DictReader(text.splitlines())
    columns = columns_of(reader.fieldnames or ())
    sizes = size_columns(reader.fieldnames or ())
    found = columns.keys() | ({"train_parallel"} if sizes else set()) | ({"gpus"} if columns.keys() & {"gpu", "nodes"} else set())
    if missing := [name for name in ("gpus", "train_parallel") if name not in found]:
        raise UserError(f"--table {path}: no column for {', '.join(missing)}. Its header must name num_gpus and train_parallel")
    stated = facts or next((own for name, own in FACTS.items() if name in path.stem.lower()), OTHERS)
    rows: list[TableRow] = []
    skipped: list[str] = []
    for line, cells in enumerate(reader, start=2):
        given = {name: (cells.get(header) or "").strip() for name, header in columns.items()}
        if not any(given.values()):
            continue
        given.setdefault("train_parallel", "".join(f"{word}{cells[header]}" for word, header in sizes.items() if cells.get(header)) or "dp")
        try:
            rows.append(row_of(given, path, stated, named, line))
        except UserError as error:
            skipped.append(f"line {line}: {error}")
    fitting = zip(rows, map(as_it_fits, with_lengths(rows)), strict=True)
    known = with_lengths([replace(own, run=replace(own.run, lengths=row.run.lengths)) for row, own in fitting])
    table = PublishedTable(path, known, skipped)
    return table if hardware is None else on_hardware(table, hardware)


def on_hardware(table: PublishedTable, hardware: str) -> PublishedTable:
    """Return the same runs on other GPUs, without measurements, and skip those that cannot be laid out there."""
    rows: list[TableRow] = []
    skipped = [*table.skipped]
    for row in table.rows:
        cluster = Cluster.parse(hardware, row.run.cluster.gpus)
        try:
            rows.append(replace(row, run=replace(row.run, cluster=cluster), measured={}, ran=False, ran_out=False))
        except UserError as error:
            skipped.append(f"row {row.number}: {str(error).removeprefix(f'{row.run.name}: ')}")
    return PublishedTable(table.path, rows, skipped)


def columns_of(headers: Iterable[str]) -> dict[str, str]:
    """Return the header of each column."""
    plain = {plain_header(header): header for header in headers if header}
    plain |= {re.sub(r" (s|secs?|seconds)$", "", own): header for own, header in plain.items()}  # without a unit
    found: dict[str, str] = {}
    for name, pattern in HEADERS.items():
        header = next((own for own in plain if re.fullmatch(pattern, own)), None)
        if header is not None:
            found[name] = plain[header]
    return found


def plain_header(header: str) -> str:
    return re.sub(r"[^a-z0-9#]+", " ", header.lower()).strip()


def size_columns(headers: Iterable[str]) -> dict[str, str]:
    """Return the columns that have one size of the layout each, such as TP and PP, by the layout's word for it."""
    return {words[-1]: header for header in headers if header and (words := plain_header(header).split()) and is_size(words)}


def is_size(words: Sequence[str]) -> bool:
    return words[-1] in LAYOUT_WORDS and words[:-1] in ([], ["train"], ["actor"], ["training"])


def gpus_of(given: Mapping[str, str]) -> int:
    """Return the number of GPUs: from a column of its own, which may be a product, or from the GPU's cell, or from a number of machines
    with eight each."""
    text = given.get("gpus", "")
    if product := re.fullmatch(r"\s*(\d+)\s*[x*]\s*(\d+)\s*(gpus?)?\s*", text.lower()):
        return count_of(float(product[1]) * float(product[2]), "num_gpus")
    if text:
        return number_in(text, "num_gpus")
    if counted := re.match(r"\s*(\d+)\s*[x*]", given.get("gpu", "").lower()):
        return number_in(counted[1], "GPU")
    return GPUS_PER_MACHINE * number_in(given.get("nodes", ""), "num_gpus")


def shape_in(cell: str, path: Path) -> Shape:
    """Return the shape of the model that a cell names, or else the name of the file."""
    sizes = find_shape(cell) or find_shape(path.stem)
    if sizes is None:
        raise UserError(f"model {cell or path.stem!r} is not known. Name it with --shape")
    return Shape.from_config(sizes)


def row_of(given: Mapping[str, str], path: Path, facts: TableFacts, shape: Shape | None, line: int) -> TableRow:
    number = given.get("number") or str(line)
    layout, other = given["train_parallel"], given.get("other", "").lower()
    gpus = gpus_of(given)
    cluster = replace(Cluster.parse(given.get("gpu") or "H100", gpus), gpus=gpus)
    backend: Backend = "fsdp" if "fsdp" in f"{given.get('backend', '')}{layout}".lower() else "megatron"
    if not layout and backend == "megatron":
        raise UserError("train_parallel is empty. Write the layout, for example tp4pp2, or all dp")
    recompute = stated_recompute(given.get("recompute", ""), other, backend)
    offload = truth(given.get("offload"), facts.offload)
    everything = "all optimi" in other
    lengths = Lengths(count_in(given, "most_prompt", 2048), count_in(given, "most_response", 8192))
    run = RunDescription(
        shape=shape or shape_in(given.get("model", ""), path),
        cluster=cluster,
        lengths=lengths,
        backend=backend,
        layout=TrainLayout.parse(layout),
        engine=engine_of(given, facts, cluster, other),
        batch=batch_of(given, facts, lengths.longest_row),
        recompute=recompute or Recompute(),
        offload_params=offload,
        offload_grads=offload,
        offload_optimizer=offload,
        reference=facts.reference,
        offload_reference=backend == "fsdp",  # verl's FSDP workers always keep it on the host
        fused_head=facts.fused_head or "fused_kernel" in other or "fused kernel" in other or everything,
        fused_rope=facts.fused_rope or "rope_fusion" in other or "rope fusion" in other or everything,
        entropy=facts.entropy and not re.search(r"entropy_?coeff?\s*=\s*0", other),
        system=replace(VERL, deduplicates="deepep" in other),
        name=f"{path.name} row {number}",
    )
    unstated = {"recompute"} if recompute is None else set[str]()
    unstated |= set() if re.search(r"\d", given.get("infer_parallel", "")) else {"engine"}
    measured = {name: within(seconds, name, 0) for name in TIMES if (seconds := plain_number(given.get(name))) is not None}
    ran_out = any(re.search(r"\boom\b|out of memory", text.lower()) for text in given.values())
    mfu = plain_number(given.get("mfu"))
    tokens = plain_number(given.get("mean_response"))
    per_row = tokens + run.lengths.prompt if tokens is not None else tokens_of(given, measured, run)
    ran = bool(measured or mfu) and not ran_out
    return TableRow(number, path.name, run, measured, ran_out, ran, layout, per_row, frozenset(unstated), mfu=mfu)


def engine_of(given: Mapping[str, str], facts: TableFacts, cluster: Cluster, other: str) -> EngineDescription:
    parts = given.get("infer_parallel", "")
    tensor = number_in(parts, "infer_parallel") if re.search(r"\d", parts) else 1
    several = cluster.gpus > cluster.per_machine
    stated = plain_number(given.get("memory_share"))
    share = facts.memory_share[several] if stated is None else within(stated, "memory_share", *RANGES["rollout.memory_share"])
    graphs = facts.graphs or bool(re.search(r"cuda ?_?graphs?", other))
    return EngineDescription(tensor, share, graphs)


def batch_of(given: Mapping[str, str], facts: TableFacts, longest: int) -> BatchDescription:
    """Return the batches of a row. If no cell says how micro-batches are filled, they have verl's usual budget, twice the longest row
    (three times in passes without gradient), but not beyond that of its scripts for long responses. `longest`: tokens of the longest
    row."""
    dynamic = truth(given.get("dynamic"), None)
    actor, logp = (count_in(given, name, None) for name in ("actor_batch", "logp_batch"))
    found: dict[str, Any] = {"micro_batch": facts.micro_batch, "forward_micro_batch": facts.forward_micro_batch}
    if actor is None and dynamic is not False:
        found["token_budget"] = max(longest, min(2 * longest, USUAL_TOKENS))
    elif actor is not None and actor < 100:
        found["micro_batch"] = actor
    elif actor is not None and dynamic is not False:
        found["token_budget"] = actor
    if logp is None and dynamic is not False:
        found["forward_token_budget"] = max(longest, min(3 * longest, 3 * USUAL_TOKENS // 2))
    elif logp is not None and logp < 100:
        found["forward_micro_batch"] = logp
    elif logp is not None and dynamic is not False:
        found["forward_token_budget"] = logp
    prompts = count_in(given, "prompts", 512)
    return BatchDescription(prompts, count_in(given, "samples", facts.samples), count_in(given, "minibatch", prompts), **found)


def stated_recompute(cell: str, other: str, backend: Backend) -> Recompute | None:
    """Return the recompute that the column states, else the remarks, else the backend's default: FSDP runs had gradient checkpointing on.
    None: it is not stated."""
    text = cell.lower() or ("selective" if "selective recompute" in other else "false" if "no recompute" in other else "")
    text = text or ("full" if re.search(r"full recompute|recompute[_ ]?full", other) else "")
    if "sel" in text:
        return Recompute("selective")
    if "full" in text or truth(text, False) or (not text and backend == "fsdp"):
        return FULL
    return Recompute() if text else None


def as_it_fits(row: TableRow) -> TableRow:
    """Return a row in which settings that the table leaves out have the values that people choose to make a run fit: engines of as few GPUs
    as their weights and one sample need, and full recompute if an update does not fit without it (verl's scripts recommend none as long as
    memory suffices). A run that failed for lack of memory was not made to fit: its recompute is assumed only if the table states it."""
    run = row.run
    if "engine" in row.unstated:
        sizes = (1 << power for power in range(run.cluster.gpus.bit_length()))
        tried = [replace(run, engine=replace(run.engine, tensor=size)) for size in sizes]
        run = next((own for own in tried if memory_of(own).engine_starts), run)
    if "recompute" in row.unstated and not row.ran_out and not memory_of(run).phases["update-actor"].fits:
        run = replace(run, recompute=FULL)
    return replace(row, run=run, adapted=run != row.run)


def tokens_of(given: Mapping[str, str], measured: Mapping[str, float], run: RunDescription) -> float | None:
    """Return the tokens of a sample, from tokens per second and GPU over the whole step."""
    throughput = plain_number(given.get("throughput"))
    if throughput is None or "step" not in measured:
        return None
    return throughput * measured["step"] * run.cluster.gpus / run.batch.rows


def truth(text: str | None, default: Any) -> Any:
    if not text:
        return default
    return text.strip().lower() in ("true", "yes", "y", "1", "on")


def plain_number(text: str | None) -> float | None:
    """Return the number in a cell, with k for 1,024 and commas allowed; None: the cell has none."""
    found = re.fullmatch(r"~?\s*([\d,]*\.?\d+)\s*([kK])?\s*s?", (text or "").strip())
    if not found:
        return None
    return float(found[1].replace(",", "")) * (1024 if found[2] else 1)


def number_in(text: str, column: str) -> int:
    """Return the first count in a cell that has other words too."""
    found = re.search(r"\d+", text)
    if not found:
        raise UserError(f"{column} is {shown(text)}, which is not a number")
    return count_of(float(found[0]), column)


def count_in(given: Mapping[str, str], column: str, default: Default) -> int | Default:
    """Return the count in a cell, or the default if the cell has no number."""
    found = plain_number(given.get(column))
    return default if found is None else count_of(found, column)


def count_of(number: float, column: str) -> int:
    return int(within(number, column))


def within(number: float, column: str, least: float = 1, most: float = MOST) -> float:
    """Return a number of a cell, unless the models of memory and time cannot compute with it."""
    if not least <= number <= most:
        raise UserError(f"{column} is {number:.12g}. Give a number from {least:.12g} to {most:.12g}")
    return number


# ---- lengths -----------------------------------------------------------------------------------------------------------------------------


def with_lengths(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return rows with the mean length of their responses: their own, that of similar rows, or the common one."""
    alike: dict[Any, list[TableRow]] = {}
    for row in rows:
        alike.setdefault((row.run.shape, row.run.lengths), []).append(row)
    common = {key: common_tokens(own) for key, own in alike.items()}
    found = []
    for row in rows:
        lengths = row.run.lengths
        tokens = common[row.run.shape, lengths] if row.tokens is None else row.tokens
        found.append(replace(row, run=row.run.with_response(min(max(1.0, tokens - lengths.prompt), float(lengths.most_response)))))
    return found


def common_tokens(rows: Sequence[TableRow]) -> float:
    """Return one length for all rows: the mean of the given ones if there are any, else the one with which the median update takes as long
    as predicted."""
    if given := [row.tokens for row in rows if row.tokens is not None]:
        return fmean(given)
    lengths = rows[0].run.lengths
    timed = [row for row in rows if row.measured.get("update_actor")]
    if not timed:
        return lengths.prompt + lengths.most_response / 8
    low, high = 1.0, float(lengths.most_response)
    usual = lengths.prompt + lengths.most_response / 8
    for _ in range(16):
        middle = math.sqrt(low * high)
        ratios = [update_seconds(row.run.with_response(middle)).total / row.measured["update_actor"] for row in timed]
        low, high = (middle, high) if median(ratios) < 1 else (low, middle)
    # At an end of the range no length explains the measured seconds.
    return lengths.prompt + low if 2.0 < low < 0.95 * lengths.most_response else usual


# ---- comparing ---------------------------------------------------------------------------------------------------------------------------


def predict(table: PublishedTable) -> list[RowPrediction]:
    return [RowPrediction(row, memory_of(row.run), seconds_of(row.run)) for row in table.rows]


@dataclass(frozen=True)
class Comparison:
    """Error of the predictions of one column over all tables: mean relative errors."""

    column: str
    rows: int
    error: float
    baseline: float  # the error with one constant share of the peak for each type of GPU, chosen to fit these rows best
    shares: Mapping[str, float] = field(default_factory=dict)  # those constant shares


def compare(predictions: Sequence[RowPrediction], column: str = "update_actor") -> Comparison | None:
    """Return the mean relative error, with that of a constant MFU for each type of GPU that knows the same lengths."""
    timed = [(own, own.row.measured[column]) for own in predictions if own.row.measured.get(column)]
    if not timed:
        return None
    error = fmean(abs(own.times[column] - measured) / measured for own, measured in timed)
    shares, others = {}, []
    for gpu in dict.fromkeys(own.row.run.gpu.name for own, _ in timed):
        ideal = [(ideal_seconds(own.row.run), measured) for own, measured in timed if own.row.run.gpu.name == gpu]
        candidates = [seconds / measured for seconds, measured in ideal]  # the mean of absolute errors is least where one of them is zero
        shares[gpu] = min(candidates, key=lambda share: constant_error(ideal, share))
        others += [abs(seconds / shares[gpu] - measured) / measured for seconds, measured in ideal]
    return Comparison(column, len(timed), error, fmean(others), shares)


def constant_error(ideal: Sequence[tuple[float, float]], share: float) -> float:
    return fmean(abs(seconds / share - measured) / measured for seconds, measured in ideal)


def ideal_seconds(run: RunDescription) -> float:
    """Return the seconds of the update's FLOPs at the GPUs' peak."""
    rows = run.lengths.rows
    each = update_flops(ModelSize.of_shape(run.shape), rows, sum(rows)).total / len(rows)
    return run.batch.rows * each / (run.cluster.gpus * run.gpu.flops)


# ---- showing -----------------------------------------------------------------------------------------------------------------------------

SHOWN = ("update_actor", "generation", "rollout", "old_logp", "step")


def lines(tables: Sequence[PublishedTable], predictions: Sequence[RowPrediction]) -> Iterator[str]:
    """Yield predictions and measurements as a table for people."""
    for table in tables:
        own = [each for each in predictions if each.row.table == table.path.name]
        yield f"{table.path.name}: predicted / measured seconds"
        head = ["row", "gpus", "train", "rollout", "memory, GiB", *SHOWN]
        body = [cells_of(each) for each in own]
        widths = [max(len(line[place]) for line in [head, *body]) for place in range(len(head))]
        for line in [head, *body]:
            yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        yield from (f"not read: {why}" for why in table.skipped)
        responses = {round(each.row.run.lengths.response) for each in own if each.row.tokens is None}
        if responses:
            yield f"mean response where the table gives no throughput: {', '.join(map(str, sorted(responses)))} tokens"
        yield ""
    yield from summary(predictions)


def cells_of(own: RowPrediction) -> list[str]:
    row, peak = own.row, max(own.memory.phases.items(), key=lambda item: item[1].total)
    said = "fits" if own.memory.fits else "OOM"
    was = {True: "right", False: "WRONG", None: "not said"}[own.verdict]
    gpus = f"{row.run.cluster.gpus} {row.run.gpu.name}"
    memory = f"{said} ({was}) {peak[1].total / (1 << 30):.1f} in {peak[0]}"
    return [row.number, gpus, row.layout, f"tp{row.run.engine.tensor}", memory, *(beside(own, column) for column in SHOWN)]


def beside(own: RowPrediction, column: str) -> str:
    measured = own.row.measured.get(column)
    return f"{own.times[column]:.0f} / {'-' if measured is None else f'{measured:.0f}'}"


def summary(predictions: Sequence[RowPrediction]) -> Iterator[str]:
    said = [own.verdict for own in predictions if own.verdict is not None]
    if said:
        yield f"memory: {sum(said)} of {len(said)} verdicts right"
    for column in SHOWN:
        if found := compare(predictions, column):
            text = f"{column}: mean relative error {found.error:.1%} over {found.rows} rows"
            if column == "update_actor":
                shares = ", ".join(f"{share:.2f} on {gpu}" for gpu, share in found.shares.items())
                text += f"; with one constant MFU for each type of GPU ({shares}) {found.baseline:.1%}"
            yield text


def as_json(tables: Sequence[PublishedTable], predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    rows = [
        {
            "table": own.row.table, "number": own.row.number, "model": own.row.run.shape.model_type, "gpu": own.row.run.gpu.name,
            "gpus": own.row.run.cluster.gpus, "train_parallel": own.row.layout, "fits": own.memory.fits, "ran_out": own.row.ran_out,
            "verdict_right": own.verdict, "reasons": own.memory.reasons, "response_tokens": own.row.run.lengths.response,
            "predicted": {name: round(seconds, 2) for name, seconds in own.times.items()}, "measured": dict(own.row.measured),
            "binds": {name: phase.binds for name, phase in own.seconds.phases.items()},
            "causes": {"update_actor": {cause: round(seconds, 2) for cause, seconds in own.seconds.update.causes.items()}},
            "memory": own.memory.as_json(),
        }
        for own in predictions
    ]  # fmt: skip
    errors = {
        column: {
            "rows": found.rows,
            "mean_relative_error": found.error,
            "constant_mfu_error": found.baseline,
            "constant_mfu": dict(found.shares),
        }
        for column in SHOWN
        if (found := compare(predictions, column))
    }
    return {"rows": rows, "errors": errors, "skipped": [f"{table.path.name} {why}" for table in tables for why in table.skipped]}
