"""export.py: from a run to a folder that answers as the run did, wherever it is moved."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_merging import flags, write_adapter

from conftest import SAMPLES
from gemma_trainer import artefacts, asking, export_check, merger, metadata, run_check
from gemma_trainer.errors import CannotLoad, DataError, UsageError

FACTS = {
    "task": "sft",
    "takes": ["text", "audio", "image"],
    "base_model": {"name": "demo", "revision": None, "family": "gemma4", "license": "apache-2.0"},
    "data": {"names": ["train.jsonl"], "fingerprint": "0", "version": None, "rows": 72, "eval_rows": 42},
    "tokens": {"stop_token_ids": [1, 12, 20]},
    "max_len": 512,
    "labels": {"loss_on": "all-turns", "thinking": "auto", "ignored": ["padding"]},
    "training": {"quantization": "4-bit nf4 weights with double quantization", "precision": "float32 on cpu"},
    "versions": {},
    "metadata": {},
}


def checked(path, run=None, dataset=None):
    return export_check.check(SimpleNamespace(path=str(path), run=run and str(run), dataset=dataset and str(dataset)))


def found(result):
    return {check["check"]: check["passed"] for check in result["checks"]}


@pytest.fixture(scope="module")
def made(model_folder, tmp_path_factory):
    """(run, merged folder, result of the merge): a run with metadata and sample answers, and what came of it."""
    place = tmp_path_factory.mktemp("export")
    run = write_adapter(model_folder, place / "run")
    template = {"version": "gemma4", "sha256": metadata.template_hash((run / "chat_template.jinja").read_text())}
    metadata.write(run, FACTS | {"chat_template": template})
    names = [f"heldout.jsonl:{line}" for line in (1, 5)]  # a picture and a recording
    rows = {row["name"]: row for row in asking_rows(names)}
    model, collator = export_check.load(run)
    said = [{"row": name, "answer": asking.said_by(model, collator, rows[name]["row"])["answer"]} for name in names]
    record = {"status": "done", "samples": said, "arguments": {"eval_dataset": [str(SAMPLES / "heldout.jsonl")]}}
    (run / "run.json").write_text(json.dumps(record))
    return run, place / "merged", merger.merge(flags(run, place / "merged", logits=True))


@pytest.fixture(autouse=True, scope="module")
def short_answers():
    """What random models say has no end."""
    usual, asking.ANSWER_TOKENS = asking.ANSWER_TOKENS, 6
    yield
    asking.ANSWER_TOKENS = usual


def asking_rows(names):
    from gemma_trainer import sources

    rows = sources.open_rows([str(SAMPLES / "heldout.jsonl")])
    return [asking.portable(rows[int(name.rpartition(":")[2]) - 1], name) for name in names]


def test_a_merge_is_verified_and_says_what_it_was_made_of(made):
    run, merged, result = made
    checks = found(result)
    assert result["sound"] and result["status"] == "done", result["summary"]
    kinds = ("text", "image", "audio")
    assert list(checks) == ["files", "change", "reload", "layers", *(f"logits of {kind}" for kind in kinds), "answers"]
    assert set(checks.values()) == {True}
    told = artefacts.read(merged)
    assert (told["made"], told["base"], told["changed"], told["dtype"]) == ("merge", "demo", 60, ["F32"])
    assert [sample["kinds"] for sample in told["samples"]] == [["image"], ["audio"]]
    assert all(sample["answer"] and sample["log_prob"] < 0 for sample in told["samples"])
    facts = json.loads((merged / metadata.FILE).read_text())
    assert facts["merged"]["run"] == "run" and facts["data"] == FACTS["data"]
    card = (merged / "README.md").read_text()
    assert "base_model_relation: finetune" in card and "LoRA adapter, beside 4-bit weights, and merged" in card
    assert str(run.parent) not in card + json.dumps(facts) + json.dumps({**told, "samples": []})


def test_a_merged_folder_is_checked_wherever_it_is(made, tmp_path):
    run, merged, _ = made
    moved = shutil.copytree(merged, tmp_path / "moved")
    result = checked(moved)
    assert result["sound"] and found(result)["answers"] and "2 of 2" in result["summary"], result["summary"]

    held = load_file(moved / "model.safetensors")
    key = next(name for name in held if "language_model.layers.1.mlp.down_proj.weight" in name)
    save_file(held | {key: held[key] * -3}, moved / "model.safetensors", {"format": "pt"})
    result = checked(moved)
    assert result["exit_code"] == 8 and found(result)["answers"] is False
    (moved / "chat_template.jinja").write_text("another")
    result = checked(moved)
    assert result["exit_code"] == 8 and found(result)["chat template"] is False and not result["asked"]


def test_an_adapter_answers_as_its_run_did(made, model_folder, tmp_path):
    run, merged, _ = made
    assert found(checked(run))["answers"]
    assert found(checked(merged, run=run))["answers"]
    other = write_adapter(model_folder, tmp_path / "other", zero=True)
    result = checked(other, run=run)
    assert result["exit_code"] == 8 and found(result)["change"] is False
    base = shutil.copytree(model_folder, tmp_path / "base")
    result = checked(base, run=run)
    assert result["exit_code"] == 8 and found(result)["answers"] is False


def test_rows_of_a_file_are_asked_of_both(made, tmp_path):
    run, merged, _ = made
    rows = [{"prompt": "What is the capital of Italy?"}, {"messages": [{"role": "user", "content": "Say yes."}]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = checked(merged, run, tmp_path / "rows.jsonl")
    assert result["sound"] and [one["name"] for one in result["asked"]] == ["rows.jsonl:1", "rows.jsonl:2"]
    with pytest.raises(UsageError, match="--dataset needs --run"):
        checked(merged, dataset=tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="absent"):
        checked(merged, run, tmp_path / "absent.jsonl")


def test_what_is_there_is_told_by_its_files(tmp_path):
    marks = {"adapter": "adapter_config.json", "model": "config.json", "gguf": "a.gguf", "run": "run.json"}
    for kind, name in (marks | {"ollama": "Modelfile"}).items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_text("{}")
        assert artefacts.kind_of(tmp_path / kind) == kind
    (tmp_path / "ollama" / "a.gguf").touch()
    assert artefacts.kind_of(tmp_path / "ollama") == "ollama"
    assert artefacts.kind_of(tmp_path / "gguf" / "a.gguf") == "gguf"
    (tmp_path / "empty").mkdir()
    for path in ("absent", "empty", "run/run.json"):
        with pytest.raises(CannotLoad):
            artefacts.kind_of(tmp_path / path)


def test_rows_too_large_to_keep_or_without_an_answer(tmp_path, monkeypatch):
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": str(SAMPLES / "images/heldout-red-0.png")}]}
        ]
    }
    kept = asking.portable(row, "r:1")
    assert kept["row"]["messages"][-1]["role"] == "assistant" and kept["kinds"] == ["image"]
    assert kept["row"]["messages"][0]["content"][0]["image"].startswith("data:image/png;base64,")
    monkeypatch.setattr(asking, "LARGEST", 10)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="too large"):
        asking.rows_of_file(str(tmp_path / "rows.jsonl"))
    assert asking.rows_of_run(tmp_path) == []


def test_scores_and_answers_agree_within_what_rounding_does(made):
    run, merged, _ = made
    sample = artefacts.read(merged)["samples"][0]
    model, collator = export_check.load(merged)
    same = asking.asked_again(model, collator, sample)
    assert same["same"] and same["apart"] < 1e-4
    other = asking.asked_again(model, collator, sample | {"answer": "Rome."})
    assert not other["same"] and other["apart"] > asking.AS_SURE
    assert export_check.verdict([same, other], "").passed is False
    assert export_check.verdict([same, other | {"apart": 0.01}], "").passed
    assert export_check.verdict([], "").passed is None
    assert run_check.inspect(str(merged))["kind"] == "model" and torch.is_tensor(next(model.parameters()))


def export_to(output, content, overwrite=True):
    with artefacts.new_folder(str(output), "merge", overwrite) as folder:
        (folder / "weights").write_text(content)
        artefacts.write(folder, {"made": "merge"})


def test_an_older_export_is_lost_to_no_accident(tmp_path, monkeypatch):
    output = tmp_path / "out"
    export_to(output, "first")

    def broken(folder):
        assert (output / "weights").read_text() == "first"  # while the new one is brought to the disk
        raise OSError("the disk fails")

    monkeypatch.setattr(artefacts, "sync_folder", broken)
    with pytest.raises(OSError, match="disk fails"):
        export_to(output, "second")
    monkeypatch.undo()
    monkeypatch.setattr(artefacts, "move_whole", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_to(output, "second")
    monkeypatch.undo()
    assert (output / "weights").read_text() == "first" and list(tmp_path.iterdir()) == [output]

    (tmp_path / ".out.unfinished-killed").mkdir()  # between the two moves
    output.rename(tmp_path / ".out.unfinished-killed" / artefacts.OLDER)
    with pytest.raises(UsageError, match="there already"):
        export_to(output, "second", overwrite=False)
    assert (output / "weights").read_text() == "first" and list(tmp_path.iterdir()) == [output]


def test_what_appears_meanwhile_is_kept_and_links_stay(tmp_path):
    output, elsewhere, link = tmp_path / "out", tmp_path / "large disk", tmp_path / "link"
    with pytest.raises(UsageError, match="there already"), artefacts.new_folder(str(output), "merge", False) as folder:
        artefacts.write(folder, {"made": "merge"})
        export_to(output, "another process")
    assert (output / "weights").read_text() == "another process"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    export_to(link, "here")
    export_to(link, "there")
    assert link.is_symlink() and (elsewhere / "weights").read_text() == "there"
