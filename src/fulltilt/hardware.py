"""The hardware table: memory, arithmetic and links of GPUs, for plans and benchmarks that are made without them.

Enters: a name as people write it ("H100", "8xH100-80GB") or as the driver gives it ("NVIDIA H100 80GB HBM3"), or figures of other hardware.
Leaves: a frozen `Accelerator`. Guaranteed: figures of the table are the vendors' (the data sheet is named beside each), except memory,
which is the driver's figure, and `matmul_share`, which is the share that large bfloat16 products reach; given figures are possible ones,
and complete for hardware that the table lacks; no torch.

    Cluster.parse("8xH100-80GB")    # 8 GPUs on one machine
    Cluster.parse("8xB200.toml")    # the GPUs of the file's section [hardware]
    accelerator("H100-20GB")        # the same chip with a quarter of its memory
"""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulltilt.records import UserError
from fulltilt.words import joined, listed

MIB = 1 << 20
GPUS_PER_MACHINE = 8  # the usual number, as these GPUs are sold
MOST_MEMORY, MOST_GPUS = 1 << 20, 1 << 20  # GB and GPUs beyond which a number is a mistake


@dataclass(frozen=True)
class Accelerator:
    """One device. Links are bytes per second in each direction."""

    name: str
    memory: int  # bytes that the driver reports
    nominal: int  # gigabytes of memory in the product's name
    flops: float  # dense bfloat16 FLOP/s with float32 sums, nominal
    hbm: float  # bytes per second from and to its memory, nominal
    host_link: float  # rate to and from pinned host memory
    gpu_link: float  # rate to and from the other GPUs of the machine
    network: float  # rate to and from other machines, each GPU's part of the adapters
    matmul_share: float = 0.7  # share of `flops` that large products reach at the power limit
    driver: str = ""  # a pattern of the driver's name for the GPU

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"

    @property
    def device(self) -> str:
        """Torch's name for such a device."""
        return "cpu" if self.is_cpu else "cuda"

    def with_memory(self, gigabytes: int) -> Accelerator:
        """Return the same chip with more or less memory, counted as in its product name."""
        if gigabytes == self.nominal:
            return self
        return replace(self, memory=self.memory * gigabytes // self.nominal, nominal=gigabytes)

    def shared_by(self, workers: int) -> Accelerator:
        """Return each worker's part, if so many processes share the device."""
        return replace(self, memory=self.memory // workers, **{key: getattr(self, key) / workers for key in FIGURES})


# Links. PCIe 5.0 x16 has 64 GB/s in each direction; copies of pinned memory reach 55 (docs/memory.md); PCIe 4.0 has half.
PCIE5, PCIE4 = 55e9, 26e9
NVLINK4, NVLINK3 = 450e9, 300e9  # half of the 900 and 600 GB/s of the data sheets, which count both directions
INFINIBAND_400, INFINIBAND_200, ETHERNET_100 = 50e9, 25e9, 12.5e9  # one adapter a GPU, as in DGX H100 and DGX A100, or a workstation's

# `matmul_share`: an H200 reached 789 TFLOP/s of 989 in large products. H100s in published training runs come to about 0.72 (the DAPO and
# GRPO tables of tests/data/published), where the limit of 700 W lowers their clock. An H20 has a seventh of the arithmetic and the same
# power, and an A100 runs at its nominal clock: both come close to their peaks.
ACCELERATORS = (
    # NVIDIA H200 data sheet: 141 GB, 4.8 TB/s, 1,979 TFLOP/s with sparsity, NVLink 900 GB/s
    Accelerator("H200", 143771 * MIB, 141, 989e12, 4.8e12, PCIE5, NVLINK4, INFINIBAND_400, 0.8, r"\bH200\b"),
    # NVIDIA H100 data sheet, NVL: 94 GB, 3.9 TB/s, 1,671 TFLOP/s with sparsity, NVLink 600 GB/s
    Accelerator("H100-NVL", 95830 * MIB, 94, 835e12, 3.9e12, PCIE5, NVLINK3, INFINIBAND_200, 0.72, r"\bH100 NVL\b"),
    # NVIDIA H100 PCIe product brief: 80 GB, 2.0 TB/s, 1,513 TFLOP/s with sparsity
    Accelerator("H100-PCIe", 81559 * MIB, 80, 756e12, 2.0e12, PCIE5, PCIE5, INFINIBAND_200, 0.65, r"\bH100 PCIe\b"),
    # NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, 1,979 TFLOP/s with sparsity, NVLink 900 GB/s
    Accelerator("H100", 81559 * MIB, 80, 989e12, 3.35e12, PCIE5, NVLINK4, INFINIBAND_400, 0.72, r"\bH100\b"),
    # The H100 with NVLink at 400 GB/s
    Accelerator("H800", 81559 * MIB, 80, 989e12, 3.35e12, PCIE5, 200e9, INFINIBAND_400, 0.72, r"\bH800\b"),
    # NVIDIA H20: 96 GB, 4.0 TB/s, 148 TFLOP/s, NVLink 900 GB/s
    Accelerator("H20", 97871 * MIB, 96, 148e12, 4.0e12, PCIE5, NVLINK4, INFINIBAND_400, 0.95, r"\bH20\b"),
    # NVIDIA A100 data sheet: 80 GB, 2,039 GB/s (SXM), 1,935 (PCIe), 312 TFLOP/s, NVLink 600 GB/s; 40 GB: 1,555 GB/s
    Accelerator("A100", 81920 * MIB, 80, 312e12, 2.039e12, PCIE4, NVLINK3, INFINIBAND_200, 0.85, r"\bA100-SXM.*80GB"),
    # The A100 with NVLink at 400 GB/s
    Accelerator("A800", 81920 * MIB, 80, 312e12, 2.039e12, PCIE4, 200e9, INFINIBAND_200, 0.85, r"\bA800\b"),
    Accelerator("A100-PCIe", 81920 * MIB, 80, 312e12, 1.935e12, PCIE4, PCIE4, INFINIBAND_200, 0.8, r"\bA100 80GB PCIe\b"),
    Accelerator("A100-40GB", 40960 * MIB, 40, 312e12, 1.555e12, PCIE4, NVLINK3, INFINIBAND_200, 0.85, r"\bA100\b"),
    # NVIDIA L40S data sheet: 48 GB, 864 GB/s, 733 TFLOP/s with sparsity, no NVLink
    Accelerator("L40S", 46068 * MIB, 48, 362e12, 864e9, PCIE4, PCIE4, ETHERNET_100, 0.7, r"\bL40S\b"),
    # NVIDIA RTX A6000 data sheet: 48 GB, 768 GB/s, 309.7 TFLOP/s with sparsity, NVLink 112.5 GB/s between two
    Accelerator("A6000", 49140 * MIB, 48, 154.8e12, 768e9, PCIE4, PCIE4, ETHERNET_100, 0.75, r"\bRTX A6000\b"),
    # NVIDIA Ada architecture whitepaper, GeForce RTX 4090: 24 GB, 1,008 GB/s, 165.2 TFLOP/s with float32 sums, no NVLink
    Accelerator("4090", 24564 * MIB, 24, 165.2e12, 1008e9, PCIE4, PCIE4, ETHERNET_100, 0.9, r"\bRTX 4090\b"),
    # A server of two sockets: 16 channels of DDR5-4800, AMX or AVX-512 in bfloat16; torch runs float32 there by default
    Accelerator("CPU", 256 * 1024 * MIB, 256, 4e12, 600e9, 100e9, 100e9, ETHERNET_100, 0.5),
)
NAMES = {own.name.lower(): own for own in ACCELERATORS}
# Figures that hardware outside the table must have in a section [hardware], beside its memory.
FIGURES = {
    "flops": "dense bfloat16 FLOP/s",
    "hbm": "bytes per second of its memory",
    "host_link": "bytes per second to and from pinned host memory",
    "gpu_link": "bytes per second between the GPUs of a machine, in each direction",
    "network": "bytes per second to other machines, each GPU's part",
}
MEMORY_FIGURE = "memory in units of 1e9 bytes"
# Bounds beyond which a figure is a mistake, such as one in other units, and results computed from it would not be finite.
BOUNDS: Mapping[str, tuple[float, float]] = {"memory_gb": (0.1, 1e5), **dict.fromkeys(FIGURES, (1e3, 1e21)), "matmul_share": (0.01, 1.0)}
MOST_SHOWN = 40  # characters of a value in a message
WRITTEN = re.compile(
    r"(?:(?P<count>\d+)\s*[x*]\s*)?(?:nvidia[-_ ]*)?(?:geforce[-_ ]*)?(?:rtx[-_ ]*)?"
    r"(?P<name>[a-z0-9-]+?)(?:[-_ ]*(?:sxm\d?|hbm\d?e?))*(?:[-_ ]?(?P<memory>\d+)\s*g(?:i?b)?)?(?:[-_ ]*(?:sxm\d?|hbm\d?e?))*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cluster:
    gpu: Accelerator
    gpus: int = 1
    per_machine: int = GPUS_PER_MACHINE

    @staticmethod
    def parse(text: str, gpus: int | None = None) -> Cluster:
        """Read a number of GPUs and their name, as in `8xH100-80GB`, or a TOML file with a section [hardware]. `gpus`: their number if the
        text does not give it."""
        if text.strip().lower().endswith(".toml"):
            return read_hardware(Path(text.strip()), gpus)
        return Cluster(accelerator(text), count_of(text, gpus))

    @staticmethod
    def of_figures(given: Mapping[str, Any], gpus: int | None = None, where: str = "hardware") -> Cluster:
        """Read the GPUs of a section [hardware]: `gpus`, a number and a name, and figures in place of the table's; all figures if the table
        does not have that name. `where`: the section's name in errors."""
        text = given.get("gpus", "1xH100")
        if wrong := [*wrong_figures(given), *wrong_name(text, given, gpus)]:
            raise UserError("\n".join(f"{where}: {each}" for each in wrong))
        figures: dict[str, Any] = {key: float(given[key]) for key in (*FIGURES, "matmul_share") if key in given}
        own = {"memory": round(given["memory_gb"] * 1e9)} if "memory_gb" in given else {}
        if is_known(text):
            gpu = replace(accelerator(text), **figures, **own)
        else:
            count = own.get("memory") or memory_of_name(text) * 10**9
            gpu = Accelerator(name_of(text), count, round(count / 1e9), **figures)
        return Cluster(gpu, count_of(text, gpus), given.get("per_machine", GPUS_PER_MACHINE))

    def link(self, group: int) -> float:
        """Return the bytes per second that each member of a group of neighbours can send to any other: over the machine's link, or the
        network."""
        return self.gpu.gpu_link if group <= self.per_machine else self.gpu.network

    def ring(self, group: int, apart: int = 1) -> float:
        """Return the bytes per second that pass through each member of a ring whose members are `apart` GPUs from one another. Between
        machines a ring uses the adapters of all its members there; parallel rings use the others."""
        if group * apart <= self.per_machine:
            return self.gpu.gpu_link
        return min(self.gpu.gpu_link, max(1, self.per_machine // apart) * self.gpu.network)


def count_of(text: str, gpus: int | None = None) -> int:
    """Return the number of GPUs in a text such as `8xH100-80GB`. `gpus`: their number if the text has none."""
    found = WRITTEN.fullmatch(text.strip())
    count = int(found["count"]) if found and found["count"] else gpus or 1
    if not 0 < count <= MOST_GPUS:
        raise UserError(f"hardware {text!r}: {count} is not a possible number of GPUs. Write for example 8xH100-80GB")
    return count


def is_known(text: str) -> bool:
    """Return whether the table has a GPU of that name."""
    try:
        accelerator(text)
    except UserError:
        return False
    return True


def name_of(text: str) -> str:
    """Return the GPU's name in a text such as `8xB200-180GB`; an empty string if there is none."""
    found = WRITTEN.fullmatch(text.strip())
    return found["name"] if found else ""


def memory_of_name(text: str) -> int:
    """Return the gigabytes in a text such as `8xB200-180GB`; 0 if there are none."""
    found = WRITTEN.fullmatch(text.strip())
    return int(found["memory"] or 0) if found else 0


def wrong_figures(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the keys of a section [hardware], except the name of the GPU."""
    known = {"gpus", "per_machine", *BOUNDS}
    if unknown := given.keys() - known:
        yield f"unknown key {joined(sorted(unknown), 'and')}. Known are {', '.join(sorted(known))}"
    for key, (least, most) in BOUNDS.items():
        value = given.get(key, most)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            words = FIGURES.get(key) or (MEMORY_FIGURE if key == "memory_gb" else "share of flops that large products reach")
            yield f"{key} = {in_short(value)} is not a possible value. Give a number from {least:g} to {most:g} ({words})"
    count = given.get("per_machine", GPUS_PER_MACHINE)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_GPUS:
        yield f"per_machine = {in_short(count)} is not a possible value. Give a whole number of at least 1 (GPUs of a machine)"


def wrong_name(text: Any, given: Mapping[str, Any], gpus: int | None) -> Iterator[str]:
    """Yield what is wrong with `gpus` of a section [hardware], and which figures the section lacks."""
    example = 'Write a number and a name, for example gpus = "8xB200"'
    if not isinstance(text, str):
        yield f"gpus = {in_short(text)} is not a name of GPUs. {example}"
        return
    try:
        count_of(text, gpus)
    except UserError as error:
        yield str(error)
    if is_known(text):
        return
    name, least, most = name_of(text), *BOUNDS["memory_gb"]
    if not name[:1].isalpha():
        yield f"gpus = {in_short(text)} has no name of a GPU, which starts with a letter. {example}"
        return
    gigabytes = memory_of_name(text)
    missing = [key for key in FIGURES if key not in given] + ["memory_gb"] * (not gigabytes and "memory_gb" not in given)
    if gigabytes and not least <= gigabytes <= most:
        yield f"gpus = {in_short(text)} has {in_short(gigabytes)} GB of memory. Write at most {most:g}"
    elif given.keys().isdisjoint(BOUNDS):
        yield unknown_name(text)
    elif missing:
        yield (
            f"{name} is not in the hardware table, and {joined(missing, 'and')} {'is' if len(missing) == 1 else 'are'} missing. "
            f"Give {joined([f'{key} ({FIGURES.get(key, MEMORY_FIGURE)})' for key in missing], 'and')}, or a name of the table"
        )


def in_short(value: Any) -> str:
    """Write a value for a message; a long one is cut."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def read_hardware(path: Path, gpus: int | None = None) -> Cluster:
    """Read the GPUs of a TOML file with one section, [hardware]."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--hardware {path}: cannot be read: {getattr(error, 'strerror', None) or error}. Give a TOML file as docs/planning.md shows it"
        ) from error
    section = given.get("hardware")
    if not isinstance(section, Mapping) or "gpus" not in section or len(given) > 1:
        raise UserError(f"--hardware {path}: must have one section, [hardware], with gpus and their figures. docs/planning.md shows one")
    return Cluster.of_figures(section, gpus, f"{path}: hardware")


def accelerator(text: str) -> Accelerator:
    """Return the device of that name, written by people or by the driver."""
    for own in ACCELERATORS:
        if own.driver and text.startswith("NVIDIA") and re.search(own.driver, text):
            return own
    found = WRITTEN.fullmatch(text.strip())
    known = found and (NAMES.get(f"{found['name']}-{found['memory']}gb".lower()) or NAMES.get(found["name"].lower()))
    if not found or not known or (found["memory"] and not 0 < int(found["memory"]) <= MOST_MEMORY):
        raise UserError(unknown_name(text))
    return known.with_memory(int(found["memory"])) if found["memory"] else known


def unknown_name(text: str) -> str:
    names = listed([own.name for own in ACCELERATORS], 20)
    return (
        f"hardware {text!r}: unknown. Known are {names}, with their memory if it differs: 8xH100-80GB. Figures of others can be given in a "
        "file (docs/planning.md)"
    )


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
