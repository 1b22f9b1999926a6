"""Solved examples put before a question, as earlier turns: what a model can do that is only shown the task."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping
from pathlib import Path

from .errors import RowError
from .evaluation_rows import read_item
from .rows import SOURCE
from .writing import replace_media

LOOKED_AT = 64  # examples that are looked at, for each shot wanted: enough to find some with the right kinds of media
PLAIN = ("user", "assistant")


class Shots:
    """Examples for few-shot questions, drawn at random, the same ones for all questions with the same kinds of media.

    Args:
        rows: what the examples are taken from: rows of any format that end with an answer; of a pair the chosen one, of
            choices the right one.
        count: how many are wanted before a question.
        seed: of the draw.
        collator: `MultimodalCollator`, which has to be able to read an example.
    """

    def __init__(self, rows, count: int, seed: int, collator):
        self.count, self.collator, self.room = count, copy.copy(collator), collator.max_length
        self.collator.max_length = None
        order = random.Random(seed).sample(range(len(rows)), min(len(rows), LOOKED_AT * count))
        self.pool = list(filter(None, (_example(rows, index) for index in order)))
        self.readable: dict[int, bool] = {}  # of those in the pool that were opened, by their place

    def _is_readable(self, place: int) -> bool:
        if place not in self.readable:
            try:
                counts = self.collator([self.pool[place]]).counts
            except RowError:
                counts = {}
            self.readable[place] = bool(counts.get("rows")) and not counts.get("bad_media")
        return self.readable[place]

    def before(self, *raws: dict) -> tuple[list[dict], int]:
        """Raw rows that ask the same with examples before their first turn that is not the system's, and how many.

        As many as fit into the collator's max_length in all of them; none that asks what the rows ask, and none before
        a text without turns.
        """
        if any("messages" not in raw for raw in raws):
            return list(raws), 0
        own, asked = _kinds(raws[0]), _asked(raws[0])[-1:]
        alike = sorted(range(len(self.pool)), key=lambda place: _kinds(self.pool[place]) != own)
        others = (place for place in alike if not set(asked) & set(_asked(self.pool[place])))
        chosen = [self.pool[place] for place in itertools.islice(filter(self._is_readable, others), self.count)]
        for count in range(len(chosen), 0, -1):
            rows = [_joined(raw, chosen[:count]) for raw in raws]
            if self.room is None or max(self.collator.lengths(rows)) <= self.room:
                return rows, count
        return list(raws), 0


def _example(rows, index: int) -> dict | None:
    """A row as an example: a user's and an assistant's messages by turns, or None where it is no such thing."""
    try:
        item = read_item(rows[index], f"row {index}")
    except RowError:
        return None
    if not item.scored or "messages" not in (raw := item.scored[0]):
        return None
    messages = [message for message in raw["messages"] if message["role"] not in ("system", "developer")]
    if item.choices:
        messages[-1] = {"role": "assistant", "content": item.choices[item.right]}
    plain = all(m["role"] == PLAIN[at % 2] and "tool_calls" not in m for at, m in enumerate(messages))
    if not plain or not messages or len(messages) % 2:
        return None
    messages = [{key: m[key] for key in ("role", "content")} for m in messages]  # without thoughts, as in a history
    messages = [m | {"train": False} if m["role"] == "assistant" else m for m in messages]
    return _at_home({"messages": messages, SOURCE: raw[SOURCE]})


def _at_home(raw: Mapping) -> dict:
    """A row whose media are found from any folder."""
    folder = (raw.get(SOURCE) or (None, None))[1]

    def place(value, kind):
        if isinstance(value, Mapping) and value.get("bytes") is None and value.get("array") is None:
            value = value.get("path") or value.get("url")
        if not isinstance(value, str | Path) or not folder or "://" in str(value) or str(value).startswith("data:"):
            return value
        return f"{folder}/{value}" if "://" in folder else str(Path(folder).resolve() / value)

    return replace_media(raw, place)


def _joined(raw: dict, shots: list[dict]) -> dict:
    messages = raw["messages"]
    first = next(at for at, m in enumerate(messages) if m["role"] not in ("system", "developer"))
    earlier = [message for shot in shots for message in shot["messages"]]
    return raw | {"messages": messages[:first] + earlier + messages[first:]}


def _kinds(raw: dict) -> list[str]:
    """The kinds of media of a raw row in the form of messages, in order."""
    blocks = (b for m in raw["messages"] if isinstance(m["content"], list) for b in m["content"])
    return [block["type"] for block in blocks if block["type"] != "text"]


def _asked(raw: dict) -> list[str]:
    """What a row's user says, as rows are compared; media by their values where these are names."""
    return [str(message["content"]) for message in _at_home(raw)["messages"] if message["role"] == "user"]
