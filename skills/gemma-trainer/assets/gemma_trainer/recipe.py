"""The steps of a training run, in the order the scripts call them: data, collator, model, trainer, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from dataclasses import dataclass, field

from . import sources
from .cli import note
from .demo import SAMPLES
from .errors import DataError, EnvironmentUnfit, Interrupted, RowError, TrainerError, UsageError
from .rows import read_row
from .runs import Run, checkpoint_bytes, versions

MAX_CHECKED = 200_000  # rows whose form is checked before the run; the rest is checked as it is read
SHOWN = 5  # bad rows told by name


@dataclass
class Data:
    """A run's rows. `first` names, for "image" and "audio", the first row that has one."""

    rows: sources.Rows | sources.Subset
    eval_rows: sources.Rows | sources.Subset | None
    names: list[str]
    first: dict[str, str] = field(default_factory=dict)


def with_defaults(config):
    """Fill in what depends on other flags, and say so where the built-in demo runs."""
    if config.demo:
        model = "tiny random Gemma 4" if config.model in (None, "demo") else config.model
        note(f"No --dataset given: running the built-in demo ({model}, bundled samples, offline).")
    elif config.model is None:
        raise UsageError("--dataset needs --model: a hub id such as google/gemma-4-E2B-it, a folder, or demo")
    if config.backend == "unsloth":
        raise EnvironmentUnfit("--backend unsloth is not part of this version: use --backend hf")
    if config.eval_dataset and config.test_size:
        raise UsageError("--eval-dataset and --test-size exclude each other")
    tiny = config.model in (None, "demo")
    rates = {(False, False): 2e-4, (False, True): 1e-5, (True, False): 1e-2, (True, True): 3e-3}
    chosen = {
        "model": config.model or "demo",
        "batch_size": config.batch_size or (8 if config.demo else 1),
        "grad_accum": config.grad_accum or (1 if config.demo else 8),
        "lr": config.lr or rates[tiny, config.full],
        "max_steps": 120 if config.demo and config.max_steps < 0 and config.epochs == 1 else config.max_steps,
    }
    return dataclasses.replace(config, **chosen)


def open_run(config, script: str) -> Run:
    """The run with its folder, refused where the folder is in use (see `runs.Run`)."""
    return Run(script, config.output, config.overwrite, config.resume)


# ---- data


def load_data(config) -> Data:
    """Open the rows and check their form.

    Raises:
        DataError: no such file, no rows, or rows that cannot be read; the first are named, with the total.
    """
    names = [str(SAMPLES / "train.jsonl")] if config.demo else list(config.dataset)
    evaluation = [str(SAMPLES / "heldout.jsonl")] if config.demo and not config.test_size else list(config.eval_dataset)
    rows = sources.open_rows(names)
    eval_rows = sources.open_rows(evaluation) if evaluation else None
    if config.test_size:
        rows, eval_rows = split(rows, config.test_size, config.seed)
    data = Data(rows, eval_rows, names)
    for part in (rows, eval_rows):
        if part is not None:
            _check_form(part, data.first)
    return data


def split(rows, share: float, seed: int):
    """Split rows at random into training and evaluation, in their order, at least one row each."""
    held = max(1, round(share * len(rows)))
    if held >= len(rows):
        raise DataError(f"--test-size {share:g} leaves none of {len(rows)} rows to train on")
    chosen = set(random.Random(seed).sample(range(len(rows)), held))
    kept = [index for index in range(len(rows)) if index not in chosen]
    return sources.Subset(rows, kept), sources.Subset(rows, sorted(chosen))


def _check_form(rows, first: dict[str, str]) -> None:
    first_bad, others, total = "", [], 0
    for index in range(min(len(rows), MAX_CHECKED)):
        try:
            row = read_row(rows[index], f"row {index}")
        except RowError as problem:
            total += 1
            first_bad = first_bad or str(problem)
            others += [problem.row] if 1 < total <= SHOWN else []
            continue
        for medium in row.media:
            first.setdefault(medium.kind, row.name)
    if total:
        more = f"\n{total} bad rows in all, also {', '.join(others)}" + (", ..." if total > SHOWN else "")
        raise DataError(first_bad + (more if others else ""))


def check_data(config, data: Data, collator) -> None:
    """Check rows against the model, before any weight is loaded.

    Raises:
        RowError: an image or audio row for a model without that tower.
        DataError: no row has a token to train on.
    """
    from .trainers import something_is_trained

    for kind, name in data.first.items():
        if kind not in collator.modalities:
            takes = " and ".join(["text", *sorted(collator.modalities)])
            raise RowError(name, f"{kind} in the row, but {config.model} ({collator.family.name}) takes {takes} only")
    if not something_is_trained(data.rows, collator):
        raise DataError(
            f"nothing to train: none of {len(data.rows)} rows has an assistant token within --max-len {config.max_len} "
            f"({_untrained_reason(collator.stats)})"
        )
    collator.stats.reset()


def _untrained_reason(stats) -> str:
    reasons = {
        "cut_to_nothing": "are cut before their answer: raise --max-len",
        "bad_media": "of their media cannot be read",
        "bad_rows": "are refused by the chat template",
    }
    told = [f"{stats[name]} {reason}" for name, reason in reasons.items() if stats[name]]
    return "; ".join(told) or "they have no assistant message, or all of it is marked as context"


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
    base = run.folder / "base-model"  # where a demo adapter finds the weights it belongs to
    if config.model == "demo":
        model = demo.make_model(processor.tokenizer)
        model.name_or_path = model.config._name_or_path = str(base.absolute())
    else:
        # Full fine-tuning keeps float32 weights under autocast: bf16 ones would swallow small updates.
        dtype = precision.torch_dtype if not config.full else choose("fp32").torch_dtype
        model = models.load_model(config.model, model_config, dtype, quantize)
    if not config.full:
        model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
    run.open(checkpoint_bytes(model))
    if config.model == "demo" and not config.full and not base.exists():
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
    if config.max_steps > 0:
        return config.max_steps
    return max(1, math.ceil(math.ceil(rows / config.batch_size) / config.grad_accum * config.epochs))


def make_sft_trainer(config, run: Run, model, processor, data: Data, collators):
    """The trainer of a supervised run."""
    from .callbacks import MetricsFile, StopOnDivergence
    from .precision import choose
    from .trainers import GemmaSFTTrainer, sft_arguments

    precision = choose(config.precision)
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
        workers=config.num_workers,
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
        callbacks=[MetricsFile(run.folder / "metrics.jsonl"), StopOnDivergence()],
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
            run.finish("interrupted", **collected(trainer))
            raise Interrupted(
                f"stopped at step {trainer.state.global_step}, a checkpoint was saved: "
                f"go on with --resume --output {run.folder}",
                stop.exit_code,
            )
        if data.eval_rows is not None:
            trainer.evaluate()
        with run.staged() as folder:
            trainer.save_model(str(folder))
            (folder / "training_args.bin").unlink(missing_ok=True)
    except Interrupted:
        raise
    except BaseException as problem:
        with contextlib.suppress(OSError):  # the disk may be what failed
            error = str(problem) if isinstance(problem, TrainerError) else type(problem).__name__
            run.finish("failed", error=error, **collected(trainer))
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


def collected(trainer) -> dict:
    """What the trainer counted, for `run.json`."""
    history = trainer.state.log_history
    last = {key: value for entry in history for key, value in entry.items() if key not in ("step", "epoch")}
    problems = trainer.problems
    return {
        "steps": trainer.state.global_step,
        "counters": dict(trainer.counts),
        "problems": [f"{row}: {reason}" for row, reason in problems],
        "lengths": trainer.lengths,
        "metrics": {key: value for key, value in last.items() if isinstance(value, int | float)},
        "timing": {"train_s": round(last.get("train_runtime", 0.0), 1)},
    }


# ---- reporting


def report(config, run: Run, trainer, collator, data: Data) -> dict:
    """Ask the trained model a few rows, write the last files, and return the result."""
    from . import generation

    facts = collected(trainer)
    model = trainer.model.eval()
    asked = data.eval_rows if data.eval_rows is not None else data.rows
    facts["samples"] = [generation.answer(model, collator, asked[i]) for i in _answerable(asked, 4)]
    if config.demo:
        facts["metrics"] |= generation.media_accuracy(model, collator, list(data.eval_rows))
    run.finish("done", **facts)
    result = {"status": "done", "demo": config.demo, "run": str(run.folder)}
    result |= {key: run.record[key] for key in ("model", "steps", "metrics", "counters", "timing", "peak_memory_mb")}
    return result | {"summary": summary(config, run)}


def _answerable(rows, count: int) -> list[int]:
    """The first rows that end in an answer in words."""

    def ends_in_words(row):
        return bool(row.messages) and row.messages[-1]["role"] == "assistant" and not row.messages[-1].get("tool_calls")

    found = (index for index in range(min(len(rows), 100)) if ends_in_words(read_row(rows[index])))
    return list(itertools.islice(found, count))


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
        lines.append("note     " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in worth.items()))
    if "accuracy" in metrics:
        lines.append(
            f"proof    on held-out pictures and sounds: {metrics['accuracy']:.0%} right, with the media zeroed "
            f"{metrics['accuracy_blind']:.0%} (guessing: {metrics['chance']:.0%})"
        )
    return "\n".join([*lines, f"run      {run.folder} (report.html, run.json, metrics.jsonl, adapter and processor)"])


def plan(config, run: Run, data: Data, model_config) -> dict:
    """What a dry run says."""
    from .precision import choose

    steps = steps_of(config, len(data.rows))
    precision = choose(config.precision)
    result = {"status": "dry-run", "demo": config.demo, "run": str(run.folder), "model": config.model, "steps": steps}
    result |= {"rows": len(data.rows), "eval_rows": len(data.eval_rows or ()), "precision": precision.reason}
    what = f"{config.model} ({model_config.model_type}) on {len(data.rows)} rows in {steps} steps"
    return result | {"summary": f"would train {what}, into {run.folder}\n{precision.reason}"}
