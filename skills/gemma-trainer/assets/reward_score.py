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
"""Score answers, or pairs of answers, with a reward model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.flags import flag

EXAMPLES = """\
  python reward_score.py --model reward1 --dataset answers.jsonl --output scores.jsonl
  python reward_score.py --model reward1 --dataset pairs.jsonl --json     # how often the chosen answer scores higher"""


@dataclass(frozen=True)
class Config:
    less_memory = "lower --batch-size, then --max-len"
    model: str | None = flag(help="run folder of reward_train.py, or a whole reward model")
    dataset: tuple[str, ...] = flag(
        (), "conversations or pairs: files, folders or globs, or hub ids (default: the bundled held-out pairs)"
    )
    output: str | None = flag(help="a .jsonl file for the score of each row")
    overwrite: bool = flag(False, "replace the file that --output names")
    max_len: int = flag(2048, "most tokens in a row, media tokens included; what is longer is cut at its end")
    batch_size: int = flag(8, "rows at a time")
    precision: str = flag("auto", "auto: bf16 where native, else fp32", ("auto", "bf16", "fp16", "fp32"))
    media_root: str | None = flag(help="refuse media files outside this folder")
    allow_remote_media: bool = flag(False, "fetch media from http(s) URLs")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


def main(config: Config) -> dict:
    from gemma_trainer import scorer

    rows = scorer.open_rows(config)
    model, collator = scorer.load(config)
    return scorer.score(config, model, collator, rows)


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
