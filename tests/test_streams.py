"""Streams: every row once an epoch, whoever reads; resumed where they were; memory that stays flat; the scripts."""

import itertools
import json
import os
import signal
import types
from collections import Counter

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import sft_train
from shard_files import FORMATS, archive, delivered, length, numbered, told, write

from conftest import SAMPLES, ask, talk
from gemma_trainer import cli, data, preparation, runs, shards, streams, trainers
from gemma_trainer.errors import CannotLoad, UsageError

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


def test_a_run_out_of_memory_goes_on_with_smaller_batches_and_the_rows_that_are_left(tmp_path, run_here, monkeypatch):
    file, trained = write(tmp_path / "rows.parquet", numbered(0, 24)), []
    own = trainers.RowsTrainer.training_step

    def step(self, model, inputs, *more):
        if self.args.train_batch_size == 4 and self.state.global_step == 3:
            raise RuntimeError("CUDA out of memory.")
        trained.append(inputs.rows)
        return own(self, model, inputs, *more)

    monkeypatch.setattr(trainers.RowsTrainer, "training_step", step)
    flags = ["--dataset", file, "--batch-size", 4, "--grad-accum", 1, "--auto-batch", "--output", tmp_path / "run"]
    code, result, _ = run_here("sft_train", *flags)
    assert code == 0 and result["steps"] == 6 and [len(rows) for rows in trained] == [4] * 3 + [2] * 6
    assert Counter(itertools.chain(*trained)) == Counter(f"rows.parquet[{number}]" for number in range(24))


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


def test_a_stream_whose_files_have_lost_their_rows_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 5)
    stream = iter(streams.RowStream(shards.open_shards([str(path)]), 1, buffer=1))
    next(stream)
    path.write_text("")
    with pytest.raises(CannotLoad, match="no rows any more"):
        for _ in range(20):
            next(stream)


def test_prompts_that_are_messages_stream(tmp_path):
    row = {"prompt": talk("a")["messages"], "chosen": "b", "rejected": "c"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    config = types.SimpleNamespace(dataset=["pairs"], shuffle_buffer=10)
    assert len(data._first_rows(config, shards.open_shards([str(tmp_path)]))) == 1
