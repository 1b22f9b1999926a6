"""A batch that remembers how it was made."""

from __future__ import annotations

from .stats import deliver


class Batch(dict):
    """A dict of tensors for `model(**batch)`, with `counts` and `problems` of what made it.

    `counts` is a mapping of `stats.COUNTERS`; `problems` lists (row name, what was wrong with it); `rows` the names of
    the rows that are in it. `count_for` is the key of the `Stats` that a worker's batch is counted for when it arrives
    in the process of the collator.
    """

    def __init__(self, tensors, counts=None, problems=(), rows=(), count_for: str | None = None):
        super().__init__(tensors)
        self.counts: dict[str, int] = dict(counts or {})
        self.problems: list[tuple[str, str]] = list(problems)
        self.rows: list[str] = list(rows)
        self.count_for = count_for

    def to(self, *args, **kwargs) -> Batch:
        return self._with({key: value.to(*args, **kwargs) for key, value in self.items()})

    def pin_memory(self) -> Batch:
        return self._with({key: value.pin_memory() for key, value in self.items()})

    def _with(self, tensors) -> Batch:
        return Batch(tensors, self.counts, self.problems, self.rows)

    def __reduce__(self):
        return _arrive, (dict(self), self.counts, self.problems, self.rows, self.count_for)


def _arrive(tensors, counts, problems, rows, count_for) -> Batch:
    """Take a batch out of a queue, and count it if it came from a worker."""
    if count_for is not None:
        deliver(count_for, counts)
    return Batch(tensors, counts, problems, rows)
