"""What a trainer saves: models, and checkpoints that appear whole or not at all, with what it counted on all ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from . import ranks
from .checkpoints import checkpoint_bytes, checkpoints, put_in_place, rotate, seal, size_of
from .errors import EnvironmentUnfit
from .files import is_disk_full, mib, usual_mode, write_whole
from .stats import add_counts

COLLECTED = "collected.json"  # in each checkpoint: what the trainer keeps beside transformers' own state
LENGTHS = "lengths.npy"  # in each checkpoint: the lengths of rows as the sampler knows them
MAX_NAMED = 1000  # problems kept by name
MAX_LENGTHS = 20_000  # row lengths kept for the report's histogram


class SavesWhole:
    """The part of `trainers.RowsTrainer` that saves, and takes up what was saved."""

    describe: Callable[[Path], None] | None = None
    logged_bytes: Callable[[], int] | None = None
    best_step: int | None = None

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if not self.args.should_save:  # transformers since 5.24 asks all ranks, of which one writes
            return
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
            collected = json.dumps(self._collected())
            self.accelerator.wait_for_everyone()  # each rank has written a file of its own
            if self.args.should_save:
                write_whole(folder / COLLECTED, collected)
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

    def collected(self, gathered=ranks.gathered) -> dict:
        """{"counts", "problems", "lengths", "waited"} of all ranks, which all have to ask; waited is the mean."""
        counts: dict[str, int] = {}
        everywhere = gathered([self.counts, self.problems, self.lengths, self.waited])
        for one, *_ in everywhere:
            add_counts(counts, one)
        problems, lengths = ([item for one in everywhere for item in one[at]] for at in (1, 2))
        waited = sum(one[3] for one in everywhere) / len(everywhere)
        return {
            "counts": counts,
            "problems": problems[:MAX_NAMED],
            "lengths": lengths[:MAX_LENGTHS],
            "waited": waited,
        }

    def _collected(self) -> dict:
        unlogged = [self._tr_loss.item(), self._globalstep_last_logged, self._total_loss_scalar]
        everywhere = ranks.gathered(unlogged)
        unlogged[0] = sum(loss for loss, *_ in everywhere) / len(everywhere)
        return self.collected() | {
            "kept": self.kept,
            "best_step": self.best_step,
            "seen": self._seen,
            "seconds": self.seconds(),
            "stream": None if self.stream is None else self.stream.state(),
            "logged_bytes": self.logged_bytes() if self.logged_bytes else None,
            # What was summed up since the last log, for the next one.
            "unlogged": unlogged,
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
            for name in "kept best_step waited".split():
                setattr(self, name, self._resumed[name])
            self._seen, self._before = self._resumed.get("seen", {}), self._resumed["seconds"]
            if self.args.process_index == 0:  # what all ranks had counted
                for name in "counts problems lengths".split():
                    setattr(self, name, self._resumed[name])
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
