"""A few rows of a data set as the model will see them, with what is trained told apart."""

from __future__ import annotations

import json
from itertools import groupby

from .errors import MediaError, RowError
from .labels import IGNORE
from .media import MediaAccess
from .media_headers import audio_seconds, image_size
from .preferences import Preference
from .rows import Row
from .slots import Media, blocks_of
from .tally import main_row, read_entry

LOOKED_AT, SHOWN = 200, 6


def show(rows, count: int, task: str, collator=None) -> list[dict]:
    """Some rows of each kind (with images, clips, tools, reasoning, several turns), from all over the data.

    Args:
        rows: a `sources.Rows`, of whose first `count` some are looked at.
        collator: of the model; without it the messages stand for themselves.

    Returns:
        dicts of `row` (its name; of a pair two, one for each answer), `runs` (`{"text", "trained"}`), `media` (such as
        "image 640 x 480"), and with a collator `tokens` and `trained`.
    """
    found: dict[tuple, list] = {}
    for position in range(0, count, max(1, count // LOOKED_AT)):
        try:
            entry = read_entry(rows[position], f"row {position}", task)
            found.setdefault(_kind(entry), []).append(_examples(entry, collator))
        except RowError:
            continue
    each = max(1, SHOWN // max(1, len(found)))
    kinds = sorted(found.values(), key=len, reverse=True)[:SHOWN]
    return [example for same in kinds for sides in same[:each] for example in sides]


def _kind(entry: Row | Preference) -> tuple:
    row = main_row(entry)
    kinds = {medium.kind for medium in entry.media} | {key for message in row.messages for key in message}
    return len(row.messages) > 3, bool(row.tools), *sorted(kinds & {"image", "audio", "reasoning", "tool_calls"})


def _examples(entry: Row | Preference, collator) -> list[dict]:
    sides = {"": entry} if isinstance(entry, Row) else {", chosen": entry.chosen, ", rejected": entry.rejected}
    measured = collator.measure(list(sides.values())) if collator else [None] * len(sides)
    shown = []
    for (name, row), found in zip(sides.items(), measured, strict=True):
        if isinstance(found, RowError):
            raise found
        example = {"row": row.name + name, "media": [_told(medium, row) for medium in row.media]}
        if found is None:
            example["runs"] = _plain_runs(row)
        else:
            example |= {"runs": _runs(found.tokens, collator), "tokens": found.tokens.shape[1]}
            example["trained"] = int((found.tokens[1] != IGNORE).sum())
        shown.append(example)
    return shown


def _runs(tokens, collator) -> list[dict]:
    """Decoded runs of trained and other tokens; a medium's soft tokens are shown by one of them."""
    soft, runs = set(collator.soft_tokens.values()), []
    pairs = list(zip(tokens[0].tolist(), (tokens[1] != IGNORE).tolist(), strict=True))
    pairs = [pair for at, pair in enumerate(pairs) if not (at and pair[0] in soft and pairs[at - 1][0] == pair[0])]
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        runs.append({"text": collator.tokenizer.decode([token for token, _ in run]), "trained": trained})
    return runs


def _plain_runs(row: Row) -> list[dict]:
    if row.text is not None:
        return [{"text": row.text, "trained": row.trained}]
    runs = []
    for message in row.messages:
        texts = [block.get("text", f"<{block['type']}>") for block in blocks_of(message["content"])]
        texts = [
            json.dumps(message[key], ensure_ascii=False) for key in ("reasoning", "tool_calls") if key in message
        ] + texts
        trained = message["role"] == "assistant" and row.trained and message.get("train", True)
        runs.append({"text": f"{message['role']}: ", "trained": False})
        runs.append({"text": "".join(texts), "trained": trained})
        runs.append({"text": "\n", "trained": False})
    return runs


def _told(medium: Media, row: Row) -> str:
    try:
        if medium.kind == "image":
            return "image {} x {}".format(*image_size(medium.value, row.folder, MediaAccess()))
        return f"audio {audio_seconds(medium.value, row.folder, MediaAccess()):.1f} s"
    except MediaError:
        return f"{medium.kind} that cannot be read"
