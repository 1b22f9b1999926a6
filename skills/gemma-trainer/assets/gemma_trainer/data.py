"""A run's rows: opened, split, and checked before a model is loaded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from . import shards, sources
from .checks import count_lengths, length_bias
from .cli import note
from .columns import ASKED
from .demo import SAMPLES
from .errors import DataError, MediaError, RowError
from .media import MediaAccess, find_media
from .preferences import Preference, read_preference
from .rows import read_row

MAX_CHECKED = 200_000  # rows whose form is checked before the run; the rest is checked as it is read
LOOKED_AT, LOOKED_AT_BYTES = 1000, 64 * 2**20  # the first rows of a stream, which are held in memory
SHOWN = 5  # bad rows told by name
DEMO = {False: ("train.jsonl", "heldout.jsonl"), True: ("preferences.jsonl", "preferences-heldout.jsonl")}


@dataclass
class Data:
    """A run's rows. Of a stream, `rows` are the first ones, and `stream` is all of it. `first` names, for "image" and
    "audio", the first row that has one; `missing` lists (row, reason) for those of the `media` whose file is not there.
    """

    rows: sources.Rows | sources.Subset | list
    eval_rows: sources.Rows | sources.Subset | None
    names: list[str]
    eval_names: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    media: int = 0
    missing: list[tuple[str, str]] = field(default_factory=list)
    lengths: Counter = field(default_factory=Counter)  # of pairs, see `checks.count_lengths`
    prompts: list = field(default_factory=list)  # of --eval-prompts, see `eval_prompts.read_prompts`
    stream: shards.Shards | None = None

    @property
    def size(self) -> int | None:
        """How many rows there are to train on; None where that is not known before they are read."""
        return len(self.rows) if self.stream is None else self.stream.rows

    @property
    def fingerprint(self) -> str:
        """A short hash that tells these rows from others."""
        return sources.fingerprint(self.names, len(self.rows)) if self.stream is None else self.stream.fingerprint()


def load_data(config) -> Data:
    """Open the rows and check their form.

    Raises:
        DataError: no such file, no rows, or rows that cannot be read; the first are named, with the total.
    """
    training, heldout = DEMO[config.paired]
    names = [str(SAMPLES / training)] if config.demo else list(config.dataset)
    evaluation = [str(SAMPLES / heldout)] if config.demo else list(config.eval_dataset)
    stream = shards.open_shards(names) if getattr(config, "streaming", False) else None
    rows = sources.open_rows(names) if stream is None else _first_rows(config, stream)
    eval_rows = sources.open_rows(evaluation) if evaluation else None
    if config.test_size:
        rows, eval_rows = split(rows, config.test_size, config.seed)
    data = Data(rows, eval_rows, names, evaluation, stream=stream)
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    for part in (rows, eval_rows):
        if part is not None:
            read = read_preference if config.paired else read_row
            _check_form(part, data, access, read, config.max_bad_media if part is rows and stream else 0.0)
    _check_files(config, data)
    if told := length_bias(data.lengths):
        note(f"{told}: the model may learn length instead of what you prefer")
    return data


def _first_rows(config, stream: shards.Shards) -> list:
    """The first rows of a stream, with errors in the place of those that cannot be read; tells what is streamed."""
    records, size = [], 0
    for record in stream:
        records.append(record)
        size += record.size
        if len(records) == LOOKED_AT or size > LOOKED_AT_BYTES:
            break
    if not records:
        raise DataError(f"{', '.join(config.dataset)}: the files have no rows")
    total = "rows of unknown number" if stream.rows is None else f"{stream.rows:,} rows"
    note(f"streaming {total} from {stream.files:,} files; the form of the first {len(records):,} is checked")
    fitting = shards.BUFFER_BYTES * len(records) // max(1, size)
    if fitting < config.shuffle_buffer:
        note(f"about {fitting:,} of these rows fill the shuffle buffer of {shards.BUFFER_BYTES >> 20} MiB")
    rows = [record.row() for record in records]
    prompts = (row.get("prompt") for row in rows if isinstance(row, dict))
    if asked := {prompt for prompt in prompts if isinstance(prompt, str)} & set(ASKED.values()):
        note(f"media with nothing but a .txt are asked: {' '.join(sorted(asked))}")
    return rows


def split(rows, share: float, seed: int):
    """Split rows at random into training and evaluation, in their order, at least one row each."""
    held = max(1, round(share * len(rows)))
    if held >= len(rows):
        raise DataError(f"--test-size {share:g} leaves none of {len(rows)} rows to train on")
    chosen = set(random.Random(seed).sample(range(len(rows)), held))
    kept = [index for index in range(len(rows)) if index not in chosen]
    return sources.Subset(rows, kept), sources.Subset(rows, sorted(chosen))


def _check_form(rows, data: Data, access: MediaAccess, read, allowed: float = 0.0) -> None:
    """Read each row's form, and look whether the media files it names are there, without opening any. Bad rows are
    refused, or told where they are no more than the `allowed` share."""
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
        if total <= allowed * len(rows):
            note(f"{first_bad}{more if others else ''} (it is left out, as others will be, and counted)")
            return
        more += "" if data.stream else " (dataset_prep.py check tells what is wrong with all of them)"
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
        looked_at = f"{'the first ' if data.stream else ''}{len(data.rows)} rows"
        raise DataError(
            f"nothing to train: none of {looked_at} has {wanted} within --max-len {config.max_len} "
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
