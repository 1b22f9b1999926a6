"""Streams: every row once an epoch, whoever reads; resumed where they were; broken shards are told, and passed by."""

import gzip
import io
import itertools
import json
import os
import signal
import tarfile
import types
from collections import Counter

import fsspec
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import sft_train
from fsspec.registry import known_implementations
from torch.utils.data import DataLoader

from conftest import SAMPLES, ask, talk
from gemma_trainer import cli, data, preparation, runs, shards, stores, streams, trainers
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import CannotLoad, DataError, EnvironmentUnfit, MediaError, RowError, UsageError
from gemma_trainer.media import MediaAccess, open_image
from gemma_trainer.rows import SOURCE, read_row

FORMATS = (".jsonl", ".jsonl.gz", ".parquet", ".tar", ".tar.gz")


def write(path, rows):
    """A shard of rows, in the format that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.name.endswith((".tar", ".tar.gz")):
        files = {f"row-{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)}
        archive(path, files)
    elif path.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(rows, pyarrow.schema([("prompt", "string"), ("completion", "string")]))
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def archive(path, files):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def numbered(first, last):
    """Rows that are told by their prompt, and whose length grows and falls."""
    return [{"prompt": f"{number}", "completion": "x" * (number * 7 % 23)} for number in range(first, last)]


def told(rows):
    return [int(row["prompt"]) for row in rows]


def length(rows):
    return [len(row["completion"]) + 1 for row in rows]


def delivered(stream, batches, workers=0):
    """The next batches of a rank, through a loader."""
    found = []
    for batch in DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=list):
        stream.delivered += 1
        found.append(told(batch))
        if len(found) == batches:
            return found


# ---- every row once


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("suffix", FORMATS)
def test_each_epoch_gives_every_row_to_one_reader(tmp_path, suffix, count):
    ends = [0, 11, 12, 30, 49, 53] if count == 5 else [0, 53]  # of very different sizes
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        write(tmp_path / f"part-{number}{suffix}", numbered(first, last))
    found = shards.open_shards([str(tmp_path)])
    assert found.rows == (53 if suffix == ".parquet" else None) and found.files == count
    for world, workers in itertools.product((1, 2, 3), (1, 2)):
        made = [
            streams.RowStream(found, 2, buffer=8, rank=rank, world=world, workers=workers, lengths=length)
            for rank in range(world)
        ]
        readers = [(stream, stream.rank * workers + worker) for stream in made for worker in range(workers)]
        orders = [stream._rows(reader, 0) for stream, reader in readers]
        for epoch in range(3):
            counts = [sum(1 for _ in stream._shuffled(reader, epoch)) for stream, reader in readers]
            rows = [list(itertools.islice(order, n)) for order, n in zip(orders, counts, strict=True)]
            assert Counter(told(itertools.chain(*rows))) == Counter(range(53)), (world, workers, epoch)
            if found.rows is not None:
                assert counts == [stream._count(reader, epoch) for stream, reader in readers]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [1, 4])
def test_loaders_deliver_every_row_once_an_epoch(tmp_path, workers, count):
    for number in range(count):
        write(tmp_path / f"{number}.jsonl", numbered(number * 24 // count, (number + 1) * 24 // count))
    found = shards.open_shards([str(tmp_path)])
    for world in (1, 2):
        epochs = [[], []]
        for rank in range(world):
            stream = streams.RowStream(found, 3, rank=rank, world=world, workers=workers)
            batches = delivered(stream, 16 // world, workers)
            for epoch, rows in zip(epochs, _halves(batches), strict=True):
                epoch += itertools.chain(*rows)
        assert all(sorted(epoch) == list(range(24)) for epoch in epochs) and epochs[0] != epochs[1]


def _halves(batches):
    return batches[: len(batches) // 2], batches[len(batches) // 2 :]


def test_the_order_follows_from_the_seed_and_the_epoch(tmp_path):
    found = shards.open_shards([write(tmp_path / f"{n}.jsonl", numbered(9 * n, 9 * n + 9)) for n in range(4)])
    first, again, other = (sum(delivered(streams.RowStream(found, 4, seed=s), 18), []) for s in (0, 0, 1))
    assert first == again != other and first[:36] != first[36:]
    assert sorted(first[:36]) == sorted(first[36:]) == list(range(36))
    plain = sum(delivered(streams.RowStream(found, 4, buffer=1), 9), [])
    assert all(plain[at : at + 9] == list(range(plain[at], plain[at] + 9)) for at in range(0, 36, 9))


def test_readers_have_near_equal_shares_of_unequal_shards(tmp_path):
    found = shards.open_shards([write(tmp_path / f"{n}.parquet", numbered(0, 3 + 5 * n)) for n in range(9)])
    stream = streams.RowStream(found, 1, workers=4)
    shares = [stream._count(reader, 0) for reader in range(4)]
    assert sum(shares) == found.rows and max(shares) - min(shares) <= 7  # a row group


def test_rows_of_near_equal_length_come_side_by_side(tmp_path):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 160))])
    stream = streams.RowStream(found, 4, lengths=length)
    spans = [max(row * 7 % 23 for row in b) - min(row * 7 % 23 for row in b) for b in delivered(stream, 40)]
    assert sum(spans) / 40 < 3


def test_fewer_rows_than_readers(tmp_path):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 3))])
    for rank in range(8):
        assert len(delivered(streams.RowStream(found, 2, rank=rank, world=8), 3)) == 3


# ---- going on


@pytest.mark.parametrize(("suffix", "workers"), [(".jsonl", 0), (".parquet", 0), (".tar", 2), (".parquet", 2)])
def test_a_stream_goes_on_where_it_was(tmp_path, suffix, workers):
    found = shards.open_shards([write(tmp_path / f"{n}{suffix}", numbered(13 * n, 13 * n + 13)) for n in range(3)])

    def stream():
        return streams.RowStream(found, 2, rank=1, world=2, workers=workers, buffer=6, lengths=length)

    whole = delivered(stream(), 40, workers)
    for stop in (1, 7, 26):
        before, after = stream(), stream()
        assert delivered(before, stop, workers) == whole[:stop]
        after.take_up(json.loads(json.dumps(before.state())))
        assert delivered(after, 40 - stop, workers) == whole[stop:]


def test_a_smaller_batch_goes_on_with_the_same_rows(tmp_path):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 50))])
    large, small = (streams.RowStream(found, size, lengths=length) for size in (4, 2))
    whole = sum(delivered(streams.RowStream(found, 4, lengths=length), 12), [])
    delivered(large, 5)
    small.take_up(large.state())
    assert sum(delivered(small, 14), []) == whole[20:]


def test_other_numbers_of_ranks_or_workers_are_refused(tmp_path):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 5))])
    state = streams.RowStream(found, 2, workers=2).state()
    with pytest.raises(UsageError, match="split over 2 of --num-workers"):
        streams.RowStream(found, 2).take_up(state)
    with pytest.raises(UsageError, match="split over 1 ranks"):
        streams.RowStream(found, 2, world=2, workers=2).take_up(state)


def test_rows_passed_over_are_not_parsed(tmp_path, monkeypatch):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 90))])
    stream, parsed, own = streams.RowStream(found, 1), [], shards.Record.row
    stream.take_up(stream.state() | {"rows": [80]})
    monkeypatch.setattr(shards.Record, "row", lambda record: (parsed.append(record.at), own(record))[1])
    delivered(stream, 5)
    assert len(parsed) == 5


# ---- what is in shards


def rows_of(*sources):
    return [record.row() for record in shards.open_shards(list(map(str, sources)))]


def problems(rows):
    return [str(row) for row in rows if isinstance(row, RowError)]


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


# ---- archives


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


# ---- where shards are


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


# ---- memory


def test_memory_stays_flat_whatever_the_size(tmp_path):
    line = json.dumps(talk("x" * 1900, "y")).encode() + b"\n"
    with (tmp_path / "a.jsonl").open("wb") as file:
        for _ in range(100):
            file.write(line * 1000)
    assert (tmp_path / "a.jsonl").stat().st_size > 198e6
    stream = streams.RowStream(shards.open_shards([str(tmp_path / "a.jsonl")]), 100, buffer=2000)
    process = psutil.Process()
    before, most = process.memory_info().rss, 0
    for batch in itertools.islice(stream, 1000):
        most = max(most, process.memory_info().rss)
        assert len(batch) == 100
    assert most - before < 40 * 2**20


def test_the_buffer_is_bounded_by_bytes_too(tmp_path, monkeypatch, capsys):
    found = shards.open_shards([write(tmp_path / "a.jsonl", numbered(0, 99))])
    monkeypatch.setattr(streams, "BUFFER_BYTES", 400)
    monkeypatch.setattr(shards, "BUFFER_BYTES", 400)
    order = sum(delivered(streams.RowStream(found, 1), 99), [])
    assert sorted(order) == list(range(99)) and max(at - row for at, row in enumerate(order)) < 99
    assert min(order[:3]) < 15 and max(order[:9]) < 30  # nothing from far behind
    data._first_rows(types.SimpleNamespace(dataset=[], shuffle_buffer=99), found)
    assert "fill the shuffle buffer" in capsys.readouterr().err


# ---- the scripts


@pytest.fixture
def run_here(capfd, monkeypatch):
    """Run a training script in this process: (exit code, its JSON, its stderr)."""
    monkeypatch.setattr(runs, "fcntl", None)  # a run's folder is held until its process ends
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}

    def run(name, *arguments):
        module = __import__(name)
        argv = [*map(str, arguments), "--model", "demo", "--streaming", "--json"]
        capfd.readouterr()
        code = cli.run_script(module.main, module.Config, "", "", argv)
        out, err = capfd.readouterr()
        return code, json.loads(out) if out else {}, err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def logged(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"], line["epoch"]) for line in lines if "loss" in line]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_archives_that_is_terminated_ends_as_the_unbroken_one(tmp_path, run_here, monkeypatch, workers):
    pictures, clips = (sorted((SAMPLES / kind).iterdir()) for kind in ("images", "audio"))
    rows = [ask(SAMPLES, *([], ["p.png"], ["c.flac"], ["p.png", "c.flac"])[n % 4], answer=f"{n}") for n in range(20)]
    for shard in range(2):
        files = {}
        for number, row in enumerate(rows[shard::2]):
            text = json.dumps(row).replace(f"{SAMPLES}/p.png", "png").replace(f"{SAMPLES}/c.flac", "flac")
            files[f"{number}.json"] = text.encode()
            files[f"{number}.png"] = pictures[number].read_bytes()
            files[f"{number}.flac"] = clips[number].read_bytes()
        archive(tmp_path / f"s-{shard}.tar", files)
    flags = ["--dataset", tmp_path / "s-{0..1}.tar", "--max-steps", 4, "--batch-size", 2, "--grad-accum", 2,
             "--seed", 3, "--shuffle-buffer", 6, "--lora-dropout", 0.1, "--num-workers", workers]  # fmt: skip
    code, whole, err = run_here("sft_train", *flags, "--output", tmp_path / "whole")
    assert code == 0 and "rows of unknown number from 2 files" in err
    assert whole["steps"] == 4 and whole["counters"]["rows"] == 16 and whole["counters"]["images"] >= 4
    own = trainers.Watchman.on_step_end

    def end(self, args, state, control, **more):
        own(self, args, state, control, **more)
        if state.global_step == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainers.Watchman, "on_step_end", end)
    code, result, _ = run_here("sft_train", *flags, "--output", tmp_path / "run")
    assert code == 143 and result["status"] == "failed" and len(logged(tmp_path / "run")) == 2
    if not workers:
        code, result, _ = run_here("sft_train", *flags, "--shuffle-buffer", 7, "--output", tmp_path / "run", "--resume")
        assert code == 2 and "--shuffle-buffer 6, not 7" in result["error"]["message"]
    code, result, _ = run_here("sft_train", *flags, "--output", tmp_path / "run", "--resume")
    assert code == 0 and result["counters"] == whole["counters"]
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")


@pytest.mark.parametrize("name", ["dpo_train", "reward_train"])
def test_pairs_are_streamed_and_steps_follow_from_a_known_count(tmp_path, run_here, name):
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no, never"} for n in range(11)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "pairs.parquet", row_group_size=3)
    write(tmp_path / "held.jsonl", pairs[:3])
    flags = ["--dataset", tmp_path / "pairs.parquet", "--eval-dataset", tmp_path / "held.jsonl", "--batch-size", 2]
    code, result, _ = run_here(name, *flags, "--grad-accum", 2, "--output", tmp_path / "run")
    assert code == 0 and result["steps"] == 3  # of 11 / 4
    assert "eval_loss" in result["metrics"] and logged(tmp_path / "run")[-1][-1] == pytest.approx(12 / 11)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["data"]["rows"] == 11
    assert record["data"]["fingerprint"] == shards.open_shards([str(tmp_path / "pairs.parquet")]).fingerprint()


def test_flags_that_a_stream_has_no_use_for_are_refused(tmp_path, run_here):
    file = write(tmp_path / "a.jsonl", numbered(0, 5))
    for flags, words in (
        ([], "--streaming needs --dataset"),
        (["--dataset", file], "give --max-steps"),
        (["--dataset", file, "--test-size", 0.5], "give --eval-dataset"),
        (["--dataset", file, "--save-first-batch"], "--save-first-batch takes rows by number"),
        (["--dataset", file, "--shuffle-buffer", 0], "must be more than 0"),
    ):
        code, result, _ = run_here("sft_train", *flags)
        assert code == 2 and words in result["error"]["message"]
    with pytest.raises(UsageError, match="needs --streaming"):
        preparation._check_stream(sft_train.Config(dataset=("a.jsonl",), shuffle_buffer=7))


def test_a_dry_run_says_what_is_known(tmp_path, run_here):
    (tmp_path / "a.jsonl").write_text("no JSON\n" + "".join(json.dumps(row) + "\n" for row in numbered(0, 40)))
    write(tmp_path / "b.parquet", numbered(0, 30))
    code, result, err = run_here("sft_train", "--dataset", tmp_path / "a.jsonl", "--max-steps", 2, "--dry-run")
    assert code == 0 and result["rows"] is None and result["counters"]["bad_rows"] == 1
    assert "a.jsonl:1: not valid JSON" in err and "left out" in err
    code, result, err = run_here("sft_train", "--dataset", tmp_path / "b.parquet", "--epochs", 2, "--dry-run")
    assert code == 0 and result["rows"] == 30 and result["steps"] == 8  # of 60 / 8
    (tmp_path / "a.jsonl").write_text("no JSON\n" * 2 + json.dumps(numbered(0, 1)[0]))
    code, result, _ = run_here("sft_train", "--dataset", tmp_path / "a.jsonl", "--max-steps", 2, "--dry-run")
    assert code == 3 and "a.jsonl:1" in result["error"]["message"]


def test_a_medium_is_fetched_once_to_be_measured_and_opened(store, media):
    store.put(str(media / "red.png"), "/bucket/red.png")
    assert stores.medium("memory://bucket", "red.png") is stores.medium("memory://bucket", "red.png")
