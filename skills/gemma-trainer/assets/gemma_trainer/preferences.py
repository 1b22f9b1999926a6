"""Preference rows: one prompt with a chosen and a rejected answer, each read into a canonical row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import Fault
from .rows import Row, make_row, opened, read_messages, read_request, untrained, with_system
from .slots import Media, blocks_of

ACCEPTED_PREFERENCES = (
    "prompt (or messages, conversations, instruction) + chosen + rejected, strings or messages; or chosen and rejected "
    "as whole conversations that begin alike"
)
ASKING = ("user", "tool")  # whose messages an answer follows
HH = re.compile(r"\s*Human:")  # how the strings of HH-RLHF begin


@dataclass
class Preference:
    """A prompt with two answers. `chosen` and `rejected` are whole rows, whose first `shared` messages are the prompt;
    their media in the prompt are the same ones, in the same order.
    """

    name: str
    chosen: Row
    rejected: Row
    shared: int

    @property
    def margin(self) -> float | None:
        """By how much the chosen answer is better, where the row says so."""
        return self.chosen.margin

    @property
    def media(self) -> list[Media]:
        """The media of the prompt, of the chosen answer, and of the rejected one."""
        blocks = (block for m in self.rejected.messages[: self.shared] for block in blocks_of(m["content"]))
        return self.chosen.media + self.rejected.media[sum(block["type"] != "text" for block in blocks) :]


def read_preference(raw: Mapping, name: str = "row") -> Preference:
    """Turn one preference row of any accepted format into a `Preference`.

    Args:
        raw: the row as read, e.g. `{"prompt": "Name a fruit", "chosen": "Pear", "rejected": "Chair"}`.
        name: what errors call it, where the row does not bring its own name.

    Raises:
        RowError: the row is in no known format, its answers share no prompt, or something in it cannot be read.
    """
    with opened(raw, name) as (name, folder, fields):
        for key in ("chosen", "rejected"):
            if key not in fields:
                code = "wrong_task" if not fields.keys() & {"chosen", "rejected"} else "missing_field"
                others = " (rows without any are for sft_train.py)" * (code == "wrong_task")
                raise Fault(code, f"no {key} answer{others}; accepted: {ACCEPTED_PREFERENCES}")
        chosen, rejected = (_answer(fields[key], key) for key in ("chosen", "rejected"))
        prompt = read_messages(fields["prompt"], "user") if "prompt" in fields else read_request(fields)
        if any(answer[0]["role"] != "assistant" for answer in (chosen, rejected)):
            prompt, chosen, rejected = _common_prompt(prompt, chosen, rejected)
        if not prompt and any(isinstance(fields[key], str) and HH.match(fields[key]) for key in ("chosen", "rejected")):
            raise Fault("unknown_format", "conversations in one string (HH-RLHF): convert them to preference")
        if not prompt:
            raise Fault("no_common_prompt", f"no prompt; accepted: {ACCEPTED_PREFERENCES}")
        if prompt[-1]["role"] not in ASKING:
            raise Fault("no_common_prompt", "the prompt must end with a message of the user or of a tool")
        prompt = with_system(fields, untrained(prompt))
        asked, *sides = (make_row(name, folder, fields, prompt + answer) for answer in ([], chosen, rejected))
        shared = len(asked.messages)
        if any(side.messages[:shared] != asked.messages for side in sides):
            raise Fault("media_without_placeholder", "media columns, which are the prompt's, with a place in an answer")
        sides[0].margin = _margin(fields.get("margin"))
        return Preference(name, *sides, shared)


def share_preferred(margins: list[float]) -> float:
    """The share of pairs whose chosen answer is liked better, by their margins; a tie is half."""
    return sum((margin > 0) + 0.5 * (margin == 0) for margin in margins) / max(1, len(margins))


def _answer(value, key: str) -> list[dict]:
    """An answer as messages: a string, one message, or a list of them."""
    if not isinstance(value, str | Mapping) and not (isinstance(value, list) and value):
        raise Fault("missing_field", f"{key} must be a string or a list with at least one message")
    return read_messages([value] if isinstance(value, Mapping) else value, "assistant")


def _common_prompt(prompt, chosen, rejected):
    """(prompt, chosen, rejected) of two whole conversations: their common beginning, up to an answer of each. What a
    prompt of their own has before that, the system's words or earlier turns, stays before it."""
    same = 0
    while same < min(len(chosen), len(rejected)) and _alike(chosen[same], rejected[same]):
        same += 1
    while same and not _parts_at(same, chosen, rejected):
        same -= 1
    if not same:
        raise Fault("no_common_prompt", "chosen and rejected are conversations without a common beginning")
    common, before = chosen[:same], []
    if not (_alike(prompt[:same], common) or all(any(_alike(m, other) for other in common) for m in prompt)):
        joint = next((n for n in range(min(len(prompt), same), 0, -1) if _alike(prompt[-n:], common[:n])), None)
        if joint is None:
            raise Fault("no_common_prompt", "the prompt is not what the chosen and rejected conversations begin with")
        before = prompt[:-joint]
    return before + common, chosen[same:], rejected[same:]


def _parts_at(position: int, chosen: list[dict], rejected: list[dict]) -> bool:
    """Whether a prompt may end before this position, and an answer of each conversation begin there."""
    answers = (side[position]["role"] == "assistant" for side in (chosen, rejected) if len(side) > position)
    return chosen[position - 1]["role"] in ASKING and list(answers) == [True, True]


def _alike(one, other) -> bool:
    """Whether messages, or parts of them, are equal, arrays of pixels or samples included."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # arrays compare number by number, if they can
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(_alike, one, other))
        return getattr(one, "shape", 0) == getattr(other, "shape", 1) and bool((one == other).all())


def _margin(value) -> float | None:
    if value is None:
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not abs(margin) < 3e38:  # NaN, or more than a float32 holds
        raise Fault("bad_value", "margin must be a number")
    return margin
