"""What the collator counted, right across dataloader workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

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
MAX_WORKERS = 256


class Stats(Mapping):
    """Counters in shared memory: `stats["rows"]`, `stats.rows`, `dict(stats)`.

    Each dataloader worker adds to a line of its own, so that no lock is needed; reading adds the lines up. Give
    training and evaluation a collator each: two sets of workers must not share one.
    """

    def __init__(self):
        self._lines = torch.zeros(MAX_WORKERS + 1, len(COUNTERS), dtype=torch.int64).share_memory_()

    def add(self, counts: Mapping[str, int]) -> None:
        worker = torch.utils.data.get_worker_info()
        line = self._lines[0 if worker is None else 1 + worker.id % MAX_WORKERS]
        for name, count in counts.items():
            line[COUNTERS.index(name)] += int(count)

    def reset(self) -> None:
        self._lines.zero_()

    def __getitem__(self, name: str) -> int:
        if name not in COUNTERS:
            raise KeyError(name)
        return int(self._lines[:, COUNTERS.index(name)].sum())

    def __getattr__(self, name: str) -> int:
        if name in COUNTERS:
            return self[name]
        raise AttributeError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COUNTERS)

    def __len__(self) -> int:
        return len(COUNTERS)

    def __repr__(self) -> str:
        return f"Stats({ {name: count for name, count in self.items() if count} })"


def add_counts(total: dict[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Add `counts` to `total` in place, and return it."""
    for name, count in counts.items():
        total[name] = total.get(name, 0) + int(count)
    return total
