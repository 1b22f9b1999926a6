"""The steps of export.py check: load what was exported as its user would, ask it, and compare with the run."""

from __future__ import annotations

from pathlib import Path

from . import artefacts, asking, metadata, models, run_check
from .cli import note
from .errors import UsageError
from .files import user_path
from .inference import prompting_collator
from .merging import quiet
from .run_check import Finding, lines_of


def check(config) -> dict:
    """Check the folder of an adapter or of a whole model; `config` is `export.CheckFlags`. Returns the result."""
    path = user_path(config.path)
    inspected = run_check.inspect(str(path))
    findings = [Finding(**found) for found in inspected["checks"]]
    asked: list[dict] = []
    if not any(finding.passed is False for finding in findings):
        samples, told = known_answers(config)
        model, collator = load(path)
        findings.append(Finding("load", True, f"{type(model).__name__} on {model.device.type}, {model.dtype}"))
        asked = [asking.asked_again(model, collator, sample) for sample in samples]
        findings.append(verdict(asked, told))
    return result(str(path), inspected["kind"], findings, asked)


def known_answers(config) -> tuple[list[dict], str]:
    """(samples with what was said to them before, who said it): what an artefact is to meet.

    Args:
        config: `path`; `run` and `dataset`, or None.

    Raises:
        UsageError: a data set whose rows nobody has answered.
        CannotLoad, DataError: the run, or the rows, cannot be read.
    """
    path = user_path(config.path)
    if config.dataset:
        if not config.run:
            raise UsageError("--dataset needs --run: the run whose answers to these rows are to be met")
        rows, run = asking.rows_of_file(config.dataset), user_path(config.run)
        note(f"Asking {run}.")
        model, collator = load(run)
        reward = hasattr(model, "score")
        said = [row | asking.said_by(model, collator, row["row"], reward) for row in rows]
        return [sample for sample in said if {"answer", "score"} & set(sample)], f"of {run}"
    made = artefacts.read(path)
    if made.get("samples") and not config.run:
        return made["samples"], f"of {made.get('run')}, kept in {artefacts.FILE}"
    folder = path if path.is_dir() else path.parent
    run = user_path(config.run) if config.run else run_check.run_folder(folder)
    return asking.answered_rows(run), f"of {run} as it was trained"


def load(path: Path):
    """(model, collator) of an adapter or a whole model, with transformers and PEFT alone, in the precision and
    quantization that it was trained in, where this machine has them.

    Raises:
        CannotLoad: neither is there, or it cannot be loaded.
    """
    facts, kind = metadata.read(path) or {}, artefacts.kind_of(path)
    adapted = kind == "adapter"
    base = models.base_of(str(path)) if adapted else str(path)
    config, _ = models.load_config(base)
    named = models.adapter_config(str(path)) if adapted else None
    reward = "SEQ_CLS" in str(named.task_type) if adapted else models.is_reward(config)
    trained = facts.get("training") or {} if adapted else {}
    with quiet():
        model, _ = asking.load_plain(base, reward, trained)
        if adapted:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, path).eval()
    beside = (path / "tokenizer.json").is_file()
    processor = models.load_processor(str(path) if beside else base, config)
    return model, prompting_collator(processor, config, facts, asking.MAX_LEN)


def verdict(asked: list[dict], told: str) -> Finding:
    """Whether the answers are those that were to be met."""
    if not asked:
        why = "no answers are known to compare with: give --dataset FILE and --run RUN"
        return Finding("answers", None, why)
    same = sum(one["same"] for one in asked)
    sure = sum(not one["same"] and one["apart"] is not None and one["apart"] <= asking.AS_SURE for one in asked)
    near = f", and of {sure} more it is as sure" if sure else ""
    return Finding("answers", same + sure == len(asked), f"{same} of {len(asked)} are those {told}{near}")


def result(path: str, kind: str, findings: list[Finding], asked: list[dict]) -> dict:
    """What is printed: exit code 8 where a finding has not passed."""
    sound = not any(finding.passed is False for finding in findings)
    lines = [f"folder   {path} ({kind})", *lines_of(findings)]
    told = {"path": path, "kind": kind, "sound": sound, "checks": [vars(finding) for finding in findings]}
    return told | {"asked": asked, "summary": "\n".join(lines)} | ({} if sound else {"exit_code": 8})
