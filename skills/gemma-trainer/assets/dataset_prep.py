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
"""Check, convert, split and mend the data that a Gemma is to be trained on. Without a command: check the samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli, sources
from gemma_trainer.flags import CollatorFlags, flag, words

EXAMPLES = """\
  python dataset_prep.py check rows.jsonl --task sft                       # form and media, without a model
  python dataset_prep.py check rows.jsonl --task sft --model google/gemma-4-E2B-it --max-len 2048 --json
  python dataset_prep.py check pairs.parquet --task dpo --model demo --output findings.jsonl
  python dataset_prep.py convert table.csv --to messages --map user=question assistant=answer --output rows.jsonl
  python dataset_prep.py convert photos/ --to messages --prompt "What is this?" --output photos/rows.jsonl
  python dataset_prep.py split rows.jsonl --test-size 0.1 --seed 7 --group-by patient
  python dataset_prep.py fix rows.jsonl --output fixed.jsonl
  python dataset_prep.py report rows.jsonl --model google/gemma-4-E2B-it --output report.html"""


@dataclass(frozen=True)
class DataFlags:
    less_memory = "lower --num-workers, or split the file"
    data: tuple[str, ...] = words("files, folders or globs (.jsonl .json .csv .parquet), or hub ids org/name[:split]")
    num_workers: int | None = flag(help="processes (default: all cores)")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class OutputFlags(DataFlags):
    output: str | None = flag(help="the file to write, .jsonl or .parquet (required)")
    overwrite: bool = flag(False, "replace what is there")
    media_root: str | None = flag(help="refuse media files outside this folder")
    allow_remote_media: bool = flag(False, "fetch media from http(s) URLs")


@dataclass(frozen=True)
class FixFlags(OutputFlags):
    output: str | None = flag(help="the .jsonl file to write (required)")
    drop: tuple[str, ...] = flag((), "leave out the rows with these findings, such as empty_answer no_answer")


@dataclass(frozen=True)
class TaskFlags(DataFlags):
    task: str = flag("sft", "what the rows are for", ("sft", "dpo", "reward"))
    model: str | None = flag(help="hub id or folder of the Gemma that will be trained, or demo; without it no tokens")
    max_len: int = flag(2048, "most tokens in a row, media tokens included")
    eval_dataset: tuple[str, ...] = flag((), "rows to evaluate on, which should share nothing with the others")
    exact: bool = flag(False, "tokenize every row; by default those that may be too long, and a random sample")
    show_text: bool = flag(False, "show the beginnings of rows that were found")
    seed: int = flag(0, "seed of the random sample")
    engine: str = flag(
        "local",
        "what looks at the rows: this machine, or a Ray cluster (RAY_ADDRESS; references/scale.md)",
        ("local", "ray"),
    )


@dataclass(frozen=True)
class SurveyFlags(CollatorFlags, TaskFlags):
    pass


@dataclass(frozen=True)
class CheckFlags(SurveyFlags):
    output: str | None = flag(help="a .jsonl file that takes every finding of every row")
    overwrite: bool = flag(False, "replace --output")


@dataclass(frozen=True)
class ReportFlags(SurveyFlags):
    output: str = flag("report.html", "the page to write")
    overwrite: bool = flag(False, "replace --output")


@dataclass(frozen=True)
class ConvertFlags(OutputFlags):
    to: str = flag("messages", "the form of the rows to write", ("messages", "prompt-completion", "preference"))
    map: tuple[str, ...] = flag(
        (),
        'which column is what, such as user="Customer Question" assistant=answer; targets: system user assistant image '
        "audio prompt completion chosen rejected margin messages tools",
    )
    keep: tuple[str, ...] = flag((), "columns to carry over as they are, such as an id (.jsonl only)")
    prompt: str | None = flag(help="the question, where a row is only a picture or clip and its text")


@dataclass(frozen=True)
class SplitFlags(OutputFlags):
    output: str | None = flag(help="the folder for the two files (default: that of the data file)")
    test_size: float = flag(0.1, "share of the rows for evaluation")
    group_by: str | None = flag(help="a field: rows with the same value stay together")
    seed: int = flag(7, "seed of the draw")


def _must_be_fit(config: TaskFlags) -> None:
    """Refuse, before anything heavy is imported, what cannot work."""
    sources.must_exist(*config.data, *config.eval_dataset)
    if config.engine == "ray":
        from gemma_trainer.ray_scan import must_be_installed

        must_be_installed()


def check(config: CheckFlags) -> dict:
    _must_be_fit(config)
    from gemma_trainer import verdict

    return verdict.check(config)


def report(config: ReportFlags) -> dict:
    _must_be_fit(config)
    from gemma_trainer import verdict

    return verdict.report(config)


def convert(config: ConvertFlags) -> dict:
    sources.must_exist(*config.data)
    from gemma_trainer import convert

    return convert.convert(config)


def split(config: SplitFlags) -> dict:
    sources.must_exist(*config.data)
    from gemma_trainer import splits

    return splits.split(config)


def fix(config: FixFlags) -> dict:
    sources.must_exist(*config.data)
    from gemma_trainer import fixes

    return fixes.fix(config)


COMMANDS = {
    "check": (
        check,
        CheckFlags,
        "Find what is wrong with a data set: READY, READY WITH WARNINGS, or INVALID (exit 3).",
    ),
    "report": (
        report,
        ReportFlags,
        "Write one page to look at: lengths, roles, media, duplicates, a few rows as trained.",
    ),
    "convert": (convert, ConvertFlags, "Turn tables, other formats and folders of media into rows; tell how."),
    "split": (split, SplitFlags, "Part rows for training and evaluation, so that nothing is on both sides."),
    "fix": (fix, FixFlags, "Mend what is safe to mend alone: None keys, roles, control text, EXIF, audio, copies."),
}

if __name__ == "__main__":
    sys.exit(cli.run_commands(COMMANDS, __doc__, EXAMPLES))
