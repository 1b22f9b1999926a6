"""Both sides of a preference pair, which are read, shown and cut as one."""

from __future__ import annotations

import numpy as np

from .items import Item, Shown, Slot
from .labels import Markers
from .preferences import Preference


def pair_items(pair: Preference) -> tuple[Item, Item]:
    """The chosen and the rejected side, which share the media of the prompt."""
    chosen = Item(pair.chosen, [Slot(Shown(medium.kind)) for medium in pair.chosen.media])
    prompt = len(pair.chosen.media) + len(pair.rejected.media) - len(pair.media)
    own = [Slot(Shown(medium.kind)) for medium in pair.rejected.media[prompt:]]
    return chosen, Item(pair.rejected, [Slot(slot.medium) for slot in chosen.slots[:prompt]] + own)


def shorten(chosen: Item, rejected: Item, max_length: int, markers: Markers) -> None:
    """Make a pair fit: the oldest exchanges of the prompt go first, then both answers' tails at the same length.

    What stays of the prompt are BOS, the system's words, exchanges with media, and the turn that is answered. Media go
    whole where the cut of the tail meets them. An answer of which nothing is left has nothing trained.
    """
    sides, forgotten = (chosen, rejected), 0
    over = max(item.tokens.shape[1] for item in sides) - max_length
    for start, stop in _exchanges(chosen, rejected, markers):
        if over <= 0:
            break
        for item in sides:
            item.leave_out(start - forgotten, stop - forgotten)
        forgotten += stop - start
        over -= stop - start
    for item in sides:
        item.cut(max_length)


def _exchanges(chosen: Item, rejected: Item, markers: Markers) -> list[tuple[int, int]]:
    """The tokens [start, stop) of each exchange of the prompt that may be forgotten, from a user's turn to the next."""
    ids, other = chosen.tokens[0], rejected.tokens[0]
    both = min(len(ids), len(other))
    ends = [np.flatnonzero(ids[:both] != other[:both]), *(np.flatnonzero(side.trained) for side in (chosen, rejected))]
    turns = np.flatnonzero(ids == markers.turn_start)
    turns = turns[turns < min([both, *(end[0] for end in ends if len(end))])]  # of what both sides are asked
    header = np.array(markers.user_header)
    users = [at for at in turns.tolist() if np.array_equal(ids[at : at + len(header)], header)]
    first = chosen.row.messages[0]["role"]
    if users and users[0] == turns[0] and (first in ("system", "developer") or chosen.row.tools):
        del users[0]  # Gemma 3 shows the system's words there
    media = [slot.run for slot in chosen.slots]
    return [
        (start, stop)
        for start, stop in zip(users, users[1:], strict=False)
        if not any(start < run_end and run_start < stop for run_start, run_end in media)
    ]
