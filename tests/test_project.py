"""The repository keeps its own promises: light start-up, headers in step, constraints that pin what is needed."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from conftest import ASSETS, ROOT

SCRIPTS = sorted(path.name for path in ASSETS.glob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "datasets",
    "librosa",
    "PIL",
    "unsloth",
    "peft",
    "numpy",
    "soundfile",
    "accelerate",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_header_is_in_step_with_pyproject(name):
    header = re.search(r"^# /// script\n(.*?)^# ///$", (ASSETS / name).read_text(), re.M | re.S)[1]
    found = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))
    assert found == {"requires-python": PROJECT["requires-python"], "dependencies": PROJECT["dependencies"]}


COMMANDS = {
    "sft_train.py": (["--help"], ["--no-such-flag"], ["--model", "demo", "--dataset", "absent.jsonl"]),
    "dpo_train.py": (["--help"], ["--loss-weights"], ["--model", "demo", "--dataset", "absent.jsonl"]),
    "reward_train.py": (["--help"], ["--adapter", "run"], ["--model", "demo", "--dataset", "absent.jsonl"]),
    "reward_score.py": (["--help"], [], ["--model", "run", "--dataset", "absent.jsonl"]),
    "inspect_run.py": (["--help"], [], ["absent"]),
    "doctor.py": (["--help"], ["--no-such-flag"], ["--config", "absent.json"]),
    "verify.py": (["--help"], ["--no-such-flag"], ["--against", "hf", "--dataset", "absent.jsonl"]),
    "evaluate.py": (["--help"], [], ["--model", "run", "--dataset", "absent.jsonl"]),
    "distill_dataset.py": (
        ["answers", "--help"],
        ["instruct", "--no-such-flag"],
        ["answers", "absent.jsonl", "--teacher", "demo"],
    ),
    "export.py": (["--help"], ["check", "--no-such-flag"], ["check", "absent"]),
    "dataset_prep.py": (["--help"], ["split", "--no-such-flag"], ["check", "absent.jsonl"]),
}


@pytest.mark.parametrize("code", [0, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_wrong_flags_and_missing_files_answer_without_heavy_imports(name, code):
    arguments = COMMANDS[name][{0: 0, 2: 1, 3: 2}[code]]
    watch = f"""
import sys, runpy
sys.argv = ['{name}', *{arguments!r}]
try:
    runpy.run_path({str(ASSETS / name)!r}, run_name='__main__')
finally:
    print('loaded:', sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True)
    assert "loaded: []" in done.stderr and "Traceback" not in done.stderr, done.stderr
    other = {"inspect_run.py": 5, "export.py": 5, "doctor.py": 2}  # no run there; no such file
    assert done.returncode == (other.get(name, code) if code == 3 else code)


FLAGS = """
model dataset eval-dataset test-size output overwrite max-len epochs max-steps batch-size grad-accum lr lora-r
lora-alpha lora-dropout lora-targets full quantize precision backend seed resume report-to config dry-run json loss-on
train-reasoning no-train-reasoning thinking on-bad-media max-bad-media truncation placeholders"""


@pytest.mark.parametrize("name", ["sft_train.py", "dpo_train.py", "reward_train.py"])
def test_help_tells_flags_defaults_examples_and_exit_codes(name):
    command = [sys.executable, str(ASSETS / name), "--help"]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True).stdout.split())
    for words in ("--max-len", "default: 2048", "examples:", "exit codes:", "130 interrupted", "when memory runs out"):
        assert words in shown
    assert all(re.search(rf"--{flag}[ ,]", shown) for flag in FLAGS.split())


def test_modules_import_only_from_below():
    ladder = """errors ranks files flags cli checkpoints goals families text_rows slots stores rows preferences
    media media_headers media_files words rendering labels stats batch features gaps items pairs collator
    batching precision losses reward_model auto_class models parts sources targets answer_checks metrics
    significance generation eval_prompts demo writing folders columns archives shards streams scan convert meter
    fsdp divergence saving arguments callbacks trainers first_batch preference_trainers previews watching page
    report dataset_report findings duplicates inspection checks tokens tally ray_scan examples packages backends
    runs model_card metadata inference likelihood data preparation unsloth_backend audit collected extensions
    recipe audited run_check outcome scoring scorer json_answers replies asked overlaps pacing chat_apis
    refusals server teachers journal answer_filters judging self_instruct distilled distill_inputs distilling
    survey verdict fixes splits arms comparison comparison_page reload verification hub machine ledger rehearsal
    forecast heaviest planning artefacts tensors merging asking layer_check merge_check merger export_check gguf_files
    llama_cpp gguf_check ollama serving publishing evaluation_book evaluation_rows few_shots evaluation_work
    evaluation_figures evaluation_table evaluation evaluation_result""".split()
    modules = {path.stem for path in (ASSETS / "gemma_trainer").glob("*.py")} - {"__init__"}
    assert modules == set(ladder)
    for name in ladder:
        tree = ast.parse((ASSETS / "gemma_trainer" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for used in [node.module] if node.module else [alias.name for alias in node.names]:
                    assert ladder.index(used.split(".")[0]) < ladder.index(name), f"{name} imports {used}"


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt"])
def test_constraints_pin_every_direct_dependency(name):
    pinned = {line.split("==")[0].lower() for line in (ROOT / name).read_text().splitlines() if "==" in line}
    wanted = [
        re.match(r"[\w-]+", spec)[0] for spec in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
    ]
    assert not [package for package in wanted if package not in pinned]


def test_the_samples_are_what_their_script_makes(tmp_path):
    subprocess.run([sys.executable, str(ASSETS / "samples" / "make_samples.py"), str(tmp_path)], check=True)
    for file in ("train.jsonl", "heldout.jsonl", "preferences.jsonl", "preferences-heldout.jsonl"):
        assert (tmp_path / file).read_text() == (ASSETS / "samples" / file).read_text()
    made = {path.name for folder in ("images", "audio") for path in (tmp_path / folder).iterdir()}
    kept = {path.name for folder in ("images", "audio") for path in (ASSETS / "samples" / folder).iterdir()}
    assert made == kept
    folders = [ASSETS / "samples", *(ASSETS / "samples" / name for name in ("images", "audio"))]
    total = sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.is_file())
    assert total < 700_000
