"""All of a training run that can go wrong before a model is loaded: flags, folder, rows, processor, collators."""

from __future__ import annotations

import dataclasses
import math
import os
from importlib.util import find_spec
from pathlib import Path

from . import backends, metadata, ranks, sources
from .answer_checks import CHECKS
from .cli import note
from .data import Data, check_data, load_data
from .errors import DataError, EnvironmentUnfit, UsageError
from .eval_prompts import Prompt, read_prompts, unanswerable
from .goals import FIGURES, Goal
from .runs import Run

TRACKERS = {"tensorboard": ("tensorboard", "tensorboardX")} | {
    name: (name,) for name in "wandb mlflow trackio comet_ml swanlab clearml neptune dvclive codecarbon".split()
}
# Peak learning rates: of LoRA, of full fine-tuning, and of both for the tiny demo model.
RATES = {"sft": (2e-4, 1e-5, 1e-2, 3e-3), "dpo": (5e-6, 1e-6, 5e-3, 1e-3), "reward": (1e-4, 1e-5, 3e-3, 1e-3)}
DEMO_STEPS = {"sft": 120, "dpo": 120, "reward": 200}


# What a resumed run must not change: what is trained, and for what; and what it may, and is told.
FIXED = """streaming model adapter full quantize lora_r lora_alpha lora_targets beta loss_type loss_weights
label_smoothing center_rewards_coefficient""".split()
FIXED_STREAM = ["seed", "shuffle_buffer"]  # which the rows of a stream that were seen follow from
CHANGED = "backend lr seed batch_size grad_accum max_len precision loss_on train_reasoning thinking truncation".split()

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
    check_flags(config)
    backend = backends.start(config.backend, config.task, config.precision)
    config = with_defaults(dataclasses.replace(config, backend=backend.name))
    ranks.begin()
    run = open_run(config, script)
    run.record["backend"] = dataclasses.asdict(backend)
    rows = load_data(config)
    check_same_data(rows)
    config = with_steps(config, rows)
    check_resumed(config, run, rows)
    model_config, processor = load_processor(config)
    collators = make_collators(config, processor, model_config)
    check_data(config, rows, collators[0])
    if getattr(config, "eval_prompts", None):
        rows.prompts = load_prompts(config, collators[1])
    return config, run, rows, model_config, processor, collators


def check_same_data(data: Data) -> None:
    """Refuse data files that are not the same for all ranks (DataError): each would train on rows of its own."""
    found = data.fingerprint, sources.fingerprint(data.eval_names, 0)
    if len(set(ranks.gathered(found))) > 1:
        raise DataError("the data files are not the same on all machines: copy them, or put them on a shared disk")


def load_prompts(config, collator) -> list[Prompt]:
    """The prompts of --eval-prompts. One that cannot be answered is told, and will count as failed.

    Raises:
        DataError: the file, or a prompt in it, cannot be used; the model has no tower for a medium.
    """
    prompts = read_prompts(config.eval_prompts)
    for prompt in prompts:
        for medium in prompt.question.row.media:
            collator.check_modality(medium.kind, prompt.question.row.name)
    if failing := unanswerable(prompts, collator):
        name, reason = failing[0]
        note(f"{len(failing)} of {len(prompts)} prompts cannot be answered. First: {name}: {reason}")
    return prompts


def check_flags(config) -> None:
    """Refuse flags that do not go together (UsageError) or need what is not installed (EnvironmentUnfit), and say so
    where the built-in demo runs. Imports nothing heavy."""
    if config.task == "dpo":
        _check_losses(config)
    if not (config.demo or config.model or getattr(config, "adapter", None)):
        raise UsageError("--dataset needs --model: a hub id such as google/gemma-4-E2B-it, a folder, or demo")
    for tracker in set(config.report_to) - {"none"}:
        if tracker not in TRACKERS:
            raise UsageError(f"--report-to {tracker}: known are {', '.join(TRACKERS)}")
        if not any(map(find_spec, TRACKERS[tracker])):
            raise EnvironmentUnfit(f"--report-to {tracker} needs a package: pip install {TRACKERS[tracker][0]}")
    for name in ("WANDB_DISABLE_CODE", "WANDB_DISABLE_GIT"):  # nothing but figures leaves the machine unasked
        os.environ.setdefault(name, "true")
    os.environ.setdefault("WANDB_CONSOLE", "off")
    _check_goals(config)
    _check_stream(config)
    if config.auto_batch and ranks.world() > 1:
        raise UsageError("--auto-batch is for one process: one of several that runs out of memory cannot go back alone")
    if config.device_memory and not config.dry_run:
        raise UsageError("--device-memory needs --dry-run")
    if config.demo and (config.eval_dataset or config.test_size):
        raise UsageError("--eval-dataset and --test-size need --dataset: the demo has held-out rows of its own")
    if config.eval_dataset and config.test_size:
        raise UsageError("--eval-dataset and --test-size exclude each other")
    if config.demo:
        model = "tiny random Gemma 4" if config.model in (None, "demo") else config.model
        note(f"No --dataset given: running the built-in demo ({model}, bundled samples, offline).")


def with_defaults(config):
    """The config with what depends on other flags filled in."""
    if getattr(config, "adapter", None):
        config = _with_adapter(config)
    tiny = config.model in (None, "demo")
    chosen = {"loss_type": config.loss_type or ("sigmoid",)} if config.task == "dpo" else {}
    chosen |= {
        "model": config.model or "demo",
        "batch_size": config.batch_size or (8 if config.demo else 1),
        "grad_accum": config.grad_accum or (1 if config.demo else 8),
        "lr": config.lr or RATES[config.task][2 * tiny + config.full],
        "max_steps": config.max_steps or (DEMO_STEPS[config.task] if config.demo and config.epochs == 1 else None),
    }
    return dataclasses.replace(config, **chosen)


def with_steps(config, data: Data):
    """The config with the steps of a stream, which has no end of its own.

    Raises:
        UsageError: the number of its rows is not known, and --max-steps not given.
    """
    if data.stream is None or config.max_steps:
        return config
    if data.size is None:
        raise UsageError(
            "--streaming: how many rows there are is not known before they are read (but of .parquet files): give "
            f"--max-steps; one pass takes rows / ({config.batch_size * config.grad_accum} x GPUs)"
        )
    rows_a_step = config.batch_size * config.grad_accum * ranks.world()
    return dataclasses.replace(config, max_steps=max(1, math.ceil(config.epochs * data.size / rows_a_step)))


def _check_stream(config) -> None:
    """Refuse what a stream has not (UsageError)."""
    if not config.streaming:
        plain = next(f.default for f in dataclasses.fields(config) if f.name == "shuffle_buffer")
        if config.shuffle_buffer != plain:
            raise UsageError("--shuffle-buffer needs --streaming: without it all rows are shuffled")
        return
    if config.demo:
        raise UsageError("--streaming needs --dataset")
    if config.test_size:
        raise UsageError("--test-size takes rows by number, which a stream has not: give --eval-dataset a file of them")
    if config.save_first_batch:
        raise UsageError("--save-first-batch takes rows by number, which a stream has not")


def _check_goals(config) -> None:
    """Refuse goals that nothing will be measured for, and metadata that cannot be read (UsageError)."""
    metadata.read_own(config.metadata, config.metadata_file)
    try:
        goal = Goal.read(config.stop_when) if config.stop_when else None
    except ValueError as problem:
        raise UsageError(f"--stop-when: {problem}") from None
    wanted = {"--best-by": config.best_by or "", "--stop-when": goal.metric if goal else ""}
    evaluates = config.demo or config.eval_dataset or config.test_size
    for flag, metric in wanted.items():
        if metric.startswith("gen/") and not getattr(config, "eval_prompts", None):
            raise UsageError(f"{flag} {metric} needs --eval-prompts")
        if metric.startswith("eval_") and not evaluates:
            raise UsageError(f"{flag} {metric} needs --eval-dataset or --test-size")
        if metric.startswith("gen/") and metric.removeprefix("gen/") not in {*FIGURES, *CHECKS}:
            raise UsageError(f"{flag} {metric}: known are gen/{', gen/'.join([*FIGURES, *CHECKS])}")
    rates = {f"gen/{name}" for name in ("pass_rate", *CHECKS)}
    if goal and goal.metric in rates and not 0 <= goal.value <= 1:
        raise UsageError(f"--stop-when {config.stop_when}: a share lies between 0 and 1")
    if not getattr(config, "eval_prompts", None):
        plain = {field.name: field.default for field in dataclasses.fields(config)}
        for name in (name for name in plain if name.startswith("eval_prompts_") or name == "report_samples"):
            if getattr(config, name) != plain[name]:
                raise UsageError(f"--{name.replace('_', '-')} needs --eval-prompts")


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
    """Refuse to resume what was begun with other flags (UsageError); `run.finished` tells where no more is to do."""
    if not run.previous:
        return
    if (script := run.previous.get("script", run.script)) != run.script:
        raise UsageError(f"--resume: the run in {run.folder} is one of {script}.py")
    steps, before = steps_of(config, data.size), run.previous.get("arguments", {})
    now = {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(config).items()}
    _check_ranks(config, run)
    if config.auto_batch and run.previous.get("auto_batch"):  # which changed them
        now = {name: value for name, value in now.items() if name not in ("batch_size", "grad_accum")}
    if config.auto_fit and run.previous.get("auto_fit"):
        now = {name: value for name, value in now.items() if name not in run.previous["auto_fit"]["changed"]}
    other = {name: "--" + name.replace("_", "-") for name in now if name in before and before[name] != now[name]}
    for name in FIXED + (FIXED_STREAM if config.streaming else []):
        if name in other:
            told = f"{other[name]} {before[name]}, not {now[name]}"
            raise UsageError(f"--resume: the run in {run.folder} was begun with {told}")
    if told := [f"{flag} {now[name]} (before: {before[name]})" for name, flag in other.items() if name in CHANGED]:
        note(f"going on with other flags: {', '.join(told)}")
    known = run.previous.get("data", {}).get("fingerprint")
    if known and known != data.fingerprint:
        raise UsageError(f"--resume: the data are not those that the run in {run.folder} was begun with")
    if run.previous.get("status") != "done" or not run.previous.get("reported"):
        return
    met = config.stop_when and run.previous.get("goal_met") == config.stop_when
    if met or run.previous.get("steps", 0) >= steps:
        run.finished = True
        why = f"{config.stop_when} was met" if met else f"{steps} steps"
        note(f"the run in {run.folder} is finished ({why}): raise --epochs or --max-steps to go on")


def _check_ranks(config, run: Run) -> None:
    """Refuse to resume with another number of ranks where an optimizer step would have another number of rows."""
    before, now = run.previous.get("ranks"), ranks.world()
    if not before:
        return
    if before["kind"] != ranks.kind():
        raise UsageError(
            f"--resume: the checkpoints in {run.folder} are of weights kept {before['kind']} on each process "
            f"(now {ranks.kind()}): launch it as it was begun, or begin anew with --adapter"
        )
    rows, ours = before["rows_a_step"], config.batch_size * config.grad_accum * now
    if rows == ours:
        run.together = before["together"]  # however they are batched, the order stays
    if before["world"] == now:
        return
    if config.streaming:
        raise UsageError(f"--resume: a stream goes on with the {before['world']} processes it began with, not {now}")
    if rows != ours:
        able = next((size for size in range(config.batch_size, 0, -1) if rows % (size * now) == 0), None)
        flags = (
            f"--batch-size {able} --grad-accum {rows // (able * now)}"
            if able
            else f"a number of which {rows} is a multiple"
        )
        raise UsageError(
            f"--resume: the run in {run.folder} was begun with {before['world']} processes and {rows} rows in an "
            f"optimizer step; with {now} there would be {ours}: give {flags}"
        )
    note(f"going on with {now} processes, before {before['world']}: each optimizer step has the same {rows} rows")


# ---- processor and collators


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


def steps_of(config, rows: int | None) -> int:
    """Optimizer steps of a run."""
    if config.max_steps:
        return config.max_steps
    batches = math.ceil(rows / (config.batch_size * ranks.world()))
    return math.ceil(config.epochs * math.ceil(batches / config.grad_accum))
