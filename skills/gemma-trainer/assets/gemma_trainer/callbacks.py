"""What a run watches while it trains: its metrics file, its divergence, and the signals that stop it."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import transformers
from tqdm import tqdm

from .errors import Diverged
from .files import finite, tell

UNTOLD = (
    "num_tokens",
    "eval_num_tokens",
)  # TRL's counters, which begin anew when a run is resumed; `run.json` has ours


class MetricsFile(transformers.TrainerCallback):
    """Appends each log entry as a line of `metrics.jsonl`, with its step and epoch."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            shown = finite({key: value for key, value in logs.items() if key not in UNTOLD})
            entry = {"step": state.global_step, **shown}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


class Progress(transformers.TrainerCallback):
    """Shows on stderr how far the run is: a bar on a terminal, else some twenty lines and each evaluation."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.shown, self.bar = time.monotonic(), state.global_step, None
        if state.is_world_process_zero and sys.stderr.isatty():
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        names = {"loss": "loss", "eval_loss": "eval loss", "learning_rate": "lr", "grad_norm": "gradient"}
        told = "  ".join(f"{name} {logs[key]:.4g}" for key, name in names.items() if isinstance(logs.get(key), float))
        if self.bar is not None and "loss" in logs:
            self.bar.set_postfix_str(told)
        elif self.bar is not None:
            self.bar.write(f"step {state.global_step}  {told}", file=sys.stderr)
        elif "eval_loss" in logs or state.global_step >= self.shown + max(1, state.max_steps // 20):
            self.shown = state.global_step if "loss" in logs else self.shown
            minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
            clock = f"{minutes}:{seconds:02d}"
            print(f"step {state.global_step}/{state.max_steps}  {clock}  {told}", file=sys.stderr, flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class StopOnDivergence(transformers.TrainerCallback):
    """Ends the run at the first loss or gradient norm that is no number."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if isinstance(value, float) and not math.isfinite(value):
                raise Diverged(
                    f"training diverged at step {state.global_step}: {name} is {value}. "
                    "Lower --lr, or use --precision fp32 if the run is in half precision."
                )


class WarnOfCollapse(transformers.TrainerCallback):
    """Tells once where the chosen answers themselves become far less likely than they were, as preferences alone allow:
    only the difference to the rejected ones counts (Pal et al., Smaug, arXiv 2402.13228).

    Args:
        beta: of the run; a reward is beta times the change of the log-probability.
    """

    NATS, SHARE = 10.0, 0.5  # lost by an answer on average, and what share of its log-probability that is

    def __init__(self, beta: float):
        self.beta, self.told = beta, False

    def on_log(self, args, state, control, logs=None, **kwargs):
        reward, now = (logs or {}).get("rewards/chosen"), (logs or {}).get("logps/chosen")
        if self.told or reward is None or now is None:
            return
        change = reward / self.beta
        if change < -max(self.NATS, self.SHARE * abs(now - change)):
            self.told = True
            tell(
                f"step {state.global_step}: the chosen answers have lost {-change:.0f} nats, from {now - change:.0f} "
                f"to {now:.0f}: the model unlearns them too. Lower --lr, raise --beta, or add --loss-type sigmoid sft"
            )


class StopOnSignal(transformers.TrainerCallback):
    """Turns the first Ctrl-C or SIGTERM into a checkpoint and an orderly stop; a second one stops at once.

    `exit_code` is 130 or 143 after a signal, else None. Use as a context manager around training.
    """

    def __init__(self):
        self.exit_code: int | None = None
        self._process = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number, frame):
        if self.exit_code is not None:
            raise KeyboardInterrupt
        self.exit_code = 128 + number
        if os.getpid() == self._process:  # a worker inherits the handler, and has nothing to tell
            tell("stopping: a checkpoint is saved after this step (again to stop at once)")

    def on_step_end(self, args, state, control, **kwargs):
        if self.exit_code is not None:
            control.should_save = control.should_training_stop = True
        return control
