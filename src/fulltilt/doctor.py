"""A report of what is installed and usable on this computer, and what is missing; or of how a run has spent its time and memory.

Enters: nothing, the address of a Ray cluster, or the folder of a run. Leaves: a `Report` of findings, each with a status, what was found
and the remedy, and for a run the explanation of tune/explain.py. Guaranteed: no network access except to the cluster, nothing written, and
no exception: a package that cannot even be imported is a finding. torch and transformers are imported only while they are examined, so that
there is a report when they are what is broken; for a run they are not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fulltilt.memory.host import free_host_bytes, usable_cores
from fulltilt.reward import confine
from fulltilt.words import first_line, in_bytes, joined

if TYPE_CHECKING:
    from fulltilt.tune.explain import Explanation

Status = Literal["ok", "missing", "broken"]

# Supported versions: from the first to below the second. A test compares them and the extras with pyproject.toml.
PYTHON_RANGE = ("3.11", "3.14")


@dataclass(frozen=True)
class Package:
    """A package that fulltilt uses: in every run, or for one of its extras."""

    name: str
    limits: tuple[str, str] | None = None
    extra: str = ""  # the extra that installs it; "": no run works without it
    purpose: str = ""
    module: str = ""  # module name, if it is not the package's name
    probe: bool = True  # False: its import can take half a minute, and is not tried
    linux_only: bool = False

    @property
    def requirement(self) -> str:
        limits = f">={self.limits[0]},<{self.limits[1]}" if self.limits else ""
        return f"fulltilt[{self.extra}]" if self.extra else f"{self.name}{limits}"

    def why_not_imported(self) -> str | None:
        module = self.module or self.name
        if not self.probe:
            return None if importlib.util.find_spec(module) else f"there is no module {module}"
        return imports_in_child(module) if self.extra else imports(module)


KERNELS = "kernels on CUDA (decoding, sampling, attention's gradient, fused layers)"
PACKAGES = (
    Package("torch", ("2.11", "2.14")),
    Package("transformers", ("5.17", "5.20")),
    Package("safetensors"),
    Package("pydantic", ("2", "3")),
    Package("pyarrow"),
    Package("rich"),
    Package("typer"),
    Package("numpy"),
    Package("cloudpickle"),
    Package("triton", extra="gpu", purpose=KERNELS, linux_only=True),
    Package("ray", extra="ray", purpose="workers on several machines", probe=False),
    Package("vllm", extra="vllm", purpose="benchmarks against vLLM (`fulltilt bench rollout --against vllm`)", probe=False),
    Package("math-verify", extra="math", purpose="rewards that compare mathematical expressions", module="math_verify"),
    Package("tensorboard", extra="tensorboard", purpose="metrics in TensorBoard"),
    Package("wandb", extra="wandb", purpose="metrics in Weights & Biases", probe=False),
    Package("mlflow-skinny", extra="mlflow", purpose="metrics in MLflow", module="mlflow", probe=False),
    Package("sqlalchemy", extra="mlflow", purpose="MLflow's own store", probe=False),
    Package("alembic", extra="mlflow", purpose="MLflow's own store", probe=False),
    Package("trackio", extra="trackio", purpose="metrics in Trackio", probe=False),
    Package("peft", extra="peft", purpose="LoRA adapters", probe=False),
    Package("matplotlib", extra="plot", purpose="pictures of curves (`fulltilt plot`)", probe=False),
)
PROBE_SECONDS = 60
PROBE_BYTES = 64 << 20  # pinned as a test
MEMORY = "memory_gib/"  # same value as in observe/health.py, which cannot be imported if pydantic is broken


@dataclass(frozen=True)
class Finding:
    """The state of one thing that was examined.

    Example: Finding("ray", "missing", "not installed; for workers on several machines", 'pip install "fulltilt[ray]"')"""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    core: bool = False  # required by every run, or, for a finding about a cluster, by every run on it


def judged(name: str, detail: str, fault: str | None, remedy: str, *, status: Status = "broken", core: bool = False) -> Finding:
    """Return a finding that is ok with `detail`, or not ok with `fault` if there is one."""
    return Finding(name, status, fault, remedy, core) if fault else Finding(name, "ok", detail, core=core)


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    run: Explanation | None = None

    @property
    def broken(self) -> bool:
        """Whether anything is missing or broken that every run, or every run on the cluster, needs."""
        return any(finding.core and finding.status != "ok" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        found = {"broken": self.broken, "findings": [asdict(finding) for finding in self.findings]}
        return found | ({"run": self.run.as_json()} if self.run else {})

    def lines(self) -> list[str]:
        width = max((len(finding.name) for finding in self.findings), default=0)
        found = [
            f"{finding.name:<{width}}  {finding.status:<7}  {finding.detail}" + (f"  ->  {finding.remedy}" if finding.remedy else "")
            for finding in self.findings
        ]
        return [*found, *(self.run.lines() if self.run else ())]


def examine_run(run: Path) -> Report:
    """Explain how a run has spent its time, and show the memory that its newest step has measured."""
    try:
        from fulltilt.tune.explain import explain

        explanation = explain(run)
    except Exception as error:
        reason = f"the run cannot be explained: {type(error).__name__}: {first_line(error)}"
        return Report((Finding("run", "broken", reason), *examine_memory_of(run)))
    return Report(tuple(examine_memory_of(run)) if explanation.steps else (), explanation)


def examine(address: str | None = None) -> Report:
    """Examine this computer; if `address` is that of a Ray cluster, ask its machines."""
    core = tuple(examine_package(package) for package in PACKAGES if not package.extra)
    devices = (*examine_devices(), *examine_workers()) if imports("torch") is None else ()
    extras = needed_on(devices, tuple(examine_package(package) for package in PACKAGES if package.extra))
    machines = examine_cluster(address) if address else ()
    return Report((examine_python(), *examine_computer(), examine_sandbox(), *core, *devices, *extras, *machines))


def needed_on(devices: tuple[Finding, ...], extras: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the extras, with triton marked as needed if there is a CUDA device: decoding on CUDA uses it."""
    cuda = any(finding.name.startswith("cuda:") for finding in devices)
    return tuple(replace(finding, core=True) if cuda and finding.name == "triton" else finding for finding in extras)


def examine_python() -> Finding:
    version = platform.python_version()
    detail = f"{version} ({platform.python_implementation()}, {sys.executable})"
    fault = None if in_range(version, PYTHON_RANGE) else f"{detail}; supported: {in_words(PYTHON_RANGE)}"
    return judged("python", detail, fault, "create the environment with a supported Python", core=True)


def examine_computer() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    fault = None if platform.system() in ("Linux", "Darwin") else f"{system} is not supported"
    yield judged("platform", system, fault, "use Linux (on Windows: WSL 2) or macOS", core=True)
    yield Finding("cores", "ok", f"{usable_cores()} usable of {os.cpu_count()}")
    # Free memory within the limits of this process's control groups, such as those of a container or a job.
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", "ok", f"{in_bytes(free_host_bytes())} available of {in_bytes(installed)}")
    disk = shutil.disk_usage(Path.cwd())
    yield Finding("disk", "ok", f"{in_bytes(disk.free)} free of {in_bytes(disk.total)} in {Path.cwd()}")


def examine_sandbox() -> Finding:
    """Check which actions of reward functions the kernel can prevent."""
    landlock, seccomp = confine.landlock_version(), confine.has_seccomp()
    has = f"Landlock {f'version {landlock}' if landlock else 'missing'}, seccomp {'available' if seccomp else 'missing'}"
    lacking = confine.lacking(landlock, seccomp)
    fault = f"{has}: reward functions can {joined(lacking, 'and')}" if lacking else None
    remedy = (
        "use Linux 6.12 or newer with Landlock enabled (lsm= on the kernel's command line), in a container that allows its system calls"
    )
    return judged(
        "reward sandbox", f"{has}: reward functions cannot signal the trainer or write into run.dir", fault, remedy, status="missing"
    )


def examine_package(package: Package) -> Finding:
    name, core, version, install = package.name, not package.extra, installed_version(package.name), f'pip install "{package.requirement}"'
    needed = f"; needed for {package.purpose}" if package.purpose else ""
    if version is None and package.linux_only and platform.system() != "Linux":
        return Finding(name, "missing", f"needed for {package.purpose}; it exists for Linux only")
    if version is None:
        return Finding(name, "missing", f"not installed{needed}", install, core)
    if failure := package.why_not_imported():
        return Finding(name, "broken", f"{version} is installed but cannot be imported: {failure}", f"{install} --force-reinstall", core)
    if package.limits and not in_range(version, package.limits):
        return Finding(name, "broken", f"{version}; supported: {in_words(package.limits)}", install, core)
    supported = f" (supported: {in_words(package.limits)})" if package.limits else ""
    return Finding(name, "ok", version + supported + needed + ("" if package.probe else " (its import was not tried)"), core=core)


def examine_devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield no_cuda()
        fault = f"{failure}; CPU runs do not need it" if (failure := imports("torch.nn.attention.varlen")) else None
        detail = "available; it has no CPU kernel, so CPU runs use scaled_dot_product_attention instead"
        yield judged("varlen_attn", detail, fault, "install a supported torch", status="missing")
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
    fault, remedy = None, "set model.dtype = float32, or use an Ampere or newer GPU"
    if not torch.cuda.is_bf16_supported():
        fault = "this GPU does not support bfloat16"
    yield judged("bfloat16", "works on CUDA; model.dtype = auto chooses it", fault, remedy, status="missing")


def examine_workers() -> Iterator[Finding]:
    """Report the devices and memory that several workers would have on this computer (cluster.workers)."""
    import torch
    import torch.distributed as dist

    gpus, cores = torch.cuda.device_count(), usable_cores()
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("workers", "missing", "1: this torch has no gloo, which several workers need", "install another build of torch")
        return
    nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpus and dist.is_nccl_available() else "no NCCL"  # type: ignore[no-untyped-call]
    if gpus:
        try:
            default, most, memory = gpus, gpus, min(torch.cuda.mem_get_info(index)[0] for index in range(gpus))
        except Exception as error:
            yield Finding("workers", "broken", f"the memory of the GPUs is not known: {first_line(error)}", "see the GPUs above")
            return
    else:
        default, most, memory = 1, cores, free_host_bytes() // cores
    each = f"one for each {'GPU' if gpus else 'core'} with {in_bytes(memory)} of memory"
    yield Finding("workers", "ok", f"{default} by default, at most {most}: {each}; {nccl}, gloo")
    yield from examine_shared_memory(gpus)


def examine_shared_memory(gpus: int) -> Iterator[Finding]:
    """Check whether workers on all GPUs of this computer could exchange tensors through shared memory. Not every system has it."""
    from fulltilt.cluster import keeper

    if not keeper.SHARED_MEMORY.is_dir():
        return
    free = keeper.free_shared_memory()
    has, needed = f"{in_bytes(free)} free in {keeper.SHARED_MEMORY}", in_bytes(keeper.NCCL_BYTES * gpus)
    if any(keeper.wrong_shared_memory(free, gpus)):
        remedy = f"{keeper.ENLARGE}, use fewer workers, or set NCCL_SHM_DISABLE=1"
        yield Finding("shared memory", "broken", f"{has}; {gpus} workers with a GPU each need {needed}", remedy)
    elif free < keeper.OBJECT_STORE and importlib.util.find_spec("ray"):
        needed = in_bytes(keeper.OBJECT_STORE)
        yield Finding("shared memory", "broken", f"{has}; a Ray cluster that a run starts by itself needs {needed}", keeper.ENLARGE)
    elif os.environ.get("NCCL_SHM_DISABLE") == "1":
        yield Finding("shared memory", "ok", f"{has}; NCCL_SHM_DISABLE=1 keeps workers from using it")
    else:
        why = f"{gpus} workers with a GPU each need {needed}" if gpus > 1 else "only workers that have a GPU each need it"
        yield Finding("shared memory", "ok", f"{has}; {why}")


def examine_cluster(address: str) -> Iterator[Finding]:
    """Report what the machines of a Ray cluster have for workers (cluster.address), and whether a run that is started here can use them."""
    if importlib.util.find_spec("ray") is None:
        yield Finding("ray cluster", "missing", "the package ray is not installed", 'pip install "fulltilt[ray]"', core=True)
        return
    try:
        from fulltilt.cluster.ray import survey

        found = survey(address)
    except Exception as error:
        yield Finding("ray cluster", "broken", first_line(error), core=True)
        return
    yield Finding("ray cluster", "ok", f"at {found.address}: {found.has}", core=True)
    for machine in found.machines:
        fault = f"{machine.has}. {'. '.join(machine.mistakes)}" if machine.mistakes else None
        yield judged(f"machine {machine.name}", machine.has, fault, "", core=True)


def no_cuda() -> Finding:
    import torch

    if torch.version.cuda is None:
        seen = shutil.which("nvidia-smi") is not None
        remedy = "install a build of torch with CUDA" if seen else ""
        return Finding("cuda", "missing", f"this torch ({torch.__version__}) is built without CUDA; runs use the CPU", remedy)
    detail = f"this torch is built for CUDA {torch.version.cuda}, but no device responds ({driver_version()}); runs use the CPU"
    return Finding("cuda", "missing", detail, "check nvidia-smi and CUDA_VISIBLE_DEVICES if there should be a GPU")


def examine_varlen_on_cuda(device: str) -> Finding:
    """Compare a call as in training, two documents with grouped heads, with plain attention on each document alone."""
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
    assert isinstance(found, torch.Tensor)  # a pair is returned only if log-sum-exps are asked for
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
    """Report the memory that the run's newest step has measured, one finding per phase."""
    path, remedy = run / "metrics.jsonl", "give the folder of a run (its run.dir) that has finished a step"
    try:
        if path.is_fifo():
            raise ValueError("it is a pipe")
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        if any(type(line.get("step")) is not int for line in lines):
            raise ValueError("a line has no step")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        yield Finding("memory of the run", "missing", f"{path} cannot be read: {first_line(error)}", remedy)
        return
    measured = next((line for line in reversed(lines) if any(name.startswith(MEMORY) and name.count("/") == 2 for name in line)), None)
    if measured is None:
        yield Finding("memory of the run", "missing", f"{path} has no step whose memory was measured", remedy)
        return
    phases: dict[str, dict[str, float]] = {}
    for name, value in measured.items():
        if name.startswith(MEMORY) and isinstance(value, int | float):
            *phase, what = name.removeprefix(MEMORY).split("/")
            phases.setdefault(phase[0] if phase else "", {})[what] = value
    for phase, numbers in phases.items():
        words = ", ".join(f"{what} {in_bytes(number * 2**30)}" for what, number in numbers.items())
        yield Finding(f"memory/{phase}".rstrip("/"), "ok", f"in step {measured['step']}: {words}")


def imports(module: str) -> str | None:
    """Return why the module cannot be imported into this process; None: it can. A broken package may raise anything."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def imports_in_child(module: str) -> str | None:
    """Return why the module cannot be imported, tried in a child process: a package with an incompatible library can crash it, and
    importing has side effects."""
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
    """Return the numbers of a version. Example: '2.13.0+cpu' -> (2, 13, 0); '5.20.0rc1' -> (5, 20, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def in_words(limits: tuple[str, str]) -> str:
    return f"{limits[0]} to below {limits[1]}"


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
