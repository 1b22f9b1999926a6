"""What a teacher is asked, and what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .rows import THOUGHT, Row

THINK = re.compile(r"\s*(?:<think>)?(.*?)</think>", re.DOTALL)  # some templates open it in the prompt
OPEN_THINK = re.compile(r"\s*<think>|\s*<\|channel>thought")


@dataclass(frozen=True)
class Request:
    """One question to a teacher. `key` tells it from all others, also after a restart."""

    key: str
    row: Row
    temperature: float
    seed: int
    max_tokens: int
    schema: Mapping | None = None


@dataclass(frozen=True)
class Reply:
    """An answer. `finish` is "stop", "length" (it was cut), "refused" or what the server says; where it does not count
    tokens, `tokens_in` and `tokens_out` are None until they are `estimated`."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[Any, ...] = ()
    finish: str = "stop"
    tokens_in: int | None = None
    tokens_out: int | None = None
    estimated: bool = False

    def record(self) -> dict:
        """What is not the default, for JSON."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @classmethod
    def of(cls, record: Mapping) -> Reply:
        """What `record` made; raises TypeError where it is none."""
        known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
        reply = cls(**known | {"tool_calls": tuple(record.get("tool_calls", ()))})
        for text in (reply.text, reply.reasoning):
            check_kind(text, str)
        for count in (reply.tokens_in, reply.tokens_out):
            check_kind(count, int)  # a journal's answers are counted
        return reply


def check_kind(value, kind: type):
    """The value, which is of that kind; raises TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"no {kind.__name__}")
    return value


@dataclass(frozen=True)
class Failure:
    """Why a request has no answer. `own` says that the fault lies in the row, and says nothing of the server."""

    code: str
    reason: str
    own: bool = False


def split_thought(text: str, reasoning: str = "") -> tuple[str, str]:
    """(reasoning, answer) of a text that may begin with `<think>...</think>` or Gemma's thought channel.

    Thoughts that never end leave no answer.

    Example:
        "<think>2 + 2</think>\\n4" gives ("2 + 2", "4").
    """
    if OPEN_THINK.match(text) and not (THOUGHT.match(text) or "</think>" in text):
        found, said = OPEN_THINK.sub("", text, count=1), ""
    else:
        thought = THOUGHT.match(text) or ("</think>" in text and THINK.match(text))
        found, said = (thought[1], text[thought.end() :]) if thought else ("", text)
    return "\n".join(filter(None, (reasoning.strip(), found.strip()))), said.strip()
