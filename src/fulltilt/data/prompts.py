"""Prompts for rollout.

Enters: data files, the tokenizer, the `data` section. Leaves: a `PromptSet`. Guaranteed: rows in verl's layout and plain rows give the
same `Prompt`s from every file format; a prompt's `uid` is its row number over all files, whatever is left out; its `source` is what the
ids were made from, including the system message.

Columns: the prompt (`data.prompt_key`); the ground truth from `reward_model.ground_truth`, else `ground_truth`, else `answer`; and, if
there, `data_source`, `ability` (kept inside `extra_info`) and `extra_info`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fulltilt.data.load import Columns, Limit, load_items
from fulltilt.data.order import InEpochs
from fulltilt.data.template import PromptEncoder, without_missing
from fulltilt.records import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fulltilt.schema import DataConfig


class PromptSet(InEpochs[Prompt]):
    noun = "prompt"

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return self.items

    @staticmethod
    def arrays(item: Prompt) -> tuple[np.ndarray, ...]:
        return (item.ids,)

    @staticmethod
    def judged_by(item: Prompt) -> str:
        return json.dumps([item.data_source, item.ground_truth, dict(item.extra_info)], sort_keys=True, default=str)


def load_prompts(paths: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PromptSet:
    """Read, encode and filter the prompts of all `paths`, as one data set."""
    encoder = PromptEncoder(tokenizer, config)

    def parse(number: int, row: Columns) -> list[Prompt]:
        ids, text, source = encoder.encode(_prompt_column(row, config.prompt_key))
        return [Prompt(number, ids, text, _data_source(row), _ground_truth(row), _extra_info(row), source)]

    limit: Limit[Prompt] = Limit("data.max_prompt_tokens", config.max_prompt_tokens, "prompt", lambda prompt: len(prompt.ids))
    return PromptSet(*load_items(paths, parse, [limit], limit.tokens))


def _prompt_column(row: Columns, key: str) -> Any:
    if row.get(key) is None:
        raise UserError(f"the row has no '{key}'. Set data.prompt_key to the column with the prompt, or fix the row.")
    return row[key]


def _data_source(row: Columns) -> str:
    source = row.get("data_source")
    if source is None:
        return "unknown"
    if not isinstance(source, str):
        raise UserError(f"'data_source' is of type {type(source).__name__}; it must be a string.")
    return source


def _ground_truth(row: Columns) -> Any:
    reward_model = row.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, Mapping):
        raise UserError(f"'reward_model' is of type {type(reward_model).__name__}; it must be an object with a 'ground_truth'.")
    candidates = ((reward_model or {}).get("ground_truth"), row.get("ground_truth"), row.get("answer"))
    return next((candidate for candidate in candidates if candidate is not None), None)


def _extra_info(row: Columns) -> dict[str, Any]:
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise UserError(f"'extra_info' is of type {type(extra_info).__name__}; it must be an object.")
    kept: dict[str, Any] = without_missing(extra_info or {})
    if row.get("ability") is not None:
        kept.setdefault("ability", row["ability"])
    return kept
