"""Every kind of media file in every form that a row may hold it, through the collator and into the models."""

import base64
import contextlib
import json
import sys

import numpy as np
import pytest
import soundfile
import tiny
import torch
from PIL import Image

from conftest import talk
from gemma_trainer import sources
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import MediaError
from gemma_trainer.media import open_audio, open_image
from gemma_trainer.media_headers import audio_seconds, image_size

# name: (kind, seconds at 16 kHz or None where it is bad)
CLIPS = {
    "stereo_44k.flac": 1.0,
    "mono_8k_u8.wav": 1.0,
    "six_channels_48k.wav": 0.5,
    "float.wav": 2.0,
    "vorbis.ogg": 1.0,
    "half_minute_plus.wav": 30.0,
    "odd_length.wav": 15999 / 16000,
    "no_samples.wav": None,
    "hundred_samples.wav": None,
    "nan.wav": None,
    "text.wav": None,
    "absent.wav": None,
}
# name: the colours of its left and right half, or None where it is bad
RED, WHITE, BLACK = (255, 0, 0), (255, 255, 255), (0, 0, 0)
PICTURES = {
    "rgba.png": (RED, WHITE),
    "la.png": (WHITE, WHITE),
    "palette.png": (RED, BLACK),
    "one_bit.png": (WHITE, BLACK),
    "cmyk.jpg": (RED, BLACK),
    "animated.gif": (RED, RED),
    "thin.png": ((0, 128, 0), (0, 128, 0)),
    "one_pixel.png": ((0, 0, 255), (0, 0, 255)),
    "deep.png": ((128, 128, 128), (128, 128, 128)),
    "zero_bytes.png": None,
    "page.jpg": None,
    "half.png": None,
    "absent.png": None,
}
FILES = CLIPS | PICTURES


def tone(seconds, rate, channels=1):
    wave = 0.4 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return wave if channels == 1 else np.stack([wave] * channels, axis=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("awkward")
    nan = tone(1.0, 16000).astype(np.float32)
    nan[100] = np.nan
    for name, samples, rate, subtype in (
        ("stereo_44k.flac", tone(1.0, 44100, 2), 44100, None),
        ("mono_8k_u8.wav", tone(1.0, 8000), 8000, "PCM_U8"),
        ("six_channels_48k.wav", tone(0.5, 48000, 6), 48000, "PCM_24"),
        ("float.wav", tone(2.0, 22050).astype(np.float32), 22050, "FLOAT"),
        ("vorbis.ogg", tone(1.0, 32000), 32000, None),
        ("half_minute_plus.wav", tone(33.0, 16000), 16000, None),
        ("odd_length.wav", tone(1.0, 16000)[:15999], 16000, None),
        ("no_samples.wav", np.zeros(0), 16000, None),
        ("hundred_samples.wav", tone(1.0, 16000)[:100], 16000, None),
        ("nan.wav", nan, 16000, "FLOAT"),
    ):
        soundfile.write(out / name, samples, rate, subtype=subtype)
    rgba = np.zeros((64, 96, 4), np.uint8)
    rgba[:, :48] = (255, 0, 0, 255)
    Image.fromarray(rgba).save(out / "rgba.png")
    Image.fromarray(rgba[..., [0, 3]]).save(out / "la.png")
    Image.fromarray(rgba[..., :3]).convert("P").save(out / "palette.png")
    Image.fromarray((rgba[..., 0] > 0).astype(np.uint8) * 255).convert("1").save(out / "one_bit.png")
    Image.fromarray(rgba[..., :3]).convert("CMYK").save(out / "cmyk.jpg", quality=95)
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green", "blue")]
    frames[0].save(out / "animated.gif", save_all=True, append_images=frames[1:], duration=50)
    Image.new("RGB", (16, 16000), "green").save(out / "thin.png")
    Image.new("RGB", (1, 1), "blue").save(out / "one_pixel.png")
    Image.fromarray(np.full((30, 30), 32896, np.uint16)).save(out / "deep.png")
    (out / "half.png").write_bytes((out / "thin.png").read_bytes()[:200])
    (out / "zero_bytes.png").write_bytes(b"")
    (out / "text.wav").write_text("this is no audio")
    (out / "page.jpg").write_text("<html>404</html>")
    return out


def kind_of(name):
    return "audio" if name in CLIPS else "image"


def forms_of(folder, name):
    """The value of a media block in every form, by name of the form."""
    path = folder / name
    forms = {
        "relative path": name,
        "absolute path": str(path),
        "file URL": path.as_uri(),
        "Arrow, path": {"bytes": None, "path": name},
    }
    if path.exists():
        content = path.read_bytes()
        mime = "audio/wav" if name in CLIPS else "image/png"
        forms |= {
            "bytes": content,
            "Arrow, bytes": {"bytes": content, "path": name},
            "Arrow, bytes alone": {"bytes": content, "path": None},
            "data URI": f"data:{mime};base64,{base64.b64encode(content).decode()}",
        }
        with contextlib.suppress(Exception):  # what no decoder opens has no decoded form
            if name in CLIPS:
                samples, rate = soundfile.read(path)
                forms["array"] = {"array": samples, "sampling_rate": rate, "path": None}
            else:
                forms["PIL image"] = Image.open(path)
                forms["PIL image"].load()
                if forms["PIL image"].mode in ("RGB", "RGBA", "L"):
                    forms["array"] = np.array(forms["PIL image"])
    if name == "half.png":
        forms.pop("PIL image", None)
    return forms


def row_of(folder, name, value):
    block = {"type": kind_of(name), kind_of(name): value}
    return talk([block, {"type": "text", "text": "What is it?"}], "Yes.") | {
        "__source__": ("rows.jsonl:1", str(folder))
    }


@pytest.mark.parametrize("name", FILES)
def test_every_form_of_a_file_gives_the_same_batch(name, folder, processor, capfd):
    expected = None
    for form, value in forms_of(folder, name).items():
        collator = MultimodalCollator(processor, 2048)
        batch = collator([row_of(folder, name, value)])
        assert collator.stats.bad_media == (FILES[name] is None), form
        assert bool(collator.stats.long_audio) == (name == "half_minute_plus.wav"), form
        assert bool((batch["labels"] != -100).any()) == (FILES[name] is not None), form
        expected = expected or batch
        assert batch["input_ids"].tolist() == expected["input_ids"].tolist(), form
        for key in set(batch) & {"pixel_values", "input_features"}:
            assert torch.allclose(batch[key], expected[key], atol=1e-5), form
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_what_it_holds(name, folder):
    if name in CLIPS and CLIPS[name]:
        samples, _ = open_audio(name, 16000, 30.0, folder)
        assert samples.dtype == np.float32 and len(samples) == round(CLIPS[name] * 16000)
        assert 0.2 < np.abs(samples).max() < 0.6
    elif name in PICTURES and PICTURES[name]:
        opened = np.asarray(open_image(name, folder)).astype(int)
        middle = opened.shape[0] // 2
        for pixel, colour in zip((opened[middle, 0], opened[middle, -1]), PICTURES[name], strict=True):
            assert np.abs(pixel - colour).max() < 25, pixel
    else:
        with pytest.raises(MediaError):
            open_audio(name, 16000, 30.0, folder) if name in CLIPS else open_image(name, folder)


@pytest.mark.parametrize("name", [n for n in tiny.NAMES if tiny.MODALITIES[n]])
def test_every_file_passes_every_model(name, folder):
    """Good and bad ones, each beside a row of text: the tokens fit the features, or the model raises."""
    processor = tiny.make_processor(name)
    model = tiny.make_model(name, processor)
    collator = MultimodalCollator(processor, 2048, modalities=tiny.MODALITIES[name])
    files = [file for file in FILES if kind_of(file) in tiny.MODALITIES[name]]
    for file in files:
        with torch.no_grad():
            assert torch.isfinite(model(**collator([row_of(folder, file, file), talk("Hi", "Hello")])).loss), file
    assert collator.stats.bad_media == sum(FILES[file] is None for file in files)


def test_parquet_with_image_and_audio_features_needs_no_torchcodec(folder, tmp_path, processor, monkeypatch):
    """As `datasets` writes it: columns of type Image and Audio, bytes inside, None where a row has none."""
    import datasets

    monkeypatch.setitem(sys.modules, "torchcodec", None)
    names = {"image": ["rgba.png", None, "thin.png"], "audio": [None, "stereo_44k.flac", "vorbis.ogg"]}
    rows = {"prompt": ["What is it?"] * 3, "completion": ["A.", "B.", "C."]}
    for kind, files in names.items():
        rows[kind] = [file and {"bytes": (folder / file).read_bytes(), "path": file} for file in files]
    table = datasets.Dataset.from_dict(rows)  # structs of bytes and path, cast since encoding audio needs torchcodec
    table = table.cast_column("image", datasets.Image()).cast_column("audio", datasets.Audio())
    table.to_parquet(tmp_path / "rows.parquet")
    opened = sources.open_rows([str(tmp_path / "rows.parquet")])
    collator = MultimodalCollator(processor, 2048)
    batch = collator([opened[index] for index in range(3)])
    assert collator.stats.images == collator.stats.clips == 2 and not collator.stats.bad_media
    by_path = [
        {
            "prompt": "What is it?",
            "completion": answer,
            "image": image,
            "audio": audio,
            "__source__": ("r", str(folder)),
        }
        for answer, image, audio in zip("ABC", names["image"], names["audio"], strict=True)
    ]
    for row in by_path:
        row["completion"] += "."
    expected = MultimodalCollator(processor, 2048)(by_path)
    for key, value in expected.items():
        assert torch.equal(batch[key], value), key


@pytest.mark.parametrize("kind", ["mp3", "tiff", "png", "jpg", "gif", "ogg", "flac", "wav"])
def test_decoders_of_broken_files_are_silent(kind, tmp_path, capfd):
    """libmpg123 and libtiff write to the process's stderr by themselves."""
    rng = np.random.default_rng(0)
    path = tmp_path / f"whole.{kind}"
    is_audio = kind in ("mp3", "ogg", "flac", "wav")
    if is_audio:
        soundfile.write(path, tone(2.0, 16000), 16000)
    else:
        noise = Image.fromarray(rng.integers(0, 255, (80, 90, 3), dtype=np.uint8))
        noise.save(path, **({"compression": "tiff_lzw"} if kind == "tiff" else {}))
    content = path.read_bytes()
    half = len(content) // 2
    for broken in (
        content[:half],
        content[:half] + rng.bytes(500) + content[half + 500 :],
        rng.bytes(300) + content,
        content + rng.bytes(3000),
    ):
        for read in (lambda b: open_audio(b, 16000), audio_seconds) if is_audio else (open_image, image_size):
            with contextlib.suppress(MediaError):
                read(broken)
    assert capfd.readouterr().err == ""
    print("and what comes after is heard", file=sys.stderr)
    assert capfd.readouterr().err != ""


def test_a_json_line_holds_what_openai_files_hold(folder, tmp_path, processor):
    """`image_url` and `input_audio`, with base64 inside."""
    picture = base64.b64encode((folder / "rgba.png").read_bytes()).decode()
    sound = base64.b64encode((folder / "float.wav").read_bytes()).decode()
    blocks = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "text", "text": "What is it?"},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps(talk(blocks, "Yes.")))
    collator = MultimodalCollator(processor, 2048)
    batch = collator([sources.open_rows([str(tmp_path / "rows.jsonl")])[0]])
    assert collator.stats.images == collator.stats.clips == 1 and not collator.stats.bad_media
    assert (batch["input_ids"] == processor.audio_token_id).sum() == 50
