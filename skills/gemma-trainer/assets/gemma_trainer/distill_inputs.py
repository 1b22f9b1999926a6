"""What distill_dataset.py is told: flags that fit together, rules, topics and rubrics from their files."""

from __future__ import annotations

import json

from .answer_checks import _schema, read_checks
from .answer_filters import Rules
from .errors import DataError, Fault, UsageError
from .files import user_path
from .judging import RUBRIC, is_reward_model


def check_flags(config) -> None:
    """Refuse flags that mean nothing, or not together."""
    if not config.teacher:
        raise UsageError("--teacher is needed: the URL of a server, or a model's hub id or folder (run folders, too)")
    if not config.output and not config.dry_run:
        raise UsageError("--output FILE says where the rows go: a .jsonl or .parquet file")
    if config.resume and config.overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite throws it away: give one of them")
    for name in ("samples", "concurrency", "timeout", "requests_per_minute", "tokens_per_minute", "max_cost", "count"):
        value = getattr(config, name, None)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    for name in ("retries", "temperature", "price_in", "price_out", "min_chars", "min_margin", "seed"):
        value = getattr(config, name)
        if value is not None and not value >= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
    if config.max_cost and not (config.price_in or config.price_out):
        raise UsageError("--max-cost needs --price-in and --price-out, per million tokens")
    if config.pairs and config.samples < 2:
        raise UsageError("--pairs needs --samples of 2 or more: a pair is two answers to one prompt")
    if not config.judge and (config.keep == "best" or config.min_score is not None):
        raise UsageError("--keep best and --min-score need a --judge")
    if config.judge and config.rubric and is_reward_model(config.judge):
        raise UsageError("--rubric is for a judge that is asked in words, and not for a reward model")


def read_rules(config) -> Rules:
    """The rules that flags make; raises UsageError."""
    checks = _json_flag(config.check, "--check") if config.check else None
    try:
        read_checks(checks, "0") if checks else None
    except Fault as problem:
        raise UsageError(f"--check: {problem}") from None
    schema = None
    if config.json_schema:
        try:
            schema = _json_flag(user_path(config.json_schema).read_text(encoding="utf-8"), "--json-schema")
            _schema(schema)
        except OSError as problem:
            raise DataError(f"--json-schema {config.json_schema}: {problem.strerror}") from None
        except Exception as problem:  # jsonschema's errors, and those of what is no UTF-8
            if isinstance(problem, UsageError):
                raise
            told = (str(problem).splitlines() or [""])[0][:100]
            raise DataError(f"--json-schema {config.json_schema}: no JSON Schema ({told})") from None
    return Rules(checks, config.min_chars, config.max_chars, config.drop_refusals, schema, config.repair)


def _json_flag(text: str, name: str) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{name} must be a JSON object")
    return found


def read_topics(name: str) -> list[str]:
    """The topics of a file, one a line; raises DataError."""
    try:
        text = user_path(name).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise DataError(f"{name}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: text that is not UTF-8") from None
    topics = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not topics:
        raise DataError(f"{name}: no topics there, which stand one a line")
    return topics


def read_rubric(config) -> str:
    """What the judge is told; raises DataError."""
    if config.rubric is None:
        return RUBRIC
    try:
        return user_path(config.rubric).read_text(encoding="utf-8")
    except OSError as problem:
        raise DataError(f"--rubric {config.rubric}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"--rubric {config.rubric}: text that is not UTF-8") from None
