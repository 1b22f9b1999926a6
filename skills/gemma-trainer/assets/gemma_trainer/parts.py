"""The rows of one file, by number: JSON lines, CSV, a JSON list, an Arrow table. Each is read when it is asked for."""

from __future__ import annotations

import csv
import io
import json
from array import array
from collections.abc import Iterator
from pathlib import Path

from .errors import DataError, RowError
from .rows import SOURCE

MAX_RECORD = 256 * 2**20  # bytes of a line or of a CSV record: more is no row, but a file without line breaks


def _told(problem: json.JSONDecodeError) -> str:
    return problem.msg.removesuffix(" at").removesuffix(" starting")


def named(row, name: str, folder: str) -> dict:
    """A row with its name and folder under `rows.SOURCE`; raises RowError for what is no object."""
    if not isinstance(row, dict):
        raise RowError(name, f"a row must be an object, found {type(row).__name__}", "wrong_type")
    return row | {SOURCE: (name, folder)}


class Part:
    """The rows of one file, by number. `place` is its path, or the id of a hub data set; `label` what its rows are
    called by."""

    def __init__(self, place: Path | str):
        self.place, self.label = place, getattr(place, "name", place)
        self.folder = str(place.parent) if isinstance(place, Path) else ""  # where its relative paths begin
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


class _Records(Part):
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


class JsonLines(_Records):
    def _parse(self, name: str, text: str) -> dict:
        return named(parsed(text, name), name, self.folder)


def parsed(text: str, name: str):
    """What a line of JSON holds; raises RowError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise RowError(name, f"not valid JSON ({_told(problem)} at column {problem.colno})", "bad_json") from None
    except (ValueError, RecursionError):
        raise RowError(name, "JSON with a number or a nesting beyond all bounds", "bad_json") from None


class Csv(_Records):
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
        return named({k: v for k, v in zip(self.header, values, strict=True) if v != ""}, name, self.folder)


class JsonList(Part):
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
        return named(self.rows[index], self.name_of(index), self.folder)

    def name_of(self, index: int) -> str:
        return f"{self.label}[{index}]"


class Table(Part):
    """A `datasets.Dataset` (memory-mapped Arrow), read as stored: media stay undecoded, wherever they are nested."""

    def __init__(self, table, place: Path | str, folder: Path):
        super().__init__(place)
        self.table, self.folder = table.with_format("arrow"), str(folder)

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
                yield row if isinstance(row, RowError) else named(row, self.name_of(index), self.folder)

    def _decoded(self, some, at: int, index: int) -> dict:
        try:
            return some.slice(at, 1).to_pylist()[0]
        except UnicodeDecodeError:
            raise RowError(self.name_of(index), "not UTF-8 text", "bad_encoding") from None

    def name_of(self, index: int) -> str:
        return f"{self.label}[{index}]"
