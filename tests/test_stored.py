"""Models are read from their files in parts: the bits of a whole model that is cut, and no more memory than a part and one tensor."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import devices
import models
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from fulltilt.model import lora
from fulltilt.model.arrays import local
from fulltilt.model.load import load_model
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.model.stored import READ_WHOLE, release, stored_weights
from fulltilt.parallel.apply import Shards, shard, share
from fulltilt.parallel.experts import split_experts
from fulltilt.parallel.filling import fill
from fulltilt.parallel.parts import ModelPart
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.tensor import split
from fulltilt.records import UserError
from fulltilt.schema import LoraConfig, ModelConfig

CPU = torch.device("cpu")
ModelFolders = Callable[[str], Path]


@dataclass(frozen=True)
class StoredCase:
    family: str
    way: str = "tensor"  # "tensor", "experts", "full", "tensor and full" or "experts and full", among two workers each
    kind: str = "actor"  # "lora", "critic" or "ref"
    dtype: str = "float32"

    def __str__(self) -> str:
        return "-".join([self.family, self.way.replace(" ", "-"), self.kind, self.dtype])

    @property
    def workers(self) -> int:
        return 4 if " and " in self.way else 2


@contextmanager
def counting(folder: Path) -> Iterator[list[int]]:
    """Collects the most bytes that torch's allocator had given out inside at any moment, beyond those before. The profiler counts files of
    the folder that are mapped into memory, too: they are left out, by their sizes."""
    found: list[int] = []
    mapped = {file.stat().st_size for file in folder.iterdir()}
    gc.collect()  # a model that is freed inside would be counted as less than before
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            yield found
    finally:
        gc.enable()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]" and abs(event.nbytes()) not in mapped]
    taken = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    found.append(max(accumulate(taken), default=0))


class StoredWorker:
    """One of four processes, which cuts a model in both ways."""

    def __init__(self, rank: int) -> None:
        pairs, across = ([dist.new_group(each) for each in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        self.pairs = Ranks(rank % 2, 2, pairs[rank // 2], before=rank - rank % 2)
        self.across = Ranks(rank // 2, 2, across[rank % 2], before=rank % 2, step=2)

    def load(self, case: StoredCase, folder: Path, *, stored: bool) -> tuple[Any, ModelPart | None, Shards | None]:
        config = ModelConfig(path=str(folder), dtype=case.dtype)  # type: ignore[arg-type]
        model: Any = (
            load_scalar(config, CPU, key="critic.path", head="new", stored=stored)
            if case.kind == "critic"
            else load_model(config, CPU, stored=stored)
        )
        assert (stored_weights(model) is not None) == stored
        if case.kind == "lora":
            stacked = ["gate_up_proj"] if case.family in ("qwen3-moe", "mixtral") and case.way.startswith("experts") else []
            lora.add_adapters(model, LoraConfig(rank=2, parameters=stacked), 0)
        model.requires_grad_(case.kind != "ref") if case.kind != "lora" else None
        part = {"tensor": split, "experts": split_experts}[case.way.split()[0]](model, self.pairs) if case.way != "full" else None
        shards = None
        if "full" in case.way:
            sharing = share(self.pairs if part is None else self.across, "cpu")
            shards = shard(model, sharing)
        fill(model, part, shards)
        release(model)
        return model, part, shards

    def compare(self, case: StoredCase, folder: Path) -> dict[str, Any]:
        whole, _, _ = self.load(case, folder, stored=False)
        self.load(case, folder, stored=True)  # what torch allocates once is there afterwards
        with counting(folder) as counted:
            found, _, shards = self.load(case, folder, stored=True)
        expected, own = dict(whole.named_parameters()), dict(found.named_parameters())
        buffers = {name: each for name, each in whole.named_buffers()}
        if shards:
            shards.rest()
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in map(local, own.values())}
        return {
            "names": list(own) == list(expected),
            "bits": [
                name
                for name, each in own.items()
                if not torch.equal(local(each), local(expected[name])) or each.dtype != expected[name].dtype
            ],
            "learns": all(each.requires_grad == expected[name].requires_grad for name, each in own.items()),
            "buffers": all(torch.equal(each, buffers[name]) for name, each in found.named_buffers()) and len(buffers) > 0,
            "tied": tied(found) == tied(whole),
            "held": sum(kept.values()),
            "most": counted[0],
        }


def tied(model: Any) -> bool:
    body = model.body if isinstance(model, ScalarModel) else model
    head = body.get_output_embeddings()
    return head is not None and head.weight is body.get_input_embeddings().weight


def make(member: devices.Member) -> StoredWorker:
    return StoredWorker(member.rank)


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "test_stored:make")


SHORT = [StoredCase("qwen3-moe", "tensor and full", "lora", "bfloat16")]
CASES = [
    *[StoredCase(family, way) for family in ("qwen2", "llama-tied", "gemma2", "qwen3-moe", "mixtral") for way in ("tensor", "full")],
    *[StoredCase(family, "experts", kind) for family in ("qwen3-moe", "mixtral") for kind in ("actor", "lora", "critic")],
    *[StoredCase("qwen2", way, kind, "bfloat16") for way in ("tensor", "full", "tensor and full") for kind in ("lora", "critic", "ref")],
    StoredCase("mixtral", "experts and full"),
    StoredCase("llama-tied", "tensor and full", "critic"),
]


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.matrix) for case in CASES)], ids=str)
def test_a_worker_reads_its_part_alone_and_has_the_bits_of_the_whole_model(
    pool: devices.Guests, model_folders: ModelFolders, case: StoredCase
) -> None:
    folder = model_folders(case.family)
    tensors = load_file(folder / "model.safetensors")
    largest = max(tensor.nbytes for tensor in tensors.values())
    for found in pool.start("compare", [(case, folder)] * pool.size, what="compare").results():
        assert found["names"] and not found["bits"] and found["learns"] and found["buffers"] and found["tied"]
        assert found["held"] <= found["most"] <= found["held"] + largest + SCRATCH


SCRATCH = 2048  # buffers, and numbers that are computed from whole tensors


# ---- kinds of files, in one process ----------------------------------------------------------------------------------------------------


def loaded(folder: Path, *, stored: bool, dtype: str = "float32") -> Any:
    return load_model(ModelConfig(path=str(folder), dtype=dtype), CPU, stored=stored)  # type: ignore[arg-type]


def same_bits(folder: Path, dtype: str = "float32") -> bool:
    whole, found = loaded(folder, stored=False, dtype=dtype), loaded(folder, stored=True, dtype=dtype)
    assert stored_weights(found) is not None
    fill(found)
    pairs = zip(whole.named_parameters(), found.named_parameters(), strict=True)
    return all(name == other and torch.equal(one, two) and one.dtype == two.dtype for (name, one), (other, two) in pairs)


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "phi3"])
def test_files_of_all_kinds_can_be_read_in_parts(tmp_path: Path, family: str) -> None:
    folder = models.save(family, tmp_path / "one")
    assert same_bits(folder) and same_bits(folder, "bfloat16")
    several = tmp_path / "several"
    loaded(folder, stored=False).save_pretrained(several, max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 2 and same_bits(several, "bfloat16")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((folder / "config.json").read_text())
    torch.save(load_file(folder / "model.safetensors"), pickled / "pytorch_model.bin")
    assert same_bits(pickled, "bfloat16")


def test_files_that_cannot_be_mapped_are_read_whole_and_the_model_says_so(tmp_path: Path) -> None:
    folder = models.save("qwen2", tmp_path)
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    file.unlink()
    model = loaded(folder, stored=True)
    assert stored_weights(model) is None and not any(own.is_meta for own in model.parameters())
    assert "cannot be mapped into memory" in getattr(model, READ_WHOLE)


@pytest.mark.parametrize("equal", [True, False])
def test_embeddings_of_which_files_have_both_are_tied_if_they_are_equal(tmp_path: Path, equal: bool) -> None:
    folder = models.save("llama-tied", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_bits(folder)
    found = loaded(folder, stored=True)
    assert tied(found) is equal is tied(loaded(folder, stored=False))


def test_wrong_weights_are_refused_as_if_they_were_read_whole(tmp_path: Path) -> None:
    folder = models.save("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "NaN or infinite: model.layers.1.mlp.up_proj.weight": {**tensors, name: tensors[name] * float("nan")},
        "lacks weights .*: model.layers.1.mlp.up_proj.weight": {key: each for key, each in tensors.items() if key != name},
        r"in another shape: model.layers.1.mlp.up_proj.weight \(\[?7": {**tensors, name: tensors[name][:7]},
    }
    for said, given in wrong.items():
        save_file(given, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=said):
            fill(loaded(folder, stored=True))


def test_a_saved_score_head_is_that_of_the_file_on_all_workers(tmp_path: Path) -> None:
    folder = models.save("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "score.weight": torch.arange(32.0)[None]}, folder / "model.safetensors", metadata={"format": "pt"})
    for head in ("new", "required"):
        model = load_scalar(ModelConfig(path=str(folder)), CPU, key="critic.path", head=head, stored=True)  # type: ignore[arg-type]
        assert torch.equal(model.score.weight, torch.arange(32.0)[None])
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 32
