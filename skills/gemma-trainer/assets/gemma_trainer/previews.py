"""Small copies of a row's media for a page: a picture of at most 320 pixels, a clip as the model hears it."""

from __future__ import annotations

import base64
import io

from .errors import MediaError
from .media import MediaAccess, open_audio, open_image
from .rows import Row
from .slots import Media

PIXELS, RATE, SECONDS = 320, 16_000, 30.0
MAX_SHOWN = 4  # media of a row


def previews(row: Row, access: MediaAccess) -> list[dict]:
    """[{"kind": "image" or "audio", "source": a data: URI}] of a row's first media; one that cannot be read has no
    source."""
    return [_preview(medium, row.folder, access) for medium in row.media[:MAX_SHOWN]]


def _preview(medium: Media, folder, access: MediaAccess) -> dict:
    make = _picture if medium.kind == "image" else _clip
    try:
        return {"kind": medium.kind, "source": make(medium.value, folder, access)}
    except (MediaError, OSError, ValueError, RuntimeError):
        return {"kind": medium.kind}


def _picture(value, folder, access: MediaAccess) -> str:
    image = open_image(value, folder, access)
    image.thumbnail((PIXELS, PIXELS))
    return _uri("image/jpeg", lambda file: image.save(file, "JPEG", quality=80))


def _clip(value, folder, access: MediaAccess) -> str:
    import soundfile

    samples, _ = open_audio(value, RATE, SECONDS, folder, access)
    return _uri("audio/mpeg", lambda file: soundfile.write(file, samples, RATE, format="MP3"))


def _uri(kind: str, write) -> str:
    file = io.BytesIO()
    write(file)
    return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
