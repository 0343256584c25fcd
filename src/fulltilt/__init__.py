"""fulltilt: reinforcement learning and supervised fine-tuning of language models that sets its own performance knobs.

From Python: `train`, `evaluate`, `generate` and `check` (docs/python.md). Importing the package imports neither torch nor transformers, nor
any other part of the package: reward processes and `fulltilt --help` start from here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.api import Completion, TrainResult, check, evaluate, generate, train
    from fulltilt.records import UserError

__version__ = "0.1.0"
__all__ = ["Completion", "TrainResult", "UserError", "check", "evaluate", "generate", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fulltilt' has no attribute {name!r}")
    from fulltilt import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
