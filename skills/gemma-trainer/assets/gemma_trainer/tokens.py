"""How long rows are and what is trained in them: exactly where it matters, else by a bound that costs next to nothing.

A token is at least one byte of text, so a row whose bytes, template and media are fewer than max_len cannot be over it.
What the template adds depends on a row's shape alone (its roles, and which of its parts are text, blank or media): the
first row of each shape is rendered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .collator import Measured, MultimodalCollator
from .errors import RowError
from .features import clip_tokens, image_tokens
from .inspection import Facts
from .labels import IGNORE
from .rows import Row
from .slots import Media, blocks_of

MAX_SHAPES = 10_000
TELLING = {"tool_calls", "reasoning"}  # parts of a message whose rendering cannot be told from another row's


@dataclass(frozen=True)
class Shape:
    """What rows of one shape share: the most tokens that the template can add, or why it refuses them; how many trained
    turns are inexact."""

    cost: int = 0
    inexact: int = 0
    error: RowError | None = None


@dataclass(frozen=True)
class Length:
    """A measured row: tokens before and within max_length, trained ones likewise, media that go with the cut."""

    tokens: int
    kept: int
    trained: int
    kept_trained: int
    media_cut: int
    reasoning_dropped: int
    inexact: int
    split: bool


class TokenChecker:
    """Measures rows with a collator."""

    def __init__(self, collator: MultimodalCollator):
        self.collator, self.renderer = collator, collator.renderer
        self.tail = max(len(collator.labeller.tail(thinking)) for thinking in (False, True))
        self._shapes: dict[tuple, Shape] = {}

    def shape(self, row: Row) -> Shape | None:
        """The shape of a row; None for one that has to be rendered itself: with tools, calls, or reasoning."""
        if row.text is not None:
            return Shape(cost=2)
        if row.tools or any(m["role"] == "tool" or (len(m) > 2 and TELLING & m.keys()) for m in row.messages):
            return None
        key = tuple((m["role"], m.get("train"), _outline(m["content"])) for m in row.messages)
        if key not in self._shapes:
            if len(self._shapes) >= MAX_SHAPES:
                return None
            self._shapes[key] = self._probe(row)
        return self._shapes[key]

    def _probe(self, row: Row) -> Shape:
        """Render a row of the same shape, each text one letter."""
        messages = [message | {"content": _emptied(message["content"])} for message in row.messages]
        bare = Row(row.name, messages, media=[Media(medium.kind, None) for medium in row.media], trained=row.trained)
        found = self.collator.measure([bare])[0]
        if isinstance(found, RowError):
            return Shape(error=found)
        text = found.rendered.text
        controls = self.renderer.control.findall(text)
        letters = sum(block["text"] == "x" for m in messages for block in blocks_of(m["content"]) if "text" in block)
        around = 2 * (1 + len(self.collator.family.around_media)) * len(row.media)  # begin and end tokens, line breaks
        plain = len(self.renderer.control.sub("", text).encode()) - letters
        return Shape(1 + len(controls) + plain + around + self.tail, found.inexact_turns)

    def soft_tokens(self, facts: Facts) -> int:
        """The soft tokens of a medium that can be read."""
        processor, family = self.collator.processor, self.collator.family
        if facts.size:
            return image_tokens(processor, family, *facts.size)
        return clip_tokens(processor, family, math.ceil(facts.seconds * processor.feature_extractor.sampling_rate))

    def measure(self, rows: list[Row], tokens: list | None = None) -> list[Length | RowError]:
        """Render, tokenize and label rows; `tokens` as for `collator.measure`."""
        measured = self.collator.measure(rows, tokens)
        return [found if isinstance(found, RowError) else self._length(found) for found in measured]

    def _length(self, found: Measured) -> Length:
        trained = found.tokens[1] != IGNORE
        return Length(
            found.tokens.shape[1],
            found.kept,
            int(trained.sum()),
            int(trained[: found.kept].sum()),
            found.media_cut,
            found.reasoning_dropped,
            found.inexact_turns,
            not found.rendered.raw and self._splits(found.tokens[0]),
        )

    def _splits(self, ids: np.ndarray) -> bool:
        """Whether a prompt's end, the header of a model turn, is other tokens in the row than alone: its line break is
        one with those that an answer begins with."""
        markers = self.collator.labeller.markers
        header, newline = len(markers.header), markers.newline
        starts = np.flatnonzero(ids == markers.turn_start)
        starts = starts[starts + header + len(newline) <= len(ids)]
        heads = ids[starts[:, None] + np.arange(header + len(newline))]
        models = (heads[:, :header] == markers.header).all(1)
        return bool((heads[models, header:] != newline).any())


def _outline(content) -> tuple | str:
    """The kinds of a content's parts: a string is one letter, blocks are a tuple."""
    if isinstance(content, str):
        return "s" if content.strip() else ""
    return tuple(b["type"] if b["type"] != "text" else "t" if b["text"].strip() else "" for b in content)


def _emptied(content):
    if isinstance(content, str):
        return "x" if content.strip() else ""
    return [b if b["type"] != "text" else {"type": "text", "text": "x" if b["text"].strip() else ""} for b in content]
