"""Where the code that drives other systems is: in the repository's folder `benchmarks/`, which is not part of the installed package.

Enters: a peer's name. Leaves: its module. Guaranteed: where the folder is missing, the error says how to get it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from fulltilt.records import UserError

VARIABLE = "FULLTILT_BENCHMARKS"


def load(name: str) -> ModuleType:
    """benchmarks/peer_NAME.py of the folder that the variable names, of this checkout, or of the current directory."""
    given = os.environ.get(VARIABLE)
    folders = [Path(given)] if given else [Path(__file__).parents[3] / "benchmarks", Path("benchmarks").resolve()]
    file = next((folder / f"peer_{name}.py" for folder in folders if (folder / f"peer_{name}.py").is_file()), None)
    if file is None:
        raise UserError(
            f"--against {name}: there is no peer_{name}.py in {' or '.join(map(str, folders))}. It is in the folder benchmarks of "
            f"fulltilt's repository, not in the installed package: run the command in a clone of it, or set {VARIABLE} to that folder"
        )
    module_name = f"fulltilt_benchmarks_{name}"
    if (known := sys.modules.get(module_name)) and known.__file__ == str(file):
        return known
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(module: str) -> bool:
    """A folder of that name in the current directory is not the package."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None
