"""verify.py: what is the same is told to be, and what is not is found where it begins."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import verify

from conftest import ASSETS, SAMPLES
from gemma_trainer import arms, cli, comparison, comparison_page, reload, sources, verification
from gemma_trainer.arms import ArmFailed
from gemma_trainer.comparison import CURVES, Tolerance, compare_batches, compare_curves, judge
from gemma_trainer.errors import UsageError

STEPS = 6
NOT_A_CURVE = {"first_divergence": None, "max_relative": 0.0, "at_step": 1, "tolerance": 0.01}


def verified(*flags) -> dict:
    return verify.main(cli.parse(verify.Config, "", "", list(map(str, flags))))


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """hf against hf: the result, stderr, the folder."""
    folder = tmp_path_factory.mktemp("verify") / "same"
    command = [sys.executable, str(ASSETS / "verify.py"), "--against", "hf", "--steps", str(STEPS), "--repeats", "1"]
    done = subprocess.run([*command, "--output", str(folder), "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr, folder


# ---- whole comparisons


def test_the_same_stack_twice_is_the_same(same):
    result, told, folder = same
    assert (result["verdict"], result["reasons"], result["demo"]) == ("SAME", [], True)
    assert told.splitlines()[0].startswith("No --dataset given: running the built-in demo")
    assert all(smoke["passed"] and smoke["looked_at"] == 72 for smoke in result["smoke"].values())
    for name in ("loss", "grad_norm"):
        found = result["curves"][name]
        assert (found["max_relative"], found["max_absolute"], found["first_divergence"]) == (0, 0, None)
    assert result["labels"]["same"] and result["labels"]["trained_tokens"] == [52, 52]
    assert result["speed"]["pairs"] == result["memory"]["pairs"] == 1 and result["memory"]["ratio"] > 0.5
    for loop in result["closed_loop"].values():
        assert loop["passed"] and loop["positions"] == 52 and loop["answers"] == 4
    assert json.loads((folder / "verify.json").read_text())["verdict"] == "SAME"
    page = (folder / "verify.html").read_text()
    assert page.count('<path class="baseline"') == page.count('<path class="against"') == 2 and "://" not in page
    assert not list(folder.rglob("checkpoint-*"))


def test_another_seed_has_other_rows_and_other_curves(same, script, tmp_path):
    """The second run also keeps no first batch: what its record says of it is enough to compare it."""
    flags = ["--dataset", SAMPLES / "train.jsonl", "--model", "demo", "--batch-size", 8, "--grad-accum", 1]
    flags += ["--max-steps", STEPS, "--seed", 1, "--output", tmp_path / "seed"]
    assert script("sft_train.py", *flags).returncode == 0
    assert not (tmp_path / "seed" / "first_batch.json").exists()
    kept = json.loads((tmp_path / "seed" / "run.json").read_text())["first_batch"]
    assert len(kept["rows"]) == 8 and kept["trained_tokens"] > 0 and len(kept["hash"]) == 16
    result = verified("--baseline", same[2] / "baseline-1", "--against", tmp_path / "seed", "--output", tmp_path / "v")
    assert (result["verdict"], result["exit_code"]) in (("DIFFERENT", 8), ("WORSE", 8))
    assert any(reason.startswith("rows: the first batch holds other rows") for reason in result["reasons"])
    # Each epoch begins with its longest rows, and an adapter with updates of zero: the first loss is that of the base.
    curves = result["curves"]
    assert (curves["grad_norm"]["first_divergence"], curves["loss"]["first_divergence"]) == (1, 2)
    assert result["closed_loop"]["baseline"]["passed"] and result["closed_loop"]["against"] is None
    assert "not judged" in result["summary"] and not result["alternated"]


def test_an_optimizer_that_goes_wrong_at_its_second_step_shows_at_the_third(same, tmp_path):
    place = tmp_path / "patch"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import torch\n"
        "plain, calls = torch.optim.AdamW.step, [0]\n"
        "def step(self, *args, **kwargs):\n"
        "    calls[0] += 1\n"
        "    for group in self.param_groups:\n"
        "        group['lr'] *= 2 if calls[0] == 2 else 1\n"
        "    return plain(self, *args, **kwargs)\n"
        "torch.optim.AdamW.step = step\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(place))} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    flags = ["--baseline", same[2] / "baseline-1", "--python", python, "--repeats", 1]
    flags += ["--output", tmp_path / "v"]
    result = verified(*flags)
    assert result["exit_code"] == 8 and result["verdict"] in ("DIFFERENT", "WORSE")
    assert result["arms"]["against"] == {"arm": "hf", "python": str(python)}
    assert result["labels"]["same"]
    for name in ("loss", "grad_norm"):
        assert result["curves"][name]["first_divergence"] == 3
    assert any("loss: beyond tolerance from step 3" in reason for reason in result["reasons"])
    assert result["closed_loop"]["against"]["passed"]  # it is saved as it was trained


def test_a_model_that_is_saved_otherwise_than_it_was_trained_is_found(same, tmp_path):
    from safetensors.torch import load_file, save_file

    run = shutil.copytree(same[2] / "baseline-1", tmp_path / "run")
    weights = load_file(run / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    save_file(weights | {name: 1.5 * weights[name]}, run / "adapter_model.safetensors", {"format": "pt"})
    tampered, absent = reload.main([str(run), str(tmp_path / "absent")])
    verdict = comparison.reload_verdict(tampered, "float32")
    assert not verdict["passed"] and verdict["max_difference"] > verdict["tolerance"] and verdict["hash_same"]
    assert not comparison.reload_verdict(absent, "float32")["passed"] and "cannot be loaded" in absent["error"]


@pytest.mark.skipif(find_spec("unsloth") is not None, reason="Unsloth is installed")
def test_without_unsloth_the_exit_code_is_4_and_one_line_says_why(same, script, tmp_path):
    done = script("verify.py", "--baseline", same[2] / "baseline-1", "--output", tmp_path / "v", "--json")
    assert done.returncode == 4 and json.loads(done.stdout)["error"]["kind"] == "environment"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "Unsloth is not installed" in errors[0] and "Traceback" not in done.stderr


def test_a_failing_arm_is_worse_and_a_failing_baseline_passes_its_error_on(same, tmp_path):
    broken = tmp_path / "python"
    python = f'if [ "$1" = -c ]; then exec {shlex.quote(sys.executable)} "$@"; fi'
    broken.write_text(f"#!/bin/sh\n{python}\necho 'this one is broken' >&2\nexit 6\n")
    broken.chmod(0o755)
    result = verified("--baseline", same[2] / "baseline-1", "--python", broken, "--output", tmp_path / "v")
    assert (result["verdict"], result["exit_code"]) == ("WORSE", 8) and "exit code 6" in result["reasons"][0]
    assert "this one is broken" in (tmp_path / "v" / "against.log").read_text()
    assert "WORSE" in (tmp_path / "v" / "verify.html").read_text()
    (tmp_path / "rows.jsonl").write_text("this is no JSON\n")
    with pytest.raises(ArmFailed) as failed:
        verified("--against", "hf", "--dataset", tmp_path / "rows.jsonl", "--output", tmp_path / "w")
    assert failed.value.exit_code == 3 and "rows.jsonl" in str(failed.value)


def test_terminated_it_leaves_no_process_behind(tmp_path):
    command = [sys.executable, str(ASSETS / "verify.py"), "--against", "hf", "--output", str(tmp_path / "v")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children, deadline = [], time.monotonic() + 60
    while not children and time.monotonic() < deadline:
        time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)


# ---- flags


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--baseline", "nothing-of-the-kind"], "neither hf, unsloth nor the folder of a finished run"),
        (["--python", "/no/such/python"], "no such program"),
        (["--python", "/bin/true"], "this is no Python 3.11 or later"),
        (["--python", str(SAMPLES / "train.jsonl")], "no such program"),
        (["--against", "hf", "--steps", "2"], "--steps must be at least 3"),
        (["--against", "hf", "--repeats", "0"], "--repeats at least 1"),
    ],
)
def test_flags_that_make_no_comparison_are_refused(flags, told, tmp_path):
    with pytest.raises(UsageError, match=told):
        verified(*flags, "--output", tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_a_run_is_compared_over_all_of_its_steps_and_trained_by_nobody_else(same, tmp_path):
    run = same[2] / "baseline-1"
    with pytest.raises(UsageError, match="a run of 6 steps"):
        verified("--baseline", run, "--against", "hf", "--steps", 7, "--output", tmp_path / "v")
    with pytest.raises(UsageError, match="--python trains the --against arm"):
        verified("--against", run, "--python", sys.executable, "--output", tmp_path / "v")
    with pytest.raises(UsageError, match="--overwrite would remove a run"):
        verified("--baseline", run, "--against", "hf", "--output", same[2], "--overwrite")
    with pytest.raises(UsageError, match="holds a comparison already"):
        verified("--against", "hf", "--output", same[2])


def test_the_other_arm_takes_the_arguments_of_the_run(same):
    config = cli.parse(verify.Config, "", "", ["--baseline", str(same[2] / "baseline-1"), "--seed", "5"])
    record = json.loads((same[2] / "baseline-1" / "run.json").read_text())
    arguments = verification._arguments(config, record)
    assert arguments["dataset"] == [str(SAMPLES / "train.jsonl")] and arguments["batch_size"] == 8
    assert arguments["seed"] == 5 and not {"output", "max_steps", "backend", "json"} & arguments.keys()


@pytest.fixture
def record(tmp_path):
    """The folder of a run that was trained on `rows.jsonl`, as seen from the folder `tmp_path / "there"`."""
    there = tmp_path / "there"
    (there / "gemma").mkdir(parents=True)
    (there / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    held = {"script": "sft_train", "status": "done", "steps": 3, "total_steps": 3, "versions": {}}
    held |= {"directory": str(there), "precision": "float32 on cpu", "quantization": "none"}
    held["arguments"] = {"model": "./gemma", "dataset": ["rows.jsonl", "org/name:train"], "eval_dataset": ["*.jsonl"]}
    fingerprint = sources.fingerprint([str(there / "rows.jsonl"), "org/name:train"], 1)
    held["data"] = {"sources": ["rows.jsonl"], "rows": 1, "fingerprint": fingerprint}
    (there / "run").mkdir()
    (there / "run" / "run.json").write_text(json.dumps(held))
    return there / "run"


def test_the_files_of_a_run_are_those_of_the_folder_it_was_trained_in(record, monkeypatch, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.jsonl").write_text('{"prompt": "another", "completion": "one"}\n')
    monkeypatch.chdir(elsewhere)
    found = arms.arm_of("baseline", str(record)).record
    there = record.parent
    assert arms.located(found)["dataset"] == [str(there / "rows.jsonl"), "org/name:train"]
    assert arms.located(found)["model"] == str(there / "gemma")
    assert arms.located(found)["eval_dataset"] == [str(there / "*.jsonl")]
    (there / "rows.jsonl").write_text('{"prompt": "a", "completion": "c, which is not b"}\n')
    with pytest.raises(UsageError, match="have changed since"):
        arms.arm_of("baseline", str(record))


@pytest.mark.parametrize("lost", ["arguments", "data", "precision", "versions"])
def test_a_record_that_lacks_something_is_refused_before_anything_is_loaded(record, lost):
    held = json.loads((record / "run.json").read_text())
    del held[lost]
    (record / "run.json").write_text(json.dumps(held))
    with pytest.raises(UsageError, match=f"it lacks {lost}"):
        arms.arm_of("against", str(record))


@pytest.mark.parametrize("damage", ["{", "[1]", '{"rows": ["a"], "input_ids": [[1, 2]], "labels": [[1]]}'])
def test_a_damaged_first_batch_is_told(record, damage):
    known = {"rows": ["a"], "hash": "x", "trained_tokens": 1}
    (record / "first_batch.json").write_text(damage)
    with pytest.raises(UsageError, match="is damaged"):
        verification._first_batch({"first_batch": known}, record)
    (record / "first_batch.json").unlink()
    assert verification._first_batch({"first_batch": known}, record) == known
    assert verification._first_batch({}, record) == {}


def test_a_loop_that_compares_nothing_does_not_pass(same, tmp_path):
    run = shutil.copytree(same[2] / "baseline-1", tmp_path / "run")
    held = json.loads((run / "first_batch.json").read_text())
    held["log_probs"] = [[] for _ in held["log_probs"]]
    (run / "first_batch.json").write_text(json.dumps(held))
    assert "error" in reload.main([str(run)])[0]


# ---- curves


def curve(*values, first=1):
    return dict(enumerate(values, first))


def test_the_tolerance_grows_with_the_steps_up_to_its_limit():
    tolerance = Tolerance(1e-5, 1e-5, 1e-3)
    assert math.isclose(tolerance.at(1), 1e-5) and math.isclose(tolerance.at(10), 1e-4)
    assert tolerance.at(10**6) == 1e-3
    assert Tolerance(1e-5, 0, 1e-5, noise=0.01).at(1) == pytest.approx(0.03)


@pytest.mark.parametrize(("apart", "first"), [(0.0099, None), (0.0101, 2)])
def test_a_difference_counts_from_the_tolerance_on(apart, first):
    baseline = curve(2.0, 2.0, 2.0)
    against = curve(2.0, 2.0 * (1 - apart), 2.0 * (1 - apart))
    found = compare_curves(baseline, against, Tolerance(0.01, 0, 0.01))
    assert found["first_divergence"] == first and found["at_step"] == 2
    assert found["max_relative"] == pytest.approx(apart) and found["max_absolute"] == pytest.approx(2 * apart)


def test_no_number_is_no_match_and_two_of_them_are_one():
    loose = Tolerance(0.1, 0, 0.1)
    assert compare_curves(curve(1.0, math.nan), curve(1.0, 2.0), loose)["first_divergence"] == 2
    assert compare_curves(curve(1.0, 2.0), curve(math.inf, 2.0), loose)["first_divergence"] == 1
    assert compare_curves(curve(1.0, math.nan), curve(1.0, math.nan), loose)["first_divergence"] is None


def test_a_missing_step_is_a_difference():
    found = compare_curves(curve(1.0, 1.0, 1.0), curve(1.0, 1.0), Tolerance(1, 0, 1))
    assert found["first_divergence"] == found["at_step"] == 3 and found["max_relative"] == math.inf
    assert compare_curves({}, curve(1.0), Tolerance(1, 0, 1))["first_divergence"] == 1


def test_near_zero_differences_are_not_blown_up():
    loose = Tolerance(1e-3, 0, 1e-3)
    assert compare_curves(curve(1e-7), curve(2e-7), loose)["first_divergence"] is None
    assert compare_curves(curve(0.0), curve(0.0), loose)["max_relative"] == 0


def test_the_noise_is_what_repeated_runs_differ_by():
    assert comparison.noise_of([curve(1.0, 2.0)]) == 0
    assert comparison.noise_of([curve(1.0, 2.0), curve(1.0, 1.9)]) == pytest.approx(0.05)
    assert comparison.noise_of([curve(1.0), curve(math.nan)]) == 0


def test_the_coarser_precision_counts():
    assert comparison.coarser("float32", "bfloat16") == "bfloat16" and comparison.coarser("float32") == "float32"
    assert all(CURVES[name][0].at(1) < CURVES[name][1].at(1) for name in CURVES)


# ---- first batches


def batch(rows=("a:1", "a:2"), ids=((2, 5, 6), (2, 7, 0)), labels=((-100, 5, 6), (-100, 7, -100)), hash="x"):
    held = {"rows": list(rows), "input_ids": [list(i) for i in ids], "labels": [list(label) for label in labels]}
    return held | {"hash": hash, "trained_tokens": sum(label >= 0 for line in labels for label in line)}


def test_labels_are_compared_token_for_token():
    assert compare_batches(batch(), batch())["same"]
    found = compare_batches(batch(), batch(labels=((-100, 5, 6), (-100, -100, -100)), hash="y"))
    assert not found["same"] and found["rows_same"] and found["trained_tokens"] == [3, 2]
    assert (found["first"]["row"], found["first"]["position"]) == ("a:2", 1)
    assert found["first"]["labels"] == [[-100, 7, -100], [-100, -100, -100]]
    longer = compare_batches(
        batch(), batch(ids=((2, 5, 6, 0), (2, 7, 0)), labels=((-100, 5, 6, -100), (-100, 7, -100)))
    )
    assert longer["first"]["position"] == 3
    assert not compare_batches(batch(), batch(rows=("a:2", "a:1")))["rows_same"]


def test_without_tokens_the_hash_decides_and_without_that_nobody_knows():
    short = {name: value for name, value in batch().items() if name not in ("labels", "input_ids")}
    assert compare_batches(short, batch())["same"] and compare_batches(short, batch(hash="y"))["same"] is False
    assert compare_batches({}, batch())["same"] is None


# ---- speed, memory, verdict


def test_the_first_steps_say_nothing_of_speed():
    logged = [{"tokens_per_second": speed} for speed in [1, 1, 1, 1, 1, 100, 110, 120, 130, 140]]
    assert comparison.tokens_per_second(logged) == 120
    assert comparison.tokens_per_second(logged[5:7]) == 110 and comparison.tokens_per_second([]) is None


def test_ratios_have_the_spread_of_the_pairs():
    found = comparison.ratio([100.0, 200.0], [50.0, 300.0])
    assert (found["low"], found["high"], found["pairs"]) == (0.5, 1.5, 2) and found["ratio"] == pytest.approx(175 / 150)
    assert comparison.ratio([None], [1.0]) is None


def facts(**changed) -> dict:
    passed = {"passed": True, "told": "fine"}
    loop = {"hash_same": True, "max_difference": 0.0, "mean_difference": 0.0, "answers": 4, "answers_same": 4}
    loop = comparison.reload_verdict(loop, "float32")
    even = {"ratio": 1.0, "low": 0.9, "high": 1.1, "pairs": 2}
    end = {"step": 20, "baseline": 2.0, "against": 2.0, "relative": 0.0, "tolerance": 0.01}
    return {
        "smoke": {"baseline": passed, "against": passed},
        "closed_loop": {"baseline": loop, "against": loop},
        "labels": compare_batches(batch(), batch()),
        "curves": {"loss": NOT_A_CURVE, "grad_norm": NOT_A_CURVE, "end": end},
        "speed": even,
        "memory": even,
        "alternated": True,
    } | changed


def test_verdicts():
    assert judge(facts()) == ("SAME", [])
    beyond = NOT_A_CURVE | {"first_divergence": 4}
    curves = facts()["curves"]
    assert judge(facts(curves=curves | {"grad_norm": beyond}))[0] == "DIFFERENT"
    assert judge(facts(labels=compare_batches(batch(), batch(hash="y"))))[0] == "DIFFERENT"
    higher = {"step": 20, "baseline": 2.0, "against": 2.2, "relative": 0.1, "tolerance": 0.01}
    verdict, reasons = judge(facts(curves=curves | {"loss": beyond, "end": higher}))
    assert verdict == "WORSE" and len(reasons) == 2 and reasons[0].startswith("loss: ends at 2.2")
    lower = higher | {"against": 1.8}
    assert judge(facts(curves=curves | {"loss": beyond, "end": lower}))[0] == "DIFFERENT"


def test_cost_counts_beyond_the_spread_and_where_it_was_taken_by_turns():
    slow = {"ratio": 0.5, "low": 0.4, "high": 0.7, "pairs": 2}
    assert judge(facts(speed=slow))[0] == "WORSE"
    assert judge(facts(speed=slow | {"high": 0.9}))[0] == "SAME"
    assert judge(facts(speed=slow | {"pairs": 1}))[0] == "SAME"
    assert judge(facts(speed=slow, alternated=False))[0] == "SAME"
    assert judge(facts(memory={"ratio": 1.5, "low": 1.3, "high": 1.6, "pairs": 2}))[0] == "WORSE"
    assert judge(facts(memory={"ratio": 0.5, "low": 0.4, "high": 0.6, "pairs": 2}))[0] == "SAME"


def test_a_loop_that_fails_in_one_arm_is_worse_and_in_both_it_is_no_change_but_not_fine():
    good = facts()["closed_loop"]["baseline"]
    apart = comparison.reload_verdict(good | {"max_difference": 1.0, "mean_difference": 0.5}, "float32")
    assert judge(facts(closed_loop={"baseline": good, "against": apart}))[0] == "WORSE"
    assert judge(facts(closed_loop={"baseline": apart, "against": apart}))[0] == "DIFFERENT"
    assert judge(facts(closed_loop={"baseline": good, "against": None}))[0] == "SAME"


def test_half_precision_may_change_an_answer_but_not_the_probabilities():
    found = {"hash_same": True, "max_difference": 0.3, "mean_difference": 0.01, "answers": 4, "answers_same": 3}
    assert comparison.reload_verdict(found, "bfloat16")["passed"]
    assert not comparison.reload_verdict(found | {"mean_difference": 0.1}, "bfloat16")["passed"]
    assert not comparison.reload_verdict(found | {"max_difference": 0.0, "mean_difference": 0.0}, "float32")["passed"]


def test_data_never_shows_as_markup_on_the_page(tmp_path):
    other = compare_batches(
        batch(rows=["<b>:1", "a:2"]), batch(rows=["<b>:1", "a:2"], labels=((5, 5, 6), (-100, 7, -100)))
    )
    both = {role: {"arm": "hf", "python": "python"} for role in ("baseline", "against")}
    versions = dict.fromkeys(both, {"torch": "2"})
    more = {"steps": 2, "demo": False, "arms": both, "versions": versions, "data_same": True, "report": "r"}
    curves = {name: NOT_A_CURVE | {"noise": 0.0} for name in ("loss", "grad_norm")} | {
        "precision": "float32",
        "why": "w",
    }
    even = {"baseline": 1.0, "ratio": 1.0, "low": 1.0, "high": 1.0, "pairs": 1}
    result = facts(labels=other, curves=curves, speed=even, memory=even) | more
    result |= {"verdict": "DIFFERENT", "reasons": ["labels: <b>:1 differs"]}
    logged = {role: [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}] for role in both}
    comparison_page.write_page(tmp_path / "page.html", result, logged)
    page = (tmp_path / "page.html").read_text()
    assert "<b>:1" not in page and "&lt;b&gt;:1" in page and "labels, against" in page and "5 5 6" in page
