"""Batches of near-equal lengths in shuffled order, the same on all ranks and after a resume; workers change nothing."""

import itertools
import os
import types

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from conftest import ask, talk
from gemma_trainer import batching
from gemma_trainer.batching import LengthGroupedSampler, workers_for
from gemma_trainer.collator import MultimodalCollator


def log_normal(rows, sigma=1.0, most=None):
    lengths = np.exp(np.log(200) + np.random.default_rng(0).normal(0, sigma, rows)).astype(int)
    return lengths.clip(1, most)


def sampler_of(lengths, group=8, seed=0):
    return LengthGroupedSampler(len(lengths), group, lambda rows: [int(lengths[row]) for row in rows], seed)


def batches_of(order, size=8):
    order = list(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def padding(lengths, batches):
    """The share of padding among all tokens of the batches."""
    total = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    return 1 - sum(lengths[row] for batch in batches for row in batch) / total


@pytest.mark.parametrize(("rows", "most", "limit"), [
    (20_000, None, 0.04), (20_000, 2048, 0.02), (2000, 2048, 0.05), (500, 2048, 0.08),
])  # fmt: skip
def test_padding_all_but_goes(rows, most, limit):
    lengths = log_normal(rows, most=most)
    random = np.random.default_rng(1).permutation(rows)
    assert padding(lengths, batches_of(random)) > 0.5
    assert padding(lengths, batches_of(sampler_of(lengths))) < limit


def test_ranks_that_work_side_by_side_have_batches_of_near_equal_lengths():
    lengths = log_normal(20_000, most=2048)
    batches = batches_of(sampler_of(lengths, group=8 * 8))
    assert padding(lengths, batches) < 0.05
    longest = np.array([max(lengths[row] for row in batch) for batch in batches])
    steps = [list(range(start, min(start + 8, len(longest)))) for start in range(0, len(longest), 8)]
    assert padding(longest, steps) < 0.07  # a rank whose batch is shorter waits for the others


@pytest.mark.parametrize(("rows", "group"), [
    (20_000, 8), (4099, 8), (1000, 64), (100, 8), (9, 8), (8, 8), (5, 8), (1, 8), (1, 1), (17, 1), (0, 8),
    (20_000, 3000),
])  # fmt: skip
def test_each_row_comes_once_in_every_epoch(rows, group):
    sampler = sampler_of(log_normal(rows), group)
    assert len(sampler) == rows
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert sorted(sampler) == list(range(rows))


def test_a_seed_gives_an_order_and_each_epoch_another():
    lengths = log_normal(3000)
    orders = {}
    for seed, epoch in itertools.product((0, 1), (0, 1)):
        sampler = sampler_of(lengths, seed=seed)
        sampler.set_epoch(epoch)
        orders[seed, epoch] = list(sampler)
        assert list(sampler) == orders[seed, epoch]
    assert len({tuple(order) for order in orders.values()}) == 4
    first, second = ({frozenset(batch) for batch in batches_of(orders[0, epoch])} for epoch in (0, 1))
    assert len(first & second) < 0.1 * len(first)  # rows meet others, too


def test_batches_come_in_no_order_of_length():
    lengths = log_normal(8000)
    means = [np.mean(lengths[batch]) for batch in batches_of(sampler_of(lengths))]
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.1


def test_the_first_batch_is_the_longest_of_its_window():
    lengths = log_normal(1000)
    assert lengths.argmax() in batches_of(sampler_of(lengths))[0]


def test_rows_of_equal_length_are_shuffled():
    order = list(sampler_of(np.full(1000, 7)))
    assert order != sorted(order) and abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


def test_the_batch_that_is_not_full_comes_last_and_holds_rows_of_any_length():
    lengths, found = np.arange(1, 44), set()
    for seed in range(40):
        batches = batches_of(sampler_of(lengths, seed=seed))
        assert [len(batch) for batch in batches] == [8] * 5 + [3]
        assert np.ptp(lengths[batches[-1]]) == 2
        found.add(min(lengths[batches[-1]]))
    assert len(found) == 6


def test_each_length_is_asked_once_and_not_long_before_it_is_needed():
    lengths, asked = log_normal(20_000), []

    def lengths_of(rows):
        asked.extend(rows)
        return [int(lengths[row]) for row in rows]

    sampler = LengthGroupedSampler(20_000, 8, lengths_of)
    order = iter(sampler)
    next(order)
    assert len(asked) == pytest.approx(4096, rel=0.1)
    for taken, _ in enumerate(order, 2):
        if taken in (2000, 10_000):
            assert len(asked) <= sampler.window + taken + 8
    sampler.set_epoch(1)
    list(sampler)
    assert len(asked) == len(set(asked)) == 20_000

    again = LengthGroupedSampler(20_000, 8, lengths_of)
    again.lengths = sampler.lengths.copy()
    again.set_epoch(1)
    assert list(again) == list(sampler) and len(asked) == 20_000


def test_rows_by_themselves_are_measured_in_the_first_window_only():
    asked = []
    sampler = LengthGroupedSampler(20_000, 1, lambda rows: asked.extend(rows) or [row + 1 for row in rows])
    order = list(sampler)
    assert len(asked) == sampler.window == 4000 and order[0] == max(asked)


def test_what_is_wrong_is_told():
    with pytest.raises(ValueError, match="group=0"):
        LengthGroupedSampler(5, 0, len)
    with pytest.raises(ValueError, match="1 lengths of 5 rows"):
        list(LengthGroupedSampler(5, 2, lambda rows: [1]))


# ---- ranks and resuming, with accelerate's own loaders


def loaders(lengths, size, ranks):
    """The loader of each rank, as the trainer has it; a batch is the list of its rows."""
    for rank in range(ranks):
        loader = DataLoader(range(len(lengths)), size, sampler=sampler_of(lengths, size * ranks), collate_fn=list)
        yield prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=False)


@pytest.mark.parametrize("rows", [1000, 1003])
def test_ranks_have_parts_of_the_same_groups(rows):
    lengths = log_normal(rows)
    parts = [list(loader) for loader in loaders(lengths, 4, 3)]
    assert len({len(part) for part in parts}) == 1
    for step in list(zip(*parts, strict=True))[:-1]:
        together = sorted(itertools.chain(*step))
        assert len(set(together)) == 12
    seen = list(itertools.chain(*itertools.chain(*parts)))
    assert set(seen) == set(range(rows)) and len(seen) - rows < 12  # accelerate fills the last step up
    spread = [
        max(longest := [max(lengths[row] for row in batch) for batch in step]) / min(longest)
        for step in zip(*parts, strict=True)
    ]
    assert np.median(spread) < 1.05


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_skipping_the_batches_are_those_of_an_unbroken_run(ranks):
    lengths = log_normal(9000)
    for whole, resumed in zip(loaders(lengths, 4, ranks), loaders(lengths, 4, ranks), strict=True):
        for loader in (whole, resumed):
            loader.set_epoch(1)
        expected = list(whole)
        skipping = skip_first_batches(resumed, 1000)
        skipping.set_epoch(1)
        assert list(skipping) == expected[1000:]


# ---- workers


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_make_the_same_batches(processor, media, context):
    rows = [talk("hi", "hello"), ask(media, "red.png", "one.wav"), ask(media, "page.jpg"), talk("a b c", "d e f")] * 2
    here = list(DataLoader(rows, 3, collate_fn=MultimodalCollator(processor)))
    loader = DataLoader(rows, 3, collate_fn=MultimodalCollator(processor), num_workers=2,
                        multiprocessing_context=context, persistent_workers=True)  # fmt: skip
    for _ in range(2):
        for expected, batch in zip(here, loader, strict=True):
            assert expected.keys() == batch.keys() and expected.counts == batch.counts
            assert all(torch.equal(expected[key], batch[key]) for key in expected)


@pytest.mark.parametrize(("device", "media", "cores", "ranks", "free", "workers"), [
    ("cuda", True, 16, 1, 2**33, 4), ("cuda", True, 4, 1, 2**33, 2), ("cuda", True, 1, 1, 2**33, 0),
    ("cuda", True, 16, 4, 2**33, 2), ("cuda", True, 16, 16, 2**33, 0), ("cuda", False, 16, 1, 2**33, 1),
    ("cuda", True, 16, 1, 2**26, 0), ("cpu", True, 16, 1, 2**33, 0), ("mps", True, 16, 1, 2**33, 0),
])  # fmt: skip
def test_workers_that_are_chosen(monkeypatch, device, media, cores, ranks, free, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(batching.Path, "is_dir", lambda path: True)
    monkeypatch.setattr(batching.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    assert workers_for(device, media) == workers
