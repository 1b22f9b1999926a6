"""What a run does beside training: its metrics file and state, its goals, and what stops it."""

from __future__ import annotations

import math
import operator
import os
import signal
import sys
import time

import transformers
from tqdm import tqdm

from . import ranks
from .errors import Interrupted
from .files import tell
from .fsdp import keep_embeddings_whole
from .goals import Goal, lower_is_better

UNTOLD = (
    "num_tokens",
    "eval_num_tokens",
)  # TRL's counters, which begin anew when a run is resumed; `run.json` has ours


class Watchman(transformers.TrainerCallback):
    """What a `trainers.RowsTrainer` does at moments that only callbacks are told of."""

    def __init__(self, trainer):
        self.trainer, self.due = trainer, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.take_up_log()
        keep_embeddings_whole(self.trainer.model)
        step = state.global_step
        evaluated = any("eval_loss" in entry and entry["step"] == step for entry in state.log_history)
        self.due = bool(step) and args.eval_strategy == "steps" and step % state.eval_steps == 0 and not evaluated

    def on_step_begin(self, args, state, control, **kwargs):
        if self.due:  # the run was stopped within this evaluation
            self.due = False
            self.trainer.evaluate()

    def on_epoch_begin(self, args, state, control, **kwargs):
        # With several ranks, nobody else tells the sampler in the epoch that a run resumes in.
        self.trainer.sampler.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.meter.end_step()
        if self.trainer.stream is not None:  # transformers counts from where the run was resumed
            batches = state.global_step * args.gradient_accumulation_steps
            state.epoch = self.trainer.stream.epochs(batches) or state.global_step / state.max_steps

    def on_epoch_end(self, args, state, control, **kwargs):
        """Look at the share of bad media, also where fewer than 100 were seen."""
        if abs(state.epoch - round(state.epoch)) < 1e-6:  # not where --max-steps ends the run within an epoch
            self.trainer.check_media()


class MetricsFile(transformers.TrainerCallback):
    """Hands each log entry, with its step and epoch, to `add`, which appends it to `metrics.jsonl`."""

    def __init__(self, add):
        self.add = add

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            self.add({"step": state.global_step, **{key: v for key, v in logs.items() if key not in UNTOLD}})


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
        names = {
            "loss": "loss", "eval_loss": "eval loss", "gen/pass_rate": "prompts that pass", "learning_rate": "lr",
            "grad_norm": "gradient",
        }  # fmt: skip
        numbers = {name: logs[key] for key, name in names.items() if isinstance(logs.get(key), float)}
        told = "  ".join(f"{name} {n:.0%}" if "pass" in name else f"{name} {n:.4g}" for name, n in numbers.items())
        if self.bar is not None and "loss" in logs:
            self.bar.set_postfix_str(told)
        elif self.bar is not None:
            self.bar.write(f"step {state.global_step}  {told}", file=sys.stderr)
        elif logs.keys() & {"eval_loss", "gen/pass_rate"} or state.global_step >= self.shown + max(
            1, state.max_steps // 20
        ):
            self.shown = state.global_step if "loss" in logs else self.shown
            minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
            clock = f"{minutes}:{seconds:02d}"
            print(f"step {state.global_step}/{state.max_steps}  {clock}  {told}", file=sys.stderr, flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class RunState(transformers.TrainerCallback):
    """Keeps `run.json` up to date for whoever watches the run: step, total, ETA in seconds, last metrics.

    Args:
        save: takes facts and writes them, such as `runs.Run.save_record`.
    """

    SECONDS = 5.0  # between two writes

    def __init__(self, save):
        self.save, self.written, self.metrics = save, 0.0, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.first = time.monotonic(), state.global_step
        self._write(state)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.metrics |= {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}

    def on_step_end(self, args, state, control, **kwargs):
        if time.monotonic() - self.written > self.SECONDS:
            self._write(state)

    def _write(self, state):
        if not state.is_world_process_zero:
            return
        self.written = time.monotonic()
        done, left = state.global_step - self.first, state.max_steps - state.global_step
        eta = round((self.written - self.began) / done * left) if done else None
        shown = {name: value for name, value in self.metrics.items() if name not in UNTOLD}
        self.save(step=state.global_step, total_steps=state.max_steps, eta_s=eta, metrics=shown)


class StopWhen(transformers.TrainerCallback):
    """Ends the run, with a checkpoint, as soon as a metric that is logged meets the goal; `why` says so then.

    Not before the first step: a model that is good enough already is trained for one step. A run that is resumed where
    it had met the goal is not trained further (`trainer.ended`).
    """

    def __init__(self, trainer, goal: Goal):
        self.trainer, self.goal, self.seen, self.why = trainer, goal, False, ""

    def on_train_begin(self, args, state, control, **kwargs):
        goal, why = self.trainer.kept.pop("goal_met", ("", ""))
        if goal == str(self.goal):
            self.seen, self.why, self.trainer.ended = True, why, True
            self.trainer.kept["goal_met"] = goal, why

    def on_log(self, args, state, control, logs=None, **kwargs):
        value = (logs or {}).get(self.goal.metric)
        value = value if isinstance(value, int | float) else None
        self.seen = self.seen or value is not None
        if value is not None and state.global_step and not self.why and self.goal.met(value):
            self.why = f"{self.goal.metric} is {value:.4g} at step {state.global_step} (--stop-when)"
            self.trainer.kept["goal_met"] = str(self.goal), self.why
            control.should_save = control.should_training_stop = True


class KeepBest(transformers.TrainerCallback):
    """Saves a checkpoint whenever a metric is better than ever before, and has the trainer keep it.

    Args:
        trainer: a `trainers.RowsTrainer`; its `best_step` is that of the best checkpoint, and `kept["best"]` holds
            [value, step].
        metric: as it is logged. See `goals.lower_is_better`.
    """

    def __init__(self, trainer, metric: str):
        self.trainer, self.metric = trainer, metric
        self.better = operator.lt if lower_is_better(metric) else operator.gt

    def on_log(self, args, state, control, logs=None, **kwargs):
        value, best = (logs or {}).get(self.metric), self.trainer.kept.get("best")
        if not isinstance(value, int | float) or not state.global_step or not math.isfinite(value):
            return
        if best is None or self.better(value, best[0]):
            self.trainer.kept["best"] = [value, state.global_step]
            self.trainer.best_step = state.global_step
            control.should_save = True


class StopAfter(transformers.TrainerCallback):
    """Ends the run, with a checkpoint and an evaluation, once so many minutes have passed; `why` says so then.

    Args:
        minutes: since `began`, a reading of `time.monotonic()`.
    """

    def __init__(self, minutes: float, began: float):
        self.minutes, self.began, self.why = minutes, began, ""

    def on_step_end(self, args, state, control, **kwargs):
        if not self.why and any(ranks.gathered(time.monotonic() - self.began >= 60 * self.minutes)):
            self.why = f"{self.minutes:g} minutes have passed at step {state.global_step} (--max-minutes)"
            control.should_save = control.should_training_stop = True


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

    TWICE = 5.0  # seconds within which a rank may get a signal again: from the scheduler, and from its launcher

    def __init__(self):
        self.exit_code: int | None = None
        self._first: float | None = None  # when this process had one
        self._process = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it for the last
                self._before.setdefault(number, signal.signal(number, self._caught))
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any rank has had a signal, which is then one for all: it may reach one alone, or the ranks within
        different steps. All of them have to ask."""
        codes = [code for code in ranks.gathered(self.exit_code) if code is not None]
        self.exit_code = codes[0] if codes else None
        return bool(codes)

    def _caught(self, number, frame):
        now, first = time.monotonic(), self._first
        if first is not None and ranks.world() > 1 and now - first < self.TWICE:
            return
        if first is not None:
            raise Interrupted("stopped at once: go on from the last checkpoint with --resume", self.exit_code)
        self._first = now
        self.exit_code = self.exit_code or (130 if number == signal.SIGINT else 143)
        if os.getpid() == self._process and ranks.rank() == 0:  # a worker inherits the handler, with nothing to tell
            tell("stopping: a checkpoint is saved after this step (again to stop at once)")

    def on_step_end(self, args, state, control, **kwargs):
        if self.agreed():
            control.should_save = control.should_training_stop = True
        return control
