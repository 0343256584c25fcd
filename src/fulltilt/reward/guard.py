"""Guard process: kills the worker processes and removes their temporary files when the trainer was killed and cannot do it itself.

Started by file path, it imports nothing of fulltilt. Enters as an argument: the folder of the temporary files. Enters on standard input:
lines `+PID` and `-PID`, the process groups that start and end. The trainer holds the only other end, so end of file means that the trainer
is gone, however it ended: then every group still listed is killed, with everything that the user's functions started in it, and the folder
is removed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        if line.endswith("\n"):
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
