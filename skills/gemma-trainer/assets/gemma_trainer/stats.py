"""What the collator counted. A batch is counted once, where it is delivered, also when a worker process made it."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator, Mapping

COUNTERS = (
    "rows", "tokens", "trained_tokens", "padding", "images", "clips", "placeholders",
    "truncated",  # rows cut to max_length
    "cut_to_nothing",  # rows whose trained tokens all went with the cut
    "untrained_rows",  # rows with nothing trained, kept as context
    "long_audio",  # clips longer than the model hears
    "bad_media", "bad_rows", "skipped_rows",
    "reasoning_dropped",  # reasonings that the chat template leaves out
    "inexact_turns",  # trained turns behind another prompt than in use
)  # fmt: skip
_live: weakref.WeakValueDictionary[str, Stats] = weakref.WeakValueDictionary()


class Stats(Mapping):
    """Counters of the batches that were delivered: `stats["rows"]`, `stats.rows`, `dict(stats)`.

    A dataloader worker prepares batches ahead that nobody may ever take. So its batches bring their counts along, and
    are counted when the process that made the collator takes them out of the queue (see `batch.Batch`).
    """

    def __init__(self):
        self._counts = dict.fromkeys(COUNTERS, 0)
        self.key = uuid.uuid4().hex  # how a batch that comes from a worker finds its way back
        _live[self.key] = self

    def add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self._counts[name] += int(count)

    def reset(self) -> None:
        self._counts = dict.fromkeys(COUNTERS, 0)

    def __setstate__(self, state):
        self.__dict__.update(state)
        if self.key in _live:  # a copy in the same process counts for itself; one in a worker keeps the key
            self.key = uuid.uuid4().hex
        _live[self.key] = self

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def __getattr__(self, name: str) -> int:
        if name in COUNTERS:
            return self._counts[name]
        raise AttributeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COUNTERS)

    def __len__(self) -> int:
        return len(COUNTERS)

    def __repr__(self) -> str:
        return f"Stats({ {name: count for name, count in self.items() if count} })"


def deliver(key: str, counts: Mapping[str, int]) -> None:
    """Count a batch for the `Stats` of this key, if it is still alive in this process."""
    if (stats := _live.get(key)) is not None:
        stats.add(counts)


def add_counts(total: dict[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Add `counts` to `total` in place, and return it."""
    for name, count in counts.items():
        total[name] = total.get(name, 0) + int(count)
    return total
