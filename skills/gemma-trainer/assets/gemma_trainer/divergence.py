"""A loss or a gradient that is no number: seen at the step where it happens, and told with the rows that were in it."""

from __future__ import annotations

import math

import torch
from accelerate.utils import gather_object

from .checkpoints import checkpoints
from .errors import Diverged

SHOWN = 5  # rows told by name
# fp16 scales losses up until gradients overflow, and leaves those steps out: it may take so many to find a scale.
OVERFLOWS = 20
LEFT_OUT = 10  # steps in a row that "skip" leaves out before it gives up


class DivergenceGuard:
    """Looks at each optimizer step of a trainer, before it is applied.

    Args:
        skip: leave such a step out and count it (`counts["diverged_steps"]`), instead of stopping.

    Raises:
        Diverged: by `check`, with the rows, the last whole checkpoint, and the usual causes.
    """

    def __init__(self, trainer, skip: bool):
        self.trainer, self.skip = trainer, skip
        self._losses: list[tuple[list[str], torch.Tensor]] = []
        self._in_a_row = 0

    def seen(self, rows: list[str], loss: torch.Tensor) -> torch.Tensor:
        """Remember a batch's loss until the step is whole; returns what is to be summed up of it."""
        self._losses.append((rows, loss))
        return loss.nan_to_num(0.0, 0.0, 0.0) if self.skip else loss

    def check(self, model, norm):
        """The gradient's norm, as given; None where the step is left out, whose gradients are gone then."""
        batches, self._losses = self._losses, []
        total = torch.stack([loss for _, loss in batches]).sum() if batches else torch.zeros(())
        value = norm.item() if isinstance(norm, torch.Tensor) else norm
        bad_loss, bad_norm = not math.isfinite(total.item()), value is not None and not math.isfinite(value)
        if self.trainer.args.world_size > 1:  # all ranks must do the same
            told = gather_object([(bad_loss, bad_norm)])
            bad_loss, bad_norm = (any(flags) for flags in zip(*told, strict=True))
        if not (bad_loss or bad_norm):
            self._in_a_row = 0
            return norm
        self._in_a_row += 1
        if not bad_loss and self.trainer.args.fp16 and self._in_a_row < OVERFLOWS:
            return None  # the loss scaler leaves the step out
        rows = self._rows(batches, bad_loss)
        what = "loss" if bad_loss else "gradient"
        if not self.skip or self._in_a_row > LEFT_OUT:
            raise Diverged(self._told(what, rows))
        if self.trainer.args.process_index == 0:  # of all ranks
            counts = self.trainer.counts
            counts["diverged_steps"] = counts.get("diverged_steps", 0) + 1
            step = self.trainer.state.global_step + 1
            self.trainer.problems += [(name, f"left out at step {step}: the {what} is not a number") for name in rows]
        if not self.trainer.args.fp16:
            model.zero_grad(set_to_none=True)  # an optimizer passes over parameters without a gradient
        return None

    def _rows(self, batches, bad_loss: bool) -> list[str]:
        """The rows of the batches with a bad loss; of all, where the losses are numbers."""
        bad = [rows for rows, loss in batches if not bad_loss or not math.isfinite(loss.item())]
        rows = [name for names in bad for name in names]
        return gather_object(rows) if self.trainer.args.world_size > 1 else rows

    def _told(self, what: str, rows: list[str]) -> str:
        args = self.trainer.args
        shown = ", ".join(rows[:SHOWN]) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
        whole = checkpoints(args.output_dir)
        half = "half precision (--precision fp32)" if args.fp16 or args.bf16 else ""
        causes = [f"a learning rate that is too high (--lr {args.learning_rate:g} now: try a third)", half]
        leave_out = "" if self.skip else "; --on-divergence skip leaves them out"
        causes += [f"a row that is broken (look at those named{leave_out})"]
        saved = f"The last whole checkpoint is {whole[-1].name}" if whole else "No checkpoint was saved yet"
        again = f", as it did at the {LEFT_OUT} steps before, which were left out" if self.skip else ""
        return (
            f"training diverged at step {self.trainer.state.global_step + 1}{again}: the {what} is not a number. "
            f"Rows of that step: {shown or 'unknown'}.\n"
            f"{saved}. Usual causes, in order: {'; '.join(filter(None, causes))}."
        )
