"""A file that answers are written to as they come, so that what was paid for is never lost, nor paid for twice."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from .errors import UsageError
from .replies import Failure, Reply, check_kind
from .writing import writable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BINARY = getattr(os, "O_BINARY", 0)  # of Windows, which else writes other line ends
SYNC_EVERY = 1.0  # seconds: what a loss of power may take; a killed process loses nothing


class Journal:
    """Answers by the keys of their requests. Line by line: the settings first, then one answer or failure each.

    A context, which keeps others out; without an answer no file is left. `replies` and `failures` hold what is there; a
    failure is gone once its request was answered. A line that was broken off by the end of a process is not there.

    Args:
        settings: what the answers depend on; a journal of other settings is refused.

    Raises:
        UsageError: a journal is there and not to be resumed, is of other settings, is in use, or is none.
    """

    def __init__(self, path: Path, settings: dict, resume: bool, overwrite: bool):
        self.path, self.replies, self.failures, self._synced = path, {}, {}, time.monotonic()
        must_be_free(path, resume, overwrite)
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        try:
            self._lock()
            if resume:
                self._read(settings)
            if not resume or not os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)
                self._write({"settings": settings})
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is in use by a run that is not finished") from None
        except OSError:  # a file system without locks
            pass

    def _read(self, settings: dict) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                self._take(number, line, settings)
                whole += len(line)
        os.ftruncate(self._file, whole)

    def _take(self, number: int, line: bytes, settings: dict) -> None:
        try:
            record = json.loads(line)
            if number == 0:
                check_settings(self.path, dict(record["settings"]), settings)
                return
            key = check_kind(record["key"], str)
            if "failed" in record:
                self.failures[key] = Failure(check_kind(record["failed"], str), check_kind(record["reason"], str))
            else:
                self.replies[key] = Reply.of(record)
                self.failures.pop(key, None)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise damaged(self.path, number + 1) from None

    def add(self, key: str, result: Reply | Failure) -> None:
        """Write down what became of a request."""
        if isinstance(result, Failure):
            self.failures[key] = result
            self._write({"key": key, "failed": result.code, "reason": result.reason})
        else:
            self.replies[key] = result
            self.failures.pop(key, None)
            self._write({"key": key} | result.record())

    def _write(self, record: dict) -> None:
        """Append a line in one call, so that a killed process leaves all of it or the beginning of it."""
        line, size = json.dumps(record).encode() + b"\n", os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):  # a disk that is nearly full takes a part; the next call says so
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, size)
            raise
        if time.monotonic() - self._synced > SYNC_EVERY:
            os.fsync(self._file)
            self._synced = time.monotonic()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *problem) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
            if not self.replies:  # nothing to go on with
                self.path.unlink()
        os.close(self._file)


def damaged(path: Path, line: int) -> UsageError:
    return UsageError(f"{path}:{line} is no line of a journal: mend it, or throw the file away with --overwrite")


def must_be_free(path: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a journal that is there, where nothing says what is to become of it."""
    if path.exists() and not (resume or overwrite):
        raise UsageError(f"{path} holds answers of an earlier run: --resume goes on, --overwrite throws them away")


def settings_of(path: Path) -> dict:
    """The settings that a journal was begun with; empty where there is none, or no whole line yet."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        line = file.readline()
    try:
        return dict(json.loads(line)["settings"]) if line.endswith(b"\n") else {}
    except (ValueError, KeyError, TypeError):
        raise damaged(path, 1) from None


def check_settings(path: Path, before: dict, now: dict) -> None:
    """Refuse to mix answers of different settings."""
    if other := [name for name in now if before.get(name) != now[name]]:
        told = ", ".join(f"--{name.replace('_', '-')} was {before.get(name)!r}" for name in other)[:300]
        raise UsageError(f"{path} was begun with other settings ({told}): give the same, or another --output")
