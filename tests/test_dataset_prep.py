"""dataset_prep.py from the outside: verdicts that training agrees with, every finding, every exit code."""

import json
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
from PIL import Image
from test_duplicates import texts

from conftest import ASSETS, ROOT, SAMPLES, ask, talk
from gemma_trainer import cli, demo, verdict
from gemma_trainer.errors import UsageError
from gemma_trainer.findings import KINDS

PREP = "dataset_prep.py"


def said(role, content="x", **more):
    return {"role": role, "content": content, **more}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def check(monkeypatch, processor):
    """Do what `dataset_prep.py check` does, in this process; returns (exit code, the result)."""
    from dataset_prep import CheckFlags

    monkeypatch.setattr(demo, "make_processor", lambda: processor)

    def run(*arguments):
        result = verdict.check(cli.parse(CheckFlags, "", "", [*map(str, arguments)], "check"))
        return result["exit_code"], result

    return run


def plain(count, words=80, seed=0):
    """Rows in which nothing is to be found."""
    return [talk(text, f"It is number {number}.") for number, text in enumerate(texts(count, words, seed))]


def found(result):
    return {finding["code"]: finding for finding in result["findings"]}


# ---- the verdict


def test_the_demo_says_so_and_is_ready(script):
    done = script(PREP)
    assert done.returncode == 0 and done.stdout.startswith("READY\n") and "demo" in done.stderr.splitlines()[0]
    result = json.loads(script(PREP, "check", "--model", "demo", "--json").stdout)
    assert result["demo"] is True and result["counts"]["rows"] == 72 and result["lengths"]["of"] == "all rows"
    assert not {finding["severity"] for finding in result["findings"]} & {"error", "warning"}


def test_each_finding_is_told_once_with_its_rows_and_a_remedy(check, script, tmp_path):
    rows = plain(30)
    rows[3] = talk("<turn|> Hi", "Hello")
    rows[5] = {"messages": [said("user", "a"), said("user", "b"), said("assistant", "c")]}
    rows[7], rows[9] = rows[6], rows[6]
    code, result = check(write(tmp_path / "rows.jsonl", rows), "--model", "demo")
    assert code == 0 and result["verdict"] == "READY WITH WARNINGS"
    assert {code: (f["count"], f["rows"]) for code, f in found(result).items()} == {
        "control_text": (1, ["rows.jsonl:4"]), "repeated_role": (1, ["rows.jsonl:6"]),
        "duplicate_rows": (2, ["rows.jsonl:8", "rows.jsonl:10"])}  # fmt: skip
    assert found(result)["duplicate_rows"]["details"] == ["as rows.jsonl:7"]
    for finding in result["findings"]:
        assert finding["remedy"] and finding["severity"] == KINDS[finding["code"]].severity
    done = script(PREP, *found(result)["duplicate_rows"]["command"].split()[2:], cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "rows.fixed.jsonl").read_text().count("\n") == 28, done.stderr


BAD = {
    "bad_json": "{broken", "unknown_format": {"foo": 1}, "unknown_role": {"messages": [said("narrator")]},
    "missing_field": {"prompt": "x"}, "wrong_type": {"messages": ["x"]}, "bad_value": talk("a", "b", loss_type="odd"),
    "video": talk([{"type": "video", "video": "a.mp4"}], "b"), "unknown_block": talk([{"type": "table"}], "b"),
    "bad_tools": talk("a", "b", tools="{"), "wrong_task": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "bad_tool_call": {"messages": [said("user"), said("assistant", "", tool_calls=[{"name": "f", "arguments": "{"}])]},
    "result_without_call": {"messages": [said("user"), said("tool"), said("assistant")]},
    "placeholder_without_media": talk([{"type": "image"}], "b"),
    "media_without_placeholder": talk([{"type": "image"}], "b", images=["a.png", "b.png"]),
    "bad_text_row": {"text": "<|turn>model\nHi<turn|>\nbetween"}, "media_missing": talk("a", "b", image="none.png"),
    "media_folder": {"file_name": "a.png", "text": "A red square"},
    "bad_encoding": '{"prompt": "\\ud800", "completion": "x"}',
}  # fmt: skip


@pytest.mark.parametrize("code", BAD)
def test_what_check_refuses_training_refuses_and_the_other_way_round(check, script, tmp_path, code):
    data = write(tmp_path / "rows.jsonl", [talk("Hi", "Hello"), BAD[code]])
    number, result = check(data)
    assert number == 3 and result["verdict"] == "INVALID" and found(result)[code]["rows"] == ["rows.jsonl:2"]
    assert result["exit_code"] == 3 and result["train_command"] is None
    trained = script("sft_train.py", "--model", "demo", "--dataset", data, "--dry-run", "--output", tmp_path / "run")
    assert trained.returncode == 3 and "rows.jsonl:2" in trained.stderr


@pytest.mark.parametrize("model", [(), ("--model", "demo")])
def test_a_set_that_trains_nothing_is_refused(check, tmp_path, model):
    code, result = check(
        write(tmp_path / "rows.jsonl", [talk("Hi"), talk("Hi", "b", loss_type="context_only")]), *model
    )
    assert code == 3 and {"nothing_trained", "no_answer"} <= found(result).keys()
    code, result = check(write(tmp_path / "rows.jsonl", [talk("a " * 50, "b")]), "--model", "demo", "--max-len", 20)
    assert code == 3 and {"nothing_trained", "cut_to_nothing", "over_max_len"} <= found(result).keys()


def test_few_bad_media_are_a_warning_and_many_an_error_as_in_training(check, media, tmp_path):
    rows = [ask(media, "red.png", answer=f"{number} red") for number in range(30)]
    bad = talk([{"type": "image", "image": str(media / "page.jpg")}, {"type": "text", "text": "What?"}], "b")
    code, result = check(write(tmp_path / "a.jsonl", [*rows, bad]), "--model", "demo")
    assert code == 0 and found(result)["media_wrong_kind"]["severity"] == "warning"
    code, result = check(tmp_path / "a.jsonl", "--on-bad-media", "error")
    assert code == 3 and found(result)["media_wrong_kind"]["severity"] == "error"
    code, result = check(write(tmp_path / "b.jsonl", [*rows[:5], bad]))
    assert code == 3 and result["counts"]["bad_media"] == 1


def test_a_model_without_a_tower_is_told(check, tmp_path, media):
    import tiny

    folder = tmp_path / "text-only"
    processor = tiny.make_processor("gemma3_text")
    tiny.make_model("gemma3_text", processor).config.save_pretrained(folder)
    processor.save_pretrained(folder)
    code, result = check(write(tmp_path / "rows.jsonl", [talk("a", "b"), ask(media, "red.png")]), "--model", folder)
    assert code == 3 and found(result)["media_unsupported"]["rows"] == ["rows.jsonl:2"]
    refused = [said("assistant"), said("user"), said("assistant")]  # Gemma 3's template wants the user first
    rows = [*(talk(text, "b") for text in texts(40)), {"messages": refused}]
    code, result = check(write(tmp_path / "rows.jsonl", rows), "--model", folder)
    assert code == 0 and found(result)["template_refuses"]["severity"] == "warning"
    code, result = check(write(tmp_path / "rows.jsonl", rows[-3:]), "--model", folder)
    assert code == 3 and found(result)["template_refuses"]["severity"] == "error"


# ---- tokens


@pytest.mark.parametrize("limit", [30, 60, 120])
def test_rows_over_the_limit_are_counted_exactly_without_tokenizing_all(check, tmp_path, limit, processor):
    from gemma_trainer.collator import MultimodalCollator

    rng = random.Random(0)
    words = ["word", "größer", "価格", "<turn|>", "😀", "1,000"]
    rows = [talk(*(" ".join(rng.choices(words, k=rng.randint(1, 20))) for _ in range(2))) for _ in range(3000)]
    data = write(tmp_path / "rows.jsonl", rows)
    collator = MultimodalCollator(processor, None)
    lengths = [len(batch) for start in range(0, 3000, 100) for batch in _ids(collator, rows[start : start + 100])]
    over = sum(length > limit for length in lengths)
    _, quick = check(data, "--model", "demo", "--max-len", limit)
    _, exact = check(data, "--model", "demo", "--max-len", limit, "--exact")
    assert found(quick)["over_max_len"]["count"] == found(exact)["over_max_len"]["count"] == over > 0
    assert exact["lengths"]["of"] == "all rows" and "random sample of 1,000 of 3,000" in quick["lengths"]["of"]
    assert exact["lengths"]["tokens"]["max"] == max(lengths) and exact["lengths"]["tokens"]["min"] == min(lengths)
    assert abs(quick["lengths"]["tokens"]["median"] - exact["lengths"]["tokens"]["median"]) <= 3
    assert quick["counts"]["trained_rows"] == exact["counts"]["trained_rows"]


def _ids(collator, rows):
    batch = collator(rows)
    return [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def test_the_command_that_check_suggests_trains(check, script, tmp_path):
    rows = [talk(text, "fine") for text in texts(12, words=20)]
    _, result = check(write(tmp_path / "my rows.jsonl", rows), "--model", "demo")
    command = result["train_command"]
    assert "--batch-size 8 --grad-accum 1" in command and "--epochs 3" in command
    longest, room = result["lengths"]["tokens"]["max"], int(re.search(r"--max-len (\d+)", command)[1])
    assert longest <= room <= longest * 1.25 + 64
    words = shlex.split(command)[2:]
    done = script("sft_train.py", *words, "--max-steps", "1", "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr


def test_the_suggested_command_keeps_the_flags_that_were_checked(check, tmp_path):
    flags = ["--loss-on", "last-turn", "--no-train-reasoning", "--max-bad-media", "0.2", "--media-root", tmp_path]
    _, result = check(write(tmp_path / "rows.jsonl", plain(30)), *flags)
    told = f"--loss-on last-turn --no-train-reasoning --max-bad-media 0.2 --media-root {tmp_path}"
    assert result["train_command"].endswith(told)


def test_lengths_of_pairs_are_of_each_side(check, tmp_path):
    pairs = [{"prompt": text, "chosen": f"A {text}", "rejected": "B"} for text in texts(20, words=20)]
    _, result = check(write(tmp_path / "rows.jsonl", pairs), "--task", "dpo", "--model", "demo")
    lengths = result["lengths"]
    assert lengths["of"] == "all rows, both answers of each" and 0 < lengths["trained_share"] < 0.6
    assert lengths["tokens"]["max"] > 1.6 * lengths["tokens"]["min"]


def test_reasoning_and_inexact_prompts_are_told(check, tmp_path):
    steps = [said("user", "a"), said("assistant", "b", reasoning="Hm."), said("user", "c"), said("assistant", "d")]
    rows = [talk(text, "fine") for text in texts(1500)] + [{"messages": steps}]
    _, result = check(write(tmp_path / "rows.jsonl", rows), "--model", "demo")
    assert found(result)["reasoning_dropped"]["rows"] == ["rows.jsonl:1501"]  # found without --exact


# ---- the set


def test_what_evaluation_shares_with_training_is_told(check, tmp_path, media):
    originals = [talk(text, f"answer {n}") for n, text in enumerate(texts(50))]
    held = [originals[3], talk(originals[4]["messages"][0]["content"], "another"), talk("something else", "fine"),
            ask(media, "red.png", answer="Red")]  # fmt: skip
    train = write(tmp_path / "train.jsonl", [*originals, ask(media, "red.png", "one.wav", answer="Both")])
    _, result = check(train, "--eval-dataset", write(tmp_path / "held.jsonl", held))
    overlap = found(result)["eval_overlap"]
    assert overlap["rows"] == ["held.jsonl:1", "held.jsonl:2", "held.jsonl:4"]
    assert [detail.split(" is ")[0] for detail in overlap["details"]] == [
        "the row",
        "its prompt",
        "its picture or clip",
    ]
    assert result["counts"]["eval_rows"] == 4


def test_unbalanced_labels_and_length_bias_are_told_with_figures(check, tmp_path):
    rows = [talk(text, "no" if number % 20 else "yes") for number, text in enumerate(texts(100))]
    _, result = check(write(tmp_path / "rows.jsonl", rows))
    assert "of 2 answers is 95% of them" in found(result)["label_imbalance"]["details"][0]
    even = [talk(text, "no" if number % 2 else "yes") for number, text in enumerate(texts(100))]
    assert "label_imbalance" not in found(check(write(tmp_path / "rows.jsonl", even))[1])
    pairs = [{"prompt": text, "chosen": f"long {text}", "rejected": "short"} for text in texts(40)]
    _, result = check(write(tmp_path / "pairs.jsonl", pairs), "--task", "dpo", "--model", "demo")
    assert "chosen is longer in 100% of 40 pairs" in found(result)["length_bias"]["details"][0]
    pairs += [{"prompt": text, "chosen": "short", "rejected": f"long {text}"} for text in texts(40, seed=1)]
    pairs.append({"prompt": "x", "chosen": "same", "rejected": " same"})
    _, result = check(write(tmp_path / "pairs.jsonl", pairs), "--task", "reward")
    assert found(result).keys() == {"equal_answers"} and "reward_train.py --model" in result["train_command"]


@pytest.mark.parametrize("workers", [2, 3])
def test_findings_do_not_depend_on_the_number_of_processes(check, tmp_path, workers):
    rng = random.Random(0)
    rows = [talk(text, rng.choice(["yes", "no", "", "<bos>", "long " * 30])) for text in texts(700, words=30)]
    rows += rng.sample(rows, 40) + ["{broken"]
    data = write(tmp_path / "rows.jsonl", rows)
    assert check(data, "--model", "demo", "--num-workers", workers) == check(
        data, "--model", "demo", "--num-workers", 1
    )


def test_every_finding_of_every_row_goes_to_the_output(check, tmp_path):
    rows = [talk(text, "") for text in texts(90)]
    _, result = check(write(tmp_path / "rows.jsonl", rows), "--output", tmp_path / "all.jsonl")
    lines = [json.loads(line) for line in open(tmp_path / "all.jsonl")]
    assert [line["row"] for line in lines if line["code"] == "empty_answer"] == [
        f"rows.jsonl:{n}" for n in range(1, 91)
    ]
    assert len(found(result)["empty_answer"]["rows"]) == 5 and result["output"] == str(tmp_path / "all.jsonl")
    with pytest.raises(UsageError, match="exists"):
        check(tmp_path / "rows.jsonl", "--output", tmp_path / "all.jsonl")


def test_text_is_shown_only_when_asked_for(script, tmp_path):
    secret = "PRIVATE" + "x" * 20
    rows = [talk(f"{secret} {number}", secret) for number in range(30)] + [talk(f"{secret} 1", secret)] * 2
    rows += [
        '{"messages": "' + secret,
        {secret + " and more words": 1},
        {"messages": [said(secret)]},
        talk("a", "b", image=secret * 20),
    ]
    data = write(tmp_path / "rows.jsonl", rows)
    for flags in ([], ["--json"], ["--output", tmp_path / "all.jsonl"]):
        done = script(PREP, "check", data, "--model", "demo", *flags)
        assert done.returncode == 3 and "PRIVATE" not in done.stdout + done.stderr
    assert "PRIVATE" not in (tmp_path / "all.jsonl").read_text()
    assert "PRIVATE" in script(PREP, "check", data, "--show-text").stdout


def test_the_output_stays_short_whatever_is_wrong(script, tmp_path, media):
    rows = [row for row in BAD.values() for _ in range(50)]
    rows += [talk(f"<bos> [INST] <turn|> {number} schÃ¶n hf_{'a' * 34}", "") for number in range(50)]
    write(tmp_path / "rows.jsonl", rows)
    for flags in (["--model", "demo"], ["--json"]):
        done = script(PREP, "check", "rows.jsonl", *flags, cwd=tmp_path)
        assert done.returncode == 3 and len(done.stdout) < 16_000


# ---- files


@pytest.mark.parametrize(("name", "content", "told"), [
    ("a.jsonl", b"\x1f\x8b\x08rest", "gzip-compressed: decompress it first"),
    ("a.jsonl.gz", b"\x1f\x8b", "gzip-compressed"),
    ("a.jsonl", b"\x28\xb5\x2f\xfdrest", "zstd-compressed"), ("a.jsonl", '{"a": 1}'.encode("utf-16"), "UTF-16 text"),
    ("a.jsonl", b"\x89PNG\r\n\x1a\n\0\0", "a binary file"), ("a.csv", b"a,b\0", "a binary file"),
    ("a.json", b"PK\x03\x04", "a zip archive"),
    ("a.jsonl", b"", "no rows"), ("a.jsonl", b"\xef\xbb\xbf\n\r\n", "no rows"),
    ("a.parquet", b"PAR1 but no more", "cannot be read"),
])  # fmt: skip
def test_files_that_are_no_rows_are_refused_by_name(script, tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    done = script(PREP, "check", name, cwd=tmp_path)
    assert done.returncode == 3 and told in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


@pytest.mark.parametrize("content", [
    b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n', b'{"prompt": "a", "completion": "b"}\r\n\r\n',
    b'{"prompt": "a\\u0000", "completion": "b"}',
])  # fmt: skip
def test_marks_line_ends_and_escaped_nul_are_read(check, tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    code, result = check(tmp_path / "rows.jsonl", "--model", "demo")
    assert code == 0 and result["verdict"] == "READY" and result["counts"]["rows"] == 1


def test_a_line_without_end_is_a_bad_row_and_costs_no_memory(script, tmp_path):
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b" * 5000}).encode() + b'\n{"prompt": "')
        file.seek(2 * 2**30)  # a hole, which takes no room on the disk
        file.write(b'"}\n{"prompt": "c", "completion": "d"}\n')
    done = script(PREP, "check", tmp_path / "rows.jsonl", "--json", preexec_fn=limit_memory)
    result = json.loads(done.stdout)
    assert done.returncode == 3 and found(result).keys() == {"line_too_long"} and result["counts"]["rows"] == 3


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))


# ---- exit codes


def test_wrong_usage_is_exit_2(script, tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk("a", "b")])
    for arguments in (["chek"], ["check", ""], ["check", data, "--output", data, "--overwrite"],
                      ["report", data, "--output", "a.txt"], ["report", data, "--output", "/proc/x.html"],
                      ["fix", data, "--output", data / "x.jsonl"], ["split", data, "--test-size", "0"],
                      ["check", data, "--task", "x"], ["fix", data], ["convert", data, "--to", "x"],
                      ["convert", data, "--output", "a.txt"], ["fix", data, "--output", data],
                      ["split", data, "--test-size", "2"]):  # fmt: skip
        done = script(PREP, *arguments)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") <= 2, done.stderr
    assert data.read_text() == json.dumps(talk("a", "b")) + "\n"


def test_an_unfit_environment_is_exit_4(script, tmp_path):
    (tmp_path / "rensa.py").write_text("raise ModuleNotFoundError(\"No module named 'rensa'\")")
    done = script(PREP, "check", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 4 and "No module named 'rensa'" in done.stderr and "requirements.txt" in done.stderr


@pytest.mark.parametrize("command", [["convert", "--to", "messages"], ["fix"], ["check"]])
def test_a_full_disk_is_exit_4_and_leaves_nothing(script, tmp_path, command):
    rows = [talk(text, "") for text in texts(2000, words=30)]
    data = write(tmp_path / "rows.jsonl", rows)
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))}
    done = script(PREP, command[0], data, *command[1:], "--output", tmp_path / "out" / "new.jsonl", **small)
    assert done.returncode == 4 and "no room left" in done.stderr, done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rows.jsonl"]


def test_a_model_or_data_set_that_cannot_be_loaded_is_exit_5(script, tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk("a", "b")])
    assert script(PREP, "check", data, "--model", "no/such-model").returncode == 5
    assert script(PREP, "check", "no/such-data-set").returncode == 5


def test_too_little_memory_is_exit_6(script, tmp_path):
    (tmp_path / "rows.json").write_text("[" + ",".join(['{"prompt": "a", "completion": "b"}'] * 4_000_000) + "]")
    done = script(PREP, "check", tmp_path / "rows.json", preexec_fn=limit_memory)
    assert done.returncode == 6 and "out of memory" in done.stderr, done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [["fix"], ["convert", "--to", "messages"], ["check"]])
def test_an_interruption_leaves_nothing_half_written(tmp_path, command, number, code):
    line = json.dumps(talk("question " * 30, "")) + "\n"
    (tmp_path / "rows.jsonl").write_text(line * 150_000)
    out = tmp_path / "out" / "new.jsonl"
    arguments = [
        sys.executable,
        str(ASSETS / PREP),
        command[0],
        str(tmp_path / "rows.jsonl"),
        *command[1:],
        "--output",
        out,
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob(".*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code and stdout == "" and "Traceback" not in stderr, stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_signal_to_all_processes_ends_them_all(tmp_path):
    """As `timeout` and batch systems send it."""
    import psutil

    line = json.dumps(talk("question " * 30, "")) + "\n"
    (tmp_path / "rows.jsonl").write_text(line * 150_000)
    for wait in (0.9, 1.3, 1.7):
        out = tmp_path / f"{wait}" / "new.jsonl"
        command = [
            sys.executable,
            str(ASSETS / PREP),
            "fix",
            tmp_path / "rows.jsonl",
            "--output",
            out,
            "--num-workers",
            "2",
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(wait)
        children = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) in (143, -signal.SIGTERM)  # before the handler stands, Python just ends
        assert not psutil.wait_procs(children, timeout=10)[1] and not list(out.parent.glob("*"))


def test_a_reader_that_goes_away_and_closed_streams_are_no_fault(tmp_path):
    command = f"{sys.executable} {ASSETS / PREP} check"
    for tail, code in (("| true; exit ${PIPESTATUS[0]}", 0), ("2>&-", 0), (">/dev/full", 4)):
        done = subprocess.run(["bash", "-c", f"{command} {tail}"], capture_output=True, text=True)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_names_that_are_no_regular_files_are_passed_over(check, tmp_path, script):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "rows.jsonl", plain(3))
    assert check(tmp_path / "*.jsonl")[1]["counts"]["rows"] == 3
    assert script(PREP, "check", "org/name:test[:10]").returncode == 5


def test_rows_of_files_of_one_name_are_told_apart(check, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "rows.jsonl", [*plain(3, seed=ord(folder)), talk("x", "")])
    _, result = check(tmp_path / "a", tmp_path / "b")
    assert found(result)["empty_answer"]["rows"] == [f"{tmp_path}/{folder}/rows.jsonl:4" for folder in "ab"]


# ---- the other commands


def test_convert_and_check_a_table(script, check, tmp_path):
    table = "question,answer,id\n" + "".join(f"What is {n} + {n}?,It is {2 * n}.,{n}\n" for n in range(20))
    (tmp_path / "table.csv").write_text(table)
    done = script(PREP, "convert", "table.csv", "--to", "messages", "--output", "rows.jsonl", cwd=tmp_path)
    assert (
        done.returncode == 0
        and "user=question, assistant=answer" in done.stdout
        and "not carried over: id" in done.stdout
    )
    code, result = check(tmp_path / "rows.jsonl", "--model", "demo")
    assert code == 0 and result["counts"]["trained_rows"] == 20


def test_split_by_the_script(script, tmp_path):
    write(tmp_path / "rows.jsonl", [talk(text, "ok") for text in texts(40)])
    done = script(PREP, "split", "rows.jsonl", "--test-size", "0.25", "--seed", "7", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["rows"] == {"train": 30, "test": 10}
    assert (tmp_path / "rows.test.jsonl").read_text().count("\n") == 10


@pytest.mark.parametrize("model", [(), ("--model", "demo")])
def test_the_report_is_one_page(script, tmp_path, model):
    done = script(PREP, "report", SAMPLES / "train.jsonl", "--output", tmp_path / "page.html", *model)
    assert done.returncode == 0 and done.stdout.startswith("READY"), done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "<script" not in page and "capital of Italy" in page
    assert script(PREP, "report", SAMPLES / "train.jsonl", "--output", tmp_path / "page.html").returncode == 2


def test_the_report_of_bad_data_is_written_all_the_same(script, tmp_path):
    write(tmp_path / "rows.jsonl", BAD.values())
    done = script(PREP, "report", "rows.jsonl", "--output", "page.html", "--model", "demo", cwd=tmp_path)
    assert done.returncode == 0 and "INVALID" in done.stdout and "unknown_role" in (tmp_path / "page.html").read_text()


def test_media_of_all_kinds_are_counted(check, tmp_path):
    Image.new("RGB", (40, 400), "red").save(tmp_path / "thin.png")
    soundfile.write(tmp_path / "loud.wav", np.random.default_rng(0).normal(0, 0.1, (44_100, 2)), 44_100)
    soundfile.write(tmp_path / "long.wav", np.random.default_rng(0).normal(0, 0.1, 16_000 * 31), 16_000)
    files = ("thin.png", "loud.wav", "long.wav", "none.wav", "thin.png")
    rows = [{"prompt": f"{n} {file}?", "completion": "x", "image" if "png" in file else "audio": file}
            for n, file in enumerate(files)]  # fmt: skip
    _, result = check(write(tmp_path / "rows.jsonl", rows), "--max-bad-media", "0.5")
    assert found(result).keys() == {"image_thin", "audio_resampled", "audio_channels", "audio_long", "media_missing",
                                    "media_placed_first"}  # fmt: skip
    assert {kind: result["counts"][kind] for kind in ("image", "audio", "bad_media")} == {
        "image": 2,
        "audio": 3,
        "bad_media": 1,
    }


def test_the_findings_are_listed_in_the_reference():
    page = (ROOT / "skills/gemma-trainer/references/data.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.M)
    severities = {"share": "share", "error": "error", "warning": "warning", "info": "info"}
    assert listed == [(code, severities[kind.severity]) for code, kind in KINDS.items()]
