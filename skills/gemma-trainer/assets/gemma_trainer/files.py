"""Files and folders that are there whole or not at all, and the errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import shutil
import sys
import threading
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """A path as a user writes it: a leading `~/` is the home folder; a file may be named `~x`."""
    return Path(text).expanduser() if str(text).startswith("~/") else Path(text)


def write_whole(path: str | Path, text: str | bytes) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new, never a part.

    Raises:
        OSError: it cannot be written; then an older file stays as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            # JSON may hold half a surrogate pair.
            file.write(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: str | Path) -> None:
    """Have all that is in a folder on the disk before this returns, so that a loss of power takes nothing of it."""
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            _sync(path)
    for path in (Path(folder), *filter(Path.is_dir, Path(folder).rglob("*"))):
        _sync(path)


def _sync(path: Path) -> None:
    with contextlib.suppress(PermissionError, NotImplementedError):  # Windows syncs no folder
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as problem:
            if problem.errno != errno.EINVAL:  # a file system that does not sync
                raise
        finally:
            os.close(opened)


def move_whole(source: str | Path, target: str | Path) -> None:
    """Put a finished file or folder in its place in one step, all of it on the disk before and after.

    Raises:
        OSError: `target` is a folder that holds something; or the disk fails.
    """
    source, target = Path(source), Path(target)
    sync_folder(source) if source.is_dir() else _sync(source)
    os.replace(source, target)
    _sync(target.parent)


def remove_folder(folder: str | Path) -> None:
    """Remove a folder that is not to be met half removed: it loses its name first."""
    folder = Path(folder)
    hidden = folder.with_name(f".removed-{folder.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def finite(value):
    """A value with the numbers that JSON has no form for, NaN and infinity, as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def mib(size: float) -> str:
    """A number of bytes for a reader."""
    return f"{size / 2**20:,.{0 if size >= 10 * 2**20 else 1}f} MiB"


def usual_mode() -> int:
    """The permissions a new file has here."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def is_disk_full(problem: BaseException) -> bool:
    """Whether an error means that a file could not grow; safetensors and torch say so in their own words."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    words = (
        r"No space left|File too large|quota exceeded|PytorchStreamWriter failed|os error (27|28|122)\b"
        r"|iostream error|inline_container\.cc"
    )
    return re.search(words, str(problem), re.IGNORECASE) is not None


_silenced = {"depth": 0, "stderr": -1}
_lock = threading.Lock()


@contextlib.contextmanager
def silent_stderr():
    """Keep C libraries from writing to the process's stderr: libmpg123 and libtiff tell it of every odd byte they meet.

    Errors are raised all the same. Safe in threads: the first in turns stderr away, the last out turns it back. Also a
    decorator: `@silent_stderr()`.
    """
    with _lock:
        if _silenced["depth"] == 0:
            _silenced["stderr"] = _turn_away()
        _silenced["depth"] += 1
    try:
        yield
    finally:
        with _lock:
            _silenced["depth"] -= 1
            if _silenced["depth"] == 0 and _silenced["stderr"] >= 0:
                os.dup2(_silenced["stderr"], 2)
                os.close(_silenced["stderr"])
                _silenced["stderr"] = -1


def _turn_away() -> int:
    """Point file descriptor 2 at nothing; returns a copy of it, or -1 where that cannot be done."""
    kept = nowhere = -1
    try:
        kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        return kept
    except OSError:  # there is none, or no file can be opened any more
        if kept >= 0:
            os.close(kept)
        return -1
    finally:
        if nowhere >= 0:
            os.close(nowhere)


def tell(text: str) -> None:
    """Write a line to stderr, also while `silent_stderr` has turned it away: for signal handlers."""
    if _silenced["stderr"] >= 0:
        os.write(_silenced["stderr"], f"{text}\n".encode())
    else:
        print(text, file=sys.stderr, flush=True)
