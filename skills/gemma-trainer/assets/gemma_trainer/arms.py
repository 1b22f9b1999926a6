"""The arms of a comparison: runs of sft_train.py, each in a fresh process, or a run that is finished already.

A process for each, since what a training stack patches is patched for good: there is no way back within one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from . import backends, sources
from .errors import TrainerError, UsageError

ASSETS = Path(__file__).resolve().parent.parent
BACKENDS = ("hf", "unsloth")
PLACES = ("dataset", "eval_dataset", "model", "adapter", "media_root")  # arguments that may name files or folders
# Arguments of a run that say nothing about what its curve is.
BESIDE = """backend output overwrite resume epochs max_steps eval_dataset save_steps eval_steps stop_when best_by
max_minutes auto_batch auto_fit device_memory metadata metadata_file report_to report_samples save_first_batch dry_run
json debug eval_prompts eval_prompts_every eval_prompts_max_tokens eval_prompts_temperature""".split()


class ArmFailed(TrainerError):
    """A process of an arm ended with an error, whose exit code and kind it has."""

    def __init__(self, message: str, exit_code: int, kind: str = "fault"):
        super().__init__(message)
        self.exit_code, self.kind = exit_code, kind


@dataclass(frozen=True)
class Arm:
    """One side of a comparison.

    Args:
        role: "baseline" or "against".
        name: a backend, or the folder of a finished run, whose `run.json` is `record`.
        python: the interpreter that trains it.
    """

    role: str
    name: str
    python: str
    record: dict | None = None

    @property
    def told(self) -> str:
        other = f" of {self.python}" if self.python != sys.executable else ""
        return f"{self.role} ({self.name}{other})"


def arm_of(role: str, name: str, python: str | None = None) -> Arm:
    """The arm that a flag names.

    Raises:
        UsageError: it is neither a backend nor the folder of a finished run of sft_train.py; or no interpreter.
        EnvironmentUnfit: Unsloth is not installed here.
    """
    found = shutil.which(python) if python else sys.executable
    if found is None:
        raise UsageError(f"--python {python}: no such program")
    if python:
        _check_python(found)
    if name in BACKENDS:
        if not python:  # told before anything is trained, where it is not installed
            backends.decide(name)
        return Arm(role, name, found)
    if python:
        raise UsageError(f"--python trains the --{role} arm anew: give {' or '.join(BACKENDS)}, not a run")
    try:
        record = json.loads((Path(name) / "run.json").read_text(encoding="utf-8"))
        ended = record["status"] == "done" and record["steps"] == record["total_steps"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"--{role} {name}: neither {', '.join(BACKENDS)} nor the folder of a finished run") from None
    if record.get("script") != "sft_train":
        raise UsageError(f"--{role} {name} is no run of sft_train.py")
    if not ended:
        raise UsageError(f"--{role} {name}: the run did not train all of its steps, which its curve depends on")
    _check_record(f"--{role} {name}", record)
    return Arm(role, name, found, record)


def arguments_of(record: dict) -> dict:
    """The arguments of a run that another must have to be comparable, without `max_steps`."""
    found = {name: value for name, value in located(record).items() if name not in BESIDE}
    return found | {"dataset": found["dataset"] or record["data"]["sources"]}


def located(record: dict) -> dict:
    """The arguments of a run, whose files and folders are found from wherever."""
    there = Path(record.get("directory", "."))

    def place(value):
        if isinstance(value, list):
            return list(map(place, value))
        path = there / value if isinstance(value, str) and value else None
        found = path and not os.path.isabs(value) and (path.exists() or glob.has_magic(value) and glob.glob(str(path)))
        return str(path) if found else value

    return {name: place(value) if name in PLACES else value for name, value in record["arguments"].items()}


def _check_record(flag: str, record: dict) -> None:
    """Refuse a run whose record lacks what a comparison needs, or whose data are not what they were (UsageError)."""
    needed = {"arguments": dict, "data": dict, "precision": str, "quantization": str, "versions": dict}
    if lacking := [name for name, kind in needed.items() if not isinstance(record.get(name), kind)]:
        raise UsageError(f"{flag}: its run.json is damaged, or of an older version: it lacks {lacking[0]}")
    if record["arguments"].get("streaming"):
        raise UsageError(f"{flag}: a run with --streaming, which keeps no first batch to compare")
    data, names = record["data"], located(record).get("dataset") or record["data"].get("sources", [])
    sources.must_exist(*names)
    if data.get("fingerprint") != sources.fingerprint(names, data.get("rows", 0)):
        raise UsageError(f"{flag}: the data that it was trained on have changed since, or are elsewhere: {names[0]}")


def _check_python(program: str) -> None:
    """Refuse what is no interpreter (UsageError)."""
    try:
        command = [program, "-c", "import sys; print(sys.version_info >= (3, 11))"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        said = ""
    if said.strip() != "True":
        raise UsageError(f"--python {program}: this is no Python 3.11 or later")


def run(command: list[str], log: Path, more: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command to its end, and return (exit code, stdout). Its stderr goes to the end of `log`. Whatever stops us
    stops it, and all that it has started.

    Args:
        more: environment variables beside our own.
    """
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | (more or {}),
            start_new_session=True,
        )
        try:
            stdout = process.communicate()[0].decode("utf-8", "replace")
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
            process.wait()
            raise
    return process.returncode, stdout


def train(arm: Arm, folder: Path, steps: int, *flags: str) -> dict:
    """Train an arm in a fresh process with the flags of the `arguments.json` beside its `folder`; returns the result.

    Raises:
        ArmFailed: with the process's own error.
    """
    log = folder.parent / f"{arm.role}.log"
    command = [arm.python, str(ASSETS / "sft_train.py"), "--config", str(folder.parent / "arguments.json")]
    command += ["--backend", arm.name, "--max-steps", str(steps), "--output", str(folder), "--json", *flags]
    code, stdout = run(command, log)
    try:
        result = json.loads(stdout)
    except ValueError:
        result = {}
    if code or not result:
        error = result.get("error") or {}
        died = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}, and without a result"
        message = f"{arm.told}: {(error.get('message') or died).splitlines()[0]} (all it said: {log})"
        raise ArmFailed(message, max(code, 1), error.get("kind", "fault"))
    for checkpoint in folder.glob("checkpoint-*"):  # of no use here, and as large as what is kept
        shutil.rmtree(checkpoint)
    return result


def reload(folders: list[Path], log: Path) -> list[dict]:
    """What `reload.compare` finds of each run, in one fresh process of this interpreter.

    Raises:
        ArmFailed: nothing could be compared.
    """
    path = os.pathsep.join(filter(None, [str(ASSETS), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", "gemma_trainer.reload", *map(str, folders)]
    code, stdout = run(command, log, {"PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"})
    if code:
        raise ArmFailed(f"the closed loop ended with exit code {code} (see {log})", 1)
    return json.loads(stdout)
