"""What a teacher said, turned into rows or pairs and into a record of how they came about."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .answer_filters import Candidate, Tally, chosen, message_of, pair_of
from .asked import Asked
from .errors import DataError, Fault, MediaError
from .files import user_path, write_whole
from .media import MediaAccess
from .preferences import Preference
from .rows import Row, read_messages
from .targets import messages_row, preference_row
from .writing import Rejects, RowsWriter

Answered = Sequence[tuple[Asked, list[Candidate]]]
LICENCE = "Answers of {model} are under its maker's terms; some forbid to train other models on them. Read them first."


@dataclass(frozen=True)
class Rejected:
    """A prompt without a row."""

    row: str
    code: str
    reason: str


@dataclass
class Harvest:
    """What became of the prompts. `dropped` counts answers by what was wrong with them, `unpaired` prompts by why they
    give no pair."""

    rows: int = 0
    dropped: Counter = field(default_factory=Counter)
    unpaired: Counter = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def write_rows(config, harvest: Harvest, answered: Answered, judged: bool) -> Path | None:
    """Write the rows or pairs in the order of the prompts, and beside them what was put aside.

    Returns:
        The file of what was put aside; None where nothing was.

    Raises:
        DataError: nothing is left to write; what was put aside is written all the same.
    """
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    again = config.overwrite or config.resume
    with RowsWriter(config.output, again, access) as writer, Rejects(user_path(config.output), again) as rejects:
        for asked, candidates in answered:
            harvest.dropped.update(candidate.fault for candidate in candidates if candidate.fault)
            _write_prompt(config, harvest, asked, candidates, judged, writer)
        for one in harvest.rejected:
            rejects.write({"row": one.row, "reason": one.reason, "code": one.code})
    harvest.rows = writer.count
    if not writer.count:
        codes = Counter(one.code for one in harvest.rejected)
        raise DataError(f"no row is left to write ({counted(codes)}); see {rejects.path}")
    return rejects.path if harvest.rejected else None


def _write_prompt(config, harvest: Harvest, asked: Asked, candidates: list[Candidate], judged: bool, writer) -> None:
    try:
        rows, missing = _rows(config, asked, candidates, judged)
        for row in rows:
            writer.write(row)
    except (Fault, MediaError) as problem:
        harvest.rejected.append(Rejected(asked.name, problem.code, str(problem)))
        return
    if rows:
        return
    if missing:
        harvest.unpaired[missing] += 1
    faults = Counter(candidate.fault for candidate in candidates if candidate.fault)
    code = missing if missing and missing != "none_passes" else next(iter(dict(faults.most_common(1))), "no_answer")
    told = ", ".join(f"{count} {fault}" for fault, count in faults.most_common())
    harvest.rejected.append(Rejected(asked.name, code, told or missing))


def _rows(config, asked: Asked, candidates: list[Candidate], judged: bool) -> tuple[list[dict], str]:
    """(the rows of a prompt, why it has no pair)."""
    keep_reasoning = config.reasoning == "keep"
    if not config.pairs:
        kept = chosen(candidates, config.keep or ("best" if judged else "first"))
        return [messages_row(answered_row(asked, one, keep_reasoning)) for one in kept], ""
    pair, missing = pair_of(candidates, judged, config.min_margin)
    if pair is None:
        return [], missing
    sides = [answered_row(asked, one, keep_reasoning) for one in pair]
    if judged:
        sides[0].margin = round(pair[0].score - pair[1].score, 6)
    return [preference_row(Preference(asked.name, *sides, len(asked.row.messages)))], ""


def answered_row(asked: Asked, candidate: Candidate, keep_reasoning: bool = True) -> Row:
    """A prompt with one of its answers."""
    message = message_of(candidate.reply, candidate.text, keep_reasoning)
    return replace(asked.row, messages=[*asked.row.messages, *read_messages([message], "assistant")])


# ---- the record


def record_path(output: Path) -> Path:
    """Where the record of rows is written."""
    return output.with_name(f"{output.stem}.distill.json")


def write_record(config, result: dict, settings: dict) -> Path:
    """Write `<stem>.distill.json` beside the rows: teacher, settings, counts and costs."""
    path = record_path(user_path(config.output))
    facts = {name: value for name, value in result.items() if name not in ("status", "summary", "record")}
    write_whole(path, json.dumps(facts | {"settings": settings}, indent=1, ensure_ascii=False) + "\n")
    return path


def counted(counts: dict[str, int]) -> str:
    """Counts for a reader, the highest first."""
    return ", ".join(f"{count:,} {code}" for code, count in Counter(counts).most_common())


def summary(result: dict) -> str:
    """The result in a few lines for a person."""
    kind = "pairs" if result["pairs"] else "rows"
    lines = [f"written  {result['rows']:,} {kind} of {result['prompts']:,} prompts: {result['output']}"]
    tokens = result["tokens"]
    cost = f", cost {result['cost']:.4f}" if result["cost"] is not None else ""
    about = f" (estimated for {tokens['estimated']:,} answers)" if tokens["estimated"] else ""
    answered = f"{result['requests']['answered']:,} answers of {result['teacher']['model']}"
    lines.append(f"teacher  {answered}, {tokens['in']:,} tokens in, {tokens['out']:,} out{about}{cost}")
    for name, counts in (
        ("dropped", result["dropped"]),
        ("no pair", result["unpaired"]),
        ("no row", result["reasons"]),
    ):
        if counts:
            lines.append(f"{name:9}{counted(counts)}" + (f": {result['rejected_file']}" if name == "no row" else ""))
    if result["json"]:
        lost = ", ".join(result["lost_fields"])
        lines.append(f"JSON     {counted(result['json'])}" + (f"; fields lost: {lost}" if lost else ""))
    if result["refusals"] and "refusal" not in result["dropped"]:
        lines.append(f"refusals {result['refusals']:,} answers decline; --drop-refusals leaves them out")
    if result["stopped_by"]:
        told = f"{result['requests']['not_asked']:,} requests were not made; --resume with a higher limit goes on"
        lines.append(f"stopped  by --{result['stopped_by'].replace('_', '-')}: {told}")
    return "\n".join([*lines, f"record   {result['record']}", f"note     {result['licence']}"])
