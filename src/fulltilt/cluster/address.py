"""The address of a Ray cluster, checked without Ray: whether a cluster answers there.

Enters: `cluster.address`. Leaves: HOST:PORT of a Ray cluster that answers, or None if the run is to start one on this machine. Guaranteed:
an address at which no cluster answers is refused within seconds, where Ray itself would end the program after a minute.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

from fulltilt.records import UserError

ANSWER_S = 10.0  # how long a cluster may take to answer
CURRENT_CLUSTER = Path("ray", "ray_current_cluster")  # in Ray's temporary folder: the address of the cluster that `ray start` has started
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def find_cluster(address: str, nodes: int) -> str | None:
    """Return HOST:PORT of a cluster that answers. None: `auto` on one machine where no Ray runs, so the run starts its own."""
    if "://" in address:
        raise UserError(f"cluster.address: {address} is not HOST:PORT. Start the run on a machine of the cluster, with its address or auto")
    found = address if address != "auto" else current_cluster()
    if found:
        check_answer(found)
    elif nodes > 1:
        raise UserError(
            f"cluster.nodes: {nodes} machines, but no Ray cluster runs here. Run `ray start --head` on this machine, and `ray start "
            "--address=HOST:6379` on the others, with this machine's name as HOST"
        )
    return found


def is_joined() -> bool:
    """Return whether the calling program is part of a cluster, which is then used, whatever the address."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def current_cluster() -> str | None:
    """Return the address of the cluster that Ray itself would find from here. A cluster that is gone may have left its address behind."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    with contextlib.suppress(OSError, UserError):
        found = (Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR", "/tmp")) / CURRENT_CLUSTER).read_text().strip()
        check_answer(found)
        return found
    return None


def check_answer(address: str) -> None:
    """Refuse an address at which no Ray cluster answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"cluster.address: {address} is not HOST:PORT. Example: 10.0.0.1:6379, as `ray start --head` prints it; or auto")
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as connection:
            connection.settimeout(ANSWER_S)
            if "RAY_USE_TLS" in os.environ:
                return
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise UserError(f"cluster.address: nothing answers at {address} ({error}). `ray status` shows the cluster of a machine") from error
    if len(answer) < 4 or answer[3] != HTTP2_PREFACE[-6]:  # a server of Ray begins with its settings
        raise UserError(f"cluster.address: what answers at {address} is not Ray. `ray status` shows the cluster of a machine")
