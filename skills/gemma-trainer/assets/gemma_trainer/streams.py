"""Rows of shards as a stream without end: shuffled, split over ranks and dataloader workers, resumed where it was."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .batching import start_worker
from .errors import CannotLoad, RowError, UsageError
from .shards import BUFFER_BYTES, Record, Shards, Unit, records

POOL = 16  # groups that are sorted by length together
PATIENCE = 50  # epochs without a row, times the readers: by chance a reader may get empty shards several times


class RowStream(IterableDataset):
    """Batches of raw rows for one rank, without end: a data set for `DataLoader(..., batch_size=None)`.

    Each epoch takes the shards in another order and shuffles the rows in a buffer. They are split over the readers,
    which are the dataloader workers of all ranks: by whole shards where there are at least as many (about the same
    number of rows or bytes for each), else each reads all and takes every n-th row. In an epoch every row is given to
    one reader, and to one only; a reader goes on to its next epoch at once, so that no rank ever waits for rows.

    The order follows from the shards, the seed, the buffer, `group` and the numbers of ranks and workers alone.
    `state()` is what was delivered up to now; `take_up` goes on from there, with the rows before passed over unparsed.

    Args:
        shards: what is read.
        batch_size: rows in a batch; there is no other batch than a full one.
        seed: of the order.
        buffer: most rows in the shuffle buffer; 1 leaves the order of a shard as it is.
        rank, world: this process among those that train.
        workers: dataloader workers of each rank, 0 for none.
        group: rows that are taken side by side, of near-equal lengths; the batch size by default. 1 measures nothing.
        lengths: takes raw rows and returns the length of each, such as `MultimodalCollator.lengths`.

    Iterating yields lists of `batch_size` raw rows, with a RowError in the place of each that cannot be read.

    Example:
        stream = RowStream(open_shards(["rows-{00..15}.jsonl.gz"]), 8, seed=0, lengths=collator.lengths)
        loader = DataLoader(stream, batch_size=None, collate_fn=collator)

    Raises:
        CannotLoad: while iterating, where a shard cannot be read.
    """

    def __init__(self, shards: Shards, batch_size: int, *, seed: int = 0, buffer: int = 10_000, rank: int = 0,
                 world: int = 1, workers: int = 0, group: int | None = None,
                 lengths: Callable[[list], list[int]] | None = None):  # fmt: skip
        self.shards, self.batch_size, self.seed, self.buffer = shards, batch_size, seed, buffer
        self.rank, self.world, self.workers = rank, world, max(1, workers)
        self.group, self.lengths = group or batch_size, lengths
        self.delivered = 0  # batches, counted by who takes them
        self._before, self._first = [0] * self.workers, 0  # rows of each reader, and whose batch comes first

    def __iter__(self) -> Iterator[list]:
        if info := get_worker_info():
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the collator has it
        if (info.num_workers if info else 1) != self.workers:
            raise ValueError(
                f"{info.num_workers if info else 0} workers read a stream that is split over {self.workers}"
            )
        own = (self._first + (info.id if info else 0)) % self.workers
        rows = self._rows(self.rank * self.workers + own, self._before[own])
        while True:
            yield list(itertools.islice(rows, self.batch_size))

    def loader(self, collate, args) -> DataLoader:
        """A loader of the batches, with the workers that `args` (of a trainer of transformers) asks for. They end with
        the iteration; the stream is split over ranks already, and is not to be split again."""
        return DataLoader(
            self,
            batch_size=None,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(args.seed),  # see `trainers.RowsTrainer._loader`
        )

    # -- where it is

    def epochs(self, batches: int) -> float | None:
        """How often so many batches of each rank hold all rows; None where nobody knows how many there are."""
        return batches * self.batch_size * self.world / self.shards.rows if self.shards.rows else None

    def state(self) -> dict:
        """What was delivered, the same on all ranks: JSON."""
        taken = list(self._before)
        for turn in range(self.workers):  # the workers deliver in turn
            batches = (self.delivered - turn + self.workers - 1) // self.workers
            taken[(self._first + turn) % self.workers] += batches * self.batch_size
        return {
            "rows": taken,
            "first": (self._first + self.delivered) % self.workers,
            "group": self.group,
            "world": self.world,
            "workers": self.workers,
        }

    def take_up(self, state: dict) -> None:
        """Go on from what `state()` returned; the batch size may be another one.

        Raises:
            UsageError: it was of another number of ranks or workers, which had other rows.
        """
        for name, what in (("world", "ranks (GPUs)"), ("workers", "of --num-workers (or none)")):
            if state[name] != getattr(self, name):
                told = f"--resume: the rows were split over {state[name]} {what}, now over {getattr(self, name)}"
                raise UsageError(f"{told}: a stream goes on with as many as it began with")
        self._before, self._first, self.group = list(state["rows"]), state["first"], state["group"]
        self.delivered = 0

    # -- the order

    def _rows(self, reader: int, skip: int) -> Iterator[dict | RowError]:
        """The rows of a reader from the one numbered `skip`, epoch after epoch."""
        handed = empty = 0
        for epoch in itertools.count():
            if empty > PATIENCE * self.world * self.workers:
                raise CannotLoad("the shards have no rows any more")
            if (count := self._count(reader, epoch)) is not None and handed + count <= skip:
                handed += count
                continue
            shuffled = self._shuffled(reader, epoch)
            for number in itertools.count():
                pool = list(itertools.islice(shuffled, self.group * (POOL if self.group > 1 else 1)))
                if not pool:
                    empty = 0 if number else empty + 1
                    break
                if handed + len(pool) > skip:
                    random = np.random.default_rng((self.seed, epoch, reader, number))
                    yield from self._in_groups(pool, -handed % self.group, random)[max(0, skip - handed) :]
                handed += len(pool)

    def _in_groups(self, pool: list[Record], lead: int, random) -> list[dict | RowError]:
        """The rows of a pool, so that those of near-equal lengths come side by side. `lead` rows fill up the group that
        the pool before began."""
        rows = [record.row() for record in pool]
        if self.group == 1 or self.lengths is None:
            return rows
        order = np.argsort(self.lengths(rows), kind="stable")
        head, order = _cut_out(order, min(lead, len(order)), random)
        tail, order = _cut_out(order, len(order) % self.group, random)
        groups = order.reshape(-1, self.group)
        groups = groups[random.permutation(len(groups))]
        return [rows[index] for index in (*head, *groups.reshape(-1), *tail)]

    def _shuffled(self, reader: int, epoch: int) -> Iterator[Record]:
        random = np.random.default_rng((self.seed, epoch, reader))
        held: list[Record] = []
        size = 0
        for record in self._records(reader, epoch):
            held.append(record)
            size += record.size
            while len(held) >= self.buffer or (size > BUFFER_BYTES and held):
                at = int(random.integers(len(held)))
                held[at], held[-1] = held[-1], held[at]
                size -= held[-1].size
                yield held.pop()
        for at in random.permutation(len(held)):
            yield held[at]

    # -- who reads what

    def _records(self, reader: int, epoch: int) -> Iterator[Record]:
        """A reader's records of an epoch, in the order they are read."""
        units = self._units(reader, epoch)
        found = itertools.chain.from_iterable(map(records, units))
        if self._by_shards:
            return found
        readers = self.world * self.workers
        # The readers change places from epoch to epoch, or one might never get a row where there are few.
        return itertools.islice(found, (reader + epoch) % readers, None, readers)

    @property
    def _by_shards(self) -> bool:
        return len(self.shards.units) >= self.world * self.workers

    def _units(self, reader: int, epoch: int) -> list[Unit]:
        """What a reader reads in an epoch: in a new order each unit goes to the one that has least up to then."""
        units = self.shards.units
        order = np.random.default_rng((self.seed, epoch)).permutation(len(units))
        if not self._by_shards:
            return [units[index] for index in order]
        known = self.shards.rows is not None
        loads, mine = np.zeros(self.world * self.workers), []
        for index in order:
            least = int(loads.argmin())
            loads[least] += (units[index].rows if known else units[index].size) or 1
            mine += [units[index]] if least == reader else []
        return mine

    def _count(self, reader: int, epoch: int) -> int | None:
        """How many records a reader has in an epoch, where that is known."""
        if self.shards.rows is None:
            return None
        if self._by_shards:
            return sum(unit.rows for unit in self._units(reader, epoch))
        readers = self.world * self.workers
        return len(range((reader + epoch) % readers, self.shards.rows, readers))


def _cut_out(order: np.ndarray, count: int, random) -> tuple[np.ndarray, np.ndarray]:
    """(`count` neighbours from anywhere, what is left)."""
    at = int(random.integers(len(order) - count + 1))
    return order[at : at + count], np.concatenate([order[:at], order[at + count :]])
