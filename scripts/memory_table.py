#!/usr/bin/env python3
"""Write the table of references/memory.md: what of each public Gemma trains on cards of several sizes, and how long.

Usage: python scripts/memory_table.py [--check]

Each size is built without weights from `gemma_sizes.json` and a step of it is played through (see
`gemma_trainer.rehearsal`) at two lengths, between and beyond which memory goes on as it does there. `--check` plays
nothing: it tells whether the table is that of the figures in `memory_figures.json`, which a run writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKILL = HERE.parent / "skills" / "gemma-trainer"
PAGE, FIGURES = SKILL / "references" / "memory.md", HERE / "memory_figures.json"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(SKILL / "assets"))

BEGIN, END = "<!-- table: scripts/memory_table.py -->", "<!-- end of table -->"
CARDS = (8, 12, 16, 24, 48, 80)  # GiB
LENGTHS = (1024, 4096)  # tokens of a row, half of them trained
SHOWN = (512, 1024, 2048, 3072, 4096, 6144, 8192)  # beyond them masks of T x T count, which no line follows
WAYS = {"4-bit LoRA": dict(four_bit=True), "bf16 LoRA": {}, "full": dict(full=True)}


def sizes() -> dict[str, dict]:
    return json.loads((HERE / "gemma_sizes.json").read_text())["sizes"]


def make_config(size: dict):
    """The transformers config of a size."""
    import transformers

    text = dict(size.get("text", {}))
    if period := text.pop("period", None):
        kinds = ["sliding_attention"] * (period - 1) + ["full_attention"]
        text["layer_types"] = kinds * (text["num_hidden_layers"] // period)
    if sparse := text.pop("activation_sparsity", None):
        count, share = sparse
        text["activation_sparsity_pattern"] = [share] * count + [0.0] * (text["num_hidden_layers"] - count)
    if size["config"] == "Gemma3TextConfig":
        return transformers.Gemma3TextConfig(**text)
    parts = {f"{name}_config": size[name] for name in ("vision", "audio") if name in size}
    return getattr(transformers, size["config"])(text_config=text, **parts)


def play(size: dict, way: str, length: int) -> dict[str, int]:
    """What a step on one row of text takes on a GPU, in bytes, by kind."""
    import torch

    from gemma_trainer import models, rehearsal

    full, four_bit = "full" in WAYS[way], "four_bit" in WAYS[way]
    config = make_config(size)

    def make_model(config):
        model = models.skeleton(config)
        return model if full else models.add_lora(model, "language", 16, 32, 0.0)

    ids = torch.full((1, length), 100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    batch["labels"][:, : length // 2] = -100
    if config.model_type != "gemma3_text":
        name = "mm_token_type_ids" if config.model_type.startswith("gemma4") else "token_type_ids"
        batch[name] = torch.zeros_like(ids)
    held = torch.float32 if full else torch.bfloat16
    step = rehearsal.Step("sft", torch.bfloat16, held, full, four_bit, True, True, "cuda")
    return rehearsal.play_deep(config, make_model, batch, step).peak


def worth(size: dict) -> list[str]:
    """The ways that are worth a look: weights, gradients and optimizer of full training take 16 bytes a parameter."""
    return [way for way in WAYS if way != "full" or 16e9 * size["published"] < max(CARDS) * 2**30]


def longest(peaks: list[int], card: int) -> int | None:
    """The longest length that FITS a card, on the line through the peaks at LENGTHS; None where 512 is too much."""
    from gemma_trainer import forecast, planning

    slope = (peaks[1] - peaks[0]) / (LENGTHS[1] - LENGTHS[0])
    fitting = [
        length
        for length in SHOWN
        if forecast.verdict(peaks[0] + slope * (length - LENGTHS[0]) + planning.CONTEXT, card * 2**30) == forecast.FITS
    ]
    return max(fitting, default=None)


def table(figures: dict) -> str:
    head = ["model", "trained", *(f"{card} GB" for card in CARDS)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, ways in figures.items():
        for way in WAYS:
            fits = [longest(ways[way], card) if way in ways else None for card in CARDS]
            cells = ["-" if length is None else f"{length:,}" for length in fits]
            lines.append(f"| {name} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str, table: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where the table is out of step")
    options = parser.parse_args()
    if not options.check:
        figures = {}
        for name, size in sizes().items():
            figures[name] = {way: [sum(play(size, way, length).values()) for length in LENGTHS] for way in worth(size)}
            print(name, figures[name], file=sys.stderr, flush=True)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    page = PAGE.read_text()
    wanted = written(page, table(json.loads(FIGURES.read_text())))
    if options.check:
        sys.exit(0 if wanted == page else f"{PAGE.name} is out of step: run python scripts/memory_table.py")
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
