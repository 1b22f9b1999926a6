"""Rows in tar archives: the files of one key are one row."""

import json

import pytest
from shard_files import archive, rows_of

from conftest import SAMPLES, talk
from gemma_trainer.errors import RowError
from gemma_trainer.rows import SOURCE, read_row


@pytest.fixture
def files():
    return {
        "jpg": (SAMPLES / "images" / "train-red-0.png").read_bytes(),
        "wav": next((SAMPLES / "audio").glob("*.wav"), next((SAMPLES / "audio").glob("*.flac"))).read_bytes(),
    }


def sample(tmp_path, **files):
    """The one row of an archive whose key is `a/7`."""
    place = tmp_path / "s.tar"
    archive(place, {f"a/7.{name.replace('_', '.')}": content for name, content in files.items()})
    return rows_of(place)[0]


@pytest.mark.parametrize("spelled", ["7.jpg", "jpg", ".jpg", "a/7.jpg"])
def test_a_sample_names_its_files(tmp_path, files, spelled):
    blocks = [{"type": "image", "image": spelled}, {"type": "text", "text": "7.jpg"}]
    row = sample(tmp_path, json=json.dumps(talk(blocks, "red")).encode(), **files)
    assert row[SOURCE] == ("s.tar:a/7", str(tmp_path))
    blocks = row["messages"][0]["content"]
    assert blocks[0]["image"] == {"bytes": files["jpg"], "path": "7.jpg"} and blocks[1]["text"] == "7.jpg"
    assert row["audios"] == [{"bytes": files["wav"], "path": "7.wav"}]  # which nothing names


def test_files_that_nothing_names_fill_the_row_in_order(tmp_path, files):
    blocks = [{"type": "audio"}, {"type": "text", "text": "Which?"}, {"type": "image"}, {"type": "image"}]
    row = sample(tmp_path, json=json.dumps(talk(blocks, "red")).encode(), **files, **{"2_png": files["jpg"]}, npy=b"0")
    media = read_row(row).media
    assert [medium.kind for medium in media] == ["audio", "image", "image"]
    assert [medium.value["path"] for medium in media] == ["7.wav", "7.jpg", "7.2.png"]
    row = sample(tmp_path, json=json.dumps(talk("What?", "red", image="data/7.jpg")).encode(), jpg=files["jpg"])
    assert read_row(row).media[0].value["bytes"] == files["jpg"]


def test_a_text_is_what_is_said_of_a_picture(tmp_path, files):
    row = read_row(sample(tmp_path, txt=b" red \n", jpg=files["jpg"], json=b'{"width": 3}'))
    assert [m["role"] for m in row.messages] == ["user", "assistant"] and row.messages[1]["content"] == "red"
    assert "Describe this image." in str(row.messages[0]) and row.media[0].value["bytes"] == files["jpg"]
    assert read_row(sample(tmp_path, txt=b"words")).text == "words"
    for bad in ({"jpg": b"x"}, {"txt": b"x", **files}, {"json": b"[1]"}, {"json": b"{"}, {"txt": b"\xff"}):
        assert isinstance(sample(tmp_path, **bad), RowError)


def test_a_sample_beyond_all_bounds_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr("gemma_trainer.archives.MAX_RECORD", 2**20)
    archive(tmp_path / "s.tar", {"a.jpg": bytes(2**20 + 1), "a.json": b"{}", "b.txt": b"hi"})
    rows = rows_of(tmp_path / "s.tar")
    assert rows[0].row == "s.tar:a" and "1 MiB in one row" in str(rows[0]) and rows[1]["text"] == "hi"
