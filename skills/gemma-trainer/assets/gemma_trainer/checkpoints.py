"""The checkpoints of a run: which are whole, which go, and what the next one takes.

A checkpoint is written beside its place, sealed with a list of its files, and moved there in one step. So a killed run
leaves none that is half there; one that was copied in part, or lost its end with the disk's power, is told by its list.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from .files import move_whole, remove_folder, write_whole

SEAL = "files.json"  # in each checkpoint: {file name: [size in bytes, XXH3 hash]}
WEIGHTS = ("adapter_model*", "model*", "pytorch_model*")
STATE = "trainer_state.json"


def step_of(folder: Path) -> int:
    """The optimizer step of `checkpoint-<step>`; -1 where that is no number."""
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def all_checkpoints(folder: str | Path) -> list[Path]:
    """Every checkpoint folder of a run, whole or not, oldest step first."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.is_dir() and step_of(path) >= 0]
    return sorted(found, key=step_of)


def checkpoints(folder: str | Path) -> list[Path]:
    """The whole checkpoints of a run, oldest step first."""
    return [path for path in all_checkpoints(folder) if not fault_of(path)]


def fault_of(folder: Path, thorough: bool = False) -> str:
    """What is missing in a checkpoint; empty for a whole one.

    Args:
        thorough: read all files, and compare them with their hashes; else their sizes do.
    """
    try:
        listed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        files = {name: (int(size), digest) for name, (size, digest) in listed.items()}
    except FileNotFoundError:  # written by other tools
        there = (folder / STATE).is_file() and any(next(folder.glob(kind), None) for kind in WEIGHTS)
        return "" if there else f"{STATE} or the weights are missing"
    except (OSError, ValueError, TypeError, AttributeError):
        return f"{SEAL} is damaged"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or cut off"
        if thorough and _hash(path) != digest:
            return f"{name} is damaged"
    return ""


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def seal(folder: Path) -> None:
    """Write the list of a finished checkpoint's files into it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    listed = {str(path.relative_to(folder)): [path.stat().st_size, _hash(path)] for path in files}
    write_whole(folder / SEAL, json.dumps(listed))


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Move a sealed checkpoint to where it belongs.

    A whole one of the same step is kept instead: it is the one that this run went on from, and holds the same.
    """
    target = folder / unfinished.name
    if target.is_dir() and not fault_of(target, thorough=True):
        return
    if target.is_dir():
        remove_folder(target)
    move_whole(unfinished, target)


def rotate(folder: Path, limit: int | None, keep: int | None = None) -> None:
    """Remove the oldest checkpoints beyond `limit` whole ones, and those that are not whole.

    Args:
        keep: the step of one that stays whatever its age, and does not count.
    """
    if not limit:
        return
    kept = [path for path in checkpoints(folder) if step_of(path) != keep][-limit:]
    for path in all_checkpoints(folder):
        if path not in kept and step_of(path) != keep:
            remove_folder(path)


def size_of(folder: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoint_bytes(model) -> int:
    """About what a checkpoint takes: the weights that are trained, with the optimizer's two moments."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return sum(p.numel() * (p.element_size() + 2 * 4) for p in trained) + 32 * 2**20
