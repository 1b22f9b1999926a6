"""Rows written to a file: whole or not at all, with media that can be opened from where the file is."""

import json
import os
import stat

import pytest

from conftest import talk
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import DataError, Interrupted, MediaError, UsageError
from gemma_trainer.files import usual_mode
from gemma_trainer.media import MediaAccess, open_audio, open_image
from gemma_trainer.media_files import MediaStore, embedded, localised, suffix_of
from gemma_trainer.preferences import read_preference
from gemma_trainer.rows import SOURCE, read_row
from gemma_trainer.sources import open_rows
from gemma_trainer.targets import messages_row, preference_row, prompt_completion_row
from gemma_trainer.writing import RowsWriter, json_line

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def write(path, rows, **options):
    with RowsWriter(path, **options) as writer:
        for row in rows:
            writer.write(row)
    return open_rows([str(path)])


def image(value):
    return {"type": "image", "image": value}


def audio(value):
    return {"type": "audio", "audio": value}


def text(said):
    return {"type": "text", "text": said}


def mixed(folder):
    """Rows of every sort, as a data set may hold them side by side."""
    rows = [
        talk("Name a fruit", "Pear"),
        talk([image("red.png"), text("Colour?"), audio(str(folder / "one.wav"))], "Red."),
        talk([image({"bytes": (folder / "blue.jpg").read_bytes(), "path": None})], "Blue."),
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Oslo?"},
                      {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "Look it up."},
                      {"role": "tool", "content": '{"c": 3}', "name": "weather", "tool_call_id": "c1"},
                      {"role": "assistant", "content": "3 °C"}], "tools": TOOLS},
        {"messages": [*talk("Hi", "Hello")["messages"][:1], {"role": "assistant", "content": "No", "train": False},
                      *talk("And?", "Yes 🍐")["messages"]]},
        talk("Only", "read", loss_type="context_only"),
    ]  # fmt: skip
    return [row | {SOURCE: (f"rows:{i}", str(folder))} for i, row in enumerate(rows)]


def facts(row):
    """All of a canonical row but for how its media are given."""
    images = [open_image(m.value, row.folder).tobytes() for m in row.media if m.kind == "image"]
    clips = [open_audio(m.value, 16000, None, row.folder)[0].tolist() for m in row.media if m.kind == "audio"]
    return row.messages, row.tools, row.trained, images, clips


@pytest.mark.parametrize("name", ["new/out.jsonl", "new/out.parquet"])
def test_mixed_rows_come_back_as_they_were(media, tmp_path, name):
    rows = [read_row(raw) for raw in mixed(media)]
    back = [read_row(raw) for raw in write(tmp_path / name, map(messages_row, rows))]
    assert [facts(row) for row in back] == [facts(row) for row in rows]


def test_parquet_gives_the_tokens_and_labels_of_the_rows_it_was_made_of(media, tmp_path, processor):
    collate = MultimodalCollator(processor, max_length=512)
    rows = mixed(media)
    back = list(write(tmp_path / "out.parquet", (messages_row(read_row(raw)) for raw in rows)))
    for one, other in zip(rows, back, strict=True):
        one, other = collate([one]), collate([other])
        assert one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_prompt_and_completion_come_back_as_they_were(media, tmp_path, name):
    rows = [read_row(raw) for raw in mixed(media)]
    written = [prompt_completion_row(row) for row in rows]
    assert (written[0]["prompt"], written[0]["completion"]) == ("Name a fruit", "Pear")
    back = [read_row(raw) for raw in write(tmp_path / name, written)]
    for one, other in zip(map(facts, rows), map(facts, back), strict=True):
        context = [m | {"train": False} if m["role"] == "assistant" else m for m in one[0][:-1]]
        assert (context + one[0][-1:], *one[1:]) == other


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_preferences_come_back_as_they_were(media, tmp_path, name):
    raws = [
        {"prompt": "Name a fruit", "chosen": "Pear", "rejected": "Chair", "margin": 0.5},
        {"prompt": [{"role": "user", "content": [image("red.png"), text("?")]}], "chosen": "Red", "rejected": "Blue",
         SOURCE: ("x", str(media))},
        {"prompt": talk("Hi", "Hello", "And?")["messages"], "chosen": "a", "rejected": "b", "tools": TOOLS},
    ]  # fmt: skip
    pairs = [read_preference(raw) for raw in raws]
    back = [read_preference(raw) for raw in write(tmp_path / name, map(preference_row, pairs))]
    for one, other in zip(pairs, back, strict=True):
        assert (one.shared, one.margin) == (other.shared, other.margin)
        assert facts(one.chosen) == facts(other.chosen) and facts(one.rejected) == facts(other.rejected)


def test_parquet_stands_alone_and_has_one_schema_whatever_it_holds(media, tmp_path):
    import pyarrow.parquet as parquet

    (tmp_path / "a.png").write_bytes((media / "red.png").read_bytes())
    rows = [talk([image("a.png")], "Red.") | {SOURCE: ("x", str(tmp_path))}]
    back = write(tmp_path / "media.parquet", rows)
    write(tmp_path / "text.parquet", [talk("Hi", "Hello")])
    (tmp_path / "a.png").unlink()
    row = read_row(back[0])
    assert row.media[0].value["path"] == "a.png" and open_image(row.media[0].value).size == (96, 64)
    assert parquet.read_schema(tmp_path / "media.parquet") == parquet.read_schema(tmp_path / "text.parquet")


def test_parquet_is_written_in_groups(tmp_path):
    import pyarrow.parquet as parquet

    write(tmp_path / "many.parquet", (talk(f"{i}", "x") for i in range(1200)))
    big = ({"messages": [{"role": "user", "content": [image(b"\x89PNG" + bytes(20_000_000))]}]} for _ in range(4))
    write(tmp_path / "big.parquet", big)
    groups = [parquet.ParquetFile(tmp_path / name).metadata for name in ("many.parquet", "big.parquet")]
    assert [[m.row_group(i).num_rows for i in range(m.num_row_groups)] for m in groups] == [[500, 500, 200], [2, 2]]


def test_paths_are_right_from_the_output_folder_also_through_links(media, tmp_path):
    (tmp_path / "deep" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "real")
    row = {**talk("<image>?", "Red."), "images": ["red.png", None], SOURCE: ("x", str(media))}
    for folder in ("link", "deep"):
        back = write(tmp_path / folder / "out.jsonl", [row | {"messages": talk("<image>?", "Red.")["messages"]}])
        value = back[0]["images"][0]
        assert not os.path.isabs(value) and open_image(value, tmp_path / folder).size == (96, 64)
    assert SOURCE in row and row["images"][0] == "red.png"


@pytest.mark.parametrize(
    "place",
    ["/data/a.png", "https://x.org/a.png", "data:image/png;base64,AAAA", "file:///a.png", "~/a.png", "s3://b/a"],
)
def test_what_is_right_from_anywhere_stays(tmp_path, place):
    assert localised(place, "image", "/data", MediaStore(tmp_path / "o.jsonl")) == place
    assert localised({"bytes": None, "path": place}, "image", "/data", MediaStore(tmp_path / "o.jsonl")) == place


def test_bytes_are_written_once_each_under_their_content(media, tmp_path):
    content = (media / "red.png").read_bytes()
    rows = [talk([image(value)], "Red.") for value in (content, {"bytes": content, "path": "x.bin"}, content)]
    back = write(tmp_path / "out.jsonl", rows)
    values = [row["messages"][0]["content"][0]["image"] for row in back]
    assert len(set(values)) == 1 and values[0].startswith("out_media/") and values[0].endswith(".png")
    assert [file.read_bytes() for file in (tmp_path / "out_media").iterdir()] == [content]


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_arrays_and_images_become_files(tmp_path, as_list, suffix):
    import numpy as np
    from PIL import Image

    samples = (0.5 * np.sin(np.arange(8000) / 9)).astype(np.float32)
    clip = {"array": samples.tolist() if as_list else samples, "sampling_rate": 16000}
    picture = Image.new("RGB", (7, 5), "red")
    back = read_row(write(tmp_path / f"out.{suffix}", [talk([audio(clip), image(picture)], "x")])[0])
    assert (open_audio(back.media[0].value, 16000, None, tmp_path)[0] == samples).all()
    assert open_image(back.media[1].value, tmp_path).tobytes() == picture.tobytes()
    again = MediaStore(tmp_path / "out.jsonl")
    assert localised(clip, "audio", None, again) == localised(clip, "audio", None, again)


def test_stereo_keeps_its_channels(tmp_path):
    import numpy as np
    import soundfile

    stereo = np.stack([np.full(900, 0.25), np.full(900, -0.5)], 1)
    store = MediaStore(tmp_path / "out.jsonl")
    name = localised({"array": stereo, "sampling_rate": 8000}, "audio", None, store)
    store.commit()
    samples, rate = soundfile.read(tmp_path / name)
    assert rate == 8000 and (samples == stereo).all()


@pytest.mark.parametrize(("content", "hint", "suffix"), [
    (b"\xff\xd8\xff\xe0", None, ".jpg"), (b"RIFF\0\0\0\0WEBPVP8 ", "a.png", ".webp"),
    (b"RIFF\0\0\0\0WAVE", None, ".wav"), (b"ID3\4", None, ".mp3"),
    (b"what", "clip.AMR", ".amr"), (b"what", "no suffix", ".bin"), (b"what", None, ".bin"),
])  # fmt: skip
def test_a_file_is_named_by_what_it_is(content, hint, suffix):
    assert suffix_of(content, hint) == suffix


@pytest.mark.parametrize("value", ["absent.png", {"bytes": None, "path": None}, b"", {"bytes": b""}, 5, None])
def test_a_bad_medium_is_refused_and_writing_goes_on(tmp_path, value):
    with RowsWriter(tmp_path / "out.parquet") as writer:
        with pytest.raises(MediaError):
            writer.write({"messages": [{"role": "user", "content": "x"}], "images": [value if value else b""]})
        writer.write(talk("Hi", "Hello"))
    assert len(open_rows([str(tmp_path / "out.parquet")])) == 1


def test_a_url_is_embedded_only_where_it_may_be_fetched(tmp_path, media):
    import functools
    import threading
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=media))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/red.png?x=1"
        assert embedded(url, "image", None) == {"bytes": None, "path": url}
        content = (media / "red.png").read_bytes()
        assert embedded(url, "image", None, MediaAccess(remote=True)) == {"bytes": content, "path": "red.png"}
        with pytest.raises(MediaError, match="image cannot be read"):
            embedded(url.replace("red", "absent"), "image", None, MediaAccess(remote=True))
    finally:
        server.shutdown()
        server.server_close()


def test_the_media_root_holds_for_what_is_embedded(media, tmp_path):
    with pytest.raises(MediaError, match="outside the media root"):
        embedded("red.png", "image", media, MediaAccess(root=tmp_path))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), Interrupted("terminated", 143), DataError("x"), OSError(28, "x")]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_interruption_leaves_all_as_it_was(tmp_path, error, suffix, capfd):
    file = tmp_path / f"out.{suffix}"
    file.write_text("older")
    with pytest.raises(type(error)), RowsWriter(file, overwrite=True) as writer:
        for number in range(600):
            writer.write(talk([image(b"\x89PNG%d" % number)], "x"))
        raise error
    assert [path.name for path in tmp_path.iterdir()] == [file.name] and file.read_text() == "older"
    assert capfd.readouterr().err == ""


def test_a_failure_at_the_last_step_takes_the_media_back(tmp_path, monkeypatch):
    content = b"\x89PNG of an earlier run"
    write(tmp_path / "out.jsonl", [talk([image(content)], "x")])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: replace(a, b) if "_media" in str(b) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "out.jsonl", [talk([image(content)], "x"), talk([image(b"\x89PNG2")], "x")], overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_no_row_writes_no_file(tmp_path):
    for name in ("out.jsonl", "out.parquet"):
        with RowsWriter(tmp_path / name):
            pass
    assert not list(tmp_path.iterdir())


def test_an_output_is_refused_before_any_work(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    (tmp_path / "folder.jsonl").mkdir()
    for name, told in (("out.jsonl", "give --overwrite"), ("out.csv", "must end in"), ("folder.jsonl", "a folder has")):
        with pytest.raises(UsageError, match=told):
            RowsWriter(tmp_path / name)
    write(tmp_path / "out.jsonl", [talk("Hi", "Hello")], overwrite=True)
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == usual_mode()


def test_json_lines_keep_every_character():
    line = json_line({"a": "é 🍐 \u2028 half \ud800", "b": 1.5})
    assert line.count(b"\n") == 1 and "é 🍐" in line.decode() and b"\\ud800" in line
    assert json.loads(line) == {"a": "é 🍐 \u2028 half \ud800", "b": 1.5}


def test_what_a_parquet_row_has_no_place_for_is_refused(tmp_path):
    for row, told in (
        (talk("Hi", "Hello", id=7), "no place for the column 'id'"),
        ({"messages": [{"from": "human", "value": "x"}]}, "no place for 'from' in a message"),
        ({"text": "x"}, "takes rows of messages"),
        (talk("half \ud800", "x"), "half a surrogate pair"),
    ):
        with RowsWriter(tmp_path / "out.parquet") as writer, pytest.raises(DataError, match=told):
            writer.write(row)
