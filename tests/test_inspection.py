"""One image or clip, looked at before training: what training refuses is refused, what is odd is told."""

import io
import math

import numpy as np
import pytest
import soundfile
from PIL import Image

from gemma_trainer.errors import MediaError
from gemma_trainer.inspection import inspect
from gemma_trainer.media import open_audio, open_image
from gemma_trainer.media_headers import audio_seconds, image_size
from gemma_trainer.slots import Media


def noise(seconds, rate=16_000, channels=None, loud=0.3):
    shape = (int(seconds * rate),) if channels is None else (int(seconds * rate), channels)
    return np.random.default_rng(0).normal(0, loud / 3, shape).clip(-1, 1).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspected")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8))
    picture.save(path / "fine.jpg")
    picture.save(path / "fine.png")
    picture.resize((20, 400)).save(path / "thin.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(path / "turned.jpg", exif=exif)
    (path / "cut.jpg").write_bytes((path / "fine.jpg").read_bytes()[:9000])
    (path / "cut.png").write_bytes((path / "fine.png").read_bytes()[:9000])
    (path / "page.jpg").write_text("<html>not found</html>")
    (path / "empty.png").write_bytes(b"")
    (path / "binary.png").write_bytes(bytes(range(256)))
    soundfile.write(path / "fine.wav", noise(2), 16_000)
    soundfile.write(path / "stereo.flac", noise(2, 44_100, 2), 44_100)
    soundfile.write(path / "phone.wav", noise(2, 8_000), 8_000)
    soundfile.write(path / "long.wav", noise(31), 16_000)
    soundfile.write(path / "silent.wav", np.zeros(16_000), 16_000)
    soundfile.write(path / "short.wav", noise(0.005), 16_000)
    soundfile.write(path / "nan.wav", np.full(16_000, math.nan, np.float32), 16_000, subtype="FLOAT")
    return path


def look(folder, name, kind=None):
    kind = kind or ("image" if name.endswith(("jpg", "png")) else "audio")
    return inspect(Media(kind, name), folder)


@pytest.mark.parametrize(("name", "notes"), [
    ("fine.jpg", []), ("fine.png", []), ("thin.png", ["image_small", "image_thin"]), ("turned.jpg", ["image_rotated"]),
    ("fine.wav", []), ("stereo.flac", ["audio_resampled", "audio_channels"]), ("phone.wav", ["audio_low_rate"]),
    ("long.wav", ["audio_long"]), ("silent.wav", ["audio_silent"]),
])  # fmt: skip
def test_what_can_be_read_is_told_with_what_is_odd_about_it(folder, name, notes):
    assert [code for code, _ in look(folder, name).notes] == notes


@pytest.mark.parametrize(("name", "kind", "code"), [
    ("none.png", None, "media_missing"), ("empty.png", None, "media_unreadable"), ("cut.jpg", None, "media_unreadable"),
    ("cut.png", None, "media_unreadable"), ("binary.png", None, "media_unreadable"),
    ("page.jpg", None, "media_wrong_kind"), ("fine.wav", "image", "media_wrong_kind"),
    ("fine.jpg", "audio", "media_wrong_kind"), ("nan.wav", None, "media_nan"), ("short.wav", None, "audio_short"),
    ("http://localhost:9/a.png", "image", "media_remote"),
])  # fmt: skip
def test_what_training_refuses_is_refused_with_its_kind(folder, name, kind, code):
    with pytest.raises(MediaError) as found:
        look(folder, name, kind)
    assert found.value.code == code


@pytest.mark.parametrize("name", ["fine.jpg", "turned.jpg", "thin.png", "fine.wav", "stereo.flac", "long.wav"])
def test_sizes_and_lengths_are_those_of_training(folder, name):
    facts = look(folder, name)
    if facts.kind == "image":
        assert facts.size == image_size(name, folder) == open_image(name, folder).size
    else:
        assert facts.seconds == pytest.approx(audio_seconds(name, folder)) and facts.size is None


def test_the_key_is_that_of_the_content(folder, tmp_path):
    copied = tmp_path / "other name.jpg"
    copied.write_bytes((folder / "fine.jpg").read_bytes())
    key = look(folder, "fine.jpg").key
    assert key == look(tmp_path, copied.name).key != look(folder, "fine.png").key
    assert key == inspect(Media("image", {"bytes": copied.read_bytes(), "path": None})).key
    array = noise(1)
    clips = [inspect(Media("audio", {"array": a, "sampling_rate": 16_000})).key for a in (array, array * 0.5)]
    assert clips[0] != clips[1]


def accepted(look, *arguments):
    try:
        look(*arguments)
    except MediaError:
        return False
    return True


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "wav", "flac", "ogg", "mp3"])
def test_what_training_opens_is_accepted_and_what_it_refuses_is_not(folder, format):
    """Files that break off anywhere, or have a byte changed."""
    file, rng = io.BytesIO(), np.random.default_rng(1)
    if format.isupper():
        Image.open(folder / "fine.png").convert("RGB").save(file, format)
        kind, openers = "image", (open_image,)
    else:
        soundfile.write(file, noise(0.5), 16_000, format=format.upper())
        kind, openers = "audio", (lambda value: open_audio(value, 16_000, 30.0),)
    whole = file.getvalue()
    broken = [whole[: rng.integers(1, len(whole))] for _ in range(12)]
    for _ in range(12):
        changed = bytearray(whole)
        changed[rng.integers(len(whole))] ^= 0xFF
        broken.append(bytes(changed))
    assert accepted(inspect, Media(kind, whole)) and accepted(openers[0], whole)
    for content in broken:
        assert accepted(inspect, Media(kind, content)) == accepted(openers[0], content)
