"""An evaluation's folder: its settings, and what each arm made of each row, kept so that it can go on after a kill."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from .errors import EnvironmentUnfit, UsageError
from .files import user_path, write_whole

SETTINGS, ANSWERS, RESULT = "settings.json", "answers.jsonl", "evaluation.json"


def open_folder(config) -> Path:
    """The folder of an evaluation, made where it is absent; nothing in it is touched yet.

    Raises:
        UsageError: it holds other files, or an evaluation that is neither to be replaced nor gone on with.
        EnvironmentUnfit: it cannot be made.
    """
    folder = user_path(config.output or f"runs/evaluate-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    if config.resume and not config.output:
        raise UsageError("--resume needs --output, the folder of the evaluation to go on with")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder} is a file")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    held = {name for name in held if not name.endswith(".tmp")}
    if held - {ANSWERS} and SETTINGS not in held:  # killed early, it has no settings yet
        raise UsageError(f"--output {folder} holds other files: choose a new or empty folder")
    begun = ANSWERS in held and (folder / ANSWERS).stat().st_size  # else the last one failed before it asked anything
    if begun and not (config.overwrite or config.resume):
        told = "holds an evaluation already: add --resume or --overwrite, or choose another"
        raise UsageError(f"--output {folder} {told}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise EnvironmentUnfit(f"--output {folder} cannot be made ({problem.strerror})") from None
    return folder


def keep_settings(folder: Path, settings: dict) -> None:
    """Write what decides the answers; where that is there already, refuse any that differs (UsageError)."""
    settings, path = json.loads(json.dumps(settings)), folder / SETTINGS
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if not isinstance(known, dict):
            raise UsageError(f"--resume: {path} is damaged: begin anew with --overwrite")
        differing = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
        if differing:
            told = "; ".join(f"{key} was {_shown(known.get(key))}, is {_shown(settings.get(key))}" for key in differing)
            raise UsageError(f"--resume: {folder} was evaluated otherwise: {told}. Begin anew with --overwrite")
    write_whole(path, json.dumps(settings, indent=1) + "\n")


def _shown(value) -> str:
    return json.dumps(value)[:80]


class Book:
    """`answers.jsonl`: a line for each arm, measure and row. Lines are added at its end, a batch at a time, and are on
    the disk before the next batch is begun; what a killed process left of a line is cut off.

    Args:
        path: the file, which other processes are kept out of while this one lives.
        anew: forget what is in it, and remove the settings and the result beside it (so, too, where nothing is in it).

    Raises:
        UsageError: another process writes it.
    """

    def __init__(self, path: Path, anew: bool = False):
        self.file = path.open("ab+")
        self._lock(path)
        if anew or not path.stat().st_size:
            self.file.truncate(0)
            for name in (RESULT, SETTINGS):
                path.with_name(name).unlink(missing_ok=True)
        self.found: dict[tuple[str, str, int], dict] = {}
        self.waiting: list[bytes] = []
        self.file.seek(0)
        whole = 0
        for line in self.file:
            if not line.endswith(b"\n") or not self._read(line):
                break
            whole += len(line)
        self.file.truncate(whole)

    def _lock(self, path: Path) -> None:
        try:
            import fcntl

            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise UsageError(f"--output {path.parent} is in use by an evaluation that is not finished") from None
        except (ImportError, OSError):  # Windows; a file system without locks
            pass

    def _read(self, line: bytes) -> bool:
        try:
            entry = json.loads(line)
            self.found[entry.pop("arm"), entry.pop("measure"), entry.pop("row")] = entry
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return False
        return True

    def has(self, arm: str, measure: str, rows) -> bool:
        """Whether all of these rows are done."""
        return all((arm, measure, row) in self.found for row in rows)

    def add(self, arm: str, measure: str, row: int, entry: dict) -> None:
        """Keep what was found, until `flush` at the latest in memory only."""
        self.found[arm, measure, row] = entry
        line = {"arm": arm, "measure": measure, "row": row} | entry
        self.waiting.append(json.dumps(line).encode() + b"\n")

    def flush(self) -> None:
        """Have all that was added on the disk."""
        self.file.write(b"".join(self.waiting))
        self.waiting.clear()
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()
