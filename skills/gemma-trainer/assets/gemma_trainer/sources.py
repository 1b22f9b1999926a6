"""Rows from files, folders, globs and hub data sets, read when asked for rather than all at once."""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import itertools
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from .errors import CannotLoad, DataError, RowError
from .files import user_path
from .rows import SOURCE

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:-]+)?")


class Rows:
    """Rows of one or several sources, in order; a map-style data set for `torch.utils.data.DataLoader`.

    `rows[i]` is the row as its file has it, with its name (`file:line`) and folder under `rows.SOURCE`.
    """

    def __init__(self, parts: list):
        self.parts = parts
        self.ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> dict:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = bisect_right(self.ends, index)
        return self.parts[part][index - (self.ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[dict]:
        return itertools.chain.from_iterable(self.parts)


class Subset:
    """The rows at `indices` of another row list."""

    def __init__(self, rows, indices: list[int]):
        self.rows, self.indices = rows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict:
        return self.rows[self.indices[index]]


def open_rows(sources: list[str]) -> Rows:
    """Open data sources.

    Args:
        sources: files (.jsonl, .json, .csv, .parquet), folders or globs of them, or hub ids (`org/name`,
            `org/name:split`, by default the split "train").

    Raises:
        DataError: no such file, an unknown kind of file, or a file without rows.
        RowError: a line is not valid JSON (found when that line is read).
        CannotLoad: a hub data set cannot be reached or has no such split.
    """
    parts = [part for source in sources for part in _open_source(source)]
    return Rows(parts)


def fingerprint(sources: list[str], rows: int) -> str:
    """A short hash that tells one data set from another: names, sizes, and the first and last MiB of each file."""
    digest = hashlib.sha256(str(rows).encode())
    for source in sources:
        for path in _files(source) or [Path(source)]:
            digest.update(path.name.encode())
            if path.is_file():
                with path.open("rb") as file:
                    size = file.seek(0, io.SEEK_END)
                    digest.update(str(size).encode())
                    for start in {0, max(0, size - 2**20)}:
                        file.seek(start)
                        digest.update(file.read(2**20))
    return digest.hexdigest()[:16]


def _open_source(source: str) -> list:
    files = _files(source)
    if files is None:
        return [_hub_part(source)]
    if not files:
        raise DataError(f"{source}: no {', '.join(SUFFIXES)} file there")
    parts = [_file_part(path) for path in files]
    for path, part in zip(files, parts, strict=True):
        if not len(part):
            raise DataError(f"{path}: the file has no rows")
    return parts


def _files(source: str) -> list[Path] | None:
    """The files a source names; None when it looks like a hub id. An absent file is an error at once."""
    path = user_path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # a name too long, say
        raise DataError(f"no such file: {source[:80]}...") from None
    if is_file:
        return [path]
    if is_folder:
        return sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if glob.has_magic(source):
        return sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).suffix.lower() in SUFFIXES)
    if HUB_ID.fullmatch(source) and path.suffix.lower() not in SUFFIXES and not path.parent.is_dir():
        return None
    raise DataError(f"no such file: {source}")


def _file_part(path: Path):
    suffix = path.suffix.lower()
    if suffix == ".jsonl" or (suffix == ".json" and _first_character(path) == "{" and _is_lines(path)):
        return _JsonLines(path)
    if suffix == ".json":
        return _JsonList(path)
    if suffix == ".csv":
        return _Csv(path)
    if suffix == ".parquet":
        return _Table(_load_dataset("parquet", data_files=glob.escape(str(path))), path.name, path.parent)
    raise DataError(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)}")


def _first_character(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip()[:1]


def _is_lines(path: Path) -> bool:
    """Whether the first line of a .json file is a whole object: JSON lines under another name."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        try:
            return isinstance(json.loads(file.readline()), dict) and bool(file.readline().strip())
        except json.JSONDecodeError:
            return False


def _named(row, name: str, folder: Path) -> dict:
    if not isinstance(row, dict):
        raise RowError(name, f"a row must be an object, found {type(row).__name__}")
    return row | {SOURCE: (name, str(folder))}


class _Records:
    """A text file as records at byte offsets: one pass finds them, a row is parsed when it is asked for."""

    def __init__(self, path: Path):
        self.path, self.offsets, self.lines = path, array("Q"), array("Q")
        try:
            self._index()
        except OSError as problem:
            raise DataError(f"{path}: cannot be read ({problem.strerror})") from None

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def _index(self) -> None:
        with self.path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip(b"\xef\xbb\xbf \t\r\n"):
                    self.offsets.append(offset)
                    self.lines.append(number)
                offset += len(line)
            self.offsets.append(offset)

    def _record(self, index: int) -> tuple[str, str]:
        """(name, text) of a record."""
        start, stop = self.offsets[index], self.offsets[index + 1]
        name = f"{self.path.name}:{self.lines[index]}"
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        except OSError as problem:
            raise RowError(name, f"the data file cannot be read any more ({problem.strerror})") from None
        try:
            return name, data.decode("utf-8-sig").strip("\r\n")
        except UnicodeDecodeError:
            raise RowError(name, "not UTF-8 text") from None


class _JsonLines(_Records):
    def __getitem__(self, index: int) -> dict:
        name, text = self._record(index)
        try:
            return _named(json.loads(text), name, self.path.parent)
        except json.JSONDecodeError as problem:
            raise RowError(name, f"not valid JSON ({problem.msg} at column {problem.colno})") from None
        except (ValueError, RecursionError):
            raise RowError(name, "JSON with a number or a nesting beyond all bounds") from None


class _Csv(_Records):
    """CSV records, which may hold quoted line breaks; the first one is the header."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.header = next(csv.reader([self._record(0)[1]])) if len(self) else []
        if twice := sorted({name for name in self.header if self.header.count(name) > 1}):
            raise RowError(f"{path.name}:1", f"a column name that stands twice: {twice[0][:40]}")
        del self.offsets[:1], self.lines[:1]

    def _index(self) -> None:
        csv.field_size_limit(2**31 - 1)
        ends, first = array("Q", [0]), 0

        def lines(file):
            for line in file:
                ends.append(ends[-1] + len(line))
                yield line.decode("utf-8", "replace")

        with self.path.open("rb") as file:
            reader = csv.reader(lines(file))
            try:
                for record in reader:
                    if record:
                        self.offsets.append(ends[first])
                        self.lines.append(first + 1)
                    first = reader.line_num
            except csv.Error as problem:
                raise RowError(f"{self.path.name}:{first + 1}", f"not valid CSV ({problem})") from None
        self.offsets.append(ends[-1])
        if self.lines and self._record(len(self) - 1)[1].count('"') % 2:
            try:
                list(csv.reader([self._record(len(self) - 1)[1]], strict=True))
            except csv.Error:
                raise RowError(f"{self.path.name}:{self.lines[-1]}", "a quote that is never closed") from None

    def __getitem__(self, index: int) -> dict:
        name, text = self._record(index)
        values = next(csv.reader(io.StringIO(text, newline="")))
        if len(values) != len(self.header):
            raise RowError(name, f"{len(values)} values under {len(self.header)} column names")
        return _named({k: v for k, v in zip(self.header, values, strict=True) if v != ""}, name, self.path.parent)


class _JsonList:
    """A .json file: a list of rows, or an object with the list under "data", "rows" or "train". Read whole."""

    def __init__(self, path: Path):
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as problem:
            raise RowError(f"{path.name}:{problem.lineno}", f"not valid JSON ({problem.msg})") from None
        except UnicodeDecodeError:
            raise DataError(f"{path}: not UTF-8 text") from None
        if isinstance(content, dict):
            content = next((content[key] for key in ("data", "rows", "train") if key in content), [content])
        if not isinstance(content, list):
            raise DataError(f"{path}: expected a list of rows")
        self.rows = content

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return _named(self.rows[index], f"{self.path.name}[{index}]", self.path.parent)

    def __iter__(self):
        return (self[index] for index in range(len(self)))


class _Table:
    """A `datasets.Dataset` (memory-mapped Arrow), read as stored: media stay undecoded, wherever they are nested."""

    def __init__(self, table, name: str, folder: Path):
        self.table, self.name, self.folder = table.with_format("arrow"), name, folder

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict:
        return _named(self.table[index : index + 1].to_pylist()[0], f"{self.name}[{index}]", self.folder)

    def __iter__(self):
        return (self[index] for index in range(len(self)))


def _load_dataset(name: str, split: str = "train", **options):
    import datasets

    try:
        return datasets.load_dataset(name, split=split, **options)
    except Exception as problem:  # datasets raises what its readers and the hub client raise
        told = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"[:200]
        if "data_files" in options:
            raise DataError(f"{options['data_files']}: cannot be read ({told})") from None
        raise CannotLoad(
            f"data set {name} (split {split}) cannot be loaded ({told}). "
            "Offline? Download it first, or give a local .jsonl, .json, .csv or .parquet file."
        ) from None


def _hub_part(source: str):
    name, _, split = source.partition(":")
    return _Table(_load_dataset(name, split or "train"), source, Path.cwd())
