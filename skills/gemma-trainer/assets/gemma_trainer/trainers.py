"""TRL's trainers on rows with media."""

from __future__ import annotations

import time

import datasets
import torch
import transformers
import trl

from . import ranks
from .batching import LengthGroupedSampler, RankBatches, start_worker
from .callbacks import Watchman
from .collator import Batch, MultimodalCollator
from .divergence import DivergenceGuard
from .errors import DataError
from .fsdp import inner_model
from .losses import trl_scores_trained_only, use_chunked_loss
from .meter import Meter
from .saving import MAX_LENGTHS, MAX_NAMED, SavesWhole
from .stats import add_counts

WEIGHTS = "weights"  # among the metrics of batches: how much each counts


class RowsTrainer(SavesWhole):
    """What TRL's trainers need to train on rows that the collator reads itself: mixed in before one of them.

    Checkpoints appear whole or not at all. Rows of near-equal lengths are trained together (see
    `batching.LengthGroupedSampler`). A run that is resumed logs what the unbroken one would have logged.

    `counts`, `problems`, `lengths` (tokens a row) and `waited` (seconds spent waiting for batches) add up over the
    batches that were trained on, those before a resumed checkpoint included; so does what is put into `kept`, which
    must be JSON. What others may set: `best_step`, the step of a checkpoint that stays; `logged_bytes`, which tells how
    much was logged up to now, for a checkpoint to keep; `describe`, called with each folder that a model was saved to;
    `stopping` and `all_stopping`, which give an evaluation up that is under way where they return true.

    Args:
        rows, eval_rows: map-style data sets of raw rows, such as `sources.Rows`; `rows` may be a `streams.RowStream`.
        collator, eval_collator: one `MultimodalCollator` each, so that their counters stay apart.
        max_bad_media: largest share of unreadable media, and of unreadable rows, before the run stops.
        on_divergence: "stop", or "skip" the batches whose loss or gradient is no number.
        together: rows that are taken side by side when they are put in order; those of all ranks' batches by default. A
            run that is to see the same rows in the same order with other batches needs it.
        more: for the trainer of TRL.

    Raises:
        DataError: while training, when the share of bad media or rows is over `max_bad_media`.
        Diverged: while training, when the loss or the gradient is no number.
        EnvironmentUnfit: the disk has no room for a checkpoint.
    """

    ended = False  # resumed where it had come to its end

    def __init__(self, model, args, rows, collator, processor, eval_rows=None, eval_collator=None,
                 max_bad_media: float = 0.05, callbacks=None, on_divergence: str = "stop",
                 together: int | None = None, **more):  # fmt: skip
        self.counts: dict[str, int] = {}
        self._seen: dict[str, int] = {}  # of all ranks: media and rows
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
        if self.is_fsdp_enabled:
            # Checkpoints that inspect_run.py and any number of ranks can read.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.train_dataset = rows
        self.sampler = LengthGroupedSampler(
            len(rows) if self.stream is None else 0,
            together or self.args.train_batch_size * self.args.world_size,
            lambda indices: collator.lengths([rows[index] for index in indices]),
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )

    @property
    def spread(self) -> bool:
        """Whether the weights lie in pieces on several ranks."""
        return self.args.world_size > 1 and (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def train(self, *args, **kwargs):
        self._began = time.monotonic()
        self.args.ignore_data_skip = self.stream is not None  # which passes over what was delivered by itself
        return super().train(*args, **kwargs)

    def seconds(self) -> float:
        """How long training took up to now, with what was trained before a resumed checkpoint."""
        return self._before + time.monotonic() - self._began

    def stopping(self) -> bool:
        """Whether this rank has been told to stop at once."""
        return False

    def all_stopping(self) -> bool:
        """Whether any rank has; all of them have to ask."""
        return any(ranks.gathered(self.stopping()))

    def get_train_dataloader(self):
        if self.stream is not None:
            return self.stream.loader(self.data_collator, self.args)
        persistent = self.args.dataloader_persistent_workers
        return self._loader(self.train_dataset, self.batches(), self.data_collator, persistent)

    def batches(self) -> RankBatches:
        """The indices of this rank's batches of an epoch."""
        return self._rank_batches(self.sampler, self.args.train_batch_size)

    def get_eval_dataloader(self, eval_dataset=None):
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        # Persistent workers would wait in memory between evaluations, and go on with the rows they were started with.
        batches = self._rank_batches(range(len(rows)), self.args.eval_batch_size)
        return self._loader(rows, batches, self._eval_collator, False)

    def _rank_batches(self, order, size: int) -> RankBatches:
        return RankBatches(order, size, self.args.process_index, self.args.world_size)

    def _loader(self, rows, batches: RankBatches, collator, persistent: bool):
        """A loader of this rank's batches. accelerate's own would have ranks take rows twice to have as many."""
        args = self.args
        return torch.utils.data.DataLoader(
            rows,
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            persistent_workers=persistent,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory,
            worker_init_fn=start_worker,
            # It draws seeds for its workers, more or fewer of them as there are workers, and dropout would change.
            generator=torch.Generator().manual_seed(args.seed),
        )

    # -- steps

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        self.meter.begin_step()
        batches, items = super().get_batch_samples(self._timed(epoch_iterator), *args, **kwargs)
        self._look_at(batches)
        return batches, items

    def _look_at(self, batches: list) -> None:
        """Count the media and rows of a step, and those that cannot be read, over all ranks; all stop, or none."""
        names = "images clips bad_media rows bad_rows".split()
        counts = [sum(getattr(batch, "counts", {}).get(name, 0) for batch in batches) for name in names]
        add_counts(self._seen, dict(zip(names, ranks.summed(counts), strict=True)))
        named = [problem for batch in batches for problem in getattr(batch, "problems", [])]
        self.check_media(100, self._seen, [*self.problems, *named])

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
        loss = super().training_step(model, dict(inputs), num_items_in_batch)
        return self.guard.seen(getattr(inputs, "rows", []), loss)

    def _get_grad_norm(self, model, grad_norm=None):
        """Called with the whole gradient of a step, before it is applied."""
        return self.guard.check(model, super()._get_grad_norm(model, grad_norm))

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs |= self.meter.read()
        # All ranks must see the same figures, or some would stop where others go on.
        metrics = self._metrics["train" if self.model.training else "eval"]
        mean = _mean_of_all_ranks(metrics)
        metrics.clear()
        metrics.update({name: [value] for name, value in mean.items()})
        if self.args.world_size > 1:
            logs.update(_of_all_ranks(logs))
        super().log(logs, *args, **kwargs)

    def log_plain(self, logs: dict) -> None:
        """Log figures that are no part of TRL's own, whose averages are left to go on."""
        logging = self.control.should_log
        transformers.Trainer.log(self, _of_all_ranks(logs) if self.args.world_size > 1 else logs)
        self.control.should_log = logging

    def check_media(self, after: int = 1, counts=None, problems=None) -> None:
        """Stop when too many media, or rows, of those all ranks have seen so far could not be read; all do."""
        counts, problems = self._seen if counts is None else counts, self.problems if problems is None else problems
        media = counts.get("images", 0) + counts.get("clips", 0)
        rows = counts.get("rows", 0) + counts.get("bad_rows", 0)
        for what, seen in (("media", media), ("rows", rows)):
            bad = counts.get(f"bad_{what}", 0)
            if seen >= after and bad > self.max_bad_media * seen:
                named = [problem for some in ranks.gathered(problems[:3]) for problem in some]
                named = "; ".join(f"{row}: {reason}" for row, reason in dict.fromkeys(map(tuple, named[:3])))
                limit = f"--max-bad-media {self.max_bad_media:g}"
                raise DataError(f"{bad} of {seen} {what} cannot be read, over {limit}. First: {named}")

    # -- evaluation

    def weight_of(self, inputs) -> int:
        """What a batch's loss is a mean over, such as tokens."""
        raise NotImplementedError

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        if self.all_stopping():
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
        everywhere = ranks.gathered([self._eval_sums, self._eval_counts, self._eval_problems])
        total, weight = (sum(sums[at] for sums, _, _ in everywhere) for at in (0, 1))
        counts: dict[str, int] = {}
        for _, of_rank, _ in everywhere:
            add_counts(counts, of_rank)
        self.check_media(1, counts, [problem for *_, problems in everywhere for problem in problems])
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(weight, 1)
        return output


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
        if num_items_in_batch is not None:
            if not self.model.training:  # the mean of this batch alone, by what the trainer will multiply it with
                num_items_in_batch = self.weight_of(inputs) * self.accelerator.num_processes
            # None trained in this whole step: loss 0 rather than 0 / 0.
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


class _GivenUp(Exception):
    """An evaluation that nobody waits for any more."""


def something_is_trained(rows, collator: MultimodalCollator, size: int = 8) -> bool:
    """Whether any row has a trained token after cutting; stops at the first that has."""
    for start in range(0, len(rows), size):
        batch = collator([rows[index] for index in range(start, min(start + size, len(rows)))])
        if batch.counts.get("trained_tokens"):
            return True
    return False


def _mean_of_all_ranks(metrics: dict[str, list[float]]) -> dict[str, float]:
    """The means of what TRL's trainers keep of each batch, over all batches of all ranks; weighted where the metric
    `WEIGHTS` says how much each batch counts."""
    weights = metrics.pop(WEIGHTS, [])
    sums = {}
    for name, values in metrics.items():
        counts = weights if len(weights) == len(values) else [1] * len(values)
        total = sum(value * count for value, count in zip(values, counts, strict=True))
        sums[name] = total, sum(counts)
    totals: dict[str, list[float]] = {}
    for of_rank in ranks.gathered(sums):
        for name, (total, count) in of_rank.items():
            before = totals.setdefault(name, [0.0, 0.0])
            before[0], before[1] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in totals.items() if count}


def _of_all_ranks(figures: dict) -> dict:
    """What is logged, as it is for the run as a whole: the mean of each figure over the ranks that have it, the sum of
    their speeds, the largest of their memories; what is no number is the first rank's."""
    everywhere, found = ranks.gathered(figures), {}
    for name in dict.fromkeys(name for one in everywhere for name in one):
        values = [one[name] for one in everywhere if name in one]
        if name in ("tokens_per_second", "memory_mb"):
            found[name] = sum(values) if name == "tokens_per_second" else max(values)
        elif len(set(map(str, values))) > 1 and all(isinstance(value, int | float) for value in values):
            found[name] = sum(values) / len(values)
        else:
            found[name] = values[0]
    return found
