"""The trainer on the real tiny model: token-weighted, finite, counted as delivered, checkpoints whole."""

import json
import math
import time
import types

import pytest
import torch
import transformers

from conftest import ask, talk
from gemma_trainer import callbacks, checkpoints, collected, preparation
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import DataError, Diverged, EnvironmentUnfit
from gemma_trainer.runs import Run

LENGTHS = [
    "a",
    "one two three four five six seven eight nine ten " * 5,
    "b c",
    "what is the weather in the city today " * 4,
]
UNEVEN = [talk("hi", text) for text in LENGTHS]


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of the first optimizer step, unclipped as far as the norm allows."""

    def __init__(self):
        self.first = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.first is None:
            named = model.named_parameters()
            self.first = {name: p.grad.clone() for name, p in named if p.requires_grad and p.grad is not None}


def first_gradients(make_trainer, rows, **options):
    watch = Gradients()
    trainer = make_trainer(rows, extra=[watch], max_steps=1, **options)
    trainer.train()
    return watch.first, trainer.state.log_history[0]["loss"]


def test_accumulation_is_token_weighted(make_trainer):
    together, loss_together = first_gradients(make_trainer, UNEVEN, batch_size=4, grad_accum=1)
    one_by_one, loss_one_by_one = first_gradients(make_trainer, UNEVEN, batch_size=1, grad_accum=4)
    assert loss_together == pytest.approx(loss_one_by_one, rel=1e-4)
    assert together.keys() == one_by_one.keys() and len(together) == 48
    for name, grad in together.items():
        assert torch.allclose(grad, one_by_one[name], rtol=1e-3, atol=1e-5), name


def test_a_run_has_the_steps_that_were_planned(make_trainer):
    rows, config = [talk("hi", "hello")] * 7, {"batch_size": 2, "grad_accum": 3, "epochs": 3}
    planned = preparation.steps_of(types.SimpleNamespace(max_steps=None, **config), len(rows))
    trainer = make_trainer(rows, **config)
    trainer.train()
    assert trainer.state.global_step == planned == 6


def test_the_loss_is_the_mean_over_trained_tokens(make_trainer, processor):
    trainer = make_trainer(UNEVEN, batch_size=1, grad_accum=4, max_steps=1)
    batch = MultimodalCollator(processor)(UNEVEN)
    with torch.no_grad():
        logits = trainer.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).item()
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)


def test_evaluation_loss_is_token_weighted_whatever_the_batches(make_trainer, processor):
    found = []
    for size in (1, 3, 4):
        trainer = make_trainer(UNEVEN, UNEVEN, batch_size=size)
        found.append(trainer.evaluate()["eval_loss"])
        batch = MultimodalCollator(processor)(UNEVEN)
        with torch.no_grad():
            logits = trainer.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).item()
    assert found == pytest.approx([expected] * 3, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_with_nothing_trained_have_loss_zero_and_change_nothing(make_trainer, accumulation):
    context = [talk("a", "b", loss_type="context_only")] * 4
    trainer = make_trainer(context, context, grad_accum=accumulation, batch_size=2)
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["loss"] == 0.0 and entry["grad_norm"] == 0.0 for entry in logged) and logged
    assert trainer.evaluate()["eval_loss"] == 0.0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if p.requires_grad)


def test_checkpointing_leaves_the_gradients_of_every_tower_as_they_are(make_trainer, media):
    rows = [ask(media, "red.png", "one.wav")] * 2
    plain, _ = first_gradients(make_trainer, rows, targets="all")
    saved, _ = first_gradients(make_trainer, rows, targets="all", checkpointing=True)
    assert plain.keys() == saved.keys() and len(plain) == 120
    for name, grad in plain.items():
        assert torch.allclose(grad, saved[name], rtol=1e-3, atol=1e-6), name
    towers = [name for name in saved if "vision_tower" in name or "audio_tower" in name]
    assert towers and all(saved[name].abs().max() > 0 for name in towers)


@pytest.mark.parametrize("workers", [0, 2])
def test_counters_are_of_the_batches_that_were_trained_on(make_trainer, media, workers):
    rows = [talk("hi", "hello"), ask(media, "one.wav")] * 10
    trainer = make_trainer(rows, rows, max_steps=3, batch_size=2, workers=workers)
    trainer.train()
    assert trainer.counts["rows"] == 6 and len(trainer.lengths) == 6
    assert trainer.counts["tokens"] == sum(trainer.lengths)


# ---- batches


def test_rows_of_near_equal_lengths_are_trained_together_and_evaluation_keeps_its_order(make_trainer):
    rows = [talk("hi", "hello"), talk("hi", LENGTHS[1])] * 8
    trainer = make_trainer(rows, rows, max_steps=8)
    trainer.train()
    assert trainer.counts["padding"] == 0 and len(set(trainer.lengths)) == 2
    lengths = [int(row.sum()) for batch in trainer.get_eval_dataloader() for row in batch["attention_mask"]]
    assert lengths == [lengths[0], lengths[1]] * 8 and lengths[0] < lengths[1]


def watched(trainer):
    """Let a trainer only look at its batches; returns the list they come in."""
    seen = []
    trainer.args.save_total_limit = None
    trainer.training_step = lambda model, inputs, items: seen.append(inputs["input_ids"].tolist()) or torch.zeros(())
    return seen


def test_a_resumed_run_sees_the_very_rows_that_an_unbroken_one_sees(make_trainer, tmp_path):
    rows = [talk("hi", "word " * number) for number in range(1, 24)]
    options = {"batch_size": 2, "grad_accum": 2, "max_steps": 10, "save_steps": 2}  # 6 steps to an epoch
    unbroken = make_trainer(rows, **options)
    expected = watched(unbroken)
    unbroken.train()
    assert len(expected) == 20 and expected[:12] != expected[12:]
    for step, batches in ((4, 8), (6, 12), (8, 16)):
        resumed = make_trainer(rows, **options)
        seen = watched(resumed)
        resumed.data_collator.lengths = lambda rows: pytest.fail("measured again")
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert seen == expected[batches:]


def test_the_sampler_is_told_the_epoch_that_a_run_resumes_in(make_trainer):
    trainer = make_trainer(UNEVEN)
    callbacks.Watchman(trainer).on_epoch_begin(None, transformers.TrainerState(epoch=2.75), None)
    assert trainer.sampler.epoch == 2


def test_the_time_that_training_waits_for_batches_is_told_and_kept(make_trainer, tmp_path):
    options = {"batch_size": 1, "grad_accum": 2, "save_steps": 2}
    run = types.SimpleNamespace(metrics=list, record={})
    trainer = make_trainer(UNEVEN * 4, max_steps=2, **options)
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: time.sleep(0.1) or collate(rows)
    trainer.train()
    timing = collected.collected(run, trainer)["timing"]
    assert 0.4 < trainer.waited < timing["train_s"] + 0.1 and timing["workers"] == 0
    assert timing["data_wait_s"] == round(trainer.waited, 1)
    assert timing["data_wait_share"] == pytest.approx(trainer.waited / timing["train_s"], rel=0.1)
    resumed = make_trainer(UNEVEN * 4, max_steps=3, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert trainer.waited < resumed.waited < trainer.waited + 0.4


def test_workers_stay_for_training_and_prepare_a_whole_step_ahead(make_trainer):
    trainer = make_trainer(UNEVEN, UNEVEN, workers=2, grad_accum=8)
    training, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert training.persistent_workers and not evaluation.persistent_workers
    assert training.num_workers * training.prefetch_factor > 8
    assert make_trainer(UNEVEN).get_train_dataloader().num_workers == 0


@pytest.mark.parametrize("targets", ["vision", "audio"])
def test_batches_without_the_only_trained_tower(make_trainer, media, targets):
    trainer = make_trainer([talk("hi", "hello"), ask(media, "red.png", "one.wav")], targets=targets, batch_size=1)
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters() if p.requires_grad)


def test_bad_media_of_the_evaluation_set_stop_the_run_too(make_trainer, media):
    trainer = make_trainer([talk("hi", "hello")] * 2, [ask(media, "page.jpg")] * 3)
    with pytest.raises(DataError, match="3 of 3 media cannot be read"):
        trainer.evaluate()


def test_too_many_bad_media_stop_the_run_at_the_end_of_an_epoch(make_trainer, media):
    rows = [ask(media, "red.png")] * 6 + [ask(media, "page.jpg")]
    with pytest.raises(DataError, match="1 of 7 media cannot be read, over --max-bad-media 0.05.*image cannot be read"):
        make_trainer(rows).train()
    make_trainer(rows * 1 + [ask(media, "red.png")] * 20).train()


def test_too_many_bad_media_stop_the_run_after_the_first_hundred(make_trainer, media):
    rows = [ask(media, *["page.jpg"] * 10)] * 40
    trainer = make_trainer(rows, batch_size=2)
    with pytest.raises(DataError, match="100 of 100 media"):
        trainer.train()
    assert trainer.state.global_step < 20


def test_a_diverged_run_stops(make_trainer):
    trainer = make_trainer(UNEVEN)
    with torch.no_grad():
        next(p for p in trainer.model.parameters() if p.requires_grad).fill_(math.nan)
    with pytest.raises(Diverged, match="diverged at step 1: the loss is not a number. Rows of that step: row 0"):
        trainer.train()


# ---- files


def test_metrics_are_written_as_they_come_with_nan_as_a_word(tmp_path):
    state = transformers.TrainerState(global_step=3)
    run = Run("sft_train", str(tmp_path))
    callbacks.MetricsFile(run.add_metrics).on_log(None, state, None, {"loss": math.nan, "lr": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": "nan", "lr": 0.5}


def test_checkpoints_appear_whole_and_the_oldest_go(make_trainer):
    trainer = make_trainer(UNEVEN, max_steps=3, save_steps=1)
    trainer.train()
    names = [path.name for path in checkpoints.checkpoints(trainer.args.output_dir)]
    assert names == ["checkpoint-2", "checkpoint-3"]
    files = {path.name for path in checkpoints.checkpoints(trainer.args.output_dir)[-1].iterdir()}
    assert {
        "adapter_model.safetensors",
        "optimizer.pt",
        "trainer_state.json",
        "processor_config.json",
        "chat_template.jinja",
    } <= files


def test_a_checkpoint_that_could_not_be_finished_is_not_there(make_trainer, monkeypatch):
    trainer = make_trainer(UNEVEN, max_steps=2, save_steps=1)
    finish = transformers.TrainerState.save_to_json

    def full(self, path):
        if self.global_step == 2:
            raise OSError(28, "No space left on device")
        finish(self, path)

    monkeypatch.setattr(transformers.TrainerState, "save_to_json", full)
    with pytest.raises(EnvironmentUnfit, match="(?s)no room for the checkpoint of step 2: .*checkpoint-1 is whole"):
        trainer.train()
    assert [path.name for path in checkpoints.checkpoints(trainer.args.output_dir)] == ["checkpoint-1"]


def test_a_resumed_run_ends_where_an_unbroken_one_does(make_trainer, tmp_path):
    def weights(trainer):
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}

    unbroken = make_trainer(UNEVEN * 2, max_steps=4, save_steps=2)
    unbroken.train()
    resumed = make_trainer(UNEVEN * 2, max_steps=4, save_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    expected = weights(unbroken)
    assert all(torch.equal(p, expected[name]) for name, p in weights(resumed).items())


def test_dropout_does_not_depend_on_workers_or_evaluation(make_trainer):
    """Workers draw seeds; from the generator that dropout draws from, they would change it from the second epoch on."""
    losses = {}
    for workers, evaluated in ((0, False), (2, False), (0, True)):
        options = dict(epochs=3, max_steps=6, workers=workers, eval_steps=1)
        trainer = make_trainer(UNEVEN, eval_rows=UNEVEN[:1] if evaluated else None, dropout=0.2, **options)
        trainer.train()
        losses[workers, evaluated] = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert losses[0, False] == losses[2, False] == losses[0, True]


def test_a_run_of_one_step_changes_the_weights(make_trainer):
    """A warm-up that begins with a rate of 0 would make it a run of nothing."""
    trainer = make_trainer(UNEVEN, max_steps=1, steps=1)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert all((p.detach() != before[name]).any() for name, p in trainer.model.named_parameters() if p.requires_grad)
