"""Rows in tar archives, as WebDataset lays them out and `datasets` reads them: the files of one key are one row.

`a/7.json`, `a/7.jpg` and `a/7.wav` are the row `a/7`. Archives are read from front to end and never unpacked.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator

from .columns import ASKED
from .errors import RowError
from .folders import media_kind
from .parts import MAX_RECORD, named, parsed
from .slots import MEDIA_COLUMNS

KEY = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)  # what stands before the first dot of the file's name
CONVERSATION = {"messages", "conversations", "prompt", "instruction", "text", "chosen", "rejected"}
NAMING = {"image", "images", "audio", "audios", "image_url", "audio_url", "input_image", "input_audio", "url", "path"}
BROKEN = (tarfile.TarError, EOFError)  # beside what a decompressor raises, for which tarfile has errors of its own


class _Header(tarfile.TarInfo):
    """A header that breaks off, or is none, is an error: `tarfile` takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.TruncatedHeaderError, tarfile.InvalidHeaderError) as problem:
            raise tarfile.ReadError(str(problem)) from None


def samples(file, label: str) -> Iterator[tuple[str, list[tuple[str, bytes]] | RowError]]:
    """The samples of an archive that is read from `file`, compressed or not.

    Yields (key, [(extension, content), ...]) in the order of the archive, e.g. `("a/7", [("json", b"{}")])`; a RowError
    in the place of a sample that is too large, and of the one in which the archive breaks off, the last.
    """
    key, files, size = "", [], 0
    try:
        for name, archive, member in _members(file):
            found = KEY.fullmatch(name)
            if not found:
                continue
            if files and found[1] != key:
                yield key, _within_bounds(files, size, label, key)
                files, size = [], 0
            key, size = found[1], size + member.size
            content = archive.extractfile(member).read() if size <= MAX_RECORD else b""
            files.append((found[2], content))
    except BROKEN as problem:
        told = f"the archive breaks off ({type(problem).__name__}); what follows in it is lost"
        yield key, RowError(f"{label}:{key}", told, "bad_archive")
        return
    if files:
        yield key, _within_bounds(files, size, label, key)


def _members(file) -> Iterator[tuple[str, tarfile.TarFile, tarfile.TarInfo]]:
    try:
        archive = tarfile.open(fileobj=file, mode="r|*", tarinfo=_Header)
    except tarfile.ReadError as problem:
        if str(problem) == "empty file":
            return
        raise
    with archive:
        while (member := archive.next()) is not None:
            archive.members = []  # which it would keep, all of them
            if member.isfile():
                yield member.name.removeprefix("./"), archive, member


def _within_bounds(files, size: int, label: str, key: str):
    if size <= MAX_RECORD:
        return files
    told = f"{size >> 20:,} MiB in one row, over the limit of {MAX_RECORD >> 20} MiB"
    return RowError(f"{label}:{key}", told, "line_too_long")


def row_of(files: list[tuple[str, bytes]], name: str, folder: str) -> dict:
    """The row that a sample's files make.

    `json` holds the row. Its media are the files that it names (`"image": "7.jpg"`, or `"jpg"`, the extension); where
    it names none of a kind, all files of that kind go into the column `images` or `audios`. Without a conversation in
    it, `txt` is what is to be said of the one medium (asked as `dataset_prep.py convert` does), or else a `text` row.
    Files of other kinds are left out.

    Raises:
        RowError: the JSON is not valid or no object, a text is not UTF-8, or there is neither.
    """
    stem = name.split(":", 1)[-1].rsplit("/", 1)[-1]
    content = dict(reversed(files))
    row = _fields(content["json"], name) if "json" in content else {}
    media = {f"{stem}.{ext}": (media_kind(f"x.{ext}"), data) for ext, data in files if media_kind(f"x.{ext}")}
    by_kind = {kind: [file for file, (of, _) in media.items() if of == kind] for kind in MEDIA_COLUMNS}
    values = {file: {"bytes": data, "path": file} for file, (_, data) in media.items()}
    names = {spelled: file for file in media for spelled in (file, f".{file[len(stem) + 1 :]}", file[len(stem) + 1 :])}
    names |= {f"{name.split(':', 1)[-1]}{file[len(stem) :]}": file for file in media}
    used: set[str] = set()
    row = _filled(row, "", names, values, used)
    for kind, (one, several) in MEDIA_COLUMNS.items():
        if by_kind[kind] and not used & set(by_kind[kind]):
            row = {key: value for key, value in row.items() if key not in (one, several)}
            row[several] = [values[file] for file in by_kind[kind]]
    if not CONVERSATION & row.keys():
        row |= _said(content, [kind for kind in by_kind if by_kind[kind]], name)
    return named(row, name, folder)


def _fields(content: bytes, name: str) -> dict:
    row = parsed(_text(content, name), name)
    if not isinstance(row, dict):
        raise RowError(name, f"a row must be an object, found {type(row).__name__}", "wrong_type")
    return row


def _said(content: dict[str, bytes], kinds: list[str], name: str) -> dict:
    """What a `txt` file makes of a row without a conversation."""
    if "txt" not in content:
        if "json" in content:
            return {}  # whose keys `rows.read_row` names
        raise RowError(name, "neither a .json nor a .txt file of this key", "missing_field")
    text = _text(content["txt"], name).strip()
    if not kinds:
        return {"text": text}
    if len(kinds) > 1:
        raise RowError(
            name, "a picture, a clip and a .txt: write what is asked as messages in a .json", "missing_field"
        )
    return {"prompt": ASKED[kinds[0]], "completion": text}


def _text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RowError(name, "not UTF-8 text", "bad_encoding") from None


def _filled(value, key: str, names: dict[str, str], values: dict[str, dict], used: set[str]):
    """The value with the files of the sample in the place of their names."""
    if isinstance(value, str) and key in NAMING and value in names:
        used.add(names[value])
        return values[names[value]]
    if isinstance(value, list):
        return [_filled(item, key, names, values, used) for item in value]
    if not isinstance(value, dict):
        return value
    path = value.get("path")
    if key in NAMING and isinstance(path, str) and path in names and not value.get("bytes"):  # as Arrow stores it
        return _filled(path, key, names, values, used)
    return {name: _filled(item, name, names, values, used) for name, item in value.items()}
