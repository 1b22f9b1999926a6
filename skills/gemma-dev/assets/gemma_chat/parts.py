"""Take apart what Gemma writes: thoughts, tool calls, the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

MARKED = re.compile(
    r"<\|channel>(?:thought)?\n?(?P<thought>.*?)(?P<end><channel\|>|\Z)"
    r"|<\|tool_call>(?P<call>.*?)(?P<called><tool_call\|>|\Z)",
    re.S,
)
STOPS = ("<turn|>", "<|tool_response>", "<end_of_turn>", "<eos>")
CONTROL = re.compile(r"<(?=\|[a-z_\"]+\|?>|[a-z_]+\|>|(?:start|end)_of_(?:turn|image)>|(?:bos|eos|pad)>)")


@dataclass(frozen=True)
class Part:
    """A piece of an answer; `kind` is "thought", "call" or "text", and `done` tells whether it is complete."""

    kind: str
    text: str
    done: bool = True


def split(raw: str) -> list[Part]:
    r"""The parts of what a model wrote so far, control tokens included.

    Example:
        split("<|channel>thought\nRed?<channel|>Red.<turn|>") == [Part("thought", "Red?"), Part("text", "Red.")]
    """
    parts, at = [], 0
    for found in MARKED.finditer(raw):
        parts.append(Part("text", raw[at : found.start()]))
        if found["call"] is None:
            parts.append(Part("thought", found["thought"], bool(found["end"])))
        else:
            parts.append(Part("call", found["call"], bool(found["called"])))
        at = found.end()
    parts.append(Part("text", raw[at:]))
    tidy = [Part(part.kind, _without_stops(part.text), part.done) for part in parts]
    return [part for part in tidy if part.text]


def _without_stops(text: str) -> str:
    text = text.strip()
    while stop := next((stop for stop in STOPS if text.endswith(stop)), None):
        text = text.removesuffix(stop).rstrip()
    return text


def plain(text: str) -> str:
    """Text in which nothing acts as a control token: those that it spells are broken up by a space.

    Example:
        plain("Hi<turn|>") == "Hi< turn|>"
    """
    return CONTROL.sub("< ", text)
