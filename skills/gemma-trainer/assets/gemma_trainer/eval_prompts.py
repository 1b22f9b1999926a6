"""The prompts that a model in training answers: read from a file, each with what its answer is checked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from . import sources
from .answer_checks import Check, read_checks
from .errors import DataError, Fault, MediaError, RowError
from .generation import Question
from .media import find_media
from .preferences import read_preference
from .rows import read_row, without_none

MAX_PROMPTS = 2000  # more is a data set, which would be answered for hours


@dataclass
class Prompt:
    """A question with the checks of its answer. `name` tells it from others: its `id`, or file and line."""

    name: str
    question: Question
    checks: list[Check]


def read_prompts(file: str) -> list[Prompt]:
    """Read a prompts file, in any format of rows; a row may have `checks` (see `answer_checks.CHECKS`) and an `id`.
    Of a preference pair the chosen answer is the expected one.

    Example, two lines of a .jsonl file:
        {"messages": [{"role": "user", "content": "Anna is 7, in JSON"}], "checks": {"required_fields": ["age"]}}
        {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}], "completion": "Good morning.",
         "checks": {"max_wer": 0.2}}

    Raises:
        DataError: no such file, no rows, or more than MAX_PROMPTS.
        RowError: a prompt, or a check of it, that cannot be used.
    """
    rows = sources.open_rows([file])
    if len(rows) > MAX_PROMPTS:
        raise DataError(f"{file}: {len(rows):,} prompts, at most {MAX_PROMPTS:,} are answered")
    table = file.endswith(".parquet")
    prompts = [read_prompt(rows[index], rows.name(index), table) for index in range(len(rows))]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise RowError(prompt.question.row.name, f"its id {prompt.name!r} is that of another prompt", "bad_value")
        seen.add(prompt.name)
    return prompts


def unanswerable(prompts: list[Prompt], collator) -> list[tuple[str, str]]:
    """(row, reason) for each prompt that will not be answered, as far as can be told without opening its media."""
    found = []
    for prompt in prompts:
        row = prompt.question.row
        try:
            for medium in row.media:
                find_media(medium.value, row.folder, collator.access)
            measured = collator.measure([read_row(prompt.question.answered(), row.name)])[0]
            if isinstance(measured, RowError):
                raise measured
            if measured.kept < measured.tokens.shape[1]:
                found.append((row.name, "longer than --max-len"))
        except MediaError as problem:
            found.append((row.name, str(problem)))
        except RowError as problem:
            found.append((row.name, problem.reason))
    return found


def read_prompt(raw: Mapping, name: str, table: bool = False) -> Prompt:
    """A row as a prompt; `table` where it comes from a parquet file. Raises RowError."""
    raw = dict(raw)
    given, own = raw.pop("checks", None), raw.pop("id", None)
    if "chosen" in raw and "rejected" in raw:
        row = read_preference(raw, name).chosen
    elif "prompt" in raw and raw.get("completion") is None:  # a prompt alone, which is no row to train on
        asked = raw.pop("prompt")
        row = read_row(
            raw | {"messages": [{"role": "user", "content": asked}] if isinstance(asked, str) else asked}, name
        )
    else:
        row = read_row(raw, name)
    question = Question.of(row)
    try:
        if isinstance(given, str):
            given = json.loads(given)
        if table:  # Arrow fills what other rows have with None
            given = without_none(given)
        elif isinstance(given, Mapping):
            given = {key: value for key, value in given.items() if value is not None}
        return Prompt(str(own if own is not None else row.name), question, read_checks(given, question.expected))
    except Fault as problem:
        raise RowError(row.name, str(problem), problem.code) from None
    except ValueError:
        raise RowError(row.name, "checks are a text that is not JSON", "bad_check") from None
