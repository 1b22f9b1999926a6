"""distill_dataset.py with models in this process: the teacher, the judge, and the way round from rows to a student."""

import base64
import json

from bad_server import BadServer, distill
from test_distill import read, user, write

from conftest import SAMPLES
from gemma_trainer import generation


def test_a_model_here_answers_text_pictures_and_clips_and_goes_on_where_it_was(
    tmp_path, capsys, model_folder, media, monkeypatch
):
    text = {"type": "text", "text": "What is it?"}
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Name a fruit."},
        {"messages": [user([{"type": "image", "image": str(media / "red.png")}, text])]},
        {"messages": [user([{"type": "audio", "audio": str(media / "one.wav")}, text])]},
        {"prompt": "word " * 200},
    )
    made = generation._read_answer

    def readable(tokenizer, tokens, stops):  # an untrained model stops nowhere, and says control tokens
        answer = made(tokenizer, tokens, stops)
        return generation.Answer(f"said {sum(tokens)}", answer.tokens, True)

    monkeypatch.setattr(generation, "_read_answer", readable)
    output = tmp_path / "rows.jsonl"
    arguments = ("answers", path, "--teacher", model_folder, "--output", output, "--max-new-tokens", 4,
                 "--samples", 2, "--keep", "all", "--max-len", 128, "--batch-size", 2)  # fmt: skip
    code, result, told = distill(capsys, *arguments)
    assert code == 0, told
    assert result["reasons"] == {"refused_by_model": 1} and result["teacher"]["api"] == "local"
    assert result["tokens"]["out"] == 3 * 2 * 4 and result["tokens"]["in"] > 50
    rows = read(output)
    assert [row["messages"][0]["content"] == "Name a fruit." for row in rows] == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]

    journal, first = tmp_path / "rows.journal", output.read_bytes()
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 8
    journal.write_bytes(b"".join(lines[:3]))  # after the first batch of two
    asked = []
    batches = generation.InBatches.__call__
    monkeypatch.setattr(
        generation.InBatches, "__call__",
        lambda self, items, *rest: asked.append(len(items)) or batches(self, items, *rest),
    )  # fmt: skip
    code, _, _ = distill(capsys, *arguments, "--resume")
    assert code == 0 and asked[0] == 6 and output.read_bytes() == first


def test_a_reward_model_judges(tmp_path, capsys, preference_runs):
    _, _, folder = preference_runs["reward"]
    rows = [json.loads(line) for line in (SAMPLES / "preferences-heldout.jsonl").read_text().splitlines()]
    shown = {}  # the picture as it is sent: right and wrong answer
    for row in rows:
        if isinstance(row.get("prompt"), list) and row["prompt"][0]["content"][0]["type"] == "image":
            picture = SAMPLES / row["prompt"][0]["content"][0]["image"]
            row["prompt"][0]["content"][0]["image"] = str(picture)
            shown.setdefault(base64.b64encode(picture.read_bytes()).decode(), row)
    path = write(tmp_path / "p.jsonl", *shown.values())

    def answer(heard):
        sent = heard.body["messages"][0]["content"][0]["image_url"]["url"].split(",")[1]
        return shown[sent]["chosen" if heard.body["seed"] == 1 else "rejected"]

    with BadServer(answer) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--samples", 2, "--judge", folder)
        code, result, told = distill(capsys, *arguments, "--output", tmp_path / "pairs.jsonl", "--pairs")
    assert code == 0, told
    pairs = read(tmp_path / "pairs.jsonl")
    right = {row["prompt"][0]["content"][0]["image"]: row["chosen"] for row in shown.values()}
    liked = [right[pair["prompt"][0]["content"][0]["image"]] == pair["chosen"][0]["content"] for pair in pairs]
    assert len(liked) == len(shown) >= 5 and sum(liked) >= 0.8 * len(liked)
    assert all(pair["margin"] > 0 for pair in pairs) and result["judge"]["model"] == str(folder)


def test_rows_of_a_teacher_train_a_student_that_teaches_in_turn(tmp_path, capsys, script):
    colours = ["red", "blue", "green", "white"]
    path = write(tmp_path / "p.jsonl", *({"prompt": f"Name colour {name}"} for name in colours))
    with BadServer(lambda heard: heard.asked.split()[-1]) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--keep-similar")
        assert distill(capsys, *arguments)[0] == 0
    run = tmp_path / "run"
    trained = script("sft_train.py", "--model", "demo", "--dataset", tmp_path / "rows.jsonl", "--output", run, "--lr", "2e-2",
                     "--max-steps", 40, "--batch-size", 4, "--grad-accum", 1, "--json")  # fmt: skip
    assert trained.returncode == 0, trained.stderr[-2000:]
    arguments = ("answers", path, "--teacher", run, "--output", tmp_path / "again.jsonl", "--keep-similar")
    code, result, told = distill(capsys, *arguments, "--max-new-tokens", 8)
    assert code == 0, told
    assert read(tmp_path / "again.jsonl") == read(tmp_path / "rows.jsonl") and result["teacher"]["model"] == str(run)
