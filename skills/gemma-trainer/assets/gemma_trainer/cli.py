"""The command line that all scripts share: parsing, exit codes, output. Imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import sys
import traceback
import warnings
from pathlib import Path

from . import ranks
from .errors import EnvironmentUnfit, Interrupted, OutOfMemory, TrainerError, UsageError
from .files import is_disk_full
from .flags import check_ranges

EXIT_CODES = """exit codes:
  0 done                 3 bad data                     6 out of memory
  1 unexpected fault     4 unfit environment, no disk   7 training diverged
  2 wrong usage          5 model or data set not loaded 8 a check did not pass
  130 interrupted, 143 terminated (a checkpoint was saved, if training had begun)"""
EXIT_CODES_DATA = """exit codes:
  0 done (rows that were put aside are counted, and told)     4 missing package, or no room on the disk
  1 unexpected fault                                          5 model or hub data set not loaded
  2 wrong usage, or a file that is there already              6 out of memory
  3 bad data: INVALID, no such file, or no row can be used    130 interrupted, 143 terminated: nothing was written"""
PEER_GONE = (
    "Connection closed by peer|Connection reset by peer|remote process exited|Broken pipe|NCCL communicator was aborted"
)
PEER_ENDED = "another process of this run has ended: see what it said, or was killed by"

MORE_MEMORY = "end other programs, or take a machine with more"


# ---- parsing


def build_parser(flags: type, description: str, examples: str, command: str = "") -> argparse.ArgumentParser:
    """A parser with one flag for each field of the dataclass `flags`, in order."""
    parser = _parser(description, examples, command, _exit_codes(flags))
    if hasattr(flags, "less_memory"):
        parser.epilog += f"\n\nwhen memory runs out, {flags.less_memory}"
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="flags from a JSON, TOML or YAML file, named without dashes (max-len: 512); the command line wins",
    )
    for field in dataclasses.fields(flags):
        _add_flag(parser, field)
    return parser


def _exit_codes(flags: type) -> str:
    trains = any(field.name == "auto_batch" for field in dataclasses.fields(flags))
    return getattr(flags, "exit_codes", EXIT_CODES if trains else EXIT_CODES_DATA)


def _parser(description: str, examples: str, command: str, exit_codes: str) -> _Parser:
    return _Parser(
        prog=f"{Path(sys.argv[0]).name} {command}".strip(),
        description=description,
        epilog=f"examples:\n{examples}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"{message} (see {self.prog} --help)")


def _add_flag(parser, field) -> None:
    name, annotation = "--" + field.name.replace("_", "-"), str(field.type)
    options = {"help": field.metadata["help"], "default": field.default}
    if field.metadata.get("word"):
        parser.add_argument(field.name, metavar=field.name.upper(), help=field.metadata["help"])
        return
    if field.metadata.get("words"):
        parser.add_argument(field.name, nargs="*", metavar=field.name.upper(), **options)
        return
    if annotation == "bool":
        options["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
    else:
        if annotation.startswith("tuple"):
            options |= {"nargs": "+", "action": "extend", "default": None}
        else:
            options["type"] = next((kind for kind in (int, float) if annotation.startswith(kind.__name__)), str)
            options["choices"] = field.metadata["choices"]
        options["metavar"] = (
            None if options.get("choices") else annotation.split("[")[-1].split(" |")[0].split(",")[0].upper()
        )
        options["metavar"] = field.metadata.get("metavar") or options["metavar"]
    if not (field.default is None or field.default is False or field.default == ()):
        options["help"] += f" (default: {'on' if field.default is True else field.default})"
    parser.add_argument(name, **options)


def parse(flags: type, description: str, examples: str, argv: list[str], command: str = ""):
    """Read the command line, and the file that `--config` names, into a `flags` object.

    Raises:
        UsageError: an unknown flag, a wrong value, or a config file that cannot be read.
    """
    parser = build_parser(flags, description, examples, command)
    known = parser.parse_args(argv)
    if known.config:
        given = {word.split("=")[0] for word in argv if word.startswith("--")}
        known = parser.parse_args(_config_arguments(known.config, flags, given) + argv)
    values = {field.name: getattr(known, field.name) for field in dataclasses.fields(flags)}
    several = {field.name for field in dataclasses.fields(flags) if str(field.type).startswith("tuple")}
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    values |= {name: defaults[name] if values[name] is None else tuple(values[name]) for name in several}
    check_ranges(values)
    return flags(**values)


def _config_arguments(file: str, flags: type, given: set[str]) -> list[str]:
    """The entries of a config file as command-line arguments, without the flags that are `given` there."""
    content = _read_config(Path(file))
    fields = {field.name: field for field in dataclasses.fields(flags) if not {"word", "words"} & field.metadata.keys()}
    arguments = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise UsageError(f"{file}: unknown key {key!r}; keys are the flags without their dashes")
        option, is_switch = "--" + name.replace("_", "-"), str(fields[name].type) == "bool"
        if value in (None, [], {}) or given & {option, f"--no-{option[2:]}"}:
            continue
        if isinstance(value, bool) and not is_switch:
            value = "on" if value else "off"  # YAML reads the words on and off as booleans
        if is_switch and not isinstance(value, bool):
            raise UsageError(f"{file}: {key} must be true or false")
        if is_switch:
            arguments += [option] if value else [f"--no-{option[2:]}"] if fields[name].default else []
        elif isinstance(value, dict):
            if fields[name].metadata.get("metavar") != "KEY=VALUE":
                raise UsageError(f"{file}: {key} must not be an object")
            arguments += [f"{option}={fact}={item}" for fact, item in value.items()]
        elif isinstance(value, list):
            arguments += [option, *map(str, value)]
        else:
            arguments.append(f"{option}={value}")
    return arguments


def _read_config(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            import tomllib

            content = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            content = yaml.safe_load(text)
        else:
            content = json.loads(text)
    except OSError as problem:
        raise UsageError(f"--config {path}: {problem.strerror}") from None
    except Exception as problem:  # three parsers, three kinds of error
        raise UsageError(f"--config {path}: cannot be parsed ({str(problem).splitlines()[0]})") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: expected an object of flags")
    return content


# ---- running


told: list[str] = []  # what was noted in this process, for the run's report


def note(message: str) -> None:
    """Tell the user something on stderr; of several ranks the first one does."""
    told.append(message)
    if ranks.rank() == 0:
        print(message, file=sys.stderr, flush=True)


def run_script(work, flags: type, description: str, examples: str, argv: list[str] | None = None) -> int:
    """Parse the flags, call `work(config)`, print its result, and turn any error into its exit code.

    Args:
        work: takes the config and returns the result as a dict with a "summary" text for people. While it runs,
            stdout is stderr, so that no library's chatter mixes with the result.
    """
    argv = sys.argv[1:] if argv is None else argv
    return _run(lambda: (work, parse(flags, description, examples, argv)), argv)


def run_commands(commands: dict[str, tuple], description: str, examples: str, argv: list[str] | None = None) -> int:
    """Like `run_script`, of a script whose first word says what to do.

    Args:
        commands: {name: (work, flags, description)}; the first one is done where no word is given.
    """
    argv = sys.argv[1:] if argv is None else argv
    return _run(lambda: _read_command(commands, description, examples, argv or [next(iter(commands))]), argv)


def _read_command(commands: dict[str, tuple], description: str, examples: str, argv: list[str]):
    if argv[0] not in commands:
        parser = _parser(description, examples, command="", exit_codes=_exit_codes(next(iter(commands.values()))[1]))
        listed = parser.add_subparsers(title="commands (each has its own --help)", metavar="COMMAND", required=True)
        for name, (_, _, told) in commands.items():
            listed.add_parser(name, help=told)
        parser.parse_args(argv)
    work, flags, told = commands[argv[0]]
    own = [line for line in examples.splitlines() if f" {argv[0]}" in line]
    return work, parse(flags, told, "\n".join(own), argv[1:], argv[0])


def _run(read, argv: list[str]) -> int:
    """Do what `read()` says, which returns (work, config)."""
    for name in ("stdout", "stderr"):  # closed by who called us
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    config, stdout = None, sys.stdout
    try:
        work, config = read()
        _quiet_environment()
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores the latter
                signal.signal(number, _terminated)
        sys.stdout = sys.stderr
        result = work(config)
        sys.stdout = stdout
        return _print_result(result, config)
    except BaseException as problem:
        if isinstance(problem, SystemExit) and config is None:  # of --help
            raise
        error = as_error(problem, config)
        if "--debug" in argv or (config and config.debug):
            traceback.print_exc()
        if ranks.rank() == 0 or not isinstance(error, Interrupted):  # which is the same for all
            print(f"{ranks.name()}error: {error}", file=sys.stderr, flush=True)
        ranks.leave_word(f"{ranks.name()}{error}", error.exit_code)
        if ranks.rank() == 0 and ("--json" in argv or (config and config.json)):
            facts = {"kind": error.kind, "message": str(error)}
            with contextlib.suppress(OSError):
                print(json.dumps({"status": "failed", "exit_code": error.exit_code, "error": facts}), file=stdout)
        return error.exit_code
    finally:
        sys.stdout = stdout


def _print_result(result: dict, config) -> int:
    """Print a result; returns the exit code. Of several ranks the first one prints."""
    summary = result.pop("summary", "")
    if result.get("exit_code"):
        ranks.leave_word(summary, result["exit_code"])
    if ranks.rank():
        return result.get("exit_code", 0)
    try:
        print(json.dumps(result, default=str) if config.json else summary, flush=True)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return result.get("exit_code", 0)


def _terminated(number, frame):
    raise Interrupted("terminated before anything new was saved; what was there stays as it is", 143)


def _quiet_environment() -> None:
    """Before any heavy import: no telemetry, and no advice that is not ours."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"Unexpected keyword arguments \['custom_metadata'\]")  # we wrote it
    for library in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not sys.stderr.isatty():
        for library in ("HF_HUB", "HF_DATASETS"):
            os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")


def as_error(problem: BaseException, config=None) -> TrainerError | Interrupted:
    """The error to tell the user for any exception.

    Args:
        config: the script's flags, whose class may say under `less_memory` what takes less memory.
    """
    trains = hasattr(config, "auto_batch")
    if isinstance(problem, TrainerError | Interrupted):
        return problem
    if isinstance(problem, KeyboardInterrupt):
        return Interrupted("interrupted: what was saved before stays as it is", 130)
    if isinstance(problem, ModuleNotFoundError):
        requirements = Path(__file__).resolve().parent.parent / "requirements.txt"
        error = TrainerError(f"{problem}: run the script with `uv run`, or pip install -r {requirements}")
        error.exit_code, error.kind = 4, "environment"
        return error
    memory = r"out of memory|can(no|')t allocate memory|failed to map segment"
    if isinstance(problem, MemoryError) or re.search(memory, str(problem), re.I):
        return OutOfMemory(f"out of memory: {getattr(config, 'less_memory', MORE_MEMORY)}")
    if is_disk_full(problem):
        return EnvironmentUnfit(
            "no room left on the disk: free some, then run again" + " (with --resume to go on)" * trains
        )
    if ranks.world() > 1 and re.search(PEER_GONE, str(problem)):
        return TrainerError(PEER_ENDED)
    if isinstance(problem, OSError) and problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentUnfit(f"{problem.filename} cannot be accessed: {problem.strerror}")
    if "DataLoader worker" in str(problem) and "killed" in str(problem):
        return OutOfMemory("a process of --num-workers was killed, probably for lack of memory: lower --num-workers")
    where = traceback.extract_tb(problem.__traceback__)
    place = f" in {Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
    return TrainerError(f"unexpected {type(problem).__name__}{place}: run again with --debug for the traceback")
