"""Random conversations through every Gemma chat template: what is trained, and behind which prompt.

GEMMA_SKILLS_EXAMPLES sets how many conversations each template is tried with.
"""

import base64
import copy
import dataclasses
import functools
import io
import os
import re
from itertools import groupby

import pytest
import tiny
import trl.chat_template_utils as templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from test_labels import with_empty_thought

from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.rows import read_row, strings_in
from gemma_trainer.slots import blocks_of

EXAMPLES = int(os.environ.get("GEMMA_SKILLS_EXAMPLES", 150))
# Diffusion Gemma is another model.
SHIPPED = [
    name.removesuffix("_chat_template") for name in dir(templates) if re.fullmatch(r"gemma\w*_chat_template", name)
]
TEMPLATES = [*SHIPPED, "gemma3n", *(f"{name}+empty-thought" for name in SHIPPED if name.startswith("gemma4"))]
REFUSALS = (
    "the chat template refuses the row",
    "tools or tool calls in the row",
    "the chat template shows",
    "a tool message whose tool_call_id is that of no call",
    "media both in an answer and in a tool result",
)

# No text has a "z" but the words that tell a message's texts apart.
TEXTS = ["", " ", "\n", "  a", "b \n", "\n\nc\n\n\nd", "e\u0301 ée", "👩‍🚒", "שלום\u200f", "مرحبا", "naïve ﬁ 雪",
         "\x00", "x\ty", "\u2028", "\r\n", "\ue000\uf8fd\uf8fe", "\U000f0000\U0010fffd", "{'type': 'text'}",
         "model\n", "thought\n"]  # fmt: skip
CONTROL = ["<|turn>model\n", "<turn|>", "<|channel>thought\n", "<channel|>", "<|tool_response>", "<|image|>",
           "<tool_call|>", "<bos>", "<eos>", "<pad>", "<|think|>", "<start_of_turn>model\n", "<end_of_turn>",
           "<start_of_image>", "<image_soft_token>", "<|tu", "rn>", '<|"|>']  # fmt: skip


def _picture():
    file = io.BytesIO()
    Image.new("RGB", (20, 12), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


PICTURE_TEXT = {"gemma3": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
                "gemma3n": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
                "gemma4": "<|image><|image|><image|>"}  # fmt: skip
PICTURE = {"type": "image", "image": _picture()}


@functools.cache
def make_processor(name):
    template, _, empty_thought = name.partition("+")
    if template == "gemma3n":
        return tiny.make_processor("gemma3n")
    text = getattr(templates, f"{template}_chat_template")
    family = next((family for family in ("gemma4", "gemma3") if template.startswith(family)), "gemma3_text")
    return tiny.make_processor(family, with_empty_thought(text) if empty_thought else text)


@functools.cache
def make_collator(name, **options):
    return MultimodalCollator(make_processor(name), None, **options)


# ---- conversations


class Draw:
    """Draws the parts of one conversation; every text that is not blank has a word of its own, `z<number>z`."""

    def __init__(self, draw):
        self.draw, self.words = draw, 0
        self.control = self.often(1)
        self.tools, self.pictures = self.often(5), self.often(3)

    def often(self, tenths):
        return self.draw(st.integers(1, 10)) > 10 - tenths

    def text(self, blank=2):
        kinds = TEXTS + CONTROL if self.control else TEXTS
        before, after = self.draw(st.sampled_from(kinds)), self.draw(st.sampled_from(kinds))
        if self.often(blank):
            return self.draw(st.sampled_from(["", " ", "\n"]))
        self.words += 1
        return f"{before}z{self.words}z{after}"

    def content(self, pictures=False):
        """A string or blocks."""
        if self.often(7):
            return self.text()
        blocks = [{"type": "text", "text": self.text()} for _ in range(self.draw(st.integers(0, 2)))]
        if pictures and self.pictures:
            blocks.insert(self.draw(st.integers(0, len(blocks))), PICTURE)
        return blocks

    def calls(self):
        kinds = (self.text(0), [self.text(0)], {self.text(0): 1, "b": True}, 2.5)
        arguments = {self.text(0): self.draw(st.sampled_from(kinds)), "city": self.text(0)}
        function = {"name": "look", "arguments": arguments}
        return [{"id": f"c{i}", "type": "function", "function": function} for i in range(self.draw(st.integers(1, 2)))]

    def assistant(self, tools):
        message = {"role": self.draw(st.sampled_from(["assistant", "assistant", "model"])), "content": self.content()}
        if tools:
            message |= {"tool_calls": self.calls(), "content": self.content() if self.often(5) else ""}
        if self.often(3):
            message["reasoning"] = self.text(0)
        if self.often(2):
            message["train"] = False
        return message

    def turn(self):
        yield {"role": "user", "content": self.content(pictures=True)}
        for _ in range(self.draw(st.integers(0, 2)) if self.tools else 0):
            message = self.assistant(tools=True)
            yield message
            results = 2 if self.often(1) else self.draw(st.integers(0, len(message["tool_calls"])))
            for number in range(results):
                yield {"role": "tool", "tool_call_id": f"c{number}", "content": self.content(pictures=self.often(3))}
        for _ in range(self.draw(st.integers(0, 10)) // 4 if self.often(2) else 1):
            yield self.assistant(tools=False)
        if self.often(1):
            yield {"role": self.draw(st.sampled_from(["user", "system", "developer"])), "content": self.content()}


@st.composite
def conversations(draw):
    drawn = Draw(draw)
    first = draw(st.sampled_from([None, None, "system", "developer", "assistant"]))
    messages = [{"role": first, "content": drawn.content()}] if first else []
    for _ in range(draw(st.integers(1, 6))):
        messages += drawn.turn()
    row = {"messages": messages}
    if drawn.tools and drawn.often(8):
        city = {"type": "string", "description": drawn.text()}
        function = {
            "name": "look",
            "description": drawn.text(),
            "parameters": {"type": "object", "properties": {"city": city}},
        }
        row["tools"] = [{"type": "function", "function": function}]
    return row


# ---- what a row must give


def words(value):
    """The telling words of a text, or of all texts in a message."""
    return set(re.findall(r"z\d+z", value if isinstance(value, str) else repr(value)))


def one_soft_token(collator, ids, labels):
    """Ids and labels with each run of media soft tokens shortened to one."""
    soft, kept = set(collator.soft_tokens.values()), []
    for at, token in enumerate(ids):
        if token not in soft or ids[at - 1] != token:
            kept.append(at)
    return [ids[at] for at in kept], [labels[at] for at in kept]


def runs_of(labels):
    """[start, end) of each trained run."""
    edges = [at for at in range(1, len(labels) + 1) if (labels[at - 1] == -100) != ([*labels, -100][at] == -100)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def prompts(collator, row, thinking):
    """The tokens of every prompt that the model stands before while the row's talk goes on."""
    asked = dataclasses.replace(row, messages=[{"role": "user", "content": "x"}])
    start = collator.renderer.generation_prompt(asked, 1, thinking)
    family = collator.family
    start = start.replace(f"{family.turn_start}user\nx{family.turn_end}\n", "")  # a talk that the model begins
    found = {tuple(collator.tokenizer(start, add_special_tokens=False)["input_ids"])}
    for count in range(1, len(row.messages) + 1):
        called = max((i for i in range(count) if "tool_calls" in row.messages[i]), default=None)
        for blanked in {None, called}:  # words beside a call come behind the results in some templates
            messages = [m | {"content": ""} if i == blanked else m for i, m in enumerate(row.messages)]
            try:
                talk = dataclasses.replace(row, messages=messages)
                text = collator.renderer.generation_prompt(talk, count, thinking)
            except RowError:  # a template that wants a user's message before the model's
                continue
            text = collator.renderer.slot.sub(PICTURE_TEXT[collator.family.name], text)
            found.add(tuple(collator.tokenizer(text, add_special_tokens=False)["input_ids"]))
    return found


def expected_inexact(collator, row, ids, runs, thinking):
    """How many steps of the model, one or more in a trained run, stand behind no prompt."""
    possible, inexact = prompts(collator, row, thinking), 0
    for start, end in runs:
        said = words(collator.tokenizer.decode(ids[start:end]))
        saying = [i for i, message in enumerate(row.messages) if words(message) & said]
        inexact += (tuple(ids[:start]) not in possible) + max(0, len(saying) - 1)
    return inexact


def check_words(collator, row, ids, trained, stops, last_turn):
    """Every text stands in the row, and the model's own, no other, are trained; those dropped are counted."""
    text = collator.tokenizer.decode(ids)
    said, shown, dropped = words(trained), words(text), 0
    untrained = [message for message in row.messages if message.get("train") is False]
    # Steps that a template runs together are trained only if all are.
    parts = [words(collator.tokenizer.decode(list(part))) for _, part in groupby(ids, lambda token: token in stops)]
    beside = set().union(*(part for part in parts if part & words(untrained)))
    for position, message in enumerate(row.messages):
        for block in blocks_of(message["content"]):
            assert block.get("text", "").strip() in text
        reasoned = words(message.get("reasoning", ""))
        assert words(message) - reasoned <= shown
        dropped += bool(reasoned) and not reasoned & shown
        if message["role"] != "assistant" or "train" in message or position < last_turn:
            assert not words(message) & said
        else:
            ignored = beside if collator.labeller.train_reasoning else beside | reasoned
            assert words(message) & shown - ignored <= said
    assert collator.stats.reasoning_dropped == dropped


def last_turn_of(name, row):
    """Where the last model turn begins."""
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"] or [0]
    start = answers[-1]
    while "gemma4_v2" not in name and start > 0 and row.messages[start - 1]["role"] in ("tool", "assistant"):
        start -= 1
    return start


def check(name, collator, raw):
    before = copy.deepcopy(raw)
    collator.stats.reset()
    try:
        batch = collator([raw])
    except RowError as problem:
        assert "image in the row" in problem.reason and "image" not in collator.modalities
        return
    assert raw == before
    if collator.stats.bad_rows:
        assert batch.problems[0][1].startswith(REFUSALS)
        return
    tokenizer, markers, row = collator.tokenizer, collator.labeller.markers, read_row(raw)
    ids, labels = one_soft_token(collator, batch["input_ids"][0].tolist(), batch["labels"][0].tolist())
    assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    assert not markers.media & set(labels)
    runs = runs_of(labels)
    stops = {markers.turn_start, markers.turn_end, markers.response, markers.response_end} - {None}
    for start, end in runs:
        assert not stops & set(ids[start : end - 1])
        assert ids[end - 1] in (markers.turn_end, markers.response) or ids[end : end + 1] == [markers.channel]
    trained = "".join(tokenizer.decode(ids[start:end]) for start, end in runs)
    last_turn = last_turn_of(name, row) if collator.labeller.loss_on == "last-turn" else 0
    check_words(collator, row, ids, trained, stops, last_turn)
    think = tokenizer.get_vocab().get("<|think|>")
    shows_thoughts = collator.stats.reasoning_dropped < sum("reasoning" in message for message in row.messages)
    switched = {"on": think is not None, "off": False, "auto": shows_thoughts}
    assert (think in ids) == switched[collator.renderer.thinking]
    plain = not collator.renderer.control.search("".join(strings_in((row.messages, row.tools))))
    if plain and collator.labeller.train_reasoning:
        assert collator.stats.inexact_turns == expected_inexact(collator, row, ids, runs, think in ids)


@settings(max_examples=EXAMPLES, derandomize="GEMMA_SKILLS_EXAMPLES" not in os.environ, database=None, deadline=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(raw=conversations(), loss_on=st.sampled_from(["all-turns", "last-turn"]),
       thinking=st.sampled_from(["auto", "on", "off"]),
       train_reasoning=st.sampled_from([True, True, False]))  # fmt: skip
@pytest.mark.parametrize("name", TEMPLATES)
def test_any_conversation(name, raw, loss_on, thinking, train_reasoning):
    collator = make_collator(name, loss_on=loss_on, thinking=thinking, train_reasoning=train_reasoning)
    check(name, collator, raw)
