"""Data as shards that are read from front to end: JSON lines, parquet, tar archives, on a disk or in an object store.

Nothing is held but what is read just now. A shard gives records, whose rows are made when they are asked for, so that
whoever passes over records parses none.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import archives, stores
from .cli import note
from .errors import CannotLoad, DataError, EnvironmentUnfit, RowError, TrainerError, UsageError
from .files import user_path
from .parts import MAX_RECORD, named, parsed
from .sources import HUB_ID

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
KINDS = {".jsonl": "lines", ".json": "lines", ".parquet": "table", ".tar": "archive", ".tgz": "archive"}
KNOWN = ".jsonl .parquet .tar (.jsonl and .tar also as .gz, .bz2, .xz; .jsonl.zst)"
MAX_FILES = 1_000_000
RANGE = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
BUFFER_BYTES = 256 * 2**20  # most bytes in a shuffle buffer, of which each process that reads has one
TRIES, PAUSE = 3, 1.0  # how often a shard is opened where reading fails, and the seconds between
TORN = {"EOFError", "BadGzipFile", "error", "LZMAError", "ZstdError", "ArrowInvalid"}  # of what reads a broken file


@dataclass(frozen=True)
class Unit:
    """What one reader reads on end: a file, or one row group of a parquet file."""

    place: str  # a path or a URL
    kind: str  # "lines", "table" or "archive"
    size: int | None  # bytes as stored
    label: str = ""  # what its rows are called by
    rows: int | None = None  # where that is known before they are read
    group: int = 0
    first: int = 0  # the number of a row group's first row in its file

    @property
    def folder(self) -> str:
        """Where the relative paths in its rows begin."""
        return self.place.rpartition("/")[0] if stores.is_url(self.place) else str(Path(self.place).parent)


@dataclass(slots=True)
class Record:
    """A row that is not parsed yet."""

    unit: Unit
    at: Any  # the number of the line or row, or the key
    content: Any
    size: int

    def row(self) -> dict | RowError:
        """The raw row, or what is wrong with it."""
        if isinstance(self.content, RowError):
            return self.content
        name = self.unit.label + (f"[{self.at}]" if self.unit.kind == "table" else f":{self.at}")
        try:
            if self.unit.kind == "archive":
                return archives.row_of(self.content, name, self.unit.folder)
            return named(
                _line(self.content, name) if self.unit.kind == "lines" else self.content, name, self.unit.folder
            )
        except RowError as problem:
            return problem


@dataclass
class Shards:
    """All units of a data set. `rows` is how many rows there are, None where that is not known."""

    units: list[Unit]
    rows: int | None = field(init=False)

    def __post_init__(self):
        counts = [unit.rows for unit in self.units]
        self.rows = None if None in counts else sum(counts)

    @property
    def files(self) -> int:
        return len({unit.place for unit in self.units})

    @property
    def size(self) -> int:
        return sum(unit.size or 0 for unit in self.units)

    def fingerprint(self) -> str:
        """A short hash of the names and sizes of all shards, in order."""
        digest = hashlib.sha256()
        for unit in self.units:
            digest.update(f"{unit.label}\0{unit.size}\0{unit.rows}\n".encode())
        return digest.hexdigest()[:16]

    def __iter__(self) -> Iterator[Record]:
        for unit in self.units:
            yield from records(unit)


# ---- finding them


def open_shards(sources: list[str]) -> Shards:
    """Find shards; of parquet files the footers are read, of others nothing.

    Args:
        sources: files, folders, globs and URLs of them; `{000..099}` and `{a,b}` in a name are several.

    Raises:
        DataError: no such file, or one that cannot be streamed.
        UsageError: a hub id, or an unknown kind of URL.
        EnvironmentUnfit: a package for the store or the compression is missing.
        CannotLoad: a store does not answer.
    """
    named = list(dict.fromkeys(name for source in sources for name in spelled_out(source)))
    with ThreadPoolExecutor(16) as pool:  # a store answers each question late, but many at a time
        found = [unit for units in pool.map(_found, named) for unit in units if unit.size != 0]
        units = list({unit.place: unit for unit in found}.values())
        if not units:
            raise DataError(f"{', '.join(sources)}: the files have no rows")
        if len(units) < len(found):
            note(f"{len(found) - len(units)} files are named twice: each is read once")
        names = Counter(Path(unit.place).name for unit in units)
        units = [
            replace(unit, label=unit.place if names[Path(unit.place).name] > 1 else Path(unit.place).name)
            for unit in units
        ]
        return Shards([unit for several in pool.map(_looked_at, units) for unit in several])


def spelled_out(name: str) -> list[str]:
    """The names that braces stand for: `a-{08..10}.tar` is `a-08.tar`, `a-09.tar` and `a-10.tar`."""
    found = RANGE.search(name)  # an innermost one
    if not found or Path(name).exists():
        return [name]
    low, high, listed = found.groups()
    if listed is not None:
        several = listed.split(",")
    else:
        width = max(len(low), len(high)) if low.startswith("0") or high.startswith("0") else 0
        count = int(high) - int(low) + 1
        if not 0 < count <= MAX_FILES:
            raise UsageError(f"{name}: {found[0]} stands for {max(count, 0):,} names: 1 to {MAX_FILES:,} are read")
        several = [f"{number:0{width}d}" for number in range(int(low), int(high) + 1)]
    names = [whole for one in several for whole in spelled_out(name[: found.start()] + one + name[found.end() :])]
    return list(dict.fromkeys(names))  # {x,y{0..1}}: the inner ones repeat what stands beside them


def kind_of(name: str) -> str | None:
    """ "lines", "table" or "archive" by a file's name; None for any other."""
    path = Path(name.lower())
    compressed = path.suffix in COMPRESSED
    kind = KINDS.get((path.with_suffix("") if compressed else path).suffix)
    return None if compressed and (kind == "table" or path.name.endswith((".tgz" + path.suffix, ".tar.zst"))) else kind


def _found(source: str) -> list[Unit]:
    if not source.strip():
        raise UsageError("an empty name where data is expected (a variable that is not set?)")
    places, named_itself = (_in_store if stores.is_url(source) else _on_disk)(source)
    units = [Unit(place, kind_of(place) or "", size) for place, size in sorted(places)]
    known = [unit for unit in units if unit.kind and (named_itself or not unit.place.endswith(".rejected.jsonl"))]
    if not known:
        told = "cannot be streamed" if named_itself else "no file there that can be streamed"
        raise DataError(f"{source}: {told}; known: {KNOWN}")
    return known


def _on_disk(source: str) -> tuple[list[tuple[str, int]], bool]:
    """([(path, size)] of the files that a name stands for, whether it is the name of one)."""
    path = user_path(source)
    try:
        if path.is_file():
            return [(str(path), path.stat().st_size)], True
        if path.is_dir():
            found = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        elif glob.has_magic(source):
            found = map(Path, glob.glob(str(path), recursive=True))
        elif HUB_ID.fullmatch(source) and not kind_of(source) and not path.parent.is_dir():
            told = f"hf://datasets/{source.partition(':')[0]}/**/*.parquet"
            raise UsageError(f"--streaming reads files: name those of a hub data set by URL, such as {told}")
        else:
            raise DataError(f"no such file: {source}")
        return [(str(file), file.stat().st_size) for file in found if file.is_file()], False
    except OSError as problem:
        raise DataError(f"{source[:80]}: cannot be read ({problem.strerror})") from None


def _in_store(source: str) -> tuple[list[tuple[str, int | None]], bool]:
    if "::" in source:
        raise UsageError(f"{source}: a URL of one file system is expected")
    system, path = stores.file_system(source)
    try:
        if glob.has_magic(path):
            found, single = system.glob(path, detail=True), False
        else:
            about = system.info(path)
            single = about["type"] == "file"
            found = {path: about} if single else system.find(path, detail=True)
    except FileNotFoundError:
        raise DataError(f"no such file: {source}") from None
    except Exception as problem:  # each store raises errors of its own
        raise stores.unreachable(source, problem) from None
    files = [(name, about.get("size")) for name, about in found.items() if about["type"] == "file"]
    return [(system.unstrip_protocol(name), size) for name, size in files], single


def _looked_at(unit: Unit) -> list[Unit]:
    """A file's units: those of a parquet file are its row groups, with the rows that its footer tells."""
    suffix = Path(unit.place).suffix.lower()
    if COMPRESSED.get(suffix) == "zstd" and not _zstd():
        raise EnvironmentUnfit(f"{unit.place}: reading zstd needs a package: pip install zstandard")
    if unit.kind == "lines" and ".json" in Path(unit.place.lower()).suffixes[-2:] and _begins(unit) == b"[":
        raise DataError(f"{unit.place}: a JSON list is read whole: leave --streaming out, or write it as JSON lines")
    if unit.kind != "table":
        return [unit]
    import pyarrow.parquet

    try:
        with _opened(unit) as file, pyarrow.parquet.ParquetFile(file) as table:
            groups, first = [], 0
            for number in range(table.num_row_groups):
                about = table.metadata.row_group(number)
                groups.append(replace(unit, rows=about.num_rows, size=about.total_byte_size, group=number, first=first))
                first += about.num_rows
            return groups
    except EnvironmentUnfit:
        raise
    except Exception as problem:  # pyarrow raises what its readers raise
        raise DataError(f"{unit.place}: cannot be read ({type(problem).__name__})") from None


def _zstd() -> bool:
    from fsspec.compression import compr

    return "zstd" in compr


def _begins(unit: Unit) -> bytes:
    try:
        with _opened(unit) as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except Exception as problem:
        if isinstance(problem, OSError) or type(problem).__name__ in TORN:
            return b""  # whoever reads it tells
        raise


# ---- reading them


def records(unit: Unit) -> Iterator[Record]:
    """The records of a unit in order. Where reading fails it is opened again, and gone on with where it was.

    Raises:
        CannotLoad: it cannot be read, as often as it is tried.
    """
    done, tries = 0, 0
    while True:
        try:
            for number, record in enumerate(_READ[unit.kind](unit)):
                if number >= done:
                    done, tries = number + 1, 0
                    yield record
            return
        except Exception as problem:
            if not _passing(unit, problem):
                raise
            tries += 1
            if tries == TRIES or isinstance(problem, FileNotFoundError):
                told = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
                raise CannotLoad(f"{unit.place}: cannot be read ({told}); go on with --resume") from None
            time.sleep(PAUSE * tries)


def _passing(unit: Unit, problem: Exception) -> bool:
    """Whether a problem is one of the disk or the network, which may pass: the clients of stores raise errors of their
    own."""
    if isinstance(problem, TrainerError | MemoryError):
        return isinstance(problem, CannotLoad)
    return isinstance(problem, OSError) or stores.is_url(unit.place)


@contextlib.contextmanager
def _opened(unit: Unit):
    """The unit's file, decompressed but for archives, which `tarfile` decompresses itself."""
    with contextlib.ExitStack() as stack:
        if stores.is_url(unit.place):
            system, path = stores.file_system(unit.place)
            file = stack.enter_context(system.open(path, "rb"))
            if unit.kind != "table":
                file = io.BufferedReader(file, 2**20)
        else:
            file = stack.enter_context(open(unit.place, "rb"))
        compression = COMPRESSED.get(Path(unit.place.lower()).suffix)
        if compression and unit.kind == "lines":
            from fsspec.compression import compr

            file = stack.enter_context(compr[compression](file, mode="rb"))
        yield file


def _lines(unit: Unit) -> Iterator[Record]:
    number, pieces, size = 1, [], 0
    try:
        with _opened(unit) as file:
            while piece := file.readline(2**20):  # a line may be longer than memory
                size += len(piece)
                pieces = [*pieces, piece] if size <= MAX_RECORD else []
                if piece.endswith(b"\n"):
                    yield from _record(unit, number, pieces, size)
                    number, pieces, size = number + 1, [], 0
            yield from _record(unit, number, pieces, size)
    except Exception as problem:
        yield _torn(unit, number, f"{unit.label}:{number}", problem)


def _torn(unit: Unit, at: int, name: str, problem: Exception) -> Record:
    """What stands for the rest of a file that is broken; raises any other problem again."""
    if type(problem).__name__ not in TORN:
        raise problem
    told = f"the file breaks off ({type(problem).__name__}); what follows in it is lost"
    return Record(unit, at, RowError(name, told, "bad_archive"), 0)


def _record(unit: Unit, number: int, pieces: list[bytes], size: int) -> Iterator[Record]:
    """The record of a line; none of an empty one."""
    if size > MAX_RECORD:
        told = f"a line of {size >> 20:,} MiB, over the limit of {MAX_RECORD >> 20} MiB"
        yield Record(unit, number, RowError(f"{unit.label}:{number}", told, "line_too_long"), 0)
    elif (line := b"".join(pieces)).strip(b"\xef\xbb\xbf \t\r\n"):
        yield Record(unit, number, line, size)


def _line(line: bytes, name: str):
    try:
        text = line.decode("utf-8-sig").strip("\r\n")
    except UnicodeDecodeError:
        raise RowError(name, "not UTF-8 text", "bad_encoding") from None
    return parsed(text, name)


def _table(unit: Unit) -> Iterator[Record]:
    import pyarrow.parquet

    number = unit.first
    try:
        with _opened(unit) as file, pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
            for batch in table.iter_batches(32, row_groups=[unit.group], use_threads=False):
                size = batch.nbytes // max(1, batch.num_rows)
                for row in _rows(batch, unit.label, number):
                    yield Record(unit, number, row, size)
                    number += 1
    except Exception as problem:
        yield _torn(unit, number, f"{unit.label}[{number}]", problem)


def _rows(batch, label: str, first: int) -> list[dict | RowError]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        rows: list[dict | RowError] = []
        for at in range(batch.num_rows):
            try:
                rows += batch.slice(at, 1).to_pylist()
            except UnicodeDecodeError:
                rows.append(RowError(f"{label}[{first + at}]", "not UTF-8 text", "bad_encoding"))
        return rows


def _archive(unit: Unit) -> Iterator[Record]:
    with _opened(unit) as file:
        for key, files in archives.samples(file, unit.label):
            size = 0 if isinstance(files, RowError) else sum(len(content) for _, content in files)
            yield Record(unit, key, files, size)


_READ = {"lines": _lines, "table": _table, "archive": _archive}
