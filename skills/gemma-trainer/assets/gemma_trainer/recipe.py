"""The steps of a training run once it is prepared, in the order the scripts call them: model, trainer, training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path

from . import extensions, ranks, unsloth_backend
from .checkpoints import all_checkpoints, checkpoint_bytes, fault_of, step_of
from .cli import PEER_ENDED, as_error, note
from .collected import collected
from .data import MAX_CHECKED, Data
from .errors import Interrupted, OutOfMemory, UsageError
from .files import move_whole
from .fsdp import declare_layers
from .meter import give_freed_memory_back
from .preparation import steps_of
from .runs import Run, versions, word_in

FULL = "all steps were trained"  # why most runs end


def within_memory(config, run: Run, attempt):
    """(config, attempt(config)); with --auto-batch again with half the batch and twice the accumulation, as often as
    memory runs out. An optimizer step keeps its rows, and a later attempt goes on from the last checkpoint.

    Raises:
        OutOfMemory: a batch of one row is too much.
    """
    if not config.auto_batch:
        return config, attempt(config)
    from accelerate.utils import find_executable_batch_size

    effective, before = config.batch_size * config.grad_accum, run.record.get("auto_batch")
    run.together = config.batch_size  # the order of the rows is that of the batches asked for
    size = before["batch_size"] if before and before["effective"] == effective else config.batch_size

    def halve() -> int:
        nonlocal size
        size = next((smaller for smaller in range(size // 2, 0, -1) if effective % smaller == 0), 0)
        if size:
            note(f"out of memory: going on with --batch-size {size} --grad-accum {effective // size}")
            run.begin_anew(auto_batch={"batch_size": size, "effective": effective})
        return size

    def attempt_with(batch_size: int):
        smaller = dataclasses.replace(config, batch_size=batch_size, grad_accum=effective // batch_size)
        try:
            return smaller, attempt(smaller)
        except MemoryError:  # which accelerate does not look for
            raise RuntimeError("CPU out of memory.") from None

    try:
        return find_executable_batch_size(attempt_with, size, halve)()
    except RuntimeError as problem:
        if "No executable batch size" not in str(problem):
            raise
        raise OutOfMemory(f"out of memory with one row at a time: {config.less_memory}") from None


# ---- model


def load_model(config, run: Run, model_config, processor):
    """The model with what is to be trained on it; opens the run folder, where a demo model is written first."""
    import transformers

    from . import models
    from .precision import choose

    transformers.set_seed(config.seed)
    precision = choose(config.precision)
    if precision.device == "cpu":
        give_freed_memory_back()
    quantize, quantized = models.decide_quantization(config.quantize, precision.device, config.full)
    through = _load_with_unsloth if config.backend == "unsloth" else _load
    model = through(config, model_config, processor, precision, quantize)
    declare_layers(model)
    reason = precision.reason + (unsloth_backend.caveat() if config.backend == "unsloth" else "")
    run.open(4 * checkpoint_bytes(model))  # three checkpoints, since a new one is whole before an old one goes
    if not config.full:
        _name_base(config, run, model, model_config)
    adapter = getattr(config, "adapter", None)
    facts = {
        "name": config.model,
        **({"adapter": adapter} if adapter else {}),
        "family": model_config.model_type,
        **models.describe_trained(model),
    }
    run.save_record(model=facts, precision=reason, quantization=quantized, versions=versions())
    counts = f"{facts['trainable_parameters']:,} of {facts['total_parameters']:,} parameters"
    note(f"{config.model}: {facts['trains']}; {counts}")
    note(f"{reason}; {quantized}")
    return model


def _load(config, model_config, processor, precision, quantize: bool):
    """The model from transformers, adapted by PEFT."""
    from . import demo, models

    reward = config.task == "reward"
    if config.model == "demo":
        model = demo.make_model(processor.tokenizer, reward=reward)
    else:
        model = models.load_model(config.model, model_config, dtype_of(config, precision), quantize, reward)
    if getattr(config, "adapter", None):
        return models.load_adapter(model, config.adapter)
    if config.full:
        return model
    return models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)


def _load_with_unsloth(config, model_config, processor, precision, quantize: bool):
    """The same model, loaded and adapted by Unsloth."""
    from . import demo, unsloth_backend

    checkpointing = checkpointing_of(config, precision)
    with demo.written() if config.model == "demo" else contextlib.nullcontext(config.model) as name:
        dtype = dtype_of(config, precision)
        model = unsloth_backend.load_model(name, dtype, config.max_len, quantize, config.full, checkpointing)
    if config.adapter:
        return unsloth_backend.load_adapter(model, config.adapter, checkpointing)
    if config.full:
        return model
    shape = config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout
    return unsloth_backend.add_lora(model, *shape, config.seed, checkpointing)


def dtype_of(config, precision):
    """Full fine-tuning keeps float32 weights under autocast: bf16 ones would swallow small updates."""
    import torch

    return torch.float32 if config.full else precision.torch_dtype


def checkpointing_of(config, precision) -> bool:
    """Whether activations are computed again for the gradient instead of kept."""
    wanted = config.gradient_checkpointing
    return wanted == "on" or (wanted == "auto" and precision.device != "cpu")


def _name_base(config, run: Run, model, model_config) -> None:
    """Have the adapter name its base so that whoever loads it, from wherever, finds it; the demo's is written first."""
    from . import demo

    named = model.peft_config["default"]
    named.revision = getattr(model_config, "_commit_hash", None)
    if config.model == "demo":
        base = run.folder / "base-model"
        if run.main and not base.exists():
            with run.aside() as folder:
                move_whole(demo.write_model(folder / "base-model"), base)
        named.base_model_name_or_path = str(base.absolute())
    elif Path(config.model).is_dir():
        named.base_model_name_or_path = str(Path(config.model).absolute())


# ---- training


def make_sft_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a supervised run."""
    from .arguments import sft_arguments
    from .trainers import GemmaSFTTrainer

    args = sft_arguments(run.folder, **_options(config, data))
    return _make(GemmaSFTTrainer, args, config, run, model, processor, data, collators)


def make_dpo_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a run of direct preference optimization."""
    from .preference_trainers import GemmaDPOTrainer, dpo_arguments

    args = dpo_arguments(
        run.folder,
        **_options(config, data),
        beta=config.beta,
        loss_type=list(config.loss_type),
        loss_weights=[float(weight) for weight in config.loss_weights] or None,
        label_smoothing=config.label_smoothing,
    )
    if config.full:
        note("--full: a second copy of the weights is kept as the reference")
    more = {"own_reference": not config.adapter}
    trainer = _make(GemmaDPOTrainer, args, config, run, model, processor, data, collators, **more)
    if not config.demo and (told := trainer.untuned(data.rows)):
        note(told)
    return trainer


def make_reward_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a reward model."""
    from .preference_trainers import GemmaRewardTrainer, reward_arguments

    args = reward_arguments(
        run.folder, **_options(config, data), center_rewards_coefficient=config.center_rewards_coefficient
    )
    return _make(GemmaRewardTrainer, args, config, run, model, processor, data, collators)


def _options(config, data: Data) -> dict:
    """What the arguments of any trainer take."""
    from .batching import workers_for
    from .precision import choose

    precision = choose(config.precision)
    workers = workers_for(precision.device, bool(data.first)) if config.num_workers is None else config.num_workers
    same = "batch_size grad_accum lr epochs max_steps seed save_steps eval_steps".split()
    return {name: getattr(config, name) for name in same} | {
        "precision": precision,
        "max_length": config.max_len,
        "steps": steps_of(config, data.size),
        "evaluate": data.eval_rows is not None,
        "workers": workers,
        "report_to": list(config.report_to),
        "checkpointing": checkpointing_of(config, precision) and not unsloth_backend.checkpoints_itself(config.backend),
    }


def _make(kind, args, config, run: Run, model, processor, data: Data, collators, **more):
    """The trainer, with all that watches it."""
    rows = data.rows if data.stream is None else _stream(config, run, args, data, collators[0])
    together = run.together or config.batch_size * ranks.world()
    run.record["ranks"] = {
        "world": ranks.world(),
        "kind": ranks.kind(),
        "together": together,
        "rows_a_step": config.batch_size * config.grad_accum * ranks.world(),
    }
    trainer = unsloth_backend.keep_arguments(
        lambda: kind(
            model,
            args,
            rows,
            collators[0],
            processor,
            data.eval_rows,
            collators[1],
            config.max_bad_media,
            on_divergence=config.on_divergence,
            together=together,
            **more,
        ),
        args,
    )
    _keep_in_step(config, trainer, data, collators)
    return extensions.extend(trainer, config, run, model, data, collators)


def _stream(config, run: Run, args, data: Data, collator):
    """The rows of a run with --streaming, those of this rank."""
    from .streams import RowStream

    return RowStream(
        data.stream,
        config.batch_size,
        seed=config.seed,
        buffer=config.shuffle_buffer,
        rank=args.process_index,
        world=args.world_size,
        workers=args.dataloader_num_workers,
        group=run.together,
        lengths=collator.lengths,
    )


def _keep_in_step(config, trainer, data: Data, collators) -> None:
    """Where several ranks must run the same towers in each batch, since the weights are spread over them or the towers
    are trained, have every batch bring every kind of medium."""
    from .models import trained_kinds

    trained, spread = trained_kinds(trainer.model), trainer.spread
    all_seen = data.stream is None and len(data.rows) <= MAX_CHECKED
    known = set(data.first) if all_seen else {"image", "audio"}
    kinds = (known | trained) & collators[0].modalities
    if ranks.world() == 1 or not kinds or not (trained or spread):
        return
    if config.placeholders not in (None, "always"):
        raise UsageError(f"--placeholders {config.placeholders}: several processes would wait for each other: drop it")
    for collator in collators:
        collator.placeholders, collator.always = "always", frozenset(kinds)
    told = " and ".join(sorted(kinds))
    note(f"each batch of each process has {told}, if need be a placeholder (--placeholders always)")


def train(config, run: Run, trainer, data: Data) -> None:
    """Train, and save the result into the run folder.

    Raises:
        Interrupted: a signal stopped the run; a checkpoint was saved.
        DataError, Diverged, EnvironmentUnfit: as the trainer raises them.
    """
    run.save_record(
        reported=False,
        best=None,  # of the run that is resumed
        demo=config.demo,
        command=shlex.join(["python", *sys.argv]),
        directory=os.getcwd(),  # which relative names are of
        arguments=dataclasses.asdict(config),
        data={
            "sources": data.names,
            "rows": data.size,
            "eval_rows": len(data.eval_rows) if data.eval_rows is not None else 0,
            "fingerprint": data.fingerprint,
        },
    )
    try:
        with trainer.stop:
            trainer.train(resume_from_checkpoint=ranks.agreed(_checkpoint(run)))
            _heed_signals(run, trainer)
            step = trainer.state.global_step
            evaluated = any("eval_loss" in entry and entry["step"] == step for entry in trainer.state.log_history)
            if data.eval_rows is not None and not evaluated:
                trainer.evaluate()
                _heed_signals(run, trainer)
            _take_best(config, run, trainer)
            with run.staged() as folder:
                trainer.save_model(str(folder))
            why = next((ender.why for ender in trainer.enders if ender.why), "")
            facts = collected(run, trainer, ranks.gathered)
            if any(getattr(ender, "seen", True) is False for ender in trainer.enders):
                note(f"--stop-when {config.stop_when}: no such metric was logged. {_logged(trainer)}")
            met = config.stop_when if "--stop-when" in why else None
            run.finish("done", why=why or FULL, goal_met=met, **facts)
    except BaseException as problem:
        status = "interrupted" if isinstance(problem, KeyboardInterrupt | Interrupted) else "failed"
        with contextlib.suppress(OSError):  # the disk may be what failed
            error = as_error(problem, config)
            why = str(error).splitlines()[0]
            if str(error) == PEER_ENDED:
                why = word_in(run.folder) or why
            elif not run.main and status == "failed":
                run.leave_word(f"{ranks.name()}{why}")
            run.finish(status, why=why, **collected(run, trainer))
        raise
    if trainer.stop.agreed():  # since the last look: too late to stop the saving
        told = f"the model is saved in {run.folder}; the report lacks sample answers, which --resume makes up"
        raise Interrupted(told, trainer.stop.exit_code)


def _heed_signals(run: Run, trainer) -> None:
    """Stop where a signal said so; the trainer has saved a checkpoint."""
    if trainer.stop.agreed():
        step = trainer.state.global_step
        told = f"stopped at step {step}, a checkpoint was saved: go on with --resume --output {run.folder}"
        raise Interrupted(told, trainer.stop.exit_code)


def _logged(trainer) -> str:
    names = {name for entry in trainer.state.log_history for name, value in entry.items() if isinstance(value, float)}
    return f"Logged were: {', '.join(sorted(names - {'epoch'}))}"


def _take_best(config, run: Run, trainer) -> None:
    """Go back to the weights of the best checkpoint, where --best-by names a metric."""
    if not config.best_by:
        return
    best = trainer.kept.get("best")
    if best is None:
        note(f"--best-by {config.best_by}: no such metric was logged; the last weights are saved. {_logged(trainer)}")
        return
    value, step = best
    if step != trainer.state.global_step:
        folder = run.folder / f"checkpoint-{step}"
        if not folder.is_dir() or fault_of(folder, thorough=True):
            note(f"--best-by: {folder.name} is no longer whole; the last weights are saved")
            return
        trainer._load_from_checkpoint(str(folder))
    run.save_record(best={"metric": config.best_by, "value": value, "step": step})
    note(f"--best-by {config.best_by}: saving the model of step {step} ({value:.4g})")


def _checkpoint(run: Run) -> str | None:
    """The checkpoint to go on from: the newest whole one of the run that is resumed."""
    if not run.goes_on:
        return None
    for path in reversed(all_checkpoints(run.folder)):
        if fault := fault_of(path, thorough=True):
            note(f"{path.name} is not whole ({fault}): it is passed over")
            continue
        note(f"going on from step {step_of(path)}")
        run.cut_metrics(_logged_bytes(run, path))
        return str(path)
    note(f"no checkpoint in {run.folder}: starting from the first step")
    run.cut_metrics(0)
    return None


def _logged_bytes(run: Run, checkpoint: Path) -> int:
    """How much of `metrics.jsonl` was written when a checkpoint was; all where it does not tell."""
    from .saving import COLLECTED

    path = checkpoint / COLLECTED
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    size = told.get("logged_bytes")
    return run.metrics_size() if size is None else size  # 0 where nothing was logged yet
