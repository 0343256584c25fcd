"""The devices of this machine, as a run would use them, for tuning: their names and number, and figures for the models of memory and time.

Guaranteed: figures come from the hardware table; for a CPU, or a GPU that the table lacks, arithmetic and bandwidth are measured, which
takes a fraction of a second.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fulltilt.cluster.checks import choose_device
from fulltilt.hardware import Accelerator, Cluster, accelerator
from fulltilt.memory.host import free_host_bytes
from fulltilt.model.load import read_config, shape_of
from fulltilt.plan.legal import count_workers
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.shape import Shape
from fulltilt.words import many


def shape_for(config: Config) -> Shape:
    folder = Path(config.model.path)
    return Shape.read(folder) if (folder / "config.json").is_file() else shape_of(read_config(config.model))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {many(os.cpu_count() or 1, 'core')}"


def devices_of(config: Config) -> tuple[torch.device, int]:
    """Return the device that a run would use here, and how many of them."""
    device = choose_device(config.run.device)
    return device, count_workers(config, device.type) * config.cluster.nodes


def cluster_here(config: Config) -> Cluster:
    """Describe the devices for the models of memory and time, by figures of the table or, where it has none, measured ones."""
    device, count = devices_of(config)
    workers = max(1, count // config.cluster.nodes)
    if device.type == "cpu":
        found = measured_figures(replace(accelerator("CPU"), memory=free_host_bytes()), device)
        return Cluster(found.shared_by(workers), count, workers)
    name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    try:
        return Cluster(replace(accelerator(name), memory=memory), count, workers)
    except UserError:
        return Cluster(measured_figures(replace(accelerator("H100"), name=name, memory=memory), device), count, workers)


def measured_figures(base: Accelerator, device: torch.device) -> Accelerator:
    """Return the device with its arithmetic and bandwidth as measured in a fraction of a second."""
    on_cuda = device.type == "cuda"
    side, kind = (4096, torch.bfloat16) if on_cuda else (768, torch.float32)
    matrix, numbers = torch.ones(side, side, dtype=kind, device=device), torch.ones(2**26 if on_cuda else 2**23, device=device)

    def fastest(work: Callable[[], Any]) -> float:
        def once() -> float:
            begin = time.perf_counter()
            work()
            if on_cuda:
                torch.cuda.synchronize(device)
            return time.perf_counter() - begin

        once()
        return min(once() for _ in range(3))

    flops, moved = 2 * side**3 / fastest(lambda: matrix @ matrix), 2 * numbers.nbytes / fastest(numbers.clone)
    return replace(base, flops=flops, matmul_share=1.0, hbm=moved)


def free_memory() -> None:
    """Free what a run that has ended held on the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def wait_for_device() -> None:
    """Wait until this process's device has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
