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
"""Tell what is on this machine, and whether training will work on it."""

from __future__ import annotations

import faulthandler
import json
import sys

faulthandler.enable()  # tells which import it was, where a package takes Python down with it

if sys.version_info < (3, 11):  # noqa: UP036  nothing below can be read by it
    told = f"this is Python {sys.version.split()[0]}, and 3.11 to 3.13 is needed: uv run --python 3.12 doctor.py"
    print(f"error: {told}", file=sys.stderr)
    if "--json" in sys.argv:
        failed = {"kind": "environment", "message": told}
        print(json.dumps({"status": "failed", "exit_code": 4, "error": failed}))
    sys.exit(4)

from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import cli
from gemma_trainer.errors import UsageError
from gemma_trainer.flags import flag

EXAMPLES = """\
  python doctor.py                                             # what is here, and what to mend
  python doctor.py --model google/gemma-4-E2B-it               # can this model be had and trained, too?
  python doctor.py --audit --model demo --backend unsloth      # what does Unsloth really patch?"""

EXIT_CODES = """exit codes:
  0 it will work (of what is WARN, see the remedy)    2 wrong usage    5 --audit: the model cannot be loaded
  4 something is FAIL: do what its remedy says; with --audit: Unsloth was taken, and accelerates nothing"""


@dataclass(frozen=True)
class Config:
    exit_codes = EXIT_CODES
    model: str | None = flag(help="a hub id or a folder of a Gemma to look at, too; `demo` is a tiny random Gemma 4")
    backend: str = flag("auto", "what is to load and train", ("auto", "unsloth", "hf"))
    audit: bool = flag(False, "load --model as a run would, and tell what is accelerated and what is not")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


def main(config: Config) -> dict:
    if config.audit:
        return audit(config)
    from gemma_trainer import machine

    items = machine.examine(config.model, config.backend, config.debug)
    verdict = machine.verdict(items)
    return {
        "verdict": verdict,
        "exit_code": 4 if verdict == machine.FAIL else 0,
        "items": [{key: value for key, value in asdict(item).items() if value not in ("", {})} for item in items],
        "summary": machine.summary(items),
    }


def audit(config: Config) -> dict:
    if not config.model:
        raise UsageError("--audit needs --model: a hub id, a folder, or demo")
    from gemma_trainer import audit, audited

    found = audited.audit(config.model, config.backend)
    failed = found["backend"] == "unsloth" and found["verdict"] == "NOT"
    return {"exit_code": 4 if failed else 0} | found | {"summary": audit.summary(found)}


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, __doc__, EXAMPLES))
