"""Rows from files, folders, globs and hub data sets, read when asked for rather than all at once."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from .errors import CannotLoad, DataError, EnvironmentUnfit, RowError, UsageError
from .files import is_disk_full, user_path
from .parts import Csv, JsonLines, JsonList, Table

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
OWN = (".rejected.jsonl", ".distill.json")  # rows that were put aside, and the record of where rows are from
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
    """Whether a file in a folder is one of rows; not those that our own scripts write beside them."""
    return path.suffix.lower() in SUFFIXES and not path.name.endswith(OWN) and path.is_file()


def _file_part(path: Path):
    suffix = path.suffix.lower()
    if suffix != ".parquet":
        _check_text(path)
    if suffix == ".jsonl" or (suffix == ".json" and _first_character(path) == "{" and _is_lines(path)):
        return JsonLines(path)
    if suffix == ".json":
        return JsonList(path)
    if suffix == ".csv":
        return Csv(path)
    if suffix == ".parquet":
        return Table(_load_dataset("parquet", data_files=glob.escape(str(path))), path, path.parent)
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
    return Table(_load_dataset(name, split or "train"), source, Path.cwd())
