"""What is to be said of a data set that was looked at: the verdict, each finding with what mends it, and the page."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys

import numpy as np

from . import examples
from .errors import UsageError
from .files import user_path
from .findings import BAD_MEDIA, CONVERT, DROP, ERROR, INFO, KINDS, ORDER, WARNING
from .flags import CollatorFlags
from .survey import Survey, few_labels, load_collator, take_survey
from .tally import texts_of_entry
from .writing import RowsWriter, refuse_inputs, writable

BATCH_TOKENS = 4096  # in a batch of the longest rows, for the suggested command
READY, WARNINGS, INVALID = "READY", "READY WITH WARNINGS", "INVALID"
QUANTILES = {"min": 0, "median": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}


def check(config) -> dict:
    """What `dataset_prep.py check` does: the verdict, and every finding of every row in --output, if that is given.

    Raises:
        DataError: no such file, or one that cannot be read at all.
        CannotLoad: the model cannot be reached.
    """
    if not config.output:
        result = result_of(take_survey(config, load_collator(config)), config)
    else:
        writer = RowsWriter(config.output, config.overwrite, empty=True)
        if writer.path.suffix.lower() != ".jsonl":
            raise UsageError(f"--output {config.output}: the name must end in .jsonl")
        refuse_inputs([*config.data, *config.eval_dataset], writer.path)
        with writer:
            result = result_of(take_survey(config, load_collator(config), writer.write), config)
        result["output"] = config.output
    return result | {"summary": summary(result)}


def report(config) -> dict:
    """What `dataset_prep.py report` does: the verdict, and a page with everything behind it."""
    from .dataset_report import write_dataset_report

    path = user_path(config.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {path}: the name must end in .html")
    if path.is_dir() or (path.exists() and not config.overwrite):
        raise UsageError(f"--output {path}: the file exists; give --overwrite to replace it, or another name")
    survey = take_survey(config, load_collator(config))
    result = result_of(survey, config)
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_dataset_report(path, _page(survey, result, config))
    return {**result, "output": str(path), "exit_code": 0, "summary": f"{result['verdict']}: {path}"}


def _page(survey: Survey, result: dict, config) -> dict:
    """What the page shows (see `dataset_report.write_dataset_report`)."""
    tally, media, seconds = survey.tally, survey.tally.counts["media"], survey.tally.clip_seconds
    tokens, trained = np.array(tally.lengths).T.tolist() if tally.lengths else ([], [])
    page = {key: result[key] for key in ("data", "task", "model", "max_len", "demo", "verdict", "findings")}
    page |= result["composition"] | {"rows": survey.evaluation, "pairs": dict(tally.pairs) or None}
    page["findings"] = [f | {"note": next(filter(None, f["details"]), None)} for f in result["findings"]]
    if told := result["lengths"]:
        over = survey.findings.count("over_max_len")
        page["lengths"] = {"tokens": tokens, "trained": trained, "of": told["of"], "over_max_len": over}
    page["train_command"] = result["train_command"]
    page["images"] = {"sizes": tally.image_sizes, "count": media["image"]}
    page["audio"] = {"seconds": seconds, "count": media["audio"], "limit": 30.0}
    page["duplicates"] = {
        "exact": survey.findings.count("duplicate_rows"),
        "near": survey.findings.count("near_duplicates"),
        "eval_overlap": survey.findings.count("eval_overlap") if len(survey.rows) > survey.evaluation else None,
    }
    if few_labels(tally, survey.evaluation):
        count = sum(tally.labels.values())
        page["answers"] = {"distinct": len(tally.labels), "rows": count,
                           "top_share": max(tally.labels.values()) / count}  # fmt: skip
        page["labels"] = dict(tally.labels.most_common(20)) if config.show_text else None
    page["examples"] = examples.show(survey.rows, survey.evaluation, config.task, survey.collator)
    return page


# ---- the result


def severity_of(code: str, survey: Survey, config) -> str:
    """How bad a finding is under the flags of this run: an error where training would stop."""
    severity = KINDS[code].severity
    if code == "over_max_len" and config.truncation == "error":
        return ERROR
    if severity != "share":
        return severity
    if code in BAD_MEDIA:
        total = sum(survey.tally.counts["media"].values())
        too_many = survey.tally.bad_media > config.max_bad_media * total or config.on_bad_media == "error"
    else:
        too_many = survey.findings.count(code) > config.max_bad_media * len(survey.rows)
    return ERROR if too_many else WARNING


def result_of(survey: Survey, config) -> dict:
    """The verdict with everything behind it, as JSON values."""
    findings = [_told(code, survey, config) for code in sorted(survey.findings.found, key=ORDER.__getitem__)]
    findings.sort(key=lambda found: (ERROR, WARNING, INFO).index(found["severity"]))
    severities = {found["severity"] for found in findings}
    verdict = INVALID if ERROR in severities else WARNINGS if WARNING in severities else READY
    tally, count = survey.tally, survey.evaluation
    counts = {"rows": count, "eval_rows": len(survey.rows) - count, "bad_rows": tally.bad_rows,
              "trained_rows": tally.trained_rows, **tally.counts["media"], "bad_media": tally.bad_media,
              "duplicate_rows": survey.findings.count("duplicate_rows"),
              "near_duplicates": survey.findings.count("near_duplicates")}  # fmt: skip
    return {
        "verdict": verdict,
        "demo": not config.data,
        "data": survey.names,
        "task": config.task,
        "model": config.model,
        "max_len": config.max_len,
        "counts": counts,
        "findings": findings,
        "lengths": _lengths(survey, config),
        "composition": {name: dict(tally.counts[name].most_common(20)) for name in ("formats", "modalities", "roles",
                        "turns", "scripts") if name in tally.counts},
        "train_command": _command(survey, config) if verdict != INVALID else None,
        "exit_code": 3 if verdict == INVALID else 0,
    }  # fmt: skip


def _told(code: str, survey: Survey, config) -> dict:
    kind, found = KINDS[code], survey.findings.found[code]
    details = list(dict.fromkeys(detail for _, _, detail in found.rows if detail))
    remedy = kind.remedy
    if code == "over_max_len":
        remedy = f"--max-len {survey.tally.longest} keeps all of them; else their ends are cut"
    told = {
        "code": code,
        "severity": severity_of(code, survey, config),
        "title": kind.title,
        "count": found.count,
        "rows": list(dict.fromkeys(name for _, name, _ in found.rows if name)),
        "details": [detail if len(detail) <= 160 else f"{detail[:159]}…" for detail in details[:3]],
        "remedy": remedy,
        "command": _mend_command(code, survey, config),
    }
    if config.show_text:
        told["text"] = [_excerpt(survey.rows, position) for position, name, _ in found.rows if name]
        if code == "label_imbalance":
            told["text"] = [f"{label}: {count}" for label, count in survey.tally.labels.most_common(10)]
    return told


def _mend_command(code: str, survey: Survey, config) -> str | None:
    """The command line that mends a finding, where a command of dataset_prep.py does."""
    action, names, place = KINDS[code].action, survey.names, user_path(survey.names[0])
    if not action or (code == "wrong_task" and config.task == "sft"):  # which would drop the rejected answers
        return None
    alone = len(names) == 1 and place.is_file()
    stem = str(place.with_suffix("")) if alone else f"{place.name or 'data'}-rows"
    words = ["dataset_prep.py", "convert" if action == CONVERT else "fix", *map(shlex.quote, names)]
    if action == CONVERT:
        words.append(f"--to {'messages' if config.task == 'sft' else 'preference'}")
    elif action == DROP:
        words.append(f"--drop {code}")
    ending = "converted" if action == CONVERT else "fixed"
    return f"{script(' '.join(words))} --output {shlex.quote(f'{stem}.{ending}.jsonl')}"


def _excerpt(rows, position: int, size: int = 200) -> str:
    text = " ".join(texts_of_entry(rows, position, "any").split("\n"))
    return text if len(text) <= size else text[: size - 1] + "…"


def _lengths(survey: Survey, config) -> dict | None:
    if not survey.tally.lengths:
        return None
    tokens, trained = np.array(survey.tally.lengths).T
    quantiles = {name: int(np.percentile(tokens, at, method="inverted_cdf")) for name, at in QUANTILES.items()}
    count = len(tokens) // (1 if config.task == "sft" else 2)
    of = f"a random sample of {count:,} of {survey.evaluation:,} rows"
    if survey.exact:
        of = (
            "all rows"
            if count == survey.evaluation
            else f"the {count:,} of {survey.evaluation:,} rows that can be read"
        )
    of += "" if config.task == "sft" else ", both answers of each"
    return {"of": of, "tokens": quantiles, "trained_share": round(float(trained.sum() / max(1, tokens.sum())), 4),
            "over_max_len": survey.findings.count("over_max_len")}  # fmt: skip


def _command(survey: Survey, config) -> str | None:
    """A command line that trains on the data, with a length and a batch size that fit them."""
    if not config.data:  # the demo's own data are trained on without any flag
        return None
    words = [script(f"{config.task}_train.py"), f"--model {shlex.quote(config.model or 'google/gemma-4-E2B-it')}"]
    words.append(f"--dataset {' '.join(map(shlex.quote, survey.names))}")
    held = " ".join(map(shlex.quote, config.eval_dataset))
    words.append(f"--eval-dataset {held}" if held else "--test-size 0.1")
    if survey.tally.longest:
        room = 64 * -(-survey.tally.longest * 5 // 4 // 64)  # a fourth more: rows that were not measured may be longer
        limit = min(config.max_len, room)
        row = limit if config.task == "sft" else 2 * limit  # both answers of a pair
        batch = max(1, min(8, 2 ** int(np.log2(max(1, BATCH_TOKENS / row)))))
        words.append(f"--max-len {limit} --batch-size {batch} --grad-accum {8 // batch}")
    if survey.evaluation < 1000 and config.task == "sft":  # preferences are soon learnt by heart
        words.append("--epochs 3")
    return " ".join(words + _options(config))


def _options(config) -> list[str]:
    """The collator's options as flags, where they are not the usual ones: training is to do what was checked."""
    words = []
    for field in dataclasses.fields(CollatorFlags):
        value, option = getattr(config, field.name), field.name.replace("_", "-")
        if value != field.default:
            switch = f"--{option}" if value else f"--no-{option}"
            words.append(switch if isinstance(value, bool) else f"--{option} {shlex.quote(str(value))}")
    return words


def script(command: str) -> str:
    """A command line for one of the scripts, by the interpreter that runs and the path that it was called by."""
    python = shutil.which("python")
    same = python and os.path.dirname(python) == os.path.dirname(sys.executable)
    folder = os.path.dirname(sys.argv[0])
    start = f"{shlex.quote(folder)}/" if folder else ""
    return f"{'python' if same else shlex.quote(sys.executable)} {start}{command}"


def summary(result: dict) -> str:
    """The result in a few lines for a person."""
    counts = result["counts"]
    media = [f"{counts[kind]:,} {name}" for kind, name in (("image", "images"), ("audio", "clips")) if kind in counts]
    lines = [
        result["verdict"],
        f"data     {', '.join(result['data'])}: {counts['rows']:,} rows for {result['task']}"
        + (f", {counts['eval_rows']:,} for evaluation" if counts["eval_rows"] else "")
        + "".join(f", {told}" for told in media),
    ]
    if lengths := result["lengths"]:
        told = ", ".join(f"{name} {lengths['tokens'][name]:,}" for name in ("median", "p95", "max"))
        lines.append(f"tokens   {told} ({lengths['of']}); {lengths['trained_share']:.1%} are trained")
    for found in result["findings"]:
        lines += _lines_of(found)
    if result["train_command"]:
        lines.append(f"next     {result['train_command']}")
    return "\n".join(lines)


def _lines_of(found: dict) -> list[str]:
    detail = next(filter(None, found["details"]), "")
    lines = [f"{found['severity']:8} {found['code']} ({found['count']:,}): {found['title']}"]
    if found["rows"]:
        more = ", ..." if found["count"] > len(found["rows"]) else ""
        lines.append(f"         rows: {', '.join(found['rows'])}{more}" + (f" (first: {detail})" if detail else ""))
    elif detail:
        lines.append(f"         {detail}")
    lines += [f"         | {text}" for text in found.get("text", ()) if text]
    lines.append(f"         mend: {found['remedy']}" + (f"; {found['command']}" if found["command"] else ""))
    return lines
