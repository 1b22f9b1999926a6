"""A data set looked at as a whole: what is found in every row, and what only all of them show."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import duplicates, preparation, sources
from .checks import length_bias
from .cli import note
from .demo import SAMPLES
from .duplicates import Table, clusters
from .findings import Findings
from .media import MediaAccess
from .scan import scan
from .tally import Checker, Tally, prompt_of_entry

SAMPLED, COMMON_SAMPLE = 1_000, 300  # rows that are measured for the figures; rows that boilerplate is looked for in


@dataclasses.dataclass
class Survey:
    """What was found. `rows` are all rows, those from `evaluation` on being for evaluation; `collator` is None without
    a model."""

    names: list[str]
    rows: sources.Rows
    evaluation: int
    collator: object
    exact: bool
    tally: Tally
    table: Table

    @property
    def findings(self) -> Findings:
        return self.tally.findings


def open_data(config, evaluation: bool = True) -> tuple[list[str], sources.Rows, int]:
    """(names, rows, where the evaluation rows begin) of the data that a command names, or of the bundled samples."""
    if not config.data:
        note("No data given: taking the built-in demo's samples.")
    names = list(config.data) or [str(SAMPLES / "train.jsonl")]
    rows = sources.open_rows(names)
    count = len(rows)
    if evaluation:
        held = list(config.eval_dataset) or ([] if config.data else [str(SAMPLES / "heldout.jsonl")])
        rows = sources.Rows(rows.parts + (sources.open_rows(held).parts if held else []))
    return names, rows, count


def load_collator(config):
    """The collator of the model that --model names, for its tokens; None without one."""
    if not config.model:
        return None
    model_config, processor = preparation.load_processor(config)
    return preparation.make_collators(config, processor, model_config)[0]


def take_survey(config, collator=None, details=None) -> Survey:
    """Look at every row.

    Args:
        config: the flags of `dataset_prep.py check` or `report`.
        collator: of the model that is to be trained; without it nothing is told of tokens.
        details: called with each finding of each row, as a dict, in order; by default only the first are kept.

    Raises:
        DataError: no such file, or one that cannot be read at all.
    """
    names, rows, count = open_data(config)
    tokens = None
    if collator:
        from .tokens import TokenChecker

        tokens = TokenChecker(collator)
    sampled = None
    if not config.exact:
        sampled = frozenset(random.Random(config.seed).sample(range(count), min(SAMPLED, count)))
    checker = Checker(
        rows,
        config.task,
        MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media),
        sampled,
        common_windows(rows, config.task, config.seed),
        count,
        tokens,
        keep_all=details is not None,
    )
    total, table = Tally(Findings()), Table()
    with contextlib.closing(_engine(config)(checker, len(rows), config.num_workers, "checked")) as tallies:
        for tally in tallies:
            table.append(tally.records)
            for line in tally.findings.lines() if details else ():
                details(line)
            total.merge(tally)
    rows.check_unchanged()
    survey = Survey(names, rows, count, collator, sampled is None or count <= SAMPLED, total, table)
    for line in _whole_set(survey, config):
        if details:
            details(line)
    return survey


def _engine(config):
    """What has the rows looked at: the cores of this machine, or a Ray cluster."""
    if config.engine == "local":
        return scan
    from . import ray_scan

    return ray_scan.scan


def common_windows(rows, task: str, seed: int) -> np.ndarray:
    """The windows that many of the rows share, told from a random sample."""
    chosen = random.Random(seed).sample(range(len(rows)), min(COMMON_SAMPLE, len(rows)))
    return duplicates.common_windows(filter(None, (prompt_of_entry(rows, index, task) for index in sorted(chosen))))


# ---- the set as a whole


def _whole_set(survey: Survey, config) -> Iterator[dict]:
    """Find what only the whole set shows; yields each finding of a row."""
    tally, count = survey.tally, survey.evaluation
    if len(tally.counts["formats"]) > 1:
        formats = tally.counts["formats"]
        survey.findings.add("mixed_formats", 0, detail=", ".join(sorted(formats)), count=sum(formats.values()))
    if not tally.trained_rows and tally.bad_rows < len(survey.rows):
        survey.findings.add("nothing_trained", 0, count=count)
    if told := _label_imbalance(tally, count):
        survey.findings.add("label_imbalance", 0, detail=told, count=sum(tally.labels.values()))
    if told := length_bias(tally.pairs):
        survey.findings.add("length_bias", 0, detail=told, count=tally.pairs["pairs"])
    same = survey.table.same()
    copies = np.flatnonzero(same[:count] != np.arange(count))
    yield from _add_rows(survey, "duplicate_rows", [(at, f"as {survey.rows.name(same[at])}") for at in copies.tolist()])
    near = survey.table.near()
    inside = near[(near < count).all(1)]
    cluster = clusters(count, inside)
    _, first, inverse = np.unique(cluster, return_index=True, return_inverse=True)
    first = first[inverse]
    close = np.flatnonzero(first != np.arange(count)).tolist()
    yield from _add_rows(survey, "near_duplicates", [(at, f"as {survey.rows.name(first[at])}") for at in close])
    yield from _add_rows(survey, "eval_overlap", _overlap(survey, same, near))


def _add_rows(survey: Survey, code: str, found: list[tuple[int, str]]) -> Iterator[dict]:
    for position, detail in found:
        name = survey.rows.name(position)
        survey.findings.add(code, position, name, detail)
        yield {"code": code, "row": name, "detail": detail}


def _overlap(survey: Survey, same: np.ndarray, near: np.ndarray) -> list[tuple[int, str]]:
    """Evaluation rows that share a row, a prompt, most of their text, or a medium with the training rows."""
    count, total = survey.evaluation, len(survey.rows)
    if count == total:
        return []
    reasons: dict[int, str] = {}
    contents, owners = (np.frombuffer(part, np.uint64) for part in survey.tally.media)
    trained = np.unique(contents[owners < count])
    shared = owners[(owners >= count) & np.isin(contents, trained)].astype(np.int64)
    prompts = survey.table.same("prompt")
    crossing = near[(near.min(1) < count) & (near.max(1) >= count)].max(1) if len(near) else near[:, 0]
    for positions, reason in (
        (shared, "its picture or clip"),
        (crossing, "nearly the same row"),
        (count + np.flatnonzero(prompts[count:] < count), "its prompt"),
        (count + np.flatnonzero(same[count:] < count), "the row"),
    ):
        reasons |= dict.fromkeys(positions.tolist(), f"{reason} is in the training data")
    return sorted(reasons.items())


def _label_imbalance(tally: Tally, rows: int) -> str:
    """A figure where nearly all answers are one of a few labels, and these are far from balanced."""
    short, labels = tally.counts["answers"]["short"], tally.labels
    if short < 20 or not few_labels(tally, rows):
        return ""
    most, least = max(labels.values()), min(labels.values())
    if len(labels) > 1 and most < 10 * least:
        return ""
    return f"the most frequent of {len(labels)} answers is {most / short:.0%} of them, the rarest {least / short:.1%}"


def few_labels(tally: Tally, rows: int) -> bool:
    """Whether nearly all answers are one of a few short ones."""
    short, labels = tally.counts["answers"]["short"], len(tally.labels)
    return bool(labels) and short >= 0.8 * rows and labels <= 50 and short >= 5 * labels
