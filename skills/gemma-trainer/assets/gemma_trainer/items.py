"""What a row is on its way to the batch: its slots with their media, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .labels import IGNORE
from .rendering import Rendered
from .rows import Row


@dataclass
class Shown:
    """One image or clip. Both sides of a pair show the same one."""

    kind: str
    content: Any = None  # PIL image or float32 samples; None when it was bad
    tokens: int | None = None  # its soft tokens; None when it was bad
    line: int = -1  # where it stands in the tensors

    @property
    def bad(self) -> bool:
        """Whether it could neither be opened nor measured."""
        return self.content is None and self.tokens is None


@dataclass
class Slot:
    """Where a row shows a medium."""

    medium: Shown
    run: tuple[int, int] = (0, 0)  # where its tokens stand in the row
    kept: bool = True


@dataclass
class Item:
    """A row, or a side of a pair. `tokens` [3, T] holds its ids, labels and token type ids."""

    row: Row
    slots: list[Slot] = field(default_factory=list)
    rendered: Rendered | None = None
    tokens: np.ndarray | None = None

    @property
    def bad(self) -> bool:
        return any(slot.medium.bad for slot in self.slots)

    @property
    def trained(self) -> np.ndarray:
        """Which tokens [T] are labels."""
        return self.tokens[1] != IGNORE

    def cut_at(self, max_length: int) -> int:
        """Where a cut at `max_length` falls: a medium that it would meet goes whole."""
        met = (start for start, end in (slot.run for slot in self.slots) if start < max_length < end)
        return min([max_length, self.tokens.shape[1], *met])

    def cut(self, max_length: int) -> None:
        """Cut the tail."""
        end = self.cut_at(max_length)
        for slot in self.slots:
            slot.kept = slot.kept and slot.run[1] <= end
        self.tokens = self.tokens[:, :end]

    def leave_out(self, start: int, stop: int) -> None:
        """Leave out tokens that hold no medium."""
        self.tokens = np.delete(self.tokens, slice(start, stop), axis=1)
        for slot in self.slots:
            if slot.run[0] >= stop:
                slot.run = slot.run[0] - (stop - start), slot.run[1] - (stop - start)

    def lines(self, kind: str) -> list[int | None]:
        """Where the row's media of a kind stand in the tensors; None for those that could not be read."""
        media = [slot.medium for slot in self.slots if slot.medium.kind == kind and slot.kept]
        return [None if medium.content is None else medium.line for medium in media]
