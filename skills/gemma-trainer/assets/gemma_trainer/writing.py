"""Rows to a file that is there whole or not at all, written as they come, with their media in reach of it.

A .jsonl file holds paths relative to itself, and media without a file go into `<stem>_media` beside it; a .parquet file
holds the media themselves.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import DataError, UsageError
from .files import user_path
from .media import MediaAccess
from .media_files import MediaStore, embedded, localised
from .rows import BLOCK_TYPES, SOURCE, _media_value
from .slots import MEDIA_COLUMNS, blocks_of
from .sources import files_of

OUTPUTS = (".jsonl", ".parquet")
GROUP_ROWS, GROUP_BYTES = 500, 32 * 2**20  # a parquet row group: what is held in memory until it is written
TALKS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
MESSAGE = ("role", "content", "reasoning", "tool_calls", "name", "tool_call_id", "train", "plain")
LAYOUTS = {  # the columns of a parquet file, by the kind of its rows
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected", "margin"),
}


class RowsWriter:
    """Write rows to `path` (.jsonl or .parquet): a context, at whose end the file is in its place.

    After an error or an interruption there is no file, or the older one, and none of the media written on the way; so
    also when no row was written, unless `empty` says that a file without rows is a result. `count` is the number of
    rows written.

    Example:
        with RowsWriter("out.jsonl") as writer:
            writer.write({"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ...]})

    Raises:
        UsageError: at once, for no path, another suffix, or a file that is there already and not to be overwritten.
    """

    def __init__(
        self,
        path: str | Path | None,
        overwrite: bool = False,
        access: MediaAccess = MediaAccess(),
        empty: bool = False,
    ):
        if path is None:
            raise UsageError("--output FILE says where the rows go: a .jsonl or .parquet file")
        self.path, self.access, self.count, self.empty = user_path(path), access, 0, empty
        check_output(self.path, overwrite)
        self.store = MediaStore(self.path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._table: _Table | None = None

    def __enter__(self) -> RowsWriter:
        with writable(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.temporary.open("wb")
        return self

    def write(self, row: dict) -> None:
        """Add one row.

        Args:
            row: with its media in blocks `{"type": "image", "image": value}` or in `image(s)` / `audio(s)` columns, and
                the folder of their relative paths under `rows.SOURCE` (without: the working directory).

        Raises:
            MediaError: a medium cannot be had; then nothing of the row is written, and writing can go on.
            DataError: a row that a .parquet file of its kind has no place for.
        """
        folder = (row.get(SOURCE) or (None, None))[1]
        fields = {key: value for key, value in row.items() if key != SOURCE and value is not None}
        if self.path.suffix.lower() == ".jsonl":
            fields = replace_media(fields, lambda value, kind: localised(value, kind, folder, self.store))
            self._file.write(json_line(fields))
        else:
            fields = replace_media(fields, lambda value, kind: embedded(value, kind, folder, self.access))
            self._table = self._table or _Table(self._file, _layout(fields))
            self._table.add(fields)
        self.count += 1

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is None and (self.count or self.empty):
                self._finish()
        finally:
            with contextlib.suppress(Exception):  # after an error, what cannot be flushed is to be thrown away anyhow
                if self._table:
                    self._table.writer.close()
            with contextlib.suppress(OSError):
                self._file.close()
            if self.temporary.exists():  # it was not moved into place
                self.temporary.unlink()
                self.store.discard()

    def _finish(self) -> None:
        if self._table:
            self._table.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.store.commit()
        os.replace(self.temporary, self.path)


class Rejects(RowsWriter):
    """The rows that a command puts aside, in `<stem>.rejected.jsonl` beside its output: `row`, `reason` and `code` of
    each. A file of an earlier run is replaced, and goes where nothing is put aside; any other is in the way.
    """

    def __init__(self, output: Path, overwrite: bool):
        path = output.with_name(f"{output.stem}.rejected.jsonl")
        super().__init__(path, overwrite or _is_rejects(path))

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        if error is None and not self.count and _is_rejects(self.path):
            self.path.unlink()


def _is_rejects(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(2**24))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"row", "reason", "code"} <= first.keys()


def check_output(path: Path, overwrite: bool) -> None:
    """Refuse a file that cannot or must not be written, with a UsageError."""
    if path.suffix.lower() not in OUTPUTS:
        raise UsageError(f"--output {path}: the name must end in {' or '.join(OUTPUTS)}")
    if path.is_dir():
        raise UsageError(f"--output {path}: a folder has this name")
    if path.exists() and not overwrite:
        raise UsageError(f"--output {path}: the file exists; give --overwrite to replace it, or another name")


@contextlib.contextmanager
def writable(path: Path):
    """Tell that a file cannot be written where its path is the reason; a full disk and lacking rights pass through."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as problem:
        raise UsageError(f"--output {path}: cannot be written ({problem.strerror})") from None
    except OSError as problem:
        if problem.errno not in (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP):
            raise
        raise UsageError(f"--output: the name cannot be written ({problem.strerror})") from None


def refuse_inputs(names: list[str], *outputs: Path) -> None:
    """Refuse (UsageError) outputs that are data files, or lie in a data folder, where they would be read as data."""
    files = {file.resolve() for name in names for file in files_of(name)}
    folders = [user_path(name).resolve() for name in names if user_path(name).is_dir()]
    for output in outputs:
        if output.resolve() in files:
            raise UsageError(f"{output} is one of the data files, and would be written: choose another name")
        if any(output.resolve().is_relative_to(folder) for folder in folders):
            raise UsageError(f"{output} lies in the data folder, where it would be read as data: write elsewhere")


def json_line(row: Mapping) -> bytes:
    """A row as one line of compact UTF-8 JSON; half a surrogate pair, which UTF-8 has no bytes for, is escaped."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _plain(value):
    """What JSON has no form for, such as dates in a parquet file."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise DataError(f"{len(value):,} bytes in a column that is not one of media, which JSON has no form for")
    return value.tolist() if hasattr(value, "tolist") else str(value)


# ---- media in a row


def replace_media(row: Mapping, place: Callable[[Any, str], Any]) -> dict:
    """A copy of a row in which every medium is what `place(value, kind)` makes of it.

    Blocks of any accepted spelling become `{"type": kind, kind: value}`; blocks without a value stay as they are.
    """
    changed = dict(row)
    for kind, keys in MEDIA_COLUMNS.items():
        for key in keys:
            value = row.get(key)
            if isinstance(value, list | tuple):
                changed[key] = [item if _is_empty(item) else place(item, kind) for item in value]
            elif not _is_empty(value):
                changed[key] = place(value, kind)
    for key in TALKS:
        if isinstance(row.get(key), list | tuple):
            changed[key] = [_message(message, place) for message in row[key]]
        elif isinstance(row.get(key), Mapping):
            changed[key] = _message(row[key], place)
    return changed


def _is_empty(value) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _message(message, place):
    if not isinstance(message, Mapping):
        return message
    key = "content" if "content" in message else "value"
    content = message.get(key)
    if isinstance(content, Mapping) and "type" in content:
        content = [content]
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, key: [_block(block, place) for block in content]}


def _block(block, place):
    if not isinstance(block, Mapping):
        return block
    kind = BLOCK_TYPES.get(str(block.get("type") or next((key for key in MEDIA_COLUMNS if key in block), None)))
    value = _media_value(block, kind) if kind in MEDIA_COLUMNS else None
    return block if value is None else {"type": kind, kind: place(value, kind)}


# ---- parquet


class _Table:
    """A parquet file under way: rows gather to a group, which is then written."""

    def __init__(self, file, layout: str):
        import pyarrow.parquet as parquet

        self.layout, self.schema = layout, schema(layout)
        self.writer = parquet.ParquetWriter(file, self.schema)
        self.rows, self.size = [], 0

    def add(self, fields: Mapping) -> None:
        row = _stored(fields, self.layout)
        try:
            self.size += _weight(row)
        except UnicodeEncodeError:
            raise DataError("text with half a surrogate pair, which a .parquet file cannot hold") from None
        self.rows.append(row)
        if len(self.rows) >= GROUP_ROWS or self.size >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow

        if self.rows:
            self.writer.write_table(pyarrow.Table.from_pylist(self.rows, schema=self.schema))
            self.rows, self.size = [], 0

    def close(self) -> None:
        self._flush()
        self.writer.close()


def schema(layout: str):
    """The pyarrow schema of a parquet file of `layout` rows ("messages", "prompt-completion", "preference").

    It is the same whatever the rows hold, so that a file can be written as they come and files can be joined: `content`
    is a list of blocks (with `plain` where it was a string, which templates do not all render like its block), and
    `tool_calls` and `tools`, which have no fixed form, are JSON text.
    """
    import pyarrow as pa

    text = pa.string()
    medium = pa.struct({"bytes": pa.binary(), "path": text})
    block = pa.struct({"type": text, "text": text, "image": medium, "audio": medium})
    message = dict.fromkeys(MESSAGE, text) | {"content": pa.list_(block), "train": pa.bool_(), "plain": pa.bool_()}
    own = {key: pa.float64() if key == "margin" else pa.list_(pa.struct(message)) for key in LAYOUTS[layout]}
    return pa.schema(own | {"tools": text, "loss_type": text})


def _layout(fields: Mapping) -> str:
    for layout, key in (("preference", "chosen"), ("prompt-completion", "completion"), ("messages", "messages")):
        if key in fields:
            return layout
    raise DataError("a .parquet file takes rows of messages, prompt + completion, or prompt + chosen + rejected")


def _stored(fields: Mapping, layout: str) -> dict:
    """A row in the form of its schema."""
    if odd := sorted(fields.keys() - {*LAYOUTS[layout], "tools", "loss_type"}):
        raise DataError(f"a .parquet file of {layout} rows has no place for the column {str(odd[0])[:40]!r}")
    row = {}
    for key, value in fields.items():
        if key in TALKS:
            role = "user" if key == "prompt" else "assistant"
            said = [{"role": role, "content": value}] if isinstance(value, str) else value
            row[key] = [_stored_message(message) for message in ([said] if isinstance(said, Mapping) else said)]
        else:
            row[key] = json.dumps(value, ensure_ascii=False) if key == "tools" and not isinstance(value, str) else value
    return row


def _stored_message(message: Mapping) -> dict:
    stored = {key: value for key, value in message.items() if value is not None}
    if odd := sorted(stored.keys() - set(MESSAGE)):
        raise DataError(f"a .parquet file has no place for {str(odd[0])[:40]!r} in a message")
    content = stored.get("content", "")
    stored |= {"content": blocks_of(content), "plain": isinstance(content, str) or None}
    if not isinstance(stored.get("tool_calls", ""), str):
        stored["tool_calls"] = json.dumps(stored["tool_calls"], ensure_ascii=False)
    return stored


def _weight(value) -> int:
    """About the bytes of a row in memory."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 64 + sum(map(_weight, parts))
