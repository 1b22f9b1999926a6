"""A split without a leak: what belongs together is on one side, all rows are there, and the share is near."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from test_duplicates import changed, texts

from conftest import ask, talk
from gemma_trainer import splits
from gemma_trainer.errors import DataError, UsageError
from gemma_trainer.splits import draw
from gemma_trainer.survey import take_survey


def config(data, **flags):
    from dataset_prep import SplitFlags

    return replace(SplitFlags(), data=(str(data),), **flags)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in open(path)]


def overlap(result):
    from dataset_prep import CheckFlags

    flags = replace(CheckFlags(), data=(result["train"],), eval_dataset=(result["test"],))
    return take_survey(flags).findings.count("eval_overlap")


def test_copies_near_copies_prompts_and_media_stay_together(tmp_path, media):
    rng, originals = random.Random(0), texts(120, words=40)
    rows = [talk(text, f"answer {number}") for number, text in enumerate(originals)]
    rows += [talk(originals[number], f"another answer {number}") for number in range(20)]  # the same prompt
    rows += [talk(changed(originals[number], 0.03, rng), f"answer {number}") for number in range(20, 60)]
    rows += [rows[number] for number in range(60, 80)]
    rows += [ask(media, "red.png", answer=f"Red {number}") for number in range(5)]
    rows += [ask(media, "red.png", "one.wav", answer="Both"), ask(media, "one.wav", answer="A tone")]
    rng.shuffle(rows)
    data = write(tmp_path / "rows.jsonl", rows)
    result = splits.split(config(data, test_size=0.25))
    train, test = read(result["train"]), read(result["test"])
    assert sorted(map(json.dumps, train + test)) == sorted(map(json.dumps, rows))
    assert overlap(result) == 0
    assert 0.2 <= len(test) / len(rows) <= 0.255
    assert result["rows"] == {"train": len(train), "test": len(test)} and result["largest_group"] == 7
    assert result["rows_in_groups"] >= 2 * (20 + 40 + 20) + 7 - 2  # a near copy in a hundred may be missed
    plain = draw(np.arange(len(rows)), 0.25, 7)  # by rows alone, it would leak
    write(tmp_path / "a.jsonl", [row for row, held in zip(rows, plain, strict=True) if not held])
    write(tmp_path / "b.jsonl", [row for row, held in zip(rows, plain, strict=True) if held])
    assert overlap({"train": str(tmp_path / "a.jsonl"), "test": str(tmp_path / "b.jsonl")}) > 20


def test_the_same_seed_gives_the_same_split_and_another_one_another(tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk(text, "ok") for text in texts(200)])
    parts = [read(splits.split(config(data, seed=seed, overwrite=True))["test"]) for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2] and len(parts[2]) == 20


def test_rows_of_one_group_stay_together(tmp_path):
    rows = [talk(text, "ok") | {"patient": number % 30} for number, text in enumerate(texts(300))]
    result = splits.split(config(write(tmp_path / "rows.jsonl", rows), group_by="patient", test_size=0.2))
    train, test = ({row["patient"] for row in read(result[side])} for side in ("train", "test"))
    assert not train & test and len(test) == 6
    with pytest.raises(UsageError, match="--group-by doctor: no row"):
        splits.split(config(tmp_path / "rows.jsonl", group_by="doctor", overwrite=True))


def test_what_cannot_be_split_is_told_and_nothing_is_written(tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk("the same question", "the same answer")] * 9)
    with pytest.raises(DataError, match="all 9 rows belong together"):
        splits.split(config(data))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    (tmp_path / "rows.test.jsonl").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        splits.split(config(data))


def test_media_paths_lead_to_the_same_files_from_another_folder(tmp_path, media):
    rows = [{"prompt": f"What is {name}?", "completion": "x", "image": name} for name in ("red.png", "blue.jpg")]
    data = media / "split.jsonl"
    write(data, rows)
    result = splits.split(config(data, output=str(tmp_path / "elsewhere"), test_size=0.5))
    for side in ("train", "test"):
        (row,) = read(result[side])
        assert (tmp_path / "elsewhere" / row["image"]).resolve() in ((media / "red.png"), (media / "blue.jpg"))
    data.unlink()


def test_rows_that_no_one_can_read_are_not_what_is_held_back(tmp_path):
    rows = [talk(text, "ok") for text in texts(10)] + [{"foo": number} for number in range(8)]
    data = write(tmp_path / "rows.jsonl", rows)
    for seed in range(5):
        result = splits.split(config(data, seed=seed, test_size=0.2, overwrite=True))
        assert result["rows"] == {"train": 16, "test": 2} and all("messages" in row for row in read(result["test"]))
    assert "8 rows are in no known form" in result["notes"][0]
    with pytest.raises(DataError, match="none of 3 rows can be read"):
        splits.split(config(write(tmp_path / "bad.jsonl", [{"foo": 1}] * 3)))


def test_a_share_that_groups_make_impossible_is_told(tmp_path):
    rows = [talk(text, "ok") | {"agent": number % 2} for number, text in enumerate(texts(20))]
    result = splits.split(config(write(tmp_path / "rows.jsonl", rows), group_by="agent"))
    assert result["notes"] == ["50.0% instead of 10.0%: rows that belong together are too many to part"]


def test_lines_that_cannot_be_read_are_put_aside(tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk(text, "ok") for text in texts(20)])
    with data.open("a") as file:
        file.write("{broken\n")
    result = splits.split(config(data))
    assert result["rejected"] == 1 and read(result["rejected_file"])[0]["row"] == "rows.jsonl:21"


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_a_draw_takes_whole_groups_and_never_more_than_its_share(share):
    groups = np.repeat(np.arange(300), np.random.default_rng(0).integers(1, 6, 300))
    held = draw(groups, share, 3)
    assert share - 0.01 <= held.mean() <= share + 1 / len(groups)
    assert not set(groups[held]) & set(groups[~held])


def test_a_draw_of_few_large_groups_takes_the_smallest():
    assert draw(np.array([0] * 10 + [1] * 7), 0.1, 0).tolist() == [False] * 10 + [True] * 7
