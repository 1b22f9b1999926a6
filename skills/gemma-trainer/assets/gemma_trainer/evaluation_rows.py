"""The rows that a model is evaluated on: where they come from, and what can be asked of each."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import arms, data, sources
from .answer_checks import Check
from .checks import format_of
from .cli import note
from .data import DEMO
from .demo import SAMPLES
from .errors import Fault, RowError, TrainerError, UsageError
from .eval_prompts import read_prompt
from .generation import Question
from .preferences import read_preference
from .rows import SOURCE, read_row, without_none
from .run_check import run_folder, state_of
from .targets import messages_row

CHAT, PAIR, CHOICES = "chat", "pair", "choices"
LINE = re.compile(r"\.(jsonl|json|csv):\d+$")  # how a row's name ends that is no row of a table
LOSS_ALONE = ("bad_text_row", "bad_value")  # why a row that can be read cannot be asked: no turns, or a tool call


@dataclass(frozen=True)
class Item:
    """A row to be evaluated.

    Args:
        kind: CHAT, PAIR or CHOICES.
        question: what is asked, with the expected answer, if there is one; of a PAIR None.
        scored: raw rows whose trained tokens' log-probabilities are taken: the row itself; of a PAIR the chosen side
            and the rejected one; of CHOICES the row with the longest of them as its answer.
        choices, right: the CHOICES, and which is the right one.
        problem: why nothing can be asked of it.
        unasked: why it is not asked, where its loss is taken all the same.
    """

    name: str
    kind: str
    question: Question | None = None
    scored: tuple[dict, ...] = ()
    choices: tuple[str, ...] = ()
    right: int = 0
    checks: tuple[Check, ...] = ()
    problem: str = ""
    unasked: str = ""

    @property
    def expected(self) -> str | None:
        return self.question.expected if self.question else None


@dataclass
class Rows:
    """Where the rows of an evaluation come from, and the rows: `indices` of all that are there."""

    rows: sources.Rows | sources.Subset
    names: list[str]
    demo: bool = False
    indices: list[int] = field(default_factory=list)

    def items(self) -> list[Item]:
        """The rows read; one that cannot be read says why."""
        return [read_item(*_raw_at(self.rows, index)) for index in self.indices]

    @property
    def fingerprint(self) -> str:
        return sources.fingerprint(self.names, len(self.rows))


def run_of(model: str | None) -> dict | None:
    """The record of the run that made a model, None where there is none."""
    return state_of(run_folder(Path(model))) if model and Path(model).is_dir() else None


def open_heldout(config) -> Rows:
    """The rows of --dataset; else those that the run of --model held back; else the demo's.

    Raises:
        DataError: no such file, or a file without rows.
        UsageError: the run's data are not what they were, so that what it held back is not known.
    """
    record = run_of(config.model)
    if config.dataset:
        found = Rows(sources.open_rows(list(config.dataset)), list(config.dataset))
    else:
        found = _held_back(record) or _bundled(record)
    total = len(found.rows)
    found.indices = list(range(total))
    if config.limit is not None and config.limit < total:
        found.indices = sorted(random.Random(config.seed).sample(range(total), config.limit))
        note(f"--limit: {config.limit:,} of {total:,} rows, drawn at random (--seed {config.seed})")
    return found


def _held_back(record: dict | None) -> Rows | None:
    """The rows that a run was evaluated on while it was trained, where it says so and had data of its own."""
    if record is None or record.get("demo") or not isinstance(record.get("arguments"), dict):
        return None
    given = arms.located(record)
    if names := given.get("eval_dataset"):
        rows = sources.open_rows(names)
    elif given.get("test_size"):
        rows, names = _parts(record, given)[1], given["dataset"]
    else:
        return None
    note(f"No --dataset given: {len(rows):,} rows that the run held back ({', '.join(names)}).")
    return Rows(rows, names)


def _parts(record: dict, given: dict) -> tuple:
    """(training rows, rows held back) of a run with --test-size."""
    names = given["dataset"]
    rows = sources.open_rows(names)
    training, held = data.split(rows, given["test_size"], given["seed"])
    known = (record.get("data") or {}).get("fingerprint")
    if known != sources.fingerprint(names, len(training)):
        raise UsageError(f"{', '.join(names)} is no longer what the run was trained on: give --dataset")
    return training, held


def _bundled(record: dict | None) -> Rows:
    paired = bool(record) and record.get("script") == "dpo_train" and bool(record.get("demo"))
    name = str(SAMPLES / DEMO[paired][1])
    note("No --dataset given: evaluating on the built-in demo's held-out rows (bundled samples, offline).")
    return Rows(sources.open_rows([name]), [name], demo=True)


def open_training(config) -> tuple[object, list[str]] | None:
    """(rows, their names) that shots are taken from: --shots-from, else what the run of --model was trained on; None
    where that is not known or not to be had."""
    if config.shots_from:
        return sources.open_rows([config.shots_from]), [config.shots_from]
    record = run_of(config.model)
    if record is None or not isinstance(record.get("arguments"), dict):
        return None
    given = arms.located(record)
    try:
        if record.get("demo"):
            names = _demo_training(record)
            return sources.open_rows(names), names
        if given.get("test_size"):
            return _parts(record, given)[0], given["dataset"]
        return (sources.open_rows(given["dataset"]), given["dataset"]) if given.get("dataset") else None
    except Exception as problem:  # whatever is wrong with files that nobody asked for
        note(f"the run's training data cannot be opened for --few-shot: {problem}")
        return None


def _demo_training(record: dict) -> list[str]:
    return [str(SAMPLES / DEMO[record.get("script") in ("dpo_train", "reward_train")][0])]


def trained_on(record: dict) -> set[Path]:
    """The files that a run was trained on, as far as they are at hand."""
    given = arms.located(record) if isinstance(record.get("arguments"), dict) else {}
    return files_of(_demo_training(record) if record.get("demo") else given.get("dataset") or [])


def began_with(model: str) -> str | None:
    """What the run of a model began with, where that is not the model without its adapter: the adapter that it went on
    training; of a run of all weights the model that it was."""
    record = run_of(model) or {}
    if not isinstance(record.get("arguments"), dict):
        return None
    given, adapted = arms.located(record), (Path(model) / "adapter_config.json").is_file()
    return given.get("adapter") or (None if adapted else given.get("model"))


def files_of(names) -> set[Path]:
    """The files that data sources name; none where one of them is no file, or not there."""
    try:
        return {path.resolve() for name in names for path in sources.files_of(name)}
    except TrainerError:
        return set()


def _raw_at(rows, index: int):
    """(the raw row or the error in its place, its name where it brings none)."""
    try:
        return rows[index], f"row {index}"
    except RowError as problem:
        return problem, problem.row


def read_item(raw, name: str) -> Item:
    """One raw row, or the error in its place, as an `Item`."""
    kind = CHAT
    if isinstance(raw, Mapping):
        name = (raw.get(SOURCE) or (name, None))[0]
        kind = CHOICES if raw.get("choices") is not None else PAIR if format_of(raw) == "preference" else CHAT
    try:
        if isinstance(raw, RowError):
            raise raw
        return {CHAT: _chat, PAIR: _pair, CHOICES: _choices}[kind](raw, name)
    except RowError as problem:
        return Item(problem.row, kind, problem=problem.reason)
    except Fault as problem:
        return Item(name, kind, problem=str(problem))


def _chat(raw: Mapping, name: str) -> Item:
    try:
        prompt = read_prompt(raw, name, table=not LINE.search(name))
    except RowError as problem:
        if problem.code not in LOSS_ALONE:
            raise
        row = read_row({key: value for key, value in raw.items() if key not in ("checks", "id")}, name)
        whole = raw if row.text is not None else messages_row(row)
        return Item(row.name, CHAT, scored=(whole,) if row.trained else (), unasked=problem.reason)
    row = prompt.question.row
    trained = row.trained and any(m["role"] == "assistant" and m.get("train", True) for m in row.messages)
    scored = (messages_row(row),) if trained else ()
    # That an answer stops is looked for in every row: it is a check of the row's own only where the row has others.
    checks = tuple(prompt.checks) if raw.get("checks") is not None else ()
    return Item(row.name, CHAT, prompt.question, scored, checks=checks)


def _pair(raw: Mapping, name: str) -> Item:
    pair = read_preference({key: value for key, value in raw.items() if key not in ("checks", "id")}, name)
    return Item(pair.name, PAIR, scored=(messages_row(pair.chosen), messages_row(pair.rejected)))


def _choices(raw: Mapping, name: str) -> Item:
    raw = without_none(raw)
    given = {key: value for key, value in raw.items() if key not in ("choices", "answer", "checks")}
    question = read_prompt(given, name).question
    choices = raw["choices"]
    if not (isinstance(choices, list) and len(choices) > 1 and all(isinstance(c, str) and c for c in choices)):
        raise RowError(question.row.name, "choices must be a list of two texts or more", "wrong_type")
    wanted = raw.get("answer") if question.expected is None else question.expected
    right = _right(wanted, choices)
    if right is None or len(set(choices)) < len(choices):
        told = (
            "the same choice twice" if right is not None else "its answer is none of the choices, nor the index of one"
        )
        raise RowError(question.row.name, told, "bad_value")
    asked = question.answered()
    longest = {"role": "assistant", "content": max(choices, key=len)}
    scored = asked | {"messages": [*asked["messages"][:-1], longest]}
    return Item(question.row.name, CHOICES, question, (scored,), tuple(choices), right)


def _right(wanted, choices: list[str]) -> int | None:
    """The index of the right choice, given by its text or its index (from 0)."""
    if isinstance(wanted, str):
        told = [choice.strip() for choice in choices]
        return told.index(wanted.strip()) if wanted.strip() in told else None
    is_index = isinstance(wanted, int) and not isinstance(wanted, bool) and 0 <= wanted < len(choices)
    return wanted if is_index else None
