"""One image or clip for a data set that is to be read elsewhere: as a path that is right there, as a file, or as bytes.

`localised` gives what a JSON line can hold, `embedded` what a parquet file holds, both from any value a row may carry.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import MediaError
from .media import MediaAccess, _array_rate, _audio_array, _content, _decoded, _told, open_image

ANYWHERE = re.compile(r"data:|~/|file:(//(localhost)?)?/|[a-z][a-z0-9+.-]+://", re.IGNORECASE)
REMOTE = re.compile(r"https?://", re.IGNORECASE)
# How files begin, with the offset of what they begin with.
MAGIC = (
    (0, b"\x89PNG", ".png"), (0, b"\xff\xd8\xff", ".jpg"), (0, b"GIF8", ".gif"), (0, b"BM", ".bmp"),
    (8, b"WEBP", ".webp"), (0, b"II*\0", ".tif"), (0, b"MM\0*", ".tif"), (8, b"WAVE", ".wav"), (0, b"fLaC", ".flac"),
    (0, b"OggS", ".ogg"), (0, b"ID3", ".mp3"), (0, b"\xff\xfb", ".mp3"), (0, b"\xff\xf3", ".mp3"),
    (0, b"\xff\xf2", ".mp3"), (8, b"AIF", ".aiff"), (4, b"ftypavif", ".avif"), (4, b"ftyphei", ".heic"),
    (4, b"ftyp", ".m4a"), (0, b"\x1aE\xdf\xa3", ".webm"),
)  # fmt: skip


class MediaStore:
    """The folder `<stem>_media` beside an output file. A medium is written once, under the hash of its content.

    Files wait in a hidden folder until `commit` moves them into place; `discard` takes back all of this run.
    """

    def __init__(self, output: Path):
        self.home = output.parent
        self.folder = output.with_name(f"{output.stem}_media")
        self.waiting = output.with_name(f".{output.stem}_media.{os.getpid()}.tmp")
        self._moved: list[Path] = []

    def add(self, content: bytes, hint: str | None = None) -> str:
        """Keep a file of this content; returns its path relative to the output file's folder.

        `hint` is a path the content once had; its suffix counts where the content does not tell its kind.
        """
        name = hashlib.sha256(content).hexdigest()[:32] + suffix_of(content, hint)
        if not any(_is_whole(folder / name, len(content)) for folder in (self.waiting, self.folder)):
            self.waiting.mkdir(exist_ok=True)
            (self.waiting / name).write_bytes(content)
        return f"{self.folder.name}/{name}"

    def commit(self) -> None:
        if self.waiting.is_dir():
            self.folder.mkdir(exist_ok=True)
            for name in sorted(os.listdir(self.waiting)):
                self._moved.append(self.folder / name)
                os.replace(self.waiting / name, self.folder / name)
            self.waiting.rmdir()

    def discard(self) -> None:
        shutil.rmtree(self.waiting, ignore_errors=True)
        for file in self._moved:
            file.unlink(missing_ok=True)
        if self._moved and not any(self.folder.iterdir()):
            self.folder.rmdir()


def _is_whole(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def localised(value: Any, kind: str, folder: str | Path | None, store: MediaStore) -> str:
    """A medium as a string for a JSON line in `store.home`: a path that is right there, or a URL as it was.

    Args:
        value: any value of `media.open_image` or `open_audio`; what is no path or URL is written to the store.
        kind: "image" or "audio".
        folder: what a relative path is relative to now.

    Example:
        "red.png" of /data, for an output in /data/new, gives "../red.png".

    Raises:
        MediaError: neither a path nor something that a file can be made of. Whether the file is there is not looked at.
    """
    place = path_of(value)
    if place is None:
        return store.add(_file_of(value, kind), value.get("path") if isinstance(value, Mapping) else None)
    if ANYWHERE.match(place) or os.path.isabs(place):
        return place
    parent, name = os.path.split(os.path.join(folder or "", place))
    try:
        moved = os.path.relpath(os.path.join(_resolved(parent), name), _resolved(str(store.home)))
    except (OSError, ValueError):  # a NUL byte, a loop of links, ...
        raise MediaError("no file can be named so", "media_missing") from None
    moved = moved.replace(os.sep, "/")
    return f"./{moved}" if ANYWHERE.match(moved) else moved


@functools.lru_cache(maxsize=1024)
def _resolved(folder: str) -> str:
    return os.path.realpath(folder)  # or `..` would lead elsewhere where a folder is a link


def embedded(value: Any, kind: str, folder: str | Path | None, access: MediaAccess = MediaAccess()) -> dict:
    """A medium as `{"bytes", "path"}` that stands alone: the content of its file, and the file's name.

    A remote URL is fetched if `access` allows it, and else stays a URL: `{"bytes": None, "path": url}`.

    Raises:
        MediaError: missing, not allowed, or nothing that a file can be made of.
    """
    place = path_of(value)
    if place is None:
        name = value.get("path") if isinstance(value, Mapping) else None
        return {"bytes": _file_of(value, kind), "path": _file_name(name)}
    if REMOTE.match(place) and not access.remote:
        return {"bytes": None, "path": place}
    try:
        content = _content(place, Path(folder) if folder else None, access)
        content = content.read_bytes() if isinstance(content, Path) else content
    except OSError as problem:  # gone, not readable, or a server that does not answer
        raise MediaError(f"{kind} cannot be read ({_told(problem)})") from None
    return {"bytes": content, "path": None if place.startswith("data:") else _file_name(place)}


def path_of(value: Any) -> str | None:
    """The path or URL of a media value; None for one that brings its content."""
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("array") is None:
        value = value.get("path") or value.get("url")
    return str(value) if isinstance(value, str | Path) and str(value) else None


def _file_name(place: str | None) -> str | None:
    return re.split(r"[?#]", place)[0].replace("\\", "/").rsplit("/", 1)[-1][:200] or None if place else None


def suffix_of(content: bytes, hint: str | None = None) -> str:
    """The usual suffix of a file that begins so; else that of the path `hint`, else ".bin"."""
    found = next((suffix for at, magic, suffix in MAGIC if content.startswith(magic, at)), None)
    hinted = re.search(r"\.\w{1,5}$", _file_name(hint) or "")
    return found or (hinted[0].lower() if hinted else ".bin")


def _file_of(value, kind: str) -> bytes:
    """The content of a file for a value that is no path: bytes as they are, an image as PNG, an array as float WAV."""
    has_array = isinstance(value, Mapping) and value.get("array") is not None
    if value is None or (isinstance(value, bytes | bytearray | memoryview | Mapping) and not has_array):
        return _content(value, None, MediaAccess())
    try:
        return _wav(value) if kind == "audio" else _png(value)
    except MediaError:
        raise
    except Exception as problem:  # numpy and Pillow raise whatever they like
        raise MediaError(f"{kind} cannot be written to a file ({_told(problem)})") from None


def _png(value) -> bytes:
    file = io.BytesIO()
    open_image(value).save(file, "PNG")  # upright RGB: what the model sees of it
    return file.getvalue()


def _wav(value) -> bytes:
    """A WAV file of 32-bit floats. libsndfile's would hold the time of writing: the same clip, another hash."""
    import numpy as np

    value = _decoded(value)
    rate = _array_rate(value)
    if rate is None:
        raise MediaError(f"a {type(value).__name__} is no media value")
    samples = np.ascontiguousarray(_audio_array(value["array"]), dtype="<f4")
    channels = samples.shape[1] if samples.ndim == 2 else 1
    head = struct.pack("<HHIIHHH", 3, channels, rate, rate * 4 * channels, 4 * channels, 32, 0)
    chunks = ((b"fmt ", head), (b"fact", struct.pack("<I", len(samples))), (b"data", samples.tobytes()))
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body
