"""Which rows make a batch, and how many processes prepare batches ahead."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import Sampler

WINDOW_ROWS, WINDOW_GROUPS = 4096, 64  # a window of a large data set has about so many rows, but no fewer groups
MIN_SHARED_BYTES = 2**30


class LengthGroupedSampler(Sampler):
    """Row indices in shuffled order, in which each group of `group` rows has near-equal lengths.

    An epoch's random order is cut into windows of equal size. A window is sorted by length and cut into groups, which
    come in random order; a last group that is not full comes last of all. Windows keep the start short: the rows of the
    first one are measured at once, those of each other one piece by piece while the one before is handed out, so that a
    data set of millions need not be tokenized before step 1, nor at the end of a window. A data set of 128 groups or
    more has two windows at least, so that rows meet others in each epoch. An epoch begins with the longest group of its
    first window: what runs out of memory does so soon.

    The order follows from `seed`, the epoch and the lengths alone. So all ranks have the same, and a run that skips the
    batches it has seen goes on with those it would have had.

    Args:
        rows: rows in the data set.
        group: rows that are used side by side: the batch size times the number of ranks. In groups of one row there is
            nothing to pad, and only the first window is measured.
        lengths_of: takes row indices and returns the length of each, such as its tokens; asked once for each row.
        seed: of the order.

    `lengths` [rows] int32 holds what is known, 0 where nothing is; put it back to go on without measuring again.

    Example:
        sampler = LengthGroupedSampler(len(rows), 8, lambda some: collator.lengths([rows[i] for i in some]))
        loader = DataLoader(rows, 8, sampler=sampler, collate_fn=collator)

    Raises:
        ValueError: `group` is less than 1; while iterating, `lengths_of` returns another number of lengths than asked.
    """

    def __init__(self, rows: int, group: int, lengths_of: Callable[[list[int]], list[int]], seed: int = 0):
        if group < 1:
            raise ValueError(f"group={group} must be at least 1")
        self.group, self.lengths_of, self.seed, self.epoch = group, lengths_of, seed, 0
        self.lengths = np.zeros(rows, np.int32)
        groups = math.ceil(rows / group)
        windows = math.ceil(groups / max(WINDOW_GROUPS, WINDOW_ROWS // group))
        if windows == 1 and groups >= 2 * WINDOW_GROUPS:
            windows = 2
        self.window = group * max(1, math.ceil(groups / max(1, windows)))

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self))
        windows = [order[start : start + self.window] for start in range(0, len(order), self.window)]
        for number, window in enumerate(windows):
            if number == 0 or self.group > 1:
                self._measure(window)
            ahead = windows[number + 1] if number + 1 < len(windows) and self.group > 1 else window[:0]
            for at, group in enumerate(self._groups(window, random, longest_first=number == 0)):
                self._measure(ahead[at * self.group : (at + 1) * self.group])
                yield from group.tolist()

    def _measure(self, rows: np.ndarray) -> None:
        unknown = rows[self.lengths[rows] == 0].tolist()
        if unknown:
            found = self.lengths_of(unknown)
            if len(found) != len(unknown):
                raise ValueError(f"{len(found)} lengths of {len(unknown)} rows")
            self.lengths[unknown] = np.maximum(found, 1)

    def _groups(self, window: np.ndarray, random, longest_first: bool) -> list[np.ndarray]:
        """The groups of a window in random order. The one that is not full is taken from anywhere in the window, or the
        longest rows of all would always come at the end of an epoch."""
        window = window[np.argsort(self.lengths[window], kind="stable")]  # rows of equal length stay in random order
        full, rest = divmod(len(window), self.group)
        cut = self.group * int(random.integers(full + 1))
        groups = np.concatenate([window[:cut], window[cut + rest :]]).reshape(full, self.group)
        groups = groups[random.permutation(full)]
        if longest_first and full:
            longest = self.lengths[groups[:, -1]].argmax()
            groups[[0, longest]] = groups[[longest, 0]]
        return [*groups, window[cut : cut + rest]]


class RankBatches(Sampler):
    """The batches of one rank, as lists of row indices; a batch sampler for `torch.utils.data.DataLoader`.

    The order is cut into groups of `size` rows for each rank, which are dealt out one by one. Every row is in one batch
    of one rank, and all ranks have as many batches: of a last group that is too small some get none of its rows, and an
    empty batch, which `collator.MultimodalCollator` makes something without loss of.

    Args:
        order: row indices, the same for all ranks, such as a `LengthGroupedSampler`.

    Example:
        RankBatches(range(9), 2, rank=0, world=2)  # [0, 2], [4, 6], [8]
        RankBatches(range(9), 2, rank=1, world=2)  # [1, 3], [5, 7], []
    """

    def __init__(self, order, size: int, rank: int = 0, world: int = 1):
        self.order, self.size, self.rank, self.world = order, size, rank, world

    def __len__(self) -> int:
        return math.ceil(len(self.order) / (self.size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.order)
        while group := list(itertools.islice(rows, self.size * self.world)):
            yield group[self.rank :: self.world]


def start_worker(number: int) -> None:
    """Take a dataloader worker out of its trainer's process group: a launcher and Ctrl-C signal the group, and a worker
    that ends at once would take the checkpoint with it that the trainer is about to save."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def workers_for(device: str, has_media: bool) -> int:
    """How many processes should prepare batches ahead, for each process that trains.

    Half of the cores that a training process may count as its own, at most four, or one where all is text. None where a
    CPU trains, which takes all cores itself; none on a Mac, where to start one takes seconds; and none where the shared
    memory that batches come through is small, as Docker's 64 MiB are.

    Args:
        device: what trains, "cuda", "mps" or "cpu".
        has_media: whether the rows have images or audio, which have to be decoded.
    """
    shared = Path("/dev/shm")
    if device != "cuda" or (shared.is_dir() and shutil.disk_usage(shared).free < MIN_SHARED_BYTES):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4 if has_media else 1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // 2)
