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
"""Tell what a run, a checkpoint or an adapter holds, check that others can load it, or write a run's report anew."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.errors import CannotLoad
from gemma_trainer.flags import flag, word

EXAMPLES = """\
  python inspect_run.py runs/run1 --json                       # how far it is, or what came of it
  python inspect_run.py runs/run1/checkpoint-40
  python inspect_run.py runs/run1 --report                     # report.html, also of a run that was killed"""

EXIT_CODES = """exit codes:
  0 what was checked is sound    2 wrong usage    4 missing package
  5 no run, adapter or model there                8 a check did not pass"""


@dataclass(frozen=True)
class Config:
    exit_codes = EXIT_CODES
    folder: str = word("the folder of a run, a checkpoint, an adapter or a model")
    report: bool = flag(False, "write report.html into the run's folder instead, from its metrics.jsonl")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


def main(config: Config) -> dict:
    folder = config.folder
    if not Path(folder).is_dir():
        raise CannotLoad(f"{folder}: no such folder")
    from gemma_trainer import run_check, runs

    if config.report:
        page = runs.report_again(Path(folder), run_check.state_of(Path(folder)))
        return {"report": str(page), "summary": f"report   {page}"}
    result = run_check.inspect(folder)
    failed = any(check["passed"] is False for check in result["checks"])
    more = {"exit_code": 8} if failed else {}
    return {"sound": not failed} | result | more | {"summary": run_check.summary(result)}


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
