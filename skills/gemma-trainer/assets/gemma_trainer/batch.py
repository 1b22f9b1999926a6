"""A batch that remembers how it was made."""

from __future__ import annotations


class Batch(dict):
    """A dict of tensors for `model(**batch)`, with `counts` and `problems` of what made it.

    `counts` is a mapping of `stats.COUNTERS`; `problems` lists (row name, what was wrong with it).
    """

    def __init__(self, tensors, counts=None, problems=()):
        super().__init__(tensors)
        self.counts: dict[str, int] = dict(counts or {})
        self.problems: list[tuple[str, str]] = list(problems)

    def to(self, *args, **kwargs) -> Batch:
        return Batch({key: value.to(*args, **kwargs) for key, value in self.items()}, self.counts, self.problems)

    def pin_memory(self) -> Batch:
        return Batch({key: value.pin_memory() for key, value in self.items()}, self.counts, self.problems)

    def __reduce__(self):
        return Batch, (dict(self), self.counts, self.problems)
