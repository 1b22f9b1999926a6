"""A run's folder: refused when in use, filled file by file, each one whole; and what `run.json` says of the run."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from . import ranks
from .cli import note, told
from .errors import CannotLoad, EnvironmentUnfit, UsageError
from .files import finite, mib, move_whole, user_path, write_whole
from .meter import peak_memory_mb
from .report import write_report

# What a run writes, by name: --overwrite removes these and nothing else.
OWN_FILES = """
run.json metrics.jsonl report.html adapter_config.json adapter_model.safetensors config.json generation_config.json
model.safetensors model-*-of-*.safetensors model.safetensors.index.json processor_config.json preprocessor_config.json
tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja checkpoint-* base-model
training_metadata.json samples.json first_batch.json
""".split()
WORD = ".failed-rank-"  # what a rank that is not the first writes as it fails
LEFTOVERS = (".unfinished", ".saving-*", ".removed-*", ".*.tmp", f"{WORD}*")  # what a killed run leaves
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "unsloth")


class Run:
    """One run and its folder. `previous` is the record of the run that is resumed. Of several ranks the first one
    writes; the others find the folder as it is.

    Args:
        script: the script's name, for the default folder `runs/<script>-<date-time>` and `run.json`.
        output: the folder, or None for the default.
        overwrite, resume: what to do when it holds a run already; without either it is refused.

    Raises:
        UsageError: the folder holds a run or other files, or cannot be resumed from.
    """

    _opened = False
    _held: int | None = None  # the open folder that the lock is on

    def __init__(self, script: str, output: str | None, overwrite: bool = False, resume: bool = False):
        self.script, self.started, self.clock = script, datetime.datetime.now(datetime.UTC), time.monotonic()
        self.folder = ranks.agreed(user_path(output) if output else self._default_folder())
        self.named, self.overwrite, self.resume = output is not None, overwrite, resume
        self.record: dict = {}
        self.main = ranks.rank() == 0
        try:
            self._check_folder(output)
        except OSError as problem:  # a name too long, say
            raise UsageError(f"--output cannot be used ({problem.strerror})") from None
        self.previous: dict = self._previous() if resume else {}
        self.record = dict(self.previous)
        self.finished = False  # whether the run that is resumed has come to its end already
        self.goes_on = resume  # whether training takes up checkpoints that are there
        self.together: int | None = None  # rows that stay side by side, where not those of the ranks' batches

    def _default_folder(self, number: int = 1) -> Path:
        """`runs/<script>-<date-time>`, with a number behind it where that is taken."""
        name = f"{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S}" + (f"-{number}" if number > 1 else "")
        return self._default_folder(number + 1) if (folder := Path("runs") / name).exists() else folder

    def _check_folder(self, output) -> None:
        if self.resume and not output:
            raise UsageError("--resume needs --output, the folder of the run to go on with")
        if not self.main:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise UsageError(f"--output {self.folder} is a file")
        held = set(self.folder.iterdir()) if self.folder.is_dir() else set()
        used = held - {path for pattern in LEFTOVERS for path in self.folder.glob(pattern)}
        holds_run = self.folder / "run.json" in used
        if used and not holds_run:
            raise UsageError(f"--output {self.folder} holds other files: choose a new or empty folder")
        if holds_run and not (self.overwrite or self.resume):
            raise UsageError(
                f"--output {self.folder} holds a run already: add --resume or --overwrite, or choose another"
            )

    def _previous(self) -> dict:
        """The record of the run that is resumed; empty where none was begun: the same command starts a run and goes on
        with it, whenever it was stopped."""
        if not (self.folder / "run.json").exists():
            note(f"--resume: there is no run in {self.folder} yet: it begins with the first step")
            return {}
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(found.get("arguments", {}), dict):
                return found
        raise UsageError(f"--resume: {self.folder / 'run.json'} is damaged: begin anew with --overwrite")

    def _lock(self) -> None:
        """Keep other runs out of the folder, until this process ends."""
        if fcntl is None or self._held is not None:
            return
        self._held = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--output {self.folder} is in use by a run that is not finished: choose another"
            ) from None
        except OSError:  # a file system without locks
            pass

    def open(self, needed_bytes: int = 0) -> None:
        """Make the folder ready; only now is an old run in it removed (with `overwrite`).

        Raises:
            EnvironmentUnfit: the disk has less room than `needed_bytes`, or the folder cannot be written.
        """
        if not self.main:
            self.folder = ranks.agreed(None)
            self.folder.mkdir(parents=True, exist_ok=True)  # where the disk is not the first one's
            return
        try:
            while True:
                try:
                    self.folder.mkdir(parents=True, exist_ok=self.named)
                    break
                except FileExistsError:
                    if self.named:
                        raise
                    self.folder = self._default_folder()  # another run began in the same second
            if not os.access(self.folder, os.W_OK):
                raise PermissionError(errno.EACCES, "not writable")
        except OSError as problem:
            raise EnvironmentUnfit(f"--output {self.folder} cannot be made ({problem.strerror})") from None
        self.folder = ranks.agreed(self.folder)
        self._lock()
        if self._opened:  # by an attempt that ran out of memory
            return
        self._opened = True
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise EnvironmentUnfit(
                f"not enough disk: {self.folder} needs about {mib(needed_bytes)} for checkpoints and the result, "
                f"{mib(free)} are free. Free some, or choose another --output."
            )
        if self.overwrite and not self.resume:
            self._remove(OWN_FILES)
        self._remove(LEFTOVERS)
        self.save_record(
            status="running",
            why="",
            pid=os.getpid(),
            host=platform.node(),
            started=self.started.isoformat(timespec="seconds"),
            script=self.script,
        )

    def _remove(self, patterns) -> None:
        for path in [path for pattern in patterns for path in self.folder.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def begin_anew(self, **facts) -> None:
        """Have the next attempt go on from what the one before has saved, if anything."""
        self.goes_on = True
        self.save_record(status="running", why="", **facts)

    def save_record(self, **facts) -> None:
        """Add facts to `run.json` and write it."""
        self.record |= facts
        if not self.main:
            return
        record = finite(self.record).items()
        lines = (f" {json.dumps(key)}: {json.dumps(value, default=str)}" for key, value in record)
        write_whole(self.folder / "run.json", "{\n" + ",\n".join(lines) + "\n}\n")

    def finish(self, status: str, **facts) -> None:
        """Write the last `run.json` and the report page."""
        timing = facts.pop("timing", {}) | {"total_s": round(time.monotonic() - self.clock, 1)}
        facts = {"peak_memory_mb": peak_memory_mb()} | facts
        self.save_record(status=status, timing=timing, notes=list(told), **facts)
        if self.main:
            report_again(self.folder, self.record)

    def leave_word(self, why: str) -> None:
        """Say, beside `run.json`, why a rank that is not the first has failed: before the others can notice it."""
        with contextlib.suppress(OSError):
            write_whole(self.folder / f"{WORD}{ranks.rank()}", why)

    def show(self, samples: dict) -> None:
        """Keep what samples and prompts look like (see `report.write_report`) for the report."""
        if not self.main:
            return
        known = shown_of(self.folder)
        known |= {name: known.get(name, {}) | facts for name, facts in samples.items()}
        write_whole(self.folder / "samples.json", json.dumps(known, ensure_ascii=False))

    def metrics(self) -> list[dict]:
        return metrics_of(self.folder)

    def metrics_size(self) -> int:
        """Bytes of `metrics.jsonl`, to go back to with `cut_metrics`."""
        path = self.folder / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut_metrics(self, size: int) -> None:
        """Forget what was logged beyond `size` bytes: a resumed run will log it again."""
        if self.main and self.metrics_size() > size:
            write_whole(self.folder / "metrics.jsonl", (self.folder / "metrics.jsonl").read_bytes()[:size])

    def add_metrics(self, facts: dict) -> None:
        """Append a line to `metrics.jsonl`."""
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(facts), ensure_ascii=False) + "\n")

    @contextlib.contextmanager
    def aside(self):
        """A folder beside the run's files to write into; what is left in it goes."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".saving-") as folder:
            yield Path(folder)

    @contextlib.contextmanager
    def staged(self):
        """A folder to write the result into; its files move into the run folder one by one, each whole."""
        with self.aside() as staging:
            yield staging
            for path in sorted(staging.iterdir()):
                move_whole(path, self.folder / path.name)


def word_in(folder: Path) -> str:
    """Why a rank of a run has failed, as it said beside `run.json`."""
    for path in sorted(folder.glob(f"{WORD}*")):
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8")
    return ""


def report_again(folder: Path, record: dict | None) -> Path:
    """Write `report.html` from what a run's folder holds, and return its path.

    Args:
        record: what `run.json` says.

    Raises:
        CannotLoad: there is no run.
    """
    if record is None:
        raise CannotLoad(f"{folder}: there is no run.json to make a report from")
    return write_report(folder / "report.html", record, metrics_of(folder), shown_of(folder))


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's `metrics.jsonl`."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    entries = filter(None, map(_entry, path.read_text(encoding="utf-8", errors="replace").splitlines()))
    return [{k: float(v) if v in ("nan", "inf", "-inf") else v for k, v in entry.items()} for entry in entries]


def shown_of(folder: Path) -> dict:
    """What a run keeps for its report of samples and prompts, by name."""
    try:
        found = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: facts for name, facts in found.items() if isinstance(facts, dict)} if type(found) is dict else {}


def _entry(line: str) -> dict:
    """A line of metrics.jsonl; empty for one that a killed run did not finish."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def versions() -> dict[str, str]:
    """The versions of Python and of the packages a run depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
