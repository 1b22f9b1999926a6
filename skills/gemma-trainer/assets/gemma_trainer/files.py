"""Files that are there whole or not at all, and the errors of a full disk."""

from __future__ import annotations

import errno
import os
import re
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


def usual_mode() -> int:
    """The permissions a new file has here."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def is_disk_full(problem: BaseException) -> bool:
    """Whether an error means that a file could not grow; safetensors and torch say so in their own words."""
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    words = r"No space left|File too large|quota exceeded|PytorchStreamWriter failed|os error (27|28|122)\b"
    return re.search(words, str(problem), re.IGNORECASE) is not None
