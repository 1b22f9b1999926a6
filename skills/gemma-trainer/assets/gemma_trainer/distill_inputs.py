"""What distill_dataset.py is told: flags that fit together, rules, topics and rubrics from their files."""

from __future__ import annotations

import json
import math
from pathlib import Path

from .answer_checks import read_checks, schema_validator
from .answer_filters import Rules
from .errors import DataError, Fault, UsageError
from .files import user_path
from .judging import RUBRIC
from .metadata import is_reward_model


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
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    for name in ("retries", "temperature", "price_in", "price_out", "min_margin", "seed"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 0, got {value}")
    if (config.price_in is None) != (config.price_out is None) or (config.max_cost and config.price_in is None):
        raise UsageError("--price-in, --price-out (per million tokens) belong together, and --max-cost needs both")
    if config.pairs and config.samples < 2:
        raise UsageError("--pairs needs --samples of 2 or more: a pair is two answers to one prompt")
    if config.pairs and config.keep:
        raise UsageError("--keep is for rows, --pairs writes the best and the worst answer: give one of them")
    if not config.judge and (config.keep == "best" or config.min_score is not None or config.min_margin):
        raise UsageError("--keep best, --min-score and --min-margin need a --judge")
    if config.min_margin and not config.pairs:
        raise UsageError("--min-margin needs --pairs")
    if config.min_score is not None and not math.isfinite(config.min_score):
        raise UsageError(f"--min-score must be a number, got {config.min_score}")
    if (config.rubric or config.judge_model) and (not config.judge or is_reward_model(Path(config.judge))):
        raise UsageError("--rubric and --judge-model are for a --judge that is asked in words: no reward model")


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
            schema_validator(schema).is_valid({})  # which also finds a schema that refers to itself alone
            _find_refs(schema)
        except OSError as problem:
            raise DataError(f"--json-schema {config.json_schema}: {problem.strerror}") from None
        except Exception as problem:  # jsonschema's errors, and those of what is no UTF-8
            if isinstance(problem, UsageError):
                raise
            told = (str(problem).splitlines() or [""])[0][:100]
            raise DataError(f"--json-schema {config.json_schema}: no JSON Schema ({told})") from None
    return Rules(checks, config.drop_refusals, schema)


def _find_refs(schema: dict) -> None:
    """Look up what a schema refers to, before an answer does; raises referencing.exceptions.Unresolvable."""
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import DRAFT202012

    resource = DRAFT202012.create_resource(schema)
    resolver = REGISTRY.with_resource(resource.id() or "", resource).resolver(resource.id() or "")
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            resolver.lookup(part["$ref"])
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


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
