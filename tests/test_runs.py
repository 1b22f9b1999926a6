"""A run's folder: claimed by one run, cleared of a run's own files only, readable after a crash."""

import json
import subprocess
import sys

import pytest

from conftest import ASSETS
from gemma_trainer import ranks, runs
from gemma_trainer.errors import EnvironmentUnfit, UsageError
from gemma_trainer.runs import Run


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(tmp_path):
    mine = ["rows.jsonl", "mine.json", "weights.safetensors", "README.md", "letter.txt"]
    for name in [*mine, "run.json", "metrics.jsonl", "adapter_model.safetensors", "model-00001-of-00002.safetensors"]:
        (tmp_path / name).write_text("{}")
    for name in ("checkpoint-5", ".saving-x", ".unfinished", "photos"):
        (tmp_path / name).mkdir()
    Run("sft_train", str(tmp_path), overwrite=True).open()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*mine, "photos", "run.json"])


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [Run("sft_train", None) for _ in range(3)]
    for run in runs:
        run.open()
    assert len({run.folder for run in runs}) == 3 == len(list((tmp_path / "runs").iterdir()))


def test_a_line_that_a_killed_run_did_not_finish_is_passed_over(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "running", "data": {"rows": 3}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\n{"step": 2, "loss": 0.5}\n{"step": 3, "lo')
    run = Run("sft_train", str(tmp_path), resume=True)
    assert [entry["step"] for entry in run.metrics()] == [1, 2] and run.metrics()[0]["loss"] != run.metrics()[0]["loss"]
    run.cut_metrics(len('{"step": 1, "loss": "nan"}\n'))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": "nan"}\n'
    run.open()
    assert json.loads((tmp_path / "run.json").read_text())["data"] == {"rows": 3}  # what is known stays known


@pytest.mark.parametrize("left", [(), (".saving-x",), (".run.json.7.tmp", ".unfinished")])
def test_resume_begins_where_no_run_was_begun(tmp_path, left, capsys):
    """So that the same command can be given again whenever it was stopped, before its first file, too."""
    for name in left:
        (tmp_path / name).touch() if name.endswith(".tmp") else (tmp_path / name).mkdir()
    run = Run("sft_train", str(tmp_path), resume=True)
    run.open()
    assert run.previous == {} and "there is no run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_ranks_but_the_first_write_nothing(tmp_path, monkeypatch):
    first = Run("sft_train", str(tmp_path / "run"))
    first.open()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ranks, "agreed", lambda _: first.folder)
    other = Run("sft_train", None)  # the folder is the one that the first rank takes
    other.open()
    other.save_record(status="mine")
    other.finish("done")
    other.show({"row": {}})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    other.leave_word("rank 1: no room")
    assert runs.word_in(first.folder) == "rank 1: no room"


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        Run("sft_train", str(tmp_path / "file"))
    with pytest.raises(EnvironmentUnfit, match="cannot be made"):
        Run("sft_train", str(tmp_path / "file" / "run")).open()
    with pytest.raises(UsageError, match="cannot be used"):
        Run("sft_train", str(tmp_path / ("x" * 300)))
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        Run("sft_train", str(tmp_path), resume=True)


def test_a_folder_in_use_is_refused_and_numbers_that_json_lacks_are_words(tmp_path):
    first = Run("sft_train", str(tmp_path / "run"))
    first.open()
    first.save_record(metrics={"loss": float("nan"), "list": [float("inf"), 1.0]})
    text = (tmp_path / "run" / "run.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {"loss": "nan", "list": ["inf", 1.0]}
    code = f"from gemma_trainer.runs import Run; Run('sft_train', {str(tmp_path / 'run')!r}, overwrite=True).open()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ASSETS, capture_output=True, text=True)
    assert "is in use by a run" in done.stderr and (tmp_path / "run" / "run.json").exists()
    for content in ("{", "null", "[]", '{"arguments": []}'):
        (tmp_path / "run" / "run.json").write_text(content)
        with pytest.raises(UsageError, match="damaged"):
            Run("sft_train", str(tmp_path / "run"), resume=True)
