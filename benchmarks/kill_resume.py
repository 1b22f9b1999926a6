"""Kill a training run without warning at random moments, go on with it each time, and compare its end with an unbroken
run's: the same losses at every step, the same answers, the same adapter to the last
byte.

Half of the kills come by the clock, anywhere from start-up to the end; the other half within the writing of files, at
the n-th time that something is synced to the disk or moved to its place.

    python benchmarks/kill_resume.py --kills 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets" / "sft_train.py"
FLAGS = "--max-steps 12 --save-steps 2 --eval-steps 5 --lora-dropout 0.1 --num-workers 0 --batch-size 4".split()
KILLER = """
import os, signal
left = [int(os.environ["KILL_AT_WRITE"])]
def counting(function):
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
os.fsync, os.replace = counting(os.fsync), counting(os.replace)
"""


def start(folder: Path, killer: Path, at_write: int | None = None) -> subprocess.Popen:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if at_write is not None:
        environment |= {"PYTHONPATH": str(killer), "KILL_AT_WRITE": str(at_write)}
    command = [sys.executable, str(SCRIPT), "--output", str(folder), "--resume", *FLAGS]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def end_of(folder: Path) -> tuple[list, list, bytes]:
    """The losses of each step, the sample answers, and the adapter."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in entries if "grad_norm" in entry]
    evaluations = [(entry["step"], entry["eval_loss"]) for entry in entries if "eval_loss" in entry]
    samples = json.loads((folder / "run.json").read_text())["samples"]
    return losses + evaluations, samples, (folder / "adapter_model.safetensors").read_bytes()


def newest(folder: Path) -> str:
    steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*")]
    return f"checkpoint-{max(steps)}" if steps else "no checkpoint"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        unbroken, broken, killer = (Path(place) / name for name in ("unbroken", "broken", "killer"))
        killer.mkdir()
        (killer / "sitecustomize.py").write_text(KILLER)
        began = time.monotonic()
        if start(unbroken, killer).wait():
            print("the unbroken run failed")
            return 1
        whole = time.monotonic() - began
        expected, kills = end_of(unbroken), 0
        while kills < options.kills:
            by_clock = kills % 2 == 0
            at_write = None if by_clock else chance.randint(1, 150)
            run = start(broken, killer, at_write)
            try:
                run.wait(chance.uniform(0.05, 1.0) * whole if by_clock else None)
            except subprocess.TimeoutExpired:
                run.kill()
            told = run.communicate()[1]
            if run.returncode == 0:  # it came to its end: begin another
                same = end_of(broken) == expected
                print(f"an end, {'the same' if same else 'ANOTHER'}")
                subprocess.run(["rm", "-rf", str(broken)], check=True)
                if not same:
                    return 1
                continue
            if run.returncode != -9:
                print(f"it failed with {run.returncode} instead:\n{told[-2000:]}")
                return 1
            kills += 1
            how = "by the clock" if by_clock else f"at write {at_write}"
            print(f"kill {kills:>3}  {how:<14} left {newest(broken)}", flush=True)
        last = start(broken, killer)
        told = last.communicate()[1]
        same = last.returncode == 0 and end_of(broken) == expected
        print(
            f"{kills} kills, then the end: {'the same' if same else 'ANOTHER'}" + ("" if same else f"\n{told[-2000:]}")
        )
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
