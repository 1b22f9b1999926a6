"""Checkpoints are whole or passed over, and those that are needed stay."""

import json
import os
import types

import numpy as np
import pytest
import torch

from conftest import ask, talk
from gemma_trainer import checkpoints, collected, recipe, runs
from gemma_trainer.checkpoints import all_checkpoints, fault_of, put_in_place, rotate, seal
from gemma_trainer.files import move_whole, remove_folder

ROWS = [talk("hi", "hello"), talk("what is it", "a house of words " * 4), talk("a b c d", "e f"), talk("x", "y z")] * 3


def made(folder, step, sealed=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "optimizer.pt").write_bytes(b"x" * 100)
    (path / "adapter_model.safetensors").write_bytes(b"y" * 100)
    if sealed:
        seal(path)
    return path


def cut(path):
    with open(path / "optimizer.pt", "r+b") as file:
        file.truncate(40)


@pytest.mark.parametrize(("harm", "fault"), [
    (lambda path: None, ""), (cut, "optimizer.pt is missing or cut off"),
    (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    (lambda path: (path / "files.json").write_text("{"), "files.json is damaged"),
    (lambda path: (path / "files.json").write_text("[]"), "files.json is damaged"),
    (lambda path: (path / "files.json").write_text('{"a": 5}'), "files.json is damaged"),
    (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_told(tmp_path, harm, fault):
    path = made(tmp_path, 5)
    harm(path)
    assert fault_of(path).startswith(fault) and bool(fault_of(path)) is bool(fault)
    other = made(tmp_path, 6, sealed=False)  # by another tool
    assert not fault_of(other)
    (other / "adapter_model.safetensors").unlink()
    assert fault_of(other)


def test_a_file_that_rots_is_told_by_its_hash(tmp_path):
    path = made(tmp_path, 5)
    (path / "optimizer.pt").write_bytes(b"x" * 99 + b"z")
    assert not fault_of(path) and fault_of(path, thorough=True) == "optimizer.pt is damaged"


def test_a_run_goes_on_from_the_newest_whole_one_and_says_what_it_passes_over(tmp_path, capsys):
    run = runs.Run("sft_train", str(tmp_path))
    run.open()
    run.goes_on = True
    for step in (2, 10, 4):
        made(tmp_path, step)
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_bytes(b"z" * 100)
    assert recipe._checkpoint(run) == str(tmp_path / "checkpoint-4")
    told = capsys.readouterr().err
    assert "checkpoint-10 is not whole (optimizer.pt is damaged): it is passed over" in told


@pytest.mark.parametrize(("logged", "left"), [(0, ""), (2, "a\n"), (None, "a\nb\n")])
def test_what_was_logged_behind_the_checkpoint_is_forgotten(tmp_path, logged, left):
    run = runs.Run("sft_train", str(tmp_path))
    run.open()
    run.goes_on = True
    path = made(tmp_path, 2, sealed=False)
    (path / "collected.json").write_text(json.dumps({"logged_bytes": logged}))
    (tmp_path / "metrics.jsonl").write_text("a\nb\n")
    recipe._checkpoint(run)
    assert (tmp_path / "metrics.jsonl").read_text() == left


def test_figures_are_those_of_the_step_whose_model_is_saved():
    history = [{"step": 1, "loss": 3.0, "eval_loss": 2.0}, {"step": 2, "loss": 1.0, "eval_loss": 4.0, "gen/json": 0.1}]
    trainer = types.SimpleNamespace(state=types.SimpleNamespace(log_history=history))
    best = types.SimpleNamespace(record={"best": {"step": 1}})
    assert collected._history(best, trainer) == [history[0], {"step": 2, "loss": 1.0}]
    assert collected._history(types.SimpleNamespace(record={"best": None}), trainer) == history


def test_the_oldest_go_with_those_that_are_not_whole_and_the_best_stays(tmp_path):
    for step in (1, 2, 3, 4, 5):
        made(tmp_path, step)
    cut(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-mine").mkdir()
    rotate(tmp_path, None)
    assert len(all_checkpoints(tmp_path)) == 5
    rotate(tmp_path, 2, keep=1)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3", "checkpoint-5"]
    assert (tmp_path / "checkpoint-mine").is_dir()


def test_a_checkpoint_takes_the_place_of_one_that_is_not_whole_but_of_no_other(tmp_path):
    for step in (1, 2):
        made(tmp_path, step)
        made(tmp_path / "new", step)
        (tmp_path / "new" / f"checkpoint-{step}" / "new").touch()
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"z" * 100)  # the size is the same
    for step in (1, 2):
        put_in_place(tmp_path / "new" / f"checkpoint-{step}", tmp_path)
    assert not (tmp_path / "checkpoint-1" / "new").exists() and (tmp_path / "checkpoint-2" / "new").exists()


def test_what_moves_is_on_the_disk_before_it_is_seen(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: (order.append(os.readlink(f"/proc/self/fd/{number}")), fsync(number))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("moved"), replace(a, b)))
    path = made(tmp_path / "aside", 1, sealed=False)
    move_whole(path, tmp_path / "checkpoint-1")
    before, after = order[: order.index("moved")], order[order.index("moved") + 1 :]
    assert {os.path.basename(name) for name in before} == {
        "trainer_state.json",
        "optimizer.pt",
        "adapter_model.safetensors",
        "checkpoint-1",
    }
    assert after == [str(tmp_path)]
    with pytest.raises(OSError):
        move_whole(made(tmp_path / "aside", 1), tmp_path / "checkpoint-1")
    remove_folder(tmp_path / "checkpoint-1")
    remove_folder(tmp_path / "checkpoint-1")  # which is gone
    assert not list(tmp_path.glob("*checkpoint*"))


def test_a_resumed_run_logs_what_the_unbroken_one_logs(make_trainer, tmp_path, media):
    """With steps between logs, media, groups by length, dropout, and two epochs, resumed within each of them."""
    rows = [*ROWS, ask(media, "red.png"), ask(media, "one.wav")]
    options = dict(max_steps=14, epochs=2, steps=1400, save_steps=3, dropout=0.2, grad_accum=1)
    keys = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "step", "epoch")

    def log(trainer):
        return [{key: entry[key] for key in keys} for entry in trainer.state.log_history if "grad_norm" in entry]

    whole = make_trainer(rows, ROWS[:2], eval_steps=4, **options)
    assert whole.args.logging_steps == 7
    whole.args.save_total_limit = None
    whole.train()
    expected = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    for step in (3, 9, 12):
        again = make_trainer(rows, ROWS[:2], eval_steps=4, **options)
        again.args.save_total_limit = None
        again.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert log(again) == log(whole), step
        assert all(torch.equal(p, expected[name]) for name, p in again.model.named_parameters())
        assert again.counts == whole.counts and again.lengths == whole.lengths
    assert len(log(whole)) == 2


def test_a_run_that_is_resumed_at_its_end_trains_no_further(make_trainer, tmp_path):
    whole = make_trainer(ROWS, max_steps=3, epochs=2, save_steps=1)
    whole.train()
    again = make_trainer(ROWS, max_steps=3, epochs=2, save_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.state.global_step == 3 and again.counts == whole.counts
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))


def test_a_run_of_all_weights_resumes_bit_for_bit(processor, model, tmp_path):
    """Embeddings, towers and what ties them included."""
    import copy

    from gemma_trainer import arguments, precision, trainers
    from gemma_trainer.collator import MultimodalCollator

    def trainer():
        options = dict(
            max_length=512, batch_size=4, grad_accum=1, lr=1e-3, epochs=2, max_steps=4, steps=4, seed=0, save_steps=2,
            eval_steps=9, evaluate=False, workers=0, report_to=[], checkpointing=False,
        )  # fmt: skip
        args = arguments.sft_arguments(tmp_path / "run", precision.choose("fp32", "cpu"), **options)
        collator = MultimodalCollator(processor, 512)
        return trainers.GemmaSFTTrainer(copy.deepcopy(model), args, ROWS[:8], collator, processor)

    whole, again = trainer(), trainer()
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for (name, one), (_, other) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    embedded = model.get_input_embeddings().weight
    assert not torch.equal(whole.model.get_input_embeddings().weight, embedded)


def test_smaller_batches_of_an_auto_batch_are_the_same_steps(make_trainer, tmp_path):
    """The order is that of the batches that were asked for; a checkpoint of these is gone on from with smaller ones."""
    seen = {}
    for name, size, options, start in (
        ("asked", 4, {}, None), ("halved", 2, {"together": 4}, None), ("on", 1, {"together": 4}, "checkpoint-2"),
    ):  # fmt: skip
        trainer = make_trainer(
            ROWS, batch_size=size, grad_accum=8 // size, max_steps=4, epochs=3, save_steps=2, trainer_options=options
        )
        trainer.args.save_total_limit = None
        rows = seen.setdefault(name, [])
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, *rest, step=step, rows=rows: (
            rows.extend(inputs["input_ids"][:, :12].sum(1).tolist()), step(model, inputs, *rest))[1]  # fmt: skip
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / start) if start else None)
        seen[name] = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert np.allclose(seen["asked"], seen["halved"], rtol=1e-5) and np.allclose(seen["asked"], seen["on"], rtol=1e-5)


def test_auto_batch_halves_until_it_fits(tmp_path, capsys):
    from dataclasses import dataclass

    from gemma_trainer.errors import OutOfMemory

    @dataclass(frozen=True)
    class Config:
        batch_size: int = 6
        grad_accum: int = 2
        auto_batch: bool = True
        less_memory = "lower --max-len"

    run = runs.Run("sft_train", str(tmp_path))
    run.open()
    tried = []

    def attempt(config, fits=2):
        tried.append((config.batch_size, config.grad_accum, run.goes_on))
        if config.batch_size > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return "trained"

    config, result = recipe.within_memory(Config(), run, attempt)
    assert result == "trained" and (config.batch_size, config.grad_accum) == (1, 12)
    assert tried == [(6, 2, False), (3, 4, True), (1, 12, True)] and run.together == 6
    assert "out of memory: going on with --batch-size 3 --grad-accum 4" in capsys.readouterr().err
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["auto_batch"] == {"batch_size": 1, "effective": 12} and record["status"] == "running"
    tried.clear()  # a resumed run begins with what did fit
    recipe.within_memory(Config(), run, attempt)
    assert [size for size, *_ in tried] == [1]
    with pytest.raises(OutOfMemory, match="one row at a time"):
        recipe.within_memory(Config(), run, lambda config: attempt(config, fits=0))
    with pytest.raises(RuntimeError, match="another"):
        recipe.within_memory(Config(), run, lambda config: (_ for _ in ()).throw(RuntimeError("another")))
    plain = types.SimpleNamespace(auto_batch=False)
    assert recipe.within_memory(plain, run, lambda config: "once") == (plain, "once")
    assert checkpoints.checkpoints(tmp_path) == []
