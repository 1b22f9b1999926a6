"""distill_dataset.py with models in this process: the teacher, the judge, and the way round from rows to a student."""

import pytest
from bad_server import BadServer, distill
from test_distill import read, user, write

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


def test_a_model_here_judges_and_writes_instructions(tmp_path, capsys, model_folder, monkeypatch):
    said = {"number": "7", "ideas": '{"instructions": ["Name three rivers.", "Why do cats purr at night?"]}'}
    kind = ["number"]
    monkeypatch.setattr(
        generation, "_read_answer", lambda tokenizer, tokens, stops: generation.Answer(said[kind[0]], 3, True)
    )
    path = write(tmp_path / "p.jsonl", {"prompt": "Name a fruit."}, {"prompt": "What is the colour of the sky?"})
    with BadServer(lambda heard: "an answer") as bad:
        arguments = ("--output", tmp_path / "rows.jsonl", "--max-new-tokens", 4, "--judge", model_folder)
        code, result, told = distill(capsys, "answers", path, "--teacher", bad.url, *arguments, "--min-score", 7)
    assert code == 0 and result["rows"] == 2 and result["requests"]["other"] == 2, told
    kind[0] = "ideas"
    (tmp_path / "topics.txt").write_text("cats")
    arguments = ("--output", tmp_path / "new.jsonl", "--max-new-tokens", 4, "--count", 2)
    code, result, told = distill(capsys, "instruct", tmp_path / "topics.txt", "--teacher", model_folder, *arguments)
    assert code == 0 and result["rows"] == 2 and "--json-schema" not in told
    assert [row["messages"][0]["content"] for row in read(tmp_path / "new.jsonl")][0] == "Name three rivers."


def test_a_reward_model_judges(tmp_path, capsys, model_folder, processor):
    from gemma_trainer import models, precision
    from gemma_trainer.collator import MultimodalCollator
    from gemma_trainer.reward_model import Gemma4ForSequenceClassification
    from gemma_trainer.scoring import score_rows

    folder = tmp_path / "reward"
    scorer = Gemma4ForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    scorer.config.pad_token_id = processor.tokenizer.pad_token_id
    scorer.save_pretrained(folder)
    processor.save_pretrained(folder)
    path = write(tmp_path / "p.jsonl", {"prompt": "Name a fruit."}, {"prompt": "What is the colour of the sky?"})
    words = ["pear", "a blue one", "I do not know that", "seven"]
    with BadServer(lambda heard: words[heard.body["seed"]]) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--samples", 4, "--judge", folder, "--precision", "fp32")
        code, result, told = distill(capsys, *arguments, "--output", tmp_path / "pairs.jsonl", "--pairs")
        assert code == 0, told
        code, result, _ = distill(capsys, *arguments, "--output", tmp_path / "rows.jsonl")
    assert result["dropped"] == {} and result["requests"]["other"] == 0
    code, result, _ = distill(capsys, "answers", path, "--teacher", folder, "--output", tmp_path / "none.jsonl")
    assert code == 5 and "is a reward model" in result["error"]["message"]
    scorer, own = models.load_scorer(str(folder), precision.choose("fp32"))
    collator = MultimodalCollator(own, 2048, on_bad_media="skip")
    for pair, row in zip(read(tmp_path / "pairs.jsonl"), read(tmp_path / "rows.jsonl"), strict=True):
        rows = [{"prompt": pair["prompt"], "completion": text} for text in words]
        scores = [line["score"] for line in score_rows(scorer, collator, rows, 4)]
        assert pair["chosen"] == words[scores.index(max(scores))] == row["messages"][1]["content"]
        assert pair["rejected"] == words[scores.index(min(scores))]
        assert pair["margin"] == pytest.approx(max(scores) - min(scores), abs=1e-4)


def test_rows_of_a_teacher_train_a_student_that_teaches_in_turn(tmp_path, capsys, script):
    colours = ["red", "blue", "green", "white"]
    path = write(tmp_path / "p.jsonl", *({"prompt": f"Name colour {name}"} for name in colours))
    with BadServer(lambda heard: heard.asked.split()[-1]) as bad:
        arguments = ("answers", path, "--teacher", bad.url, "--output", tmp_path / "rows.jsonl", "--keep-similar")
        assert distill(capsys, *arguments)[0] == 0
    run = tmp_path / "run"
    flags = ("--lr", "2e-2", "--max-steps", 40, "--batch-size", 4, "--grad-accum", 1, "--json")
    trained = script("sft_train.py", "--model", "demo", "--dataset", tmp_path / "rows.jsonl", "--output", run, *flags)
    assert trained.returncode == 0, trained.stderr[-2000:]
    arguments = ("answers", path, "--teacher", run, "--output", tmp_path / "again.jsonl", "--keep-similar")
    code, result, told = distill(capsys, *arguments, "--max-new-tokens", 8)
    assert code == 0, told
    assert read(tmp_path / "again.jsonl") == read(tmp_path / "rows.jsonl") and result["teacher"]["model"] == str(run)
