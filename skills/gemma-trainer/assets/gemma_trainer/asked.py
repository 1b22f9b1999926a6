"""Prompts that a teacher is to answer, read from text files and from rows of any format."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from . import sources
from .answer_checks import read_checks
from .errors import DataError, Fault, MediaError, RowError
from .files import user_path
from .inspection import inspect
from .media import MediaAccess
from .preferences import ASKING, read_preference
from .rows import SOURCE, Row, read_row, without_none
from .slots import blocks_of, is_blank


def hashed(text: str) -> str:
    """A text as 16 hexadecimal digits that tell it from others."""
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Asked:
    """A prompt: a row that ends with what is asked. `expected` is the answer that it brought, which was taken off;
    `checks` are those of its own; `media` are hashes of the content of its images and clips."""

    name: str
    row: Row
    expected: str | None = None
    checks: Mapping | None = None
    media: tuple[int, ...] = ()
    key: str = field(init=False)

    def __post_init__(self):
        spelled = json.dumps([self.row.messages, self.row.tools, self.media], sort_keys=True, default=str)
        object.__setattr__(self, "key", hashed(spelled))

    @property
    def text(self) -> str:
        """What is asked, in words; without the system's, which many prompts share."""
        return text_of([message for message in self.row.messages if message["role"] not in ("system", "developer")])


def text_of(messages: list[dict]) -> str:
    """The text of messages, without their media."""
    return "\n".join(b["text"] for m in messages for b in blocks_of(m["content"]) if b["type"] == "text")


def normalized(text: str) -> str:
    """A text as duplicates are told: without differences of case, white space and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def read_all(names: list[str], access: MediaAccess) -> Iterator[Asked | RowError]:
    """The prompts of files, in order, with the error in the place of one that cannot be asked.

    Args:
        names: .txt files of one prompt a line, or anything that `sources.open_rows` reads.

    Raises:
        DataError: no such file, or one without prompts.
    """
    for name in names:
        rows = _lines(user_path(name)) if name.lower().endswith(".txt") else _rows(name)
        for raw, place in rows:
            try:
                yield read_asked(raw, place, access)
            except RowError as problem:
                yield problem


def _lines(path: Path) -> Iterator[tuple[Mapping, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no such file: {path}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: text that is not UTF-8") from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from None
    if not text.strip():
        raise DataError(f"{path}: the file has no rows")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield {"prompt": line.strip()}, f"{path.name}:{number}"


def _rows(name: str) -> Iterator[tuple[Mapping | RowError, str]]:
    opened = sources.open_rows([name])
    for index, raw in enumerate(opened.read(0, len(opened))):
        yield raw, opened.name(index)


def read_asked(raw: Mapping | RowError, name: str, access: MediaAccess = MediaAccess()) -> Asked:
    """A row as a prompt: its last answer, if any, is put aside.

    Args:
        raw: a row of any format; also `{"prompt": ...}` or `{"instruction": ...}` alone, or a preference pair. It may
            have `checks` of the answer (see `answer_checks.CHECKS`).

    Raises:
        RowError: it asks nothing, its checks cannot be used, or a medium of it cannot be read.
    """
    if isinstance(raw, RowError):
        raise raw
    raw = without_none(dict(raw))
    checks = _checks(raw.pop("checks", None), name)
    row, expected = _cut(_row(raw, name))
    try:
        read_checks(checks, expected) if checks else None
        media = tuple(inspect(medium, row.folder, access).key for medium in row.media)
    except Fault as problem:
        raise RowError(row.name, str(problem), problem.code) from None
    except MediaError as problem:
        raise RowError(row.name, str(problem), problem.code) from None
    return Asked(row.name, row, expected, checks, media)


def _checks(given, name: str) -> Mapping | None:
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        raise RowError(name, "checks are a text that is not JSON", "bad_check") from None
    if given is not None and not isinstance(given, Mapping):
        raise RowError(name, "checks must be an object of checks by name", "bad_check")
    return given


def _row(raw: dict, name: str) -> Row:
    if "chosen" in raw and "rejected" in raw:
        pair = read_preference(raw, name)
        return replace(pair.chosen, messages=pair.chosen.messages[: pair.shared + 1])
    for asks, answers in (("prompt", "completion"), ("instruction", "output")):
        if asks in raw and answers not in raw and "messages" not in raw:  # which is no row to train on
            raw = raw | {answers: ""}
    return read_row(raw, name)


def _cut(row: Row) -> tuple[Row, str | None]:
    """(a row without the answer at its end, that answer)."""
    if not row.messages:
        told = "a text without turns asks nothing: give it as a prompt, or convert it (dataset_prep.py convert)"
        raise RowError(row.name, told, "bad_text_row")
    messages, expected = row.messages, None
    if messages[-1]["role"] == "assistant":
        expected = text_of(messages[-1:]) or None
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ASKING or is_blank(messages[-1]["content"]):
        raise RowError(row.name, "it asks nothing: no message of the user stands at its end", "missing_field")
    shown = sum(block["type"] != "text" for m in messages for block in blocks_of(m["content"]))
    return replace(row, messages=messages, media=row.media[:shown], trained=True), expected


def of_text(text: str, name: str) -> Asked:
    """A prompt of one message of the user."""
    return read_asked({"prompt": text, SOURCE: (name, None)}, name)
