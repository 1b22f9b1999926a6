"""Mending: what is certainly not meant goes, everything else stays, and a second time there is nothing to do."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from PIL import Image

from conftest import SAMPLES, talk
from gemma_trainer import fixes, sources
from gemma_trainer.errors import DataError, UsageError
from gemma_trainer.fixes import mend_text
from gemma_trainer.media import open_audio, open_image
from gemma_trainer.rows import read_row


def config(data, output, **flags):
    from dataset_prep import FixFlags

    return replace(FixFlags(), data=(str(data),), output=str(output), **flags)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in open(path)]


def said(role, content, **more):
    return {"role": role, "content": content, **more}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MENDED = [
    ({"messages": [said("User ", "Hi"), said("AI", "Hello")]}, {"messages": talk("Hi", "Hello")["messages"]}, "roles"),
    ({"messages": [said("human", "Hi"), said("gpt", "Hello")]}, {"messages": talk("Hi", "Hello")["messages"]}, "roles"),
    (talk("Hi", "Hello<turn|>"), talk("Hi", "Hello"), "control_text"),
    (talk("<bos><start_of_turn>user\nHi<end_of_turn>\n", "Hello"), talk("Hi", "Hello"), "control_text"),
    (talk("Hi", "<think>\nHm.\n</think>\n\nHello"),
     {"messages": [said("user", "Hi"), said("assistant", "Hello", reasoning="Hm.")]}, "thoughts"),
    (talk("Hi", "a <|tu<turn|>rn> b"), talk("Hi", "a  b"), "control_text"),
    (talk("Hi", "  def f():<eos>\n"), talk("Hi", "  def f():"), "control_text"),
    ({"prompt": "<bos><|turn>user\nHi<turn|>\n<|turn>model\n", "completion": "Hello<turn|>"},
     {"prompt": [said("user", "Hi")], "completion": "Hello"}, "control_text"),
    ({"prompt": "Hi", "completion": "Hello<eos>"}, {"prompt": "Hi", "completion": "Hello"}, "control_text"),
    ({"prompt": "Hi", "chosen": "a<turn|>", "rejected": "b"}, {"prompt": "Hi", "chosen": "a", "rejected": "b"},
     "control_text"),
    ({"messages": [said("user", "Hi", name=None), said("assistant", "a")], "tools": None}, talk("Hi", "a"),
     "none_keys"),
    ({"messages": [said("user", "x"), said("assistant", "", tool_calls=[CALL])]},
     {"messages": [said("user", "x"), said("assistant", "", tool_calls=[
         {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}])]}, "arguments"),
]  # fmt: skip
LEFT_ALONE = [
    talk("Hi", "Hello") | {"id": 7, "meta": {"a": [1, 2]}},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    talk("Hi", "<|channel>thought\nHm.<channel|>Hello"),  # a thought, which is read as reasoning
    {"text": "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"},  # whole turns
    talk("What does <eos> mean, and <mask>?", "The <eos> token ends a text."),
    talk("if a < b:\n\t<image>  ", " Hello \n"),
    {"messages": [said("developer", "x"), said("user", "y"), said("assistant", "z", weight=0)]},
]


@pytest.mark.parametrize(("row", "wanted", "change"), MENDED)
def test_what_is_not_meant_is_mended_and_counted(row, wanted, change):
    before, changes = json.dumps(row), Counter()
    assert mend_text(row, changes) == wanted and changes == {change: 1}
    assert json.dumps(row) == before and mend_text(wanted, again := Counter()) == wanted and not again


@pytest.mark.parametrize("row", LEFT_ALONE)
def test_what_is_right_stays_as_it_is(row):
    assert mend_text(row, changes := Counter()) == row and not changes


def test_media_are_turned_and_converted_once(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8))
    picture.save(tmp_path / "a.jpg", exif=exif, quality=95)
    picture.save(tmp_path / "b.png", exif=exif)
    tone = 0.4 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100)
    soundfile.write(tmp_path / "c.wav", np.stack([tone, tone], 1), 44_100)
    soundfile.write(tmp_path / "d.wav", tone[:16_000], 16_000)
    files = ("a.jpg", "b.png", "c.wav", "d.wav")
    rows = [{"prompt": f"What is {f}?", "completion": "x", "audio" if f[-1] == "v" else "image": f} for f in files]
    data = write(tmp_path / "rows.jsonl", rows)
    result = fixes.fix(config(data, tmp_path / "new" / "fixed.jsonl"))
    assert result["changes"] == {"images_upright": 2, "clips_converted": 1}
    mended = [read_row(row) for row in sources.open_rows([result["output"]])]
    values = [(row.media[0].value, row.folder) for row in mended]
    for name, (value, folder) in zip(files[:2], values, strict=False):
        old, new = open_image(name, tmp_path), open_image(value, folder)
        assert new.size == old.size == (40, 60) and Image.open(folder / value).getexif().get(0x0112, 1) == 1
        assert np.abs(np.asarray(new, float) - np.asarray(old, float)).mean() < (6 if name == "a.jpg" else 0.1)
    assert soundfile.info(values[2][1] / values[2][0]).samplerate == 16_000
    one, _ = open_audio("c.wav", 16_000, None, tmp_path)
    other, _ = open_audio(values[2][0], 16_000, None, values[2][1])
    assert np.abs(one - other).max() < 1e-3
    assert (values[3][1] / values[3][0]).resolve() == tmp_path / "d.wav"
    again = fixes.fix(config(result["output"], tmp_path / "new" / "again.jsonl"))
    assert again["changes"] == {} and read(again["output"]) == read(result["output"])


def test_copies_go_and_what_cannot_be_read_is_put_aside(tmp_path):
    rows = [talk("a", "b") | {"id": 1}, "{broken", talk("a", "b") | {"id": 2}, talk("a", "c"), {"foo": 1},
            {"prompt": "x", "completion": "y", "image": "none.png"}, talk("a", "b<turn|>"),
            {"prompt": "p", "chosen": "same", "rejected": "same "},
            {"prompt": "p", "chosen": "one", "rejected": "two"}]  # fmt: skip
    result = fixes.fix(config(write(tmp_path / "rows.jsonl", rows), tmp_path / "fixed.jsonl"))
    assert [row.get("id") for row in read(result["output"])] == [1, None, None]
    assert result["changes"] == {"duplicates": 2, "equal_answers": 1}
    assert [(row["row"], row["code"]) for row in read(result["rejected_file"])] == [
        ("rows.jsonl:2", "bad_json"), ("rows.jsonl:5", "unknown_format"),
        ("rows.jsonl:6", "media_missing")]  # fmt: skip
    assert result["rows_in"] == result["rows_out"] + result["rejected"] + 3


def test_nothing_is_written_where_nothing_can_be_read(tmp_path):
    with pytest.raises(DataError, match="none of 1 rows is left .*rows.jsonl:1"):
        fixes.fix(config(write(tmp_path / "rows.jsonl", [{"foo": 1}]), tmp_path / "fixed.jsonl"))
    assert not (tmp_path / "fixed.jsonl").exists()


def test_the_samples_mean_the_same_after_mending(tmp_path):
    result = fixes.fix(config(SAMPLES / "train.jsonl", tmp_path / "fixed.jsonl"))
    before = [read_row(row) for row in sources.open_rows([str(SAMPLES / "train.jsonl")])]
    after = [read_row(row) for row in sources.open_rows([result["output"]])]
    assert [row.messages for row in after] == [row.messages for row in before]
    assert [row.tools for row in after] == [row.tools for row in before]
    assert result["changes"].keys() == {"clips_converted"} and result["rejected"] == 0


PAIR = {"prompt": "p", "chosen": "x", "rejected": "y"}
DIFFERENT = [
    ({"text": "a b c"}, {"text": "a b c", "loss_type": "context_only"}),
    (talk("a", "b"), talk("a", "b", loss_type="context_only")),
    (PAIR | {"margin": 1}, PAIR | {"margin": 5}),
    tuple(PAIR | {"chosen": [said("assistant", "x", reasoning=why)]} for why in ("one", "two")),
    ({"messages": [said("user", "a"), said("assistant", "b", train=False), said("user", "c"), said("assistant", "d")]},
     talk("a", "b", "c", "d")),
    tuple({"messages": [said("user", "x"), said("assistant", "", tool_calls=[CALL, CALL | {"id": "2"}]),
                        said("tool", "A", tool_call_id=one), said("tool", "B", tool_call_id=two)]}
          for one, two in ("12", "21")),
]  # fmt: skip


@pytest.mark.parametrize("rows", DIFFERENT)
def test_rows_that_train_something_else_are_no_copies(tmp_path, rows):
    result = fixes.fix(config(write(tmp_path / "rows.jsonl", rows), tmp_path / "fixed.jsonl"))
    assert result["rows_out"] == 2 and not result["changes"].get("duplicates")


def test_answers_that_differ_in_their_reasoning_are_not_equal(tmp_path):
    sides = {key: [said("assistant", "x", reasoning=key)] for key in ("chosen", "rejected")}
    result = fixes.fix(config(write(tmp_path / "rows.jsonl", [PAIR | sides]), tmp_path / "fixed.jsonl"))
    assert result["rows_out"] == 1


def test_rows_are_dropped_for_what_is_named(tmp_path):
    rows = [
        talk("a", "b"),
        talk("a", ""),
        talk("c"),
        {"messages": [said("user", "x"), said("user", "y"), said("assistant", "z")]},
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    result = fixes.fix(config(data, tmp_path / "fixed.jsonl", drop=("empty_answer", "no_answer")))
    assert result["dropped"] == {"empty_answer": 1, "no_answer": 1} and result["rows_out"] == 2
    with pytest.raises(UsageError, match="--drop secret: choose from no_answer"):
        fixes.fix(config(data, tmp_path / "again.jsonl", drop=("secret",)))


def test_no_data_file_is_written_over_or_taken_away(tmp_path):
    data = write(tmp_path / "x.rejected.jsonl", [talk("a", "b")])
    with pytest.raises(UsageError, match="exists|is one of the data files"):
        fixes.fix(config(data, tmp_path / "x.jsonl"))
    with pytest.raises(UsageError, match="is one of the data files"):
        fixes.fix(config(data, tmp_path / "x.jsonl", overwrite=True))
    other = write(tmp_path / "y.jsonl", [talk("a", "b")])
    write(tmp_path / "z.rejected.jsonl", [{"mine": 1}])
    with pytest.raises(UsageError, match="exists"):
        fixes.fix(config(other, tmp_path / "z.jsonl"))
    with pytest.raises(UsageError, match="lies in the data folder"):
        fixes.fix(config(tmp_path, tmp_path / "new" / "z.jsonl"))
    with pytest.raises(UsageError, match="is one of the data files"):
        fixes.fix(config(other, other, overwrite=True))
    assert read(data) == read(other) == [talk("a", "b")] and read(tmp_path / "z.rejected.jsonl") == [{"mine": 1}]


def test_put_aside_rows_of_an_earlier_run_are_replaced(tmp_path):
    for rows, left in (([talk("a", "b"), "{broken"], True), ([talk("a", "b")], False)):
        fixes.fix(config(write(tmp_path / "rows.jsonl", rows), tmp_path / "fixed.jsonl", overwrite=True))
        assert (tmp_path / "fixed.rejected.jsonl").exists() == left


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path, monkeypatch):
    data = write(tmp_path / "rows.jsonl", [talk(f"a{n}", "b") for n in range(30)])
    mend = fixes.Mender._mend

    def slow(self, position, raw):
        if position == 3:
            data.write_text("{}\n")
        return mend(self, position, raw)

    monkeypatch.setattr(fixes.Mender, "_mend", slow)
    with pytest.raises(DataError, match="was changed while it was read"):
        fixes.fix(config(data, tmp_path / "fixed.jsonl"))
    assert not (tmp_path / "fixed.jsonl").exists()
