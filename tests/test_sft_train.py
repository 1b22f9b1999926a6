"""sft_train.py from the outside: the demo's proof, a run's files, and every way it can be given bad input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import ASSETS, ROOT, SAMPLES, talk
from gemma_trainer import demo


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """One whole demo run in a folder of its own, from another working directory, the skill's assets copied alone."""
    place = tmp_path_factory.mktemp("alone")
    shutil.copytree(ASSETS, place / "assets", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (place / "work").mkdir()
    command = [sys.executable, "-P", str(place / "assets" / "sft_train.py"), "--max-len", "2048", "--json"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=place / "work", env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done, json.loads(done.stdout), place / "work"


def test_the_demo_says_so_and_proves_that_media_reach_the_model(demo_run):
    done, result, _ = demo_run
    assert "built-in demo" in done.stderr.splitlines()[0] and result["demo"] is True
    metrics = result["metrics"]
    assert metrics["accuracy"] >= 0.9
    assert metrics["accuracy_blind"] <= metrics["chance"] + 0.1
    assert metrics["eval_loss"] < 1.0


def test_the_demos_run_folder(demo_run):
    done, result, place = demo_run
    folder = place / result["run"]
    assert folder.parent == place / "runs"
    files = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "processor_config.json", "tokenizer.json",
            "chat_template.jinja",
            "run.json", "metrics.jsonl", "report.html", "checkpoint-120"} <= files  # fmt: skip
    assert not any(name.startswith(".") for name in files)
    assert (folder / "adapter_model.safetensors").stat().st_mode & 0o044 == 0o044 & ~_umask()
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "done" and record["steps"] == 120
    assert {"arguments", "versions", "data", "counters", "timing", "peak_memory_mb", "metrics", "samples"} <= set(
        record
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in lines) == 120 and any("eval_loss" in line for line in lines[-2:])
    assert done.stdout.count("\n") == 1 and len(done.stderr) < 10_000 and "\r" not in done.stderr


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_fresh_process_of_plain_transformers_and_peft_reproduces_the_answers(demo_run):
    """No code of ours: AutoProcessor and PEFT from the run folder, the prompt as a user would write it."""
    _, result, place = demo_run
    folder = place / result["run"]
    samples = json.loads((folder / "run.json").read_text())["samples"]
    code = """
import json, sys, soundfile
import librosa, torch
from PIL import Image
from peft import AutoPeftModel, PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor
folder, data, names = sys.argv[1], sys.argv[2], sys.argv[3:]
processor = AutoProcessor.from_pretrained(folder)
base = AutoModelForImageTextToText.from_pretrained(PeftConfig.from_pretrained(folder).base_model_name_or_path)
model = PeftModel.from_pretrained(base, folder).eval()
rows = [json.loads(line) for line in open(data + "/heldout.jsonl")]
answers = []
for name in names:
    messages = rows[int(name.split(":")[1]) - 1]["messages"][:-1]
    for block in messages[0]["content"]:
        if block["type"] == "image":
            block["image"] = Image.open(data + "/" + block["image"])
        if block["type"] == "audio":
            wave, rate = soundfile.read(data + "/" + block["audio"], dtype="float32", always_2d=True)
            block["audio"] = librosa.resample(wave.mean(1), orig_sr=rate, target_sr=16000)
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    inputs = processor.apply_chat_template(messages, **options)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    said = processor.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
    answers.append(said.removesuffix("<turn|>"))
print(json.dumps(answers))
"""
    names = [sample["row"] for sample in samples]
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(SAMPLES), *names], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [sample["answer"] for sample in samples]


# ---- a person's data


@pytest.fixture
def rows(tmp_path):
    def write(*lines, name="rows.jsonl"):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


SHORT = ("--max-steps", "2", "--batch-size", "2", "--grad-accum", "1", "--json")


@pytest.mark.parametrize("flags", [
    ["--full"], ["--lora-targets", "all", "--gradient-checkpointing", "on"],
    ["--precision", "bf16", "--loss-on", "last-turn"],
])  # fmt: skip
def test_a_run_on_a_local_model(script, rows, model_folder, tmp_path, flags):
    data = rows(talk("hi", "hello"), {"prompt": "a", "completion": "b"},
                talk("see", "red", image=str(SAMPLES / "images/train-red-0.png")),
                talk("hear", "low", audio=str(SAMPLES / "audio/train-low-0.flac")))  # fmt: skip
    done = script("sft_train.py", "--model", model_folder, "--dataset", data, "--test-size", "0.25",
                  "--output", tmp_path / "run", "--num-workers", "1", *SHORT, *flags)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["demo"] is False and result["steps"] == 2 and result["metrics"]["eval_loss"] > 0
    saved = "model.safetensors" if "--full" in flags else "adapter_model.safetensors"
    assert (tmp_path / "run" / saved).exists()
    from transformers import AutoProcessor

    assert AutoProcessor.from_pretrained(tmp_path / "run").chat_template
    assert AutoProcessor.from_pretrained(tmp_path / "run" / "checkpoint-2").chat_template


def test_a_dry_run_writes_nothing(script, rows, model_folder, tmp_path):
    done = script(
        "sft_train.py",
        "--model",
        model_folder,
        "--dataset",
        rows(talk("a", "b")),
        "--output",
        tmp_path / "run",
        "--dry-run",
    )
    assert done.returncode == 0 and "LoRA on 24 language layers" in done.stdout, done.stderr[-1500:]
    assert "1 rows to train on" in done.stdout and "trained tokens" in done.stdout and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("flags", "code"), [(["--lora-targets", "langauge"], 2), (["--quantize", "4bit"], 4)])
def test_a_dry_run_finds_what_a_run_would(script, tmp_path, flags, code):
    refused(script("sft_train.py", "--dry-run", *flags, cwd=tmp_path), code, flags[0])


def test_missing_media_files_are_found_before_the_model_is_loaded(script, rows, tmp_path):
    good = talk("see", "red", image=str(SAMPLES / "images/train-red-0.png"))
    data = rows(*[good] * 9, talk("see", "red", image="absent.png"))
    flags = ["--model", "demo", "--dataset", data, "--output", tmp_path / "run", "--dry-run"]
    refused(
        script("sft_train.py", *flags),
        3,
        "1 of 10 media cannot be read. First: rows.jsonl:10: no such file",
        "--max-bad-media",
    )
    refused(script("sft_train.py", *flags, "--on-bad-media", "error"), 3, "rows.jsonl:10: no such file")
    allowed = script("sft_train.py", *flags, "--max-bad-media", "0.2")
    assert (
        allowed.returncode == 0 and "1 of 10 media cannot be read" in allowed.stderr and "1 bad media" in allowed.stdout
    )


# ---- bad input: one or two lines, the right exit code, no traceback, no data


def refused(done, code, *told):
    assert done.returncode == code, (done.returncode, done.stderr[-2000:])
    message = done.stderr.split("error: ", 1)[1]
    assert len(message.strip().splitlines()) <= 2 and "Traceback" not in done.stderr and done.stdout == ""
    for words in told:
        assert words in message, message


@pytest.mark.parametrize(("line", "told"), [
    ('{"messages": [', "rows.jsonl:2: not valid JSON"),
    ({"question": "private words", "answer": "b"}, "rows.jsonl:2: no known format; found: answer, question; acc"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}, "rows.jsonl:2: video blocks"),
])  # fmt: skip
def test_a_bad_row_is_named(script, rows, line, told):
    done = script("sft_train.py", "--model", "demo", "--dataset", rows(talk("a", "b"), line))
    refused(done, 3, told)
    assert "private" not in done.stderr


def test_many_bad_rows_are_told_in_two_lines_with_their_total(script, rows):
    done = script("sft_train.py", "--model", "demo", "--dataset", rows(*['{"a": 1}'] * 9, talk("a", "b")))
    refused(
        done,
        3,
        "rows.jsonl:1: no known format",
        "9 bad rows in all, also rows.jsonl:2, rows.jsonl:3",
        "rows.jsonl:5, ...",
    )


def test_no_such_file_and_empty_file(script, rows, tmp_path):
    refused(script("sft_train.py", "--model", "demo", "--dataset", tmp_path / "absent.jsonl"), 3, "no such file")
    refused(script("sft_train.py", "--model", "demo", "--dataset", rows()), 3, "rows.jsonl: the file has no rows")


@pytest.mark.parametrize(("row", "flags", "told"), [
    (talk("only a question"), [], "no assistant message"),
    (talk("a", "b", loss_type="context_only"), [], "marked as context"),
    (talk("one two three four " * 20, "b"), ["--max-len", "20"], "raise --max-len"),
    (talk("x", "y", image=str(ROOT / "LICENSE")), [], "media cannot be read"),
])  # fmt: skip
def test_nothing_to_train_is_an_error_before_the_first_step(script, rows, tmp_path, row, flags, told):
    done = script("sft_train.py", "--model", "demo", "--dataset", rows(row, row), "--output", tmp_path / "run", *flags)
    refused(done, 3, "nothing to train: none of 2 rows", told)
    assert not (tmp_path / "run").exists()


def test_an_image_row_for_a_text_only_model(script, rows, tmp_path):
    from transformers import Gemma4ForCausalLM

    tokenizer = demo.make_tokenizer()
    tokenizer.chat_template = demo.chat_template()
    text_only = tmp_path / "text-model"
    Gemma4ForCausalLM(demo.make_config(tokenizer).text_config).save_pretrained(text_only)
    tokenizer.save_pretrained(text_only)
    image = talk("x", "y", image=str(SAMPLES / "images/train-red-0.png"))
    done = script("sft_train.py", "--model", text_only, "--dataset", rows(talk("a", "b"), image))
    refused(done, 3, "rows.jsonl:2: image in the row", "takes text only")
    trained = script(
        "sft_train.py", "--model", text_only, "--dataset", rows(talk("a", "b")), "--output", tmp_path / "run", *SHORT
    )
    assert trained.returncode == 0, trained.stderr[-2000:]


def test_a_model_that_cannot_be_reached(script, rows):
    done = script("sft_train.py", "--model", "google/gemma-4-E2B-it", "--dataset", rows(talk("a", "b")))
    refused(done, 5, "google/gemma-4-E2B-it cannot be loaded", "hf download")


@pytest.mark.parametrize(("flags", "code", "told"), [
    (["--max-len", "many"], 2, "--max-len"), (["--eval-dataset", "x.jsonl"], 2, "need --dataset"),
    (["--dataset", "x.jsonl"], 2, "needs --model"),
    (["--lora-targets", "qproj"], 2, "near names"), (["--precision", "fp16"], 2, "NaN"),
    (["--quantize", "4bit"], 4, "NVIDIA GPU"), (["--backend", "unsloth"], 4, "pip install unsloth"),
    (["--report-to", "mlflow"], 4, "pip install mlflow"),
    (["--resume"], 2, "--resume needs --output"),
])  # fmt: skip
def test_wrong_flags(script, tmp_path, flags, code, told):
    refused(script("sft_train.py", *flags, cwd=tmp_path), code, told)
    assert not list(tmp_path.iterdir())


def test_an_output_folder_in_use_is_refused_until_told_otherwise(script, rows, tmp_path):
    data, out = rows(talk("hi", "hello"), talk("a", "b")), tmp_path / "run"
    run = ["sft_train.py", "--model", "demo", "--dataset", data, "--output", out, *SHORT]
    assert script(*run).returncode == 0
    before = (out / "run.json").read_text()
    refused_run = script(*[flag for flag in run if flag != "--json"])
    refused(refused_run, 2, "holds a run already", "--resume or --overwrite")
    assert (out / "run.json").read_text() == before
    assert script(*run, "--overwrite").returncode == 0
    more = [*run, "--resume", "--max-steps", "4"]
    done = script(*more)
    assert done.returncode == 0 and "going on from step 2" in done.stderr, done.stderr[-2000:]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 2, 3, 4]
    record = json.loads((out / "run.json").read_text())
    assert record["counters"]["rows"] == 8 and len(record["lengths"]) == 8  # the first two steps included
    more.remove("--json")
    again = script(*more)  # as whoever starts it anew after a stop does
    assert again.returncode == 0 and "is finished (4 steps)" in again.stderr and "trained  4 steps" in again.stdout
    refused(script(*more, "--lora-r", "4"), 2, "was begun with --lora-r 16, not 4")
    assert json.loads((out / "run.json").read_text()) == record
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("mine")
    done = script("sft_train.py", "--output", tmp_path / "home", "--overwrite")
    refused(done, 2, "holds other files")
    assert (tmp_path / "home" / "letter.txt").exists()


def test_not_enough_disk_is_said_before_training(script, rows, tmp_path):
    """The disk is made small by a sitecustomize that the script's own interpreter loads."""
    (tmp_path / "fake").mkdir()
    fake = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free=1)\n"
    (tmp_path / "fake" / "sitecustomize.py").write_text(fake)
    done = script("sft_train.py", "--output", tmp_path / "run", env={"PYTHONPATH": str(tmp_path / "fake")})
    refused(done, 4, "not enough disk", "0 MiB are free")


@pytest.mark.parametrize(("kib", "flags", "told"), [
    (100, [], "no room left on the disk"),  # for the base model
    (1000, ["--full", "--save-steps", "2"], "no room for the checkpoint of step 2: it takes about"),
])  # fmt: skip
def test_a_disk_that_fills_up_while_training(tmp_path, kib, flags, told):
    """Files may grow to so many KiB here."""
    command = [sys.executable, str(ASSETS / "sft_train.py"), "--output", str(tmp_path / "run"), *flags]
    limited = ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "limited", *command]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 4 and told in done.stderr and "Traceback" not in done.stderr, done.stderr[-1500:]
    assert not list((tmp_path / "run").glob("checkpoint-*")) and not list((tmp_path / "run").glob(".[!.]*"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_a_checkpoint_to_go_on_from(script, tmp_path, number, code):
    out = tmp_path / "run"
    command = [
        sys.executable,
        str(ASSETS / "sft_train.py"),
        "--output",
        str(out),
        "--max-steps",
        "400",
        "--num-workers",
        "1",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(600):
        time.sleep(0.1)
        if (out / "metrics.jsonl").exists() and process.poll() is None:
            break
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == code and stdout == "" and "Traceback" not in stderr, stderr[-3000:]
    assert "a checkpoint was saved: go on with --resume" in stderr
    stopped = max(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    done = script("sft_train.py", "--output", out, "--resume", "--max-steps", stopped + 2, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["steps"] == stopped + 2, done.stderr[-2000:]


def test_a_signal_before_training_is_told_too(tmp_path):
    command = [sys.executable, str(ASSETS / "sft_train.py"), "--output", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stderr.readline()  # the first line: it is at work
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143 and "terminated before anything new was saved" in stderr and stdout == ""
