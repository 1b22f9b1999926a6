"""What a trainer counted and measured, as `run.json` has it."""

from __future__ import annotations

from .meter import peak_memory_mb
from .runs import Run


def _history(run: Run, trainer) -> list[dict]:
    """What was logged; where an earlier step's model is saved, without what was measured of later ones."""
    best = run.record.get("best")
    if not best:
        return trainer.state.log_history
    measured = [entry for entry in trainer.state.log_history if entry["step"] <= best["step"]]
    later = [entry for entry in trainer.state.log_history if entry["step"] > best["step"]]
    of_training = [{k: v for k, v in e.items() if not k.startswith(("eval_", "gen/"))} for e in later]
    return measured + of_training


def collected(run: Run, trainer, gathered=lambda value: [value]) -> dict:
    """What the trainer counted, for `run.json`; of a resumed run, from its first step on.

    Args:
        gathered: `ranks.gathered`, where all ranks have come here; by default this one speaks for itself.
    """
    from .callbacks import UNTOLD

    history = _history(run, trainer)
    last = {key: value for entry in history for key, value in entry.items() if key not in ("step", "epoch")}
    metrics = {key: value for key, value in last.items() if isinstance(value, int | float) and key not in UNTOLD}
    losses = [entry["loss"] for entry in run.metrics() if "loss" in entry]
    if losses:  # the trainer's own mean leaves out the steps before a resumed checkpoint
        metrics["train_loss"] = sum(losses) / len(losses)
    seconds = trainer.seconds()
    counted = trainer.collected(gathered)
    waited = counted["waited"]
    return {
        "step": trainer.state.global_step,
        "steps": trainer.state.global_step,
        "eta_s": 0,
        "counters": counted["counts"],
        "problems": [f"{row}: {reason}" for row, reason in counted["problems"]],
        "lengths": counted["lengths"],
        "peak_memory_mb": max(gathered(peak_memory_mb())),
        "metrics": metrics,
        "timing": {
            "train_s": round(seconds, 1),
            "data_wait_s": round(waited, 1),
            "data_wait_share": round(waited / max(seconds, 1e-9), 3),
            "workers": trainer.args.dataloader_num_workers,
        },
    }
