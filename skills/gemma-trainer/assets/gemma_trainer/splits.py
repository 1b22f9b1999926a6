"""Rows parted into training and evaluation without a leak: what belongs together stays on one side."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from .cli import note
from .duplicates import Table, clusters
from .errors import DataError, RowError, UsageError
from .files import user_path
from .findings import Findings
from .media import MediaAccess
from .scan import scan
from .survey import common_windows, open_data
from .tally import Checker, Tally
from .writing import Rejects, RowsWriter, refuse_inputs


def split(config) -> dict:
    """What `dataset_prep.py split` does.

    Rows belong together where they are the same or nearly so, ask the same, hold the same picture or clip, or have the
    same value under --group-by. Whole groups are drawn at random for evaluation until it has its share.

    Args:
        config: `data`, `test_size`, `seed`, `group_by`, `output` (a folder), `overwrite`, `num_workers`, and what media
            may be opened.

    Raises:
        UsageError: an output that exists, or a --group-by that no row has.
        DataError: no such data, or all rows belong together.
    """
    if not config.test_size:
        raise UsageError("--test-size must be more than 0")
    names, rows, count = open_data(config, evaluation=False)
    folder, stem = _outputs(config, names)
    paths = {side: folder / f"{stem}.{side}.jsonl" for side in ("train", "test")}
    writers = {side: RowsWriter(path, config.overwrite) for side, path in paths.items()}
    rejects = Rejects(folder / f"{stem}.jsonl", config.overwrite)
    refuse_inputs(list(config.data), *paths.values(), rejects.path)
    links, readable = _links(config, rows, count)
    groups = clusters(count, links)
    test = np.zeros(count, bool)
    test[readable] = draw(np.unique(groups[readable], return_inverse=True)[1], config.test_size, config.seed)
    written = _write(rows, test, writers, rejects)
    sizes = np.bincount(groups)
    notes, share = [], test.sum() / max(1, readable.sum())
    if unreadable := count - int(readable.sum()) - written["rejected"]:
        notes.append(f"{unreadable:,} rows are in no known form, and stayed with the training rows: check tells why")
    if abs(share - config.test_size) > 0.1 * config.test_size + 1 / count:
        notes.append(f"{share:.1%} instead of {config.test_size:.1%}: rows that belong together are too many to part")
    result = {
        "status": "done",
        "demo": not config.data,
        **{side: str(path) for side, path in paths.items()},
        "rows": {side: written[side] for side in paths},
        "rejected": written["rejected"],
        "rejected_file": str(rejects.path) if written["rejected"] else None,
        "groups": int((sizes > 1).sum()),
        "rows_in_groups": int(sizes[sizes > 1].sum()),
        "largest_group": int(sizes.max()),
        "notes": notes,
    }
    return result | {"summary": _summary(result, config)}


def _outputs(config, names: list[str]) -> tuple[Path, str]:
    """(the folder that the parts go to, the stem of their names)."""
    first = user_path(names[0])
    if config.output:
        folder = user_path(config.output)
    elif len(names) == 1 and first.is_file() and config.data:
        folder = first.parent
    else:
        raise UsageError("--output FOLDER says where the two files go, where the data are not one file")
    return folder, first.stem if first.is_file() else first.name.replace(":", "-") or "data"


def _links(config, rows, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(pairs [n, 2] of rows that belong together, which rows [count] bool can be read)."""
    access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
    checker = Checker(rows, "any", access, frozenset(), common_windows(rows, "any", config.seed), count)
    table, total = Table(), Tally(Findings())
    for tally in scan(checker, count, config.num_workers, "compared"):
        table.append(tally.records)
        total.merge(tally)
    rows.check_unchanged()
    own, readable = np.arange(count), table.column("row") != 0
    if not readable.any():
        raise DataError(f"none of {count:,} rows can be read: check tells why")
    contents, owners = (np.frombuffer(part, np.uint64) for part in total.media)
    keys = [table.same("row"), table.same("prompt")]
    pairs = [table.near(), *(np.stack([own, key], 1)[key != own] for key in keys)]
    pairs.append(_chain(contents, owners.astype(np.int64)))
    if config.group_by:
        pairs.append(_chain(*_values(rows, count, config.group_by)))
    return np.concatenate(pairs), readable


def _chain(keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Pairs that join the owners of equal keys."""
    order = np.argsort(keys, kind="stable")
    keys, owners = keys[order], owners[order]
    equal = keys[1:] == keys[:-1]
    return np.stack([owners[:-1][equal], owners[1:][equal]], 1)


def _values(rows, count: int, field: str) -> tuple[np.ndarray, np.ndarray]:
    """(a number for each different value of a field, the rows that have one)."""
    numbers: dict[str, int] = {}
    keys, owners = [], []
    for position, raw in enumerate(rows.read(0, count)):
        value = None if isinstance(raw, RowError) else raw.get(field)
        if value is not None:
            keys.append(numbers.setdefault(json.dumps(value, sort_keys=True, default=str), len(numbers)))
            owners.append(position)
    if not keys:
        raise UsageError(f"--group-by {field}: no row has such a field")
    if missing := count - len(keys):
        note(f"{missing:,} of {count:,} rows have no {field}: they are grouped by their content alone")
    return np.array(keys), np.array(owners)


def draw(groups: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Which rows [n] bool are for evaluation: whole groups at random, at most `share` of the rows, one group at least.

    Raises:
        DataError: there is one group only.
    """
    sizes = np.bincount(groups)
    if len(sizes) < 2:
        raise DataError(f"all {len(groups):,} rows belong together (see --help): they cannot be split without a leak")
    wanted, chosen = max(1, round(share * len(groups))), []
    for group in random.Random(seed).sample(range(len(sizes)), len(sizes)):
        if sizes[group] <= wanted:
            chosen.append(group)
            wanted -= sizes[group]
    if not chosen:
        chosen = [int(sizes.argmin())]
    return np.isin(groups, chosen)


def _write(rows, test: np.ndarray, writers: dict[str, RowsWriter], rejects: RowsWriter) -> dict[str, int]:
    with writers["train"] as train, writers["test"] as held, rejects:
        for position, raw in enumerate(rows.read(0, len(test))):
            if isinstance(raw, RowError):
                rejects.write({"row": raw.row, "reason": raw.reason, "code": raw.code})
            else:
                (held if test[position] else train).write(raw)
        rows.check_unchanged()
    return {"train": writers["train"].count, "test": writers["test"].count, "rejected": rejects.count}


def _summary(result: dict, config) -> str:
    rows = result["rows"]
    total = sum(rows.values())
    lines = [
        f"train    {rows['train']:,} rows: {result['train']}",
        f"test     {rows['test']:,} rows ({rows['test'] / total:.1%}): {result['test']}",
        f"together {result['rows_in_groups']:,} rows in {result['groups']:,} groups of the same or nearly the same "
        f"content{f' or {config.group_by}' if config.group_by else ''}, the largest of {result['largest_group']:,}",
    ]
    if result["rejected"]:
        lines.append(f"rejected {result['rejected']:,} rows that cannot be read: {result['rejected_file']}")
    return "\n".join(lines + [f"note     {note}" for note in result["notes"]])
