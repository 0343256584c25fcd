"""The doctor tells the truth about this computer, and about one where things are broken."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fulltilt import doctor
from fulltilt.cluster import keeper
from fulltilt.doctor import Finding, Report, examine, in_range
from fulltilt.memory.host import free_host_bytes, usable_cores
from fulltilt.observe import health
from fulltilt.reward import confine
from fulltilt.words import in_bytes

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report() -> Report:
    return examine()


def finding(report: Report, name: str) -> Finding:
    (found,) = [entry for entry in report.findings if entry.name == name]
    return found


def test_this_environment_is_sound(report: Report) -> None:
    assert not report.broken
    assert finding(report, "python").detail.startswith(".".join(map(str, sys.version_info[:3])))
    assert sys.executable in finding(report, "python").detail
    for package in ("torch", "transformers", "safetensors", "pydantic", "pyarrow", "rich", "typer", "numpy", "cloudpickle"):
        assert finding(report, package).status == "ok"
        assert finding(report, package).core
        assert finding(report, package).detail.startswith(metadata.version(package))


def test_this_computer(report: Report) -> None:
    assert finding(report, "cores").detail.endswith(f"of {os.cpu_count()}")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert f"{total:.1f} GiB" in finding(report, "memory").detail
    disk = finding(report, "disk").detail
    assert f"of {shutil.disk_usage(Path.cwd()).total / 2**30:.1f} GiB" in disk
    assert str(Path.cwd()) in disk


def test_optional_packages(report: Report) -> None:
    for package in (package for package in doctor.PACKAGES if package.extra):
        found = finding(report, package.name)
        assert not found.core
        if importlib.util.find_spec(package.module or package.name) is None:
            assert found.status == "missing"
            assert f'pip install "fulltilt[{package.extra}]"' in found.remedy or (package.linux_only and sys.platform != "linux")
        else:
            assert found.detail.startswith(metadata.version(package.name))


def test_devices_as_torch_sees_them(report: Report) -> None:
    devices = [entry for entry in report.findings if re.fullmatch(r"cuda(:\d+)?", entry.name)]
    if torch.cuda.is_available():
        assert [entry.name for entry in devices] == [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    else:
        assert [(entry.name, entry.status) for entry in devices] == [("cuda", "missing")]
        assert "CPU" in devices[0].detail
        assert finding(report, "varlen_attn").status == "ok"
    assert finding(report, "bfloat16").detail
    most = torch.cuda.device_count() or usable_cores()
    assert f"at most {most}: one for each {'GPU' if torch.cuda.is_available() else 'core'}" in finding(report, "workers").detail
    if keeper.SHARED_MEMORY.is_dir():
        number, unit = in_bytes(keeper.free_shared_memory()).split()
        told = re.match(r"([\d.]+) (\w+) free in ", finding(report, "shared memory").detail)
        assert told and told[2] == unit and float(told[1]) == pytest.approx(float(number), rel=0.1)  # other tests use it meanwhile


def test_how_much_can_be_pinned(report: Report) -> None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = "unlimited" if limit == resource.RLIM_INFINITY else in_bytes(limit)
    assert f"ulimit -l: {words}" in finding(report, "pinned memory").detail
    if not torch.cuda.is_available():
        broken = doctor.examine_pinning()  # tried where there is really nothing to pin for
        assert broken.status == "broken" and not broken.core
        assert "64.0 MiB could not be pinned" in broken.detail and "train.offload_" in broken.remedy


@pytest.mark.parametrize("without_ray", [True, False])
@pytest.mark.parametrize(("gpus", "status"), [(0, "ok"), (1, "ok"), (2, "ok"), (4, "broken")])
def test_shared_memory_is_judged_as_a_run_on_all_gpus_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, status: str, without_ray: bool
) -> None:
    """Or as a Ray that a run would start."""
    monkeypatch.setattr(keeper, "SHARED_MEMORY", tmp_path)  # not every system has it
    monkeypatch.setattr(keeper, "free_shared_memory", lambda: 64 * 2**20)  # as Docker has it
    if without_ray:
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    elif importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    monkeypatch.delenv("NCCL_SHM_DISABLE", raising=False)
    (found,) = doctor.examine_shared_memory(gpus)
    assert found.detail.startswith(f"64.0 MiB free in {tmp_path}; ") and not found.core
    assert found.status == (status if without_ray else "broken")
    assert ("4 workers with a GPU each need 128.0 MiB" in found.detail) == (gpus == 4)
    assert ("needs 80.0 MiB" in found.detail) == (found.status == "broken" and gpus < 4)
    assert ("--shm-size" in found.remedy) == (found.status == "broken")
    if without_ray:
        monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
        (found,) = doctor.examine_shared_memory(gpus)
        assert found.status == "ok" and found.detail.endswith("NCCL_SHM_DISABLE=1 keeps workers from using it")


def test_memory_is_what_a_run_would_go_by(report: Report) -> None:
    """Within the limits of all groups of processes that this one is in, however deep."""
    told = float(re.match(r"(\d+\.\d) GiB available of \d+\.\d GiB$", finding(report, "memory").detail)[1])
    assert told == pytest.approx(free_host_bytes() / 2**30, abs=4)  # other programs run beside the test


LINE = {
    "step": 7, "critic/score/mean": 0.5, "memory_gib/gen/parameters": 14.2, "memory_gib/gen/kv": 40.0, "memory_gib/gen/peak": 71.25,
    "memory_gib/update_actor/parameters": 14.2, "memory_gib/update_actor/optimizer": 2**-11, "memory_gib/update_actor/host": 84.9,
    "memory_gib/process": 91.0,
}  # fmt: skip


def test_the_memory_of_a_run_by_phase(tmp_path: Path) -> None:
    """The newest step that measured it, although validation and a half-written line come behind."""
    assert doctor.MEMORY == health.MEMORY
    lines = [{**LINE, "step": 6}, LINE, {"step": 8, "val/reward/mean": 0.1, "memory_gib/process": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "memory_gib/gen/k')
    assert [(found.name, found.status, found.detail) for found in doctor.examine_memory_of(tmp_path)] == [
        ("memory/gen", "ok", "in step 7: parameters 14.2 GiB, kv 40.0 GiB, peak 71.2 GiB"),
        ("memory/update_actor", "ok", "in step 7: parameters 14.2 GiB, optimizer 512.0 KiB, host 84.9 GiB"),
        ("memory", "ok", "in step 7: process 91.0 GiB"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: "),
        ("{]}\n", "cannot be read: "),
        ('{"step": 1, "actor/lr": 1.0}\n', "has no step whose memory was measured"),
    ],
)
def test_a_run_without_measured_memory_is_said_to_have_none(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    (found,) = doctor.examine_memory_of(tmp_path)
    assert (found.status, found.core) == ("missing", False)
    assert str(tmp_path / "metrics.jsonl") in found.detail and reason in found.detail and "run.dir" in found.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_memory_and_pinning(report: Report) -> None:
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert re.search(rf"\d+\.\d GiB free of {total:.1f} GiB", finding(report, "cuda:0").detail)
    assert finding(report, "pinned memory").detail.startswith("64.0 MiB were pinned; ulimit -l: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_attention_works_on_the_gpu(report: Report) -> None:
    assert finding(report, "varlen_attn on cuda:0").status == "ok"
    assert torch.cuda.get_device_name(0) in finding(report, "cuda:0").detail
    assert re.search(r"driver \d+", finding(report, "cuda:0").detail)


def test_a_device_without_the_kernel_is_found_broken() -> None:
    found = doctor.examine_varlen_on_cuda("cpu")  # where the kernel really does not exist
    assert found.status == "broken"
    assert "a small call failed" in found.detail
    assert Report((found,)).broken


def test_triton_is_needed_where_there_is_a_gpu() -> None:
    gpu, cpu = doctor.Finding("cuda:0", "ok", "", core=True), doctor.Finding("cuda", "missing", "")
    triton, ray = doctor.Finding("triton", "missing", ""), doctor.Finding("ray", "missing", "")
    assert Report((gpu, *doctor.needed_on((gpu,), (triton, ray)))).broken
    assert not Report(doctor.needed_on((cpu,), (triton, ray))).broken
    assert not Report(doctor.needed_on((gpu,), (ray,))).broken


def test_both_forms_say_the_same(report: Report) -> None:
    parsed = json.loads(json.dumps(report.as_json()))
    assert parsed["broken"] is False
    assert [entry["name"] for entry in parsed["findings"]] == [entry.name for entry in report.findings]
    lines = report.lines()
    assert len(lines) == len(report.findings)
    for line, entry in zip(lines, report.findings, strict=True):
        assert line.startswith(entry.name)
        assert entry.status in line
        assert entry.detail in line
        assert entry.remedy in line


def test_the_ranges_and_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={doctor.PYTHON_RANGE[0]},<{doctor.PYTHON_RANGE[1]}"
    assert sorted(project["dependencies"]) == sorted(package.requirement for package in doctor.PACKAGES if not package.extra)
    listed = {(extra, re.split(r"[ ;<>=]", entry)[0]) for extra, entries in project["optional-dependencies"].items() for entry in entries}
    assert {pair for pair in listed if pair[0] != "dev"} == {(package.extra, package.name) for package in doctor.PACKAGES if package.extra}


def test_the_pinned_versions_are_in_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for package in doctor.PACKAGES:
        assert package.limits is None or in_range(pins[package.name], package.limits), package
    assert (pins["torch"], pins["transformers"]) == ("2.13.0", "5.17.0")


@pytest.mark.parametrize(
    ("version", "inside"),
    [("2.11.0", True), ("2.13.0+cpu", True), ("2.13.1.post2", True), ("2.10.9", False), ("2.14.0", False), ("2.14.0a0+git12", False)],
)
def test_ranges(version: str, inside: bool) -> None:
    assert in_range(version, ("2.11", "2.14")) is inside


def pretend_installed(folder: Path, package: str, version: str, module: str | None, code: str = "") -> None:
    information = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    if module:
        (folder / f"{module}.py").write_text(code)


def test_what_is_broken_is_said_with_its_reason(tmp_path: Path) -> None:
    pretend_installed(tmp_path, "torch", "2.13.0", "torch", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    pretend_installed(tmp_path, "transformers", "4.57.0", "transformers")
    pretend_installed(tmp_path, "triton", "3.9", "triton", "import os; os.abort()")
    pretend_installed(tmp_path, "math-verify", "0.9", "math_verify", "raise RuntimeError('antlr does not fit')")
    pretend_installed(tmp_path, "ray", "2.50", None)
    script = (
        "import sys, json; from fulltilt import doctor; assert 'torch' not in sys.modules; print(json.dumps(doctor.examine().as_json()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    answer = json.loads(child.stdout)
    found = {entry["name"]: entry for entry in answer["findings"]}
    assert answer["broken"]
    expected = {
        "torch": "libcudart.so.13: cannot open shared object file",
        "transformers": "4.57.0; supported: 5.17 to below 5.20",
        "triton": "cannot be imported: the importing process ended with status -6",
        "math-verify": "RuntimeError: antlr does not fit",
    }
    if importlib.util.find_spec("ray") is None:
        expected["ray"] = "there is no module ray"
    for name, reason in expected.items():
        assert found[name]["status"] == "broken"
        assert reason in found[name]["detail"]
        assert "pip install" in found[name]["remedy"]
    assert "cuda" not in found  # without torch nobody can tell


@pytest.mark.parametrize(
    ("landlock", "seccomp", "words"),
    [
        (7, True, "reward functions cannot signal the trainer or write into run.dir"),
        (6, False, "reward functions can change the trainer's limits and priority"),
        (4, False, "reward functions can signal the trainer and change the trainer's limits and priority"),
        (5, True, "reward functions can signal threads that the trainer starts later"),
        (1, True, "reward functions can truncate files in run.dir and signal threads that the trainer starts later"),
        (0, False, "can write into run.dir and into the trainer's memory, signal the trainer and change the trainer's limits and priority"),
    ],
)
def test_what_the_kernel_lacks_for_the_reward_sandbox(monkeypatch: pytest.MonkeyPatch, landlock: int, seccomp: bool, words: str) -> None:
    monkeypatch.setattr(confine, "landlock_version", lambda: landlock)
    monkeypatch.setattr(confine, "has_seccomp", lambda: seccomp)
    found = doctor.examine_sandbox()
    assert found.detail.endswith(words) and (found.status == "ok") == ("cannot" in words) and not found.core
    assert bool(found.remedy) == (found.status != "ok")
