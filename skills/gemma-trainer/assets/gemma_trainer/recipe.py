"""The steps of a training run, in the order the scripts call them: processor, collator, model, trainer, training."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path

from . import sources
from .cli import note
from .data import Data, check_data, load_data
from .errors import EnvironmentUnfit, Interrupted, TrainerError, UsageError
from .runs import Run, checkpoint_bytes, versions

TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX")} | {
    name: (name,) for name in "wandb mlflow trackio comet_ml swanlab clearml neptune dvclive codecarbon".split()
}
# Peak learning rates: of LoRA, of full fine-tuning, and of both for the tiny demo model.
RATES = {"sft": (2e-4, 1e-5, 1e-2, 3e-3), "dpo": (5e-6, 1e-6, 5e-3, 1e-3), "reward": (1e-4, 1e-5, 5e-3, 1e-3)}


# What a resumed run must not change: what is trained, and for what; and what it may, and is told.
FIXED = """model adapter full quantize lora_r lora_alpha lora_targets beta loss_type loss_weights label_smoothing
center_rewards_coefficient""".split()
CHANGED = "lr seed batch_size grad_accum max_len precision loss_on train_reasoning thinking truncation".split()

DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


def prepare(config, script: str):
    """Everything that can go wrong before a model is loaded: flags, run folder, rows, processor, collators.

    Returns:
        (config, run, rows, model config, processor, collators): the config with its defaults filled in, and a collator
        each for training and evaluation.
    """
    config = with_defaults(config)
    run = open_run(config, script)
    rows = load_data(config)
    check_resumed(config, run, rows)
    model_config, processor = load_processor(config)
    collators = make_collators(config, processor, model_config)
    check_data(config, rows, collators[0])
    return config, run, rows, model_config, processor, collators


def with_defaults(config):
    """Fill in what depends on other flags, and say so where the built-in demo runs."""
    if config.task == "dpo":
        _check_losses(config)
    if getattr(config, "adapter", None):
        config = _with_adapter(config)
    if not config.demo and config.model is None:
        raise UsageError("--dataset needs --model: a hub id such as google/gemma-4-E2B-it, a folder, or demo")
    for tracker in set(config.report_to) - {"none"}:
        if tracker not in TRACKERS:
            raise UsageError(f"--report-to {tracker}: known are {', '.join(TRACKERS)}")
        if not any(map(find_spec, TRACKERS[tracker])):
            raise EnvironmentUnfit(f"--report-to {tracker} needs a package: pip install {TRACKERS[tracker][0]}")
    if config.backend == "unsloth":
        raise EnvironmentUnfit("--backend unsloth is not part of this version: use --backend hf")
    if config.demo and (config.eval_dataset or config.test_size):
        raise UsageError("--eval-dataset and --test-size need --dataset: the demo has held-out rows of its own")
    if config.eval_dataset and config.test_size:
        raise UsageError("--eval-dataset and --test-size exclude each other")
    if config.demo:
        model = "tiny random Gemma 4" if config.model in (None, "demo") else config.model
        note(f"No --dataset given: running the built-in demo ({model}, bundled samples, offline).")
    tiny = config.model in (None, "demo")
    chosen = {
        "model": config.model or "demo",
        "batch_size": config.batch_size or (8 if config.demo else 1),
        "grad_accum": config.grad_accum or (1 if config.demo else 8),
        "lr": config.lr or RATES[config.task][2 * tiny + config.full],
        "max_steps": config.max_steps or (120 if config.demo and config.epochs == 1 else None),
    }
    return dataclasses.replace(config, **chosen)


def _check_losses(config) -> None:
    """Refuse losses that TRL does not know, or that lack what they need (UsageError)."""
    if unknown := [name for name in config.loss_type if name not in DPO_LOSSES]:
        raise UsageError(f"--loss-type {unknown[0]}: known are {', '.join(DPO_LOSSES)}")
    if config.loss_weights and len(config.loss_weights) != len(config.loss_type):
        raise UsageError(f"--loss-weights: {len(config.loss_weights)} for {len(config.loss_type)} of --loss-type")
    try:
        weights = [float(weight) for weight in config.loss_weights]
    except ValueError:
        weights = [math.nan]
    if not all(map(math.isfinite, weights)):
        raise UsageError("--loss-weights must be numbers")
    if not 0 <= config.label_smoothing < 0.5:
        raise UsageError(f"--label-smoothing must be at least 0 and less than 0.5, got {config.label_smoothing}")
    if "exo_pair" in config.loss_type and not config.label_smoothing:
        raise UsageError("--loss-type exo_pair needs --label-smoothing, such as 0.001")


def _with_adapter(config):
    from . import models

    if config.full:
        raise UsageError("--adapter is trained on as an adapter: drop --full")
    base, found = models.base_of(config.adapter), models.adapter_config(config.adapter)
    if str(found.task_type).endswith("SEQ_CLS"):
        raise UsageError(
            f"--adapter {config.adapter} is a reward model, which does not speak: give a run of sft_train.py"
        )
    own = {field.name: field.default for field in dataclasses.fields(config) if field.name.startswith("lora_")}
    for name in (name for name, default in own.items() if getattr(config, name) != default):
        raise UsageError(f"--{name.replace('_', '-')}: --adapter brings its own: drop the flag")
    shape = {"lora_r": found.r, "lora_alpha": found.lora_alpha, "lora_dropout": found.lora_dropout}
    return dataclasses.replace(config, model=config.model or base, **shape)


def open_run(config, script: str) -> Run:
    """The run with its folder, refused where the folder is in use (see `runs.Run`)."""
    run = Run(script, config.output, config.overwrite, config.resume)
    for flag in ("adapter", "model") if config.overwrite and not config.resume else ():
        name = getattr(config, flag, None)
        if name and Path(name).is_dir() and Path(name).resolve().is_relative_to(run.folder.resolve()):
            raise UsageError(f"--overwrite would remove the --{flag} that the run begins with: choose another --output")
    return run


def check_resumed(config, run: Run, data: Data) -> None:
    """Refuse to resume what is finished, or was begun with other flags (UsageError)."""
    if not config.resume:
        return
    if (script := run.previous.get("script", run.script)) != run.script:
        raise UsageError(f"--resume: the run in {run.folder} is one of {script}.py")
    steps, before = steps_of(config, len(data.rows)), run.previous.get("arguments", {})
    now = {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(config).items()}
    other = {name: "--" + name.replace("_", "-") for name in now if name in before and before[name] != now[name]}
    for name in FIXED:
        if name in other:
            told = f"{other[name]} {before[name]}, not {now[name]}"
            raise UsageError(f"--resume: the run in {run.folder} was begun with {told}")
    if told := [f"{flag} {now[name]} (before: {before[name]})" for name, flag in other.items() if name in CHANGED]:
        note(f"going on with other flags: {', '.join(told)}")
    known = run.previous.get("data", {}).get("fingerprint")
    if known and known != sources.fingerprint(data.names, len(data.rows)):
        raise UsageError(f"--resume: the data are not those that the run in {run.folder} was begun with")
    if run.previous.get("status") == "done" and run.previous.get("steps", 0) >= steps:
        raise UsageError(
            f"--resume: the run in {run.folder} is finished ({steps} steps): raise --epochs or --max-steps to go on"
        )


# ---- model


def load_processor(config):
    """(model config, processor) of the run's model; no weights."""
    from . import demo, models

    if config.model == "demo":
        processor = demo.make_processor()
        return demo.make_config(processor.tokenizer), processor
    model_config, _ = models.load_config(config.model)
    trained = getattr(config, "adapter", None)  # whose folder has the processor that it was trained with
    name = trained if trained and (Path(trained) / "tokenizer.json").is_file() else config.model
    return model_config, models.load_processor(name, model_config)


def make_collators(config, processor, model_config):
    """A collator for training and one for evaluation."""
    from . import families
    from .collator import MultimodalCollator

    options = config.collator_options() | {"modalities": families.modalities(processor, model_config)}
    options["task"] = "preference" if getattr(config, "paired", False) else "sft"  # a check measures each side alone
    return tuple(MultimodalCollator(processor, config.max_len, **options) for _ in range(2))


def load_model(config, run: Run, model_config, processor):
    """The model with what is to be trained on it; opens the run folder, where a demo model is written first."""
    import transformers

    from . import demo, models
    from .precision import choose

    transformers.set_seed(config.seed)
    precision = choose(config.precision)
    quantize, quantized = models.decide_quantization(config.quantize, precision.device, config.full)
    reward, adapter = config.task == "reward", getattr(config, "adapter", None)
    if config.model == "demo":
        model = demo.make_model(processor.tokenizer, reward=reward)
    else:
        # Full fine-tuning keeps float32 weights under autocast: bf16 ones would swallow small updates.
        dtype = precision.torch_dtype if not config.full else choose("fp32").torch_dtype
        model = models.load_model(config.model, model_config, dtype, quantize, reward)
    if adapter:
        model = models.load_adapter(model, adapter)
    elif not config.full:
        model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
    run.open(checkpoint_bytes(model))
    if config.model == "demo" and not config.full:  # the adapter must find the weights it belongs to
        base = run.folder / "base-model"
        model.peft_config["default"].base_model_name_or_path = str(base.absolute())
        if not base.exists():
            demo.write_model(base)
    facts = {
        "name": config.model,
        **({"adapter": adapter} if adapter else {}),
        "family": model_config.model_type,
        **models.describe_trained(model),
    }
    run.save_record(model=facts, precision=precision.reason, quantization=quantized, versions=versions())
    counts = f"{facts['trainable_parameters']:,} of {facts['total_parameters']:,} parameters"
    note(f"{config.model}: {facts['trains']}; {counts}")
    note(f"{precision.reason}; {quantized}")
    return model


# ---- training


def steps_of(config, rows: int) -> int:
    """Optimizer steps of a run on one device."""
    if config.max_steps:
        return config.max_steps
    return math.ceil(config.epochs * math.ceil(math.ceil(rows / config.batch_size) / config.grad_accum))


def make_sft_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a supervised run."""
    from .trainers import GemmaSFTTrainer, sft_arguments

    args = sft_arguments(run.folder, **_options(config, data))
    return _make(GemmaSFTTrainer, args, config, run, model, processor, data, collators)


def make_dpo_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a run of direct preference optimization."""
    from .callbacks import WarnOfCollapse
    from .preference_trainers import GemmaDPOTrainer, dpo_arguments

    args = dpo_arguments(
        run.folder,
        **_options(config, data),
        beta=config.beta,
        loss_type=list(config.loss_type) or ["sigmoid"],
        loss_weights=[float(weight) for weight in config.loss_weights] or None,
        label_smoothing=config.label_smoothing,
    )
    if config.full:
        note("--full: a second copy of the weights is kept as the reference")
    more = {"own_reference": not config.adapter}
    trainer = _make(GemmaDPOTrainer, args, config, run, model, processor, data, collators, **more)
    trainer.add_callback(WarnOfCollapse(config.beta))
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
    checkpointing = config.gradient_checkpointing
    same = "batch_size grad_accum lr epochs max_steps seed save_steps eval_steps".split()
    return {name: getattr(config, name) for name in same} | {
        "precision": precision,
        "max_length": config.max_len,
        "steps": steps_of(config, len(data.rows)),
        "evaluate": data.eval_rows is not None,
        "workers": workers,
        "report_to": list(config.report_to),
        "checkpointing": checkpointing == "on" or (checkpointing == "auto" and precision.device != "cpu"),
    }


def _make(kind, args, config, run: Run, model, processor, data: Data, collators, **more):
    from .callbacks import MetricsFile, Progress, StopOnDivergence

    return kind(
        model,
        args,
        data.rows,
        collators[0],
        processor,
        data.eval_rows,
        collators[1],
        config.max_bad_media,
        callbacks=[MetricsFile(run.folder / "metrics.jsonl"), Progress(), StopOnDivergence()],
        **more,
    )


def train(config, run: Run, trainer, data: Data) -> None:
    """Train, and save the result into the run folder.

    Raises:
        Interrupted: a signal stopped the run; a checkpoint was saved.
        DataError, Diverged: as the trainer and its callbacks raise them.
    """
    from .callbacks import StopOnSignal

    run.save_record(
        demo=config.demo,
        arguments=dataclasses.asdict(config),
        data={
            "sources": data.names,
            "rows": len(data.rows),
            "eval_rows": len(data.eval_rows) if data.eval_rows is not None else 0,
            "fingerprint": sources.fingerprint(data.names, len(data.rows)),
        },
    )
    stop = StopOnSignal()
    trainer.add_callback(stop)
    try:
        with stop:
            trainer.train(resume_from_checkpoint=_checkpoint(config, run))
        if stop.exit_code:
            run.finish("interrupted", **collected(run, trainer))
            raise Interrupted(
                f"stopped at step {trainer.state.global_step}, a checkpoint was saved: "
                f"go on with --resume --output {run.folder}",
                stop.exit_code,
            )
        step = trainer.state.global_step
        evaluated = any("eval_loss" in entry and entry["step"] == step for entry in trainer.state.log_history)
        if data.eval_rows is not None and not evaluated:
            trainer.evaluate()
        with run.staged() as folder:
            trainer.save_model(str(folder))
            for name in ("training_args.bin", "README.md"):  # a pickle, and PEFT's empty model card
                (folder / name).unlink(missing_ok=True)
    except Interrupted:
        raise
    except BaseException as problem:
        with contextlib.suppress(OSError):  # the disk may be what failed
            error = str(problem) if isinstance(problem, TrainerError) else type(problem).__name__
            status = "interrupted" if isinstance(problem, KeyboardInterrupt) else "failed"
            run.finish(status, error=error, **collected(run, trainer))
        raise


def _checkpoint(config, run: Run) -> str | None:
    """The checkpoint to go on from."""
    from .trainers import checkpoints

    if not config.resume:
        return None
    found = checkpoints(run.folder)
    if not found:
        note(f"no checkpoint in {run.folder}: starting from the first step")
        run.drop_metrics_after(-1)
        return None
    step = int(found[-1].name.rpartition("-")[2])
    note(f"going on from step {step}")
    run.drop_metrics_after(step)
    return str(found[-1])


def collected(run: Run, trainer) -> dict:
    """What the trainer counted, for `run.json`; of a resumed run, from its first step on."""
    from .callbacks import UNTOLD

    history = trainer.state.log_history
    last = {key: value for entry in history for key, value in entry.items() if key not in ("step", "epoch")}
    metrics = {key: value for key, value in last.items() if isinstance(value, int | float) and key not in UNTOLD}
    losses = [entry["loss"] for entry in run.metrics() if "loss" in entry]
    if losses:  # the trainer's own mean leaves out the steps before a resumed checkpoint
        metrics["train_loss"] = sum(losses) / len(losses)
    seconds = trainer.seconds()
    return {
        "steps": trainer.state.global_step,
        "counters": dict(trainer.counts),
        "problems": [f"{row}: {reason}" for row, reason in trainer.problems],
        "lengths": trainer.lengths,
        "metrics": metrics,
        "timing": {
            "train_s": round(seconds, 1),
            "data_wait_s": round(trainer.waited, 1),
            "data_wait_share": round(trainer.waited / max(seconds, 1e-9), 3),
            "workers": trainer.args.dataloader_num_workers,
        },
    }
