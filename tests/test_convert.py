"""Every format that people have becomes one that trainers take, and nothing is lost in silence."""

import csv
import json
import shutil
from types import SimpleNamespace

import pytest

from conftest import SAMPLES, talk
from gemma_trainer import convert as converting
from gemma_trainer.convert import convert
from gemma_trainer.errors import DataError, UsageError
from gemma_trainer.media import open_audio, open_image
from gemma_trainer.preferences import read_preference
from gemma_trainer.rows import SOURCE, read_row
from gemma_trainer.sources import open_rows

PEAR = [{"role": "user", "content": "Name a fruit"}, {"role": "assistant", "content": "Pear"}]
PAIR = {"prompt": "Name a fruit", "chosen": "Pear", "rejected": "Chair"}


def run(data, output, to="messages", **options):
    options = {
        "overwrite": False,
        "map": (),
        "keep": (),
        "prompt": None,
        "allow_remote_media": False,
        "media_root": None,
    } | options
    data = (str(data),) if not isinstance(data, tuple) else data
    return convert(SimpleNamespace(data=data, to=to, output=str(output), **options))


def converted(tmp_path, rows, to="messages", **options):
    """(result, rows as they were written)."""
    file = tmp_path / "in.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    result = run(file, tmp_path / "new" / "out.jsonl", to, **options)
    return result, written(result)


def written(result):
    return [{k: v for k, v in row.items() if k != SOURCE} for row in open_rows([result["output"]])]


def rejected(result_or_path):
    path = result_or_path["rejected_file"] if isinstance(result_or_path, dict) else result_or_path
    return [json.loads(line) for line in open(path, encoding="utf-8")]


FORMATS = {
    "messages": {"messages": PEAR},
    "model role": {"messages": [PEAR[0], PEAR[1] | {"role": "model"}]},
    "prompt-completion": {"prompt": "Name a fruit", "completion": "Pear"},
    "prompt and response": {"prompt": [PEAR[0]], "response": "Pear"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Name a fruit"}, {"from": "gpt", "value": "Pear"}]},
    "sharegpt conversation": {"conversation": [{"from": "human", "value": "Name a fruit"},
                                               {"from": "gpt", "value": "Pear"}]},
    "alpaca": {"instruction": "Name a fruit", "input": "", "output": "Pear"},
    "alpaca response": {"instruction": "Name", "input": "a fruit", "response": "Pear"},
    "text with turns": {"text": "<bos><|turn>user\nName a fruit<turn|>\n<|turn>model\nPear<turn|>\n"},
    "question answer": {"question": "Name a fruit", "answer": "Pear"},
    "query response": {"Query": "Name a fruit", "RESPONSE": "Pear"},
    "problem solution": {"problem": "Name a fruit", "solution": "Pear"},
    "input output": {"input": "Name a fruit", "output": "Pear"},
    "text label": {"text": "Name a fruit", "label": "Pear"},
    "document summary": {"document": "Name a fruit", "summary": "Pear"},
    "dialogue summary": {"dialogue": "Name a fruit", "summary": "Pear"},
    "title text": {"title": "Name a fruit", "text": "Pear"},
    "source target": {"source": "Name a fruit", "target": "Pear"},
    "user assistant": {"user": "Name a fruit", "assistant": "Pear"},
    "preference": PAIR,
    "chosen response": {"question": "Name a fruit", "chosen_response": "Pear", "rejected_response": "Chair"},
    "hh-rlhf": {"chosen": "\n\nHuman: Name a fruit\n\nAssistant: Pear",
                "rejected": "\n\nHuman: Name a fruit\n\nAssistant: Chair"},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_messages(tmp_path, name):
    row = FORMATS[name]
    result, rows = converted(tmp_path, [row | {"id": 7}])
    said = " ".join(rows[0]["messages"][0]["content"].split())
    assert (said, [m["role"] for m in rows[0]["messages"]], len(rows[0]["messages"])) == (
        "Name a fruit", ["user", "assistant"], 2
    )  # fmt: skip
    assert rows[0]["messages"][1]["content"] == "Pear"
    assert result["not_carried_over"] == ["id"] and "columns not carried over: id" in result["summary"]
    assert (result["rows_in"], result["rows_out"], result["rejected"]) == (1, 1, 0)


def test_the_mapping_that_was_inferred_is_told(tmp_path):
    rows = [{"question": "a", "answer": "b"}, {"question": "c", "answer": "d"}, {"messages": PEAR}]
    result, _ = converted(tmp_path, rows)
    assert result["mapping"] == [
        {"format": "columns", "fields": {"user": "question", "assistant": "answer"}, "rows": 2},
        {"format": "messages", "fields": {"messages": "messages"}, "rows": 1},
    ]
    assert "2 rows as columns: user=question, assistant=answer" in result["summary"]


@pytest.mark.parametrize("row", [
    PAIR, FORMATS["hh-rlhf"], FORMATS["chosen response"],
    {"prompt": "\n\nHuman: Name a fruit\n\nAssistant:", "chosen": " Pear", "rejected": " Chair"},
    {"conversations": [{"from": "human", "value": "Name a fruit"}], "chosen": {"from": "gpt", "value": "Pear"},
     "rejected": {"from": "gpt", "value": "Chair"}},
    {"prompt": "Name a fruit", "messages": PEAR, "chosen": PEAR, "rejected": [PEAR[0], PEAR[1] | {"content": "Chair"}]},
    {"instruction": "Name a fruit", "input": "", "preferred": "Pear", "dispreferred": "Chair"},
    {"input": {"messages": [PEAR[0]], "tools": [], "parallel_tool_calls": True}, "preferred_output": [PEAR[1]],
     "non_preferred_output": [PEAR[1] | {"content": "Chair"}]},
])  # fmt: skip
def test_every_preference_format_becomes_a_preference(tmp_path, row):
    _, rows = converted(tmp_path, [row], "preference")
    pair = read_preference(rows[0])
    answers = [side.messages[-1]["content"].strip() for side in (pair.chosen, pair.rejected)]
    assert pair.chosen.messages[0] == PEAR[0] and answers == ["Pear", "Chair"] and pair.shared == 1


def test_a_preference_keeps_its_margin_system_and_tools(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"system": "Be brief.", **PAIR, "margin": 2, "tools": tools}
    _, rows = converted(tmp_path, [row], "preference")
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert (rows[0]["margin"], rows[0]["tools"]) == (2, tools)
    _, rows = converted(tmp_path, [PAIR], "preference", overwrite=True)
    assert rows == [PAIR]


def test_of_a_preference_the_chosen_answer_becomes_the_conversation(tmp_path):
    result, rows = converted(tmp_path, [PAIR | {"margin": 1}])
    assert rows == [{"messages": PEAR}]
    assert result["notes"] == ["1 rows: the chosen answer was taken, the rejected one left out"]


def test_openai_fine_tuning_files(tmp_path):
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    row = {
        "messages": [
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 0},
            {"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "weather", "content": "3"},
            {"role": "assistant", "content": "3 °C", "weight": 1},
        ],
        "functions": [{"name": "weather", "parameters": {}}],
    }  # fmt: skip
    _, rows = converted(tmp_path, [row])
    back = read_row(rows[0])
    assert back.messages == read_row(row).messages and back.messages[1]["train"] is False
    assert back.messages[3]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert back.tools == [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_alpaca_history_and_system_come_before(tmp_path):
    row = {"system": "Be brief.", "instruction": "And?", "output": "Yes", "history": [["Hi", "Hello"], ["Ok", "Fine"]]}
    _, rows = converted(tmp_path, [row])
    assert [m["content"] for m in rows[0]["messages"]] == ["Be brief.", "Hi", "Hello", "Ok", "Fine", "And?", "Yes"]
    assert not any("train" in message for message in rows[0]["messages"])


def test_the_last_answer_becomes_the_completion(tmp_path):
    rows = [
        {"messages": PEAR}, talk("a", "b", "c", "d"), talk("a", "b", "c"), {"messages": PEAR[1:]},
        {"messages": PEAR, "loss_type": "context_only"},
    ]  # fmt: skip
    result, out = converted(tmp_path, rows, "prompt-completion")
    assert out[0] == {"prompt": "Name a fruit", "completion": "Pear"}
    assert [m["content"] for m in out[1]["prompt"]] == ["a", "b", "c"] and out[1]["completion"][0]["content"] == "d"
    assert out[2]["loss_type"] == "context_only"
    assert result["notes"] == ["1 rows: earlier answers became context"]
    assert [(row["row"], row["code"]) for row in rejected(result)] == [
        ("in.jsonl:3", "missing_field"), ("in.jsonl:4", "missing_field"),
    ]  # fmt: skip


def test_csv_with_numbers_context_and_other_columns(tmp_path):
    with (tmp_path / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("id", "Context", "Question", "Answer"), (1, "2 apples", "How many?", 2), (2, "", "Why?", "So")]
        )
    result = run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert [[m["content"] for m in row["messages"]] for row in written(result)] == [
        ["2 apples\n\nHow many?", "2"], ["Why?", "So"],
    ]  # fmt: skip
    result, rows = converted(tmp_path, [{"text": "x", "label": 3}, {"question": "True?", "answer": True}])
    assert [row["messages"][1]["content"] for row in rows] == ["3", "true"]
    assert result["notes"] == ["2 rows: numbers were written as text"]


# ---- what cannot be converted


def test_rows_that_cannot_be_converted_are_kept_with_the_reason(tmp_path):
    rows = [
        {"messages": PEAR},
        '{"broken": \n',
        {"messages": [{"role": "narrator", "content": "x"}], "id": 5},
        {"a": "some words", "b": "others"},
        "[1]\n",
        {"question": "q", "answer": "a", "solution": "s"},
        {"text": "a story"},
        {"image": "absent.png", "caption": "x"},
        {"question": "q", "answer": ["a", "b"]},
        {"question": "half \ud800", "answer": "a"},
    ]
    result, out = converted(tmp_path, rows)
    assert (result["rows_in"], result["rows_out"], result["rejected"], len(out)) == (10, 1, 9, 1)
    lines = rejected(result)
    assert [line["row"] for line in lines] == [f"in.jsonl:{number}" for number in range(2, 11)]
    assert [line["code"] for line in lines] == [
        "bad_json", "unknown_role", "unknown_format", "wrong_type", "unknown_format", "bad_text_row", "media_missing",
        "wrong_type", "bad_encoding",
    ]  # fmt: skip
    assert lines[1]["data"] == rows[2] and "data" not in lines[0]
    assert "columns: a, b; say it with --map user=COLUMN assistant=COLUMN" in lines[2]["reason"]
    assert "more than one column may be the answer (answer, solution)" in lines[4]["reason"]
    assert "9 rows, see" in result["summary"] and "in.jsonl:2: not valid JSON" in result["summary"]
    assert result["rejected_file"].endswith("new/out.rejected.jsonl")


def test_nothing_to_convert_is_bad_data(tmp_path):
    with pytest.raises(DataError, match=r"no row could be converted.*in.jsonl:1: a preference row needs two answers"):
        converted(tmp_path, [{"messages": PEAR}], "preference")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.rejected.jsonl"]
    converted(tmp_path, [{"messages": PEAR}])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.jsonl"]


def test_messages_quote_no_data_of_a_table_without_a_header(tmp_path):
    (tmp_path / "in.csv").write_text("my secret diary of last year,yes it was nice\nx,y\n")
    with pytest.raises(DataError) as caught:
        run(tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert "secret" not in str(caught.value) and "user=COLUMN assistant=COLUMN" in str(caught.value)


def test_bytes_of_a_rejected_row_are_only_named(tmp_path):
    import pyarrow
    import pyarrow.parquet as parquet

    rows = [{"image": {"bytes": b"\x89PNG" * 10, "path": "a.png"}, "a": "x"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    with pytest.raises(DataError):
        run(tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert rejected(tmp_path / "out.rejected.jsonl")[0]["data"] == {
        "image": {"bytes": "<40 bytes>", "path": "a.png"}, "a": "x",
    }  # fmt: skip


# ---- --map


@pytest.mark.parametrize(("words", "row"), [
    (("user=frage", "assistant=antwort"), {"frage": "Name a fruit", "antwort": "Pear", "messages": 3}),
    (("prompt=frage",), {"frage": "Name a fruit", "answer": "Pear"}),
    (("assistant=antwort",), {"question": "Name a fruit", "antwort": "Pear"}),
    (("messages=log",), {"log": [{"from": "human", "value": "Name a fruit"}, {"from": "gpt", "value": "Pear"}]}),
    (("chosen=good", "rejected=bad"), {"prompt": "Name a fruit", "good": "Pear", "bad": "Chair"}),
    (("assistant=answer",), {"question": "Name a fruit", "answer": "Pear", "solution": "long"}),
])  # fmt: skip
def test_map_says_which_column_is_what(tmp_path, words, row):
    result, rows = converted(tmp_path, [row], map=words)
    assert rows == [{"messages": PEAR}] and result["mapping"][0]["format"] == "map"


def test_map_names_media_and_system(tmp_path, media):
    row = {"pic": str(media / "red.png"), "caption": "Red.", "rule": "Be brief."}
    _, rows = converted(tmp_path, [row], map=("image=pic", "system=rule"), prompt="What is it?")
    system, user, assistant = rows[0]["messages"]
    assert (system["content"], assistant["content"]) == ("Be brief.", "Red.")
    assert [block["type"] for block in user["content"]] == ["image", "text"]
    assert user["content"][1]["text"] == "What is it?"


@pytest.mark.parametrize(("words", "told"), [
    (("user=absent",), r"user=absent: no row has such a column; columns: question, answer"),
    (("reader=question",), "no target reader; targets: system, user"),
    (("user",), "target=column"), (("user=a", "user=b"), "given twice"),
    (("user=a", "prompt=b"), "user and prompt cannot both be given"),
    (("completion=a", "chosen=b"), "completion and chosen cannot both be given"),
])  # fmt: skip
def test_a_map_that_fits_nothing_is_wrong_usage(tmp_path, words, told):
    with pytest.raises(UsageError, match=told):
        converted(tmp_path, [{"question": "a", "answer": "b"}], map=words)
    assert not list((tmp_path / "new").glob("*"))


def test_a_row_without_a_mapped_column_is_rejected(tmp_path):
    result, _ = converted(tmp_path, [{"q": "a", "answer": "b"}, {"answer": "b"}], map=("user=q",))
    assert rejected(result)[0]["reason"].startswith("no column for user as --map says; columns: answer")


# ---- media


def opened_media(result):
    """The sizes of the media of every row that was written, opened from the folder of the file."""

    def size(medium, folder):
        if medium.kind == "image":
            return open_image(medium.value, folder).size
        return len(open_audio(medium.value, 16000, None, folder)[0])

    rows = [read_row(raw) for raw in open_rows([result["output"]])]
    return [[size(medium, row.folder) for medium in row.media] for row in rows]


def said(result):
    return [[read_row(raw).messages[0]["content"][-1]["text"], read_row(raw).messages[1]["content"]]
            for raw in open_rows([result["output"]])]  # fmt: skip


@pytest.fixture
def folder(media, tmp_path):
    """A folder to lay out media in: `folder("cats/a.png", text)` puts one there, with a caption if given."""
    root = tmp_path / "folder"

    def put(name, text=None):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".png", ".wav")):
            shutil.copy(media / ("red.png" if name.endswith(".png") else "one.wav"), file)
        if text is not None:
            (file.with_suffix(".txt") if name.endswith((".png", ".wav")) else file).write_text(text)
        return root

    put("unseen/.hidden.png")
    (root / "unseen").rename(root / ".unseen")
    return put


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_metadata_files_name_their_media(tmp_path, folder, kind):
    import datasets

    folder("train/sub/a.png")
    root = folder("train/b.png")
    rows = [{"file_name": "sub\\a.png" if kind == "csv" else "sub/a.png", "text": "A red one."},
            {"file_name": "b.png", "text": "Red."}]  # fmt: skip
    table = datasets.Dataset.from_list(rows)
    {"csv": table.to_csv, "jsonl": table.to_json, "parquet": table.to_parquet}[kind](root / f"train/metadata.{kind}")
    folder("train/other.jsonl", '{"messages": []}\n')
    result = run(root, tmp_path / "out.jsonl")
    assert said(result) == [["Describe this image.", "A red one."], ["Describe this image.", "Red."]]
    assert opened_media(result) == [[(96, 64)], [(96, 64)]]
    assert any("1 other data files there were not read" in note for note in result["notes"])
    assert '2 rows: no question in the row, so "Describe this image." was asked' in result["notes"]


def test_a_metadata_file_that_names_no_media_is_data_like_any(tmp_path, folder):
    folder("a.png")
    folder("metadata.csv", "question,answer\nName a fruit,Pear\n")
    result = run(folder("rows.jsonl", json.dumps({"messages": PEAR})), tmp_path / "out.jsonl")
    assert written(result) == [{"messages": PEAR}] * 2


def test_metadata_may_name_several_files_in_a_row(tmp_path, folder):
    folder("a.png")
    folder("b.png")
    rows = [{"left_file_name": "a.png", "right_file_name": "b.png", "question": "Same?", "answer": "Yes."},
            {"file_names": ["a.png", "b.png"], "question": "Same?", "answer": "Yes."}]  # fmt: skip
    root = folder("metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    result = run(root, tmp_path / "out.jsonl")
    assert opened_media(result) == [[(96, 64)] * 2] * 2
    assert result["mapping"][0]["fields"]["image"] == ["left_file_name", "right_file_name"]


def test_texts_beside_the_media(tmp_path, folder):
    folder("a.png", "A red one.\n")
    folder("b.wav", "good morning")
    folder("c.png")
    root = folder("d.png", "  ")
    result = run(root, tmp_path / "out.jsonl")
    assert said(result) == [["Describe this image.", "A red one."], ["Transcribe this recording.", "good morning"]]
    assert opened_media(result) == [[(96, 64)], [16000]]
    assert [(line["row"], line["reason"]) for line in rejected(result)] == [
        ("c.png", "no .txt file beside it"), ("d.png", "an empty .txt file beside it"),
    ]  # fmt: skip


def test_class_folders(tmp_path, folder):
    for name in ("train/cat/1.png", "train/dog/2.png", "test/dog/3.png"):
        root = folder(name)
    result = run(root, tmp_path / "out.jsonl", prompt="Which animal?")
    assert said(result) == [["Which animal?", label] for label in ("dog", "cat", "dog")]


def test_media_without_any_text_are_rejected(tmp_path, folder):
    folder("a.png")
    with pytest.raises(DataError, match="a.png: no metadata file, no .txt of the same name, and no class folders"):
        run(folder("b.png"), tmp_path / "out.jsonl")


def test_a_folder_with_rows_and_media_is_read_by_its_rows(tmp_path):
    result = run(SAMPLES / "heldout.jsonl", tmp_path / "a" / "out.jsonl")
    assert result["rejected"] == 0 and opened_media(result) == opened_media({"output": str(SAMPLES / "heldout.jsonl")})


@pytest.mark.parametrize("row", [
    {"audio": "one.wav", "sentence": "hello", "client_id": "x", "path": "one.wav"},
    {"audio_filepath": "one.wav", "duration": 1.0, "text": "hello"},
    {"path": "one.wav", "sentence": "hello"}, {"file": "one.wav", "transcription": "hello"},
])  # fmt: skip
def test_speech_tables(tmp_path, media, row):
    (tmp_path / "in").mkdir()
    shutil.copy(media / "one.wav", tmp_path / "in")
    (tmp_path / "in" / "rows.jsonl").write_text(json.dumps(row))
    result = run(tmp_path / "in", tmp_path / "out.jsonl")
    assert said(result) == [["Transcribe this recording.", "hello"]] and opened_media(result) == [[16000]]


def test_a_question_about_an_image(tmp_path, media):
    _, rows = converted(tmp_path, [{"image": str(media / "red.png"), "question": "Colour?", "answer": "Red"}])
    assert [block.get("text") for block in rows[0]["messages"][0]["content"]] == [None, "Colour?"]


@pytest.mark.parametrize("to", ["messages", "prompt-completion", "preference"])
def test_parquet_holds_the_media_and_converts_back(tmp_path, folder, to):
    root = folder("a.png")
    rows = [{"image": "a.png", "question": "Colour?", "answer": "Red", "chosen": "Red", "rejected": "Blue"}]
    rows += [{"prompt": "Name a fruit", "chosen": "Pear", "rejected": "Chair"}]
    folder("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    first = run(root, tmp_path / "out.parquet", to)
    shutil.rmtree(root)
    second = run(tmp_path / "out.parquet", tmp_path / "back" / "out.jsonl", to)
    assert (first["rejected"], second["rejected"], second["rows_out"]) == (0, 0, 2)
    read = read_preference if to == "preference" else read_row
    row = read(open_rows([second["output"]])[0])
    row = row.chosen if to == "preference" else row
    assert row.media[0].value.startswith("out_media/") and open_image(row.media[0].value, row.folder).size == (96, 64)


def test_urls_stay_and_are_told_and_the_media_root_holds(tmp_path, media):
    rows = [{"image": "https://x.org/a.png", "caption": "A."}, {"image": str(media / "red.png"), "caption": "B."}]
    result, out = converted(tmp_path, rows, media_root=str(tmp_path))
    assert out[0]["messages"][0]["content"][0]["image"] == "https://x.org/a.png"
    assert "1 rows: media named by a URL" in result["notes"]
    assert [line["code"] for line in rejected(result)] == ["media_outside_root"]


# ---- whole or not at all


def test_an_interruption_leaves_no_output(tmp_path, monkeypatch):
    real, calls = converting.columns.plan, []

    def plan(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(converting.columns, "plan", plan)
    with pytest.raises(KeyboardInterrupt):
        converted(tmp_path, [{"messages": PEAR}, {"odd": 1}, {"messages": PEAR}])
    assert not list((tmp_path / "new").iterdir())


def test_an_output_is_replaced_only_when_asked_and_is_never_its_own_source(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Name a fruit", "answer": "Pear"}) + "\n")
    with pytest.raises(UsageError, match="give --overwrite"):
        run(file, file)
    with pytest.raises(UsageError, match="is one of the data files"):
        run(file, file, overwrite=True)


def test_an_output_among_the_sources_is_refused(tmp_path):
    for name in ("a.jsonl", "all.jsonl"):
        (tmp_path / name).write_text(json.dumps({"messages": PEAR}) + "\n")
    with pytest.raises(UsageError, match="one of the data files"):
        run(tmp_path, tmp_path / "all.jsonl", overwrite=True)


def test_the_same_data_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        run(SAMPLES / "train.jsonl", tmp_path / name / "out.jsonl", "prompt-completion")
    assert (tmp_path / "a/out.jsonl").read_bytes() == (tmp_path / "b/out.jsonl").read_bytes()
