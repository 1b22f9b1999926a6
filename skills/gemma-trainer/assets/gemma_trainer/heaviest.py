"""How long a run's rows are, and the batches that take the most memory; media are worked out from their headers."""

from __future__ import annotations

import heapq
import json

import numpy as np

from .batching import LengthGroupedSampler
from .errors import RowError
from .preferences import read_preference
from .rows import read_row

MEASURED = 2000  # rows whose tokens are counted; of more, as many spread evenly, and the largest of many
LOOKED_AT = 20_000  # rows among which the largest are looked for
LARGEST = 64


class Measured:
    """The lengths of a data set's rows, up to MEASURED of them.

    `exact` tells whether all rows were measured; else figures are estimates from rows spread evenly, and the longest
    row is the longest of these and of the largest of LOOKED_AT rows by the size of their JSON.

    Args:
        rows: a map-style data set of raw rows.
        collator: gives their lengths; its `max_length` cuts them.
        total: how many rows there are, where `rows` are the first ones of a stream; None where that is not known.
    """

    def __init__(self, rows, collator, total: int | None):
        self.rows, self.collator, self.total = rows, collator, total
        self.exact = len(rows) <= MEASURED and len(rows) == total
        step = max(1, len(rows) / MEASURED)
        self.even = sorted({int(at * step) for at in range(min(len(rows), MEASURED))})
        more = self._largest(LARGEST) if len(rows) > MEASURED else []
        self.at = self.even + [index for index in more if index not in set(self.even)]
        self.lengths = self._lengths(self.at)

    def _largest(self, count: int) -> list[int]:
        step = max(1, len(self.rows) / LOOKED_AT)
        looked_at = {int(at * step) for at in range(min(len(self.rows), LOOKED_AT))}
        return heapq.nlargest(count, looked_at, lambda at: len(json.dumps(self.rows[at], default=str)))

    def _lengths(self, indices: list[int]) -> np.ndarray:
        pieces = [indices[start : start + 256] for start in range(0, len(indices), 256)]
        found = [self.collator.lengths([self.rows[at] for at in piece]) for piece in pieces]
        return np.array([length for piece in found for length in piece], np.int64)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that was measured."""
        return int(self.lengths.max())

    def longer_than(self, length: int) -> int:
        """How many of the rows measured a limit would cut."""
        return int((self.lengths > length).sum())

    def tokens(self) -> int | None:
        """Tokens of all rows, each once; None where nobody knows how many rows there are."""
        even = self.lengths[: len(self.even)]
        return None if self.total is None else round(float(even.mean()) * self.total)

    def padding(self, batch_size: int, seed: int) -> float:
        """The share of padding in an epoch's batches, as the run's own sampler groups the rows."""
        even = self.lengths[: len(self.even)]
        sampler = LengthGroupedSampler(len(even), batch_size, lambda some: [int(even[at]) for at in some], seed)
        order = even[list(sampler)]
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        shape = sum(int(batch.max()) * len(batch) for batch in batches)
        return 1 - float(order.sum()) / max(shape, 1)

    def batches(self, batch_size: int) -> list[list[dict]]:
        """The rows of the batches that may take the most: the longest rows, and those with the most media."""
        by_length = [self.at[place] for place in np.argsort(-self.lengths, kind="stable")]
        chosen = [by_length]
        media = {at: _media_of(self.rows[at]) for at in by_length}
        if any(media.values()):
            by_media = sorted(by_length, key=lambda at: -media[at])
            if sum(media[at] for at in by_media[:batch_size]) > sum(media[at] for at in by_length[:batch_size]):
                chosen.append(by_media)
        return [[self.rows[order[at % len(order)]] for at in range(batch_size)] for order in chosen]


def _media_of(raw: dict) -> int:
    """How many images and clips a row has; of a pair, its own."""
    for read in (read_row, read_preference):
        try:
            return len(read(raw).media)
        except RowError:
            continue
    return 0
