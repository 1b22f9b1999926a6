"""Weights on the disk, tensor by tensor: where each one lies in a model's .safetensors files, and writing such files
with no more than one tensor in memory.

A file is 8 bytes with the length of a header, the header (JSON: {name: {"dtype", "shape", "data_offsets"}}), and the
tensors. Source: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import CannotLoad, UsageError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
PIECE = 16 * 2**20  # bytes copied at a time
LARGEST_HEADER = 100_000_000  # bytes, as safetensors itself has it


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `size` bytes from `start`. `dtype` is spelled as safetensors does."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    size: int

    def read(self) -> torch.Tensor:
        """The tensor, in float32 where it holds floating-point numbers that torch can compute with.

        Raises:
            CannotLoad: it is of another kind.
        """
        if self.dtype not in FLOATS:
            raise CannotLoad(f"{self.file}: {self.name} is stored as {self.dtype}, which nothing can be added to")
        with self.file.open("rb") as file:
            file.seek(self.start)
            content = bytearray(file.read(self.size))
        return torch.frombuffer(content, dtype=FLOATS[self.dtype]).reshape(self.shape).float()

    def pieces(self) -> Iterable[bytes]:
        """Its bytes as they are."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            left = self.size
            while left:
                yield (piece := file.read(min(left, PIECE)))
                left -= len(piece)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written, of `size` bytes: `make()` gives it, or its bytes in pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    make: Callable[[], torch.Tensor | Iterable[bytes]]

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> Planned:
        """A tensor of one of FLOATS."""
        return cls(name, dtype, shape, math.prod(shape) * FLOATS[dtype].itemsize, make)


def stored_files(folder: Path) -> dict[str, list[Stored]]:
    """The tensors of a model's folder by file name, each file's in the order that they lie in.

    Raises:
        CannotLoad: no such files (pickles are not read), or one is missing or cut off.
    """
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise CannotLoad(f"{folder / INDEX} is damaged") from None
    elif (folder / WHOLE).is_file():
        names = [WHOLE]
    elif next(folder.glob("*.bin"), None):
        told = "from_pretrained(...).save_pretrained(FOLDER) of transformers writes .safetensors: give that as --base"
        raise CannotLoad(f"{folder} has its weights in .bin files, which are not read: {told}")
    else:
        raise CannotLoad(f"{folder} has no {WHOLE} and no {INDEX}")
    return {name: _stored(folder / name) for name in names}


def _stored(path: Path) -> list[Stored]:
    try:
        whole = path.stat().st_size
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(whole, LARGEST_HEADER):
                raise ValueError("header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = [
            Stored(name, facts["dtype"], tuple(facts["shape"]), path, 8 + length + begin, end - begin)
            for name, facts in header.items()
            for begin, end in [facts["data_offsets"]]
        ]
    except FileNotFoundError:
        raise CannotLoad(f"{path} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        raise CannotLoad(f"{path} is no .safetensors file, or is damaged") from None
    if any(tensor.start + tensor.size > whole for tensor in found):
        raise CannotLoad(f"{path} is cut off: it is shorter than its header says")
    return sorted(found, key=lambda tensor: tensor.start)


def write_files(folder: Path, files: dict[str, list[Planned]]) -> None:
    """Write files of tensors, and the index where there are several."""
    for name, tensors in files.items():
        _write(folder / name, tensors)
    if list(files) != [WHOLE]:
        where = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        total = sum(tensor.size for tensors in files.values() for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(path: Path, tensors: list[Planned]) -> None:
    # The widest numbers first, so that each tensor begins at a multiple of what its numbers take.
    tensors = sorted(tensors, key=lambda tensor: -(tensor.size // max(math.prod(tensor.shape), 1)))
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        begin, end = end, end + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            made = tensor.make()
            if isinstance(made, torch.Tensor):
                flat = made.to(FLOATS[tensor.dtype]).contiguous().reshape(-1)
                made = [flat.view(torch.uint8).numpy()]
            for piece in made:
                file.write(piece)


def regrouped(files: dict[str, list[Planned]], limit: int) -> dict[str, list[Planned]]:
    """The tensors of all files, in their order, in files of at most `limit` bytes; one that is larger has its own."""
    groups: list[list[Planned]] = [[]]
    for tensor in (tensor for tensors in files.values() for tensor in tensors):
        if groups[-1] and sum(held.size for held in groups[-1]) + tensor.size > limit:
            groups.append([])
        groups[-1].append(tensor)
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    return {f"model-{at:05}-of-{len(groups):05}.safetensors": group for at, group in enumerate(groups, 1)}


def size_in_bytes(text: str) -> int:
    """Bytes of a size such as 4GB (a power of ten) or 4GiB; raises UsageError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG])(i?)B\s*", text, re.IGNORECASE)
    size = float(found[1]) * (1024 if found[3] else 1000) ** (" KMG".index(found[2].upper())) if found else 0
    if size < 1:
        raise UsageError(f"--shard-size {text}: write it as 4GB or 500MB")
    return int(size)
