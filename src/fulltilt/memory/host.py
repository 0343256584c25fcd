"""The cores and the free main memory of this process.

Enters: the system's own files. Leaves: numbers. Guaranteed: only the standard library is imported, so `fulltilt doctor` can report the
numbers that runs use even when everything else is broken.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# Files of a control group, in the kernel's two versions: limit, use, and the names of cached files in memory.stat.
GROUP_FILES = {
    "sys/fs/cgroup": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the main memory that is free in the computer and in this process's control groups (such as a container's). Cached files count
    as free, since the system drops them first. `root`: the folder of the system's own files."""
    known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # if the system does not tell: half of all memory
    with contextlib.suppress(OSError, KeyError):
        known = [1024 * numbers_of(root / "proc/meminfo")["MemAvailable:"]]
    for folder, (limit, used, files) in GROUP_FILES.items():
        for group in groups(root, folder):
            with contextlib.suppress(OSError, ValueError, KeyError):  # "no limit" is not a number, or a huge one
                stat = numbers_of(group / "memory.stat")
                taken = int((group / used).read_text()) - sum(stat[name] for name in files)
                known.append(int((group / limit).read_text()) - taken)
    return max(0, min(known))


def groups(root: Path, folder: str) -> set[Path]:
    """Return the control groups of this process: its own, those that contain it, and the outermost visible one."""
    found, kind = {root / folder}, "memory" if folder.endswith("memory") else ""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kind in kinds.split(","):
                own = root / folder / path.lstrip("/")
                found |= {own, *(outer for outer in own.parents if outer.is_relative_to(root / folder))}
    return found


def numbers_of(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
