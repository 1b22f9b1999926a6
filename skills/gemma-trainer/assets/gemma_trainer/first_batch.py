"""The first batch of a run, kept so that another run, or another stack, can be compared with it token for token."""

from __future__ import annotations

import json

import torch
import transformers
import xxhash

from . import ranks
from .files import write_whole
from .labels import IGNORE

FILE = "first_batch.json"
HASHED = ("input_ids", "attention_mask", "labels", "completion_mask")


class KeepFirstBatch(transformers.TrainerCallback):
    """Tells in `run.json` what the first batch of step 1 was; with `whole` also writes it into the run's folder.

    Args:
        trainer: a `trainers.RowsTrainer`.
        run: `runs.Run`.
        whole: write `first_batch.json`: row names, their indices, token ids and labels.
    """

    def __init__(self, trainer, run, whole: bool):
        self.trainer, self.run, self.whole = trainer, run, whole

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step:  # a resumed run has the one of its first step
            return

        def first_step(model, inputs, *more, **options):
            del self.trainer.training_step  # which hides that of its class
            self._keep(inputs)
            return self.trainer.training_step(model, inputs, *more, **options)

        self.trainer.training_step = first_step

    def _keep(self, batch) -> None:
        rows = list(getattr(batch, "rows", []))
        self.run.save_record(first_batch=facts_of(batch, rows))
        if self.whole and self.run.main and "labels" in batch:
            held = {"rows": rows, "indices": next(iter(self.trainer.batches()))}
            held |= {key: batch[key].tolist() for key in ("input_ids", "labels")}
            write_whole(self.run.folder / FILE, json.dumps(held))


def facts_of(batch, rows: list[str]) -> dict:
    """{"rows" (names), "tokens", "trained_tokens", "hash" (XXH3 over ids, attention mask and labels)} of a batch."""
    digest = xxhash.xxh3_64()
    for key in HASHED:
        if key in batch:
            digest.update(batch[key].cpu().contiguous().numpy().tobytes())
    trained = batch["labels"] != IGNORE if "labels" in batch else batch.get("completion_mask", torch.zeros(0))
    return {
        "rows": rows,
        "tokens": int(batch["attention_mask"].sum()),
        "trained_tokens": int(trained.sum()),
        "hash": digest.hexdigest(),
    }


def add_log_probs(run, model, collator, rows) -> None:
    """Add to a run's `first_batch.json` what its trained model makes of it: "log_probs", see `log_probs`. All ranks ask
    the model, which may be spread over them; the first one writes."""
    path = run.folder / FILE
    held = json.loads(path.read_text(encoding="utf-8")) if run.main and path.is_file() else None
    held = ranks.agreed(held)
    if held is None:  # of a run that was resumed after its first step
        return
    held["log_probs"] = log_probs(model, collator, [rows[index] for index in held["indices"]])
    if run.main:
        write_whole(path, json.dumps(held))


def log_probs(model, collator, rows) -> list[list[float]]:
    """The log-probability, in float32, of each trained token of each row; the rows one at a time.

    Args:
        model: in eval mode; any causal or conditional-generation model of transformers, adapted or not.
        collator: with task "sft".
        rows: raw rows.
    """
    found = []
    for raw in rows:
        batch = collator([raw])
        targets = batch.pop("labels")[0, 1:]
        places = (targets != IGNORE).nonzero()[:, 0]
        if not len(places):
            found.append([])
            continue
        media = {key: batch[key].to(model.dtype) for key in ("pixel_values", "input_features") if key in batch}
        inputs = {key: value.to(model.device) for key, value in (batch | media).items()}
        with torch.no_grad():
            logits = model(**inputs, logits_to_keep=places.to(model.device), use_cache=False).logits[0]
        wanted = targets[places, None].to(logits.device)
        found.append(logits.float().log_softmax(-1).gather(-1, wanted)[:, 0].tolist())
    return found
