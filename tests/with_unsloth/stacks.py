"""Runs of the scripts with and without Unsloth, each in a process of its own: what it patches cannot be taken back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ASSETS

HERE = Path(__file__).resolve().parent


def call(stack: str, script: str, *flags: str, env=None):
    """The finished process of a script on a stack: "hf", "cpu" (Unsloth's backend for a CPU) or "gpu" (its GPU code on
    CPU tensors, see gpu_stack.py)."""
    before = [str(HERE / "gpu_stack.py")] if stack == "gpu" else []
    return subprocess.run(
        [sys.executable, *before, str(ASSETS / script), "--backend", "hf" if stack == "hf" else "unsloth", *flags],
        env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


class Runs:
    """Runs by stack, script and flags; the same one is made once."""

    def __init__(self, place: Path):
        self.place, self.made = place, {}

    def __call__(self, stack: str, script: str, *flags: str, output: Path | None = None) -> tuple[dict, Path]:
        """(run.json, folder) of a finished run."""
        known = (stack, script, flags)
        if output is None and known in self.made:
            return self.made[known]
        folder = output or self.place / f"{stack}-{len(self.made)}"
        done = call(stack, script, *flags, "--output", str(folder), "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout)["status"] == "done"
        self.made[known] = json.loads((folder / "run.json").read_text()), folder
        return self.made[known]


def curve(folder: Path, *names: str) -> list[tuple]:
    """What was logged of each step, by name."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [tuple(entry[name] for name in names) for entry in entries if "loss" in entry]


def assert_same(one, other, tolerance=1e-4):
    (record, folder), (record2, folder2) = one, other
    assert record["first_batch"]["hash"] == record2["first_batch"]["hash"]  # rows, ids, attention and labels
    assert record["counters"] == record2["counters"] and record["model"]["trains"] == record2["model"]["trains"]
    losses, losses2 = curve(folder, "loss", "learning_rate"), curve(folder2, "loss", "learning_rate")
    assert len(losses) == record["steps"] and losses == [pytest.approx(step, rel=tolerance) for step in losses2]
    gradients, gradients2 = curve(folder, "grad_norm"), curve(folder2, "grad_norm")
    assert gradients == [pytest.approx(step, rel=1e-3) for step in gradients2]
    if "eval_loss" in record["metrics"]:
        assert record["metrics"]["eval_loss"] == pytest.approx(record2["metrics"]["eval_loss"], rel=tolerance)
