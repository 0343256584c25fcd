"""The answer to one key of another system: honoured, means nothing, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["honoured", "means nothing", "refused"]
KINDS: tuple[Kind, ...] = ("honoured", "means nothing", "refused")


@dataclass(frozen=True)
class Outcome:
    """The result of a conversion for one key and value."""

    kind: Kind
    why: str = ""  # arithmetic and notes for a key that is honoured; else the reason, and what to use instead
    sets: Mapping[str, Any] = field(default_factory=dict)  # fulltilt's keys and their values
    performance: bool = False  # whether it is a performance setting, even if it sets no key here
    pending: Mapping[str, str] = field(default_factory=dict)  # fulltilt's keys whose values depend on data that is not here, and why
