"""Pictures and recordings that people upload, as a model takes them."""

from __future__ import annotations

import base64
import io
import mimetypes
import warnings
from pathlib import Path

from . import ChatError

RATE = 16000  # samples a second
LONGEST = 30  # seconds that a Gemma hears of a clip; what is beyond would be cut without a word
SHORTEST = 0.01  # less makes no token


def block(path: str, kinds: tuple[str, ...]) -> dict:
    """A message's block of an uploaded file.

    Args:
        kinds: what the model takes, of "image" and "audio".

    Raises:
        ChatError: the model does not take it, it cannot be read, or is too long.
    """
    kind = (mimetypes.guess_type(path)[0] or "").partition("/")[0]
    if kind not in kinds:
        taken = " and ".join({"image": "pictures", "audio": "recordings"}[one] for one in kinds)
        raise ChatError(f"{Path(path).name}: the model takes {taken or 'text alone'}")
    return {"type": kind, kind: picture(path) if kind == "image" else recording(path)}


def picture(path: str):
    """An RGB image: upright, 16 bits scaled to 8, transparency over white.

    Raises:
        ChatError: no picture can be read there, or it is too large.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I;16"):
                image = image.convert("I").point(lambda value: value / 256).convert("L")
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ChatError(f"{Path(path).name}: the picture is too large") from None
    except Exception:  # broken files make PIL raise whatever it happens to hit
        raise ChatError(f"{Path(path).name} is no picture that can be read") from None


def recording(path: str):
    """Mono float32 samples at 16 kHz.

    Raises:
        ChatError: no sound can be read there, or it is too long or too short.
    """
    import librosa
    import numpy as np

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # librosa tells that it tries another reader
            samples, _ = librosa.load(path, sr=RATE, mono=True, duration=LONGEST + 1)
    except Exception:  # as many kinds of error as there are readers
        told = "is no recording that can be read (WAV, FLAC, OGG and MP3 can; others need ffmpeg)"
        raise ChatError(f"{Path(path).name} {told}") from None
    if len(samples) > LONGEST * RATE:
        raise ChatError(f"{Path(path).name} is longer than the {LONGEST} seconds that a Gemma hears: cut it")
    if len(samples) < SHORTEST * RATE + 1 or not np.isfinite(samples).all():
        raise ChatError(f"{Path(path).name} holds no sound")
    return samples


def as_png(image) -> str:
    """An image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def as_wav(samples) -> str:
    """Samples at 16 kHz as a WAV file in base64."""
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="PCM_16")
    return base64.b64encode(buffer.getvalue()).decode()
