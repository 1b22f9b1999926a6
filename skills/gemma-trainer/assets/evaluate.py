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
"""Tell whether a model is better than before: base against tuned, or two models, on held-out rows.

Answers are compared with the expected ones, pairs and choices by their log-probabilities, and the loss is taken of
trained tokens. Each figure has an interval, each difference a p, so that noise is not called progress."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.flags import InferenceFlags, flag

EXAMPLES = """\
  python evaluate.py --model run1 --dataset rows.test.jsonl --output eval1 --json
  python evaluate.py --model run2 --against run1 --dataset rows.test.jsonl        # two models, one after the other
  python evaluate.py --model run1 --dataset rows.test.jsonl --require "accuracy>=0.9" "gain/accuracy.low>0\""""

EXIT_CODES = """exit codes:
  0 done                              5 a model or hub data set cannot be loaded
  1 unexpected fault                  6 out of memory
  2 wrong usage                       8 a figure of --require is not met; all results are there
  3 bad data, or all rows failed      130 interrupted, 143 terminated: --resume goes on
  4 missing package, no disk"""


@dataclass(frozen=True)
class Compared:
    """What is compared, on which rows, and by what."""

    exit_codes = EXIT_CODES
    model: str | None = flag(help="a run's folder, an adapter, or the hub id or folder of a whole model")
    against: str | None = flag(
        help="what it is compared with (default: what its run began with, or the model without its adapter); off: "
        "no other model",
        metavar="MODEL",
    )
    dataset: tuple[str, ...] = flag(
        (), "held-out rows of any format: files, folders, globs or hub ids (default: what the run held back)"
    )
    limit: int | None = flag(help="evaluate so many rows, drawn at random", metavar="ROWS")
    few_shot: int = flag(3, "solved examples shown to the untuned model in an arm of its own; 0: no such arm")
    shots_from: str | None = flag(
        help="rows that these are taken from (default: the run's training data)", metavar="FILE"
    )
    metrics: tuple[str, ...] = flag((), "metrics by name, the first to judge by (default: auto, what suits the rows)")
    labels: tuple[str, ...] = flag((), "the labels of a classification (default: the expected answers, if few)")
    judge: str | None = flag(help="run of reward_train.py that scores the answers", metavar="MODEL")
    guard: str | None = flag(
        help="prompts whose answers should not drift from the base's, or off (default: 20 bundled ones)", metavar="FILE"
    )
    require: tuple[str, ...] = flag(
        (),
        "figures to be reached (exit 8), such as accuracy>=0.9 gain/f1.low>0 drift/kl<0.1",
        metavar="FIGURE>=NUMBER",
    )
    output: str | None = flag(help="folder for answers and evaluation.json (default: runs/evaluate-<date-time>)")
    overwrite: bool = flag(False, "replace the evaluation that --output holds")
    resume: bool = flag(False, "go on with the evaluation in --output; begin where there is none")
    seed: int = flag(0, "seed of --limit and of the examples")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class Config(InferenceFlags, Compared):
    pass


def main(config: Config) -> dict:
    from gemma_trainer import evaluation

    with contextlib.closing(evaluation.begin(config)) as work:
        evaluation.run(work)
        from gemma_trainer import evaluation_result  # which needs what takes long to import

        return evaluation_result.conclude(work)


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
