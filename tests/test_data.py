"""How many steps a run has, and which rows it holds back."""

import types

import pytest

from gemma_trainer import data, preparation
from gemma_trainer.errors import DataError


@pytest.mark.parametrize(("rows", "batch", "accumulation", "epochs", "steps"), [
    (27, 1, 8, 5, 20), (27, 1, 8, 1, 4), (72, 8, 1, 1, 9), (10, 4, 2, 0.5, 1), (3, 8, 8, 2, 2), (100, 3, 1, 1.5, 51),
])  # fmt: skip
def test_planned_steps_round_up_in_each_epoch_as_the_trainer_does(rows, batch, accumulation, epochs, steps):
    config = types.SimpleNamespace(max_steps=None, batch_size=batch, grad_accum=accumulation, epochs=epochs)
    assert preparation.steps_of(config, rows) == steps


def test_a_split_is_whole_and_repeatable():
    rows = [{"a": n} for n in range(10)]
    train, held = data.split(rows, 0.2, seed=3)
    assert sorted(row["a"] for row in [*train, *held]) == list(range(10)) and len(held) == 2
    assert [row["a"] for row in data.split(rows, 0.2, seed=3)[1]] == [row["a"] for row in held]
    with pytest.raises(DataError, match="leaves none of 1 rows"):
        data.split(rows[:1], 0.5, seed=0)
