"""How large an image is and how long a clip, from the header alone: what a row's length in tokens depends on."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import MediaError
from .files import silent_stderr
from .media import (
    ORIENTATION,
    MediaAccess,
    _array_rate,
    _as_pil,
    _check_size,
    _content,
    _decoded,
    _image_array,
    _sample_count,
    _sound_file,
    _told,
    image_error,
)


@silent_stderr()
def image_size(value: Any, folder: Path | None = None, access: MediaAccess = MediaAccess()) -> tuple[int, int]:
    """The size of the image that `media.open_image` would give. No pixel is decoded.

    Args:
        value, folder, access: as for `media.open_image`.

    Returns:
        (width, height) in pixels, of the image as it stands upright.

    Raises:
        MediaError: as `media.open_image`, but for what only decoding shows; and for any remote URL, which is never
            fetched for its size.
    """
    try:
        if hasattr(value, "__array__"):
            height, width = _image_array(value).shape[:2]
            _check_size(width, height)
            return width, height
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _as_pil(value, folder, replace(access, remote=False))
        try:
            _check_size(*image.size)
            return image.size[::-1] if _lies_on_its_side(image) else image.size
        finally:
            if image is not value:
                image.close()
    except MediaError:
        raise
    except Exception as problem:  # decoders raise whatever they like on corrupt data
        raise image_error(problem) from None


def _lies_on_its_side(image) -> bool:
    """Whether its EXIF turns the image by a quarter. (Pillow tells the size of a TIFF as turned already.)"""
    from PIL import Image

    # Not the image's own getexif: that of a PNG decodes the pixels, to look for EXIF behind them.
    return image.format != "TIFF" and Image.Image.getexif(image).get(ORIENTATION) in (5, 6, 7, 8)


@silent_stderr()
def audio_seconds(value: Any, folder: Path | None = None, access: MediaAccess = MediaAccess()) -> float:
    """The length that `media.open_audio` would tell of a clip. No sample is decoded.

    Args:
        value, folder, access: as for `media.open_audio`.

    Returns:
        Seconds of the whole clip, more than 0.

    Raises:
        MediaError: as `media.open_audio`, but for what only decoding shows; and for any remote URL, which is never
            fetched for its length.
    """
    try:
        seconds = float(_seconds(value, folder, replace(access, remote=False)))
    except MediaError:
        raise
    except Exception as problem:  # decoders raise whatever they like on corrupt data
        raise MediaError(f"audio cannot be read ({_told(problem)})") from None
    if not 0 < seconds < math.inf:
        raise MediaError("audio has 0 samples", "audio_short")
    return seconds


def _seconds(value, folder, access) -> float:
    if told := getattr(getattr(value, "metadata", None), "duration_seconds", None):  # of a `datasets` audio decoder
        return told
    value = _decoded(value)
    if rate := _array_rate(value):
        return _sample_count(value["array"]) / rate
    content = _content(value, folder, access)
    with _sound_file(content) as file:
        if file is not None:
            return file.frames / file.samplerate
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # librosa announces the backend it falls back to
        return librosa.get_duration(path=content)
