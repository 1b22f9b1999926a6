"""The steps of a training run, in the order the scripts call them: processor, collator, model, trainer, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from importlib.util import find_spec

from . import sources
from .cli import note
from .data import Data
from .errors import EnvironmentUnfit, Interrupted, TrainerError, UsageError
from .runs import Run, checkpoint_bytes, versions

TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX"), **{n: (n,) for n in ("wandb", "mlflow", "trackio")}}
PLANNED = 256  # rows that a dry run sends through the collator


def with_defaults(config):
    """Fill in what depends on other flags, and say so where the built-in demo runs."""
    if not config.demo and config.model is None:
        raise UsageError("--dataset needs --model: a hub id such as google/gemma-4-E2B-it, a folder, or demo")
    for tracker in set(config.report_to) & set(TRACKERS):
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
    rates = {(False, False): 2e-4, (False, True): 1e-5, (True, False): 1e-2, (True, True): 3e-3}
    chosen = {
        "model": config.model or "demo",
        "batch_size": config.batch_size or (8 if config.demo else 1),
        "grad_accum": config.grad_accum or (1 if config.demo else 8),
        "lr": config.lr or rates[tiny, config.full],
        "max_steps": config.max_steps or (120 if config.demo and config.epochs == 1 else None),
    }
    return dataclasses.replace(config, **chosen)


def open_run(config, script: str) -> Run:
    """The run with its folder, refused where the folder is in use (see `runs.Run`)."""
    return Run(script, config.output, config.overwrite, config.resume)


def check_resumed(config, run: Run, data: Data) -> None:
    """Refuse to resume what is finished, or was begun with other flags (UsageError)."""
    if not config.resume:
        return
    steps, before = steps_of(config, len(data.rows)), run.previous.get("arguments", {})
    for name in ("model", "full", "quantize", "lora_r", "lora_alpha", "lora_targets"):
        if name in before and before[name] != (now := getattr(config, name)):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"--resume: the run in {run.folder} was begun with {flag} {before[name]}, not {now}")
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
    return model_config, models.load_processor(config.model, model_config)


def make_collators(config, processor, model_config):
    """A collator for training and one for evaluation."""
    from . import families
    from .collator import MultimodalCollator

    options = config.collator_options() | {"modalities": families.modalities(processor, model_config)}
    return tuple(MultimodalCollator(processor, config.max_len, **options) for _ in range(2))


def load_model(config, run: Run, model_config, processor):
    """The model with what is to be trained on it; opens the run folder, where a demo model is written first."""
    import transformers

    from . import demo, models
    from .precision import choose

    transformers.set_seed(config.seed)
    precision = choose(config.precision)
    quantize, quantized = models.decide_quantization(config.quantize, precision.device, config.full)
    if config.model == "demo":
        model = demo.make_model(processor.tokenizer)
    else:
        # Full fine-tuning keeps float32 weights under autocast: bf16 ones would swallow small updates.
        dtype = precision.torch_dtype if not config.full else choose("fp32").torch_dtype
        model = models.load_model(config.model, model_config, dtype, quantize)
    if not config.full:
        model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
    run.open(checkpoint_bytes(model))
    if config.model == "demo" and not config.full:  # the adapter must find the weights it belongs to
        base = run.folder / "base-model"
        model.peft_config["default"].base_model_name_or_path = str(base.absolute())
        if not base.exists():
            demo.write_model(base)
    facts = {"name": config.model, "family": model_config.model_type, **models.describe_trained(model)}
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
    from .batching import workers_for
    from .callbacks import MetricsFile, Progress, StopOnDivergence
    from .precision import choose
    from .trainers import GemmaSFTTrainer, sft_arguments

    precision = choose(config.precision)
    workers = workers_for(precision.device, bool(data.first)) if config.num_workers is None else config.num_workers
    checkpointing = config.gradient_checkpointing
    args = sft_arguments(
        run.folder,
        precision,
        max_length=config.max_len,
        batch_size=config.batch_size,
        grad_accum=config.grad_accum,
        lr=config.lr,
        epochs=config.epochs,
        max_steps=config.max_steps,
        steps=steps_of(config, len(data.rows)),
        seed=config.seed,
        save_steps=config.save_steps,
        eval_steps=config.eval_steps,
        evaluate=data.eval_rows is not None,
        workers=workers,
        report_to=list(config.report_to),
        checkpointing=checkpointing == "on" or (checkpointing == "auto" and precision.device != "cpu"),
    )
    return GemmaSFTTrainer(
        model,
        args,
        data.rows,
        collators[0],
        processor,
        data.eval_rows,
        collators[1],
        config.max_bad_media,
        callbacks=[MetricsFile(run.folder / "metrics.jsonl"), Progress(), StopOnDivergence()],
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


# ---- reporting


def report(config, run: Run, trainer, collator, data: Data) -> dict:
    """Ask the trained model a few rows, write the last files, and return the result."""
    from . import generation

    facts = collected(run, trainer)
    model = trainer.model.eval()
    asked = data.eval_rows if data.eval_rows is not None else data.rows
    asked_rows = (asked[index] for index in range(min(len(asked), 32)))
    answers = filter(None, (generation.answer(model, collator, row) for row in asked_rows))
    try:
        facts["samples"] = list(itertools.islice(answers, 4))
    except Exception as problem:  # the result is saved: a sample that cannot be made does not undo the run
        note(f"no sample answers in the report ({type(problem).__name__})")
    if config.demo:
        facts["metrics"] |= generation.media_accuracy(model, collator, list(data.eval_rows))
    run.finish("done", **facts)
    result = {"status": "done", "demo": config.demo, "run": str(run.folder)}
    result |= {key: run.record[key] for key in ("model", "steps", "metrics", "counters", "timing", "peak_memory_mb")}
    return result | {"summary": summary(config, run)}


def summary(config, run: Run) -> str:
    """The result in a few lines for a person."""
    record = run.record
    metrics, counters = record["metrics"], record["counters"]
    tokens = f"{counters.get('trained_tokens', 0):,} of {counters.get('tokens', 0):,} tokens"
    losses = [
        f"{name.removesuffix('_loss')} {metrics[name]:.3f}" for name in ("train_loss", "eval_loss") if name in metrics
    ]
    lines = [
        f"model    {record['model']['name']}: {record['model']['trains']}",
        f"trained  {record['steps']} steps, {tokens}, {record['timing']['train_s']:.0f} s, "
        f"peak memory {record['peak_memory_mb']:,} MB",
        f"loss     {', '.join(losses)}",
    ]
    worth = {name: counters[name] for name in ("bad_media", "bad_rows", "truncated", "cut_to_nothing", "long_audio",
             "reasoning_dropped", "inexact_turns") if counters.get(name)}  # fmt: skip
    if worth:
        lines.append(f"note     {_told(worth)}")
    if "accuracy" in metrics:
        lines.append(
            f"proof    on held-out pictures and sounds: {metrics['accuracy']:.0%} right, with the media zeroed "
            f"{metrics['accuracy_blind']:.0%} (guessing: {metrics['chance']:.0%})"
        )
    return "\n".join([*lines, f"run      {run.folder} (report.html, run.json, metrics.jsonl, adapter and processor)"])


def plan(config, run: Run, data: Data, model_config, collator) -> dict:
    """What a dry run says: what would be trained, on what, and what the collator does to the first rows."""
    from . import models
    from .precision import choose

    precision = choose(config.precision)
    _, quantized = models.decide_quantization(config.quantize, precision.device, config.full)
    model = models.skeleton(model_config)
    if not config.full:
        model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
    trains = models.describe_trained(model)
    looked_at = min(len(data.rows), PLANNED)
    for index in range(0, looked_at, 8):
        collator([data.rows[i] for i in range(index, min(index + 8, looked_at))])
    counters = {name: count for name, count in collator.stats.items() if count and name != "padding"}
    result = {"status": "dry-run", "demo": config.demo, "run": str(run.folder), "model": config.model, **trains}
    result |= {
        "rows": len(data.rows),
        "eval_rows": len(data.eval_rows or ()),
        "steps": steps_of(config, len(data.rows)),
    }
    result |= {"precision": precision.reason, "quantization": quantized, "looked_at": looked_at, "counters": counters}
    lines = [
        f"model    {config.model} ({model_config.model_type}): {trains['trains']}; "
        f"{trains['trainable_parameters']:,} of {trains['total_parameters']:,} parameters",
        f"device   {precision.reason}; {quantized}",
        f"data     {result['rows']} rows to train on, {result['eval_rows']} to evaluate on; {result['steps']} steps",
        f"rows     in the first {looked_at}: {_told(counters)}",
        f"run      would be written to {run.folder}",
    ]
    return result | {"summary": "\n".join(lines)}


def _told(counters: dict) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counters.items())
