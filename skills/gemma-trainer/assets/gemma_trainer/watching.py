"""While a model trains, have it answer fixed prompts, and check what it says, without touching the training."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from accelerate.utils import gather_object

from .answer_checks import Answer, Check, error_rate
from .errors import Interrupted
from .eval_prompts import Prompt
from .files import tell
from .generation import InBatches, generate, prompts_of, stands_alone

AT_ONCE = 8  # prompts in a batch, at first
RATES = {"max_wer": "wer", "max_cer": "cer"}  # checks whose measure is logged, too


@dataclass(frozen=True)
class Asking:
    """How prompts are asked: every so many steps, with so many tokens at most, at a temperature (0: greedy)."""

    every: int
    max_new_tokens: int = 256
    temperature: float = 0.0


class WatchAnswers(transformers.TrainerCallback):
    """Asks the model its prompts before the first step, every so many steps, and at the end.

    Logs `gen/pass_rate` (of the prompts, the share whose answers pass all checks), `gen/<check>` (of those that have
    the check), `gen/wer` and `gen/cer`, `gen/tokens` (mean length of an answer), `gen/failed` (prompts that could not
    be answered, which do not pass), `gen/seconds` and `gen/share` (of the run's time so far). The answers are written
    by `keep`. With several ranks each answers its share.

    Args:
        trainer: a `trainers.RowsTrainer`.
        collator: whose options say how prompts are rendered; it is not counted in.
        keep: takes {"step", "answers": [{"prompt", "answer", "passed", "missed"}]}; called in the main process.
        log_answers: log the answers, too, as `gen/answer/<prompt>`.
    """

    def __init__(
        self,
        trainer,
        collator,
        prompts: list[Prompt],
        asking: Asking,
        keep: Callable[[dict], None],
        log_answers: bool = False,
    ):
        self.trainer, self.collator, self.asking = trainer, collator, asking
        self.keep, self.log_answers = keep, log_answers
        self._in_batches = InBatches(self._generate, AT_ONCE, self._alone)
        self.prompts = prompts
        self._by_length = sorted(prompts, key=lambda prompt: len(json.dumps(prompt.question.row.messages)))
        self._told: list[str] = []  # the prompts that were told to fail
        self._ready: dict[tuple[str, ...], dict] = {}  # prompts that were made ready once

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step % self.asking.every == 0:  # at step 0, or where a run was stopped within it
            saving = control.should_save
            self.ask(state)
            control.should_save = saving
            if self.trainer.all_stopping():
                raise Interrupted("stopped before a step was trained: nothing new to save", self.trainer.stop.exit_code)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.asking.every == 0 or control.should_training_stop:
            self.ask(state)
            if self.trainer.all_stopping():  # since then: the answers wait for the run to go on
                control.should_save = control.should_training_stop = True

    def on_train_end(self, args, state, control, **kwargs):
        self.ask(state)

    def ask(self, state) -> None:
        """Ask all prompts and log what came of it, unless that was done at this step."""
        if self.trainer.kept.get("asked_at") == state.global_step or self.trainer.all_stopping():
            return
        began = time.monotonic()
        accelerator = self.trainer.accelerator
        # Sorted by length: every n-th gives all ranks the like. Where weights are spread, all must do the same.
        rank, world, spread = accelerator.process_index, accelerator.num_processes, self.trainer.spread
        mine = self._by_length if spread else self._by_length[rank::world]
        with undisturbed(self.trainer.model):
            found = self._answers(mine, spread)
        if world > 1:
            found = gather_object(found)
        if self.trainer.all_stopping():
            return
        answers = dict(found)
        self.trainer.kept["asked_at"] = state.global_step
        self._log(state, answers, time.monotonic() - began)

    def _answers(self, prompts: list[Prompt], spread: bool) -> list[tuple[str, Answer | str]]:
        """(name, answer or why there is none) of each prompt."""
        stopping = self.trainer.all_stopping if spread else self.trainer.stopping
        self._in_batches.work = functools.partial(self._generate, spread=spread)
        return [(prompt.name, answer) for prompt, answer in self._in_batches(prompts, stopping)]

    def _alone(self, prompt: Prompt) -> bool:
        return stands_alone(self.collator, prompt.question.row.media)

    def _generate(self, prompts: list[Prompt], spread: bool) -> list[Answer]:
        names = tuple(prompt.name for prompt in prompts)
        if names not in self._ready:
            self._ready[names] = prompts_of(self.collator, [prompt.question for prompt in prompts])
        options = {"synced_gpus": True} if spread else {}
        how = self.asking
        with self.trainer.compute_loss_context_manager():
            return generate(
                self.trainer.model,
                self.collator,
                self._ready[names],
                how.max_new_tokens,
                how.temperature,
                None if spread else self.trainer.stopping,
                **options,
            )

    def _log(self, state, answers: dict[str, Answer | str], seconds: float) -> None:
        told, failed = [], []
        for prompt in self.prompts:
            answer = answers[prompt.name]
            if isinstance(answer, str):
                failed.append((prompt.name, answer))
                told.append({"prompt": prompt.name, "answer": None, "passed": False, "error": answer})
                continue
            missed = [check.name for check in prompt.checks if not _passes(check, answer)]
            thought = {"reasoning": answer.reasoning} if answer.reasoning else {}
            told.append(
                {"prompt": prompt.name, "answer": answer.text, "passed": not missed, "missed": missed} | thought
            )
        kept = self.trainer.kept
        kept["gen_seconds"] = kept.get("gen_seconds", 0.0) + seconds
        logs = {"gen/pass_rate": sum(one["passed"] for one in told) / len(told)} | self._rates(answers, told)
        logs |= {"gen/failed": len(failed), "gen/seconds": round(seconds, 2)}
        logs["gen/share"] = round(kept["gen_seconds"] / max(self.trainer.seconds(), 1e-9), 4)
        if state.is_world_process_zero:
            self.keep({"step": state.global_step, "answers": told})
            names = [name for name, _ in failed]
            if failed and names != self._told:
                self._told, (name, reason) = names, failed[0]
                tell(f"{len(failed)} of {len(told)} prompts could not be answered. First: {name}: {reason}")
        shown = {f"gen/answer/{one['prompt']}": one["answer"] for one in told} if self.log_answers else {}
        self.trainer.log_plain(logs | shown)

    def _rates(self, answers: dict[str, Answer | str], told: list[dict]) -> dict[str, float]:
        rates: dict[str, list[float]] = {}
        for prompt, one in zip(self.prompts, told, strict=True):
            answer = answers[prompt.name]
            for check in prompt.checks:
                rates.setdefault(check.name, []).append(isinstance(answer, Answer) and check.name not in one["missed"])
                if check.name in RATES and isinstance(answer, Answer):
                    measured = error_rate(RATES[check.name], answer.text, check.expected)
                    rates.setdefault(RATES[check.name], []).append(measured)
        lengths = [answer.tokens for answer in answers.values() if isinstance(answer, Answer)]
        means = {f"gen/{name}": sum(values) / len(values) for name, values in rates.items()}
        return means | ({"gen/tokens": sum(lengths) / len(lengths)} if lengths else {})


def _passes(check: Check, answer: Answer) -> bool:
    """Whether an answer passes; not where a check cannot cope with what the model said, which ends no training."""
    try:
        return check.passes(answer)
    except Exception:
        return False


@contextlib.contextmanager
def undisturbed(model):
    """Put the model in evaluation mode, and leave it and every random generator as they were found."""
    training = [(module, module.training) for module in model.modules()]
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    metal = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    with torch.random.fork_rng(devices):
        try:
            model.eval()
            yield
        finally:
            if hasattr(model, "for_training"):  # Unsloth's `generate` has switched gradient checkpointing off
                model.for_training()
            for module, before in training:
                module.training = before
            random.setstate(python)
            np.random.set_state(numpy)
            if metal is not None:
                torch.mps.set_rng_state(metal)
