"""The device that is measured.

Enters: work to run on it. Leaves: the kernels that it consists of. Guaranteed: what is returned has ended on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_of(work: Callable[[], Any], device: torch.device, parts: int = 1) -> list[dict[str, Any]]:
    """What ran in each of the equal `parts` of the work, longest first: kernels on CUDA, operators on a CPU, each with the time that it
    took by itself."""
    on_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        work()
        synchronize(device)
    found: dict[str, list[float]] = {}
    for event in profile.events() or []:
        if event.is_user_annotation or (on_cuda and event.device_type != torch.autograd.DeviceType.CUDA):
            continue  # a name for a stretch of time, which would count what runs in it a second time; or the host's part
        found.setdefault(short(event.name), []).append(event.device_time if on_cuda else event.self_cpu_time_total)
    return [
        {"kernel": name, "calls": len(times) if parts == 1 else len(times) / parts, "microseconds": sum(times) / parts}
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def short(name: str) -> str:
    """Of a kernel, without its return type, parameters and types, which fill hundreds of characters where it is a template."""
    name = name.replace("(anonymous namespace)", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0].replace("::::", "::").strip(" :") or name
