"""A loss or a gradient that is no number stops the run at its step, or is left out of it."""

import math

import pytest
import torch
import transformers

from conftest import talk
from gemma_trainer.errors import Diverged

ROWS = [talk(f"question number {n}", f"answer {n}") for n in range(8)]


def spoil(trainer, step, what):
    """Make the loss, or only its gradient, infinite in the first batch of a step (from 1)."""
    compute = trainer.compute_loss

    def spoiled(model, inputs, **options):
        loss = compute(model, inputs, **options)
        if trainer.state.global_step + 1 in (step if isinstance(step, tuple) else (step,)):
            if what == "loss":
                return loss * math.nan
            weight = next(p for p in model.parameters() if p.requires_grad)
            return loss + (weight.sum() * 0.0).sqrt()  # 0, whose gradient is 0 * infinity
        return loss

    trainer.compute_loss = spoiled


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_the_run_stops_at_that_step_and_names_rows_checkpoint_and_causes(make_trainer, what):
    trainer = make_trainer(ROWS, max_steps=4, steps=4000, save_steps=1)
    assert trainer.args.logging_steps == 20  # it is not the log that tells
    spoil(trainer, 3, what)
    with pytest.raises(Diverged) as caught:
        trainer.train()
    told = str(caught.value)
    assert told.startswith(f"training diverged at step 3: the {what} is not a number. Rows of that step: row ")
    assert "The last whole checkpoint is checkpoint-2" in told and len(told.splitlines()) == 2
    assert told.index("--lr 0.001") < told.index("--on-divergence skip")
    assert all(p.isfinite().all() for p in trainer.model.parameters())  # the step was not applied


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_leaves_the_step_out_and_counts_it(make_trainer, what):
    runs = {}
    for step in (None, 3):
        trainer = make_trainer(ROWS, max_steps=4, grad_accum=1, trainer_options={"on_divergence": "skip"})
        spoil(trainer, step, what)
        before = {}
        trainer.add_callback(Weights(before))
        trainer.train()
        runs[step] = trainer, before
    trainer, weights = runs[3]
    assert trainer.counts["diverged_steps"] == 1 and "diverged_steps" not in runs[None][0].counts
    assert all(torch.equal(weights[2][name], value) for name, value in weights[3].items())  # nothing happened
    assert any(not torch.equal(weights[3][name], value) for name, value in weights[4].items())
    named = [reason for row, reason in trainer.problems if row.startswith("row ")]
    assert named and all(reason == f"left out at step 3: the {what} is not a number" for reason in named)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, losses)) and losses[:2] == [
        entry["loss"] for entry in runs[None][0].state.log_history if "loss" in entry
    ][:2]  # fmt: skip


def test_skipping_ends_where_every_step_diverges(make_trainer):
    trainer = make_trainer(ROWS, max_steps=30, epochs=9, trainer_options={"on_divergence": "skip"})
    spoil(trainer, tuple(range(31)), "loss")
    with pytest.raises(Diverged, match="at step 11, as it did at the 10 steps before"):
        trainer.train()


def test_only_the_rows_of_the_bad_batch_are_named(make_trainer, monkeypatch):
    trainer = make_trainer(ROWS, max_steps=1, batch_size=2, grad_accum=4)
    compute, calls = trainer.compute_loss, []

    def spoiled(model, inputs, **options):
        calls.append(1)
        return compute(model, inputs, **options) * (math.nan if len(calls) == 2 else 1.0)

    trainer.compute_loss = spoiled
    with pytest.raises(Diverged) as caught:
        trainer.train()
    rows = str(caught.value).split("Rows of that step: ")[1].split(".")[0].split(", ")
    assert len(rows) == 2 and len(calls) == 4


class Weights(transformers.TrainerCallback):
    """The trained weights behind each step."""

    def __init__(self, kept):
        self.kept = kept

    def on_step_end(self, args, state, control, model=None, **kwargs):
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.kept[state.global_step] = trained
