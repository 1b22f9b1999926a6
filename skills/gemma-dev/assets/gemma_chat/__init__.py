"""Chatting with a Gemma, loaded here or served elsewhere, for gradio_app.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .parts import Part


class ChatError(Exception):
    """Something to be told in one line; `exit_code` is the script's, where it keeps the app from starting."""

    def __init__(self, message: str, exit_code: int = 5):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Chat:
    """A model to talk to.

    Args:
        kinds: what it takes besides text, of "image" and "audio".
        thinking: what can be said of thinking, the first being the default: of "default" (as the server has it),
            "off" and "on"; nothing where its template knows no thinking.
        temperature: the default; 0 takes the likeliest token each time.
        answer: `answer(messages, temperature, max_tokens, thinking)` yields the parts of the answer so far, again and
            again. Closing the iterator stops the model. Messages are {"role", "content": blocks}, a block being
            {"type": "text", "text": str}, {"type": "image", "image": PIL image} or {"type": "audio", "audio": float32
            samples at `media.RATE`}. It raises ChatError.
        at_once: conversations that it can answer at the same time.
    """

    name: str
    kinds: tuple[str, ...]
    thinking: tuple[str, ...]
    temperature: float
    answer: Callable[..., Iterator[list[Part]]]
    at_once: int = 1
