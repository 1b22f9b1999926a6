#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "accelerate>=1.12,<2",
#     "datasets>=4.8,<6",
#     "ftfy>=6.3",
#     "gguf>=0.17",
#     "httpx>=0.27,<1",
#     "jinja2>=3.1",
#     "jiwer>=4",
#     "json-repair>=0.50",
#     "jsonschema>=4.20",
#     "librosa>=0.11",
#     "numpy>=2",
#     "packaging>=24",
#     "peft>=0.21,<1",
#     "pillow>=11",
#     "pyyaml>=6",
#     "regex>=2024.5.15",
#     "rensa>=0.5,<1",
#     "rapidfuzz>=3.9",
#     "sacrebleu>=2.5",
#     "scipy>=1.14",
#     "soundfile>=0.13",
#     "tenacity>=9",
#     "torch>=2.9",
#     "torchvision>=0.24",
#     "tqdm>=4.66",
#     "transformers>=5.17,<6",
#     "trl>=1.14.2,!=1.15.*,<2",
#     "xxhash>=3.5",
# ]
# ///
"""Tell whether a change of the training stack is safe: train with both, and compare all that matters.

Four steps: a smoke test; the loss and gradient curves and the first batch's labels of both arms, each trained in fresh
processes on the same rows in the same order; memory and speed, by turns; and the saved models, loaded by transformers
and PEFT alone. The verdict is SAME, DIFFERENT or WORSE."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.flags import flag

EXAMPLES = """\
  python verify.py --model ./gemma --dataset rows.jsonl              # Unsloth against plain transformers
  python verify.py --python ../newest/bin/python                     # new package versions against these
  python verify.py --baseline runs/before --against hf --json        # what is installed now against a run of before"""

EXIT_CODES = """exit codes:
  0 SAME                 3 bad data                     8 DIFFERENT or WORSE
  1 unexpected fault     4 a package is missing         130 interrupted, 143 terminated
  2 wrong usage          other: what the baseline's training ended with"""


@dataclass(frozen=True)
class Config:
    exit_codes = EXIT_CODES
    baseline: str = flag("hf", "hf, unsloth, or the folder of a finished run of sft_train.py", metavar="ARM")
    against: str | None = flag(help="what is compared with it (default: unsloth; hf with --python)", metavar="ARM")
    python: str | None = flag(help="train the --against arm with this interpreter", metavar="INTERPRETER")
    model: str | None = flag(help="hub id or folder of a Gemma (default: that of a run, else the demo's)")
    dataset: tuple[str, ...] = flag(
        (), "files, folders, globs or hub ids (default: those of a run, else the demo's rows)"
    )
    steps: int | None = flag(help="optimizer steps of an arm (default: as many as a run has, else 20)")
    repeats: int = flag(2, "runs of each arm, by turns; of one alone, speed and memory are told but not judged")
    seed: int | None = flag(help="seed of data order, dropout and adapters; this and what follows as in sft_train.py")
    max_len: int | None = flag(help="most tokens in a row")
    batch_size: int | None = flag(help="rows at a time")
    grad_accum: int | None = flag(help="batches to an optimizer step")
    lr: float | None = flag(help="peak learning rate")
    precision: str | None = flag(help="number format", choices=("auto", "bf16", "fp16", "fp32"))
    quantize: str | None = flag(help="4-bit weights under LoRA", choices=("auto", "4bit", "none"))
    lora_targets: str | None = flag(help="language, vision, audio, all, or a regular expression")
    output: str | None = flag(help="folder for the arms' runs, verify.json and verify.html (default: runs/verify-...)")
    overwrite: bool = flag(False, "replace the comparison that --output holds")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


def main(config: Config) -> dict:
    from gemma_trainer import verification

    work = verification.begin(config)
    told = verification.smoke(work)
    runs = verification.train(work, told)
    return verification.conclude(work, told, runs)


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
