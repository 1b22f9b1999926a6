"""What a folder or file of a model is, and `export.json`, which tells what it was made from."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from .errors import CannotLoad, EnvironmentUnfit, UsageError
from .files import finite, move_whole, sync_folder, user_path, write_whole

# Beside an exported model: what it was made from, what was checked, and up to three rows with the answers to them. The
# rows are the user's data, so it stays on this machine: whatever hands a folder on leaves this file out.
FILE = "export.json"
OLDER = "older"  # the name of what is about to be replaced, for the moment between two moves


def kind_of(path: str | Path) -> str:
    """What is there: "adapter", "model" (whole), "ollama" (a folder with a Modelfile), "gguf" (such a file, or a folder
    of them), or "run" (which has saved no model yet).

    Raises:
        CannotLoad: nothing of the kind.
    """
    path = user_path(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return "gguf"
        raise CannotLoad(f"{path}: a file that is no .gguf; give the folder of a run, an adapter or a model")
    if not path.is_dir():
        raise CannotLoad(f"{path}: no such folder or file")
    marks = {
        "adapter_config.json": "adapter",
        "Modelfile": "ollama",
        "config.json": "model",
        "*.gguf": "gguf",
        "run.json": "run",
    }
    for mark, kind in marks.items():
        if next(path.glob(mark), None):
            return kind
    raise CannotLoad(f"{path}: no run, adapter, model or export is there")


def read(path: str | Path) -> dict:
    """What `export.json` says of a folder, or of the folder that a file is in; empty where there is none that can be
    read."""
    path = user_path(path)
    try:
        found = json.loads(((path if path.is_dir() else path.parent) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write(folder: Path, facts: dict) -> None:
    """Write `export.json` into a folder."""
    write_whole(folder / FILE, json.dumps(finite(facts), indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def new_folder(output: str | None, made: str, overwrite: bool) -> Iterator[Path]:
    """A folder to write an export into, which becomes `output` in one step when all is in it, its `export.json` too;
    without that, or after an error, nothing is left of it.

    Args:
        made: what kind of export it is, as its `export.json` says under "made".
        overwrite: replace an older export of this kind, and nothing else.

    Raises:
        UsageError: no `output`, or one that holds something else.
        EnvironmentUnfit: it cannot be made.
    """
    if not output:
        raise UsageError("--output is required")
    target = user_path(output).resolve()  # a link stays, and what it leads to is written
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        _must_be_free(target, output, made, overwrite)
        folder = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.unfinished-")
    except OSError as problem:
        raise EnvironmentUnfit(f"--output {output} cannot be made ({problem.strerror})") from None
    with folder as aside, _locked(aside):
        staged = Path(aside) / target.name
        staged.mkdir()
        yield staged
        if (staged / FILE).is_file():
            _must_be_free(target, output, made, overwrite)  # no other process has been faster
            _put(staged, target, Path(aside) / OLDER)


def _must_be_free(target: Path, output: str, made: str, overwrite: bool) -> None:
    """Refuse to replace what is at `target`, but for an older export of this kind with `overwrite` (UsageError)."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise UsageError(f"--output {output} is there already: give another, or --overwrite")
        if read(target).get("made") != made:
            raise UsageError(f"--output {output} was not made by this command: --overwrite replaces only such folders")


def _put(staged: Path, target: Path, older: Path) -> None:
    """Put a finished folder in its place; what was there is back where that fails."""
    sync_folder(staged)  # which may take long: before anything is moved
    try:
        if target.exists():
            os.replace(target, older)
        move_whole(staged, target)
    finally:
        _put_back(older, target)


def _put_back(older: Path, target: Path) -> None:
    if older.is_dir() and not target.exists():
        os.replace(older, target)


def _remove_leftovers(target: Path) -> None:
    """Remove what killed processes have left beside `target`: folders that nobody holds the lock of. The export that
    one of them was about to replace is put back."""
    for folder in target.parent.glob(f"{glob.escape(f'.{target.name}.unfinished-')}*"):
        with _locked(folder) as free:
            if free:
                _put_back(folder / OLDER, target)
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[bool]:
    """Hold the lock of a folder; gives whether that could be had."""
    if fcntl is None:
        yield False
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # another process has it, or the file system knows no locks
            free = False
        yield free
    finally:
        os.close(opened)
