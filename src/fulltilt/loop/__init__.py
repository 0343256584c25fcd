"""The run: steps, validation, checkpoints, resume. `train`, `evaluate` and `find_mistakes` are the ways in."""

from fulltilt.loop.opening import evaluate, find_mistakes, train
from fulltilt.loop.run import OnStep, Summary

__all__ = ["OnStep", "Summary", "evaluate", "find_mistakes", "train"]
