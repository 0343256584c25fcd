"""What a case changes: configuration, command line, data, templates, model folders, run folder, reward file, surroundings.

A mutation is a function of a `Tree` and a generator of chance, registered with its group. It changes the tree and returns what it did, in
words. It only copies and edits files: the process that calls it is forked afterwards.
"""

from __future__ import annotations

from mutations import configuration, data, folder, model, reward, surroundings
from mutations.registry import choose

__all__ = ["choose", "configuration", "data", "folder", "model", "reward", "surroundings"]
