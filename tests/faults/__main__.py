"""`python tests/faults`: hostile inputs, surroundings and kills, all from a seed. docs/faults.md says how to use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
sys.path[:0] = [str(TESTS / "faults"), str(TESTS), str(SOURCE)]
# One thread in every process: one that has started threads cannot be forked safely.
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_STACKSIZE="512K",  # 1,000 threads, which a run may ask for, then fit below the limit of memory
    OPENBLAS_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    PYTHONPATH=str(SOURCE),
    PYTHONDONTWRITEBYTECODE="1",
)

from fulltilt.observe.streams import QUIET  # noqa: E402

os.environ.update(QUIET)  # libraries read it when they are imported

from fuzz import main  # noqa: E402

sys.dont_write_bytecode = True  # nor does a case that is forked from this process: its folder is compared
main()
