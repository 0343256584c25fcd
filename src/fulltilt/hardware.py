"""The hardware table: what a GPU has in memory, arithmetic and links, for plans and benchmarks that are made without it.

Enters: a name as people write it ("H100", "8xH100-80GB") or as the driver gives it ("NVIDIA H100 80GB HBM3"). Leaves: a frozen
`Accelerator`. Guaranteed: figures are the vendors' (the data sheet is named beside each), except memory, which is what the driver reports,
and `matmul_share`, which is what large bfloat16 products reach; no torch.

    Cluster.parse("8xH100-80GB")   # 8 GPUs on one machine
    accelerator("H100-20GB")       # the same chip with a quarter of its memory
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fulltilt.records import UserError
from fulltilt.words import listed

MIB = 1 << 20
GPUS_PER_MACHINE = 8  # as these GPUs are sold
MOST_MEMORY, MOST_GPUS = 1 << 20, 1 << 20  # GB and GPUs beyond which a number is a mistake


@dataclass(frozen=True)
class Accelerator:
    """One device. Links are bytes per second in each direction."""

    name: str
    memory: int  # bytes that the driver reports
    nominal: int  # gigabytes of memory in the product's name
    flops: float  # dense bfloat16 FLOP/s with float32 sums, nominal
    hbm: float  # bytes per second from and to its memory, nominal
    host_link: float  # to and from pinned host memory
    gpu_link: float  # to and from the other GPUs of the machine
    network: float  # to and from other machines, each GPU's part of the adapters
    matmul_share: float = 0.7  # share of `flops` that large products reach at the power limit
    driver: str = ""  # a pattern of the name that the driver gives

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"

    def with_memory(self, gigabytes: int) -> Accelerator:
        """The same chip with more or less memory, counted as in its product name."""
        if gigabytes == self.nominal:
            return self
        return replace(self, memory=self.memory * gigabytes // self.nominal, nominal=gigabytes)


# Links. PCIe 5.0 x16 has 64 GB/s in each direction, of which copies of pinned memory reach 55 (docs/memory.md); PCIe 4.0 has half.
PCIE5, PCIE4 = 55e9, 26e9
NVLINK4, NVLINK3 = 450e9, 300e9  # half of the 900 and 600 GB/s of the data sheets, which count both directions
INFINIBAND_400, INFINIBAND_200, ETHERNET_100 = 50e9, 25e9, 12.5e9  # one adapter a GPU, as in DGX H100 and DGX A100, or a workstation's

# `matmul_share`: an H200 reached 789 TFLOP/s of 989 in large products. H100s in published training runs come to about 0.72 (the DAPO and
# GRPO tables of tests/data/published), where 700 W lower their clock. An H20 has a seventh of the arithmetic and the same power, and an
# A100 runs at its nominal clock: both come close to their peaks.
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
        """A number of GPUs and their name, as in `8xH100-80GB`. `gpus`: their number where the text does not give it."""
        found = WRITTEN.fullmatch(text.strip())
        count = int(found["count"]) if found and found["count"] else gpus or 1
        if not 0 < count <= MOST_GPUS:
            raise UserError(f"hardware {text!r}: {count} is not a possible number of GPUs. Write for example 8xH100-80GB")
        return Cluster(accelerator(text), count)

    def link(self, group: int) -> float:
        """Bytes per second that each member of a group of neighbours can send to any other: the machine's link, or the network."""
        return self.gpu.gpu_link if group <= self.per_machine else self.gpu.network

    def ring(self, group: int, apart: int = 1) -> float:
        """Bytes per second that pass through each member of a ring whose members are `apart` GPUs from one another. Between machines a ring
        uses the adapters of all its members there; rings beside it use the others."""
        if group * apart <= self.per_machine:
            return self.gpu.gpu_link
        return min(self.gpu.gpu_link, max(1, self.per_machine // apart) * self.gpu.network)


def accelerator(text: str) -> Accelerator:
    """The device of that name, written by people or by the driver."""
    for own in ACCELERATORS:
        if own.driver and text.startswith("NVIDIA") and re.search(own.driver, text):
            return own
    found = WRITTEN.fullmatch(text.strip())
    known = found and (NAMES.get(f"{found['name']}-{found['memory']}gb".lower()) or NAMES.get(found["name"].lower()))
    if not found or not known or (found["memory"] and not 0 < int(found["memory"]) <= MOST_MEMORY):
        names = [own.name for own in ACCELERATORS]
        raise UserError(f"hardware {text!r}: unknown. Known are {listed(names, 20)}, with their memory if it differs: 8xH100-80GB")
    return known.with_memory(int(found["memory"])) if found["memory"] else known
