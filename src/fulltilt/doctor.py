"""What is installed and usable on this computer, and what is missing.

Enters: the folder of a run whose memory is to be shown, or nothing. Leaves: a `Report` of findings, each with a status, what was found and
the remedy. Guaranteed: no network access, nothing written, and no exception: a package that cannot even be imported is a finding. torch
and transformers are imported only while they are examined, so that there is a report when they are what is broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from fulltilt.memory.host import free_host_bytes
from fulltilt.words import in_bytes

Status = Literal["ok", "missing", "broken"]

# Supported versions: from the first to below the second. A test compares them with pyproject.toml.
PYTHON_RANGE = ("3.11", "3.14")
CORE: dict[str, tuple[str, str] | None] = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.20"),
    "safetensors": None,
    "pydantic": ("2", "3"),
    "pyarrow": None,
    "rich": None,
    "typer": None,
    "numpy": None,
}


@dataclass(frozen=True)
class Extra:
    """An optional package. `probe`: it is quick to import, so its import is tried; the imports of others can take half a minute."""

    package: str
    extra: str
    module: str
    purpose: str
    probe: bool = False
    linux_only: bool = False


EXTRAS = (
    Extra(
        "triton", "gpu", "triton", "kernels on CUDA (decoding, sampling, attention's gradient, fused layers)", probe=True, linux_only=True
    ),
    Extra("ray", "ray", "ray", "more than one device, which this version does not support"),
    Extra("vllm", "vllm", "vllm", "benchmarks against vLLM (`fulltilt bench rollout --against vllm`)"),
    Extra("math-verify", "math", "math_verify", "rewards that compare mathematical expressions", probe=True),
    Extra("tensorboard", "tensorboard", "tensorboard", "metrics in TensorBoard", probe=True),
    Extra("wandb", "wandb", "wandb", "metrics in Weights & Biases"),
    Extra("mlflow-skinny", "mlflow", "mlflow", "metrics in MLflow"),
    Extra("sqlalchemy", "mlflow", "sqlalchemy", "MLflow's own store"),
    Extra("alembic", "mlflow", "alembic", "MLflow's own store"),
    Extra("trackio", "trackio", "trackio", "metrics in Trackio"),
    Extra("peft", "peft", "peft", "LoRA adapters"),
    Extra("matplotlib", "plot", "matplotlib", "pictures of curves (`fulltilt plot`)"),
)
PROBE_SECONDS = 60
PROBE_BYTES = 64 << 20  # pinned as a test
MEMORY = "memory_gib/"  # the same as in observe/health.py, which cannot be imported if pydantic is broken


@dataclass(frozen=True)
class Finding:
    """Example: Finding("ray", "missing", "not installed; for more than one device, ...", 'pip install "fulltilt[ray]"')"""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    core: bool = False  # no run works without it


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        """Whether something that every run needs is missing or broken."""
        return any(finding.core and finding.status != "ok" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"broken": self.broken, "findings": [asdict(finding) for finding in self.findings]}

    def lines(self) -> list[str]:
        width = max(len(finding.name) for finding in self.findings)
        return [
            f"{finding.name:<{width}}  {finding.status:<7}  {finding.detail}" + (f"  ->  {finding.remedy}" if finding.remedy else "")
            for finding in self.findings
        ]


def examine(run: Path | None = None) -> Report:
    """Examine this computer and, if `run` is the folder of a run, show the memory that its newest step has measured."""
    core = tuple(examine_core(package, limits) for package, limits in CORE.items())
    devices = tuple(examine_devices()) if imports("torch") is None else ()
    extras = needed_on(devices, tuple(examine_extra(extra) for extra in EXTRAS))
    measured = examine_memory_of(run) if run else ()
    return Report((examine_python(), *examine_computer(), *core, *devices, *extras, *measured))


def needed_on(devices: tuple[Finding, ...], extras: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The extras, with triton marked as needed where there is a CUDA device: decoding on CUDA uses it."""
    cuda = any(finding.name.startswith("cuda:") for finding in devices)
    return tuple(replace(finding, core=True) if cuda and finding.name == "triton" else finding for finding in extras)


def examine_python() -> Finding:
    version = platform.python_version()
    detail = f"{version} ({platform.python_implementation()}, {sys.executable})"
    if in_range(version, PYTHON_RANGE):
        return Finding("python", "ok", detail, core=True)
    return Finding(
        "python", "broken", f"{detail}; supported: {in_words(PYTHON_RANGE)}", "create the environment with a supported Python", core=True
    )


def examine_computer() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() in ("Linux", "Darwin"):
        yield Finding("platform", "ok", system, core=True)
    else:
        yield Finding("platform", "broken", f"{system} is not supported", "use Linux (on Windows: WSL 2) or macOS", core=True)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", f"{usable} usable of {os.cpu_count()}")
    # Within the limits of the control groups that this process is in: those of a container or a job.
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", "ok", f"{in_bytes(free_host_bytes())} available of {in_bytes(installed)}")
    disk = shutil.disk_usage(Path.cwd())
    yield Finding("disk", "ok", f"{in_bytes(disk.free)} free of {in_bytes(disk.total)} in {Path.cwd()}")


def examine_core(package: str, limits: tuple[str, str] | None) -> Finding:
    version, install = installed_version(package), f'pip install "{requirement(package, limits)}"'
    if version is None:
        return Finding(package, "missing", "not installed", install, core=True)
    failure = imports(package)
    if failure is not None:
        detail = f"{version} is installed but cannot be imported: {failure}"
        return Finding(package, "broken", detail, f"{install} --force-reinstall", core=True)
    if limits and not in_range(version, limits):
        return Finding(package, "broken", f"{version}; supported: {in_words(limits)}", install, core=True)
    return Finding(package, "ok", version + (f" (supported: {in_words(limits)})" if limits else ""), core=True)


def examine_extra(extra: Extra) -> Finding:
    version = installed_version(extra.package)
    remedy = f'pip install "fulltilt[{extra.extra}]"'
    if version is None:
        if extra.linux_only and platform.system() != "Linux":
            return Finding(extra.package, "missing", f"needed for {extra.purpose}; it exists for Linux only")
        return Finding(extra.package, "missing", f"not installed; needed for {extra.purpose}", remedy)
    failure = imports_in_child(extra.module) if extra.probe else None
    if not extra.probe and importlib.util.find_spec(extra.module) is None:
        failure = f"there is no module {extra.module}"
    if failure is not None:
        return Finding(extra.package, "broken", f"{version} is installed but cannot be imported: {failure}", f"{remedy} --force-reinstall")
    return Finding(extra.package, "ok", f"{version}; needed for {extra.purpose}" + ("" if extra.probe else " (its import was not tried)"))


def examine_devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield no_cuda()
        yield examine_varlen_on_cpu()
        yield Finding("pinned memory", "ok", f"only used with a CUDA device ({locked_limit()})")
        yield Finding("bfloat16", "ok", "works on CPU but is slower than float32; model.dtype = auto chooses float32 here")
        return
    driver = driver_version()
    for index in range(torch.cuda.device_count()):
        name = f"cuda:{index}"
        try:
            facts = torch.cuda.get_device_properties(index)
            torch.ones(8, device=name).sum().item()
            memory = f"{in_bytes(torch.cuda.mem_get_info(index)[0])} free of {in_bytes(facts.total_memory)}"
            detail = f"{facts.name}, {memory}, compute capability {facts.major}.{facts.minor}, {driver}"
            yield Finding(name, "ok", detail, core=True)
            yield examine_varlen_on_cuda(name)
        except Exception as error:
            remedy = "free the device (nvidia-smi shows which processes use it), or set run.device = cpu"
            yield Finding(name, "broken", f"a first computation failed: {first_line(error)}", remedy, core=True)
    yield examine_pinning()
    if torch.cuda.is_bf16_supported():
        yield Finding("bfloat16", "ok", "works on CUDA; model.dtype = auto chooses it")
    else:
        yield Finding(
            "bfloat16", "missing", "this GPU does not support bfloat16", "set model.dtype = float32, or use an Ampere or newer GPU"
        )


def no_cuda() -> Finding:
    import torch

    if torch.version.cuda is None:
        seen = shutil.which("nvidia-smi") is not None
        remedy = "install a build of torch with CUDA" if seen else ""
        return Finding("cuda", "missing", f"this torch ({torch.__version__}) is built without CUDA; runs use the CPU", remedy)
    detail = f"this torch is built for CUDA {torch.version.cuda}, but no device responds ({driver_version()}); runs use the CPU"
    return Finding("cuda", "missing", detail, "check nvidia-smi and CUDA_VISIBLE_DEVICES if there should be a GPU")


def examine_varlen_on_cpu() -> Finding:
    failure = imports("torch.nn.attention.varlen")
    if failure is not None:
        return Finding("varlen_attn", "missing", f"{failure}; CPU runs do not need it", "install a supported torch")
    return Finding("varlen_attn", "ok", "available; it has no CPU kernel, so CPU runs use scaled_dot_product_attention instead")


def examine_varlen_on_cuda(device: str) -> Finding:
    """Compare a call as training makes it, two documents with grouped heads, with plain attention on each document alone."""
    name = f"varlen_attn on {device}"
    try:
        gap = varlen_gap(device)
    except Exception as error:
        remedy = "install a supported torch and use an Ampere or newer GPU, which the kernel needs; or set run.device = cpu"
        return Finding(name, "broken", f"a small call failed: {first_line(error)}", remedy, core=True)
    if gap > 0.02:
        remedy = "install another supported torch; this one gives wrong results here"
        return Finding(name, "broken", f"a small call is off by {gap:.3g}", remedy, core=True)
    return Finding(name, "ok", f"a small call agrees with plain attention to {gap:.1g}", core=True)


def varlen_gap(device: str) -> float:
    import torch
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator(device).manual_seed(0)
    heads, key_heads, width, bounds = 4, 2, 64, [0, 5, 16]
    shapes = [(bounds[-1], count, width) for count in (heads, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    # torch 2.11 accepts grouped heads as they are; later versions need the flag.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    found = varlen_attn(query, key, value, offsets, offsets, 11, 11, window_size=(-1, 0), **grouped)
    assert isinstance(found, torch.Tensor)  # it is a pair only if log-sum-exps are asked for
    gap = 0.0
    for start, end in itertools.pairwise(bounds):
        q, k, v = (states[start:end].transpose(0, 1).float() for states in (query, key, value))
        plain = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        gap = max(gap, (found[start:end].transpose(0, 1).float() - plain).abs().max().item())
    return gap


def examine_pinning() -> Finding:
    """Check that memory can be pinned: offloaded tensors are kept in host memory that the device reads directly."""
    import torch

    try:
        torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    except Exception as error:
        remedy = "raise the limit on locked memory (ulimit -l) or the container's memory limit; or leave train.offload_* off"
        detail = f"{in_bytes(PROBE_BYTES)} could not be pinned ({locked_limit()}): {first_line(error)}"
        return Finding("pinned memory", "broken", detail, remedy)
    return Finding("pinned memory", "ok", f"{in_bytes(PROBE_BYTES)} were pinned; {locked_limit()}")


def examine_memory_of(run: Path) -> Iterator[Finding]:
    """The memory that the run's newest step has measured, one finding per phase."""
    path, remedy = run / "metrics.jsonl", "give the folder of a run (its run.dir) that has finished a step"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError) as error:
        yield Finding("memory of the run", "missing", f"{path} cannot be read: {first_line(error)}", remedy)
        return
    measured = next((line for line in reversed(lines) if any(name.startswith(MEMORY) and name.count("/") == 2 for name in line)), None)
    if measured is None:
        yield Finding("memory of the run", "missing", f"{path} has no step whose memory was measured", remedy)
        return
    phases: dict[str, dict[str, float]] = {}
    for name, value in measured.items():
        if name.startswith(MEMORY) and value is not None:
            *phase, what = name.removeprefix(MEMORY).split("/")
            phases.setdefault(phase[0] if phase else "", {})[what] = value
    for phase, numbers in phases.items():
        words = ", ".join(f"{what} {in_bytes(number * 2**30)}" for what, number in numbers.items())
        yield Finding(f"memory/{phase}".rstrip("/"), "ok", f"in step {measured['step']}: {words}")


def imports(module: str) -> str | None:
    """Why the module cannot be imported into this process, or None. A broken package may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def imports_in_child(module: str) -> str | None:
    """The same, tried in a child process: a package with an incompatible library can crash it, and importing has side effects."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"the import did not finish within {PROBE_SECONDS} s"
    if child.returncode == 0:
        return None
    last = child.stderr.strip().splitlines()[-1:] or [""]
    return last[0][:300] or f"the importing process ended with status {child.returncode}"


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def in_range(version: str, limits: tuple[str, str]) -> bool:
    return release(limits[0]) <= release(version) < release(limits[1])


def release(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0); '5.20.0rc1' -> (5, 20)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def in_words(limits: tuple[str, str]) -> str:
    return f"{limits[0]} to below {limits[1]}"


def requirement(package: str, limits: tuple[str, str] | None) -> str:
    return f"{package}>={limits[0]},<{limits[1]}" if limits else package


def locked_limit() -> str:
    try:
        import resource
    except ImportError:  # it exists on Unix only
        return "the limit on locked memory is not known"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return f"ulimit -l: {'unlimited' if limit == resource.RLIM_INFINITY else in_bytes(limit)}"


def driver_version() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "no NVIDIA driver found"
    try:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"nvidia-smi failed: {first_line(error)}"
    first = (answer.stdout.strip() or answer.stderr.strip()).splitlines()[:1]
    return f"driver {first[0]}" if answer.returncode == 0 and first else f"nvidia-smi failed: {first[0] if first else answer.returncode}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
