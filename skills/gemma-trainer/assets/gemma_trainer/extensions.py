"""All that a run adds to the trainer it is given, in one place: its collator, its callbacks, the metadata it saves.

Whoever wants another collator, callback or fact changes it here, and not in the source of TRL or Unsloth. A run that
something has left without one of them fails as it starts (`check_in_use`).
"""

from __future__ import annotations

import functools

from . import metadata
from .cli import note
from .data import Data
from .errors import TrainerError
from .goals import Goal
from .preparation import steps_of
from .runs import Run

VERSION = 1  # in run.json; raised when what is added to a trainer changes
SHOWN_PROMPTS = 12  # of --eval-prompts, in the report
# What `trainers.RowsTrainer` does in the place of the trainers, by method.
OWN_METHODS = """get_batch_samples training_step compute_loss prediction_step evaluation_loop get_train_dataloader
get_eval_dataloader log _run_epoch _save _save_checkpoint _get_grad_norm""".split()


def extend(trainer, config, run: Run, model, data: Data, collators):
    """Add to a trainer what the run's flags ask for; returns the trainer."""
    from . import audit
    from .callbacks import KeepBest, MetricsFile, Progress, RunState, StopAfter, StopOnSignal, StopWhen, WarnOfCollapse
    from .first_batch import KeepFirstBatch

    trainer.logged_bytes = run.metrics_size
    trainer.stop = StopOnSignal()
    trainer.stopping, trainer.all_stopping = (lambda: trainer.stop.exit_code is not None), trainer.stop.agreed
    trainer.enders = [StopWhen(trainer, Goal.read(config.stop_when))] if config.stop_when else []
    trainer.enders += [StopAfter(config.max_minutes, run.clock)] if config.max_minutes else []
    best = [KeepBest(trainer, config.best_by)] if config.best_by else []
    added = [
        MetricsFile(run.add_metrics),
        Progress(),
        RunState(run.save_record),
        KeepFirstBatch(trainer, run, config.save_first_batch),
        trainer.stop,
        *trainer.enders,
        *best,
        *([WarnOfCollapse(config.beta)] if config.task == "dpo" else []),
        *_watch(config, run, trainer, data, collators),
    ]
    for callback in added:
        trainer.add_callback(callback)
    own = metadata.read_own(config.metadata, config.metadata_file)
    facts = metadata.facts_of(config, run.record, data, model, collators[0], own)
    trainer.describe = functools.partial(metadata.write, facts=facts)
    check_in_use(trainer, collators, added)
    patched = audit.look_at(trainer)
    run.record["backend"] |= {"audit": patched}
    if config.backend == "unsloth":
        note(f"Unsloth: {patched['verdict']}{': ' if patched['reasons'] else ''}{'; '.join(patched['reasons'])}")
    run.save_record(extensions={"version": VERSION, "callbacks": [type(callback).__name__ for callback in added]})
    return trainer


def check_in_use(trainer, collators, callbacks) -> None:
    """Raise (TrainerError) where a trainer has lost a collator, a callback, or a method of `RowsTrainer`."""
    from .saving import SavesWhole

    lost = [type(callback).__name__ for callback in callbacks if callback not in trainer.callback_handler.callbacks]
    if trainer.data_collator is not collators[0] or trainer._eval_collator is not collators[1]:
        lost.append("the collator")
    own = {kind for kind in type(trainer).__mro__ if issubclass(kind, SavesWhole)}
    for name in OWN_METHODS:
        first = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
        if name in vars(trainer) or first not in own:
            lost.append(f"the method {name}")
    if lost:
        raise TrainerError(f"something has taken {lost[0]} out of the trainer: doctor.py --audit tells what is patched")


def _watch(config, run: Run, trainer, data: Data, collators) -> list:
    """What asks the model the prompts of --eval-prompts; last of all, since it also does so where the run ends."""
    if not data.prompts:
        return []
    from .previews import previews
    from .watching import Asking, WatchAnswers

    run.show(
        {
            prompt.name: {
                "prompt": prompt.question.told,
                "expected": prompt.question.expected,
                "wanted": [check.wanted for check in prompt.checks],
                "media": previews(prompt.question.row, collators[1].access),
            }
            for prompt in data.prompts[:SHOWN_PROMPTS]
        }
    )
    every = config.eval_prompts_every or max(1, steps_of(config, data.size) // 10)
    asking = Asking(every, config.eval_prompts_max_tokens, config.eval_prompts_temperature)
    return [WatchAnswers(trainer, collators[1], data.prompts, asking, run.add_metrics, config.report_samples)]
