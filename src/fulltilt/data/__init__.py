"""Data: files to prompts for rollout and rows for SFT, and the order in which a run goes through them."""

from fulltilt.data.files import read_rows
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.data.template import PromptEncoder

__all__ = ["Cursor", "PromptEncoder", "PromptSet", "RowSet", "load_prompts", "load_sft", "read_rows"]
