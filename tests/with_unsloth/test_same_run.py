"""A run through Unsloth is the run of the plain backend: the same rows, labels, losses and adapters."""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from stacks import Runs, assert_same, curve

from conftest import ASSETS, SAMPLES

ROWS = ("--model", "demo", "--dataset", str(SAMPLES / "train.jsonl"))
TEN = (*ROWS, "--max-steps", "10", "--save-steps", "100", "--batch-size", "8", "--grad-accum", "1")
TOWERS = (*ROWS, "--max-steps", "10", "--save-steps", "100", "--batch-size", "4", "--grad-accum", "2")
TOWERS += ("--lora-targets", "language,vision,audio", "--gradient-checkpointing", "on", "--save-first-batch")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


def assert_same_adapter(folder, folder2):
    """The same tensors; what PEFT saves of them is the same, too."""
    one, other = (load_file(place / "adapter_model.safetensors") for place in (folder, folder2))
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in other.items()}
    configs = [json.loads((place / "adapter_config.json").read_text()) for place in (folder, folder2)]
    for name in ("r", "lora_alpha", "target_modules", "task_type", "modules_to_save", "target_parameters"):
        shown = [sorted(config[name]) if isinstance(config[name], list) else config[name] for config in configs]
        assert shown[0] == shown[1] or not any(shown), name


def test_mixed_media_on_the_cpu_backend_are_the_same_run_and_not_accelerated(run):
    held_out = ("--eval-dataset", str(SAMPLES / "heldout.jsonl"), "--eval-steps", "10")
    plain, unsloth = (run(stack, "sft_train.py", *TEN, *held_out) for stack in ("hf", "cpu"))
    assert_same(plain, unsloth)
    assert_same_adapter(plain[1], unsloth[1])
    assert plain[0]["backend"]["name"] == "hf" and plain[0]["backend"]["audit"]["verdict"] == "NOT"
    assert unsloth[0]["backend"]["audit"]["verdict"] == "NOT"
    assert "cpu backend" in unsloth[0]["backend"]["audit"]["reasons"][0]


def test_all_towers_with_checkpointing_and_accumulation_on_the_gpu_stack(run):
    plain, unsloth = run("hf", "sft_train.py", *TOWERS), run("gpu", "sft_train.py", *TOWERS)
    assert_same(plain, unsloth)
    assert_same_adapter(plain[1], unsloth[1])
    audit = unsloth[0]["backend"]["audit"]
    assert audit["verdict"] == "PARTLY" and audit["reasons"] == ["UNSLOTH_COMPILE_DISABLE=1 leaves code uncompiled"]
    assert audit["trainer"] == {"loop": "_fast_inner_training_loop", "module": "UnslothSFTTrainer", "of_unsloth": True}
    assert audit["adapters"]["of_unsloth"] == audit["adapters"]["all"] == 60
    assert audit["model"]["of_unsloth"] > audit["model"]["all"] / 2
    weights = load_file(unsloth[1] / "adapter_model.safetensors")
    for tower in ("vision_tower", "audio_tower", "language_model"):
        assert all(t.any() for name, t in weights.items() if tower in name and "lora_B" in name), tower


def test_an_adapter_goes_on_training_through_prompts_and_a_kill_on_the_gpu_stack(run, tmp_path):
    """Asking changes no loss, and neither does going on from the third step."""
    adapter = str(run("hf", "sft_train.py", *TEN)[1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is the capital of Italy?", "completion": "Rome."}) + "\n")
    more = (*ROWS, "--adapter", adapter, "--gradient-checkpointing", "on", "--max-steps", "6")
    plain = run("hf", "sft_train.py", *more)
    asking = (*more, "--eval-prompts", str(prompts), "--eval-prompts-every", "2", "--save-steps", "3")
    asked = run("gpu", "sft_train.py", *asking)
    assert_same(plain, asked)
    assert "gen/pass_rate" in asked[0]["metrics"]
    killed = tmp_path / "killed"
    shutil.copytree(asked[1], killed)
    shutil.rmtree(killed / "checkpoint-6")
    (killed / "run.json").write_text(json.dumps(asked[0] | {"status": "running", "reported": False, "steps": 3}))
    assert run("gpu", "sft_train.py", *asking, "--resume", output=killed)[0]["steps"] == 6
    assert curve(killed, "loss") == [pytest.approx(step, abs=1e-6) for step in curve(asked[1], "loss")]


def test_what_was_trained_loads_in_plain_transformers(run):
    """Base, template, keys, shapes: by building the adapter on the base without Unsloth."""
    _, folder = run("gpu", "sft_train.py", *TOWERS)
    done = subprocess.run([sys.executable, str(ASSETS / "inspect_run.py"), str(folder), "--json"], capture_output=True)
    found = json.loads(done.stdout)
    assert found["sound"] and {check["check"]: check["passed"] for check in found["checks"]}["keys"] is True


def test_verify_finds_no_difference_and_the_adapter_gives_the_same_without_unsloth(run, tmp_path):
    arms = [str(run(stack, "sft_train.py", *TOWERS)[1]) for stack in ("hf", "gpu")]
    command = [sys.executable, str(ASSETS / "verify.py"), "--baseline", arms[0], "--against", arms[1]]
    done = subprocess.run([*command, "--output", str(tmp_path / "v"), "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["verdict"] == "SAME", found["reasons"]
    assert found["labels"]["same"] and found["curves"]["loss"]["max_absolute"] < 1e-4
    assert all(loop["passed"] and loop["answers"] == 4 for loop in found["closed_loop"].values())
