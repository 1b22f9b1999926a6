"""Scores of answers by a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import torch

from .checks import format_of
from .errors import RowError
from .preferences import read_preference
from .rows import read_row
from .targets import messages_row


def score_rows(model, collator, rows, batch_size: int) -> Iterator[dict]:
    """The scores of rows, in their order.

    Args:
        model: of `reward_model`.
        collator: of task "sft", with on_bad_media="skip".
        rows: conversations, of which the whole is scored; or pairs.

    Yields:
        {"row": name, "score": float}; of a pair {"row", "chosen": float, "rejected": float}; where a row cannot be
        scored {"row", "error": reason}.
    """
    rows = iter(rows)
    while some := list(islice(rows, batch_size)):
        told = [_sides(raw) for raw in some]
        asked = [side for _, sides in told if isinstance(sides, dict) for side in sides.values()]
        found = iter(_scores(model, collator, asked))
        for name, sides in told:
            scores = {key: next(found) for key in sides} if isinstance(sides, dict) else {}
            if errors := [score for score in scores.values() if isinstance(score, str)]:
                yield {"row": name, "error": errors[0]}
            else:
                yield {"row": name} | (scores or {"error": sides})


def _sides(raw) -> tuple[str, dict[str, dict] | str]:
    """(name, what is to be scored by what it is called) of a row; or why it cannot be read."""
    try:
        if isinstance(raw, RowError):
            raise raw
        if isinstance(raw, Mapping) and format_of(raw) == "preference":
            pair = read_preference(raw)
            return pair.name, {"chosen": messages_row(pair.chosen), "rejected": messages_row(pair.rejected)}
        row = read_row(raw)
        return row.name, {"score": raw}
    except RowError as problem:
        return problem.row, problem.reason


@torch.no_grad()
def _scores(model, collator, rows: list) -> list[float | str]:
    """A score for each row, or why it has none."""
    if not rows:
        return []
    try:
        batch = collator(rows)
    except RowError as problem:  # a medium that the model has no tower for
        batch, reason = None, problem.reason
    if batch is None or batch.counts.get("rows", 0) < len(rows):  # some were left out: find out which
        if len(rows) > 1:
            return [score for row in rows for score in _scores(model, collator, [row])]
        return [reason if batch is None else (batch.problems or [("", "cannot be read")])[0][1]]
    inputs = {key: value.to(model.device) for key, value in batch.items() if key != "labels"}
    return model(**inputs).logits[:, 0].tolist()
