"""The reward model's texts, in the words of two unlike tokenizers, and its part in the scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import models
import numpy as np
import pytest
from tensors import forward_micro_batches
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from fulltilt.batching.pack import MicroSizing
from fulltilt.records import Finish, Group, Prompt, Sample, Score, UserError
from fulltilt.reward.model import RewardEncoder, add_model_scores, model_weight
from fulltilt.schema import RewardConfig

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"})


def other_tokenizer(template: str | None = CHAT, *, writes_end: bool = False) -> PreTrainedTokenizerFast:
    """Of another kind than the policy's (models.tokenizer): byte-level pieces, a beginning token of its own, a template of its own."""
    inner = Tokenizer(token_models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<begin>", "<|im_start|>", "<|im_end|>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(["the answer is five, system user assistant"] * 4, trainer)
    ends = [("<begin>", 0), ("<end>", 3)]
    inner.post_processor = processors.TemplateProcessing(single=f"<begin> $A{' <end>' * writes_end}", special_tokens=ends)
    result = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<begin>", eos_token="<end>")
    result.chat_template = template
    return result


def group_of(
    source: str | tuple[dict[str, Any], ...], texts: Sequence[str], uid: int = 0, finish: Finish = "stop", data_source: str = "unknown"
) -> Group:
    ids = np.array([5, 6], dtype=np.int64)
    samples = tuple(Sample(index, ids, np.zeros(2, np.float32), finish, text) for index, text in enumerate(texts))
    return Group(Prompt(uid, ids, "decoded", data_source, source=source), samples)


def written(encoder_tokenizer: PreTrainedTokenizerFast, groups: Sequence[Group], longest: int | None = None) -> list[str]:
    rows = RewardEncoder(encoder_tokenizer, longest).rows(groups)
    return [encoder_tokenizer.decode(row.ids, clean_up_tokenization_spaces=False) for row in rows]


def test_messages_go_through_the_reward_models_own_template() -> None:
    groups = [group_of(ASKED, ["five", "6"]), group_of(ASKED[1:], [""])]
    begins = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    alone = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    # Neither the tokenizer's beginning token nor its end token: the template writes none.
    assert written(other_tokenizer(), groups) == [f"{begins}five<|im_end|>\n", f"{begins}6<|im_end|>\n", alone]
    assert written(models.tokenizer(), groups)[0] == "<s>s:Be brief.\nu:2+3?\na:five\n"


def test_rows_are_marked_at_the_last_token_and_know_their_group() -> None:
    groups = [group_of(ASKED, ["five", "6"]), group_of("2+3=", ["5"], uid=9)]
    rows = RewardEncoder(other_tokenizer()).rows(groups)
    assert [row.group for row in rows] == [0, 0, 1]
    for row in rows:
        assert row.ids.dtype == np.int64 and row.mask.dtype == np.bool_
        assert row.mask.tolist() == [False] * (len(row.ids) - 1) + [True]
    (micro,) = forward_micro_batches(rows, MicroSizing(10_000, None))
    assert micro.trained.tolist() == (micro.cu_seqlens[1:] - 1).tolist()


@pytest.mark.parametrize(
    ("writes_end", "finish", "expected"),
    [
        (False, "stop", "<begin>2+3=5<end>"),
        (False, "length", "<begin>2+3=5"),
        (True, "stop", "<begin>2+3=5<end>"),
        (True, "length", "<begin>2+3=5<end>"),
    ],
)
def test_strings_stay_plain_whatever_template_there_is(writes_end: bool, finish: Finish, expected: str) -> None:
    for template in (CHAT, None):
        assert written(other_tokenizer(template, writes_end=writes_end), [group_of("2+3=", ["5"], finish=finish)]) == [expected]


def test_text_in_parts_is_written_as_text() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
    asked = (ASKED[0], {"role": "user", "content": parts})
    assert written(other_tokenizer(), [group_of(asked, ["5"])]) == written(other_tokenizer(), [group_of(ASKED, ["5"])])


def test_messages_without_a_template_are_refused() -> None:
    encoder = RewardEncoder(other_tokenizer(None))
    with pytest.raises(UserError, match=r"the reward model's tokenizer has no chat template\. Set reward_model\.chat_template"):
        encoder.rows([group_of(ASKED, ["five"])])
    with pytest.raises(UserError, match="no chat template"):
        encoder.check([group_of("2+3=", []).prompt, group_of(ASKED, []).prompt])


def test_a_conversation_that_the_template_cannot_write_is_refused() -> None:
    encoder = RewardEncoder(other_tokenizer())
    tool = (*ASKED, {"role": "tool", "content": "5"})
    with pytest.raises(UserError, match=r"cannot write this conversation: no tools here.*reward_model\.chat_template"):
        encoder.rows([group_of(tool, ["five"])])
    encoder.check([group_of(ASKED, []).prompt])
    with pytest.raises(UserError, match="no tools here"):
        encoder.check([group_of(ASKED, []).prompt, group_of(tool, []).prompt])


def test_a_text_beyond_the_models_context_is_a_failed_reward_and_never_cut() -> None:
    group = group_of("12345678", ["90"], uid=41)
    assert written(models.tokenizer(), [group], longest=11) == ["1234567890</s>"]
    (why,) = RewardEncoder(models.tokenizer(), 10).rows([group])
    assert why == "the reward model reads at most 10 tokens, prompt and response have 11 in its tokenizer"
    (failed,) = add_model_scores([group], [[Score(0.0)]], [why], RewardConfig(function="reward_model"))
    assert failed == [Score(0.0, error=why)]
    policy = RewardConfig(function="reward_model", on_error="score", error_score=-1.0)
    assert add_model_scores([group], [[Score(0.0)]], [why], policy) == [[Score(-1.0, error=why)]]
    RewardEncoder(models.tokenizer(), 10).check([group.prompt])
    with pytest.raises(UserError, match=r"prompt 41 cannot be scored: the reward model reads at most 9 tokens"):
        RewardEncoder(models.tokenizer(), 9).check([group.prompt])


# The part in the scores

CONFIG = RewardConfig(function={"gsm8k": 1.0, "reward_model": 0.5}, sources={"rule": "gsm8k", "model": "reward_model"})


def test_the_models_numbers_are_added_where_the_reward_names_it() -> None:
    groups = [group_of("a", ["x", "y"], data_source=source) for source in ("anything", "rule", "model")]
    rules = [[Score(1.0, {"gsm8k": 1.0}, answer="5"), Score(0.0)], [Score(1.0), Score(0.0)], [Score(0.0), Score(0.0)]]
    both, rule, model = add_model_scores(groups, rules, [4.0, np.float32(-2.0), 0.25, 7.0], CONFIG)
    assert both == [Score(3.0, {"gsm8k": 1.0, "reward_model": 4.0}, answer="5"), Score(-1.0, {"reward_model": -2.0})]
    assert rule == rules[1]
    assert model == [Score(0.25, {"reward_model": 0.25}), Score(7.0, {"reward_model": 7.0})]
    assert [model_weight(group, CONFIG) for group in groups] == [0.5, None, 1.0]


def test_a_failed_function_stays_failed() -> None:
    failed = Score(-7.0, error="raised")
    assert add_model_scores([group_of("a", ["x"])], [[failed]], [4.0], CONFIG) == [[failed]]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stops_the_run(number: float) -> None:
    with pytest.raises(UserError, match=rf"the reward model gave {number:g} .*'unknown' that begins 'second'.*reward_model\.path"):
        add_model_scores([group_of("a", ["first", "second"])], [[Score(0.0)] * 2], [1.0, number], CONFIG)


def test_every_sample_has_its_number() -> None:
    with pytest.raises(ValueError, match="zip"):
        add_model_scores([group_of("a", ["x", "y"])], [[Score(0.0)] * 2], [1.0], CONFIG)
