"""The run: steps, validation, checkpoints, resume. `train` and `evaluate` are the ways in."""

from fulltilt.loop.opening import evaluate, train
from fulltilt.loop.run import OnStep, Summary

__all__ = ["OnStep", "Summary", "evaluate", "train"]
