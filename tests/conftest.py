"""What every test shares: quiet, offline, one thread per process so that test processes do not fight over cores."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory):
    """Folder of each family of the list, made on first use."""
    import models

    made: dict[str, object] = {}

    def folder(family: str):
        if family not in made:
            made[family] = models.save(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return folder
