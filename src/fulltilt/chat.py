"""A conversation with a model, on a terminal or through pipes: `fulltilt chat`.

Enters: a model or run folder, how to sample, and lines. Leaves: the model's answers on the output, as their tokens come, and notes about
them elsewhere. Guaranteed: answers come from the rollout engine; with a chat template a line is the next turn of one conversation, whose
oldest turns are dropped, with a note, when it no longer fits; without one each line is a separate text that the model continues. Ctrl-C
ends an answer, not the conversation.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from fulltilt import api
from fulltilt.loop.generation import Generation, TextCodec, open_generation
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.training.checkpoint import Checkpoint
from fulltilt.words import many, printable

MOST_TOKENS = 8192  # the longest conversation: the KV cache has room for this many, even if the model has more positions
USUAL_ANSWER = 512  # tokens
HELP = "/reset begins a new conversation, /exit or the end of the input ends, Ctrl-C ends an answer"
# Keys of a run file, and the command line's arguments for them.
OPTIONS = {
    "model.path": "MODEL", "eval.temperature": "--temperature", "eval.max_new_tokens": "--max-new-tokens", "run.seed": "--seed",
    "data.system": "--system",
}  # fmt: skip
UNFINISHED = "\ufffd"  # the decoding of an incomplete character


@dataclass(frozen=True)
class ChatOptions:
    model: str
    step: int | None = None
    system: str | None = None
    plain: bool = False  # never use the chat template
    max_new_tokens: int | None = None  # None: the default, or half of the model's positions
    temperature: float = 0.7
    seed: int = 0


def chat(options: ChatOptions, lines: Iterable[str], out: TextIO, note: Callable[[str], None]) -> None:
    """Answer every line until the lines end or one is `/exit`."""
    given = {
        "eval.temperature": options.temperature, "eval.max_new_tokens": options.max_new_tokens, "run.seed": options.seed,
        "data.system": options.system, "data.apply_template": "never" if options.plain else None,
    }  # fmt: skip
    if options.plain and options.system is not None:
        raise UserError("--system: --plain uses no chat template to write it with. Leave one of them out")

    @contextlib.contextmanager
    def load(config: Config, found: Checkpoint | None) -> Iterator[Conversation]:
        if options.plain and (config.data.system is not None or config.data.template_args):
            note("--plain: data.system and data.template_args of the run are left out, as there is no chat template to write them with")
            config = config.model_copy(update={"data": config.data.model_copy(update={"system": None, "template_args": {}})})
        texts = TextCodec.of(config, "Use --plain to talk without it.")
        templated = texts.tokenizer.chat_template is not None and config.data.apply_template != "never"
        if not templated and options.system is not None:
            raise UserError("--system: there is no chat template to write it with. Leave it out")
        room = min(texts.limit or MOST_TOKENS, MOST_TOKENS)
        answer = options.max_new_tokens or min(USUAL_ANSWER, room // 2)
        longest = room - answer
        if longest < 1:
            raise UserError(f"--max-new-tokens: the model has {texts.limit} positions, which leaves none for a prompt. Lower it")
        with open_generation(config, texts, longest, answer, found) as generation:
            step = f", step {found.step}" if found else ""
            how = "each line is a turn of the conversation" if templated else "no chat template: each line is continued on its own"
            note(f"{config.model.path}{step}; {how}. {HELP}")
            yield Conversation(generation, texts, templated, longest, options.seed, out, note)

    with api.opened_model("fulltilt chat", options.model, options.step, given, OPTIONS, 1, load) as conversation:
        conversation.run(lines)


@dataclass(eq=False)
class Conversation:
    generation: Generation
    texts: TextCodec
    templated: bool
    longest: int  # longest prompt, in tokens
    seed: int
    out: TextIO
    note: Callable[[str], None]
    turns: list[dict[str, Any]] = field(default_factory=list)

    def run(self, lines: Iterable[str]) -> None:
        for line in (line.strip("\r\n") for line in lines):
            if line.strip() == "/exit":
                return
            if line.strip() == "/reset":
                self.turns.clear()
                self.note("a new conversation")
            elif re.fullmatch(r"/\w*", line.strip()):
                self.note(HELP if line.strip() == "/help" else f"{line.strip()}: no such command. {HELP}")
            elif line.strip():
                try:
                    self.answer(line)
                except UserError as error:
                    self.turns.clear()
                    self.note(f"{error} The conversation begins anew")

    def answer(self, line: str) -> None:
        shown = ShownAnswer(self.texts, self.generation.sampling.stop, self.out)
        try:
            prompt = self.next_prompt(line)
            if len(prompt.ids) > self.longest:
                raise UserError(f"this has {many(len(prompt.ids), 'token')}; there is room for {self.longest}. Shorten it.")
            (group,) = self.generation.groups([prompt], self.seed, shown.listen)
            shown.finish(group.samples[0].text)
        except KeyboardInterrupt:
            self.note("\nstopped")
        self.out.write("\n")
        self.out.flush()
        self.seed += 1
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.append({"role": "assistant", "content": shown.text or " "})

    def next_prompt(self, line: str) -> Any:
        """Return the line as the model reads it, after as many of the earlier turns as fit."""
        if not self.templated:
            return self.texts.encoder.encode(line)
        self.turns.append({"role": "user", "content": line})
        dropped = 0
        while len((prompt := self.texts.encoder.encode(self.turns)).ids) > self.longest and len(self.turns) > 1:
            del self.turns[:2]
            dropped += 1
        if dropped:
            self.note(f"the conversation has become too long: the oldest {many(dropped, 'turn')} left out")
        return prompt


class ShownAnswer:
    """The printed part of an answer: without an incomplete character, and without a possible beginning of a stop string."""

    def __init__(self, texts: TextCodec, stop: Sequence[str], out: TextIO) -> None:
        self.text = ""
        self._decode, self._held, self._out = texts.tokenizer.decode, max(map(len, stop), default=0), out

    def listen(self, place: int, tokens: Sequence[int]) -> None:
        text = str(self._decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)).rstrip(UNFINISHED)
        self.finish(text[: len(text) - self._held])

    def finish(self, text: str) -> None:
        if text.startswith(self.text):
            self._out.write(printable(text[len(self.text) :]))
            self._out.flush()
            self.text = text
