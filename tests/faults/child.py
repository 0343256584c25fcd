"""A command in a forked child of a process that has imported everything, and what became of it.

Enters: a folder, arguments, and the `Surroundings` of the process. Leaves: `Ended`. Guaranteed: the child has one thread, a session, a
HOME and a TMPDIR of its own, and none of root's capabilities, so that permissions count for root too; its memory and processes are
limited, so that no case can take the machine along; whatever it leaves running is found, for the parent is made the reaper of its orphans,
and killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import locale
import os
import pty
import resource
import select
import shutil
import signal
import struct
import sys
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 24, 36
CAPABILITIES = 41
MOST_MEMORY = 4 * 2**30  # bytes of address space beyond what the parent has
MOST_PROCESSES = 150
CRASH_BYTES = 60_000  # no more than a pipe holds
FIRST_OF_OURS = 500  # file descriptors from here on are the fuzzer's, and do not count against a limit of open files
TOLD_TO_END_S = 100.0
ORPHANS_S = 30.0


@dataclass(frozen=True)
class Surroundings:
    """How the process is started. Streams: `file`, `terminal`, `full` (a disk without space), `closed` or `gone` (a pipe nobody reads)."""

    stdout: str = "file"
    stderr: str = "file"
    encoding: str = "utf-8"
    columns: int = 80  # of a terminal
    open_files: int | None = None
    file_bytes: int | None = None
    umask: int = 0o022
    warnings: str = ""  # PYTHONWARNINGS, which is read when an interpreter starts
    gone_folder: bool = False  # the current folder has been deleted


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    error: str
    seconds: float
    crash: str = ""  # the traceback of an exception that nobody caught, which a closed standard error does not show
    stuck_at: str = ""  # where all threads were shortly before the deadline
    told_to_end: bool = False
    processes: int = 0  # how many it had when it was ended for having too many
    left: tuple[str, ...] = ()  # command lines of processes that it left behind


def _rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _remove_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _lock_out(folder: Path) -> None:
    folder.chmod(0o500)


def _replace_by_file(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))
    folder.write_text("a file\n")


def _remove_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


# What happens to the run folder once there are metrics.
MEANWHILE: Mapping[str, Callable[[Path], None]] = {
    "the run folder is renamed": _rename,
    "the run folder is removed": _remove,
    "checkpoints/ is removed": _remove_checkpoints,
    "the run folder becomes read-only": _lock_out,
    "the run folder is replaced by a file": _replace_by_file,
    "metrics.jsonl is removed": _remove_metrics,
}


# ---- the parent's side -------------------------------------------------------------------------------------------------------------------


def become_reaper() -> None:
    """Orphans of a child become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    root: Path, arguments: Sequence[str], environment: Mapping[str, str | None], about: Surroundings, *,
    deadline_s: float, end_after_s: float | None = None, meanwhile: str = "", run_dir: Path | None = None,
) -> Ended:  # fmt: skip
    """`end_after_s`: the command may rightly take longer than this, and is then told to end."""
    record = root.parent / f"{root.name}.said"
    record.mkdir(exist_ok=True)
    master, slave = pty.openpty() if "terminal" in (about.stdout, about.stderr) else (None, None)
    if slave is not None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, max(0, about.columns) % 65536, 0, 0))
    crash_reader, crash = os.pipe()  # limits of files do not hold for a pipe
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        be_the_command(root, record, arguments, environment, about, slave, crash, deadline_s)
    os.close(crash)
    if slave is not None:
        os.close(slave)
    watched = _Watched(pid, master, MEANWHILE.get(meanwhile), run_dir)
    told = False
    with watched:
        code = watched.wait_until(begin + (end_after_s or deadline_s))
        if code is None and end_after_s is not None:
            told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            code = watched.wait_until(time.monotonic() + TOLD_TO_END_S)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            end_all(descendants())
    seconds = time.monotonic() - begin
    left = tuple(left_behind())
    out, error = (record / "out").read_bytes() + watched.shown, (record / "error").read_bytes()
    stuck_at = (record / "stuck").read_text(errors="replace") if code is None else ""
    with open(crash_reader, "rb") as reader:
        crashed = _text(reader.read(), "utf-8")
    code = -signal.SIGKILL if code is None else code
    said, complained = _text(out, about.encoding), _text(error, about.encoding)
    return Ended(code, said, complained, seconds, crashed, stuck_at, told, watched.processes, left)


def _text(data: bytes, encoding: str) -> str:
    return data.decode(encoding, "backslashreplace")


@dataclass
class _Watched:
    pid: int
    master: int | None
    meanwhile: Callable[[Path], None] | None
    run_dir: Path | None
    shown: bytes = b""
    handle: int = -1
    processes: int = 0

    def __enter__(self) -> _Watched:
        self.handle = os.pidfd_open(self.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._read()
        os.close(self.handle)
        if self.master is not None:
            os.close(self.master)

    def wait_until(self, moment: float) -> int | None:
        """Its exit code, negative for a signal; None if it still runs."""
        while (left := moment - time.monotonic()) > 0 and not self.processes:
            sources = [self.handle] if self.master is None else [self.handle, self.master]
            ready, _, _ = select.select(sources, [], [], min(left, 0.005 if self.meanwhile else 0.5))
            if self.master in ready:
                self._read()
            if self.handle in ready:
                _, status = os.waitpid(self.pid, 0)
                return os.waitstatus_to_exitcode(status)
            self._meddle()
            self._count()
        return None

    def _read(self) -> None:
        while self.master is not None and select.select([self.master], [], [], 0)[0]:
            try:
                arrived = os.read(self.master, 2**16)
            except OSError:  # the other end is closed
                arrived = b""
            if not arrived:
                os.close(self.master)
                self.master = None
            self.shown += arrived

    def _meddle(self) -> None:
        if self.meanwhile is not None and self.run_dir is not None and (self.run_dir / "metrics.jsonl").exists():
            with contextlib.suppress(OSError):
                self.meanwhile(self.run_dir)
            self.meanwhile = None

    def _count(self) -> None:
        if self.meanwhile is None and (count := len(descendants())) > MOST_PROCESSES:
            self.processes = count


def children_of(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            fields = Path("/proc", str(int(entry)), "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry))
    return found


def descendants() -> list[int]:
    found = children_of(os.getpid())
    for pid in found:
        found += children_of(pid)
    return found


def end_all(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def left_behind() -> Iterator[str]:
    """What still runs some seconds after the command ended. It is then killed."""
    end = time.monotonic() + ORPHANS_S
    while (left := descendants()) and time.monotonic() < end:
        _reap()
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(OSError):
            yield Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    while left:
        end_all(left)
        time.sleep(0.02)
        _reap()
        left = descendants()
    _reap()


# ---- the child's side --------------------------------------------------------------------------------------------------------------------


def be_the_command(
    root: Path, record: Path, arguments: Sequence[str], environment: Mapping[str, str | None], about: Surroundings,
    slave: int | None, crash: int, deadline_s: float,
) -> NoReturn:  # fmt: skip
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # here no part of the command runs
        os.chdir(root)
        stuck = _out_of_the_way(os.open(record / "stuck", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        crash = _out_of_the_way(crash)
        faulthandler.dump_traceback_later(max(1.0, deadline_s - 3.0), file=stuck)
        _streams(record, about, slave)
        os.closerange(3, FIRST_OF_OURS)
        _drop_capabilities()
        _limit(about)
        _variables(root, environment)
        if about.gone_folder:
            os.mkdir("gone")
            os.chdir("gone")
            os.rmdir("../gone")
        os.umask(about.umask)
        sys.argv = ["fulltilt", *arguments]
        code = _exit_code_of_main(crash)
    except BaseException:
        os.write(crash, traceback.format_exc().encode(errors="backslashreplace")[-CRASH_BYTES:])
    finally:
        os._exit(code)


def _out_of_the_way(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_OF_OURS)


def _exit_code_of_main(crash: int) -> int:
    """As the interpreter ends: threads, exit functions, streams."""
    from fulltilt import cli

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        os.write(crash, traceback.format_exc().encode(errors="backslashreplace")[-CRASH_BYTES:])
        with contextlib.suppress(OSError, ValueError, AttributeError):
            traceback.print_exc()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"Exception ignored while flushing sys.stdout: {error}", file=sys.stderr)
        return 120
    return code


def _streams(record: Path, about: Surroundings, slave: int | None) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for number, name, kind in ((1, "out", about.stdout), (2, "error", about.stderr)):
        said = os.open(record / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        if kind == "file":
            os.dup2(said, number)
        elif kind == "terminal":
            assert slave is not None
            os.dup2(slave, number)
        elif kind == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        elif kind == "gone":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
        os.close(said)
    for number, kind in ((1, about.stdout), (2, about.stderr)):
        if kind == "closed":
            os.close(number)
    sys.stdout = _opened(1, about.stdout, encoding=about.encoding)  # type: ignore[assignment]
    sys.stderr = _opened(2, about.stderr, encoding=about.encoding, errors="backslashreplace", buffering=1)  # type: ignore[assignment]
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
    if about.encoding != "utf-8":
        locale.setlocale(locale.LC_ALL, "C")
    if about.warnings:
        warnings.simplefilter(about.warnings)  # type: ignore[arg-type]
        sys.warnoptions.append(about.warnings)


def _opened(number: int, kind: str, **how: Any) -> TextIO | None:
    return None if kind == "closed" else open(number, "w", closefd=False, **how)


def _drop_capabilities() -> None:
    """Also from those that a program gets when root starts it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    libc.capset(version_3, (ctypes.c_uint32 * 6)())


def _limit(about: Surroundings) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_MEMORY)
    _lower(resource.RLIMIT_CORE, 0)
    if about.open_files is not None:
        _lower(resource.RLIMIT_NOFILE, about.open_files)
    if about.file_bytes is not None:
        _lower(resource.RLIMIT_FSIZE, about.file_bytes)


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or value < soft:
        resource.setrlimit(limit, (value, hard))


def _variables(root: Path, changed: Mapping[str, str | None]) -> None:
    given: dict[str, Any] = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LANG": "C.UTF-8",
        "HOME": str(root / "home"),
        "TMPDIR": str(root / "tmp"),
        "MPLCONFIGDIR": str(root / "home"),
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE"),
    } | dict(changed)
    os.environ.clear()
    os.environ.update({name: value for name, value in given.items() if value is not None})
    import tempfile

    tempfile.tempdir = None  # found once per process
