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
"""Fine-tune a Gemma on conversations with text, images and audio (supervised fine-tuning)."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.flags import CollatorFlags, PolicyFlags

EXAMPLES = """\
  python sft_train.py                                          # the built-in demo, offline, about a minute
  python sft_train.py --model google/gemma-4-E2B-it --dataset rows.jsonl --test-size 0.1 --output run1
  python sft_train.py --model ./gemma --dataset data/ --lora-targets language,vision --output run1 --resume"""


@dataclass(frozen=True)
class Config(CollatorFlags, PolicyFlags):
    pass


def main(config: Config) -> dict:
    from gemma_trainer import outcome, planning, preparation, recipe

    config, run, rows, model_config, processor, collators = preparation.prepare(config, "sft_train")
    if config.dry_run:
        return planning.plan(config, run, rows, model_config, processor, collators[0])
    if run.finished:
        return outcome.result(config, run)

    config, collators = planning.fitted(config, run, rows, model_config, processor, collators)

    def attempt(config):
        model = recipe.load_model(config, run, model_config, processor)
        trainer = recipe.make_sft_trainer(config, run, model, processor, rows, collators)
        recipe.train(config, run, trainer, rows)
        return trainer

    config, trainer = recipe.within_memory(config, run, attempt)
    return outcome.report(config, run, trainer, collators[1], rows)


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
