"""A whole loop: train, evaluate, merge, check, let the merged model teach, train again, evaluate what was taught."""

import json
import runpy

from conftest import ASSETS, SAMPLES
from gemma_trainer import cli

HELD_OUT = SAMPLES / "heldout.jsonl"
TRAINING = "--epochs 8 --lr 1e-2 --batch-size 8 --grad-accum 1 --eval-steps 1000 --save-steps 1000".split()


def do(script, *words):
    """The result of a script's command."""
    known, words = runpy.run_path(str(ASSETS / script)), [str(word) for word in words]
    if "COMMANDS" in known:
        work, flags, _ = known["COMMANDS"][words.pop(0)]
    else:
        work, flags = known["main"], known["Config"]
    return work(cli.parse(flags, "", "", words))


def test_what_a_trained_model_teaches_is_learnt(tmp_path, model_folder):
    teacher, merged, taught, student = (tmp_path / name for name in ("teacher", "merged", "taught.jsonl", "student"))

    do("sft_train.py", "--model", model_folder, "--dataset", SAMPLES / "train.jsonl", *TRAINING, "--output", teacher)
    goals = ["accuracy>=0.9", "base/accuracy<=0.1", "gain/accuracy.low>0"]
    judged = do("evaluate.py", "--model", teacher, "--dataset", HELD_OUT, "--metrics", "accuracy", "--require", *goals,
                "--few-shot", 0, "--max-new-tokens", 12, "--guard", "off", "--output", tmp_path / "judged")  # fmt: skip
    assert judged["status"] == "done" and "exit_code" not in judged, json.dumps(judged, indent=1, default=str)[:3000]

    assert do("export.py", "merge", teacher, "--output", merged)["sound"]
    assert do("export.py", "check", merged)["sound"]

    do("distill_dataset.py", "answers", SAMPLES / "train.jsonl", "--teacher", merged, "--output", taught)
    rows = [json.loads(line) for line in taught.read_text().splitlines()]
    assert len(rows) > 50 and all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert do("dataset_prep.py", "check", taught, "--model", model_folder)["verdict"].startswith("READY")

    do("sft_train.py", "--model", model_folder, "--dataset", taught, *TRAINING, "--output", student)
    again = do("evaluate.py", "--model", student, "--dataset", HELD_OUT, "--metrics", "accuracy", "--against", merged,
               "--guard", "off", "--few-shot", 0, "--max-new-tokens", 12, "--require",
               "accuracy>=0.8", "--output", tmp_path / "again")  # fmt: skip
    assert again["status"] == "done" and "exit_code" not in again, json.dumps(again, indent=1, default=str)[:3000]
