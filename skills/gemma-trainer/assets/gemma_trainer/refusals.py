"""What a server's refusal means: try again, leave this row, or end the run."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from .asked import text_of
from .cli import note
from .errors import CannotLoad
from .replies import Request

TRANSIENT = (408, 409, 425, 429)  # and all from 500
MOVED = (301, 302, 303, 307, 308)
TOO_LONG = re.compile(r"context|too long|too many tokens|maximum .*length|num_ctx", re.IGNORECASE)
OPTIONAL = ("seed", "temperature", "response_format", "chat_template_kwargs")  # what an answer can be had without
REPEATED, SHORT = 16, 4  # letters of the prompt, or of a whole line of it, in a server's message that is not told
MOST_TOLD = 200  # letters of such a message


class Again(Exception):
    """A request that may be answered at another try, after `wait` seconds at least."""

    own = False

    def __init__(self, code: str, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.code, self.wait = code, wait


class Refused(Exception):
    """A request that will never be answered; `own` says that it is for what stands in the row."""

    def __init__(self, code: str, reason: str, own: bool = False):
        super().__init__(reason)
        self.code, self.own = code, own


def check_answer(
    status: int, headers: Mapping, content: bytes, teacher, request: Request | None = None, sent: Mapping | None = None
) -> dict:
    """The JSON of an answer.

    Args:
        sent: the body of the request, as the server got it.

    Raises:
        Again: too many requests, a fault of the server, or no JSON.
        Refused: this request will not do: too long for the model, say.
        CannotLoad: none will do: the key, the address or the model is wrong, or the account is empty.
    """
    data = _json(content)
    fault = data.get("error") if isinstance(data, dict) else None
    if status == 200 and not fault:
        if not isinstance(data, dict):
            raise Again("no_json", "an answer that is not JSON")
        return data
    said = fault if isinstance(fault, str) else ""
    code = ""
    if isinstance(fault, dict):
        said, code = str(fault.get("message") or ""), str(fault.get("code") or fault.get("type") or "")
    if status == 200:  # some services answer so when the one behind them fails
        status = int(code) if code.isdecimal() else 500
    _judge(status, code, said, retry_after(headers), teacher, request, sent or {})


def _json(content: bytes):
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(content)


def _judge(status: int, code: str, said: str, wait: float, teacher, request: Request | None, sent: Mapping) -> None:
    if status in (401, 402, 404, *MOVED) or code == "insufficient_quota":
        raise CannotLoad(told_of(402 if code == "insufficient_quota" else status, teacher))
    shown = _told(said, request, teacher.key)
    reason = f"HTTP {status}" + (f": {shown}" if shown else "")
    if status in TRANSIENT or status >= 500:
        raise Again(f"http_{status}", reason, wait)
    if code == "context_length_exceeded" or (status in (400, 413, 422) and TOO_LONG.search(said)):
        raise Refused("too_long_for_teacher", reason, own=True)
    if status in (400, 422) and (part := _not_taken(said, sent)):
        if part not in teacher.left_out:
            teacher.left_out.add(part)
            note(f"{teacher.name} does not take {part}: it is left out from here on.")
        raise Again(f"http_{status}", reason)
    raise Refused(f"http_{status}", reason)


def _not_taken(said: str, sent: Mapping) -> str | None:
    """The part of a request that a server complains of, and that can be left out."""
    if "max_completion_tokens" in said and "max_tokens" in sent:
        return "max_tokens"
    return next((part for part in OPTIONAL if part in said and part in sent), None)


def told_of(status: int, teacher) -> str:
    """What to do about a refusal that holds for all requests."""
    if status in (401, 403):
        name = f"the environment variable {teacher.config.api_key_env}"
        told = f"set the right one in {name}" if teacher.key else f"none is in {name}"
        return f"{teacher.name} refuses the key (HTTP {status}): {told}"
    if status == 402:
        return f"{teacher.name} says that the account has nothing left to spend"
    if status in MOVED:
        return (
            f"{teacher.name} says that it has moved (HTTP {status}): give the address where it is, such as https://..."
        )
    wrong = f"no model {teacher.model} there, or the address is none of --api {teacher.api}"
    return f"{teacher.name}: {wrong} (HTTP {status}); see --teacher-model and --api"


def _told(said: str, request: Request | None, key: str | None) -> str:
    """A server's message in short; nothing of one that repeats what it was asked, or the key."""
    said = " ".join(said.split())[:MOST_TOLD]
    asked = text_of(request.row.messages) if request else ""
    lines = [line.strip() for line in asked.splitlines() if len(line.strip()) >= SHORT]
    pieces = (said[at : at + REPEATED] for at in range(len(said) - REPEATED + 1))
    repeats = any(piece in asked for piece in pieces) or any(line in said for line in lines)
    return "" if repeats or (key and key in said) else said


def retry_after(headers: Mapping) -> float:
    """Seconds that a server asks to wait, from Retry-After as a number or a date; 0 where it does not say."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with contextlib.suppress(ValueError, TypeError):
            seconds = float(headers.get(name)) * unit
            return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    with contextlib.suppress(ValueError, TypeError):
        at = parsedate_to_datetime(headers.get("retry-after"))
        return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return 0.0
