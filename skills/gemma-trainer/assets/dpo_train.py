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
"""Align a Gemma with preferences over text, images and audio (direct preference optimization)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.flags import CollatorFlags, PolicyFlags, flag

EXAMPLES = """\
  python dpo_train.py                                          # the built-in demo, offline, about a minute
  python dpo_train.py --adapter run1 --dataset pairs.jsonl --test-size 0.1 --output run2
  python dpo_train.py --model google/gemma-4-E2B-it --dataset pairs.jsonl --loss-type sigmoid sft --output run2"""


@dataclass(frozen=True)
class Config(CollatorFlags, PolicyFlags):
    task = "dpo"
    lr: float | None = flag(help="peak learning rate (default: LoRA 5e-6, --full 1e-6; for --model demo 5e-3, 1e-3)")
    beta: float = flag(0.1, "how closely the model is held to the reference: more is closer")
    loss_type: tuple[str, ...] = flag(
        (), "losses of TRL, such as sigmoid (the default), ipo, hinge, robust, apo_zero, sigmoid_norm, or several"
    )
    loss_weights: tuple[str, ...] = flag((), "a number for each of several losses, its weight (default: 1)")
    label_smoothing: float = flag(0.0, "share of pairs that may be the wrong way round (exo_pair and robust need it)")


def main(config: Config) -> dict:
    from gemma_trainer import outcome, planning, preparation, recipe

    config, run, rows, model_config, processor, collators = preparation.prepare(config, "dpo_train")
    if config.dry_run:
        return planning.plan(config, run, rows, model_config, processor, collators[0])
    if run.finished:
        return outcome.result(config, run)

    config, collators = planning.fitted(config, run, rows, model_config, processor, collators)

    def attempt(config):
        model = recipe.load_model(config, run, model_config, processor)
        trainer = recipe.make_dpo_trainer(config, run, model, processor, rows, collators)
        recipe.train(config, run, trainer, rows)
        return trainer

    config, trainer = recipe.within_memory(config, run, attempt)
    return outcome.report(config, run, trainer, collators[1], rows)


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
