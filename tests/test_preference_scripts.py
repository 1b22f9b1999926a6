"""dpo_train.py, reward_train.py and reward_score.py from the outside: proofs, run folders, and bad input."""

import json

import pytest

from conftest import SAMPLES, talk
from gemma_trainer import models, precision

HELD = SAMPLES / "preferences-heldout.jsonl"
PAIRS = [
    {"prompt": f"Say {word}, please.", "chosen": f"{word} it is", "rejected": f"{other} it is"}
    for word, other in zip(["red", "blue", "low", "high"] * 6, ["green", "yellow", "middle", "train"] * 6, strict=True)
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_the_demo_proves_that_media_decide(preference_runs, name):
    result, told, folder = preference_runs[name]
    assert "built-in demo" in told.splitlines()[0] and result["demo"] is True
    metrics = result["metrics"]
    assert metrics["proof_accuracy"] >= 0.85 and 0.35 <= metrics["proof_accuracy_blind"] <= 0.65
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "processor_config.json", "chat_template.jinja", "run.json", "metrics.jsonl",
            "report.html", "base-model", f"checkpoint-{result['steps']}"} <= files and "ref" not in files  # fmt: skip
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "done" and record["counters"]["rows"] > 900
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    wanted = {"dpo": "rewards/accuracies rewards/margins logps/chosen logps/rejected", "reward": "accuracy margin"}
    assert all(key in logged[0] and any(f"eval_{key}" in line for line in logged) for key in wanted[name].split())


def test_a_reward_run_scores_in_a_new_process_and_so_does_the_merged_model(preference_runs, script, tmp_path):
    result, _, folder = preference_runs["reward"]
    done = script("reward_score.py", "--model", folder, "--output", tmp_path / "scores.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pairs"] == 84 and told["accuracy"] == pytest.approx(result["metrics"]["proof_accuracy"], abs=0.013)
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert scores[0]["row"] == "preferences-heldout.jsonl:1" and len(scores) == 84
    model, processor = models.load_scorer(str(folder), precision.choose("fp32", "cpu"))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    processor.save_pretrained(tmp_path / "merged")
    done = script("reward_score.py", "--model", tmp_path / "merged", "--output", tmp_path / "again.jsonl")
    assert done.returncode == 0, done.stderr
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    for one, other in zip(scores, again, strict=True):
        assert one["chosen"] == pytest.approx(other["chosen"], abs=1e-4)
        assert one["rejected"] == pytest.approx(other["rejected"], abs=1e-4)


def test_conversations_are_scored_too_and_bad_rows_are_named(preference_runs, script, tmp_path):
    rows = [talk("Hm?", "Yes."), talk("Hm?"), {"messages": 7}]
    rows.append({"prompt": "x", "image": "absent.png", "completion": "y"})
    model, out = preference_runs["reward"][2], tmp_path / "scores.jsonl"
    data, bad = write(tmp_path / "rows.jsonl", rows), write(tmp_path / "bad.jsonl", rows[2:])
    done = script("reward_score.py", "--model", model, "--dataset", data, "--output", out)
    assert done.returncode == 0 and "2 of 4 rows" in done.stdout, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert ["score" in line for line in lines] == [True, True, False, False]
    assert lines[2]["row"] == "rows.jsonl:3" and "absent.png" in lines[3]["error"]
    short = script("reward_score.py", "--model", model, "--max-len", "6", "--json")
    assert json.loads(short.stdout)["cut_to_nothing"] == 168, short.stderr
    done = script("reward_score.py", "--model", model, "--dataset", bad)
    assert done.returncode == 3 and "none of 2 rows" in done.stderr
    done = script("reward_score.py", "--model", preference_runs["dpo"][2], "--json")
    assert done.returncode == 5 and "no reward head" in done.stderr
    taken = script("reward_score.py", "--model", model, "--dataset", data, "--output", out)
    assert taken.returncode == 2 and "--overwrite" in taken.stderr


def test_dpo_goes_on_from_a_supervised_run_and_is_resumed(script, tmp_path):
    rows = write(tmp_path / "rows.jsonl", [talk(pair["prompt"], pair["chosen"]) for pair in PAIRS])
    pairs = write(tmp_path / "pairs.jsonl", PAIRS)
    flags = ["--batch-size", "4", "--grad-accum", "1", "--num-workers", "0"]
    done = script(
        "sft_train.py", "--model", "demo", "--dataset", rows, "--output", tmp_path / "sft", "--max-steps", "4", *flags
    )
    assert done.returncode == 0, done.stderr
    command = [
        "dpo_train.py",
        "--adapter",
        tmp_path / "sft",
        "--dataset",
        pairs,
        "--output",
        tmp_path / "dpo",
        "--lr",
        "1e-3",
    ]
    done = script(*command, "--max-steps", "4", "--save-steps", "2", "--json", *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == 4 and result["model"]["adapter"] == str(tmp_path / "sft")
    done = script(*command, "--max-steps", "6", "--resume", "--json", *flags)
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == 6, done.stderr
    assert "going on from step 4" in done.stderr
    assert not (tmp_path / "dpo" / "ref").exists()


BAD = {
    "not pairs": (3, [talk("Hm?", "Yes.")], [], "rows.jsonl:1"),
    "no prompt": (3, [{"chosen": "secret words", "rejected": "b"}], [], "no prompt"),
    "half": (3, [{"prompt": "a", "chosen": "secret words"}], [], "no rejected answer"),
    "missing media": (3, [row | {"image": "absent.png"} for row in PAIRS], [], "absent.png"),
    "too long": (3, PAIRS, ["--max-len", "6"], "nothing to train"),
    "too long for one": (3, PAIRS, ["--max-len", "16", "--truncation", "error"], "rows.jsonl"),
    "unknown loss": (2, PAIRS, ["--loss-type", "dpo"], "--loss-type dpo"),
    "weights": (2, PAIRS, ["--loss-type", "sigmoid", "sft", "--loss-weights", "1"], "--loss-weights"),
    "words": (2, PAIRS, ["--loss-type", "sft", "--loss-weights", "much"], "numbers"),
    "no smoothing": (2, PAIRS, ["--loss-type", "exo_pair"], "--label-smoothing"),
    "beta": (2, PAIRS, ["--beta", "0"], "--beta"),
    "no adapter there": (5, PAIRS, ["--adapter", "absent"], "no adapter"),
    "adapter and full": (2, PAIRS, ["--adapter", "absent", "--full"], "--full"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_its_code_and_one_line(name, script, tmp_path):
    code, rows, flags, told = BAD[name]
    data = write(tmp_path / "rows.jsonl", rows)
    done = script("dpo_train.py", "--model", "demo", "--dataset", data, "--output", tmp_path / "run", *flags, "--json")
    assert done.returncode == code, done.stderr
    assert told in done.stderr and "Traceback" not in done.stderr and "secret words" not in done.stderr
    assert json.loads(done.stdout)["exit_code"] == code
    assert not (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_lengths_that_explain_the_preference_are_told(script, tmp_path):
    rows = [pair | {"chosen": pair["chosen"] + " and much more"} for pair in PAIRS]
    data = write(tmp_path / "rows.jsonl", rows)
    done = script("reward_train.py", "--model", "demo", "--dataset", data, "--dry-run")
    assert done.returncode == 0 and "chosen is longer in 100% of 24 pairs" in done.stderr, done.stderr
    assert "reward head" in done.stdout
    done = script(
        "reward_train.py", "--model", "demo", "--dataset", data, "--dry-run", "--lora-targets", "q_proj|score"
    )
    assert done.returncode == 2 and "trained whole" in done.stderr


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_check_passes_the_bundled_pairs(script, task):
    done = script("dataset_prep.py", "check", SAMPLES / "preferences.jsonl", "--eval-dataset", HELD, "--task", task,
                  "--model", "demo", "--json")  # fmt: skip
    assert done.returncode == 0 and json.loads(done.stdout)["verdict"] == "READY", done.stderr


def test_a_run_does_not_remove_what_it_begins_with(preference_runs, script, tmp_path):
    folder, data = preference_runs["dpo"][2], write(tmp_path / "pairs.jsonl", PAIRS)
    for name, flags in (("adapter", [folder]), ("model", [folder / "base-model"])):
        command = ["dpo_train.py", f"--{name}", *flags, "--dataset", data, "--output", folder, "--overwrite"]
        done = script(*command)
        assert done.returncode == 2 and f"--{name} that the run begins with" in done.stderr, done.stderr
    other = script("reward_train.py", "--model", "demo", "--dataset", data, "--output", folder, "--resume")
    assert other.returncode == 2 and "dpo_train.py" in other.stderr


def test_a_reward_adapter_is_no_adapter_to_go_on_from_and_brings_its_own_shape(preference_runs, script, tmp_path):
    data = write(tmp_path / "pairs.jsonl", PAIRS)
    done = script("dpo_train.py", "--adapter", preference_runs["reward"][2], "--dataset", data)
    assert done.returncode == 2 and "is a reward model" in done.stderr
    done = script("dpo_train.py", "--adapter", preference_runs["dpo"][2], "--dataset", data, "--lora-r", "4")
    assert done.returncode == 2 and "--lora-r" in done.stderr
