"""Looks at one image or clip as training will: whether it can be read, and what about it is worth telling."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .errors import MediaError
from .files import silent_stderr
from .media import (
    MIN_SAMPLES,
    ORIENTATION,
    MediaAccess,
    _as_pil,
    _check_size,
    _content,
    decode_audio,
    image_error,
)
from .media_files import suffix_of
from .media_headers import _lies_on_its_side
from .slots import Media

SMALL_SIDE, THIN_RATIO, LARGE_PIXELS = 32, 10, 12_000_000
SILENCE = 1e-4  # peak of full scale, -80 dB: what is left of a muted recording
KINDS = {  # of files, by the suffixes that `media_files.suffix_of` tells
    "image": (".png", ".jpg", ".gif", ".bmp", ".webp", ".tif", ".avif", ".heic"),
    "audio": (".wav", ".flac", ".ogg", ".mp3", ".aiff"),
    "video": (".m4a", ".webm"),  # which may be audio, too
}


@dataclass(frozen=True)
class Facts:
    """A medium that can be read. `key` is a hash of its content, `size` (width, height) in pixels of an upright image,
    `seconds` the length of a whole clip; `notes` are (code, detail) of `findings.KINDS`."""

    kind: str
    key: int
    size: tuple[int, int] | None = None
    seconds: float | None = None
    notes: tuple[tuple[str, str], ...] = ()


def inspect(
    medium: Media,
    folder: Path | None = None,
    access: MediaAccess = MediaAccess(),
    rate: int = 16_000,
    max_seconds: float = 30.0,
) -> Facts:
    """Decode a medium as far as the model would, at a low resolution where its format allows that.

    Args:
        rate, max_seconds: samples a second that the model hears, and for how long.

    Raises:
        MediaError: it cannot be used; `code` says why.
    """
    try:
        if medium.kind == "image":
            return _inspect_image(medium.value, folder, access)
        return _inspect_audio(medium.value, folder, access, rate, max_seconds)
    except MediaError as problem:
        if problem.code == "media_unreadable" and (other := _other_kind(medium, folder, access)):
            raise MediaError(f"{other} where the row says {medium.kind}", "media_wrong_kind") from None
        raise


@silent_stderr()
def _inspect_image(value, folder, access) -> Facts:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _as_pil(_fetched(value, folder, access), folder, access)
            _check_size(*image.size)
            size = image.size[::-1] if _lies_on_its_side(image) else image.size
            turned = image.getexif().get(ORIENTATION, 1) if image.format != "PNG" else 1
            image.draft(image.mode, (image.width // 8, image.height // 8))  # JPEG: an eighth of the work
            image.load()
            if image.format == "PNG":
                turned = image.getexif().get(ORIENTATION, 1)
            _check_numbers(image)
    except MediaError:
        raise
    except Exception as problem:  # decoders raise whatever they like on corrupt data
        raise image_error(problem) from None
    told = f"{size[0]} x {size[1]} pixels"
    notes = [
        ("image_small", min(size) < SMALL_SIDE),
        ("image_thin", max(size) >= THIN_RATIO * min(size)),
        ("image_large", size[0] * size[1] > LARGE_PIXELS),
        ("image_rotated", turned in range(2, 9)),
    ]
    return Facts(
        "image", content_key(value, folder, access), size=size, notes=tuple((c, told) for c, found in notes if found)
    )


def _check_numbers(image) -> None:
    if image.mode == "F":
        import numpy as np

        if not np.isfinite(np.asarray(image)).all():
            raise MediaError("the image holds NaN or infinity", "media_nan")


@silent_stderr()
def _inspect_audio(value, folder, access, rate: int, max_seconds: float) -> Facts:
    import numpy as np

    value = _fetched(value, folder, access)
    samples, own_rate, seconds = decode_audio(value, max_seconds, folder, access)
    if not np.isfinite(samples).all():
        raise MediaError("audio holds NaN or infinity", "media_nan")
    heard = min(len(samples) * rate // own_rate, int(max_seconds * rate))
    if heard < MIN_SAMPLES:
        raise MediaError(f"audio has {heard} samples at {rate} Hz: shorter than one soft token", "audio_short")
    channels = samples.shape[1] if samples.ndim == 2 else 1
    notes = [
        ("audio_long", seconds > max_seconds, f"{seconds:.1f} s"),
        ("audio_silent", float(np.abs(samples).max(initial=0)) < SILENCE, ""),
        ("audio_low_rate", own_rate < rate, f"{own_rate} Hz"),
        ("audio_resampled", own_rate > rate, f"{own_rate} Hz"),
        ("audio_channels", channels > 1, f"{channels} channels"),
    ]
    found = tuple((code, detail) for code, met, detail in notes if met)
    return Facts("audio", content_key(value, folder, access), seconds=seconds, notes=found)


def _fetched(value, folder, access: MediaAccess):
    """The value; a remote file's bytes, so that it is fetched once."""
    if access.remote and isinstance(value, str) and value.lower().startswith(("http://", "https://")):
        return _content(value, folder, access)
    return value


def content_key(value, folder: Path | None, access: MediaAccess) -> int:
    """A hash of a medium's content: of the bytes of a file, of the numbers of an array."""
    if hasattr(value, "tobytes"):  # a PIL image, or an array
        content = value.tobytes()
    elif isinstance(value, dict) and value.get("array") is not None:
        content = repr((value["array"], value.get("sampling_rate"))).encode()
    else:
        content = _content(value, folder, access)
    if isinstance(content, Path):
        with content.open("rb") as file:
            hasher = xxhash.xxh3_64()
            while piece := file.read(2**20):
                hasher.update(piece)
            return hasher.intdigest()
    return xxhash.xxh3_64_intdigest(content)


def _other_kind(medium: Media, folder, access) -> str | None:
    """What a file that cannot be read as its kind seems to be instead."""
    try:
        content = _content(medium.value, folder, access)
        start = content[:16] if isinstance(content, bytes) else content.open("rb").read(16)
    except (MediaError, OSError):
        return None
    suffix = suffix_of(start)
    for kind, suffixes in KINDS.items():
        if suffix in suffixes:
            return kind if kind != medium.kind else None
    return "text" if start and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in start) else None
