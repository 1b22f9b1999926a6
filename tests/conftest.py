"""Tiny real models and processors, built once a run; no network, no accelerator."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait by spinning are slow where others work, too
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: a thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "skills" / "gemma-trainer" / "assets"
SAMPLES = ASSETS / "samples"
sys.path[:0] = [str(ASSETS), str(ROOT / "scripts")]

import chromium  # noqa: E402
import pytest  # noqa: E402

from gemma_trainer import demo  # noqa: E402


def pytest_make_parametrize_id(val, argname):
    """Name bytes by their argument: a float WAV holds the second it was written in, and all workers must agree."""
    return argname if isinstance(val, bytes) else None


def pytest_terminal_summary(terminalreporter):
    """Tell which label cases were not collected: those of chat templates that the installed TRL does not ship."""
    import json

    import trl.chat_template_utils as templates
    import yaml

    data = ROOT / "tests" / "data"
    cases = [json.loads(line) for line in (data / "labels.jsonl").read_text().splitlines()]
    wanted = {case["id"]: [case["template"]] for case in cases if "template" in case}
    cases = yaml.safe_load((data / "labels.yaml").read_text())
    wanted |= {case["case"]: case["templates"] for case in cases if "templates" in case}
    shipped = {name.removesuffix("_chat_template") for name in dir(templates)}
    absent = [case for case, names in wanted.items() if not any(name.partition("+")[0] in shipped for name in names)]
    if absent:
        terminalreporter.write_line(f"not collected, the installed TRL lacks their template: {'; '.join(absent)}")


# Tests that need Unsloth, and an environment of their own: make test-unsloth
collect_ignore = [] if find_spec("unsloth") else ["with_unsloth"]
# Tests that need a browser and gradio, and an environment of their own: make test-browser
if not (find_spec("playwright") and find_spec("gradio") and chromium.found()):
    collect_ignore.append("with_browser")


@pytest.fixture(scope="session")
def processor():
    return demo.make_processor()


@pytest.fixture(scope="session")
def model(processor):
    """A tiny Gemma 4 whose weights no test changes."""
    return demo.make_model(processor.tokenizer)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return demo.write_model(tmp_path_factory.mktemp("tiny") / "gemma4")


@pytest.fixture(scope="session")
def media(tmp_path_factory):
    """A folder with a clip of 3 s, one of 1 s, two pictures, and broken files."""
    import numpy as np
    import soundfile
    from PIL import Image

    folder = tmp_path_factory.mktemp("media")
    for name, seconds in (("three.wav", 3.0), ("one.wav", 1.0), ("short.flac", 0.4)):
        time = np.arange(int(seconds * 16000)) / 16000
        soundfile.write(folder / name, 0.3 * np.sin(2 * np.pi * 440 * time), 16000)
    Image.new("RGB", (96, 64), "red").save(folder / "red.png")
    Image.new("RGB", (50, 90), "blue").save(folder / "blue.jpg")
    (folder / "page.jpg").write_text("<html>404</html>")
    (folder / "text.wav").write_text("this is no audio")
    return folder


@pytest.fixture
def make_trainer(model, processor, tmp_path):
    """Makes a supervised trainer on rows, with a LoRA whose every gradient shows; its folder is `tmp_path / "run"`."""
    import copy

    import torch

    from gemma_trainer import arguments, models, precision, trainers
    from gemma_trainer.collator import MultimodalCollator

    def make(rows, eval_rows=None, targets="language", collator_options=None, extra=(), dropout=0.0,
             trainer_options=None, **options):  # fmt: skip
        torch.manual_seed(0)
        tuned = models.add_lora(copy.deepcopy(model), targets, 4, 8, dropout)
        torch.manual_seed(1)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:  # zero at the start, which would hide the gradient of lora_A
                torch.nn.init.normal_(parameter, std=0.05)
        defaults = dict(max_length=512, batch_size=2, grad_accum=1, lr=1e-3, epochs=1, max_steps=-1, steps=4, seed=0,
                        save_steps=1000, eval_steps=1000, evaluate=eval_rows is not None, workers=0, report_to=[],
                        checkpointing=False)  # fmt: skip
        args = arguments.sft_arguments(tmp_path / "run", precision.choose("fp32", "cpu"), **(defaults | options))
        args.max_grad_norm = 1e9
        collators = [MultimodalCollator(processor, 512, **(collator_options or {})) for _ in range(2)]
        trainer = trainers.GemmaSFTTrainer(
            tuned, args, rows, collators[0], processor, eval_rows, collators[1], callbacks=list(extra),
            **(trainer_options or {}),
        )  # fmt: skip
        return trainer

    return make


@pytest.fixture
def script():
    """Run a script in its own process; returns the finished process with text output."""

    def run(*arguments, env=None, timeout=300, **options):
        name, *rest = map(str, arguments)
        return subprocess.run(
            [sys.executable, str(ASSETS / name), *rest],
            env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout, **options,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def preference_runs(tmp_path_factory):
    """The demo run of dpo_train.py and of reward_train.py: the result, what it told, the folder. All processes of a
    test run share them."""
    import json

    from filelock import FileLock

    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    made = {}
    for name in ("dpo", "reward"):
        folder, told = place / f"demo-{name}" / "run", place / f"demo-{name}.json"
        with FileLock(place / f"demo-{name}.lock"):
            if not told.exists():
                command = [sys.executable, str(ASSETS / f"{name}_train.py"), "--output", str(folder), "--json"]
                done = subprocess.run([*command, "--eval-steps", "1000"], capture_output=True, text=True, timeout=600)
                assert done.returncode == 0, done.stderr[-3000:]
                told.write_text(json.dumps([json.loads(done.stdout), done.stderr]))
        made[name] = *json.loads(told.read_text()), folder
    return made


def trained_runs(tokenizer, batch, line=0):
    """The contiguous runs of trained tokens of one row, decoded."""
    runs, run = [], []
    for token, label in zip(batch["input_ids"][line].tolist(), batch["labels"][line].tolist(), strict=True):
        assert label in (-100, token)
        if label != -100:
            run.append(token)
        elif run:
            runs, run = [*runs, run], []
    return [tokenizer.decode(tokens) for tokens in [*runs, run] if tokens]


def talk(*contents, **fields):
    """A row of user and assistant messages in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)], **fields}


def ask(media_folder, *files, answer="Yes."):
    """A row with media files and a question, answered."""
    kinds = {".wav": "audio", ".flac": "audio", ".png": "image", ".jpg": "image"}
    blocks = [{"type": kinds[Path(f).suffix], kinds[Path(f).suffix]: str(media_folder / f)} for f in files]
    return talk([*blocks, {"type": "text", "text": "What is it?"}], answer)
