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

from .errors import CannotLoad, DataError, EnvironmentUnfit, RowError, UsageError
from .files import is_disk_full, user_path
from .rows import SOURCE

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_RECORD = 256 * 2**20  # bytes of a line or of a CSV record: more is no row, but a file without line breaks
# What a file may begin with that is no UTF-8 text, and what to do about it.
UNREADABLE = {
    b"\x1f\x8b": "gzip-compressed: decompress it first (gunzip -k)",
    b"\x28\xb5\x2f\xfd": "zstd-compressed: decompress it first (zstd -d)",
    b"BZh": "bzip2-compressed: decompress it first (bunzip2 -k)",
    b"\xfd7zXZ": "xz-compressed: decompress it first (unxz -k)",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\xff\xfe": "UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "UTF-16 text: write it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
}
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

    def check_unchanged(self) -> None:
        """Refuse files that are not what they were when they were opened; raises DataError."""
        for part in self.parts:
            part.check_unchanged()

    def name(self, index: int) -> str:
        """What a row is called in errors, such as `rows.jsonl:7`; nothing is read."""
        part = bisect_right(self.ends, index)
        return self.parts[part].name_of(index - (self.ends[part - 1] if part else 0))

    def read(self, start: int, stop: int) -> Iterator[dict | RowError]:
        """The rows from `start` to `stop`, read on end, with the error in the place of a row that cannot be read."""
        for part, end in zip(self.parts, self.ends, strict=True):
            begin = end - len(part)
            if begin < stop and start < end:
                yield from part.read(max(start - begin, 0), min(stop, end) - begin)


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
    names = [part.label for part in parts]
    for part in parts:
        if names.count(part.label) > 1:  # two files of one name: rows are told by the path
            part.label = str(part.place)
    return Rows(parts)


def must_exist(*names: str) -> None:
    """Refuse names of files that are not there, before anything is imported to read them; raises DataError."""
    for name in names:
        _files(name)


def fingerprint(sources: list[str], rows: int) -> str:
    """A short hash that tells one data set from another: names, sizes, and the first and last MiB of each file."""
    digest = hashlib.sha256(str(rows).encode())
    for source in sources:
        for path in files_of(source) or [Path(source)]:
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
    if not source.strip():
        raise UsageError("an empty name where data is expected (a variable that is not set?)")
    path = user_path(source)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # a name too long, say
        raise DataError(f"no such file: {source[:80]}...") from None
    if is_file:
        return [path]
    if is_folder:
        return sorted(filter(_is_data, path.rglob("*")))
    if HUB_ID.fullmatch(source) and path.suffix.lower() not in SUFFIXES and not path.parent.is_dir():
        return None
    if glob.has_magic(source):
        return sorted(filter(_is_data, map(Path, glob.glob(str(path), recursive=True))))
    raise DataError(f"no such file: {source}")


def files_of(source: str) -> list[Path]:
    """The files that a source names; none of a hub id. Raises DataError where there is no such file."""
    return _files(source) or []


def _is_data(path: Path) -> bool:
    """Whether a file in a folder is one of rows; not those that our own scripts have put aside."""
    return path.suffix.lower() in SUFFIXES and not path.name.endswith(".rejected.jsonl") and path.is_file()


def _file_part(path: Path):
    suffix = path.suffix.lower()
    if suffix != ".parquet":
        _check_text(path)
    if suffix == ".jsonl" or (suffix == ".json" and _first_character(path) == "{" and _is_lines(path)):
        return _JsonLines(path)
    if suffix == ".json":
        return _JsonList(path)
    if suffix == ".csv":
        return _Csv(path)
    if suffix == ".parquet":
        return _Table(_load_dataset("parquet", data_files=glob.escape(str(path))), path, path.parent)
    raise DataError(f"{path}: unknown kind of file; known: {', '.join(SUFFIXES)}")


def _check_text(path: Path) -> None:
    """Refuse what is no UTF-8 text, told by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from None
    for magic, told in UNREADABLE.items():
        if start.startswith(magic):
            raise DataError(f"{path}: {told}")
    if b"\0" in start:
        raise DataError(f"{path}: a binary file, or text that is not UTF-8 (it holds NUL bytes)")


def _first_character(path: Path) -> str:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.read(4096).lstrip()[:1]


def _is_lines(path: Path) -> bool:
    """Whether the first line of a .json file is a whole object: JSON lines under another name."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        try:
            return isinstance(json.loads(file.readline()), dict) and bool(file.readline().strip())
        except (ValueError, RecursionError):
            return False


def _told(problem: json.JSONDecodeError) -> str:
    return problem.msg.removesuffix(" at").removesuffix(" starting")


def _named(row, name: str, folder: Path) -> dict:
    if not isinstance(row, dict):
        raise RowError(name, f"a row must be an object, found {type(row).__name__}", "wrong_type")
    return row | {SOURCE: (name, str(folder))}


class _Part:
    """The rows of one file, by number. `place` is its path, or the id of a hub data set; `label` what its rows are
    called by."""

    def __init__(self, place: Path | str):
        self.place, self.label = place, getattr(place, "name", place)
        self.stamp = self._stamp()

    def _stamp(self) -> tuple | None:
        try:
            found = Path(self.place).stat()
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    def check_unchanged(self) -> None:
        """Refuse a file that is not what it was when it was opened; raises DataError."""
        if self._stamp() != self.stamp:
            raise DataError(f"{self.place}: the file was changed while it was read: run again")

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict:
        raise NotImplementedError

    def name_of(self, index: int) -> str:
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict]:
        return (self[index] for index in range(len(self)))

    def read(self, start: int, stop: int) -> Iterator[dict | RowError]:
        for index in range(start, stop):
            yield _row_or_error(self.__getitem__, index)


def _row_or_error(read, *arguments) -> dict | RowError:
    try:
        return read(*arguments)
    except RowError as problem:
        return problem


class _Records(_Part):
    """A text file as records at byte offsets: one pass finds them, a row is parsed when it is asked for."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.path, self.offsets, self.lines = path, array("Q"), array("Q")
        try:
            self._index()
        except OSError as problem:
            raise DataError(f"{path}: cannot be read ({problem.strerror})") from None

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> dict:
        with self._opened(index) as file:
            return self._parse(*self._record(index, file))

    def read(self, start: int, stop: int) -> Iterator[dict | RowError]:
        with self._opened(start) as file:
            for index in range(start, stop):
                try:
                    row = self._parse(*self._record(index, file))
                except RowError as problem:
                    row = problem
                yield row

    def _parse(self, name: str, text: str) -> dict:
        raise NotImplementedError

    def _index(self) -> None:
        with self.path.open("rb") as file:
            start = end = 0
            number, filled = 1, False
            while piece := file.readline(2**20):  # a line may be longer than memory
                end += len(piece)
                filled = filled or bool(piece.strip(b"\xef\xbb\xbf \t\r\n"))
                if piece.endswith(b"\n"):
                    self._add(start, number, filled)
                    start, number, filled = end, number + 1, False
            self._add(start, number, filled)
            self.offsets.append(end)

    def _add(self, start: int, number: int, filled: bool) -> None:
        if filled:
            self.offsets.append(start)
            self.lines.append(number)

    def name_of(self, index: int) -> str:
        return f"{self.label}:{self.lines[index]}"

    def _opened(self, index: int):
        try:
            return self.path.open("rb")
        except OSError as problem:
            told = f"the data file cannot be read any more ({problem.strerror})"
            raise RowError(self.name_of(index), told) from None

    def _record(self, index: int, file) -> tuple[str, str]:
        """(name, text) of a record."""
        start, stop, name = self.offsets[index], self.offsets[index + 1], self.name_of(index)
        if stop - start > MAX_RECORD:
            told = f"a line of {(stop - start) >> 20:,} MiB, over the limit of {MAX_RECORD >> 20} MiB"
            raise RowError(name, told, "line_too_long")
        try:
            if file.tell() != start:
                file.seek(start)
            data = file.read(stop - start)
        except OSError as problem:
            raise RowError(name, f"the data file cannot be read any more ({problem.strerror})") from None
        try:
            return name, data.decode("utf-8-sig").strip("\r\n")
        except UnicodeDecodeError:
            raise RowError(name, "not UTF-8 text", "bad_encoding") from None


class _JsonLines(_Records):
    def _parse(self, name: str, text: str) -> dict:
        try:
            return _named(json.loads(text), name, self.path.parent)
        except json.JSONDecodeError as problem:
            raise RowError(name, f"not valid JSON ({_told(problem)} at column {problem.colno})", "bad_json") from None
        except (ValueError, RecursionError):
            raise RowError(name, "JSON with a number or a nesting beyond all bounds", "bad_json") from None


class _Csv(_Records):
    """CSV records, which may hold quoted line breaks; the first one is the header. Values are separated by commas, or
    where there is none in the first line by semicolons or tabs."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            first = file.readline(MAX_RECORD).decode("utf-8", "replace")
        self.delimiter = "," if "," in first else max(";\t", key=first.count)
        if self.delimiter not in first:
            self.delimiter = ","
        super().__init__(path)
        with self._opened(0) as file:
            self.header = next(self._reader([self._record(0, file)[1]])) if len(self) else []
        if twice := sorted({name for name in self.header if self.header.count(name) > 1}):
            raise RowError(f"{path.name}:1", f"a column name that stands twice: {twice[0][:40]}", "bad_csv")
        del self.offsets[:1], self.lines[:1]

    def _reader(self, lines, **options):
        return csv.reader(lines, delimiter=self.delimiter, **options)

    def _index(self) -> None:
        csv.field_size_limit(2**31 - 1)
        ends, first = array("Q", [0]), 0

        def lines(file):
            while line := file.readline(MAX_RECORD + 1):
                if len(line) > MAX_RECORD:
                    told = f"a line of more than {MAX_RECORD >> 20} MiB"
                    raise RowError(f"{self.path.name}:{len(ends)}", told, "line_too_long")
                ends.append(ends[-1] + len(line))
                yield line.decode("utf-8-sig" if len(ends) == 2 else "utf-8", "replace")

        with self.path.open("rb") as file:
            reader = self._reader(lines(file))
            try:
                for record in reader:
                    if record:
                        self.offsets.append(ends[first])
                        self.lines.append(first + 1)
                    first = reader.line_num
            except csv.Error as problem:
                raise RowError(f"{self.path.name}:{first + 1}", f"not valid CSV ({problem})", "bad_csv") from None
        self.offsets.append(ends[-1])
        if self.lines:
            with self._opened(len(self) - 1) as file:
                name, last = self._record(len(self) - 1, file)
            try:
                list(self._reader([last] if last.count('"') % 2 else [], strict=True))
            except csv.Error:
                raise RowError(name, "a quote that is never closed", "bad_csv") from None

    def _parse(self, name: str, text: str) -> dict:
        values = next(self._reader(io.StringIO(text, newline="")))
        if len(values) != len(self.header):
            raise RowError(name, f"{len(values)} values under {len(self.header)} column names", "bad_csv")
        return _named({k: v for k, v in zip(self.header, values, strict=True) if v != ""}, name, self.path.parent)


class _JsonList(_Part):
    """A .json file: a list of rows, or an object with the list under "data", "rows" or "train". Read whole."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.path = path
        try:
            content = json.loads(path.read_text(encoding="utf-8-sig"))
        except json.JSONDecodeError as problem:
            raise RowError(f"{path.name}:{problem.lineno}", f"not valid JSON ({_told(problem)})", "bad_json") from None
        except UnicodeDecodeError:
            raise DataError(f"{path}: not UTF-8 text") from None
        except (ValueError, RecursionError):
            raise DataError(f"{path}: JSON with a number or a nesting beyond all bounds") from None
        if isinstance(content, dict):
            content = next((content[key] for key in ("data", "rows", "train") if key in content), [content])
        if not isinstance(content, list):
            raise DataError(f"{path}: expected a list of rows")
        self.rows = content

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return _named(self.rows[index], self.name_of(index), self.path.parent)

    def name_of(self, index: int) -> str:
        return f"{self.label}[{index}]"


class _Table(_Part):
    """A `datasets.Dataset` (memory-mapped Arrow), read as stored: media stay undecoded, wherever they are nested."""

    def __init__(self, table, place: Path | str, folder: Path):
        super().__init__(place)
        self.table, self.folder = table.with_format("arrow"), folder

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict:
        row = next(self.read(index, index + 1))
        if isinstance(row, RowError):
            raise row
        return row

    def read(self, start: int, stop: int) -> Iterator[dict | RowError]:
        for first in range(start, stop, 32):
            some = self.table[first : min(first + 32, stop)]
            try:
                rows = some.to_pylist()
            except UnicodeDecodeError:
                rows = [_row_or_error(self._decoded, some, at, first + at) for at in range(len(some))]
            for index, row in enumerate(rows, first):
                yield row if isinstance(row, RowError) else _named(row, self.name_of(index), self.folder)

    def _decoded(self, some, at: int, index: int) -> dict:
        try:
            return some.slice(at, 1).to_pylist()[0]
        except UnicodeDecodeError:
            raise RowError(self.name_of(index), "not UTF-8 text", "bad_encoding") from None

    def name_of(self, index: int) -> str:
        return f"{self.label}[{index}]"


def _load_dataset(name: str, split: str = "train", **options):
    import datasets

    try:
        return datasets.load_dataset(name, split=split, **options)
    except Exception as problem:  # datasets raises what its readers and the hub client raise
        if any(map(is_disk_full, filter(None, (problem, problem.__cause__, problem.__context__)))):
            raise EnvironmentUnfit("no room left on the disk for the cache of data sets (HF_DATASETS_CACHE)") from None
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
