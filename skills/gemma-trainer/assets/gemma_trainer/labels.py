"""Which tokens are trained: what the model should say, and nothing else.

Spans are found in one pass over the control tokens of a row; text between them is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import CannotLoad, RowError
from .families import KINDS, Family
from .rendering import MARK, Rendered, Renderer
from .rows import Row
from .slots import is_blank

IGNORE = -100


@dataclass(frozen=True)
class Span:
    """A run of model tokens [start, end) that the model is to produce in one go."""

    start: int
    end: int
    turn: int  # counts model turns from 0; a turn with tool calls has several spans
    after_result: bool  # it follows a tool result rather than a turn header


@dataclass
class Labelled:
    """A row's tokens with what is trained.

    `ids` are token ids (media slots one token each), `trained` says for each whether it is a label.
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
        self._tails: dict[tuple[bool, bool], list[int]] = {}
        self._check_template()

    def _check_template(self) -> None:
        if not self.renderer.template:
            raise CannotLoad(
                "the model has no chat template: copy chat_template.jinja from its -it model into its folder"
            )
        probe = Row("the probe", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
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
        kept = self._chosen(row, spans) if row.trained else []
        inexact = self._inexact(row, rendered, ids, spans, kept, dropped)
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
        tails = (self.tail(thinking, last.after_result) for thinking in (False, True))
        return last.start + max(len(tail) for tail in tails if ids[last.start : last.start + len(tail)] == tail)

    # -- which spans

    def _chosen(self, row: Row, spans: list[Span]) -> list[Span]:
        chosen = spans
        if self.loss_on == "last-turn" and spans:
            chosen = [span for span in spans if span.turn == spans[-1].turn]
        if any(message.get("train") is False for message in row.messages):
            refused = self._untrained(row, spans)
            chosen = [span for span in chosen if span not in refused]
        return chosen

    def _untrained(self, row: Row, spans: list[Span]) -> set[Span]:
        """The spans of messages marked `train: false`, found by rendering the row again with marked texts."""
        ids = self.renderer.encode([self.renderer.render(row, marked=True)])[0]
        decode, end = self.renderer.tokenizer.decode, self.renderer.family.turn_end
        texts = [decode(ids[span.start : span.end]) for span in find_spans(ids, self.markers)]
        if len(texts) != len(spans):  # a mark alone may open a span that empty content does not have
            texts = [text for text in texts if text.removesuffix(end) != MARK]
        if len(texts) != len(spans):
            raise RowError(row.name, "cannot tell which tokens belong to the message that is not to be trained")
        return {span for span, text in zip(spans, texts, strict=True) if MARK in text}

    # -- the prompt a span answers

    def tail(self, thinking: bool, after_result: bool = False) -> list[int]:
        """What a generation prompt ends with beyond the model header, such as an empty thought block.

        After a tool result there is no header: all that the prompt adds to it is the tail.
        """
        key = (thinking, after_result)
        if key not in self._tails:
            self._tails[key] = self._probe_tail(*key)
        return self._tails[key]

    def _probe_tail(self, thinking: bool, after_result: bool) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
        messages = [{"role": "user", "content": "x"}]
        if after_result:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "1", "content": "y"})
        probe = Row("the probe", messages)
        try:
            prompt = self.renderer.generation_prompt(probe, len(messages), thinking)
        except RowError:  # a template without tools
            return []
        opening = self.renderer.family.tool_response_end if after_result else self.renderer.family.model_header
        tail = prompt[prompt.rindex(opening) + len(opening) :] if opening in prompt else ""
        return self.renderer.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []

    def _prompt_part(self, rendered: Rendered, ids: list[int], span: Span) -> int:
        """How many of a span's first tokens the generation prompt already holds."""
        tail = self.tail(rendered.thinking, span.after_result)
        return len(tail) if tail and ids[span.start : span.start + len(tail)] == tail else 0

    def _insert_tail(self, rendered, ids, trained, kept):
        """Put the prompt's tail before the last trained span, where the template's history leaves it out."""
        tail = self.tail(rendered.thinking)
        if not tail or not kept or kept[-1].after_result or self._prompt_part(rendered, ids, kept[-1]):
            return ids, trained
        at = kept[-1].start
        return ids[:at] + tail + ids[at:], np.insert(trained, at, np.zeros(len(tail), bool))

    def _inexact(self, row: Row, rendered: Rendered, ids: list[int], spans, kept: list[Span], dropped: int) -> int:
        """How many trained spans stand behind another prompt than the one they would answer in use."""
        if rendered.restore is not None:
            return 0
        inexact = self._joined_steps(row, len(spans)) if any("tool_calls" in message for message in row.messages) else 0
        if dropped and kept:
            inexact += self._forgetful_steps(row, rendered)
        for span in kept:
            fixed = span is kept[-1] and not span.after_result
            if self.tail(rendered.thinking, span.after_result) and not fixed:
                inexact += not self._prompt_part(rendered, ids, span)
        return inexact

    def _forgetful_steps(self, row: Row, rendered: Rendered) -> int:
        """How many trained steps would have seen reasoning of their own turn that a later user message makes the
        template leave out."""
        roles = [message["role"] for message in row.messages]
        last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        steps, reasoned = [], False
        for position, message in enumerate(row.messages[:last_user]):
            reasoned = roles[position] != "user" and reasoned
            if reasoned and roles[position] == "assistant" and message.get("train", True):
                steps.append(position)
            reasoned = reasoned or "reasoning" in message
        if not steps or self.loss_on == "last-turn":
            return 0
        # A template treats them all alike, so that one prompt tells for all (each costs a rendering of its prefix).
        prompt = self.renderer.generation_prompt(row, steps[0], rendered.thinking)
        return 0 if rendered.text.startswith(prompt) else len(steps)

    @staticmethod
    def _joined_steps(row: Row, found: int) -> int:
        """How many steps of the model a template has run into the one before, without a break between them."""
        roles, steps = ["", *(message["role"] for message in row.messages), ""], 0
        for before, message, after in zip(roles, row.messages, roles[2:], strict=False):
            if message["role"] == "assistant":
                calls, words = "tool_calls" in message, not is_blank(message["content"])
                steps += calls  # ends at its results; words beside it follow those, or stand with it
                steps += (not calls or after == "tool") if words else (not calls and before != "tool")
        return max(0, steps - found)

    def _reasoning_dropped(self, row: Row, rendered: Rendered, ids: list[int]) -> int:
        given = sum("reasoning" in message for message in row.messages)
        if not given or self.markers.channel is None:
            return given
        empty = self.tail(rendered.thinking)
        thoughts = _runs(ids, self.markers.channel, self.markers.channel_end)
        return max(0, given - sum(ids[start:end] != empty for start, end in thoughts))


@dataclass(frozen=True)
class Markers:
    """A family's markers as token ids; `header` and `newline` may be several tokens."""

    header: list[int]
    newline: list[int]
    turn_start: int
    turn_end: int
    response: int | None
    response_end: int | None
    channel: int | None
    channel_end: int | None
    media: frozenset[int] = frozenset()  # the slots of images and clips

    @classmethod
    def of(cls, tokenizer, family: Family) -> Markers:
        def one(token):
            return None if token is None else tokenizer.convert_tokens_to_ids(token)

        return cls(
            header=tokenizer(family.model_header, add_special_tokens=False)["input_ids"],
            newline=tokenizer("\n", add_special_tokens=False)["input_ids"],
            turn_start=one(family.turn_start),
            turn_end=one(family.turn_end),
            response=one(family.tool_response),
            response_end=one(family.tool_response_end),
            channel=one(family.channel),
            channel_end=one(family.channel_end),
            media=frozenset(getattr(tokenizer, f"{kind}_token_id", None) for kind in KINDS) - {None},
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
    turn, start, after_result = -1, None, False  # `start` is None outside the model's words

    for at in np.flatnonzero(np.isin(tokens, stops)).tolist():
        token = ids[at]
        if token == markers.turn_start:
            if start is not None and at > start:  # a turn that was never closed
                spans.append(Span(start, at, turn, after_result))
            is_model = ids[at : at + len(markers.header)] == markers.header
            turn, start, after_result = turn + is_model, at + len(markers.header) if is_model else None, False
        elif token == markers.response_end:
            if turn >= 0 and start is None and after_result:
                start = at + 1
                while start < len(ids) and ids[start] in markers.media:  # pictures that belong to the result
                    start += 1
        elif start is None:
            continue
        elif token == markers.response:
            if at > start:  # the stop that the model itself emits; a further result's opening is not
                spans.append(Span(start, at + 1, turn, after_result))
            start, after_result = None, True
        else:  # the end of a turn
            if at > start or not after_result:
                spans.append(Span(start, at + 1, turn, after_result))
            follows = (
                at + 1 + (len(markers.newline) if ids[at + 1 : at + 1 + len(markers.newline)] == markers.newline else 0)
            )
            more = follows < len(ids) and ids[follows] != markers.turn_start
            start, after_result = (follows if more else None), False
    if start is not None and len(ids) > start:
        spans.append(Span(start, len(ids), turn, after_result))
    return spans


def _runs(ids: list[int], opening: int, closing: int | None) -> list[tuple[int, int]]:
    """[start, end) of each run from an opening to its closing token, both included; an open one reaches the end."""
    runs, tokens = [], np.asarray(ids)
    closings = np.flatnonzero(tokens == closing)
    for start in np.flatnonzero(tokens == opening).tolist():
        at = np.searchsorted(closings, start)
        runs.append((start, int(closings[at]) + 1 if at < len(closings) else len(ids)))
    return runs
