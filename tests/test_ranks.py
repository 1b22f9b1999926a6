"""Several processes over gloo: in step whatever each one's rows hold, and the same gradients as one process."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
import ranks_worker
import torch

from conftest import ASSETS, ROOT
from gemma_trainer import preparation, ranks
from gemma_trainer.errors import UsageError

ALL, LANGUAGE = "language,vision,audio", "language"
CASES = [
    ("sft", "text", LANGUAGE),
    ("sft", "image and text", LANGUAGE),
    ("sft", "image and text", ALL),
    ("sft", "audio and text", ALL),
    ("sft", "audio and image", ALL),
    ("sft", "one row for two", ALL),
    ("sft", "untrained", LANGUAGE),
    ("dpo", "image and text", ALL),
    ("dpo", "one row for two", LANGUAGE),
    ("reward", "audio and image", ALL),
    ("reward", "text and image", LANGUAGE),
]


def launch(config: str, *command, **options) -> subprocess.Popen:
    """Start two processes, in a process group of their own."""
    words = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file"]
    return subprocess.Popen(
        [*words, str(ASSETS / "accelerate" / config), *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def finish(process, timeout=240) -> tuple[str, str]:
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("the ranks wait for each other") from None


@pytest.fixture(scope="module")
def alone():
    return ranks_worker.everything(CASES)


@pytest.fixture(scope="module", params=["ddp-cpu.yaml", "fsdp2-cpu.yaml"])
def together(request, tmp_path_factory):
    """What each of two ranks finds, by case. A case that takes a minute ends its process."""
    cases = tmp_path_factory.mktemp("ranks") / "cases"
    torch.save(CASES, cases)
    process = launch(request.param, ROOT / "tests" / "ranks_worker.py", cases)
    _, told = finish(process)
    assert process.returncode == 0, told[-5000:]
    return [torch.load(f"{cases}.{rank}") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_ranks_have_the_gradients_and_losses_of_one(case, together, alone):
    wanted = alone[case]
    largest = max(grad.abs().max() for grad in wanted["grads"].values())
    for found in (one[case] for one in together):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)  # behind the step
        for name, grad in found["grads"].items():  # those of towers that had placeholders alone are 0
            expected = wanted["grads"].get(name, torch.zeros_like(grad))
            assert (grad - expected).abs().max() <= 1e-5 * max(1, largest), name
        assert wanted["grads"].keys() <= found["grads"].keys()
        for count in ("rows", "trained_tokens", "images", "clips"):
            assert found["collected"].get(count, 0) == wanted["collected"].get(count, 0)


# ---- the scripts


def rows_file(folder, rows=12):
    """Rows of which every fourth has a picture, and every fourth a clip."""
    lines = []
    for number in range(rows):
        media = [{}, {"image": ranks_worker.RED}, {}, {"audio": ranks_worker.TONE}][number % 4]
        lines.append({"prompt": f"Row {number}? " * (1 + number % 3), "completion": f"Yes, {number}.", **media})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def command(folder, *flags):
    data = ["--model", "demo", "--dataset", folder / "rows.jsonl", "--batch-size", 2, "--grad-accum", 1]
    return [ASSETS / "sft_train.py", *data, "--json", "--output", folder / "run", *flags]


def test_a_run_of_two_ranks_is_told_once_and_goes_on_in_one(tmp_path, script):
    """Every row once an epoch, figures of both ranks; resumed by one process with the same rows in a step."""
    rows_file(tmp_path)
    flags = ["--epochs", 2, "--save-steps", 2]
    process = launch("ddp-cpu.yaml", *command(tmp_path, *flags))
    out, told = finish(process)
    assert process.returncode == 0, told[-5000:]
    (result,) = map(json.loads, out.splitlines())
    assert result["steps"] == 6 and result["counters"]["rows"] == 24
    assert result["counters"]["images"] == result["counters"]["clips"] == 6
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["ranks"] == {"world": 2, "kind": "whole", "together": 4, "rows_a_step": 4}
    losses = losses_of(tmp_path)
    assert told.count("step 6/6") == 1 and len(losses) == 6

    for name in ("checkpoint-6", "adapter_model.safetensors", "report.html"):
        subprocess.run(["rm", "-r", tmp_path / "run" / name], check=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {"status": "interrupted", "reported": False}))
    done = script(*command(tmp_path, *flags, "--resume"))
    assert done.returncode == 2 and "give --batch-size 2 --grad-accum 2" in done.stderr
    done = script(*command(tmp_path, *flags, "--resume", "--batch-size", 4))
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-4)
    assert json.loads(done.stdout)["counters"]["rows"] == 24


def losses_of(folder) -> list[float]:
    entries = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if "loss" in entry]


def test_an_error_on_one_rank_ends_all_and_is_told_in_the_run(tmp_path):
    """The second rank's, which does not write otherwise."""
    rows_file(tmp_path)
    (tmp_path / "cut.png").write_bytes(b"no picture")
    bad = {"prompt": "Which?", "completion": "None.", "image": "cut.png"}
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps(bad))
    began = time.monotonic()
    process = launch("ddp-cpu.yaml", *command(tmp_path, "--on-bad-media", "error", "--batch-size", 1))
    _, told = finish(process, 120)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert process.returncode == 1 and time.monotonic() - began < 90
    assert "rows.jsonl:13: image cannot be read" in told and "error: rows.jsonl:13" in told
    assert record["status"] == "failed" and "rows.jsonl:13" in record["why"]


def test_a_rank_that_dies_ends_the_others_within_a_minute(tmp_path):
    rows_file(tmp_path)
    process = launch("ddp-cpu.yaml", *command(tmp_path, "--max-steps", 1000))
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    own = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(next(int(pid) for pid in own if rank_of(pid) == 1), signal.SIGKILL)
    began = time.monotonic()
    _, told = finish(process, 90)
    assert process.returncode == 1 and time.monotonic() - began < 60
    assert "SIGKILL" in told and "rank      : 1" in told.split("Root Cause")[1]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed" and "another process" in record["why"]


def test_a_signal_to_the_launcher_saves_a_checkpoint(tmp_path):
    """The launcher signals whole process groups; the workers that prepare batches must outlive it."""
    rows_file(tmp_path)
    process = launch("ddp-cpu.yaml", *command(tmp_path, "--max-steps", 1000, "--num-workers", 1))
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, told = finish(process, 90)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "interrupted" and "a checkpoint was saved" in record["why"], told[-3000:]
    assert list((tmp_path / "run").glob("checkpoint-*/files.json"))


def rank_of(pid: str) -> int | None:
    with open(f"/proc/{pid}/environ") as file:
        found = dict(entry.partition("=")[::2] for entry in file.read().split("\0"))
    return int(found["RANK"]) if "RANK" in found else None


# ---- what is decided before


def test_ranks_that_have_unequal_memory_decide_by_the_least(monkeypatch):
    from gemma_trainer import planning

    others = {"available": 2**30, "base": 2**31}
    monkeypatch.setattr(ranks, "gathered", lambda own: [own, (others["available"], others["base"])])
    found = planning.this_machine(types.SimpleNamespace(device_memory=24, precision="auto"))
    assert (found.available, found.base) == (2**30, 2**31)


def test_spread_weights_are_forecast_by_division():
    from gemma_trainer.forecast import Memory, spread

    whole = Memory(weights=1000, gradients=400, optimizer=800, activations=70, base=5)
    assert spread(whole, "whole", 4, 100, 9) == spread(whole, "fsdp", 1, 100, 9) == whole
    parted = spread(whole, "fsdp", 4, embedding=100, layers=9)
    assert (parted.gradients, parted.optimizer, parted.activations, parted.base) == (100, 200, 70, 5)
    assert parted.weights == 250 + 100 + 2 * 100


def run_before(**facts):
    return types.SimpleNamespace(folder="run", together=None, previous={"ranks": facts} if facts else {})


def config(batch_size=2, grad_accum=1, streaming=False):
    return types.SimpleNamespace(batch_size=batch_size, grad_accum=grad_accum, streaming=streaming)


@pytest.mark.parametrize(("before", "flags", "told"), [
    ({"world": 8, "rows_a_step": 64}, {"batch_size": 4}, "--batch-size 4 --grad-accum 16"),
    ({"world": 3, "rows_a_step": 9}, {"batch_size": 2}, "--batch-size 1 --grad-accum 9"),
    ({"world": 2, "rows_a_step": 4, "kind": "fsdp"}, {}, "weights kept fsdp on each process"),
    ({"world": 2, "rows_a_step": 2}, {"streaming": True}, "a stream goes on with the 2 processes"),
])  # fmt: skip
def test_runs_that_cannot_go_on_with_other_ranks_say_what_would(before, flags, told):
    before = {"kind": "whole", "together": 4} | before
    with pytest.raises(UsageError, match=told):
        preparation._check_ranks(config(**flags), run_before(**before))


def test_a_run_goes_on_with_other_ranks_where_a_step_has_the_same_rows():
    run = run_before(world=4, kind="whole", together=8, rows_a_step=16)
    preparation._check_ranks(config(batch_size=8, grad_accum=2), run)
    assert run.together == 8
    preparation._check_ranks(config(), run_before())  # of a run before ranks were recorded


def test_of_several_ranks_the_first_one_tells_and_errors_name_theirs(monkeypatch, capsys, tmp_path):
    from gemma_trainer import cli

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    cli.note("a note")
    assert capsys.readouterr().err == ""
    import sft_train

    code = cli.run_script(None, sft_train.Config, "", "", ["--no-such-flag"])
    shown = capsys.readouterr()
    assert code == 2 and shown.out == "" and shown.err.startswith(f"{ranks.name()}error: unrecognized")
    assert "unrecognized" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert cli.as_error(RuntimeError("Connection closed by peer")).args[0].startswith("another process")
