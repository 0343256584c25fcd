"""Restrictions of reward processes by the kernel: no signals to the trainer, no access to its memory, no writing into the run folder.

Linux only. Landlock (a set of rules that a process takes on for good, and its children with it) allows writing everywhere except below the
run folder, keeps a process out of the memory of processes that are not confined with it, and since Linux 6.12 from signalling them. seccomp
(a filter of system calls) refuses signals to the processes named here, for older kernels, and changing their scheduling; it refuses the
limits of any other process, which would end the trainer as surely, and leases of files, which would make its writing wait. No rule can
cover modes, owners and times of files, since a filter does not see which file a call names: the run itself repairs the modes that it needs
(`loop.folder`). `confinement` runs in the trainer and opens the rules, `Confinement.take_on` runs in the reward process, before any code of
the user's. `lacking` names features that the kernel does not have. Imports only the standard library: reward processes start from here.

Landlock rules hold for a folder and everything below it, so writing is allowed for everything next to the path to the run folder: a new
file can be made anywhere, except directly in a folder that contains the run folder. Temporary files go into a folder that exists already
(`dispatch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # numbers of Landlock's system calls, the same everywhere
NUMBERS = {  # numbers of other system calls, for x86_64 and aarch64
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "process_vm_writev": (311, 271), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "fcntl": (72, 25), "ioctl": (16, 29), "seccomp": (317, 277),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # their codes in a filter, in the order of NUMBERS
BY_PROCESS = {  # calls that name a process, thread or group, with the place of that argument
    **dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "process_vm_writev"), 0),
    **dict.fromkeys(("sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"), 0),
    **dict.fromkeys(("setpriority", "ioprio_set"), 1),
}
_OF_ALL = {"setpriority": 2, "ioprio_set": 3}  # first arguments that make these calls affect every process of the user
_COMMANDS = {"fcntl": (1024,)}  # refused second arguments. F_SETLEASE: opening the file waits until the lease ends
# F_SETOWN, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP choose who gets the signals of a descriptor.
_COMMANDS_WITH_SIGNALS = {"fcntl": (1024, 8, 15), "ioctl": (0x8901, 0x8902)}

# Landlock's rights to write, remove and create; later versions add moving between folders and truncating.
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
_REFER = 1 << 13
_SCOPE_SIGNAL = 1 << 1
_SIGNALS_SINCE, _TRUNCATE_SINCE, _REFER_SINCE = 6, 3, 2  # versions of Landlock

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = (1 << 9 | 1 << 19 | 1 << 21, 1 << 38 - 32)  # CAP_LINUX_IMMUTABLE, CAP_SYS_PTRACE, CAP_SYS_ADMIN; CAP_PERFMON
_LOAD, _EQUAL, _AT_LEAST, _JUMP, _RETURN = 0x20, 0x15, 0x35, 0x05, 0x06  # instructions of the filter
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_MOST_THREADS = 1500  # a filter has at most 4,096 instructions


def landlock_version() -> int:
    """Return Landlock's version; 0 if the kernel has no Landlock, or a container refuses it."""
    return max(0, _syscall(_CREATE_RULESET, None, 0, 1)) if sys.platform == "linux" else 0


def has_seccomp() -> bool:
    known = sys.platform == "linux" and platform.machine() in _ARCHITECTURES
    return known and _syscall(number_of("seccomp"), 2, 0, ctypes.byref(ctypes.c_uint32(_REFUSE & 0xFFFF0000))) == 0


def lacking(landlock: int, seccomp: bool) -> tuple[str, ...]:
    """Return forbidden actions that this kernel cannot keep reward functions from."""
    found = {
        "write into run.dir and into the trainer's memory": not landlock,
        "truncate files in run.dir": 0 < landlock < _TRUNCATE_SINCE,
        "signal the trainer": landlock < _SIGNALS_SINCE and not seccomp,
        "signal threads that the trainer starts later": landlock < _SIGNALS_SINCE and seccomp,
        "change the trainer's limits and priority": not seccomp,
    }
    return tuple(words for words, holds in found.items() if holds)


@dataclass(frozen=True)
class Confinement:
    """The restrictions that a reward process puts on itself."""

    run_dir: str  # resolved; "": no protected folder
    ruleset: int | None  # descriptor of Landlock's rules
    landlock: int
    seccomp: bool
    pids: tuple[int, ...]  # processes that must not be signalled

    def take_on(self) -> None:
        """Put the restrictions on this process. Raises OSError if the kernel refuses, although it said that it would not."""
        if sys.platform != "linux":
            return
        _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required by the kernel: no program may give the process more rights
        _drop_capabilities()
        if self.seccomp:
            _install(_filter(self._protected(), signals=self.landlock < _SIGNALS_SINCE))
        if self.ruleset is not None:
            _required(_syscall(_RESTRICT_SELF, self.ruleset, 0))
            os.close(self.ruleset)

    def _protected(self) -> list[int]:
        """Return arguments that name the protected processes: their threads, their process groups, and all processes."""
        found = [-1]
        for pid in self.pids:
            with contextlib.suppress(OSError):  # the guard may have been killed
                group = os.getpgid(pid)
                found += [group, -group, *map(int, os.listdir(f"/proc/{pid}/task"))]  # `setpriority` has groups as positive numbers
        return found[:_MOST_THREADS]

    def explain(self, error: BaseException) -> str:
        """Return a sentence for the message of a call that may have been refused a file; empty otherwise."""
        if not self.run_dir or self.ruleset is None or not any(map(_may_be_refused, _chain(error))):
            return ""
        return (
            f". Reward functions cannot write into run.dir ({self.run_dir}), nor make files directly in a folder that contains it, which "
            "may be the cause. Use another folder that exists before the run (cache/ for example), or set reward.sandbox = false"
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _may_be_refused(error: BaseException) -> bool:
    """Return whether Landlock may be the cause. Types that the process may not have imported are recognised by name."""
    if isinstance(error, OSError):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        return error.errno in (errno.EACCES, errno.EXDEV) and (not names or any(map(_writable_otherwise, names)))
    kind = f"{type(error).__module__}.{type(error).__name__}"
    if kind == "sqlite3.OperationalError":
        return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_IOERR"))
    return kind == "subprocess.CalledProcessError"


def _writable_otherwise(path: str) -> bool:
    """Return whether the modes of files allow writing, which is all that `access` checks: then it was Landlock that refused."""
    with contextlib.suppress(OSError, ValueError):  # a path below a current folder that is gone, or no path at all
        path = os.path.realpath(path)
        return os.access(path if os.path.lexists(path) else os.path.dirname(path), os.W_OK)
    return False


def confinement(run_dir: Path | None, pids: tuple[int, ...]) -> Confinement:
    """Return the restrictions for this trainer's reward processes, as far as the kernel supports them. Runs in the trainer; the ruleset
    stays open."""
    version = landlock_version()
    resolved = os.path.realpath(run_dir) if run_dir is not None else ""
    return Confinement(resolved, _open_rules(resolved, version) if version else None, version, has_seccomp(), pids)


def _open_rules(run_dir: str, version: int) -> int | None:
    in_file = _WRITE_FILE | (_TRUNCATE if version >= _TRUNCATE_SINCE else 0)
    rights = (in_file | _CHANGE_FOLDER | (_REFER if version >= _REFER_SINCE else 0)) if run_dir else 0
    scoped = _SCOPE_SIGNAL if version >= _SIGNALS_SINCE else 0
    if not rights and not scoped:
        return None
    handled = struct.pack("=QQQ", rights, 0, scoped)[: 24 if scoped else 8]
    ruleset = _syscall(_CREATE_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return None
    for entry in _beside(run_dir) if run_dir else ():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            # The entry's own type is used: asking a file system that does not answer would hang the start.
            allowed = rights if entry.is_dir(follow_symlinks=False) else in_file
            descriptor = os.open(entry.path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            _syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, descriptor), 0)
            os.close(descriptor)
    return ruleset


def _beside(run_dir: str) -> Iterator[os.DirEntry[str]]:
    """Yield everything in the folders that contain the run folder, except those folders themselves and /proc, which has the trainer's
    files."""
    on_the_way = {run_dir, "/proc", *map(str, Path(run_dir).parents)}
    for folder in Path(run_dir).parents:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.path not in on_the_way and not entry.is_symlink())


# ---- the filter of system calls --------------------------------------------------------------------------------------------------------


def _filter(protected: Iterable[int], *, signals: bool) -> bytes:
    """Make the filter. `signals`: whether to refuse also calls that choose their target otherwise than by a number, which Landlock does not
    cover in old kernels."""
    steps = [_step(_RETURN, _ALLOW)]  # for a call without a rule

    def rule(name: str, *checks: bytes) -> None:
        steps[:0] = [_step(_EQUAL, number_of(name), 0, len(checks) + 1), *checks, _step(_RETURN, _ALLOW)]

    for name, place in BY_PROCESS.items():
        of_all = [_argument(0), *_refuse(_OF_ALL[name])] if name in _OF_ALL else []
        rule(name, *of_all, _argument(place), _step(_JUMP, len(steps) + 1))  # to after `steps`, where the processes are compared
    own = (_step(_EQUAL, 0, 1, 0), _step(_EQUAL, os.getpid(), 0, 1), _step(_RETURN, _ALLOW), _step(_RETURN, _REFUSE))
    rule("prlimit64", _argument(0), *own)
    for name, commands in (_COMMANDS_WITH_SIGNALS if signals else _COMMANDS).items():
        rule(name, _argument(1), *_refuse(*commands))
    if signals:
        rule("pidfd_send_signal", _step(_RETURN, _REFUSE))
    # Other architectures, and x32 on x86_64, have other numbers: they are not allowed.
    begin = [
        *(_step(_LOAD, 4), _step(_EQUAL, _ARCHITECTURES[platform.machine()], 1, 0), _step(_RETURN, _REFUSE)),
        *(_step(_LOAD, 0), _step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _REFUSE)),
    ]
    return b"".join([*begin, *steps, *_refuse(*protected), _step(_RETURN, _ALLOW)])


def _argument(place: int) -> bytes:
    """Load the lower half of an argument, which is all that the kernel reads of it."""
    return _step(_LOAD, 16 + 8 * place)


def _refuse(*values: int) -> Iterator[bytes]:
    """Refuse the call if the last loaded value is one of these."""
    for value in values:
        yield from (_step(_EQUAL, value & 0xFFFFFFFF, 0, 1), _step(_RETURN, _REFUSE))


def _drop_capabilities() -> None:
    """Drop root's capabilities to read others' memory and environment in spite of Landlock."""
    header, sets = struct.pack("=Ii", 0x20080522, 0), (ctypes.c_uint32 * 6)()  # for two words of bits: effective, permitted, inheritable
    _required(_libc().capget(header, sets))
    for place, bits in enumerate(sets):
        sets[place] = bits & ~_CAPABILITIES[place // 3]
    _required(_libc().capset(header, sets))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _install(program: bytes) -> None:
    steps = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    _required(_syscall(number_of("seccomp"), 1, 0, header))


def _required(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def number_of(name: str) -> int:
    return NUMBERS[name][list(_ARCHITECTURES).index(platform.machine())]


def _syscall(number: int, *arguments: object) -> int:
    """Make a system call. Returns its result, or -1. Whole numbers are passed as the kernel's long integers."""
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *given))
