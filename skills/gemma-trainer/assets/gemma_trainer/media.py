"""Open what a row names: an image becomes an RGB PIL image, a clip becomes mono float32 at the model's rate.

No image or audio library is imported until the first image or clip is opened, so a text-only run never loads one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from . import stores
from .errors import MediaError
from .files import silent_stderr, user_path

ORIENTATION = 0x0112  # the EXIF tag
MP3_SLACK = 2 * 1152  # samples of two frames: what encoders add and decoders leave out at the ends
MIN_SAMPLES = 161  # one frame of 20 ms at 16 kHz, which needs one sample more than its length
MAX_REMOTE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class MediaAccess:
    """What may be opened: everything local by default; `root` fences paths in, `remote` lets URLs out."""

    root: Path | None = None
    remote: bool = False


@silent_stderr()
def open_image(value: Any, folder: Path | None = None, access: MediaAccess = MediaAccess()):
    """Open an image in any form a row may hold, upright and in RGB.

    Args:
        value: a path, a `file:`, `data:` or (if allowed) `https:` URL, bytes, `{"bytes", "path"}`, a PIL image, or an
            array [H, W], [H, W, 1|3|4] or [1|3|4, H, W] of uint8, uint16, bool or float in 0..1.
        folder: what a relative path is relative to.

    Returns:
        A `PIL.Image.Image` in mode RGB with its EXIF orientation applied. Transparency lies over white; 16-bit and
        float samples are scaled to 8 bits; of an animation the first frame is taken.

    Raises:
        MediaError: missing, corrupt, too large (a decompression bomb), or not allowed.
    """
    from PIL import ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's bomb warning, which is an error here
            image = _as_pil(value, folder, access)
            _check_size(*image.size)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION, 1) != 1 else image)
    except MediaError:
        raise
    except Exception as problem:  # decoders raise whatever they like on corrupt data
        raise image_error(problem) from None


def image_error(problem: Exception) -> MediaError:
    """What is to be told of a decoder's complaint about an image."""
    bomb = type(problem).__name__ == "DecompressionBombError"  # Pillow's own, of an image many times too large
    return MediaError(f"image cannot be read ({_told(problem)})", "image_bomb" if bomb else "media_unreadable")


def _check_size(width: int, height: int) -> None:
    from PIL import Image

    if not width or not height:
        raise MediaError("an image without pixels")
    if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise MediaError(f"image of {width} x {height} pixels is a decompression bomb", "image_bomb")


def _as_pil(value, folder, access):
    from PIL import Image

    if isinstance(value, Image.Image):
        return value
    if hasattr(value, "__array__"):
        return _array_to_pil(value)
    content = _content(value, folder, access)
    return Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)


def _image_array(value):
    """An array [H, W] or [H, W, 1|3|4] of any number type."""
    import numpy as np

    array = np.asarray(value)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or 0 in array.shape or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        raise MediaError(f"an array of shape {tuple(array.shape)} is no image")
    return array


def _array_to_pil(value):
    import numpy as np
    from PIL import Image

    array = _image_array(value)
    if array.dtype == bool:
        array = array * np.uint8(255)
    elif array.dtype != np.uint8:
        array = _to_eight_bits(array)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array)


def _to_rgb(image):
    """Any Pillow mode to RGB: deep samples scaled, transparency over white."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray(_to_eight_bits(np.asarray(image, dtype=np.uint16)))
    elif image.mode in ("I", "F"):
        image = Image.fromarray(_to_eight_bits(np.asarray(image)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bits(samples):
    """Scale samples of any number type to 0..255, by the smallest usual range that holds them all.

    The ranges are 0..255, 0..65535 (always for uint16), for floats also 0..1 and -1..1, and else the samples' own.
    """
    import numpy as np

    values = samples.astype(np.float64)
    if not np.isfinite(values).all():
        raise MediaError("the image holds NaN or infinity", "media_nan")
    low, high = values.min(initial=0), values.max(initial=0)
    usual = [(0, 255), (0, 65535)]
    if samples.dtype == np.uint16:
        usual = [(0, 65535)]
    elif np.issubdtype(samples.dtype, np.floating):
        usual = [(0, 1), (-1, 1), *usual]
    slack = 0.25 if np.issubdtype(samples.dtype, np.floating) else 0  # resampling overshoots a little
    bottom, top = next(((a, b) for a, b in usual if a - slack <= low and high <= b + slack), (low, high))
    return ((values.clip(bottom, top) - bottom) * (255.0 / (top - bottom))).round().astype(np.uint8)


@silent_stderr()
def open_audio(
    value: Any,
    rate: int,
    max_seconds: float | None = None,
    folder: Path | None = None,
    access: MediaAccess = MediaAccess(),
):
    """Open a clip in any form a row may hold, as mono samples at the model's rate.

    Args:
        value: a path, a `file:`, `data:` or (if allowed) `https:` URL, bytes, `{"bytes", "path"}`,
            `{"array", "sampling_rate"}` with an array [samples] or [samples, channels], or a `datasets` audio decoder.
        rate: samples a second the model takes.
        max_seconds: what the model hears; the rest is not even decoded.
        folder: what a relative path is relative to.

    Returns:
        (samples, seconds): float32 [n] in -1..1, and the length of the whole clip, longer than what is returned when
        the clip was cut.

    Raises:
        MediaError: missing, corrupt, shorter than 161 samples, holding NaN or infinity, or not allowed.
    """
    import numpy as np

    samples, source_rate, seconds = decode_audio(value, max_seconds, folder, access)
    mono = samples.mean(axis=1) if samples.ndim == 2 and samples.size else samples.reshape(-1)
    if not np.isfinite(mono).all():
        raise MediaError("audio holds NaN or infinity", "media_nan")
    if source_rate != rate and len(mono):
        import librosa

        mono = librosa.resample(mono, orig_sr=source_rate, target_sr=rate)
    if max_seconds is not None:
        mono = mono[: int(max_seconds * rate)]
    if len(mono) < MIN_SAMPLES:
        raise MediaError(f"audio has {len(mono)} samples at {rate} Hz: shorter than one soft token", "audio_short")
    return np.ascontiguousarray(mono, dtype=np.float32), seconds


def decode_audio(value, max_seconds, folder, access):
    """(samples [n] or [n, channels] float32, rate, seconds of the whole clip), as recorded; raises MediaError."""
    try:
        return _decode_audio(value, max_seconds, folder, access)
    except MediaError:
        raise
    except Exception as problem:  # decoders raise whatever they like on corrupt data
        raise MediaError(f"audio cannot be read ({_told(problem)})") from None


def _decode_audio(value, max_seconds, folder, access):
    value = _decoded(value)
    if rate := _array_rate(value):
        samples = _audio_array(value["array"])
        wanted = len(samples) if max_seconds is None else int(max_seconds * rate) + 1
        return samples[:wanted], rate, len(samples) / rate
    return _decode_file(_content(value, folder, access), max_seconds)


def _decoded(value):
    """The `datasets` audio decoder (`datasets.Audio` with decode=True) as an array with its rate."""
    import numpy as np

    if not hasattr(value, "get_all_samples"):
        return value
    decoded = value.get_all_samples()
    return {"array": np.asarray(decoded.data).T, "sampling_rate": decoded.sample_rate}


def _array_rate(value) -> int | None:
    """The rate of a clip that is given as an array; None for a file or bytes."""
    if isinstance(value, Mapping) and value.get("array") is not None:
        if not value.get("sampling_rate"):
            raise MediaError("an audio array without its sampling_rate")
        rate = int(value["sampling_rate"])
        if not 0 < rate < 10_000_000:
            raise MediaError(f"a sampling rate of {rate} Hz")
        return rate
    if hasattr(value, "__array__") or (isinstance(value, list | tuple) and value):
        raise MediaError('a bare audio array has no rate: give {"array", "sampling_rate"}')
    return None


def _decode_file(content: bytes | Path, max_seconds):
    """Decode with soundfile, and what soundfile cannot read (m4a, webm, ...) with librosa's other backends."""
    with _sound_file(content) as file:
        if file is not None:
            wanted = -1 if max_seconds is None else int(max_seconds * file.samplerate) + 1
            samples = file.read(frames=wanted, dtype="float32", always_2d=True)
            _check_mp3(content, file, samples, wanted)
            _check_wav(content, file)
            # Where the file ended first, what its header says or lets guess of its length is no matter.
            frames = file.frames if 0 <= wanted <= len(samples) else len(samples)
            return samples, file.samplerate, frames / file.samplerate
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # librosa announces the backend it falls back to
        samples, rate = librosa.load(content, sr=None, mono=False)
    return samples.T, int(rate), samples.shape[-1] / rate


def _check_mp3(content: bytes | Path, file, samples, wanted: int) -> None:
    """Refuse an MP3 that breaks off or is damaged: its decoder skips what it cannot read, without an error.

    How long it should be is known where the file says so; without such a header its length is a guess.
    """
    if file.format != "MP3":
        return
    announced = file.frames if wanted < 0 else min(wanted, file.frames)
    if announced - len(samples) <= MP3_SLACK:
        return
    whole = content if isinstance(content, bytes) else content.read_bytes()
    first = 0
    if whole[:3] == b"ID3":  # behind it, as long as four bytes of seven bits say, comes the first frame
        first = 10 + sum((byte & 127) << shift for byte, shift in zip(whole[6:10], (21, 14, 7, 0), strict=False))
    if any(tag in whole[first : first + 64] for tag in (b"Xing", b"Info", b"VBRI")):
        told, read = announced / file.samplerate, len(samples) / file.samplerate
        raise MediaError(f"audio breaks off or is damaged: {read:.1f} of {told:.1f} s can be decoded")


def _check_wav(content: bytes | Path, file) -> None:
    """Refuse a WAV file that breaks off: its decoder takes what there is, without an error.

    The second four bytes say how many follow. Who writes to a pipe puts the highest number there, or 0.
    """
    if file.format not in ("WAV", "WAVEX"):
        return
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    start = content[:8] if isinstance(content, bytes) else content.open("rb").read(8)
    told = int.from_bytes(start[4:8], "little")
    if start[:4] == b"RIFF" and size + 1024 < told + 8 < 0x7FFF0000:
        raise MediaError(f"audio breaks off: {size:,} of {told + 8:,} bytes are there")


def _sound_file(content: bytes | Path):
    """A context with the opened `soundfile.SoundFile`, or with None for a kind of file that it does not know."""
    import soundfile

    try:
        return soundfile.SoundFile(io.BytesIO(content) if isinstance(content, bytes) else content)
    except soundfile.LibsndfileError as problem:
        if isinstance(content, bytes) or content.suffix.lower() in (".wav", ".flac", ".ogg", ".mp3"):
            raise MediaError(f"audio cannot be read ({_told(problem)})") from None
        return contextlib.nullcontext()


def _audio_array(value):
    """Samples [n] or [n, channels] in float32; integers are scaled by their type's range."""
    import numpy as np

    samples = np.asarray(value)
    _sample_count(samples)  # refuses what is no clip
    if samples.ndim == 2 and samples.shape[0] < samples.shape[1]:  # [channels, n]
        samples = samples.T
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype in (np.uint16, np.uint32):
        middle = 2.0 ** (8 * samples.dtype.itemsize - 1)
        return ((samples.astype(np.float64) - middle) / middle).astype(np.float32)
    if samples.dtype == np.int8:
        return samples.astype(np.float32) / 128
    if not (np.issubdtype(samples.dtype, np.integer) or np.issubdtype(samples.dtype, np.floating)):
        raise MediaError(f"audio samples of type {samples.dtype}")
    peak = float(np.abs(samples.astype(np.float64)).max(initial=0))
    if np.issubdtype(samples.dtype, np.integer):  # a list of integers is int64, whatever it was recorded in
        depth = next((bits for bits in (15, 23, 31) if peak <= 2**bits), 63)  # 16, 24 or 32 bits were recorded
        return samples.astype(np.float32) / 2.0**depth
    if peak > 8:
        raise MediaError(f"float audio samples up to {peak:.0f}: scale them to -1..1")
    return samples.astype(np.float32)


def _sample_count(array) -> int:
    """Samples in an array [n], [n, channels] or [channels, n]."""
    import numpy as np

    shape = np.shape(array)
    if len(shape) not in (1, 2):
        raise MediaError(f"an array of shape {shape} is no audio")
    return max(shape) if all(shape) else 0


# ---- where the bytes come from


def find_media(value: Any, folder: Path | None = None, access: MediaAccess = MediaAccess()) -> None:
    """Look whether a medium can be had, without opening it: its file is there, or it may be fetched.

    Raises:
        MediaError: no such file, an empty one, one outside the media root, or a URL that may not be fetched.
    """
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("array") is None:
        value = value.get("path") or value.get("url")
    if isinstance(folder, str) and access.root is None:  # an object store, which is asked once
        return
    if isinstance(value, str | Path) and not str(value).startswith("data:"):
        if not (access.remote and re.match(r"https?://", str(value), re.IGNORECASE)):
            _content(value, folder, access)


def _content(value, folder: Path | None, access: MediaAccess) -> bytes | Path:
    """The bytes of a media value, or the path to read them from."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            value = value["bytes"]
        elif value.get("path") or value.get("url"):
            value = value.get("path") or value["url"]
        else:
            raise MediaError("a media value with neither bytes nor path", "media_missing")
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise MediaError("empty bytes")
        return bytes(value)
    if not isinstance(value, str | Path) or not str(value):
        raise MediaError(f"a {type(value).__name__} is no media value")
    text = str(value)
    if text.startswith("data:"):
        return _data_uri(text)
    if local := re.fullmatch(r"file:(?://(?:localhost)?)?(/.*)", text, re.IGNORECASE | re.DOTALL):
        text = unquote(local[1])
    elif re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", text):
        return _remote(text, access)
    return _stored(text, folder, access) if isinstance(folder, str) else _local(Path(text), folder, access)


def _stored(text: str, folder: str, access: MediaAccess) -> bytes:
    if access.root is not None:
        raise MediaError("a file of an object store lies outside the media root", "media_outside_root")
    return stores.medium(folder, text)


def _data_uri(text: str) -> bytes:
    head, _, payload = text.partition(",")
    try:
        content = base64.b64decode(payload, validate=True) if head.endswith(";base64") else unquote(payload).encode()
    except (binascii.Error, ValueError):
        raise MediaError("a data: URI with broken base64") from None
    if not content:
        raise MediaError("a data: URI without data")
    return content


def _local(path: Path, folder: Path | None, access: MediaAccess) -> Path:
    try:
        path = user_path(path)
        if not path.is_absolute() and folder is not None:
            path = folder / path
        if access.root is not None and not path.resolve().is_relative_to(access.root.resolve()):
            raise MediaError(f"{path} lies outside the media root", "media_outside_root")
        if not path.is_file():
            told = f"not a regular file: {path}" if path.exists() else f"no such file: {path}"
            raise MediaError(told, "media_missing")
        if path.stat().st_size == 0:
            raise MediaError(f"empty file: {path}")
    except (OSError, RuntimeError, ValueError) as problem:  # too long, a NUL byte, a loop of links, ...
        hint = " (base64 needs a data: URI)" if len(str(path)) > 255 else ""
        raise MediaError(f"no file can be named so: {type(problem).__name__}{hint}", "media_missing") from None
    return path


def _remote(url: str, access: MediaAccess) -> bytes:
    if not url.lower().startswith(("http://", "https://")):
        raise MediaError(f"a URL of an unsupported kind: {url.split('://')[0][:20]}")
    if not access.remote:
        raise MediaError("a remote URL, which is fetched only with --allow-remote-media", "media_remote")
    from urllib.request import Request, urlopen

    with urlopen(Request(url, headers={"User-Agent": "gemma-trainer"}), timeout=30) as answer:
        content = answer.read(MAX_REMOTE_BYTES + 1)
    if len(content) > MAX_REMOTE_BYTES:
        raise MediaError("a remote file of more than 100 MiB")
    return content


def _told(problem: Exception) -> str:
    """A decoder's complaint, short and without the data it may quote."""
    told = re.sub(r" at 0x[0-9a-f]+", "", str(problem))  # an address differs from run to run
    return f"{type(problem).__name__}: {told}"[:160].replace("\n", " ")
