"""The GSM8K reward that reads the last number of a response, wherever it stands (see `gsm8k`)."""

from __future__ import annotations

from fulltilt.reward.rules.gsm8k import flexible

score = flexible
