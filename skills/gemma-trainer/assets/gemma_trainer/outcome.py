"""What a run says: what it would do, or what has come of it."""

from __future__ import annotations

import contextlib
import copy
import itertools

from . import ranks
from .cli import note
from .collected import collected
from .data import Data
from .errors import RowError
from .preferences import read_preference
from .preparation import steps_of
from .recipe import FULL
from .rows import read_row
from .runs import Run
from .targets import messages_row

PLANNED = 256  # rows that a dry run sends through the collator


def report(config, run: Run, trainer, collator, data: Data) -> dict:
    """Ask the trained model a few rows, write the last files, and return the result."""
    facts = collected(run, trainer, ranks.gathered)
    if config.task != "reward":
        try:
            answered = list(itertools.islice(_answers(config, trainer.model.eval(), collator, data), 4))
            run.show({said["row"]: {"media": media} for said, media in answered})
            facts["samples"] = [said for said, _ in answered]
        except Exception as problem:  # the result is saved: a sample that cannot be made does not undo the run
            note(f"no sample answers in the report ({type(problem).__name__})")
    if config.save_first_batch:
        from .first_batch import add_log_probs

        add_log_probs(run, trainer.model.eval(), collator, data.rows)
    if config.demo:
        facts["metrics"] |= _proof(config, trainer, collator, data)
    run.finish("done", reported=True, **facts)
    return result(config, run)


def result(config, run: Run) -> dict:
    """What a finished run prints."""
    told = {"status": "done", "demo": config.demo, "run": str(run.folder)}
    told["backend"] = _told_backend(run)
    told |= {key: run.record[key] for key in ("model", "steps", "metrics", "counters", "timing", "peak_memory_mb")}
    told |= {key: run.record[key] for key in ("why", "best", "auto_batch", "auto_fit") if run.record.get(key)}
    return told | {"summary": summary(config, run)}


def _answers(config, model, collator, data: Data):
    """What the model answers to some rows, and previews of their media."""
    from . import generation
    from .previews import previews

    rows = data.eval_rows if data.eval_rows is not None else data.rows
    if config.paired:
        collator = copy.copy(collator)
        collator.task = "sft"
    for index in range(min(len(rows), 32)):
        with contextlib.suppress(RowError):
            row = messages_row(read_preference(rows[index]).chosen) if config.paired else rows[index]
            if said := generation.answer(model, collator, row):
                yield said, previews(read_row(row), collator.access)


def _proof(config, trainer, collator, data: Data) -> dict[str, float]:
    """How well the demo's held-out rows are told, with the media and without."""
    if not config.paired:
        from . import generation

        return generation.media_accuracy(trainer.model.eval(), collator, list(data.eval_rows))
    seen, blind = (trainer.pair_accuracy(data.eval_rows, blind) for blind in (False, True))
    return {"proof_accuracy": seen, "proof_accuracy_blind": blind, "chance": 0.5}


def summary(config, run: Run) -> str:
    """The result in a few lines for a person."""
    record = run.record
    metrics, counters = record["metrics"], record["counters"]
    tokens = f"{counters.get('trained_tokens', 0):,} of {counters.get('tokens', 0):,} tokens"
    backend = _told_backend(run)
    losses = [
        f"{name.removesuffix('_loss')} {metrics[name]:.3f}" for name in ("train_loss", "eval_loss") if name in metrics
    ]
    lines = [
        f"model    {record['model']['name']}: {record['model']['trains']}",
        f"trained  {record['steps']} steps, {tokens}, {record['timing']['train_s']:.0f} s, "
        f"peak memory {record['peak_memory_mb']:,} MB",
        f"loss     {', '.join(losses)}",
    ]
    if backend.get("name") == "unsloth":
        lines.append(f"backend  Unsloth: {backend['verdict']}")
    worth = {name: counters[name] for name in ("bad_media", "bad_rows", "truncated", "cut_to_nothing", "long_audio",
             "reasoning_dropped", "inexact_turns", "diverged_steps") if counters.get(name)}  # fmt: skip
    if worth:
        lines.append(f"note     {_told(worth)}")
    if run.record.get("why") not in (None, "", FULL):
        lines.append(f"ended    {run.record['why']}")
    if best := run.record.get("best"):
        lines.append(f"best     step {best['step']}: {best['metric']} {best['value']:.4g}")
    if "gen/pass_rate" in metrics:
        lines.append(f"answers  {_told_answers(metrics, run)}")
    if config.paired:
        lines.append(f"pairs    {_told_pairs(metrics)}")
    if "chance" in metrics:
        seen, blind = (metrics[f"{'proof_' if config.paired else ''}accuracy{end}"] for end in ("", "_blind"))
        lines.append(
            f"proof    on held-out pictures and sounds: {seen:.0%} right, with the media zeroed "
            f"{blind:.0%} (guessing: {metrics['chance']:.0%})"
        )
    saved = "model" if config.full else "adapter"
    return "\n".join([*lines, f"run      {run.folder} (report.html, run.json, metrics.jsonl, {saved} and processor)"])


def _told_backend(run: Run) -> dict:
    """The backend, and, once there was a model, how much of Unsloth is in it."""
    backend = run.record.get("backend") or {}
    audit = {"verdict": backend["audit"]["verdict"]} if "audit" in backend else {}
    return {name: backend[name] for name in ("name", "reason") if name in backend} | audit


def _told_intervals(config, data: Data, steps: int) -> str:
    """How often a run saves, evaluates and asks, and what may end it early."""
    often = max(1, steps // 10)
    told = [f"{config.save_steps or often} steps a checkpoint"]
    if data.eval_rows is not None:
        told.append(f"{config.eval_steps or often} an evaluation")
    if data.prompts:
        told.append(f"{config.eval_prompts_every or often} the answers to {len(data.prompts)} prompts")
    ends = [f"--stop-when {config.stop_when}"] if config.stop_when else []
    ends += [f"--max-minutes {config.max_minutes:g}"] if config.max_minutes else []
    return ", ".join(told) + (f"; may end early by {' or '.join(ends)}" if ends else "")


def _told_answers(metrics: dict, run: Run) -> str:
    """How many of the prompts pass, now and before training, and what asking them took."""
    asked = [entry for entry in run.metrics() if "gen/pass_rate" in entry]
    before = f" ({asked[0]['gen/pass_rate']:.0%} before training)" if asked and not asked[0]["step"] else ""
    failed = f", {metrics['gen/failed']:.0f} could not be answered" if metrics.get("gen/failed") else ""
    cost = f"asking took {sum(entry['gen/seconds'] for entry in asked):.0f} s, {metrics['gen/share']:.0%} of the run"
    return f"{metrics['gen/pass_rate']:.0%} of the prompts pass{before}{failed}; {cost}"


def _told_pairs(metrics: dict) -> str:
    """Accuracy, margin, and what else a trainer on pairs logs, of the evaluation where there was one."""
    names = {
        "rewards/accuracies": "chosen preferred", "accuracy": "chosen preferred", "rewards/margins": "margin",
        "margin": "margin", "logps/chosen": "log-probability of chosen", "logps/rejected": "of rejected",
    }  # fmt: skip
    prefix = "eval_" if any(f"eval_{name}" in metrics for name in names) else ""
    found = {told: metrics[prefix + name] for name, told in names.items() if prefix + name in metrics}
    shown = [f"{told} {value:.0%}" if "preferred" in told else f"{told} {value:.3g}" for told, value in found.items()]
    return f"{'held out' if prefix else 'in training'}: {', '.join(shown)}"


def described(config, run: Run, data: Data, model_config, collator, precision, quantized: str) -> dict:
    """What a dry run says: what would be trained, on what, and what the collator does to the first rows.

    Args:
        precision, quantized: the device with its number format, and what is said of the weights' form.
    """
    from . import models

    model = models.skeleton(model_config, config.task == "reward")
    if not config.full:
        model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
    trains = models.describe_trained(model)
    looked_at = min(len(data.rows), PLANNED)
    for index in range(0, looked_at, 8):
        collator([data.rows[i] for i in range(index, min(index + 8, looked_at))])
    counters = {name: count for name, count in collator.stats.items() if count and name != "padding"}
    result = {"status": "dry-run", "demo": config.demo, "run": str(run.folder), "model": config.model, **trains}
    result |= {
        "rows": data.size,
        "eval_rows": len(data.eval_rows or ()),
        "steps": steps_of(config, data.size),
        "batch_size": config.batch_size,
        "grad_accum": config.grad_accum,
        "processes": ranks.world(),
        "rows_a_step": config.batch_size * config.grad_accum * ranks.world(),
        "max_len": config.max_len,
        "device": precision.device,
        "dtype": precision.dtype,
    }
    if data.prompts:
        result["eval_prompts"] = len(data.prompts)
    result |= {"backend": _told_backend(run)}
    result |= {"precision": precision.reason, "quantization": quantized, "looked_at": looked_at, "counters": counters}
    lines = [
        f"model    {config.model} ({model_config.model_type}): {trains['trains']}; "
        f"{trains['trainable_parameters']:,} of {trains['total_parameters']:,} parameters",
        f"device   {precision.reason}; {quantized}",
        f"backend  {run.record['backend']['name']}: {run.record['backend']['reason']}",
        f"data     {_told_rows(data)} to train on, {result['eval_rows']} to evaluate on",
        f"steps    {result['steps']}, each of {_told_step(result)}",
        f"rows     in the first {looked_at}: {_told(counters)}",
        f"run      would be written to {run.folder}",
    ]
    lines.insert(5, f"every    {_told_intervals(config, data, result['steps'])}")
    return result | {"summary": "\n".join(lines)}


def _told_step(plan: dict) -> str:
    factors = [("a batch", plan["batch_size"]), ("accumulated", plan["grad_accum"]), ("processes", plan["processes"])]
    told = " x ".join(f"{number} {what}" for what, number in factors if number > 1 or what == "a batch")
    return f"{plan['rows_a_step']} rows ({told})"


def _told_rows(data: Data) -> str:
    if data.stream is None:
        return f"{data.size} rows"
    return f"{'an unknown number of' if data.size is None else data.size} rows in {data.stream.files:,} files"


def _told(counters: dict) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counters.items())
