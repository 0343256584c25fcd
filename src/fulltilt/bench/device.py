"""The device that is measured: which one, its memory, and the kernels that a piece of work runs.

Guaranteed: measured work has finished on the device; nothing here changes what a run computes.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fulltilt.records import UserError

Result = TypeVar("Result")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler of torch 2.13 prints two lines for each profile


def choose_device(name: str | None) -> torch.device:
    if name not in (None, "cuda", "cpu"):
        raise UserError(f"--device {name}: cuda or cpu")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu; `fulltilt doctor` says why")
    return torch.device(name or ("cuda" if there else "cpu"))


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device: torch.device, work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds until the device has finished the work, and its result."""
    synchronize(device)
    begin = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - begin, result


def used_bytes() -> int:
    """Return the bytes in use on the CUDA device, by any process."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def let_go(device: torch.device) -> int | None:
    """Free the device for another process. Returns the bytes that this process still holds, above all its context; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return used_bytes()


def peak_memory(device: str, held_by_others: int = 0) -> tuple[int | None, int | None]:
    """Return the peak bytes since the last reset: allocated by torch, and in use on the device without those of other processes."""
    if device != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(), peak_in_use(torch.cuda.max_memory_reserved(), held_by_others)


def peak_in_use(reserved: int, held_by_others: int = 0) -> int:
    """Return torch's largest reservation plus the memory beside it on the device now: context, libraries and graphs, all of which only
    grow. The device is not queried while steps run, because that could spoil the capture of a graph."""
    return reserved + used_bytes() - torch.cuda.memory_reserved() - held_by_others


def kernels_of(work: Callable[[], Any], device: torch.device, parts: int = 1) -> list[dict[str, Any]]:
    """Return the kernels (operators on a CPU) of each of the equal `parts` of the work, longest first, with the time of each alone."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        work()
        synchronize(device)
    found: dict[str, list[float]] = {}
    for event in profile.events() or []:
        if event.is_user_annotation or (on_cuda and event.device_type != torch.autograd.DeviceType.CUDA):
            continue  # an annotated span, which would count its kernels a second time; or the host's part
        found.setdefault(short(event.name), []).append(event.device_time if on_cuda else event.self_cpu_time_total)
    return [
        {"kernel": name, "calls": len(times) if parts == 1 else len(times) / parts, "microseconds": sum(times) / parts}
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def short(name: str) -> str:
    """Return a kernel's name without return type, parameters and types, which fill hundreds of characters for a template."""
    name = name.replace("(anonymous namespace)", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0].replace("::::", "::").strip(" :") or name
