"""Prompts for rollout.

Enters: data files, the tokenizer, the `data` section. Leaves: a `PromptSet`. Guaranteed: rows in verl's layout and plain rows give the same
`Prompt`s from every file format; a prompt's `uid` is its row number over all files, whatever is left out; its `source` is the text or
messages behind its ids, including the system message.

Columns: the prompt (`data.prompt_key`); the ground truth from `reward_model.ground_truth`, else `ground_truth`, else `answer`; and, if
there, `data_source`, `ability` (kept inside `extra_info`) and `extra_info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fulltilt.data.order import Columns, InEpochs, Limit, column, load_items, value_at
from fulltilt.data.template import PromptEncoder, without_missing
from fulltilt.records import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fulltilt.schema import DataConfig

GROUND_TRUTHS = ("ground_truth", "answer")  # columns of the ground truth; the first that a row has is used


class PromptSet(InEpochs[Prompt]):
    noun = "prompt"


def load_prompts(
    paths: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, wrong: list[str] | None = None
) -> PromptSet:
    """Read, encode and filter the prompts of all `paths`, as one data set. `wrong`: as in `load_items`."""
    encoder = PromptEncoder(tokenizer, config)

    def parse(number: int, row: Columns) -> list[Prompt]:
        prompt = value_at(row, config.prompt_key)
        if prompt is None:
            raise UserError(f"the row has no '{config.prompt_key}'. Set data.prompt_key to the column with the prompt, or fix the row.")
        ids, text, source = encoder.encode(prompt, "data.max_prompt_tokens")
        data_source = column(row, "data_source", str, "a string")
        return [Prompt(number, ids, text, "unknown" if data_source is None else data_source, _ground_truth(row), _extra_info(row), source)]

    limit = Limit("data.max_prompt_tokens", config.max_prompt_tokens, "prompt", lambda prompt: len(prompt.ids))
    return load_items(PromptSet, paths, parse, [limit], wrong)


def _ground_truth(row: Columns) -> Any:
    reward_model = column(row, "reward_model", dict, "an object with a 'ground_truth'") or {}
    candidates = (reward_model.get("ground_truth"), *map(row.get, GROUND_TRUTHS))
    return next((candidate for candidate in candidates if candidate is not None), None)


def _extra_info(row: Columns) -> dict[str, Any]:
    kept: dict[str, Any] = without_missing(column(row, "extra_info", dict, "an object") or {})
    if row.get("ability") is not None:
        kept.setdefault("ability", row["ability"])
    return kept
