"""What awkward pictures and recordings become, and what is refused."""

import base64
import io
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageFile

from conftest import ASSETS
from gemma_trainer.errors import MediaError
from gemma_trainer.media import MediaAccess, open_audio, open_image
from gemma_trainer.media_headers import audio_seconds, image_size

RATE = 16000


def tone(seconds, rate, channels=1):
    wave = 0.4 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)
    return wave if channels == 1 else np.stack([wave] * channels, 1)


@pytest.mark.parametrize(("name", "rate", "channels", "options", "seconds"), [
    ("stereo.flac", 44100, 2, {}, 1.0), ("u8.wav", 8000, 1, {"subtype": "PCM_U8"}, 1.0),
    ("six.wav", 48000, 6, {"subtype": "PCM_24"}, 0.5), ("float.wav", 22050, 1, {"subtype": "FLOAT"}, 2.0),
    ("vorbis.ogg", 32000, 1, {}, 1.0), ("layer3.mp3", 32000, 1, {}, 1.0),
])  # fmt: skip
def test_any_rate_and_channel_count_becomes_mono_at_the_models_rate(tmp_path, name, rate, channels, options, seconds):
    soundfile.write(tmp_path / name, tone(seconds, rate, channels), rate, **options)
    samples, length = open_audio(name, RATE, 30.0, tmp_path)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert len(samples) == pytest.approx(seconds * RATE, abs=0 if name[-3:] != "mp3" else 2000)
    assert length == pytest.approx(seconds, abs=0.12)
    assert np.abs(np.fft.rfft(samples)).argmax() == pytest.approx(440 * len(samples) / RATE, abs=1)
    assert 0.3 < np.abs(samples[800:-800]).max() < 0.5


def test_a_long_clip_is_cut_to_what_the_model_hears_and_its_length_told(tmp_path):
    soundfile.write(tmp_path / "long.wav", tone(33, RATE), RATE)
    samples, length = open_audio(tmp_path / "long.wav", RATE, 30.0)
    assert len(samples) == 30 * RATE and length == pytest.approx(33)


@pytest.mark.parametrize("value", [
    {"array": tone(1, 8000), "sampling_rate": 8000},
    {"array": tone(1, 8000, 2), "sampling_rate": 8000},
    {"array": tone(1, 8000, 2).T, "sampling_rate": 8000},
    {"array": (tone(1, 8000) * 32767).astype(np.int16), "sampling_rate": 8000},
    {"array": tone(1, 8000).tolist(), "sampling_rate": 8000, "path": None},
    {"array": (tone(1, 8000) * 32767).astype(int).tolist(), "sampling_rate": 8000},
    {"array": (tone(1, 8000) * 2e9).astype(np.int32), "sampling_rate": 8000},
    {"array": (tone(1, 8000) * 32767).astype(np.int32), "sampling_rate": 8000},
    {"array": (tone(1, 8000) * 8e6).astype(int).tolist(), "sampling_rate": 8000},
    {"array": ((tone(1, 8000) + 1) * 2**31).astype(np.uint32), "sampling_rate": 8000},
])  # fmt: skip
def test_arrays(value):
    samples, _ = open_audio(value, RATE)
    assert len(samples) == RATE and 0.3 < np.abs(samples).max() < 0.5


def wav_bytes(samples=None):
    file = io.BytesIO()
    soundfile.write(file, tone(1, RATE) if samples is None else samples, RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def test_bytes_and_data_uris():
    content = wav_bytes()
    uri = "data:audio/wav;base64," + base64.b64encode(content).decode()
    for value in (content, {"bytes": content, "path": None}, uri):
        assert len(open_audio(value, RATE)[0]) == RATE


def with_nan():
    samples = tone(1, RATE)
    samples[100] = np.nan
    return samples


@pytest.mark.parametrize(("value", "reason"), [
    ("absent.wav", "no such file"), ("empty.wav", "empty file"), ("text.wav", "cannot be read"),
    (wav_bytes(np.zeros(0)), "0 samples"), (wav_bytes(tone(1, RATE)[:100]), "100 samples"),
    (wav_bytes(with_nan()), "NaN"), ("https://example.org/a.wav", "--allow-remote-media"),
    ("data:audio/wav;base64,!!", "broken base64"), ({"array": tone(1, RATE)}, "sampling_rate"),
    (tone(1, RATE), "no rate"),
    ({"array": np.full(16000, 3e38), "sampling_rate": 44100}, "scale them"),
    ({"array": np.zeros((500, 0)), "sampling_rate": RATE}, "0 samples"),
    ({"array": tone(1, RATE), "sampling_rate": 10**15}, "a sampling rate of"),
    ({"array": tone(1, RATE), "sampling_rate": "fast"}, "cannot be read"), ("", "no media value"),
    (".", "not a regular file"), ("A" * 300, "base64 needs a data: URI"), ("a\0b", "no such file"),
    ("s3://bucket/a.wav", "unsupported kind: s3"), ("HTTPS://example.org/a.wav", "--allow-remote-media"),
    ({"array": tone(1, RATE).astype(complex), "sampling_rate": RATE}, "samples of type complex"),
    ({"array": tone(1, RATE) * 30000, "sampling_rate": RATE}, "scale them to -1..1"),
    ({"path": None, "bytes": None}, "neither bytes nor path"), (5, "int is no media"),
    ({"array": np.zeros((2, 2, 2)), "sampling_rate": RATE}, "no audio"), (b"", "empty bytes"),
])  # fmt: skip
def test_bad_audio(tmp_path, value, reason):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("this is no audio")
    with pytest.raises(MediaError, match=reason):
        open_audio(value, RATE, 30.0, tmp_path)


# ---- images


def rgba():
    pixels = np.zeros((64, 96, 4), np.uint8)
    pixels[:, :48] = (255, 0, 0, 255)
    return pixels


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def is_near(pixel, colour):
    return all(abs(a - b) < 12 for a, b in zip(pixel, colour, strict=True))


@pytest.mark.parametrize(("content", "left", "right"), [
    (saved(Image.fromarray(rgba(), "RGBA")), (255, 0, 0), (255, 255, 255)),
    (saved(Image.fromarray(rgba()[..., [0, 3]], "LA")), (255, 255, 255), (255, 255, 255)),
    (saved(Image.fromarray(rgba()[..., :3]).convert("P")), (255, 0, 0), (0, 0, 0)),
    (saved(Image.fromarray(rgba()[..., 0]).convert("1")), (255, 255, 255), (0, 0, 0)),
    (saved(Image.fromarray(rgba()[..., :3]).convert("CMYK"), "JPEG"), (255, 0, 0), (0, 0, 0)),
    (saved(Image.fromarray(rgba()[..., 0]), transparency=0), (255, 255, 255), (255, 255, 255)),
], ids=["RGBA", "LA", "P", "1", "CMYK", "tRNS"])  # fmt: skip
def test_every_mode_becomes_rgb_and_transparency_white(content, left, right):
    image = open_image(content)
    assert image.mode == "RGB" and image.size == (96, 64)
    assert is_near(image.getpixel((10, 30)), left) and is_near(image.getpixel((90, 30)), right)


def test_sixteen_bits_are_scaled_not_clipped():
    ramp = np.tile(np.linspace(0, 65535, 96).astype(np.uint16), (64, 1))
    for value in (
        saved(Image.fromarray(ramp)),
        ramp,
        Image.fromarray(ramp.astype(np.int32)),
        Image.fromarray(ramp / 65535.0),
    ):
        row = np.asarray(open_image(value))[0, :, 0].astype(int)
        assert abs(row[48] - 128) < 4 and row[0] == 0 and row[-1] == 255


@pytest.mark.parametrize("array", [
    np.full((8, 8), 32768, np.int32), np.full((8, 8), 32768.0), np.full((8, 8), 32768, np.uint16), np.full((8, 8), 0.5),
    np.full((8, 8), 128.0), np.full((8, 8), 128, np.int64), np.linspace(-1, 1, 65).reshape(5, 13)[:, 6:7],
])  # fmt: skip
def test_arrays_of_every_number_type_are_scaled_by_their_range(array):
    assert abs(np.asarray(open_image(array)).mean() - 128) < 2


def test_exif_orientation_is_applied():
    image = Image.new("RGB", (40, 20))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by a quarter
    assert open_image(saved(image, "JPEG", exif=exif)).size == (20, 40)


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green")]
    assert is_near(
        open_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:])).getpixel((5, 5)), (255, 0, 0)
    )


@pytest.mark.parametrize(("value", "size"), [
    (np.zeros((1, 1000, 3), np.uint8), (1000, 1)), (np.zeros((1000, 1, 3), np.uint8), (1, 1000)),
    (np.zeros((3, 20, 30), np.uint8), (30, 20)), (np.zeros((20, 30)), (30, 20)), (np.zeros((20, 30, 1)), (30, 20)),
    (Image.new("RGB", (1, 1)), (1, 1)), (Image.new("RGB", (16, 16000)), (16, 16000)),
])  # fmt: skip
def test_arrays_and_extreme_sizes(value, size):
    assert open_image(value).size == size


@pytest.mark.parametrize(("value", "reason"), [
    ("absent.png", "no such file"), ("zero.png", "empty file"), ("page.jpg", "cannot be read"),
    (saved(Image.new("RGB", (300, 300), "red"))[:200], "cannot be read"), (np.full((4, 4, 3), np.nan), "NaN"),
    (np.zeros((5, 5, 7)), "is no image"), (np.zeros((0, 4, 3)), "is no image"),
    ("https://example.org/a.png", "--allow-remote"),
])  # fmt: skip
def test_bad_images(tmp_path, value, reason):
    (tmp_path / "zero.png").touch()
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    with pytest.raises(MediaError, match=reason):
        open_image(value, tmp_path)


def test_odd_file_urls_and_an_image_without_pixels(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "ü 木#?.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "~x.png")
    urls = ["file://{}/ü 木#?.png", "FILE://localhost{}/%C3%BC 木%23?.png", "file:{}/~x.png"]
    for value in (*(url.format(tmp_path) for url in urls), "~x.png"):
        assert open_image(value, tmp_path).size == (8, 8)
    with pytest.raises(MediaError, match="without pixels"):
        open_image(Image.new("RGB", (0, 5)))
    bright = np.full((8, 8, 3), 0.8)
    bright[0, 0, 0] = 1.001  # what resampling leaves
    assert open_image(bright).getpixel((4, 4)) == (204, 204, 204)


def test_a_decompression_bomb_is_bad_media_without_a_warning(monkeypatch):
    content = saved(Image.new("RGB", (300, 300)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    with warnings.catch_warnings(), pytest.raises(MediaError, match="decompression bomb"):
        warnings.simplefilter("error")
        open_image(content)


# ---- what the headers tell


@pytest.fixture
def nothing_is_decoded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    monkeypatch.setattr(soundfile.SoundFile, "read", refuse)


def oriented(kind, orientation):
    image = Image.new("RGB", (40, 20), "red")
    exif = image.getexif()
    exif[0x0112] = orientation
    return saved(image, kind, exif=exif)


def picture_values(folder):
    content = saved(Image.new("RGB", (30, 20), "red"))
    (folder / "a b.png").write_bytes(content)
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green")]
    grey = Image.fromarray(rgba()[..., 0])
    return [
        "a b.png", folder / "a b.png", f"file://{folder}/a%20b.png", {"path": "a b.png"}, {"bytes": content},
        content, memoryview(content), "data:image/png;base64," + base64.b64encode(content).decode(),
        Image.new("RGB", (16, 16000)), Image.open(folder / "a b.png"), saved(Image.new("RGB", (1, 1))),
        saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), saved(Image.fromarray(rgba(), "RGBA")),
        saved(grey.convert("1")), saved(grey.convert("CMYK"), "JPEG"), saved(grey, "WEBP"), saved(grey, "BMP"),
        saved(Image.fromarray(np.zeros((5, 9), np.uint16))), saved(Image.new("RGB", (9, 5)), "TIFF"),
        *(oriented(kind, turn) for kind in ("JPEG", "PNG", "WEBP", "TIFF") for turn in (1, 3, 6, 8)),
        np.zeros((20, 30)), np.zeros((3, 20, 30), np.uint8), np.zeros((20, 30, 4), bool), torch.zeros(20, 30, 1),
    ]  # fmt: skip


def test_the_header_tells_the_size_of_the_opened_image(tmp_path):
    for number, value in enumerate(picture_values(tmp_path)):
        assert image_size(value, tmp_path) == open_image(value, tmp_path).size, number


def test_the_size_is_told_without_decoding_and_the_file_closed(tmp_path, nothing_is_decoded, monkeypatch):
    opened = []
    plain_open = open
    monkeypatch.setattr(
        "builtins.open", lambda *args, **kwargs: opened.append(plain_open(*args, **kwargs)) or opened[-1]
    )
    for value in picture_values(tmp_path):
        opened.clear()
        image_size(value, tmp_path)
        assert all(file.closed for file in opened)
    for kind in ("PNG", "JPEG"):
        noise = np.random.default_rng(0).integers(0, 255, (300, 200, 3), dtype=np.uint8)
        assert image_size(saved(Image.fromarray(noise), kind)[:1000]) == (200, 300)


def clip_values(folder):
    values = []
    for name, rate, channels, options in (
        ("a.wav", 16000, 1, {}), ("b.flac", 44100, 2, {}), ("c.ogg", 32000, 1, {}), ("d.mp3", 32000, 1, {}),
        ("e.wav", 8000, 1, {"subtype": "PCM_U8"}), ("f.wav", 48000, 6, {"subtype": "PCM_24"}),
        ("g.ogg", 48000, 1, {"subtype": "OPUS"}), ("h.aiff", 22050, 1, {}), ("i.caf", 16000, 2, {}),
    ):  # fmt: skip
        soundfile.write(folder / name, tone(1.3, rate, channels), rate, **options)
        values += [name, (folder / name).read_bytes()]
    content = wav_bytes(tone(33, RATE)[:-1])
    uri = "data:audio/wav;base64," + base64.b64encode(content).decode()
    return [
        *values, content, {"bytes": content, "path": None}, uri, folder / "a.wav", f"file://{folder}/a.wav",
        {"array": tone(1, 8000), "sampling_rate": 8000},
        {"array": tone(1, 8000, 2), "sampling_rate": 8000},
        {"array": tone(1, 8000, 2).T.tolist(), "sampling_rate": 7999}, Decoder(tone(2, 8000, 2).T, 8000),
    ]  # fmt: skip


class Decoder:
    """What `datasets.Audio` gives with decode=True, as far as it is used."""

    def __init__(self, data, rate, metadata=None):
        self.data, self.sample_rate, self.metadata = data, rate, metadata

    def get_all_samples(self):
        return self


def test_the_header_tells_the_length_of_the_opened_clip(tmp_path):
    for number, value in enumerate(clip_values(tmp_path)):
        assert audio_seconds(value, tmp_path) == open_audio(value, RATE, None, tmp_path)[1], number


def test_the_length_is_told_without_decoding_and_the_file_closed(tmp_path, nothing_is_decoded, monkeypatch):
    opened = []
    plain_open = soundfile.SoundFile
    monkeypatch.setattr(soundfile, "SoundFile", lambda *args: opened.append(plain_open(*args)) or opened[-1])
    for value in clip_values(tmp_path):
        audio_seconds(value, tmp_path)
    assert len(opened) > 20 and all(file.closed for file in opened)
    lazy = Decoder(None, 8000, types.SimpleNamespace(duration_seconds=2.5))
    assert audio_seconds(lazy) == 2.5
    soundfile.write(tmp_path / "long.flac", np.random.default_rng(0).normal(0, 0.1, RATE * 20), RATE)
    assert audio_seconds((tmp_path / "long.flac").read_bytes()[:500]) == 20


def test_what_soundfile_does_not_know_is_left_to_librosa(tmp_path, monkeypatch):
    import librosa

    (tmp_path / "a.m4a").write_bytes(b"not known here")
    with pytest.raises(MediaError, match="audio cannot be read"):
        audio_seconds("a.m4a", tmp_path)
    monkeypatch.setattr(librosa, "get_duration", lambda path: 4.5)
    assert audio_seconds("a.m4a", tmp_path) == 4.5


@pytest.mark.parametrize("value", [
    "absent.png", "zero.png", "page.jpg", np.zeros((5, 5, 7)), np.zeros((0, 4, 3)), {"bytes": None, "path": None}, 5,
    Image.new("RGB", (0, 5)), b"", "data:image/png;base64,!!", "https://example.org/a.png", "s3://bucket/a.png",
])  # fmt: skip
@pytest.mark.parametrize("told", [image_size, audio_seconds])
def test_what_the_header_does_not_tell_is_bad_media(tmp_path, told, value, monkeypatch):
    (tmp_path / "zero.png").touch()
    (tmp_path / "page.jpg").write_text("<html>404</html>")
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: pytest.fail("fetched"))
    with pytest.raises(MediaError):
        told(value, tmp_path, MediaAccess(remote=True))


@pytest.mark.parametrize("value", [
    wav_bytes(np.zeros(0)), tone(1, RATE), {"array": tone(1, RATE)}, {"array": tone(1, RATE), "sampling_rate": 10**15},
    {"array": np.zeros((2, 2, 2)), "sampling_rate": RATE}, {"array": np.zeros((500, 0)), "sampling_rate": RATE},
    {"array": [[1.0], [1.0, 2.0]], "sampling_rate": RATE},
])  # fmt: skip
def test_clips_without_a_length(value):
    with pytest.raises(MediaError):
        audio_seconds(value)


def test_the_media_root_is_a_fence(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        Image.new("RGB", (8, 8)).save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    access = MediaAccess(root=inside)
    assert open_image("a.png", inside, access).size == (8, 8)
    for value in (str(outside / "a.png"), "../out/a.png", "link.png", f"file://{outside}/a.png"):
        for opens in (open_image, image_size, audio_seconds):
            with pytest.raises(MediaError, match="outside the media root"):
                opens(value, inside, access)


def test_nothing_is_imported_until_a_medium_is_opened():
    code = f"""
import sys; sys.path.insert(0, {str(ASSETS)!r}); import gemma_trainer.media_headers; print(sorted(sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "gemma_trainer.media" in done.stdout
    assert not any(f"'{name}'" in done.stdout for name in ("PIL", "librosa", "soundfile", "numpy", "torch"))


def test_an_mp3_that_breaks_off_is_bad():
    """Its decoder makes do with what is there."""
    wave = 0.3 * np.sin(np.arange(48000) * 0.1)
    file = io.BytesIO()
    soundfile.write(file, wave, 16000, format="MP3")
    content = file.getvalue()
    assert len(open_audio(content, 16000)[0]) == 48000
    assert len(open_audio(content, 16000, 1.0)[0]) == 16000
    with pytest.raises(MediaError, match="breaks off or is damaged: 1.* of 3.0 s"):
        open_audio(content[: len(content) // 2], 16000)


def test_a_wav_that_breaks_off_is_bad_and_one_written_to_a_pipe_is_not():
    content = wav_bytes(tone(3, RATE))
    with pytest.raises(MediaError, match="breaks off: 48,000 of 1.* bytes are there"):
        open_audio(content[:48_000], RATE)
    for length in (0, 0xFFFFFFFF):
        piped = content[:4] + length.to_bytes(4, "little") + content[8:]
        assert len(open_audio(piped, RATE)[0]) == 3 * RATE


ID3 = b"ID3\x03\x00\x00\x00\x00\x00\x1cTXXX\x00\x00\x00\x12\x00\x00\x00Information: Xing"


@pytest.mark.parametrize("tag", [b"", ID3], ids=["bare", "behind a tag that speaks of one"])
def test_an_mp3_that_does_not_tell_its_length_is_taken_as_it_is(tag):
    """Its guessed length, four times too long here, is neither an alarm nor a cut."""
    wave = np.concatenate([np.zeros(32000), 0.3 * np.random.default_rng(0).normal(size=96000).clip(-1, 1)])
    file = io.BytesIO()
    with soundfile.SoundFile(
        file, "w", RATE, 1, format="MP3", bitrate_mode="VARIABLE", compression_level=0.2
    ) as writer:
        writer.write(wave)
    content = file.getvalue()
    second_frame = content.index(content[:2], 64)
    samples, seconds = open_audio(tag + content[second_frame:], RATE, 30.0)
    assert seconds == pytest.approx(8.0, abs=0.3) and len(samples) == pytest.approx(8 * RATE, abs=0.3 * RATE)
