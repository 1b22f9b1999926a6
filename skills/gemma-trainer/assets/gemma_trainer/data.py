"""A run's rows: opened, split, and checked before a model is loaded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import sources
from .checks import count_lengths, length_bias
from .cli import note
from .demo import SAMPLES
from .errors import DataError, MediaError, RowError
from .media import MediaAccess, find_media
from .preferences import Preference, read_preference
from .rows import read_row

MAX_CHECKED = 200_000  # rows whose form is checked before the run; the rest is checked as it is read
SHOWN = 5  # bad rows told by name
DEMO = {False: ("train.jsonl", "heldout.jsonl"), True: ("preferences.jsonl", "preferences-heldout.jsonl")}


@dataclass
class Data:
    """A run's rows. `first` names, for "image" and "audio", the first row that has one; `missing` lists (row, reason)
    for those of the `media` whose file is not there."""

    rows: sources.Rows | sources.Subset
    eval_rows: sources.Rows | sources.Subset | None
    names: list[str]
    eval_names: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    media: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    lengths: Counter = field(default_factory=Counter)  # of pairs, see `checks.count_lengths`
    prompts: list = field(default_factory=list)  # of --eval-prompts, see `eval_prompts.read_prompts`


def load_data(config) -> Data:
    """Open the rows and check their form.

    Raises:
        DataError: no such file, no rows, or rows that cannot be read; the first are named, with the total.
    """
    training, heldout = DEMO[config.paired]
    names = [str(SAMPLES / training)] if config.demo else list(config.dataset)
    evaluation = [str(SAMPLES / heldout)] if config.demo else list(config.eval_dataset)
    rows = sources.open_rows(names)
    eval_rows = sources.open_rows(evaluation) if evaluation else None
    if config.test_size:
        rows, eval_rows = split(rows, config.test_size, config.seed)
    data = Data(rows, eval_rows, names, evaluation)
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    for part in (rows, eval_rows):
        if part is not None:
            _check_form(part, data, access, read_preference if config.paired else read_row)
    _check_files(config, data)
    if told := length_bias(data.lengths):
        note(f"{told}: the model may learn length instead of what you prefer")
    return data


def split(rows, share: float, seed: int):
    """Split rows at random into training and evaluation, in their order, at least one row each."""
    held = max(1, round(share * len(rows)))
    if held >= len(rows):
        raise DataError(f"--test-size {share:g} leaves none of {len(rows)} rows to train on")
    chosen = set(random.Random(seed).sample(range(len(rows)), held))
    kept = [index for index in range(len(rows)) if index not in chosen]
    return sources.Subset(rows, kept), sources.Subset(rows, sorted(chosen))


def _check_form(rows, data: Data, access: MediaAccess, read) -> None:
    """Read each row's form, and look whether the media files it names are there, without opening any."""
    first_bad, others, total = "", [], 0
    for index in range(min(len(rows), MAX_CHECKED)):
        try:
            row = read(rows[index], f"row {index}")
        except RowError as problem:
            total += 1
            first_bad = first_bad or str(problem)
            others += [problem.row] if 1 < total <= SHOWN else []
            continue
        if isinstance(row, Preference):
            count_lengths(row, data.lengths)
        folder = row.chosen.folder if isinstance(row, Preference) else row.folder
        for medium in row.media:
            data.first.setdefault(medium.kind, row.name)
            data.media += 1
            try:
                find_media(medium.value, folder, access)
            except MediaError as problem:
                data.missing.append((row.name, str(problem)))
    if total:
        more = f"\n{total} bad rows in all, also {', '.join(others)}" + (", ..." if total > SHOWN else "")
        more += " (dataset_prep.py check tells what is wrong with all of them)"
        raise DataError(first_bad + (more if others else ""))


def _check_files(config, data: Data) -> None:
    if not data.missing:
        return
    row, reason = data.missing[0]
    if config.on_bad_media == "error":
        raise RowError(row, reason)
    told = f"{len(data.missing)} of {data.media} media cannot be read. First: {row}: {reason}"
    if len(data.missing) > config.max_bad_media * data.media:
        raise DataError(f"{told}\n(over --max-bad-media {config.max_bad_media:g})")
    note(told)


def check_data(config, data: Data, collator) -> None:
    """Check rows against the model, before any weight is loaded.

    Raises:
        RowError: an image or audio row for a model without that tower.
        DataError: no row has a token to train on.
    """
    from .trainers import something_is_trained

    for kind, name in data.first.items():
        collator.check_modality(kind, name)
    if not something_is_trained(data.rows, collator):
        wanted = "two answers" if config.paired else "an assistant token"
        raise DataError(
            f"nothing to train: none of {len(data.rows)} rows has {wanted} within --max-len {config.max_len} "
            f"({_untrained_reason(collator.stats)})"
        )
    if data.eval_rows is not None and not something_is_trained(data.eval_rows, collator):
        raise DataError(f"nothing to evaluate on: no answer in {len(data.eval_rows)} evaluation rows can be used")
    collator.stats.reset()


def _untrained_reason(stats) -> str:
    reasons = {
        "cut_to_nothing": "are cut before their answer: raise --max-len",
        "bad_media": "of their media cannot be read",
        "bad_rows": "are refused by the chat template",
    }
    told = [f"{stats[name]} {reason}" for name, reason in reasons.items() if stats[name]]
    return "; ".join(told) or "they have no assistant message, or all of it is marked as context"
