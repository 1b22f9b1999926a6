"""TRL's trainers on rows with media."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
import trl

from .batching import LengthGroupedSampler
from .checkpoints import checkpoint_bytes, checkpoints, put_in_place, rotate, seal, size_of
from .collator import Batch, MultimodalCollator
from .divergence import DivergenceGuard
from .errors import DataError, EnvironmentUnfit
from .files import is_disk_full, mib, usual_mode, write_whole
from .losses import trl_scores_trained_only, use_chunked_loss
from .meter import Meter
from .stats import add_counts

COLLECTED = "collected.json"  # in each checkpoint: what the trainer keeps beside transformers' own state
LENGTHS = "lengths.npy"  # in each checkpoint: the lengths of rows as the sampler knows them
MAX_NAMED = 1000  # problems kept by name
MAX_LENGTHS = 20_000  # row lengths kept for the report's histogram


class RowsTrainer:
    """What TRL's trainers need to train on rows that the collator reads itself: mixed in before one of them.

    Checkpoints appear whole or not at all. Rows of near-equal lengths are trained together (see
    `batching.LengthGroupedSampler`). A run that is resumed logs what the unbroken one would have logged.

    `counts`, `problems`, `lengths` (tokens a row) and `waited` (seconds spent waiting for batches) add up over the
    batches that were trained on, those before a resumed checkpoint included; so does what is put into `kept`, which
    must be JSON. What others may set: `best_step`, the step of a checkpoint that stays; `logged_bytes`, which tells how
    much was logged up to now, for a checkpoint to keep; `describe`, called with each folder that a model was saved to;
    `stopping`, which gives an evaluation up that is under way where it returns true.

    Args:
        rows, eval_rows: map-style data sets of raw rows, such as `sources.Rows`; `rows` may be a `streams.RowStream`.
        collator, eval_collator: one `MultimodalCollator` each, so that their counters stay apart.
        max_bad_media: largest share of unreadable media, and of unreadable rows, before the run stops.
        on_divergence: "stop", or "skip" the batches whose loss or gradient is no number.
        together: rows that are taken side by side when they are put in order; the batch size by default. A run that is
            to see the same rows in the same order with smaller batches needs it.
        more: for the trainer of TRL.

    Raises:
        DataError: while training, when the share of bad media or rows is over `max_bad_media`.
        Diverged: while training, when the loss or the gradient is no number.
        EnvironmentUnfit: the disk has no room for a checkpoint.
    """

    describe: Callable[[Path], None] | None = None
    logged_bytes: Callable[[], int] | None = None
    best_step: int | None = None
    ended = False  # resumed where it had come to its end

    def __init__(self, model, args, rows, collator, processor, eval_rows=None, eval_collator=None,
                 max_bad_media: float = 0.05, callbacks=None, on_divergence: str = "stop",
                 together: int | None = None, **more):  # fmt: skip
        self.counts: dict[str, int] = {}
        self.problems: list[tuple[str, str]] = []
        self.lengths: list[int] = []
        self.waited = 0.0
        self.kept: dict = {}
        self.max_bad_media = max_bad_media
        self.guard, self.meter = DivergenceGuard(self, on_divergence == "skip"), Meter()
        self._before, self._began = 0.0, time.monotonic()
        self._eval_collator = eval_collator or collator
        self._eval_sums, self._eval_counts, self._eval_problems = [0.0, 0], {}, []
        self.stream = rows if isinstance(rows, torch.utils.data.IterableDataset) else None
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            # TRL wants a `datasets.Dataset` and looks at its first row to choose a path; ours is read by the collator.
            train_dataset=datasets.Dataset.from_dict({"row": [""]}),
            eval_dataset=eval_rows,
            processing_class=processor,
            callbacks=[Watchman(self), *(callbacks or [])],
            **more,
        )
        self.remove_callback(transformers.PrinterCallback)
        self.train_dataset = rows
        self.sampler = LengthGroupedSampler(
            len(rows) if self.stream is None else 0,
            (together or self.args.train_batch_size) * self.args.world_size,
            lambda indices: collator.lengths([rows[index] for index in indices]),
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def train(self, *args, **kwargs):
        self._began = time.monotonic()
        self.args.ignore_data_skip = self.stream is not None  # which passes over what was delivered by itself
        return super().train(*args, **kwargs)

    def seconds(self) -> float:
        """How long training took up to now, with what was trained before a resumed checkpoint."""
        return self._before + time.monotonic() - self._began

    def stopping(self) -> bool:
        """Whether the run has been told to stop at once."""
        return False

    def _get_train_sampler(self, train_dataset=None):
        return self.sampler

    def get_train_dataloader(self):
        if self.stream is not None:
            return self._apart(self.stream.loader(self.data_collator, self.args))
        return self._apart(super().get_train_dataloader())

    def _apart(self, loader):
        """Give a loader a random generator of its own. It draws seeds for its workers, more or fewer of them as there
        are workers, and dropout would change with them."""
        generator = torch.Generator().manual_seed(self.args.seed)
        for part in (loader, getattr(loader, "base_dataloader", loader)):
            part.generator = generator
        return loader

    # -- steps

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        self.meter.begin_step()
        return super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)

    def _timed(self, batches):
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            waited = time.monotonic() - began
            self.waited += waited
            self.meter.waited += waited
            if batch is None:
                return
            if self.stream is not None:
                self.stream.delivered += 1
            yield batch

    def _with_gradient(self, loss):
        """A batch may touch nothing that is trained: text, where only the vision tower has adapters."""
        if loss.requires_grad or not self.model.training:
            return loss
        return loss + 0.0 * next(p for p in self.model.parameters() if p.requires_grad).sum().to(loss.dtype)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps or self.ended:  # where transformers would add a step
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if isinstance(inputs, Batch):
            add_counts(self.counts, inputs.counts)
            self.problems += inputs.problems[: MAX_NAMED - len(self.problems)]
            self.lengths += inputs["attention_mask"].sum(1).tolist()[: MAX_LENGTHS - len(self.lengths)]
            self.meter.count(inputs.counts)
            self.check_media(after=100)
        loss = super().training_step(model, dict(inputs), num_items_in_batch)
        return self.guard.seen(getattr(inputs, "rows", []), loss)

    def _get_grad_norm(self, model, grad_norm=None):
        """Called with the whole gradient of a step, before it is applied."""
        return self.guard.check(model, super()._get_grad_norm(model, grad_norm))

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs |= self.meter.read()
        super().log(logs, *args, **kwargs)

    def log_plain(self, logs: dict) -> None:
        """Log figures that are no part of TRL's own, whose averages are left to go on."""
        logging = self.control.should_log
        transformers.Trainer.log(self, logs)
        self.control.should_log = logging

    def check_media(self, after: int = 1, counts=None, problems=None) -> None:
        """Stop when too many media, or rows, of those seen so far could not be read."""
        counts, problems = self.counts if counts is None else counts, self.problems if problems is None else problems
        media = counts.get("images", 0) + counts.get("clips", 0)
        rows = counts.get("rows", 0) + counts.get("bad_rows", 0)
        for what, seen in (("media", media), ("rows", rows)):
            bad = counts.get(f"bad_{what}", 0)
            if seen >= after and bad > self.max_bad_media * seen:
                named = "; ".join(f"{row}: {reason}" for row, reason in problems[:3])
                limit = f"--max-bad-media {self.max_bad_media:g}"
                raise DataError(f"{bad} of {seen} {what} cannot be read, over {limit}. First: {named}")

    # -- evaluation

    def weight_of(self, inputs) -> int:
        """What a batch's loss is a mean over, such as tokens."""
        raise NotImplementedError

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.stopping():
            raise _GivenUp
        weight = self.weight_of(inputs)
        result = super().prediction_step(model, dict(inputs), prediction_loss_only, ignore_keys)
        self._eval_sums[0] += float(result[0]) * weight
        self._eval_sums[1] += weight
        if isinstance(inputs, Batch):
            add_counts(self._eval_counts, inputs.counts)
            self._eval_problems += inputs.problems[: MAX_NAMED - len(self._eval_problems)]
        return result

    def evaluate(self, *args, **kwargs):
        try:
            return super().evaluate(*args, **kwargs)
        except _GivenUp:
            self.control.should_save = self.control.should_training_stop = True
            return {}

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        self._eval_sums, self._eval_counts, self._eval_problems = [0.0, 0], {}, []
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        self.check_media(1, self._eval_counts, self._eval_problems)
        sums = torch.tensor(self._eval_sums, dtype=torch.float64, device=_sum_device(self.args.device))
        total, weight = self.accelerator.reduce(sums, "sum").tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(weight, 1)
        return output

    def get_eval_dataloader(self, eval_dataset=None):
        training = self.data_collator, self.args.dataloader_persistent_workers
        # Persistent workers would wait in memory between evaluations, and go on with the rows they were started with.
        self.data_collator, self.args.dataloader_persistent_workers = self._eval_collator, False
        try:
            return self._apart(super().get_eval_dataloader(eval_dataset))
        finally:
            self.data_collator, self.args.dataloader_persistent_workers = training

    # -- checkpoints

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nobody should have to load
        for weights in folder.glob("*.safetensors"):
            weights.chmod(usual_mode())  # which only their owner could read
        if self.describe:
            self.describe(folder)

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint beside its place and move it there whole; then drop the oldest beyond the limit."""
        final, limit = Path(self.args.output_dir), self.args.save_total_limit
        unfinished = final / ".unfinished"
        folder = unfinished / f"checkpoint-{self.state.global_step}"
        self.args.output_dir, self.args.save_total_limit = str(unfinished), None
        try:
            transformers.Trainer._save_checkpoint(self, model, trial)
            if self.args.should_save:
                write_whole(folder / COLLECTED, json.dumps(self._collected()))
                np.save(folder / LENGTHS, self.sampler.lengths)
                seal(folder)
                put_in_place(folder, final)
        except BaseException as problem:
            shutil.rmtree(unfinished, ignore_errors=True)
            if is_disk_full(problem):
                raise EnvironmentUnfit(self._told_full(final)) from None
            raise
        finally:
            self.args.output_dir, self.args.save_total_limit = str(final), limit
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)
            rotate(final, limit, self.best_step)
        self.accelerator.wait_for_everyone()

    def _told_full(self, final: Path) -> str:
        whole = checkpoints(final)
        needed = size_of(whole[-1]) if whole else checkpoint_bytes(self.model)
        free = shutil.disk_usage(final).free
        told = f"no room for the checkpoint of step {self.state.global_step}: it takes about {mib(needed)}, "
        told += f"{mib(free)} are free on the disk of {final}.\n"
        if not whole:
            return told + "Free some, then begin anew"
        return told + f"{whole[-1].name} is whole: free some, then go on with --resume"

    def _collected(self) -> dict:
        names = "counts problems lengths waited kept best_step".split()
        return {name: getattr(self, name) for name in names} | {
            "seconds": self.seconds(),
            "stream": None if self.stream is None else self.stream.state(),
            "logged_bytes": self.logged_bytes() if self.logged_bytes else None,
            # What was summed up since the last log, for the next one.
            "unlogged": [self._tr_loss.item(), self._globalstep_last_logged, self._total_loss_scalar],
            "metrics": self._metrics["train"],
        }

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Where the trainer takes up a checkpoint's state, take up what was collected before it, too."""
        if self.args.device.type == "cpu":  # torch.load does not know the "cpu:0" that ranks on a CPU have
            self.args.__dict__["_setup_devices"] = torch.device("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if (path := Path(checkpoint) / COLLECTED).is_file():
            self._resumed = json.loads(path.read_text(encoding="utf-8"))
            for name in "counts problems lengths waited kept best_step".split():
                setattr(self, name, self._resumed[name])
            self._before = self._resumed["seconds"]
            if self.stream is not None and self._resumed.get("stream"):
                self.stream.take_up(self._resumed["stream"])
        if (path := Path(checkpoint) / LENGTHS).is_file():
            known = np.load(path)
            if known.shape == self.sampler.lengths.shape:
                self.sampler.lengths = known

    _resumed: dict | None = None

    def take_up_log(self) -> None:
        """Go on with what was summed up for the next log when the checkpoint was saved; transformers begins at 0."""
        if self._resumed:
            loss, self._globalstep_last_logged, self._total_loss_scalar = self._resumed["unlogged"]
            self._tr_loss += loss
            self._metrics["train"].update({name: list(values) for name, values in self._resumed["metrics"].items()})
            self._resumed = None


class GemmaSFTTrainer(RowsTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer` on rows (see `RowsTrainer`).

    Loss and evaluation loss are means over trained tokens, whatever the batch sizes and the accumulation; logits are
    made at trained positions only; a step with nothing trained has loss 0.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Gemma 4 says accepts_loss_kwargs=False; with the losses used here accumulation is token-weighted.
        self.model_accepts_loss_kwargs = True
        self._own_loss = not trl_scores_trained_only(self.args.device.type)
        if self._own_loss:
            use_chunked_loss(inner_model(self.model))

    def weight_of(self, inputs) -> int:
        return int((inputs["labels"][:, 1:] != -100).sum())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:  # none trained in this whole step: loss 0 rather than 0 / 0
            num_items_in_batch = torch.as_tensor(num_items_in_batch).clamp(min=1)
        if not self._own_loss:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            loss = self._with_gradient(loss)
            return (loss, outputs) if return_outputs else loss
        inputs = inputs | {"use_cache": False}
        loss, outputs = transformers.Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        accuracy = outputs.correct / outputs.scored.clamp(min=1)
        self._metrics["train" if self.model.training else "eval"]["mean_token_accuracy"].append(accuracy.item())
        loss = self._with_gradient(loss)
        return (loss, outputs) if return_outputs else loss


class Watchman(transformers.TrainerCallback):
    """What a `RowsTrainer` does at moments that only callbacks are told of."""

    def __init__(self, trainer: RowsTrainer):
        self.trainer, self.due = trainer, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.take_up_log()
        step = state.global_step
        evaluated = any("eval_loss" in entry and entry["step"] == step for entry in state.log_history)
        self.due = bool(step) and args.eval_strategy == "steps" and step % state.eval_steps == 0 and not evaluated

    def on_step_begin(self, args, state, control, **kwargs):
        if self.due:  # the run was stopped within this evaluation
            self.due = False
            self.trainer.evaluate()

    def on_epoch_begin(self, args, state, control, **kwargs):
        # With several ranks, nobody else tells the sampler in the epoch that a run resumes in.
        self.trainer.sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.meter.end_step()
        if self.trainer.stream is not None:  # transformers counts from where the run was resumed
            batches = state.global_step * args.gradient_accumulation_steps
            state.epoch = self.trainer.stream.epochs(batches) or state.global_step / state.max_steps

    def on_epoch_end(self, args, state, control, **kwargs):
        """Look at the share of bad media, also where fewer than 100 were seen."""
        if abs(state.epoch - round(state.epoch)) < 1e-6:  # not where --max-steps ends the run within an epoch
            self.trainer.check_media()


class _GivenUp(Exception):
    """An evaluation that nobody waits for any more."""


def something_is_trained(rows, collator: MultimodalCollator, size: int = 8) -> bool:
    """Whether any row has a trained token after cutting; stops at the first that has."""
    for start in range(0, len(rows), size):
        batch = collator([rows[index] for index in range(start, min(start + size, len(rows)))])
        if batch.counts.get("trained_tokens"):
            return True
    return False


def inner_model(model):
    """The model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _sum_device(device):
    return "cpu" if device.type == "mps" else device  # Metal has no float64
