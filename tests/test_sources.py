"""Rows from files, read when asked for, with their place named."""

import json

import pytest

from gemma_trainer import sources
from gemma_trainer.errors import CannotLoad, DataError, RowError
from gemma_trainer.rows import SOURCE


def write(path, text, **options):
    path.write_text(text, **({"encoding": "utf-8"} | options))
    return str(path)


def bare(row):
    return {key: value for key, value in row.items() if key != SOURCE}


def test_json_lines_keep_line_numbers_over_blank_lines_and_a_byte_order_mark(tmp_path):
    file = write(tmp_path / "rows.jsonl", '\ufeff{"a": 1}\n\n  \n{"a": "é"}\r\n{"a": 3}')
    rows = sources.open_rows([file])
    assert [bare(row) for row in rows] == [{"a": 1}, {"a": "é"}, {"a": 3}]
    assert [row[SOURCE] for row in rows] == [(f"rows.jsonl:{line}", str(tmp_path)) for line in (1, 4, 5)]


def test_schema_may_drift_from_row_to_row(tmp_path):
    file = write(tmp_path / "rows.jsonl", '{"image": "a.png"}\n{"image": ["a.png", "b.png"], "x": {"y": [1, "2"]}}\n')
    assert [row["image"] for row in sources.open_rows([file])] == ["a.png", ["a.png", "b.png"]]


def test_csv_with_quoted_line_breaks(tmp_path):
    file = write(tmp_path / "rows.csv", 'prompt,completion,extra\n"a\nb","say ""hi""",\nc,d,1\n')
    rows = list(sources.open_rows([file]))
    assert [bare(row) for row in rows] == [
        {"prompt": "a\nb", "completion": 'say "hi"'},
        {"prompt": "c", "completion": "d", "extra": "1"},
    ]
    assert [row[SOURCE][0] for row in rows] == ["rows.csv:2", "rows.csv:4"]


def test_csv_with_quotes_inside_unquoted_fields_and_long_fields(tmp_path):
    file = write(tmp_path / "rows.csv", f'prompt,completion\na 5" pipe,one\nb 6" pipe,two\n"{"c" * 200_000}",three\n')
    assert [row["completion"] for row in sources.open_rows([file])] == ["one", "two", "three"]


def test_a_file_that_goes_away(tmp_path):
    file = write(tmp_path / "rows.jsonl", '{"a": 1}\n')
    rows = sources.open_rows([file])
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(RowError, match="rows.jsonl:1: the data file cannot be read any more"):
        rows[0]


@pytest.mark.parametrize("content", ['[{"a": 1}, {"a": 2}]', '{"data": [{"a": 1}, {"a": 2}]}', '{"a": 1}\n{"a": 2}\n'])
def test_json_as_a_list_in_an_object_or_as_lines(tmp_path, content):
    assert [bare(row) for row in sources.open_rows([write(tmp_path / "rows.json", content)])] == [{"a": 1}, {"a": 2}]


def test_parquet_keeps_media_undecoded(tmp_path):
    import datasets

    table = datasets.Dataset.from_dict({"prompt": ["x"], "images": [[{"bytes": b"not decoded", "path": None}]]})
    table = table.cast_column("images", datasets.List(datasets.Image(decode=False)))
    table.to_parquet(tmp_path / "b[1] x.parquet")
    row = sources.open_rows([str(tmp_path / "b[1] x.parquet")])[0]
    assert row["images"][0]["bytes"] == b"not decoded"


def test_folders_globs_and_several_at_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name, json.dumps({"name": name}) + "\n")
    write(tmp_path / "notes.txt", "not data")
    assert [row["name"] for row in sources.open_rows([str(tmp_path)])] == ["a.jsonl", "b.jsonl"]
    assert len(sources.open_rows([str(tmp_path / "*.jsonl"), str(tmp_path / "a.jsonl")])) == 3


@pytest.mark.parametrize(("name", "content", "error", "told"), [
    ("rows.jsonl", '{"a": 1}\n{"a": \n', RowError, "rows.jsonl:2: not valid JSON"),
    ("rows.jsonl", "9" * 5000 + "\n", RowError, "rows.jsonl:1: JSON with a number"),
    ("rows.jsonl", "[1, 2]\n", RowError, "rows.jsonl:1: a row must be an object, found list"),
    ("rows.jsonl", "", DataError, "the file has no rows"), ("rows.jsonl", "\n \n", DataError, "the file has no rows"),
    ("rows.json", "[]", DataError, "the file has no rows"), ("rows.json", '[{"a": 1},\n {]', RowError, "rows.json:2"),
    ("rows.csv", "prompt,completion\n", DataError, "the file has no rows"),
    ("rows.csv", "prompt,completion\na,b,c\n", RowError, "rows.csv:2: 3 values under 2 column names"),
    ("rows.csv", "prompt,completion,prompt\na,b,c\n", RowError, "rows.csv:1: a column name that stands twice: prompt"),
    ("rows.csv", 'prompt\n"open\n', RowError, "a quote that is never closed"),
    ("rows.txt", "hello", DataError, "unknown kind of file"),
    ("rows.parquet", "no parquet", DataError, "cannot be read"),
])  # fmt: skip
def test_broken_files(tmp_path, name, content, error, told):
    with pytest.raises(error) as caught:
        list(sources.open_rows([write(tmp_path / name, content)]))
    assert told in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n\xff\xfe\n')
    with pytest.raises(RowError, match="rows.jsonl:2: not UTF-8"):
        list(sources.open_rows([str(tmp_path / "rows.jsonl")]))


@pytest.mark.parametrize(
    "source", ["absent.jsonl", "./absent", "/nowhere/rows.csv", "absent", "~x.jsonl", "x" * 300 + ".jsonl"]
)
def test_no_such_file(source):
    with pytest.raises(DataError, match="no such file"):
        sources.open_rows([source])


def test_a_hub_data_set_that_cannot_be_reached():
    with pytest.raises(CannotLoad, match="nobody/nothing.*Offline"):
        sources.open_rows(["nobody/nothing"])


def test_only_the_asked_row_is_parsed(tmp_path):
    file = write(tmp_path / "rows.jsonl", "not json\n" * 1000 + '{"a": 1}\n')
    rows = sources.open_rows([file])
    assert len(rows) == 1001 and bare(rows[1000]) == {"a": 1}
    with pytest.raises(IndexError):
        rows[1001]


def test_the_fingerprint_follows_the_content(tmp_path):
    file = write(tmp_path / "rows.jsonl", '{"a": 1}\n')
    before = sources.fingerprint([file], 1)
    assert before == sources.fingerprint([file], 1)
    write(tmp_path / "rows.jsonl", '{"a": 2}\n')
    assert before != sources.fingerprint([file], 1)
