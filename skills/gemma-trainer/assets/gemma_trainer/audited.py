"""A model loaded as a run would load it, with a trainer around it, to look at what is patched."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import preparation
from .flags import CollatorFlags, PolicyFlags

ROWS = [{"prompt": f"Count to {n}.", "completion": ", ".join(map(str, range(1, n + 1)))} for n in (3, 5, 7, 9)]


@dataclass(frozen=True)
class _Config(CollatorFlags, PolicyFlags):
    pass


def audit(model: str, backend: str) -> dict:
    """What `audit.look_at` finds of a supervised run of a model that is not trained, with the proof by a forward.

    Args:
        model: a hub id, a folder, or "demo".
        backend: as --backend has it; "backend" of the result names what was taken.

    Raises:
        CannotLoad, EnvironmentUnfit: as a run would.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        output = str(Path(folder) / "run")
        config = _Config(model=model, backend=backend, dataset=(str(rows),), output=output, batch_size=2, max_steps=2)
        config, run, data, model_config, processor, collators = preparation.prepare(config, "doctor")

        from . import recipe  # after the backend
        from .audit import look_at, makes_logits

        loaded = recipe.load_model(config, run, model_config, processor)
        trainer = recipe.make_sft_trainer(config, run, loaded, processor, data, collators)
        batch = trainer._prepare_inputs(dict(collators[0]([data.rows[0], data.rows[1]])))
        with trainer.compute_loss_context_manager():
            made = makes_logits(trainer.model, batch)
        return {"backend": config.backend, "reason": run.record["backend"]["reason"]} | look_at(trainer, made)
