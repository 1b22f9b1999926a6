"""Rows of any accepted format, tables and folders of media, written as one of the three forms that trainers take.

Nothing is lost in silence: rows that cannot be converted go to a file of their own with the reason, and columns that
are not carried over are told by name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import columns
from .demo import SAMPLES
from .errors import DataError, Fault, RowError, UsageError
from .folders import open_sources
from .media import MediaAccess, find_media
from .media_files import REMOTE, path_of
from .preferences import read_preference
from .rows import SOURCE, opened, read_row
from .scan import Progress
from .targets import TARGETS, messages_row, preference_row, prompt_completion_row
from .writing import Rejects, RowsWriter

MESSAGE_KEYS = {"role", "from", "content", "value", "reasoning", "reasoning_content", "thinking", "tool_calls",
                "function_call", "name", "tool_call_id", "train", "weight", "plain"}  # fmt: skip
MOST_KEPT = 1000  # column names that are remembered: those of a broken table are without end


@dataclass
class Tally:
    """What became of the rows."""

    rows: int = 0
    mapping: Counter = field(default_factory=Counter)  # (format, fields as JSON): rows
    notes: Counter = field(default_factory=Counter)
    codes: Counter = field(default_factory=Counter)  # of rejected rows
    first: RowError | None = None  # the first rejected row
    columns: dict = field(default_factory=dict)  # every column seen, in order
    unused: dict = field(default_factory=dict)
    lost: set = field(default_factory=set)  # keys of messages that nothing reads


def convert(config) -> dict:
    """Convert data into one file.

    Args:
        config: `data` (sources), `to` ("messages", "prompt-completion" or "preference"), `output` (.jsonl or .parquet),
            `overwrite`, `map` (such as ("user=question",)), `keep` (columns to carry over), `prompt` (the user's words
            for rows of a medium and its text), `allow_remote_media`, `media_root`.

    Returns:
        `status`, `output`, `to`, `rows_in`, `rows_out`, `rejected`, `rejected_file`, `reasons` (rows by code),
        `mapping` (a list of `{"format", "fields", "rows"}`), `not_carried_over`, `notes`, and a `summary` to print.

    Raises:
        UsageError: an output that exists, or a --map that fits no row.
        DataError: no such data, or none of it could be converted (the rejected rows are written all the same).
    """
    if config.to not in TARGETS:
        raise UsageError(f"--to {config.to}: choose from {', '.join(TARGETS)}")
    given = columns.read_map(tuple(config.map))
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    writer = RowsWriter(config.output, config.overwrite, access)
    if config.keep and writer.path.suffix.lower() == ".parquet":
        raise UsageError("--keep: a .parquet file has no place for other columns; write .jsonl")
    rejects = Rejects(writer.path, config.overwrite)
    rows, told = open_sources(list(config.data) or [str(SAMPLES / "train.jsonl")])
    _check_apart(rows, writer.path, rejects.path)
    tally = Tally()
    with Progress(len(rows), "converted") as progress, writer, rejects:
        for part in rows.parts:
            header = dict.fromkeys(getattr(part, "header", ()), "")  # a table's empty cells are columns, too
            for raw in part.read(0, len(part)):
                _one(raw if isinstance(raw, RowError) else header | raw, config, given, writer, rejects, tally)
                progress.add(1)
        _check_map(given, tally)
        rows.check_unchanged()
    if not writer.count:
        raise DataError(f"no row could be converted (all are in {rejects.path}), the first: {tally.first}")
    return _result(config, writer, rejects.path if rejects.count else None, tally, told)


def _check_apart(rows, *outputs: Path) -> None:
    """Refuse an output that is one of the data files: what cannot be converted would be gone."""
    files = {Path(part.place).resolve() for part in rows.parts}
    for output in outputs:
        if output.resolve() in files:
            raise UsageError(f"{output} is one of the data files, and would be written: write to another folder")


def _one(raw, config, given, writer: RowsWriter, rejects: RowsWriter, tally: Tally) -> None:
    """Convert one row, or write it to the rejected ones."""
    tally.rows += 1
    wanted = {column for _, column in given}
    try:
        if isinstance(raw, RowError):
            raise raw
        with opened(raw, "row") as (name, folder, fields):
            tally.columns |= dict.fromkeys(fields if len(tally.columns) < MOST_KEPT else fields.keys() & wanted)
            plan = columns.plan(fields, given)
            row, notes = columns.reshaped({**fields, SOURCE: (name, folder)}, plan, config.prompt)
            _check_said(row, plan)
            row, more = _target(row, config.to, writer.access)
            row |= {key: fields[key] for key in config.keep if key in fields and key not in row}
        writer.write(row)
    except DataError as problem:
        code = getattr(problem, "code", "bad_value")
        error = problem if isinstance(problem, RowError) else RowError(name, str(problem), code)
        tally.first = tally.first or error
        tally.codes[error.code] += 1
        rejects.write({"row": error.row, "reason": error.reason, "code": error.code, "data": _shown(raw)})
    else:
        tally.mapping[plan.format, json.dumps(plan.told(), ensure_ascii=False)] += 1
        tally.notes.update(set(notes + more))
        if len(tally.unused) < MOST_KEPT:
            tally.unused |= dict.fromkeys(key for key in plan.unused if key not in config.keep)
        tally.lost |= {key for key in _message_keys(fields) if key not in MESSAGE_KEYS}


def _check_said(row: dict, plan: columns.Plan) -> None:
    """Refuse a row of a table whose question or answer is an empty cell."""
    for target, name in (("assistant", "completion"), ("completion",) * 2, ("chosen",) * 2, ("rejected",) * 2,
                         ("user", "prompt"), ("prompt",) * 2):  # fmt: skip
        if target in plan.fields and row.get(name) == "":
            told = columns._words(list(plan.fields[target]))
            raise Fault("missing_field", f"its {name} is empty (column: {told})")


def _message_keys(fields: Mapping) -> set[str]:
    talks = (fields.get(key) for key in ("messages", "conversations", "prompt", "chosen", "rejected"))
    return {str(key) for talk in talks if isinstance(talk, list) for m in talk if isinstance(m, Mapping) for key in m}


def _target(row: dict, to: str, access: MediaAccess) -> tuple[dict, list[str]]:
    """(the row as it is to be written, notes); raises Fault, RowError or MediaError."""
    notes = []
    if "chosen" in row and "rejected" in row:
        pair = read_preference(row)
        kept, sides = pair.chosen, (pair.chosen, pair.rejected)
        if to != "preference":
            notes.append("the chosen answer was taken, the rejected one left out")
            sides = (kept,)
    elif to == "preference":
        raise Fault("wrong_task", "a preference row needs two answers: chosen and rejected")
    else:
        kept = read_row(row)
        sides = (kept,)
    media = [medium.value for side in sides for medium in side.media]
    for value in media:
        find_media(value, kept.folder, MediaAccess(access.root, remote=True))
    if any(REMOTE.match(path_of(value) or "") for value in media):
        notes.append("media named by a URL")
    if to == "preference":
        return preference_row(pair), notes
    if to == "messages":
        return messages_row(kept), notes
    if any(message["role"] == "assistant" and message.get("train", True) for message in kept.messages[:-1]):
        notes.append("earlier answers became context")
    return prompt_completion_row(kept), notes


def _check_map(given, tally: Tally) -> None:
    missing = [f"{target}={column}" for target, column in given if column not in tally.columns]
    if missing and tally.columns:
        raise UsageError(f"--map {' '.join(missing)}: no row has such a column; {columns._columns(tally.columns)}")


def _shown(value):
    """A row as it was, for the file of rejected ones: bytes and arrays are only named."""
    if isinstance(value, RowError):
        return None  # what could not even be read; its name tells the place
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return {str(key): _shown(item) for key, item in value.items() if key != SOURCE}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


# ---- the result


def _result(config, writer: RowsWriter, rejected: Path | None, tally: Tally, told: list[str]) -> dict:
    result = {
        "status": "done",
        "output": str(writer.path),
        "to": config.to,
        "rows_in": tally.rows,
        "rows_out": writer.count,
        "rejected": tally.rows - writer.count,
        "rejected_file": str(rejected) if rejected else None,
        "reasons": dict(tally.codes.most_common()),
        "mapping": [
            {"format": format, "fields": json.loads(fields), "rows": rows}
            for (format, fields), rows in tally.mapping.most_common()
        ],
        "not_carried_over": list(tally.unused),
        "message_fields_not_read": sorted(tally.lost),
        "notes": told + [f"{rows:,} rows: {note}" for note, rows in sorted(tally.notes.items())],
    }
    return result | {"summary": _summary(result, tally)}


def _summary(result: dict, tally: Tally) -> str:
    """The result in a few lines for a person."""
    lines = [f"converted  {result['rows_out']:,} of {result['rows_in']:,} rows to {result['to']}: {result['output']}"]
    for entry in result["mapping"][:5]:
        fields = ", ".join(f"{k}={'+'.join([v] if isinstance(v, str) else v)}" for k, v in entry["fields"].items())
        lines.append(f"mapping    {entry['rows']:,} rows as {entry['format']}: {fields}")
    if more := len(result["mapping"]) - 5:
        lines += [f"mapping    and {more} more"] if more > 0 else []
    if result["rejected"]:
        reasons = ", ".join(f"{rows:,} {code}" for code, rows in result["reasons"].items())
        lines.append(f"rejected   {result['rejected']:,} rows, see {result['rejected_file']}: {reasons}")
        lines.append(f"           the first: {tally.first}")
    if unused := list(tally.unused):
        lines.append(f"left out   columns not carried over: {columns._words(unused)}")
    if tally.lost:
        lines.append(f"left out   fields of messages that nothing reads: {columns._words(sorted(tally.lost))}")
    return "\n".join(lines + [f"note       {note}" for note in result["notes"]])
