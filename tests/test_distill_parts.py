"""The parts of distill_dataset.py whose cases are many: what an answer means, what a server says, what overlaps."""

import re
import shlex
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from conftest import ROOT
from gemma_trainer.answer_filters import REFUSAL
from gemma_trainer.asked import of_text
from gemma_trainer.chat_apis import base_url, shortened, told_url
from gemma_trainer.json_answers import canonical, parse_answer
from gemma_trainer.judging import read_score
from gemma_trainer.overlaps import find_overlaps
from gemma_trainer.pacing import Budget, Pace
from gemma_trainer.refusals import retry_after
from gemma_trainer.replies import split_thought

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "address": {"type": "object", "properties": {"zip": {"type": "string"}},
                                                           "required": ["zip"]}, "note": {"type": "string"}},
    "required": ["name", "address"],
}  # fmt: skip


@pytest.mark.parametrize(
    "text, value, how, lost",
    [
        ('{"name": "A", "address": {"zip": "1"}}', {"name": "A", "address": {"zip": "1"}}, "clean", ()),
        ('```\n{"name": "A", "address": {"zip": "1"}}\n```', {"name": "A", "address": {"zip": "1"}}, "fenced", ()),
        ('```json\n{"name": "A", "address": {"zip": "1"}', {"name": "A", "address": {"zip": "1"}}, "repaired", ()),
        ("{'name': 'A', 'address': {}}", {"name": "A", "address": {}}, "repaired", ("address.zip",)),
        ('{"name": "A", "address": {"zip": "1"}, "note', {"name": "A", "address": {"zip": "1"}}, "repaired", ()),
        ("{name: A", {"name": "A"}, "repaired", ("address",)),
        ('{"name": NaN}', None, None, None),
        ("[1, 2", [1, 2], "repaired", ()),
        ("no braces", None, "lost", ()),
        ("", None, "lost", ()),
        ('"a string"', "a string", "clean", ()),
        ("[" * 100_000, None, "lost", ()),
    ],
)
def test_json_of_answers(text, value, how, lost):
    found = parse_answer(text, SCHEMA)
    if how is None:  # whatever is made of it, it is told as mended, and holds no NaN
        assert found.how in ("repaired", "lost") and "nan" not in canonical(found.value).replace('"NaN"', "").lower()
    else:
        assert (found.value, found.how, found.lost) == (value, how, lost)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("plain", ("", "plain")),
        ("<think>a</think>b", ("a", "b")),
        ("a\n</think>\n\nb", ("a", "b")),
        ("<think>never ends", ("never ends", "")),
        ("<|channel>thought\na<channel|>b", ("a", "b")),
        ("<|channel>thought\nnever ends", ("never ends", "")),
        ("say <think> aloud", ("", "say <think> aloud")),
    ],
)
def test_thoughts(text, expected):
    assert split_thought(text) == expected


@pytest.mark.parametrize(
    "text, score",
    [("7", 7), (" 8.5 / 10. ", 8.5), ("10/10", 10), ("Score: 7", None), ("7 or 8", None), ("11", None), ("0", None)],
)
def test_scores_are_read_strictly(text, score):
    assert read_score(text) == score


@pytest.mark.parametrize(
    "text, declines",
    [
        ("I'm sorry, but I can't help with that.", True),
        ("Sorry, I cannot do this.", True),
        ("As an AI language model, I have no body.", True),
        ("I cannot provide that.", True),
        ("Unfortunately, I am unable to.", True),
        ("I can help: first, ...", False),
        ("The answer is that I can't be sure.", False),
        ("Sorry is a word of five letters.", False),
    ],
)
def test_refusals(text, declines):
    assert (REFUSAL.match(text) is not None) == declines


def test_how_long_a_server_asks_to_wait():
    later = datetime.now(UTC) + timedelta(seconds=90)
    assert 85 < retry_after({"retry-after": format_datetime(later, usegmt=True)}) <= 90
    assert retry_after({"retry-after": "1.5"}) == 1.5 and retry_after({"retry-after-ms": "250"}) == 0.25
    assert [retry_after({"retry-after": value}) for value in ("soon", "-3", "", "inf", "nan")] == [
        0
    ] * 5 and retry_after({}) == 0


@pytest.mark.parametrize(
    "url, api, base",
    [
        ("http://h:8000", "openai", "http://h:8000/v1"),
        ("http://h:8000/v1/", "openai", "http://h:8000/v1"),
        ("https://h/v1beta/openai", "openai", "https://h/v1beta/openai"),
        ("http://h/v1/chat/completions", "openai", "http://h/v1"),
        ("http://h:11434/api", "ollama", "http://h:11434"),
        ("http://h:11434/api/chat", "ollama", "http://h:11434"),
    ],
)
def test_addresses(url, api, base):
    assert base_url(url, api) == base


def test_what_is_told_holds_neither_passwords_nor_media():
    assert told_url("https://me:secret@h:1/v1?key=secret#x") == "https://h:1/v1"
    assert len(str(shortened({"a": [{"url": "data:image/png;base64," + "A" * 10_000}]}))) < 200


def test_a_pace_keeps_to_requests_and_tokens():
    pace = Pace(600, None)  # ten a second
    assert [round(pace.wait(5), 1) for _ in range(4)] == [0, 0.1, 0.2, 0.3]
    pace = Pace(6000, 60_000)  # 1000 tokens a second
    assert [round(pace.wait(tokens), 1) for tokens in (500, 200, 10)] == [0, 0.5, 0.7]
    pace.hold(5)
    assert 4.9 < pace.held <= 5 and Pace(None, None).wait(10**6) == 0


def test_a_budget_reserves_the_worst_case():
    budget = Budget(1.0, 2.0, 10.0, None)
    assert budget.cost(1_000_000, 2_000_000) == 5
    assert budget.take(6) and not budget.take(6) and budget.ended == "max_cost"
    budget = Budget(1.0, 2.0, 10.0, 1e-9)
    time.sleep(0.001)
    assert not budget.take(0) and budget.ended == "max_minutes"


def test_prompts_of_one_template_are_no_copies_of_each_other():
    words = ["apple", "harbour", "violin", "meadow", "copper", "lantern", "thunder", "pepper", "glacier", "saddle",
             "compass", "orchid", "barrel", "whistle", "quarry", "ribbon"]  # fmt: skip
    template = (
        "You are a careful teacher of languages. Explain in two short sentences for a child of ten what is meant by"
    )
    prompts = [of_text(f"{template}: {word} {word[::-1]}", f"p:{at}") for at, word in enumerate(words)]
    held = [of_text(f"{template}: giraffe", "e:1"), of_text(f"{template}: violin niloiv", "e:2")]
    assert {at: found.code for at, found in find_overlaps(prompts, (), held).items()} == {2: "in_eval_data"}


def test_the_commands_of_the_reference_are_ones():
    import distill_dataset as script

    from gemma_trainer import cli

    text = (ROOT / "skills/gemma-trainer/references/distillation.md").read_text()
    found = re.findall(r"^python SKILL/assets/distill_dataset\.py (.*)$", text, re.M)
    assert len(found) >= 4
    for command in found:
        name, *arguments = shlex.split(command)
        config = cli.parse(script.COMMANDS[name][1], "", "", arguments, name)
        assert config.teacher == "URL"
    flags = set(script.InstructFlags.__dataclass_fields__) | {"prompts"}
    for flag in re.findall(r"`--([a-z-]+)", text):
        assert flag.replace("-", "_").removeprefix("no_") in flags, flag
