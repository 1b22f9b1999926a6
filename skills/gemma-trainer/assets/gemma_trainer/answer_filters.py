"""Which of a teacher's answers are good enough to learn from, which of them are kept, and which make a pair."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .answer_checks import Answer, Check, read_checks
from .asked import Asked
from .checks import CONTROL
from .errors import Fault
from .json_answers import canonical, misfits, parse_answer
from .replies import Reply
from .rows import read_messages

# How assistants begin to decline, in English; answers in other languages are looked for with --check.
REFUSAL = re.compile(
    r"\W*(?:(?:i'?m|i am) (?:really |very |so )?sorry,? but|(?:sorry|unfortunately),? (?:but )?i (?:can|am)|as an ai\b"
    r"|i (?:can(?:no|'?)t|am unable to|won'?t|am not able to|must decline)|i'm unable to)",
    re.IGNORECASE,
)
# Faults of form: no wrong answer to learn from, either.
UNFIT = ("cut", "empty", "bad_tool_call", "control_text", "bad_encoding")


@dataclass(frozen=True)
class Rules:
    """What answers are held to. `checks` are for all prompts, as `answer_checks.read_checks` takes them."""

    checks: Mapping | None = None
    drop_refusals: bool = False
    schema: Mapping | None = None


@dataclass
class Candidate:
    """An answer on its way. `fault` is why it is dropped, None where it passes; `score` is the judge's."""

    sample: int
    reply: Reply
    text: str
    fault: str | None = None
    score: float | None = None


@dataclass
class Tally:
    """What was found in the answers: `refusals` also where they are kept; `json` by how it was read."""

    refusals: int = 0
    reasoned: int = 0
    json: Counter = field(default_factory=Counter)
    lost_fields: Counter = field(default_factory=Counter)


def weigh(asked: Asked, sample: int, reply: Reply, rules: Rules, tally: Tally) -> Candidate:
    """Hold an answer to the rules."""
    tally.reasoned += bool(reply.reasoning)
    refused = reply.finish == "refused" or REFUSAL.match(reply.text) is not None
    tally.refusals += refused
    candidate = Candidate(sample, reply, reply.text)
    candidate.fault = _unfit(reply) or ("refusal" if refused and rules.drop_refusals else None)
    if not candidate.fault and rules.schema is not None:
        candidate.text, candidate.fault = _as_schema(reply.text, rules, tally)
    if not candidate.fault:
        candidate.fault = _check(asked, candidate, rules.checks)
    return candidate


def _unfit(reply: Reply) -> str | None:
    if reply.finish in ("length", "max_tokens"):
        return "cut"
    if not reply.text and not reply.tool_calls:
        return "empty"
    try:
        json.dumps(read_messages([message_of(reply, reply.text)], "assistant"), allow_nan=False)
    except (Fault, ValueError):  # the latter of a NaN, which JSON has no form for
        return "bad_tool_call"
    if CONTROL.search(reply.text) or CONTROL.search(reply.reasoning):
        return "control_text"
    try:
        f"{reply.text}{reply.reasoning}".encode()
    except UnicodeEncodeError:
        return "bad_encoding"
    return None


def _as_schema(text: str, rules: Rules, tally: Tally) -> tuple[str, str | None]:
    """(the answer as canonical JSON, its fault)."""
    parsed = parse_answer(text, rules.schema)
    tally.json[parsed.how] += 1
    tally.lost_fields.update(parsed.lost)
    if parsed.how == "lost":
        return text, "no_json"
    if misfits(parsed.value, rules.schema):
        return text, "wrong_json"
    return canonical(parsed.value, rules.schema), None


def _check(asked: Asked, candidate: Candidate, given: Mapping | None) -> str | None:
    """The first check of an answer that it does not pass, those of --check and those of its prompt."""
    answer = Answer(candidate.text, candidate.reply.tokens_out or 0, True, candidate.reply.reasoning)
    for check in checks_of(asked, given):
        try:
            passed = check.passes(answer)
        except TimeoutError:  # an expression that does not come to an end
            passed = False
        if not passed:
            return f"check_{check.name}"
    return None


def checks_of(asked: Asked, given: Mapping | None) -> list[Check]:
    """The checks of a prompt's answers: those for all prompts, and its own in the place of those of the same name.

    Raises:
        Fault: one for all prompts needs an expected answer, and this prompt brings none.
    """
    wanted = {**(given or {}), **(asked.checks or {})}
    return read_checks({"stopped": False} | wanted, asked.expected) if wanted else []


def message_of(reply: Reply, text: str, reasoning: bool = True) -> dict:
    """An answer as a message."""
    message = {"role": "assistant", "content": text}
    if reply.reasoning and reasoning:
        message["reasoning"] = reply.reasoning
    return message | ({"tool_calls": list(reply.tool_calls)} if reply.tool_calls else {})


# ---- what becomes of them


def chosen(candidates: Sequence[Candidate], keep: str) -> list[Candidate]:
    """The answers of a prompt that become rows: of those that pass, the best by the judge, the first, or all that
    differ."""
    passing = [candidate for candidate in candidates if candidate.fault is None]
    if keep == "best":
        return sorted(passing, key=lambda candidate: -candidate.score)[:1]
    if keep == "first":
        return passing[:1]
    return list({said(candidate): candidate for candidate in reversed(passing)}.values())[::-1]


def said(candidate: Candidate) -> tuple[str, str]:
    """What tells an answer from others."""
    return candidate.text, repr(candidate.reply.tool_calls)


def pair_of(
    candidates: Sequence[Candidate], judged: bool, min_margin: float
) -> tuple[tuple[Candidate, Candidate] | None, str]:
    """((the chosen answer, the rejected one), "") of a prompt; or (None, why there is no pair).

    With a judge they are the best and the worst of the answers that pass; without, the first that passes and the first
    that does not.
    """
    passing = [candidate for candidate in candidates if candidate.fault is None]
    if not passing:
        return None, "none_passes"
    if judged:
        best, worst = (pick(passing, key=lambda one: one.score) for pick in (max, min))
        if said(best) == said(worst) or best.score == worst.score:
            return None, "tie"
        return ((best, worst), "") if best.score - worst.score >= min_margin else (None, "small_margin")
    failing = [one for one in candidates if one.fault and one.fault not in UNFIT and said(one) != said(passing[0])]
    return ((passing[0], failing[0]), "") if failing else (None, "all_pass")
