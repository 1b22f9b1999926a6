"""How fast requests go out, what they may cost, and when there is an end of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

from .replies import Reply, Request
from .rows import Row, strings_in
from .slots import blocks_of

LETTERS = 4  # bytes of text to a token, about, in English; fewer elsewhere: the estimate is no bill
IMAGE_TOKENS, CLIP_TOKENS = 280, 750  # the most that Gemma 4 takes for an image by default, and for a clip of 30 s
EVERY_MESSAGE = 5  # tokens of its header and its end


def estimate_tokens(row: Row) -> int:
    """About how many tokens a prompt takes."""
    media = {"image": IMAGE_TOKENS, "audio": CLIP_TOKENS}
    blocks = [block for message in row.messages for block in blocks_of(message["content"])]
    soft = sum(media.get(block["type"], 0) for block in blocks)
    return soft + EVERY_MESSAGE * len(row.messages) + tokens_of(b.get("text", "") for b in blocks) + _of_tools(row)


def _of_tools(row: Row) -> int:
    return tokens_of(strings_in(row.tools)) if row.tools else 0


def tokens_of(texts: Iterable[str]) -> int:
    """About how many tokens texts take."""
    return math.ceil(sum(len(text.encode("utf-8", "replace")) for text in texts) / LETTERS)


def with_counts(request: Request, reply: Reply) -> Reply:
    """A reply whose tokens are counted: where the server has not done so, about."""
    if None not in (reply.tokens_in, reply.tokens_out):
        return reply
    tokens_in = estimate_tokens(request.row) if reply.tokens_in is None else reply.tokens_in
    said = tokens_of((reply.text, reply.reasoning)) if reply.tokens_out is None else reply.tokens_out
    return replace(reply, tokens_in=tokens_in, tokens_out=said, estimated=True)


class Pace:
    """Spreads requests evenly, so that no window of a minute holds more of them, or of their tokens, than is allowed.

    `wait(tokens)` tells how many seconds a request has to wait from now on; `hold(seconds)` keeps all of them back, as
    a server asks for.
    """

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None):
        self.a_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self.a_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self.free_at = self.held_until = 0.0

    def wait(self, tokens: int) -> float:
        now = time.monotonic()
        start = max(now, self.free_at)
        self.free_at = start + max(self.a_request, tokens * self.a_token)
        return start - now

    def hold(self, seconds: float) -> None:
        self.held_until = max(self.held_until, time.monotonic() + seconds)

    @property
    def held(self) -> float:
        """Seconds for which requests are kept back."""
        return self.held_until - time.monotonic()


class Budget:
    """What may be spent. Costs are in the currency of the prices, which are per million tokens.

    A request is let out when its most expensive outcome still fits, so that --max-cost holds whatever the answers are.
    """

    def __init__(self, price_in: float, price_out: float, max_cost: float | None, max_minutes: float | None):
        self.price_in, self.price_out, self.max_cost = price_in, price_out, max_cost
        self.ends_at = time.monotonic() + 60 * max_minutes if max_minutes else math.inf
        self.spent, self.reserved = 0.0, 0.0
        self.ended: str | None = None  # "max_cost" or "max_minutes", once a request was refused

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6

    def cost_of(self, replies: Iterable[Reply]) -> float:
        return sum(self.cost(reply.tokens_in or 0, reply.tokens_out or 0) for reply in replies)

    def take(self, cost: float) -> bool:
        """Whether a request that may cost so much can go out; it is then reserved until `settle`."""
        if time.monotonic() >= self.ends_at:
            self.ended = "max_minutes"
        elif self.max_cost is not None and self.spent + self.reserved + cost > self.max_cost:
            self.ended = "max_cost"
        if self.ended:
            return False
        self.reserved += cost
        return True

    def settle(self, reserved: float, spent: float) -> None:
        self.reserved -= reserved
        self.spent += spent
