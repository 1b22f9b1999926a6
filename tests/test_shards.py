"""Shards: found by name, glob and URL, read from front to end; what is broken is told, and passed by."""

import itertools
import json
import os
import types

import fsspec
import pytest
from fsspec.registry import known_implementations
from shard_files import FORMATS, archive, delivered, numbered, problems, rows_of, told, write
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from conftest import talk
from gemma_trainer import data, shards, stores, streams
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import CannotLoad, DataError, EnvironmentUnfit, MediaError, UsageError
from gemma_trainer.media import MediaAccess, open_image
from gemma_trainer.rows import SOURCE, read_row

# ---- what is in them


def test_bad_lines_stand_for_themselves(tmp_path):
    lines = (
        '\ufeff{"prompt": "a"}\n\n{"a": \n[1]\n{"prompt": ["b", 1]}\n{"prompt": "é"}'.encode() + b'\n{"a": "\xe9"}\n'
    )
    (tmp_path / "a.jsonl").write_bytes(lines)
    rows = rows_of(tmp_path / "a.jsonl")
    assert [row["prompt"] for row in rows if isinstance(row, dict)] == ["a", ["b", 1], "é"]
    assert [row[SOURCE] for row in rows if isinstance(row, dict)] == [
        (f"a.jsonl:{line}", str(tmp_path)) for line in (1, 5, 6)
    ]
    named = ["a.jsonl:3: not valid JSON", "a.jsonl:4: a row must be an object", "a.jsonl:7: not UTF-8"]
    assert all(found.startswith(name) for found, name in zip(problems(rows), named, strict=True))


def test_a_line_without_end_is_one_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_RECORD", 3 * 2**20)
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n{"n": "' + b"x" * 4 * 2**20 + b'"}\n{"n": 3}')
    rows = rows_of(tmp_path / "a.jsonl")
    assert [row.get("n") if isinstance(row, dict) else row.row for row in rows] == [1, "a.jsonl:2", 3]
    assert "a line of 4 MiB" in problems(rows)[0]


def test_the_collator_counts_and_names_rows_that_cannot_be_read(tmp_path, processor):
    (tmp_path / "a.jsonl").write_text(json.dumps(talk("hi", "you")) + "\nno JSON\n")
    batch = MultimodalCollator(processor)(rows_of(tmp_path / "a.jsonl"))
    assert batch.counts["rows"] == 1 and batch.counts["bad_rows"] == 1
    assert batch.problems[0][0] == "a.jsonl:2" and "not valid JSON" in batch.problems[0][1]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".jsonl.gz"])
def test_a_torn_shard_is_told_and_the_next_one_read(tmp_path, suffix):
    rows = [{"prompt": os.urandom(2000).hex(), "completion": ""} for _ in range(40)]
    torn = tmp_path / f"a{suffix}"
    write(torn, rows)
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    write(tmp_path / f"b{suffix}", numbered(0, 3))
    found = rows_of(tmp_path)
    assert told(found[-3:]) == [0, 1, 2] and 10 < len(found) < 40
    assert len(problems(found)) == 1 and "breaks off" in problems(found)[0] and problems(found)[0].startswith(torn.name)
    stream = streams.RowStream(shards.open_shards([str(tmp_path)]), 1)
    seen = itertools.chain(*itertools.islice(DataLoader(stream, batch_size=None, collate_fn=list), len(found)))
    assert len(problems(seen)) == 1


def test_an_archive_that_is_torn_within_a_header_or_garbled_is_told(tmp_path):
    whole = (tmp_path / "a.tar", archive(tmp_path / "a.tar", {f"{n}.json": b'{"prompt": "0"}' for n in range(4)}))[0]
    content = whole.read_bytes()
    whole.write_bytes(content[: 2 * 1024 + 100])
    rows = rows_of(whole)  # the second may lack files
    assert told(rows[:1]) == [0] and len(rows) == 2 and "a.tar:1: the archive breaks off" in problems(rows)[0]
    whole.write_bytes(content[:2048] + b"\xff" * 512 + content[2560:])
    assert "breaks off" in problems(rows_of(whole))[0]


def test_empty_shards_are_passed_by(tmp_path):
    write(tmp_path / "a.jsonl", [])
    write(tmp_path / "b.jsonl.gz", [])
    write(tmp_path / "c.tar", [])
    write(tmp_path / "d.parquet", [])
    (tmp_path / "e.tar").touch()
    with pytest.raises(DataError, match="have no rows"):
        data._first_rows(types.SimpleNamespace(dataset=["x"], shuffle_buffer=1), shards.open_shards([str(tmp_path)]))
    write(tmp_path / "f.jsonl", numbered(0, 3))
    assert told(rows_of(tmp_path)) == [0, 1, 2]
    stream = streams.RowStream(shards.open_shards([str(tmp_path)]), 1, world=2)
    assert len(delivered(stream, 4)) == 4


def test_files_of_one_name_are_told_by_their_paths(tmp_path):
    names = [write(tmp_path / place / "a.jsonl", numbered(0, 1)) for place in ("one", "two")]
    assert [row[SOURCE][0] for row in rows_of(*names)] == [f"{name}:1" for name in names]


# ---- where they are


@pytest.fixture
def store():
    """A file system in memory, empty."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_a_store_is_read_by_folder_glob_and_name(tmp_path, store):
    for suffix in FORMATS:
        for number in range(2):
            local = write(tmp_path / f"part-{number}{suffix}", numbered(3 * number, 3 * number + 3))
            store.put(local, f"/bucket/{suffix[1:]}/part-{number}{suffix}")
        for name in ("", "/*", f"/part-{{0..1}}{suffix}", f"/part-{{0,1}}{suffix}"):
            source = f"memory://bucket/{suffix[1:]}{name}"
            assert told(rows_of(source)) == list(range(6)), source
    stream = streams.RowStream(shards.open_shards(["memory://bucket/**/*.jsonl"]), 3, workers=2)
    assert sorted(sum(delivered(stream, 2, 2), [])) == list(range(6))
    with pytest.raises(DataError, match="no such file"):
        rows_of("memory://bucket/absent.jsonl")


def test_media_of_a_store_are_those_beside_the_shard(tmp_path, store, media):
    store.put(str(media / "red.png"), "/bucket/data/img/red.png")
    store.put(str(media / "red.png"), "/bucket/secret.png")
    with store.open("/bucket/data/rows.jsonl", "wb") as file:
        file.write((json.dumps(talk("What?", "red", image="img/red.png")) + "\n").encode())
    row = read_row(rows_of("memory://bucket/data/rows.jsonl")[0])
    assert open_image(row.media[0].value, row.folder).size == (96, 64)
    for name in ("../secret.png", "img/../../secret.png", "/etc/hostname", "~/x.png", "file:///etc/hostname", "no.png",
                 "memory://bucket/secret.png"):  # fmt: skip
        with pytest.raises(MediaError):
            open_image(name, row.folder)
    with pytest.raises(MediaError, match="outside the media root"):
        open_image("img/red.png", row.folder, MediaAccess(tmp_path))


def test_what_cannot_be_streamed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "b.json").write_text(' [{"a": 1}]')
    (tmp_path / "c.parquet").write_text("PAR1")
    wrong = {
        "a.csv": "known: .jsonl",
        "b.json": "a JSON list",
        "d.jsonl": "no such file",
        "c.parquet": "cannot be read",
    }
    for name, words in wrong.items():
        with pytest.raises(DataError, match=words):
            shards.open_shards([str(tmp_path / name)])
    with pytest.raises(UsageError, match="hf://datasets/org/name"):
        shards.open_shards(["org/name:train"])
    with pytest.raises(UsageError, match="no URL"):
        shards.open_shards(["nonsense://a/b.jsonl"])
    absent = {"class": "no_such_package.System", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "s3", absent)
    with pytest.raises(EnvironmentUnfit, match="pip install s3fs"):
        shards.open_shards(["s3://bucket/a.jsonl"])
    monkeypatch.setattr(shards, "_zstd", lambda: False)
    (tmp_path / "d.jsonl.zst").write_bytes(b"x")
    with pytest.raises(EnvironmentUnfit, match="pip install zstandard"):
        shards.open_shards([str(tmp_path / "d.jsonl.zst")])


def test_reading_goes_on_after_a_fault_and_gives_up_in_the_end(tmp_path, monkeypatch):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 9))])
    own, faults = shards._lines, [4, 2, 6]  # records that are read before it fails
    monkeypatch.setattr(shards, "PAUSE", 0)

    def failing(unit):
        until = faults.pop(0) if faults else None
        yield from itertools.islice(own(unit), until)
        if until is not None:
            raise ConnectionError("reset")

    monkeypatch.setitem(shards._READ, "lines", failing)
    assert told(record.row() for record in found) == list(range(9))
    faults[:] = [2, 2, 2]
    with pytest.raises(CannotLoad, match="go on with --resume"):
        list(found)


def test_a_shard_that_is_gone_is_told_by_name_from_a_worker_too(tmp_path):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 9))])
    (tmp_path / "a.jsonl").unlink()
    try:
        list(found)
    except CannotLoad:
        handed_on = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(CannotLoad, match=r"^\S+/a.jsonl: cannot be read \(FileNotFoundError"):
        handed_on.reraise()


def test_a_medium_is_fetched_once_to_be_measured_and_opened(store, media):
    store.put(str(media / "red.png"), "/bucket/red.png")
    assert stores.medium("memory://bucket", "red.png") is stores.medium("memory://bucket", "red.png")


def test_braces_stand_for_each_name_once_and_only_for_some():
    assert shards.spelled_out("a-{x,y{0..1}}.tar") == ["a-x.tar", "a-y0.tar", "a-y1.tar"]
    assert shards.spelled_out("a-{1..03}.tar") == ["a-01.tar", "a-02.tar", "a-03.tar"]
    for name in ("a-{5..3}.tar", "a-{0..3000000}.tar"):
        with pytest.raises(UsageError, match="stands for"):
            shards.spelled_out(name)


def test_a_file_that_is_named_twice_is_read_once(tmp_path, capsys):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    found = shards.open_shards([str(tmp_path), str(tmp_path / "0.jsonl")])
    assert len(found.units) == 2 and "1 files are named twice" in capsys.readouterr().err
