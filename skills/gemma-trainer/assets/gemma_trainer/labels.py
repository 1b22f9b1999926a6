"""Which tokens are trained: what the model should say, and nothing else.

Spans are found in one pass over the control tokens of a row; text between them is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .errors import CannotLoad, RowError
from .families import MEDIA_TOKENS, Family
from .rendering import ANSWERED, ASKED, CALLED, RESULT, Rendered, Renderer
from .rows import Row
from .slots import is_blank

IGNORE = -100


@dataclass(frozen=True)
class Span:
    """A run of model tokens [start, end) that the model is to produce in one go."""

    start: int
    end: int
    turn: int  # counts model turns from 0; a turn with tool calls has several spans
    behind: str  # what it follows: a turn "header", a tool "result", or the "end" of a span without a header between


@dataclass
class Labelled:
    """A row's tokens with what is trained.

    `ids` are token ids (a run of media soft tokens is one token), `trained` says for each whether it is a label.
    """

    ids: list[int]
    trained: np.ndarray
    reasoning_dropped: int = 0
    inexact_turns: int = 0


class Labeller:
    """Turns rendered rows into labels.

    Args:
        renderer: of the processor whose template is used.
        loss_on: "all-turns" or "last-turn".
        train_reasoning: whether rendered reasoning is trained.

    Raises:
        CannotLoad: the chat template does not use the markers of its family (made at construction, on a probe row).
    """

    def __init__(self, renderer: Renderer, loss_on: str = "all-turns", train_reasoning: bool = True):
        self.renderer, self.loss_on, self.train_reasoning = renderer, loss_on, train_reasoning
        self.markers = Markers.of(renderer.tokenizer, renderer.family)
        self._tails: dict[tuple[bool, str], list[int]] = {}
        self._recalled: dict[tuple[bool, bool], bool] = {}
        self._check_template()

    def _check_template(self) -> None:
        if not self.renderer.template:
            raise CannotLoad(
                "the model has no chat template: copy chat_template.jinja from its -it model into its folder"
            )
        probe = Row("the probe", [ASKED, ANSWERED])
        ids = self.renderer.encode([self.renderer.render(probe)])[0]
        said = [self.renderer.tokenizer.decode(ids[s.start : s.end]) for s in find_spans(ids, self.markers)]
        family = self.renderer.family
        if len(said) != 1 or not said[0].endswith("y" + family.turn_end):
            raise CannotLoad(
                f"the chat template does not write turns as {family.name} does "
                f"({family.model_header!r} ... {family.turn_end!r})"
            )

    def label(self, row: Row, rendered: Rendered, ids: list[int]) -> Labelled:
        """Decide what is trained in a row of token ids, and put the generation prompt's tail where it belongs."""
        if rendered.raw:
            trained = np.full(len(ids), row.trained)
            trained[:1] = False  # BOS
            return Labelled(ids, trained)
        spans = find_spans(ids, self.markers)
        dropped = self._reasoning_dropped(row, rendered, ids)
        said = self._messages_of(row, rendered, spans, dropped)
        kept = self._chosen(row, spans, said) if row.trained else []
        inexact = self._inexact(row, rendered, ids, spans, said, kept, dropped)
        trained = np.zeros(len(ids), bool)
        for span in kept:
            trained[span.start + self._prompt_part(rendered, ids, span) : span.end] = True
        if not self.train_reasoning and self.markers.channel is not None:
            for start, end in _runs(ids, self.markers.channel, self.markers.channel_end):
                trained[start:end] = False
        ids, trained = self._insert_tail(rendered, ids, trained, kept)
        return Labelled(ids, trained, dropped, inexact)

    def answer_start(self, ids: list[int]) -> int:
        """Where the last model turn of a labelled row begins: the tokens before it are the prompt it answers."""
        last = find_spans(ids, self.markers)[-1]
        tails = (self.tail(thinking, last.behind) for thinking in (False, True))
        held = [len(tail) for tail in tails if ids[last.start : last.start + len(tail)] == tail]
        return last.start + max(held, default=0)

    # -- which spans

    def _chosen(self, row: Row, spans: list[Span], said: list[set[int]]) -> list[Span]:
        refused = {i for i, message in enumerate(row.messages) if message.get("train") is False}
        last_only = self.loss_on == "last-turn"
        return [
            span
            for span, messages in zip(spans, said, strict=True)
            if not messages & refused and not (last_only and span.turn != spans[-1].turn)
        ]

    def _messages_of(self, row: Row, rendered: Rendered, spans: list[Span], dropped: int) -> list[set[int]]:
        """The positions of the messages that each span is made of; none where nothing depends on them.

        A row without tools has one span an answer. With tools, a template may put the words beside a call behind its
        results, or run them into the next step: there the row is rendered again, each message with a mark before its
        texts. A message without words counts only where it is alone.
        """
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        calls = [message for message in row.messages if "tool_calls" in message]
        if not calls and len(spans) == len(answers):
            return [{i} for i in answers]
        words = any(not is_blank(message["content"]) for message in calls)
        if not (words or dropped or any("train" in message for message in row.messages)):
            return [set() for _ in spans]
        positions = {mark: position for position, mark in self.renderer.marks(row).items()}
        ids = self.renderer.encode([self.renderer.render(row, marked=True, thinking=rendered.thinking)])[0]
        found = []
        for span in find_spans(ids, self.markers):
            end = span.end - (ids[span.end - 1] == self.markers.turn_end)
            shown = [token for token in ids[span.start : end] if token not in self.markers.media]
            text = self.renderer.tokenizer.decode(shown)
            said = {positions[a] for a, b in pairwise(text) if a in positions and b not in positions}
            blank = {positions[letter] for letter in text if letter in positions}
            if span.behind != "result" or set(text) - positions.keys():  # else nothing makes a span there
                found.append(said or blank)
        if len(found) != len(spans):
            told = "cannot tell which of the model's turns belong to which message"
            raise RowError(row.name, told, "template_refuses")
        return found

    # -- the prompt a span answers

    def tail(self, thinking: bool, behind: str = "header") -> list[int]:
        """What a generation prompt ends with beyond the model header, such as an empty thought block.

        Behind a tool result there is no header: all that the prompt adds to it is the tail.
        """
        key = (thinking, behind)
        if key not in self._tails:
            self._tails[key] = self._probe_tail(*key)
        return self._tails[key]

    def _probe_tail(self, thinking: bool, behind: str) -> list[int]:
        family, words = self.renderer.family, "y" if behind == "end" else ""
        messages = [ASKED] if behind == "header" else [ASKED, CALLED | {"content": words}, RESULT]
        try:
            prompt = self.renderer.generation_prompt(Row("the probe", messages), len(messages), thinking)
        except RowError:  # a template without tools
            return []
        openings = {"header": family.model_header, "result": family.tool_response_end, "end": f"{family.turn_end}\n"}
        tail = prompt.rpartition(openings[behind])[2]
        if len(tail) == len(prompt) or family.turn_start in tail:  # nothing is ever written behind such a thing
            return []
        return self.renderer.tokenizer(tail, add_special_tokens=False)["input_ids"]

    def _prompt_part(self, rendered: Rendered, ids: list[int], span: Span) -> int:
        """How many of a span's first tokens the generation prompt already holds."""
        tail = self.tail(rendered.thinking, span.behind)
        return len(tail) if tail and ids[span.start : span.start + len(tail)] == tail else 0

    def _insert_tail(self, rendered, ids, trained, kept):
        """Put the prompt's tail before the last trained span, where the template's history leaves it out."""
        tail = self.tail(rendered.thinking)
        if not tail or not kept or kept[-1].behind != "header" or self._prompt_part(rendered, ids, kept[-1]):
            return ids, trained
        at = kept[-1].start
        return ids[:at] + tail + ids[at:], np.insert(trained, at, np.zeros(len(tail), bool))

    def _inexact(
        self, row: Row, rendered: Rendered, ids: list[int], spans, said, kept: list[Span], dropped: int
    ) -> int:
        """How many trained steps stand behind another prompt than the one they would answer in use."""
        forgotten = self._forgotten(row, rendered.thinking) if dropped else {}
        chosen, begun, inexact = set(kept), set(), 0
        for span, messages in zip(spans, said, strict=True):
            if span in chosen:
                first = min(messages, default=None)
                lost = first in forgotten and (forgotten[first] < first or first in begun)
                inserted = span is kept[-1] and span.behind == "header"
                tail = [] if inserted else self.tail(rendered.thinking, span.behind)
                inexact += bool(lost or (tail and not self._prompt_part(rendered, ids, span)))
                inexact += max(0, len(messages) - 1)  # steps run together, without a prompt between them
            begun |= messages
        return inexact

    def _forgotten(self, row: Row, thinking: bool) -> dict[int, int]:
        """For messages with reasoning in their turn, at or before them, that the template has left out for the sake of
        a later user message, but shows in a prompt within the turn: the position of the first such reasoning."""
        users = [i for i, message in enumerate(row.messages) if message["role"] == "user"]
        forgotten, first = {}, None
        for position, message in enumerate(row.messages[: users[-1]] if users else []):
            if message["role"] == "user":
                first = None
            elif first is None and "reasoning" in message and self._recalls(thinking, "tool_calls" in message):
                first = position
            if first is not None:
                forgotten[position] = first
        return forgotten

    def _recalls(self, thinking: bool, called: bool) -> bool:
        """Whether the template shows a message's reasoning until the next user message, and no longer."""
        key = (thinking, called)
        if key not in self._recalled:
            reasoned = (CALLED if called else ANSWERED) | {"reasoning": "drei"}
            messages = [ASKED, reasoned, RESULT if called else ASKED | {"role": "system"}, ANSWERED, ASKED]
            try:
                shown = [
                    "drei" in self.renderer.generation_prompt(Row("the probe", messages), count, thinking)
                    for count in (3, 5)
                ]
            except RowError:  # a template without tools, or without a system message there
                shown = [False, False]
            self._recalled[key] = shown == [True, False]
        return self._recalled[key]

    def _reasoning_dropped(self, row: Row, rendered: Rendered, ids: list[int]) -> int:
        given = sum("reasoning" in message for message in row.messages)
        if not given or self.markers.channel is None:
            return given
        empty = self.tail(rendered.thinking)
        thoughts = _runs(ids, self.markers.channel, self.markers.channel_end)
        return max(0, given - sum(ids[start:end] != empty for start, end in thoughts))


@dataclass(frozen=True)
class Markers:
    """A family's markers as token ids; the headers, without their newline, and `newline` may be several tokens."""

    header: list[int]
    user_header: list[int]
    newline: list[int]
    turn_start: int
    turn_end: int
    response: int | None
    response_end: int | None
    channel: int | None
    channel_end: int | None
    media: frozenset[int] = frozenset()  # begin, soft and end tokens of images and clips

    @classmethod
    def of(cls, tokenizer, family: Family) -> Markers:
        def one(token):
            return None if token is None else tokenizer.convert_tokens_to_ids(token)

        def several(text):
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        return cls(
            header=several(family.model_header.removesuffix("\n")),
            user_header=several(f"{family.turn_start}user"),
            newline=several("\n"),
            turn_start=one(family.turn_start),
            turn_end=one(family.turn_end),
            response=one(family.tool_response),
            response_end=one(family.tool_response_end),
            channel=one(family.channel),
            channel_end=one(family.channel_end),
            media=frozenset(one(getattr(tokenizer, name, None)) for kind in family.slots for name in MEDIA_TOKENS[kind])
            - {None},
        )


def find_spans(ids: list[int], markers: Markers) -> list[Span]:
    """The runs of tokens that the model says, in order.

    A span starts after a model header, after a tool result, or after an end token that is followed by more model text.
    It ends with the turn's end token, or with the `<|tool_response>` that the model emits as its stop after a call.
    The result itself, an end token right behind it, and the newline after an end token are in no span.

    Example, Gemma 4 (spans in brackets):
        <|turn>user\\nWeather?<turn|>\\n<|turn>model\\n[<|tool_call>call:f{}<tool_call|><|tool_response>]
        response:f{value:snow}<tool_response|>[It snows.<turn|>]\\n
    """
    tokens = np.asarray(ids)
    stops = [m for m in (markers.turn_start, markers.turn_end, markers.response, markers.response_end) if m is not None]
    spans: list[Span] = []
    turn, start, behind = -1, None, ""  # `start` is None outside the model's words
    for at in np.flatnonzero(np.logical_or.reduce([tokens == stop for stop in stops])).tolist():
        token = ids[at]
        if token == markers.turn_start:
            if start is not None and at > start:  # a turn that was never closed
                spans.append(Span(start, at, turn, behind))
            start, behind = None, "header"
            if ids[at : at + len(markers.header)] == markers.header:
                # The newline behind is not looked at: it may be one token with those around a medium.
                turn, start = turn + 1, at + len(markers.header) + len(markers.newline)
        elif token == markers.response_end:
            if start is None and behind == "result":
                start = at + 1
                while start < len(ids) and ids[start] in markers.media:  # pictures that belong to the result
                    start += 1
        elif start is None:
            continue
        elif token == markers.response:
            if at > start:  # the stop that the model itself emits; a further result's opening is not
                spans.append(Span(start, at + 1, turn, behind))
            start, behind = None, "result"
        else:  # the end of a turn
            if at > start or behind != "result":
                spans.append(Span(start, at + 1, turn, behind))
            start, behind = at + 1, "end"
            start += len(markers.newline) * (ids[start : start + len(markers.newline)] == markers.newline)
            if start == len(ids) or ids[start] == markers.turn_start:
                start = None
    if start is not None and len(ids) > start:
        spans.append(Span(start, len(ids), turn, behind))
    return spans


def _runs(ids: list[int], opening: int, closing: int | None) -> list[tuple[int, int]]:
    """[start, end) of each run from an opening to its closing token, both included; an open one reaches the end."""
    runs, tokens = [], np.asarray(ids)
    closings = np.flatnonzero(tokens == closing)
    for start in np.flatnonzero(tokens == opening).tolist():
        at = np.searchsorted(closings, start)
        runs.append((start, int(closings[at]) + 1 if at < len(closings) else len(ids)))
    return runs
