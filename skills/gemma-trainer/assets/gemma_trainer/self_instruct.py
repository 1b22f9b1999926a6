"""New instructions from topics, written by a teacher round by round until there are enough that differ.

After Wang et al., Self-Instruct (2023): the teacher sees a few instructions as examples, and what is like one that is
there already is left out. A round asks for all that is missing at once. Requests are known by their number, so that a
run that is resumed has the answers of each.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from .asked import Asked, normalized, of_text
from .errors import RowError
from .json_answers import parse_answer
from .overlaps import find_overlaps
from .replies import Failure, Reply, Request

A_REQUEST = 10  # instructions that one request asks for
TEMPERATURE = 1.0  # so that rounds differ
EXAMPLES, KNOWN = 3, 8  # instructions that are shown to be like; that are shown so as not to be repeated
IDEA = "idea-"  # what the keys of requests for instructions begin with
STALE = 3  # rounds without anything new, after which the teacher has no more to say
SHORTEST, LONGEST = 8, 4000  # letters of an instruction
SCHEMA = {
    "type": "object",
    "properties": {"instructions": {"type": "array", "items": {"type": "string"}}},
    "required": ["instructions"],
    "additionalProperties": False,
}


def write_instructions(
    topics: Sequence[str],
    count: int,
    seeds: Sequence[Asked],
    answered: Callable[[list[Request]], list[Reply | Failure | None]],
    seed: int = 0,
    against: Sequence[Asked] = (),
    held: Sequence[Asked] = (),
    near: bool = True,
    max_tokens: int = 1024,
) -> tuple[list[Asked], Counter]:
    """`count` instructions, or as many as the teacher has.

    Args:
        answered: asks a round's requests, and returns what came of each; None where it was not asked, since the run
            ends early: then no further round is begun.
        against, held, near: as for `overlaps.find_overlaps`.

    Returns:
        (the instructions as prompts, what was left out by reason: "unread" answers, "odd" lengths, overlaps, and
        "failed" requests).
    """
    pool: list[Asked] = []
    left_out: Counter = Counter()
    number = stale = 0
    while len(pool) < count and stale < STALE:
        requests = [
            idea_request(topics[(number + at) % len(topics)], number + at, pool, seeds, seed, max_tokens)
            for at in range(-(-(count - len(pool)) // A_REQUEST))
        ]
        number += len(requests)
        found = answered(requests)
        ideas = [idea for reply in found if isinstance(reply, Reply) for idea in _read(reply, left_out)]
        left_out["failed"] += sum(isinstance(reply, Failure) for reply in found)
        new = _new(ideas, pool, [*seeds, *against], held, near, left_out)
        stale = 0 if new else stale + 1
        pool += new
        if None in found:
            break
    return [of_text(asked.text, f"instruction {at}") for at, asked in enumerate(pool[:count], 1)], +left_out


def idea_request(
    topic: str, number: int, pool: Sequence[Asked], seeds: Sequence[Asked], seed: int, max_tokens: int
) -> Request:
    """The question for new instructions on a topic. `number` tells it from others on the same topic."""
    draw = random.Random(f"{seed}-{number}")
    examples = draw.sample(seeds, min(EXAMPLES, len(seeds))) or draw.sample(pool, min(EXAMPLES, len(pool)))
    known = draw.sample(pool, min(KNOWN, len(pool)))
    parts = [
        f"Write {A_REQUEST} different instructions or questions that people might give to an assistant about this "
        f"topic: {topic}",
        "Each one must be understood alone, and be answerable in text without tools, files or the internet. Vary what "
        "is asked for (explain, compare, write, classify, plan, correct, compute, summarize a text that you include), "
        "how long it is, and how hard.",
    ]
    if examples:
        parts.append("In the manner of:\n" + "\n".join(f"- {_short(one)}" for one in examples))
    if known:
        parts.append("Not these, nor anything like them:\n" + "\n".join(f"- {_short(one)}" for one in known))
    parts.append('Reply with JSON only: {"instructions": ["...", "..."]}')
    asked = of_text("\n\n".join(parts), f"topic request {number + 1}")
    return Request(f"{IDEA}{number}", asked.row, TEMPERATURE, seed + number, max_tokens, SCHEMA)


def _short(asked: Asked) -> str:
    return " ".join(asked.text.split())[:300]


def _read(reply: Reply, left_out: Counter) -> list[str]:
    """The instructions in an answer: strings, or objects with one under some name, in a list or in an object."""
    value = parse_answer(reply.text, SCHEMA).value
    if isinstance(value, dict):
        value = next((item for item in value.values() if isinstance(item, list)), None)
    if not isinstance(value, list):
        left_out["unread"] += 1
        return []
    texts = [next(iter(item.values()), None) if isinstance(item, dict) else item for item in value]
    return [text.strip() for text in texts if isinstance(text, str)]


def _new(ideas, pool, known, held, near: bool, left_out: Counter) -> list[Asked]:
    """The ideas that are unlike all that is there."""
    candidates, seen = [], {normalized(asked.text) for asked in pool}
    for idea in ideas:
        try:
            if not SHORTEST <= len(idea) <= LONGEST:
                raise RowError("", "its length", "odd")
            asked = of_text(idea, "an instruction")
        except RowError:
            left_out["odd"] += 1
            continue
        if normalized(idea) in seen:
            left_out["duplicate"] += 1
        else:
            seen.add(normalized(idea))
            candidates.append(asked)
    overlaps = find_overlaps(candidates, [*known, *pool], held, near)
    left_out.update(overlap.code for overlap in overlaps.values())
    return [asked for position, asked in enumerate(candidates) if position not in overlaps]
