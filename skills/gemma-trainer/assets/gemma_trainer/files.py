"""Files that are there whole or not at all, and the errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import sys
import threading
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """A path as a user writes it: a leading `~/` is the home folder; a file may be named `~x`."""
    return Path(text).expanduser() if str(text).startswith("~/") else Path(text)


def write_whole(path: str | Path, text: str) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new, never a part.

    Raises:
        OSError: it cannot be written; then an older file stays as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode("utf-8", "replace"))  # JSON may hold half a surrogate pair
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def finite(value):
    """A value with the numbers that JSON has no form for, NaN and infinity, as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
