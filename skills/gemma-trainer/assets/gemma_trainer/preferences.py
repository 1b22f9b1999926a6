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
                raise Fault(code, f"no {key} answer; accepted: {ACCEPTED_PREFERENCES}")
        chosen, rejected = (_answer(fields[key]) for key in ("chosen", "rejected"))
        given = read_messages(fields["prompt"], "user") if "prompt" in fields else []
        prompt = with_system(fields, given) if given else read_request(fields)
        if any(answer[0]["role"] != "assistant" for answer in (chosen, rejected)):
            prompt, chosen, rejected = _common_prompt(prompt, chosen, rejected)
        if not prompt and any(isinstance(fields[key], str) and HH.match(fields[key]) for key in ("chosen", "rejected")):
            raise Fault("unknown_format", "conversations in one string (HH-RLHF): convert them to preference")
        if not prompt:
            raise Fault("no_common_prompt", f"no prompt; accepted: {ACCEPTED_PREFERENCES}")
        if prompt[-1]["role"] not in ("user", "tool"):
            raise Fault("no_common_prompt", "the prompt must end with a message of the user or of a tool")
        prompt = untrained(prompt)
        sides = [make_row(name, folder, fields, prompt + answer) for answer in (chosen, rejected)]
        shared = len(make_row(name, folder, fields, prompt).messages)
        sides[0].margin = _margin(fields.get("margin"))
        return Preference(name, *sides, shared)


def as_conversation(raw: Mapping) -> dict:
    """A preference row as a row with its chosen answer; empty where it has another form."""
    rest = {
        key: value for key, value in raw.items() if key not in ("chosen", "rejected", "margin") and value is not None
    }
    if "prompt" in rest:
        return rest | {"completion": raw["chosen"]}
    whole = isinstance(raw["chosen"], list) and "messages" not in rest and "conversations" not in rest
    return rest | {"messages": raw["chosen"]} if whole else {}


def _answer(value) -> list[dict]:
    """An answer as messages: a string, one message, or a list of them."""
    return read_messages([value] if isinstance(value, Mapping) else value, "assistant")


def _common_prompt(prompt, chosen, rejected):
    """(prompt, chosen, rejected) of two whole conversations: their common beginning, up to an answer of each."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    while same and not all(len(side) > same and side[same]["role"] == "assistant" for side in (chosen, rejected)):
        same -= 1
    if not same:
        raise Fault("no_common_prompt", "chosen and rejected are conversations without a common beginning")
    if prompt and not any(message in chosen[:same] for message in prompt):
        raise Fault("no_common_prompt", "the prompt is not what the chosen and rejected conversations begin with")
    return chosen[:same], chosen[same:], rejected[same:]


def _margin(value) -> float | None:
    if value is None:
        return None
    try:
        margin = float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise Fault("bad_value", "margin must be a number")
    return margin
