"""Lengths of rows: the collator's own where it matters, and else a bound that is never less."""

import random

import pytest
import tiny

from conftest import ask, talk
from gemma_trainer import demo
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.labels import IGNORE
from gemma_trainer.rows import read_row
from gemma_trainer.tokens import TokenChecker

PIECES = [
    "word",
    "größer",
    "価格",
    "😀",
    "\n",
    "  ",
    "<turn|>",
    "<|image|>",
    "<start_of_turn>user\n",
    "a\tb",
    "1,000",
    ".",
    "x" * 40,
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def random_rows(count, seed=0, system=True):
    rng = random.Random(seed)
    for _ in range(count):
        said = [" ".join(rng.choices(PIECES, k=rng.randint(0, 12))) for _ in range(2 * rng.randint(1, 3))]
        row = talk(*said)
        if rng.random() < 0.3:
            row["messages"][0]["content"] = [{"type": "text", "text": part} for part in (said[0], "and", " ")]
        if system and rng.random() < 0.3:
            row["messages"].insert(0, {"role": "system", "content": rng.choice(PIECES)})
        yield row if rng.random() < 0.9 else {"text": said[0] + "x"}


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_bound_is_never_less_than_the_length(name):
    checker = TokenChecker(MultimodalCollator(tiny.make_processor(name), None))
    rows = [read_row(row) for row in random_rows(150, system=name.startswith("gemma4"))]
    plain = 0
    for row, length in zip(rows, checker.measure(rows), strict=True):
        shape = checker.shape(row)
        if isinstance(length, RowError):
            assert shape is None or shape.error
            continue
        texts = [row.text] if row.text is not None else [
            block if isinstance(block, str) else block["text"]
            for message in row.messages
            for block in ([message["content"]] if isinstance(message["content"], str) else message["content"])
        ]  # fmt: skip
        assert length.tokens <= shape.cost + sum(len(text.encode()) for text in texts), row
        assert row.text is not None or shape.inexact == length.inexact
        plain += 1
    assert plain > 100


def test_media_count_with_their_own_tokens(processor, media):
    checker = TokenChecker(MultimodalCollator(processor, None))
    row = read_row(ask(media, "three.wav", "red.png"))
    assert checker.measure([row])[0].tokens == len(
        checker.collator([ask(media, "three.wav", "red.png")])["input_ids"][0]
    )
    from gemma_trainer.inspection import inspect

    soft = sum(checker.soft_tokens(inspect(medium)) for medium in row.media)
    assert checker.measure([row])[0].tokens <= checker.shape(row).cost + soft + len("What is it?Yes.")
    assert soft > 75


@pytest.mark.parametrize("limit", [20, 40, 90, 200])
def test_lengths_and_losses_are_the_collators(processor, media, limit):
    collator = MultimodalCollator(processor, limit)
    called = [*talk("Weather?")["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    raws = [ask(media, "one.wav"), ask(media, "three.wav", "red.png"), *random_rows(40, seed=1), {"messages": called}]
    for raw, length in zip(raws, TokenChecker(collator).measure([read_row(raw) for raw in raws]), strict=True):
        batch = collator([raw])
        assert length.kept == batch["attention_mask"].sum() and length.tokens >= length.kept
        assert length.kept_trained == (batch["labels"] != IGNORE).sum()
        assert bool(batch.counts.get("truncated")) == (length.tokens > limit)
        assert bool(batch.counts.get("cut_to_nothing")) == bool(length.trained and not length.kept_trained)


def test_a_shape_is_rendered_once_and_a_refused_one_is_told(monkeypatch):
    checker = TokenChecker(MultimodalCollator(tiny.make_processor("gemma3_text"), None))
    count, measure = [], checker.collator.measure
    monkeypatch.setattr(
        checker.collator, "measure", lambda rows, *rest: count.append(len(rows)) or measure(rows, *rest)
    )
    for number in range(20):
        assert not checker.shape(read_row(talk(f"question {number}", f"answer {number}"))).error
    assert len(count) == 1
    refused = checker.shape(read_row(talk("a", "b", "c") | {"messages": [{"role": "assistant", "content": "x"}]}))
    assert refused.error and refused.error.code == "template_refuses"


def test_an_answer_whose_first_tokens_join_the_prompts_is_told():
    """Gemma 3 has one token for two line breaks: where a template does not trim, they swallow that of the header."""
    processor = tiny.make_processor("gemma3_text")
    raw = processor.chat_template.replace("message['content'] | trim", "message['content']")
    raw = raw.replace("item['text'] | trim", "item['text']")
    trimmed = TokenChecker(MultimodalCollator(processor, None)).measure([read_row(talk("Hi", "\nHello"))])[0]
    assert not trimmed.split
    processor.chat_template = raw
    whole = TokenChecker(MultimodalCollator(processor, None))
    found = whole.measure([read_row(talk("Hi", answer)) for answer in ("\nHello", "Hello\n", "Hello")])
    assert [length.split for length in found] == [True, False, False]


def test_earlier_turns_that_lack_the_prompts_tail_are_inexact_whatever_their_text(processor):
    template = demo.chat_template()
    ending = "{{- '<|turn>model\\n' -}}"
    if ending not in template:
        pytest.fail("the template's generation prompt is not where this test looks for it")
    from copy import deepcopy

    other = deepcopy(processor)
    other.chat_template = template.replace(ending, "{{- '<|turn>model\\n<|channel>thought\\n<channel|>' -}}")
    checker = TokenChecker(MultimodalCollator(other, None))
    rows = [read_row(talk(*said)) for said in (("a", "b"), ("a", "b", "c", "d"), ("x", "y", "z", "w"))]
    assert [checker.shape(row).inexact for row in rows] == [0, 1, 1]
    assert [length.inexact for length in checker.measure(rows)] == [0, 1, 1]
