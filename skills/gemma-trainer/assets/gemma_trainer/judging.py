"""Scores of answers, by a reward model or by a model that is asked for a number."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace

from .asked import Asked, hashed
from .replies import Request
from .rows import Row
from .slots import blocks_of

RUBRIC = """Give 10 to an answer that is right, complete, clear and no longer than it need be; 5 to one that is partly
right; 1 to one that is wrong, does not do what was asked, or is made up."""
NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)(?:\s*/\s*10)?\s*\.?\s*")
LOWEST, HIGHEST = 1.0, 10.0
JUDGE = "judge-"  # what the keys of requests to a judge begin with


def reward_scores(config, rows: Iterable[dict]) -> Iterator[float | None]:
    """Scores of conversations by the reward model of --judge; None where there is none, since a row is refused."""
    from .scorer import load
    from .scoring import score_rows

    names = ("max_len", "precision", "media_root", "allow_remote_media")
    model, collator = load(SimpleNamespace(model=config.judge, **{name: getattr(config, name) for name in names}))
    for line in score_rows(model, collator, rows, config.batch_size):
        yield line.get("score")


def judge_request(asked: Asked, text: str, rubric: str, judge: str, max_tokens: int) -> Request:
    """The question to a judge about one answer, told by `with_calls`; its key depends on it, the rubric and the
    judge."""
    key = hashed("\x1e".join([asked.key, text, rubric, judge]))
    return Request(f"{JUDGE}{key}", judged_row(asked, text, rubric), 0.0, 0, max_tokens)


def judged_row(asked: Asked, answer: str, rubric: str) -> Row:
    """A row that shows a conversation, its media in their places, and asks for a number."""
    tools = f"<tools>\n{_json(asked.row.tools)}\n</tools>\n\n" if asked.row.tools else ""
    blocks = [_text(f"Judge the last answer of this conversation.\n\n{tools}<conversation>\n")]
    for message in asked.row.messages:
        calls = with_calls("", message.get("tool_calls"))
        blocks += [_text(f"[{message['role']}]\n"), *blocks_of(message["content"]), _text(f"{calls}\n")]
    told = f"</conversation>\n\n<answer>\n{answer}\n</answer>\n\n{rubric.strip()}\n\n"
    blocks.append(_text(f"{told}Reply with one number from {LOWEST:.0f} to {HIGHEST:.0f} and nothing else."))
    joined = _joined(blocks)
    content = joined[0]["text"] if len(joined) == 1 else joined
    return replace(asked.row, messages=[{"role": "user", "content": content}], tools=None)


def with_calls(text: str, calls) -> str:
    """What was said, and the tool calls beside it, for a reader."""
    return "\n".join(filter(None, (text, _json(calls) if calls else "")))


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _text(text: str) -> dict:
    return {"type": "text", "text": text}


def _joined(blocks: list[dict]) -> list[dict]:
    """Blocks of which no two texts are neighbours."""
    joined: list[dict] = []
    for block in blocks:
        if joined and block["type"] == joined[-1]["type"] == "text":
            joined[-1] = _text(joined[-1]["text"] + block["text"])
        else:
            joined.append(block)
    return joined


def read_score(text: str) -> float | None:
    """The number that an answer is, also as "8/10"; None for any other answer, and for a number out of range."""
    found = NUMBER.fullmatch(text)
    value = float(found[1]) if found else None
    return value if value is not None and LOWEST <= value <= HIGHEST else None
