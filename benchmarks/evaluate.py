#!/usr/bin/env python3
"""How much faster an evaluation is in batches of near-equal length than row by row, and that it finds the same.

Usage: python benchmarks/evaluate.py [--rows 168] [--batch-size 32] [--max-new-tokens 24] [--kinds text,media] [--json]

The demo's tiny random model answers rows and scores their expected answers, as `evaluate.py` does for each arm: rows of
the built-in demo (pictures and clips), or text questions of many lengths. One at a time is the same code with a batch
size of one. Both are timed by turns, twice, and the better time of each counts. "same" is the share of equal answers,
"apart" the largest difference of a row's log-probability.
"""

import os

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"})

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"
sys.path.insert(0, str(ASSETS))

import transformers

from gemma_trainer import demo, inference, sources
from gemma_trainer.evaluation_book import Book
from gemma_trainer.evaluation_rows import read_item
from gemma_trainer.evaluation_work import ANSWER, LOSS, ask
from gemma_trainer.flags import InferenceFlags

KINDS = ("text", "media")


def rows_of(kind: str, count: int) -> list:
    """So many rows: the demo's own over and over, or text questions of 10 to 60 words."""
    if kind == "media":
        rows = sources.open_rows([str(demo.SAMPLES / "heldout.jsonl")])
        return [rows[at % len(rows)] for at in range(count)]
    words, rng = demo.CORPUS.split(), random.Random(0)
    asked = (" ".join(rng.choices(words, k=rng.randint(10, 60))) for _ in range(count))
    return [{"prompt": text, "completion": rng.choice(words)} for text in asked]


def measure(policy, items, flags) -> tuple[float, dict]:
    """(seconds, what was found of each row)."""
    with tempfile.TemporaryDirectory() as folder, closing(Book(Path(folder) / "answers.jsonl")) as book:
        start = time.perf_counter()
        ask(policy, "base", items, [ANSWER, LOSS], book, flags)
        return time.perf_counter() - start, book.found


def compare(kind: str, policy, options) -> dict:
    items = [read_item(raw, f"row {at}") for at, raw in enumerate(rows_of(kind, options.rows))]
    flags = InferenceFlags(batch_size=options.batch_size, max_new_tokens=options.max_new_tokens)
    seconds, found = {}, {}
    for size in (1, options.batch_size) * 2:
        took, found[size] = measure(policy, items, replace(flags, batch_size=size))
        seconds[size] = min(took, seconds.get(size, took))
    one, many = found[1], found[options.batch_size]
    said = [key for key in one if key[1] == ANSWER]
    apart = [abs(one[key]["sides"][0][0] - many[key]["sides"][0][0]) for key in one if key[1] == LOSS]
    return {
        "kind": kind,
        "rows": options.rows,
        "one_at_a_time_s": seconds[1],
        "batched_s": seconds[options.batch_size],
        "ratio": seconds[1] / seconds[options.batch_size],
        "same": sum(one[key]["text"] == many[key]["text"] for key in said) / len(said),
        "apart": max(apart),
    }


def main(options) -> None:
    policy = inference.load_policy("demo", InferenceFlags())
    lines = [compare(kind, policy, options) for kind in options.kinds.split(",")]
    if options.json:
        print(json.dumps(lines))
        return
    print(
        f"{'rows':16}{'one at a time':>15}{f'{options.batch_size} at a time':>15}{'ratio':>8}{'same':>7}{'apart':>10}"
    )
    for line in lines:
        print(
            f"{line['rows']:<5}{line['kind']:11}{line['one_at_a_time_s']:13.1f} s{line['batched_s']:13.1f} s"
            f"{line['ratio']:7.1f}x{line['same']:7.0%}{line['apart']:10.1e}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=168, help="rows of each kind")
    parser.add_argument("--batch-size", type=int, default=32, help="rows at a time")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--kinds", default=",".join(KINDS), help="text, media, or both")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(parser.parse_args())
