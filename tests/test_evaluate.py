"""evaluate.py: progress is told from noise, nothing is lost by a kill, and --require decides."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext

import evaluate
import numpy as np
import pytest
import sft_train
import tiny

from conftest import ASSETS, talk
from gemma_trainer import (
    cli,
    data,
    demo,
    evaluation,
    evaluation_book,
    evaluation_figures,
    evaluation_rows,
    evaluation_table,
    evaluation_work,
    inference,
    sources,
)
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import UsageError
from gemma_trainer.evaluation_book import Book
from gemma_trainer.flags import InferenceFlags
from gemma_trainer.likelihood import token_log_probs
from gemma_trainer.scoring import score_rows

WORDS = ("red", "blue", "green")
ASKED = """Say {} now.|Repeat the word {}.|The word is {}. What is it?|Please say {}.|Read this: {}|Name the colour {}.
{}. Say it again.|I say {}. You say?""".replace("\n", "|").split("|")
HELD = """Read the word {}.|What is the colour {}?|Say it: {}|Please name {}.|The colour is {}.|{}. What is it?
Say the word {}.|Name {} again.|You say {}.|I know {}. Name it.|Read {} again.""".replace("\n", "|").split("|")
SHORT = ("--max-new-tokens", "4", "--few-shot", "0", "--guard", "off", "--json")


def rows_of(prompts):
    return [{"prompt": prompt.format(word), "completion": word} for prompt in prompts for word in WORDS]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run(capsys, *flags):
    """(exit code, the JSON result, stderr)."""
    capsys.readouterr()
    code = cli.run_script(evaluate.main, evaluate.Config, "", "", [str(flag) for flag in flags])
    told = capsys.readouterr()
    return code, json.loads(told.out) if told.out.startswith("{") else told.out, told.err


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run that has learnt to say the word that it is told, and the rows that it held back."""
    folder = tmp_path_factory.mktemp("evaluate")
    training, held = write(folder / "train.jsonl", rows_of(ASKED)), write(folder / "held.jsonl", rows_of(HELD))
    flags = (
        f"--model demo --dataset {training} --eval-dataset {held} --output {folder / 'run'} --max-steps 36 --lr 1e-2"
    )
    flags += " --batch-size 8 --grad-accum 1 --eval-steps 1000 --save-steps 1000"
    sft_train.main(cli.parse(sft_train.Config, "", "", flags.split()))
    return folder / "run", held


@pytest.fixture(scope="module")
def whole(tuned):
    """An evaluation with all that there is by default: its folder and its result."""
    flags = ["--model", tuned[0], "--output", tuned[0].parent / "whole", "--max-new-tokens", "4", "--batch-size", "8"]
    config = cli.parse(evaluate.Config, "", "", [str(flag) for flag in flags])
    return tuned[0].parent / "whole", evaluate.main(config)


def again(whole, tmp_path, capsys, *flags):
    """The whole evaluation once more, in a copy of its folder."""
    folder = shutil.copytree(whole[0], tmp_path / "again", dirs_exist_ok=True)
    model = whole[0].parent / "run"
    return run(capsys, "--model", model, "--output", folder, "--max-new-tokens", "4", "--resume", "--json", *flags)


@pytest.fixture
def no_model(monkeypatch):
    def load(*arguments, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(inference, "load_policy", load)


# ---- is it better?


def test_progress_is_shown_with_its_interval_and_the_base_fails(whole):
    folder, result = whole
    accuracy, exact = (result["metrics"][name] for name in ("accuracy", "exact"))
    assert (result["verdict"], result["primary"], result["rows"]) == ("BETTER", "accuracy", 33)
    assert exact["base"]["value"] == 0 and exact["tuned"]["value"] >= 0.9
    assert exact["tuned"]["low"] < exact["tuned"]["value"] <= exact["tuned"]["high"]
    gap = exact["difference"]
    assert gap["p"] < 0.001 and 0.5 < gap["low"] <= gap["difference"] == exact["tuned"]["value"]
    assert accuracy["difference_few_shot"]["verdict"] == "BETTER"
    with closing(Book(folder / "answers.jsonl")) as book:
        assert {entry["shots"] for (arm, _, _), entry in book.found.items() if arm == "few_shot"} == {3}
    assert result["metrics"]["loss"]["difference"]["high"] < 0 and not result["metrics"]["loss"]["higher_is_better"]
    perplexity, loss = (result["metrics"][name]["tuned"]["value"] for name in ("perplexity", "loss"))
    assert perplexity == pytest.approx(math.exp(loss)) and result["failed_rows"] == 0
    assert result["confusion"]["labels"] == sorted(WORDS) and sum(map(sum, result["confusion"]["counts"])) == 33
    kept = json.loads((folder / "evaluation.json").read_text())
    assert kept == {key: value for key, value in result.items() if key != "summary"}


def test_the_losses_are_those_of_the_trainer(whole):
    record = json.loads((whole[0].parent / "run" / "run.json").read_text())
    assert whole[1]["metrics"]["loss"]["tuned"]["value"] == pytest.approx(record["metrics"]["eval_loss"], rel=1e-4)


def test_the_table_for_people(whole):
    lines = whole[1]["summary"].splitlines()
    assert lines[0] == "verdict   BETTER (accuracy)"
    head = next(line for line in lines if "few-shot" in line and "difference" in line)
    line = next(line for line in lines if line.startswith("exact"))
    assert line.split()[:3] == ["exact", "33", "0.000"] and line.endswith("<0.001  BETTER")
    assert line.index("BETTER") == len(head) + 2 or line.index("<0.001") + 5 == head.index("p", head.index("95"))


def test_the_conclusion_in_words(whole):
    result = whole[1]
    assert result["summary"].splitlines()[1] == f"meaning   {result['conclusion']}"
    assert result["conclusion"].startswith("tuned is better than base: accuracy ")
    assert "It is better than base with examples" in result["conclusion"]
    assert result["unfinished"]["base"] == 33 and result["unfinished"]["tuned"] == 0
    assert any("did not end within --max-new-tokens 4: base 33" in note for note in result["notes"])
    found = result["metrics"]["accuracy"]
    others = {"NO DIFFERENCE SHOWN": "But it is not shown to be better", "WORSE": "is better than tuned"}
    for verdict, told in others.items():
        accuracy = found | {"difference_few_shot": {"verdict": verdict}}
        assert told in evaluation_table.conclusion(result | {"metrics": {"accuracy": accuracy}})
    for verdict, told in (("WORSE", "tuned is worse"), ("TOO FEW TO TELL", "too few rows"), (None, "on 33 rows; over")):
        said = evaluation_table.conclusion(result | {"verdict": verdict})
        assert told in said and "examples" not in said


def test_drift_is_measured_on_the_bases_own_answers(whole, tuned):
    drift = whole[1]["drift"]
    assert drift["kl"]["prompts"] == 20 and drift["kl"]["value"] > 0 and drift["broken_base"]["value"] == 1
    assert drift["same"]["value"] <= 0.5 and drift["kl"]["low"] <= drift["kl"]["value"] <= drift["kl"]["high"]
    policy = inference.load_policy(str(tuned[0]), InferenceFlags())
    with closing(Book(whole[0] / "answers.jsonl")) as book:
        found = book.found
    said = found["base", "guard_answer", 0]["text"]
    raw = {"prompt": "What is the capital of Italy? Answer in one word.", "completion": said}
    for arm in ("base", "tuned"):
        with policy.untuned() if arm == "base" else nullcontext():
            again = dict(token_log_probs(policy, [raw], 1))[0]
        assert found[arm, "guard_log_probs", 0]["log_probs"] == pytest.approx(again, abs=1e-4)


def test_permuted_labels_show_no_difference(tuned, tmp_path, capsys):
    others = dict(zip(WORDS, WORDS[1:] + WORDS[:1], strict=True))
    rows = [row | {"completion": others[row["completion"]]} for row in rows_of(HELD)]
    data = write(tmp_path / "permuted.jsonl", rows)
    flags = (*SHORT, "--metrics", "exact")
    code, result, _ = run(capsys, "--model", tuned[0], "--dataset", data, "--output", tmp_path / "out", *flags)
    assert code == 0 and result["verdict"] == "NO DIFFERENCE SHOWN" and list(result["metrics"]) == ["exact"]
    assert result["metrics"]["exact"]["difference"]["p"] > 0.05


def test_a_difference_of_few_rows_is_too_few_to_tell(tuned, tmp_path, capsys):
    flags = ("--limit", "3", "--metrics", "exact", *SHORT)
    trained = tuned[0].parent / "train.jsonl"
    code, result, told = run(capsys, "--model", tuned[0], "--output", tmp_path / "in", "--dataset", trained, *flags)
    assert code == 0 and "the model was trained on these rows" in told
    code, result, told = run(capsys, "--model", tuned[0], "--output", tmp_path / "out", *flags)
    assert code == 0 and result["rows"] == 3 and result["verdict"] == "TOO FEW TO TELL"
    assert "3 of 33 rows, drawn at random" in told and "too few to tell" in result["notes"][-1]


def test_a_row_answered_alone_and_among_others(whole, tmp_path, capsys):
    given = ["--model", whole[0].parent / "run", "--output", tmp_path / "alone", *SHORT, "--batch-size", "1"]
    code, alone, _ = run(capsys, *given)
    assert code == 0
    with closing(Book(whole[0] / "answers.jsonl")) as among, closing(Book(tmp_path / "alone" / "answers.jsonl")) as one:
        assert len(one.found) == 4 * 33
        for key, entry in one.found.items():
            assert entry.get("text") == among.found[key].get("text")
            if "sides" in entry:
                assert entry["sides"][0] == pytest.approx(among.found[key]["sides"][0], abs=1e-4)
    for name, found in alone["metrics"].items():
        assert found["tuned"] == pytest.approx(whole[1]["metrics"][name]["tuned"], rel=1e-4)


# ---- what is required


def test_require_decides_the_exit_code_and_nothing_is_lost(whole, tmp_path, capsys, no_model):
    goals = ["exact>=0.9", "gain/exact.low>0.5", "base/exact<0.1", "gain/loss>0", "drift/kl>=0", "few_shot/exact<0.5"]
    code, result, _ = again(whole, tmp_path, capsys, "--require", *goals)
    assert code == 0 and all(goal["passed"] for goal in result["required"])
    code, result, _ = again(whole, tmp_path, capsys, "--require", "exact>=0.9", "drift/broken_base<0.5")
    assert code == 8 and [goal["passed"] for goal in result["required"]] == [True, False]
    assert json.loads((tmp_path / "again" / "evaluation.json").read_text())["metrics"] == result["metrics"]


@pytest.mark.parametrize(("flags", "told"), [
    (["--require", "acuracy>=0.9"], "known: accuracy, base/accuracy"), (["--require", "accuracy=0.9"], "is no goal"),
    (["--require", "gain/wer.low>0"], "not measured: add --metrics wer;"),
    (["--metrics", "bleu"], "unknown; known: auto, exact"), (["--metrics", "checks"], "no row can be measured by it"),
    (["--metrics", "pair_accuracy"], "no row can be measured by it"), (["--limit", "0"], "--limit"),
    (["--labels", "secret"], "--labels: no row expects"),
    (["--resume"], "--resume needs --output"), (["--few-shot", "-1"], "--few-shot"),
])  # fmt: skip
def test_wrong_usage_is_told_before_a_model_is_loaded(tuned, tmp_path, capsys, monkeypatch, no_model, flags, told):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, "--model", tuned[0], *flags)
    assert code == 2 and told in error and not list(tmp_path.iterdir())


def test_what_is_not_there(tuned, tmp_path, capsys, no_model):
    assert run(capsys)[0] == 2
    assert run(capsys, "--model", tuned[0], "--dataset", tmp_path / "absent.jsonl")[0] == 3
    for flags in (["--model", tmp_path / "absent"], ["--model", tuned[0], "--judge", tmp_path / "absent"]):
        code, _, told = run(capsys, *flags)
        assert code == 5 and "no such folder" in told
    code, _, told = run(capsys, "--model", tuned[0], "--judge", tuned[0])
    assert code == 5 and "no reward model" in told
    bad = write(tmp_path / "bad.jsonl", ["{broken", {"nothing": "secret"}])
    code, _, told = run(capsys, "--model", tuned[0], "--dataset", bad)
    assert code == 3 and "none of 2 rows" in told and "secret" not in told


def test_what_failed_before_it_asked_anything_is_not_in_the_way(tuned, tmp_path, capsys):
    for name, more in (("absent/one", []), ("absent/two", []), ("absent/three", ["--resume"])):
        code, _, told = run(capsys, "--model", name, "--dataset", tuned[1], "--output", tmp_path / "begun", *more)
        assert code == 5 and "cannot be loaded" in told


# ---- killed, and gone on with


def test_resuming_gives_the_same_evaluation_to_the_byte(whole, tmp_path, capsys, monkeypatch):
    lines = (whole[0] / "answers.jsonl").read_bytes().splitlines(keepends=True)
    folder = tmp_path / "again"
    for cut in (3, len(lines) - 90):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(whole[0] / "settings.json", folder)
        (folder / "answers.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:25])
        code, _, _ = run(
            capsys, "--model", whole[0].parent / "run", "--output", folder, "--max-new-tokens", "4", "--resume"
        )
        kept = [json.loads((path / "evaluation.json").read_text()) | {"output": ""} for path in (whole[0], folder)]
        assert code == 0 and kept[0] == kept[1]


def test_an_interrupted_evaluation_says_how_to_go_on(tuned, tmp_path, capsys, monkeypatch):
    batches = []

    def answers(*arguments):
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt
        return made(*arguments)

    made = evaluation_work._answers
    monkeypatch.setattr(evaluation_work, "_answers", answers)
    flags = ["--model", tuned[0], "--output", tmp_path / "out", *SHORT]
    code, result, told = run(capsys, *flags)
    assert code == 130 and "--resume" in told
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 16
    assert run(capsys, *flags)[0] == 2 and run(capsys, *flags, "--resume")[0] == 0
    assert len(batches) == 3 + 8  # of five of each arm the two that were whole are not done again


def test_killed_and_resumed(whole, tmp_path, capsys):
    folder = tmp_path / "killed"
    flags = ["--model", str(whole[0].parent / "run"), "--output", str(folder), "--max-new-tokens", "4"]
    process = subprocess.Popen([sys.executable, str(ASSETS / "evaluate.py"), *flags], stderr=subprocess.DEVNULL)
    answers, end = folder / "answers.jsonl", time.monotonic() + 120
    while not (answers.exists() and answers.stat().st_size) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = len(answers.read_bytes().splitlines())
    assert 0 < done < len((whole[0] / "answers.jsonl").read_bytes().splitlines())
    assert run(capsys, *flags, "--resume")[0] == 0
    kept = [json.loads((path / "evaluation.json").read_text()) | {"output": ""} for path in (whole[0], folder)]
    assert kept[0] == kept[1]


def test_other_settings_are_refused(whole, tmp_path, capsys, no_model):
    code, _, told = again(whole, tmp_path, capsys, "--max-new-tokens", "5", "--seed", "1")
    assert code == 2 and "seed was 0, is 1; max_new_tokens was 4, is 5" in told
    data = write(tmp_path / "other.jsonl", rows_of(HELD[:3]))
    code, _, told = again(whole, tmp_path, capsys, "--dataset", data)
    assert code == 2 and "dataset was" in told
    assert run(capsys, "--model", whole[0].parent / "run", "--output", whole[0])[0] == 2
    os.remove(tmp_path / "again" / "settings.json")
    code, _, told = again(whole, tmp_path / "new", capsys, "--overwrite", "--resume", "--seed", "1")
    assert code == 2


def test_killed_before_the_settings_were_written(tuned, tmp_path):
    (tmp_path / "answers.jsonl").touch()
    for flag in ("--resume", "--overwrite"):
        config = cli.parse(evaluate.Config, "", "", ["--model", str(tuned[0]), "--output", str(tmp_path), flag])
        assert evaluation_book.open_folder(config) == tmp_path


# ---- kinds of rows


def test_pairs_choices_texts_and_rows_that_cannot_be_used(tuned, tmp_path, capsys):
    prompts = [prompt.format(word) for prompt in HELD[:4] for word in WORDS]
    right = [word for _ in HELD[:4] for word in WORDS]
    wrong = ["blue", "green", "red"] * 4
    rows = [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in zip(prompts, right, wrong, strict=True)]
    rows += [{"prompt": p, "choices": list(WORDS), "answer": a} for p, a in zip(prompts, right, strict=True)]
    rows += [
        {"prompt": p, "choices": list(WORDS), "answer": WORDS.index(a)} for p, a in zip(prompts, right, strict=True)
    ]
    rows += [{"text": "The red word is blue."}, "{broken", {"prompt": "x", "choices": ["a", "b"], "answer": "secret"}]
    rows += [{"prompt": "x", "image": "absent.png", "chosen": "a", "rejected": "b"}]
    data = write(tmp_path / "mixed.jsonl", rows)
    code, result, told = run(capsys, "--model", tuned[0], "--dataset", data, "--output", tmp_path / "out", *SHORT)
    metrics = result["metrics"]
    assert code == 0 and "secret" not in told and result["failed_rows"] == 3 and len(result["problems"]) == 3
    for name, count, lost in (("pair_accuracy", 13, 1), ("choice_accuracy", 25, 1)):
        for ending in ("", "_per_token"):
            found = metrics[name + ending]
            assert found["rows"] == count and found["tuned"]["value"] == pytest.approx(1 - lost / count)
            assert found["failed"] == {"base": lost, "tuned": lost} and found["base"]["value"] < 0.8
    assert metrics["loss"]["rows"] == 1 and result["primary"] == "choice_accuracy"


def test_a_row_that_cannot_be_answered_counts_as_wrong(model_folder, media, tmp_path, capsys):
    for name in ("red.png", "one.wav"):
        shutil.copy(media / name, tmp_path)
    rows = [talk("see", "red", image="red.png"), talk("hear", "low", audio="one.wav"),
            talk("see", "red", image="absent.png"), talk("say " * 80, "red"),
            talk("hi", "") | {"messages": [{"role": "user", "content": "hi"}], "checks": {"forbidden": ["secret"]}},
            {"messages": [{"role": "user", "content": "call"}, {"role": "assistant", "tool_calls": [
                {"function": {"name": "look", "arguments": {}}}]}]}]  # fmt: skip
    flags = ["--model", model_folder, "--max-len", "100", *SHORT]
    data = write(tmp_path / "rows.jsonl", rows)
    code, result, told = run(capsys, *flags, "--dataset", data, "--output", tmp_path / "out")
    exact, checks, loss = (result["metrics"][name] for name in ("exact", "checks", "loss"))
    assert code == 0 and (exact["rows"], exact["failed"]["tuned"], exact["tuned"]["value"]) == (4, 2, 0)
    assert checks["rows"] == 1 and (loss["rows"], loss["failed"]["tuned"]) == (3, 2) and result["failed_rows"] == 2
    assert "1 rows are not asked, only their loss is taken: rows.jsonl:6" in told
    assert [problem.split(":")[1] for problem in result["problems"]] == ["3", "4"]
    data = write(tmp_path / "none.jsonl", rows[2:4])
    code, _, told = run(capsys, *flags, "--dataset", data, "--output", tmp_path / "none")
    assert code == 3 and "none of 2 rows can be evaluated. First: none.jsonl:1: no such file" in told


def test_labels_by_name(tuned, tmp_path, capsys):
    data = write(tmp_path / "rows.jsonl", [*rows_of(HELD[:2]), {"prompt": "Say something.", "completion": "something"}])
    flags = ("--labels", *WORDS, "--metrics", "accuracy", *SHORT)
    code, result, told = run(capsys, "--model", tuned[0], "--dataset", data, "--output", tmp_path / "out", *flags)
    assert code == 0 and "trained on these rows" not in told
    assert result["metrics"]["accuracy"]["rows"] == 6 and result["confusion"]["labels"] == list(WORDS)
    assert "1 rows expect none of the labels" in told


def test_a_judge_scores_the_answers(tuned, processor, tmp_path, capsys):
    folder = tmp_path / "judge"
    scorer = demo.make_model(processor.tokenizer, seed=3, reward=True)
    scorer.save_pretrained(folder)
    processor.save_pretrained(folder)
    flags = ("--judge", folder, "--limit", "6", "--metrics", "exact", *SHORT)
    code, result, _ = run(capsys, "--model", tuned[0], "--output", tmp_path / "out", *flags)
    assert code == 0
    with closing(Book(tmp_path / "out" / "answers.jsonl")) as book:
        found = book.found
    drawn = sorted(random.Random(0).sample(range(33), 6))
    rows = sources.Subset(sources.open_rows([str(tuned[1])]), drawn)
    collator = MultimodalCollator(processor, 2048, on_bad_media="skip")
    scores = {}
    for arm in ("base", "tuned"):
        said = [rows[at] | {"completion": found[arm, "answer", at]["text"]} for at in range(6)]
        scores[arm] = np.array([line["score"] for line in score_rows(scorer, collator, said, 1)])
        assert result["metrics"]["judge"][arm]["value"] == pytest.approx(scores[arm].mean(), abs=1e-4)
    wins = (scores["tuned"] > scores["base"]) + 0.5 * (scores["tuned"] == scores["base"])
    assert result["judge"]["win_rate"]["value"] == pytest.approx(wins.mean())


def test_two_models_and_one_alone(tuned, model_folder, tmp_path, capsys):
    flags = ("--limit", "9", "--metrics", "exact", *SHORT)
    given = ["--model", tuned[0], "--against", model_folder, "--output", tmp_path / "two", *flags]
    code, result, _ = run(capsys, *given)
    assert (
        code == 0 and result["arms"]["base"] == str(model_folder) and result["metrics"]["exact"]["base"]["value"] == 0
    )
    assert result["metrics"]["exact"]["tuned"]["value"] >= 0.8 and result["verdict"] == "BETTER"
    given = ["--model", model_folder, "--dataset", tuned[1], "--output", tmp_path / "one", *flags]
    code, result, _ = run(capsys, *given)
    assert code == 0 and list(result["arms"]) == ["tuned"] and result["verdict"] is None
    assert "difference" not in result["metrics"]["exact"] and "evaluated alone" in result["notes"][0]


def test_what_another_model_cannot_be_compared_in(tuned, tmp_path, capsys, media):
    """One that takes text only and cuts it into other tokens."""
    maker = {"media_tokens": tiny.GEMMA3_MEDIA, "control_tokens": tiny.GEMMA3_CONTROL, "text_tokens": tiny.NEWLINES}
    tokenizer = demo.make_tokenizer(vocab_size=450, **maker)
    tokenizer.chat_template = demo.chat_template("gemma3")
    for part in (tiny.make_model("gemma3_text", tokenizer), tokenizer):
        part.save_pretrained(tmp_path / "other")
    shutil.copy(media / "red.png", tmp_path)
    rows = [*rows_of(HELD[:2]), talk("see", "red", image="red.png")]
    guard = write(tmp_path / "guard.jsonl", [{"prompt": prompt.format("red")} for prompt in HELD])
    given = ["--model", tuned[0], "--against", tmp_path / "other", "--dataset", write(tmp_path / "rows.jsonl", rows)]
    given += ["--guard", guard, "--metrics", "exact", "loss", "--output", tmp_path / "out", "--require", "gain/loss>0"]
    code, result, _ = run(capsys, *given, "--max-new-tokens", "6", "--few-shot", "0", "--json")
    loss, notes = result["metrics"]["loss"], " ".join(result["notes"])
    assert code == 8 and result["required"][0]["value"] is None
    assert loss["rows"] == 6 and loss["difference"]["verdict"] == "NOT COMPARABLE" and "different tokens" in notes
    assert "base could not be asked 1 rows that others could; they count as wrong" in notes
    assert not {"kl", "log_prob_drop"} & set(result["drift"]) and result["drift"]["broken"]["prompts"] == len(HELD)


def test_a_model_without_facts_is_asked_like_the_other(model_folder, tuned):
    like = {"labels": {"thinking": "on"}}
    assert inference.load_policy(str(model_folder), InferenceFlags(), like=like).collator.renderer.thinking == "on"
    assert inference.load_policy(str(tuned[0]), InferenceFlags(), like=like).collator.renderer.thinking == "auto"


def test_a_run_is_compared_with_what_it_began_with(tuned, model_folder, tmp_path):
    folder = shutil.copytree(tuned[0], tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())

    def begun(*flags, **arguments):
        changed = record | {"arguments": record["arguments"] | {"eval_dataset": []} | arguments}
        (folder / "run.json").write_text(json.dumps(changed))
        given = ["--model", str(folder), "--few-shot", "0", "--output", str(tmp_path / "out"), "--overwrite", *flags]
        with closing(evaluation.begin(cli.parse(evaluate.Config, "", "", given))) as work:
            return work.arms.get("base"), work.names, " ".join(work.notes)

    base, names, told = begun("--metrics", "exact", "auto", adapter="gone")
    assert base == f"{folder} without its adapter" and "went on training gone, and base is without both" in told
    assert "these are the demo's rows" in told and names[0] == "exact" and len(set(names)) == len(names) > 3
    assert begun(adapter=str(tuned[0]))[0] == str(tuned[0])
    assert begun("--against", "off", adapter=str(tuned[0]))[0] == f"{folder} without its adapter"
    (folder / "adapter_config.json").unlink()  # as if all weights had been trained
    assert begun(model=str(model_folder))[0] == str(model_folder)
    assert begun("--against", "off", "--guard", "off", model=str(model_folder))[0] is None


def test_what_a_run_held_back(tmp_path):
    data_file = write(tmp_path / "rows.jsonl", rows_of(ASKED))
    training, held = data.split(sources.open_rows([str(data_file)]), 0.25, 3)
    arguments = {"dataset": ["rows.jsonl"], "eval_dataset": [], "test_size": 0.25, "seed": 3}
    facts = {"rows": len(training), "fingerprint": sources.fingerprint([str(data_file)], len(training))}
    record = {"arguments": arguments, "data": facts, "directory": str(tmp_path), "script": "sft_train"}
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    for model in ("run", "run/checkpoint-1"):
        config = cli.parse(evaluate.Config, "", "", ["--model", str(tmp_path / model)])
        found, examples = evaluation_rows.open_heldout(config), evaluation_rows.open_training(config)
        assert [item.name for item in found.items()] == [held[at]["__source__"][0] for at in range(len(held))]
        assert [row["prompt"] for row in found.rows] == [row["prompt"] for row in held] and len(examples[0]) == 18
    write(data_file, rows_of(ASKED[1:]))
    with pytest.raises(UsageError, match="no longer what the run was trained on"):
        evaluation_rows.open_heldout(config)


def test_the_divergence_is_never_more_than_that_of_whole_distributions():
    generator = np.random.default_rng(0)
    base, tuned = (np.log(generator.dirichlet(np.ones(6), size=50)) for _ in range(2))
    token = base.argmax(1)[:, None]
    sides = (np.take_along_axis(one, token, 1)[:, 0] for one in (base, tuned))
    found = evaluation_figures._divergence(*sides)
    assert (found <= (np.exp(base) * (base - tuned)).sum(1) + 1e-9).all() and (found > 0).any()
    assert evaluation_figures._divergence(base[:, 0], base[:, 0]) == pytest.approx(0, abs=1e-9)
