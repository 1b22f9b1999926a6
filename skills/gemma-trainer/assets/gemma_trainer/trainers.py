"""TRL's trainers on rows with media, and the arguments of a run, every one of them explicit."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import datasets
import numpy as np
import torch
import transformers
import trl

from .batching import LengthGroupedSampler
from .collator import Batch, MultimodalCollator
from .errors import CannotLoad, DataError
from .files import write_whole
from .losses import trl_scores_trained_only, use_chunked_loss
from .stats import add_counts

COLLECTED = "collected.json"  # in each checkpoint: what the collator did so far
LENGTHS = "lengths.npy"  # in each checkpoint: the lengths of rows as the sampler knows them
MAX_NAMED = 1000  # problems kept by name
MAX_LENGTHS = 20_000  # row lengths kept for the report's histogram


class RowsTrainer:
    """What TRL's trainers need to train on rows that the collator reads itself: mixed in before one of them.

    Checkpoints appear whole or not at all. Rows of near-equal lengths are trained together (see
    `batching.LengthGroupedSampler`).

    `counts`, `problems`, `lengths` (tokens a row) and `waited` (seconds spent waiting for batches) add up over the
    batches that were trained on, those before a resumed checkpoint included.

    Args:
        rows, eval_rows: map-style data sets of raw rows, such as `sources.Rows`.
        collator, eval_collator: one `MultimodalCollator` each, so that their counters stay apart.
        max_bad_media: largest share of unreadable media, and of unreadable rows, before the run stops.
        more: for the trainer of TRL.

    Raises:
        DataError: while training, when the share of bad media or rows is over `max_bad_media`.
    """

    def __init__(self, model, args, rows, collator, processor, eval_rows=None, eval_collator=None,
                 max_bad_media: float = 0.05, callbacks=None, **more):  # fmt: skip
        self.counts: dict[str, int] = {}
        self.problems: list[tuple[str, str]] = []
        self.lengths: list[int] = []
        self.waited = 0.0
        self.max_bad_media = max_bad_media
        self._before, self._began = 0.0, time.monotonic()
        self._eval_collator = eval_collator or collator
        self._eval_sums, self._eval_counts, self._eval_problems = [0.0, 0], {}, []
        super().__init__(
            model=model,
            args=args,
            data_collator=collator,
            # TRL wants a `datasets.Dataset` and looks at its first row to choose a path; ours is read by the collator.
            train_dataset=datasets.Dataset.from_dict({"row": [""]}),
            eval_dataset=eval_rows,
            processing_class=processor,
            callbacks=[BadMediaStop(self), EpochTeller(self), *(callbacks or [])],
            **more,
        )
        self.remove_callback(transformers.PrinterCallback)
        self.train_dataset = rows
        self.sampler = LengthGroupedSampler(
            len(rows),
            self.args.train_batch_size * self.args.world_size,
            lambda indices: collator.lengths([rows[index] for index in indices]),
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    def train(self, *args, **kwargs):
        self._began = time.monotonic()
        return super().train(*args, **kwargs)

    def seconds(self) -> float:
        """How long training took up to now, with what was trained before a resumed checkpoint."""
        return self._before + time.monotonic() - self._began

    # -- batches

    def _get_train_sampler(self, train_dataset=None):
        return self.sampler

    def get_train_dataloader(self):
        return self._apart(super().get_train_dataloader())

    def _apart(self, loader):
        """Give a loader a random generator of its own. It draws seeds for its workers, more or fewer of them as there
        are workers, and dropout would change with them."""
        generator = torch.Generator().manual_seed(self.args.seed)
        for part in (loader, getattr(loader, "base_dataloader", loader)):
            part.generator = generator
        return loader

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        return super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)

    def _timed(self, batches):
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self.waited += time.monotonic() - began
            if batch is None:
                return
            yield batch

    def _with_gradient(self, loss):
        """A batch may touch nothing that is trained: text, where only the vision tower has adapters."""
        if loss.requires_grad or not self.model.training:
            return loss
        return loss + 0.0 * next(p for p in self.model.parameters() if p.requires_grad).sum().to(loss.dtype)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if isinstance(inputs, Batch):
            add_counts(self.counts, inputs.counts)
            self.problems += inputs.problems[: MAX_NAMED - len(self.problems)]
            self.lengths += inputs["attention_mask"].sum(1).tolist()[: MAX_LENGTHS - len(self.lengths)]
            self.check_media(after=100)
        return super().training_step(model, dict(inputs), num_items_in_batch)

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
        weight = self.weight_of(inputs)
        result = super().prediction_step(model, dict(inputs), prediction_loss_only, ignore_keys)
        self._eval_sums[0] += float(result[0]) * weight
        self._eval_sums[1] += weight
        if isinstance(inputs, Batch):
            add_counts(self._eval_counts, inputs.counts)
            self._eval_problems += inputs.problems[: MAX_NAMED - len(self._eval_problems)]
        return result

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

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint beside its place and move it there whole; then drop the oldest beyond the limit."""
        final, limit = Path(self.args.output_dir), self.args.save_total_limit
        name = f"checkpoint-{self.state.global_step}"
        unfinished = final / ".unfinished"
        self.args.output_dir, self.args.save_total_limit = str(unfinished), None
        try:
            transformers.Trainer._save_checkpoint(self, model, trial)
            if self.args.should_save:
                collected = [self.counts, self.problems, self.lengths, self.seconds(), self.waited]
                write_whole(unfinished / name / COLLECTED, json.dumps(collected))
                np.save(unfinished / name / LENGTHS, self.sampler.lengths)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # the disk may be full
            raise
        finally:
            self.args.output_dir, self.args.save_total_limit = str(final), limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(final / name, ignore_errors=True)
            os.replace(unfinished / name, final / name)
            shutil.rmtree(unfinished, ignore_errors=True)
            for old in checkpoints(final)[:-limit] if limit else ():
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint):
        """Where the trainer takes up a checkpoint's state, take up what was collected before it, too."""
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except Exception as problem:
            if checkpoint is None:
                raise
            told = f"{checkpoint} is damaged ({type(problem).__name__})"
            raise CannotLoad(f"{told}: remove it, and --resume goes on from the one before") from None
        if checkpoint is None:
            return
        if (path := Path(checkpoint) / COLLECTED).is_file():
            collected = json.loads(path.read_text(encoding="utf-8"))
            self.counts, self.problems, self.lengths, self._before, self.waited = collected
        if (path := Path(checkpoint) / LENGTHS).is_file():
            known = np.load(path)
            if known.shape == self.sampler.lengths.shape:
                self.sampler.lengths = known


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


class BadMediaStop(transformers.TrainerCallback):
    """Looks at the share of bad media at the end of each epoch, also where fewer than 100 were seen."""

    def __init__(self, trainer: RowsTrainer):
        self.trainer = trainer

    def on_epoch_end(self, args, state, control, **kwargs):
        if abs(state.epoch - round(state.epoch)) < 1e-6:  # not where --max-steps ends the run within an epoch
            self.trainer.check_media()


class EpochTeller(transformers.TrainerCallback):
    """Tells the sampler which epoch begins: with several ranks, nobody else does in the epoch that a run resumes in."""

    def __init__(self, trainer: RowsTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.sampler.set_epoch(int(state.epoch or 0))


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints in a run folder, oldest step first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def common_arguments(
    output: str | Path, precision, *, max_length: int, batch_size: int, grad_accum: int, lr: float, epochs: float,
    max_steps: int | None, steps: int, seed: int, save_steps: int | None, eval_steps: int | None, evaluate: bool,
    workers: int, report_to: list[str], checkpointing: bool,
) -> dict:  # fmt: skip
    """The arguments of any run. TRL's own defaults differ by version (bf16 and checkpointing on, length 1024, also on a
    CPU), so whatever matters is set here.

    Args:
        precision: a `precision.Precision`.
        steps: optimizer steps of the whole run, from which logging, saving and evaluation intervals are taken.
        workers: processes that prepare batches ahead, enough of them for the next optimizer step.
    """
    often = max(1, steps // 10)
    return dict(
        output_dir=str(output),
        max_length=max_length,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=grad_accum,
        num_train_epochs=epochs,
        max_steps=max_steps or -1,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.03 * steps),  # none in a short run: the first step of a warm-up has rate 0
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=precision.dtype == "bfloat16",
        fp16=precision.dtype == "float16",
        use_cpu=precision.device == "cpu",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        # The batches of an optimizer step are taken all at once.
        dataloader_prefetch_factor=1 + -(-grad_accum // workers) if workers else None,
        dataloader_pin_memory=precision.device == "cuda",
        accelerator_config={"non_blocking": precision.device == "cuda"},
        ddp_find_unused_parameters=True,
        logging_strategy="steps",
        logging_steps=max(1, steps // 200),
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_steps or often,
        save_total_limit=2,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=eval_steps or often,
        prediction_loss_only=True,
        seed=seed,
        data_seed=seed,
        report_to=report_to or "none",
        disable_tqdm=True,  # `callbacks.Progress` shows the progress
    )


def sft_arguments(output: str | Path, precision, **options) -> trl.SFTConfig:
    """The arguments of a supervised run; `options` as for `common_arguments`."""
    return trl.SFTConfig(
        **common_arguments(output, precision, **options),
        dataset_kwargs={"skip_prepare_dataset": True},
        loss_type="chunked_nll" if trl_chunks() else "nll",
        packing=False,
    )


def trl_chunks() -> bool:
    """Whether the installed TRL knows `loss_type="chunked_nll"` as a loss of its own (before 1.15)."""
    from packaging.version import Version

    return Version(trl.__version__) < Version("1.15")


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
