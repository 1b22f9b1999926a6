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
from .checks import CONTROL, check_pair
from .errors import DataError, Fault, MediaError, RowError
from .inspection import content_key, inspect
from .media import MediaAccess, open_audio, open_image
from .media_files import path_of
from .preferences import Preference
from .rows import ROLES, SOURCE, THOUGHT, Row, opened, without_none
from .scan import scan
from .slots import Media
from .survey import open_data
from .tally import identify, main_row, read_entry
from .targets import messages_row, preference_row
from .text_rows import read_turns
from .writing import TALKS, RowsWriter, replace_media

RATE = 16_000  # samples a second that every Gemma hears
MORE_ROLES = {"ai": "assistant", "chatbot": "assistant", "prompter": "user", "instructor": "user", "customer": "user"}
PLAIN = ("instruction", "input", "output", "system", "text")  # columns of plain text, beside those of TALKS
TURN_HEADS = re.compile(r"(?:<\|turn>|<start_of_turn>)(?:system|developer|user|model|assistant)\n")
TOLD = {
    "none_keys": "rows without their empty (None) keys",
    "roles": "rows whose roles have their usual names",
    "arguments": "rows whose tool arguments are an object, not JSON text",
    "control_text": "rows without control tokens in their text",
    "images_upright": "images turned upright as their EXIF says",
    "clips_converted": f"clips converted to {RATE} Hz, one channel",
    "duplicates": "copies of rows left out",
    "equal_answers": "pairs left out whose answers are equal",
}


def fix(config) -> dict:
    """What `dataset_prep.py fix` does: mend rows, leave copies out, and put aside what cannot be read.

    Args:
        config: `data`, `output` (.jsonl or .parquet), `overwrite`, `num_workers`, and what media may be opened.

    Raises:
        UsageError: an output that exists.
        DataError: no such data, or nothing of it can be read.
    """
    writer = RowsWriter(config.output, config.overwrite)
    rejected = writer.path.with_name(f"{writer.path.stem}.rejected.jsonl")
    names, rows, count = open_data(config, evaluation=False)
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    mender = Mender(rows, access, writer.path.suffix.lower() == ".parquet")
    changes, seen, codes, first = Counter(), set(), Counter(), ""
    with writer, RowsWriter(rejected, overwrite=True) as rejects:
        for mended in scan(mender, count, config.num_workers, "mended"):
            for row in mended:
                if row.key in seen:
                    changes["duplicates"] += 1
                elif row.error:
                    codes[row.error.code] += 1
                    first = first or str(row.error)
                    rejects.write({"row": row.error.row, "reason": row.error.reason, "code": row.error.code})
                else:
                    seen.add(row.key)
                    changes.update(row.changes)
                    if row.fields is not None:
                        writer.write(row.fields)
    if not rejects.count:
        rejected.unlink(missing_ok=True)  # that of an earlier run
    if not writer.count:
        raise DataError(f"no row can be read (see {rejected}), the first: {first}")
    result = {
        "status": "done",
        "demo": not config.data,
        "output": str(writer.path),
        "rows_in": count,
        "rows_out": writer.count,
        "changes": {name: changes[name] for name in TOLD if changes[name]},
        "rejected": sum(codes.values()),
        "rejected_file": str(rejected) if codes else None,
        "reasons": dict(codes.most_common()),
    }
    return result | {"summary": _summary(result, first)}


@dataclass
class Mended:
    """A row after mending. `fields` is None where it is left out, which `changes` counts; `key` is the same for rows
    that are the same."""

    fields: dict | None = None
    key: int = 0
    changes: Counter = field(default_factory=Counter)
    error: RowError | None = None


@dataclass
class Mender:
    """Mends the rows of a piece: `mender(start, stop)`. Picklable.

    Args:
        rows: a `sources.Rows`.
        canonical: write rows in their canonical form, as a .parquet file needs them; else they keep their own.
    """

    rows: object
    access: MediaAccess
    canonical: bool = False

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
            if isinstance(entry, Preference) and any(code == "equal_answers" for code, _ in check_pair(entry)):
                return Mended(None, whole, Counter(equal_answers=1))
            if self.canonical:
                with opened(fields, row.name):
                    fields = preference_row(entry) if isinstance(entry, Preference) else messages_row(entry)
            if media:
                fields = replace_media(fields, lambda value, kind: self._better(value, kind, row, media))
            return Mended(fields, whole, changes)
        except RowError as problem:
            return Mended(error=problem)

    def _mend_medium(self, medium: Media, row: Row, changes: Counter) -> tuple[int, dict | None]:
        """(a hash of a medium's content, the medium as it should be, or None where it can stay)."""
        try:
            facts = inspect(medium, row.folder, self.access, RATE)
            codes = {code for code, _ in facts.notes}
            if "image_rotated" in codes:
                changes["images_upright"] += 1
                return facts.key, _upright(open_image(medium.value, row.folder, self.access), medium.value)
            if codes & {"audio_resampled", "audio_channels"}:
                changes["clips_converted"] += 1
                samples, _ = open_audio(medium.value, RATE, None, row.folder, self.access)
                return facts.key, _flac(samples)
            return facts.key, None
        except MediaError as problem:
            if problem.code == "media_remote":  # it may be there for those who may fetch it
                return duplicates.keys_of([str(medium.value)])[0], None
            raise RowError(row.name, str(problem), problem.code) from None

    def _better(self, value, kind: str, row: Row, media: dict[int, dict]):
        try:
            return media.get(content_key(value, row.folder, self.access), value)
        except MediaError:
            return value


def _upright(image, value) -> dict:
    """An upright image as the content of a file: JPEG stays JPEG."""
    place, file = path_of(value) or "", io.BytesIO()
    if place.lower().endswith((".jpg", ".jpeg")):
        image.save(file, "JPEG", quality=95, subsampling=0)
    else:
        image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


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
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(value)  # as tables hold it
        if isinstance(value, list):
            fields[key] = [_mend_message(message, done) for message in value]
        elif isinstance(value, Mapping):
            fields[key] = _mend_message(value, done)
    for key in (*PLAIN, *TALKS):
        if isinstance(fields.get(key), str):
            fields[key] = _mend_string(fields[key], done)
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
    for key in ("content", "value", "reasoning", "reasoning_content"):
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
    except json.JSONDecodeError:
        return call
    if not isinstance(arguments, dict):
        return call
    done.add("arguments")
    changed = {**inner, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _mend_string(text: str, done: set[str]) -> str:
    """A text without control tokens; a thought that a model's answer begins with stays, and so do whole turns."""
    if "<" not in text or not CONTROL.search(text):
        return text
    thought = THOUGHT.match(text)
    start = thought.end() if thought else 0
    try:
        if read_turns(text):
            return text
    except Fault:  # turns that cannot be told apart
        return text
    mended = CONTROL.sub("", TURN_HEADS.sub("", text[start:]))
    if mended != text[start:]:
        done.add("control_text")
        mended = mended if start else mended.strip()
    return text[:start] + mended


def _has_none(value) -> bool:
    if isinstance(value, Mapping):
        return any(item is None or _has_none(item) for key, item in value.items() if key != SOURCE)
    return isinstance(value, list) and any(map(_has_none, value[:100]))


def _summary(result: dict, first: str) -> str:
    lines = [f"mended   {result['rows_out']:,} of {result['rows_in']:,} rows: {result['output']}"]
    lines += [f"         {count:,} {TOLD[name]}" for name, count in result["changes"].items()]
    if not result["changes"]:
        lines.append("         nothing was to be mended")
    if result["rejected"]:
        reasons = ", ".join(f"{count:,} {code}" for code, count in result["reasons"].items())
        lines.append(f"rejected {result['rejected']:,} rows ({reasons}): {result['rejected_file']}")
        lines.append(f"         the first: {first}")
    return "\n".join(lines)
