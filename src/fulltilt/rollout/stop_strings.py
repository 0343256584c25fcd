"""Stop strings, and the text of a response.

Enters: sampled token ids. Leaves: the place where a stop string is first complete, even if it straddles tokens, and the text that people
and rewards read. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Finds stop strings in sampled ids, even if they straddle tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        # A token has at least one byte of text, so a string that the newest token completes began at most as many tokens ago as it has
        # bytes; a few more for ids that the tokenizer does not know, which have no text.
        self._window = max((len(string.encode()) for string in self.strings), default=0) + 8
        # Decoded after another token, because some tokenizers drop the space at the beginning of a text.
        anchor = tokenizer("a", add_special_tokens=False).input_ids[-1:] if self.strings else []
        self._anchor = [token for token in anchor if token not in tokenizer.all_special_ids]

    def ended(self, ids: Sequence[int]) -> bool:
        if not self.strings:
            return False
        text = self._whole(ids[-self._window :], skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def first_end(self, ids: Sequence[int], new: int) -> int:
        """Return at which of the last `new` ids, counted from 1, a stop string is first complete; 0 if none is. Decoding is slow: the ids
        are decoded together, and one by one only if there is a stop string."""
        if not self.strings:
            return 0
        text = self._whole(ids[-self._window - new :], skip_special_tokens=False)
        if not any(string in text for string in self.strings):
            return 0
        before = len(ids) - new
        return next((count for count in range(1, new + 1) if self.ended(ids[: before + count])), 0)

    def text(self, ids: Sequence[int]) -> str:
        """Return the response as people and rewards read it: without special tokens, ending before the first stop string."""
        text = self.whole_text(ids)
        if not self.strings:
            return text
        whole = self._whole(ids, skip_special_tokens=True)
        places = [place for string in self.strings if (place := whole.find(string)) >= 0]
        swallowed = len(whole) - len(text)
        return text[: max(0, min(places) - swallowed)] if places else text

    def whole_text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, skip_special_tokens=True)

    def _whole(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        before = self._decode(self._anchor, skip_special_tokens=skip_special_tokens)
        return self._decode([*self._anchor, *ids], skip_special_tokens=skip_special_tokens).removeprefix(before)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))
