"""A few rows of a data set as the model will see them, with what is trained told apart."""

from __future__ import annotations

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
    """The first rows of each kind (text, image, audio, ...), at most six.

    Args:
        rows: a `sources.Rows`, of which the first `count` are looked at.
        collator: of the model; without it the messages stand for themselves.

    Returns:
        dicts of `row` (its name), `runs` (`{"text", "trained"}`), `media` (such as "image 640 x 480"), and with a
        collator `tokens` and `trained`.
    """
    found: dict[tuple, list] = {}
    for position in range(min(count, LOOKED_AT)):
        try:
            entry = read_entry(rows[position], f"row {position}", task)
            shown = _example(entry, collator)
        except RowError:
            continue
        kinds = tuple(sorted({medium.kind for medium in main_row(entry).media}))
        found.setdefault(kinds, []).append(shown)
        if len(found) == 4 and all(len(same) >= 2 for same in found.values()):
            break
    each = max(1, SHOWN // max(1, len(found)))
    return [example for same in found.values() for example in same[:each]][:SHOWN]


def _example(entry: Row | Preference, collator) -> dict:
    sides = [entry] if isinstance(entry, Row) else [entry.chosen, entry.rejected]
    row = sides[0]
    example = {"row": row.name, "media": [_told(medium, row) for medium in row.media], "runs": []}
    if collator is None:
        example["runs"] = [run for side in sides for run in _plain_runs(side)]
        return example
    measured = collator.measure(sides)
    for found in measured:
        if isinstance(found, RowError):
            raise found
        example["runs"] += _runs(found.tokens, collator)
    example["tokens"] = sum(found.tokens.shape[1] for found in measured)
    example["trained"] = sum(int((found.tokens[1] != IGNORE).sum()) for found in measured)
    return example


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
