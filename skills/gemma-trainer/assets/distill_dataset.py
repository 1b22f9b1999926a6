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
"""Make training data from a stronger model's answers: to prompts of yours, or to new ones that it writes on topics."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli, sources
from gemma_trainer.errors import DataError, UsageError
from gemma_trainer.files import user_path
from gemma_trainer.flags import InferenceFlags, flag, word, words

EXAMPLES = """\
  python distill_dataset.py answers prompts.jsonl --teacher http://localhost:8000 --dry-run
  python distill_dataset.py answers prompts.jsonl --teacher http://localhost:8000 --output rows.jsonl --resume --json
  python distill_dataset.py answers questions.txt --teacher google/gemma-4-31B-it --output rows.jsonl
  python distill_dataset.py answers photos.jsonl --teacher http://localhost:11434 --output rows.jsonl
  python distill_dataset.py answers sums.jsonl --teacher URL --samples 8 --check '{"numeric": true}' --output rows.jsonl
  python distill_dataset.py answers prompts.jsonl --teacher URL --samples 4 --judge reward1 --pairs --output pairs.jsonl
  python distill_dataset.py instruct topics.txt --teacher URL --count 500 --output rows.jsonl"""
EXIT_CODES = """exit codes:
  0 done (what was dropped is counted, and told)      4 missing package, or no room on the disk
  1 unexpected fault                                  5 teacher or model not reached, or it refuses the key
  2 wrong usage, or a file that is there already      6 out of memory
  3 bad data: no such file, or no row is left         130 interrupted, 143 terminated
  After 4, 5, 130 and 143 all answers that came are kept: the same command with --resume goes on from there."""


@dataclass(frozen=True)
class DistillFlags(InferenceFlags):
    exit_codes = EXIT_CODES

    max_len: int = flag(2048, "most tokens of a prompt, of a model in this process or of Ollama")
    max_new_tokens: int = flag(1024, "most tokens of an answer; what is cut is dropped")
    teacher: str | None = flag(help="URL of a server, or hub id or folder of a model that is loaded here (required)")
    teacher_model: str | None = flag(help="name of the model on the server (default: the only one there)")
    api: str = flag("auto", "how servers are asked; auto: Ollama's way where it answers", ("auto", "openai", "ollama"))
    api_key_env: str = flag("OPENAI_API_KEY", "environment variable with the key of the server", metavar="NAME")
    output: str | None = flag(help="the .jsonl or .parquet file to write (required)", metavar="FILE")
    overwrite: bool = flag(False, "replace --output, and throw the answers of an earlier run away")
    resume: bool = flag(False, "go on with the answers that an earlier run got; begin where there is none")
    samples: int = flag(1, "answers to each prompt")
    temperature: float | None = flag(help="0 takes the likeliest token (default: 0; 0.7 with several --samples)")
    seed: int = flag(0, "seed of the first sample; each further one has the next")
    reasoning: str = flag("keep", "the teacher's thoughts: in the rows as `reasoning`, or not", ("keep", "drop"))
    check: str | None = flag(
        help="what all answers are checked for, beside the `checks` of their prompts (references/running.md), "
        "such as '{\"max_characters\": 400}'",
        metavar="JSON",
    )
    drop_refusals: bool = flag(False, "drop answers that decline (English ones are known)")
    json_schema: str | None = flag(
        help="answers must be JSON of this schema: the server is asked for it, and they are checked", metavar="FILE"
    )
    judge: str | None = flag(help="what scores answers: a run of reward_train.py, or a model as for --teacher")
    judge_model: str | None = flag(help="name of the model on the judge's server")
    rubric: str | None = flag(help="text file that tells the judge what is good (1 to 10)", metavar="FILE")
    min_score: float | None = flag(help="drop answers with a lower score")
    keep: str | None = flag(
        help="which passing answers become rows (default: best with a --judge, else first)",
        choices=("best", "first", "all"),
    )
    pairs: bool = flag(
        False, "write preference pairs: the best and the worst by the --judge; without one, one that passes and one not"
    )
    min_margin: float = flag(0.0, "least difference of the scores of a pair")
    against: tuple[str, ...] = flag((), "rows that are trained on anyway: what they ask is not asked")
    eval_file: tuple[str, ...] = flag((), "rows for evaluation: prompts that overlap with them are not asked")
    keep_similar: bool = flag(False, "ask prompts that are nearly the same as others, too")
    concurrency: int = flag(8, "requests that are open at a time")
    requests_per_minute: float | None = flag(help="most requests a minute")
    tokens_per_minute: float | None = flag(help="most tokens a minute, prompts and answers")
    timeout: float = flag(300.0, "seconds for one answer")
    retries: int = flag(5, "further tries of a request that failed for a passing reason")
    price_in: float | None = flag(help="price of a million tokens of prompts")
    price_out: float | None = flag(help="price of a million tokens of answers")
    max_cost: float | None = flag(help="end before more is spent")
    max_minutes: float | None = flag(help="end after so many minutes")
    dry_run: bool = flag(False, "tell how many requests, tokens and costs, and show one request; send nothing")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class AnswersFlags(DistillFlags):
    prompts: tuple[str, ...] = words("prompts: .txt (one a line), or rows of any format, with images and clips")


@dataclass(frozen=True)
class InstructFlags(DistillFlags):
    topics: str | None = word("a text file of topics, one a line")
    count: int = flag(100, "instructions to make")
    seed_rows: tuple[str, ...] = flag((), "rows whose questions are examples of what is wanted")


def _must_exist(config, *names: str) -> None:
    """Refuse, before anything heavy is imported, files that are not there."""
    if not config.teacher:
        raise UsageError("--teacher is needed: the URL of a server, or the hub id or folder of a model")
    if not names:
        raise UsageError("which prompts? Give files: .txt (one a line), or rows of any format")
    texts = [name for name in names if name.lower().endswith(".txt")]
    if absent := [name for name in texts if not user_path(name).is_file()]:
        raise DataError(f"no such file: {absent[0]}")
    sources.must_exist(*(name for name in (*names, *config.against, *config.eval_file) if name not in texts))


def answers(config: AnswersFlags) -> dict:
    _must_exist(config, *config.prompts)
    from gemma_trainer import distilling

    return distilling.answers(config)


def instruct(config: InstructFlags) -> dict:
    if not user_path(config.topics).is_file():
        raise DataError(f"no such file: {config.topics}")
    _must_exist(config, config.topics, *config.seed_rows)
    from gemma_trainer import distilling

    return distilling.instruct(config)


COMMANDS = {
    "answers": (answers, AnswersFlags, "Have a teacher answer prompts; keep what is good; write rows or pairs."),
    "instruct": (instruct, InstructFlags, "Have a teacher write instructions on topics, and answer them."),
}

if __name__ == "__main__":
    sys.exit(cli.run_commands(COMMANDS, __doc__, EXAMPLES))
