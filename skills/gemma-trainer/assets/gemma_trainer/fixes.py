"""What is safe to mend in a data set without asking: each row as it was, but for what is certainly not meant."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import duplicates
from .checks import CONTROL, check_pair, check_structure
from .errors import DataError, Fault, MediaError, RowError, UsageError
from .inspection import content_key, inspect
from .media import MediaAccess, _content, open_audio, open_image
from .media_files import suffix_of
from .preferences import Preference
from .rows import ROLES, SOURCE, THOUGHT, Row, without_none
from .scan import scan
from .slots import Media
from .survey import open_data
from .tally import identify, main_row, read_entry
from .text_rows import read_turns
from .writing import TALKS, Rejects, RowsWriter, refuse_inputs, replace_media

DROPPED = (  # what a row can be left out for
    "no_answer", "assistant_first", "ends_without_answer", "repeated_role", "empty_answer", "empty_message",
    "call_without_result", "unfilled_placeholder", "equal_answers", "negative_margin",
)  # fmt: skip
RATE = 16_000  # samples a second that every Gemma hears
MORE_ROLES = {"ai": "assistant", "chatbot": "assistant", "prompter": "user", "instructor": "user", "customer": "user"}
PLAIN = ("instruction", "input", "output", "system", "text")  # columns of plain text, beside those of TALKS
TURN_HEADS = re.compile(r"(?:<\|turn>|<start_of_turn>)(?:(?:system|developer|user|model|assistant)\b[ \t]*\n?)?")
TURN_ENDS = re.compile(r"(?:<turn\|>|<end_of_turn>)\n?")
AT_START = re.compile(rf"\A(?:{CONTROL.pattern})\n?")
AT_END = re.compile(rf"\s*(?:{CONTROL.pattern})\s*\Z")
THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
TOLD = {
    "none_keys": "rows without their empty (None) keys",
    "roles": "rows whose roles have their usual names",
    "arguments": "rows whose tool arguments are an object, not JSON text",
    "control_text": "rows without stray control tokens",
    "thoughts": "rows whose <think> is their reasoning",
    "images_upright": "images turned upright as their EXIF says",
    "clips_converted": f"clips converted to {RATE} Hz, one channel",
    "duplicates": "copies of rows left out",
    "equal_answers": "pairs left out whose answers are equal",
}


def fix(config) -> dict:
    """What `dataset_prep.py fix` does: mend rows, leave copies out, and put aside what cannot be read.

    Args:
        config: `data`, `output` (.jsonl), `drop` (codes of findings whose rows are left out), `overwrite`,
            `num_workers`, and what media may be opened.

    Raises:
        UsageError: an output that exists or is read, or a code that no row can have.
        DataError: no such data, or no row is left.
    """
    writer = RowsWriter(config.output, config.overwrite)
    if writer.path.suffix.lower() != ".jsonl":
        raise UsageError(f"--output {writer.path}: fix writes .jsonl, which convert makes a .parquet file of")
    if unknown := [code for code in config.drop if code not in DROPPED]:
        raise UsageError(f"--drop {unknown[0]}: choose from {', '.join(DROPPED)}")
    rejects = Rejects(writer.path, config.overwrite)
    refuse_inputs(list(config.data), writer.path, rejects.path)  # what is put aside stays in the data
    names, rows, count = open_data(config, evaluation=False)
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    mender = Mender(rows, access, frozenset(config.drop))
    changes, seen, codes, first = Counter(), set(), Counter(), ""
    with writer, rejects:
        for mended in scan(mender, count, config.num_workers, "mended"):
            for row in mended:
                error = row.error
                if error is None and row.key in seen:
                    changes["duplicates"] += 1
                elif error is None:
                    seen.add(row.key)
                    error = _keep(row, writer, changes)
                if error is not None:
                    codes[error.code] += 1
                    first = first or str(error)
                    rejects.write({"row": error.row, "reason": error.reason, "code": error.code})
        rows.check_unchanged()
    if not writer.count:
        first = f"the first that cannot be read: {first}" if first else "all were left out"
        raise DataError(f"none of {count:,} rows is left ({first})")
    result = {
        "status": "done",
        "demo": not config.data,
        "output": str(writer.path),
        "rows_in": count,
        "rows_out": writer.count,
        "changes": {name: changes[name] for name in TOLD if changes[name]},
        "dropped": {code: changes[code] for code in config.drop if changes[code]},
        "rejected": sum(codes.values()),
        "rejected_file": str(rejects.path) if codes else None,
        "reasons": dict(codes.most_common()),
    }
    return result | {"summary": _summary(result, first)}


def _keep(row: Mended, writer: RowsWriter, changes: Counter) -> RowError | None:
    """Write a mended row, if it is not one to leave out; returns why it cannot be written."""
    if row.fields is not None:
        try:
            writer.write(row.fields)
        except DataError as problem:  # a medium that is gone, or bytes in a column of no medium
            return RowError(row.name, str(problem), getattr(problem, "code", "bad_value"))
    changes.update(row.changes)
    return None


@dataclass
class Mended:
    """A row after mending. `fields` is None where it is left out, which `changes` counts; `key` is the same for rows
    that are the same."""

    name: str
    fields: dict | None = None
    key: int = 0
    changes: Counter = field(default_factory=Counter)
    error: RowError | None = None


@dataclass
class Mender:
    """Mends the rows of a piece of `rows`, a `sources.Rows`: `mender(start, stop)`. Picklable."""

    rows: object
    access: MediaAccess
    drop: frozenset[str] = frozenset()

    def __call__(self, start: int, stop: int) -> list[Mended]:
        return [self._mend(position, raw) for position, raw in enumerate(self.rows.read(start, stop), start)]

    def _mend(self, position: int, raw) -> Mended:
        try:
            if isinstance(raw, RowError):
                raise raw
            changes: Counter = Counter()
            fields = mend_text(raw, changes)
            entry = read_entry(fields, f"row {position}")
            row = main_row(entry)
            keys, media = [], {}
            for medium in entry.media:
                key, better = self._mend_medium(medium, row, changes)
                keys.append(key)
                if better is not None:
                    media[key] = better
            whole = identify(entry, keys)[0]
            if left_out := self._left_out(fields, entry):
                return Mended(row.name, None, whole, Counter([left_out]))
            if media:
                fields = replace_media(fields, lambda value, kind: self._better(value, kind, row, media))
            return Mended(row.name, fields, whole, changes)
        except RowError as problem:
            return Mended(problem.row, error=problem)

    def _left_out(self, fields: Mapping, entry: Row | Preference) -> str | None:
        """The code for which a row is left out, if it is."""
        notes = {code for code, _ in check_pair(entry)} if isinstance(entry, Preference) else set()
        if "equal_answers" in notes:
            return "equal_answers"
        if self.drop:
            notes |= {code for code, _ in check_structure(fields, main_row(entry))}
        return next(iter(sorted(notes & self.drop)), None)

    def _mend_medium(self, medium: Media, row: Row, changes: Counter) -> tuple[int, dict | None]:
        """(a hash of a medium's content, the medium as it should be, or None where it can stay)."""
        try:
            facts = inspect(medium, row.folder, self.access, RATE)
            codes = {code for code, _ in facts.notes}
            if "image_rotated" in codes:
                changes["images_upright"] += 1
                return facts.key, self._upright(medium, row)
            if codes & {"audio_resampled", "audio_channels"}:
                changes["clips_converted"] += 1
                samples, _ = open_audio(medium.value, RATE, None, row.folder, self.access)
                return facts.key, _flac(samples)
            return facts.key, None
        except MediaError as problem:
            if problem.code == "media_remote":  # it may be there for those who may fetch it
                return duplicates.keys_of([str(medium.value)])[0], None
            raise RowError(row.name, str(problem), problem.code) from None

    def _upright(self, medium: Media, row: Row) -> dict:
        """An upright image as the content of a file: JPEG stays JPEG."""
        content, file = _content(medium.value, row.folder, self.access), io.BytesIO()
        start = content[:16] if isinstance(content, bytes) else content.open("rb").read(16)
        image = open_image(medium.value, row.folder, self.access)
        if suffix_of(start) == ".jpg":
            image.save(file, "JPEG", quality=95, subsampling=0)
        else:
            image.save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    def _better(self, value, kind: str, row: Row, media: dict[int, dict]):
        try:
            return media.get(content_key(value, row.folder, self.access), value)
        except MediaError:
            return value


def _flac(samples) -> dict:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), RATE, format="FLAC", subtype="PCM_16")
    return {"bytes": file.getvalue(), "path": None}


# ---- text


def mend_text(raw: Mapping, changes: Counter) -> dict:
    """A copy of a row with its text and structure mended; what was done is counted by the names of TOLD."""
    fields = without_none(raw)
    done = {"none_keys"} if _has_none(raw) else set()
    for key in TALKS:
        value = fields.get(key)
        if key in ("messages", "conversations") and isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)  # as tables hold it
        if isinstance(value, list):
            fields[key] = [_mend_message(message, done) for message in value]
        elif isinstance(value, Mapping):
            fields[key] = _mend_message(value, done)
    for key in (*PLAIN, *TALKS):
        if isinstance(fields.get(key), str):
            fields[key] = (_mend_prompt if key == "prompt" else _mend_string)(fields[key], done)
    changes.update(done)
    return fields


def _mend_message(message, done: set[str]):
    if not isinstance(message, Mapping):
        return message
    message = dict(message)
    for key in ("role", "from"):
        if isinstance(role := message.get(key), str):
            usual = role.strip().lower()
            usual = MORE_ROLES.get(usual, usual)
            usual = ROLES.get(usual, role) if key == "role" or usual not in ROLES else usual  # `from` has its own names
            done |= {"roles"} if usual != role else set()
            message[key] = usual
    _split_think(message, done)
    for key in ("content", "value", "reasoning", "reasoning_content", "thinking"):
        if isinstance(message.get(key), str):
            message[key] = _mend_string(message[key], done)
        elif isinstance(message.get(key), list):
            message[key] = [_mend_block(block, done) for block in message[key]]
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_mend_call(call, done) for call in message["tool_calls"]]
    return message


def _mend_block(block, done: set[str]):
    if isinstance(block, Mapping) and isinstance(block.get("text"), str):
        return {**block, "text": _mend_string(block["text"], done)}
    return _mend_string(block, done) if isinstance(block, str) else block


def _mend_call(call, done: set[str]):
    """A call whose arguments are an object, if they are the JSON text of one."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("arguments"), str):
        return call
    try:
        arguments = json.loads(inner["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    done.add("arguments")
    changed = {**inner, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _mend_string(text: str, done: set[str]) -> str:
    """A text without stray control tokens: those of turns wherever they stand, others at its beginning and end.

    Elsewhere a token may be what the text is about. A thought that an answer begins with stays, and so do whole turns.
    """
    if "<" not in text or not CONTROL.search(text):
        return text
    thought = THOUGHT.match(text)
    head, mended = (text[: thought.end()], text[thought.end() :]) if thought else ("", text)
    if not head and _turns_of(text):
        return text
    while (shorter := _without_strays(mended)) != mended:  # what is left may spell a token again
        mended = shorter
        done.add("control_text")
    return head + mended


def _without_strays(text: str) -> str:
    for stray in (TURN_HEADS, TURN_ENDS, AT_START, AT_END):
        text = stray.sub("", text)
    return text


def _turns_of(text: str) -> list[tuple[str, str]]:
    try:
        return read_turns(text)
    except Fault:  # turns that cannot be told apart
        return [("", "")]


def _mend_prompt(text: str, done: set[str]):
    """A prompt; one that spells out whole turns becomes messages."""
    turns = _turns_of(text) if "<" in text else []
    if turns and all(role in ROLES for role, _ in turns):
        done.add("control_text")
        return [{"role": ROLES[role], "content": said} for role, said in turns]
    return _mend_string(text, done)


def _split_think(message: dict, done: set[str]) -> None:
    """Read the `<think>...</think>` that an answer begins with, as other models write it, as reasoning."""
    key = "content" if "content" in message else "value"
    speaks = ROLES.get(str(message.get("role") or message.get("from"))) == "assistant"
    found = THINK.match(message[key]) if speaks and isinstance(message.get(key), str) else None
    if found and not any(message.get(name) for name in ("reasoning", "reasoning_content", "thinking")):
        message[key] = message[key][found.end() :]
        if found[1].strip():
            message["reasoning"] = found[1].strip()
        done.add("thoughts")


def _has_none(value) -> bool:
    if isinstance(value, Mapping):
        return any(item is None or _has_none(item) for key, item in value.items() if key != SOURCE)
    return isinstance(value, list) and any(map(_has_none, value[:100]))


def _summary(result: dict, first: str) -> str:
    lines = [f"written  {result['rows_out']:,} of {result['rows_in']:,} rows: {result['output']}"]
    lines += [f"mended   {count:,} {TOLD[name]}" for name, count in result["changes"].items()]
    lines += [f"left out {count:,} rows with {code}" for code, count in result["dropped"].items()]
    if not result["changes"]:
        lines.append("mended   nothing")
    if result["rejected"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in result["reasons"].items())
        lines.append(f"rejected {result['rejected']:,} rows ({reasons}): {result['rejected_file']}")
        lines.append(f"         the first: {first}")
    return "\n".join(lines)
