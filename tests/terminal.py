"""A small terminal: it runs a command on a pseudo-terminal of a given width and shows what is left on its screen, as text.

`python tests/terminal.py 80 fulltilt train mine/run.toml` prints the screen of the command at 80 columns. docs/console.md was made with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading

# What rich writes: sequences (erase the line, go up, colours, show and hide the cursor), carriage returns, line feeds, text.
TOKENS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
BAR = re.compile("[━╸╺]+")


class Screen:
    """The lines of a terminal that never scrolls away. A line that is too long continues on the next, as terminals do."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines = [""]
        self.row = self.column = 0
        self.broken: list[str] = []  # lines that were too long
        self.bars: list[int] = []  # the width of each progress bar that was drawn

    def show(self, written: str) -> Screen:
        self.bars += [len(bar) for bar in BAR.findall(re.sub(r"\x1b\[[\d;]*m", "", written))]
        for arguments, command, control, text in TOKENS.findall(written):
            if text:
                self._put(text)
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self.row, self.column = self.row + 1, 0
            elif command == "A":
                self.row = max(0, self.row - int(arguments or 1))
            elif command == "K":
                self._line = ""
            self.lines += [""] * (self.row + 1 - len(self.lines))
        return self

    @property
    def _line(self) -> str:
        return self.lines[self.row]

    @_line.setter
    def _line(self, text: str) -> None:
        self.lines[self.row] = text

    def _put(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.broken.append(self._line)
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            self._line = self._line[: self.column].ljust(self.column) + character + self._line[self.column + 1 :]
            self.column += 1

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


class Terminal:
    """The command's end is `path`; what it writes there is read until every process has closed it."""

    def __init__(self, columns: int) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.path = os.ttyname(self._slave)
        self._columns, self._written = columns, b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while arrived := os.read(self._master, 2**16):
                self._written += arrived

    def close(self) -> Screen:
        """What is on the screen in the end."""
        os.close(self._slave)
        self._reader.join(60)
        os.close(self._master)
        return Screen(self._columns).show(self._written.decode())


def attach(path: str) -> None:
    """Make the terminal this process's output, as a shell does before it starts a command."""
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    for descriptor in (1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    for name in ("COLUMNS", "NO_COLOR"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm"
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115


def main() -> None:
    columns, *command = sys.argv[1:]
    terminal = Terminal(int(columns))
    with open(terminal.path, "r+b", buffering=0) as end:
        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
        environment.pop("COLUMNS", None)
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=end, stderr=end, env=environment, check=False)
    print(f"$ {shlex.join(command)}")
    print(terminal.close())


if __name__ == "__main__":
    main()
