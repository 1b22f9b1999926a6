#!/usr/bin/env python3
"""Write references/models.md of gemma-dev from the facts that pick_model.py reads.

Usage: python scripts/models_page.py [--check]

`--check` writes nothing and exits 1 where the page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

SKILL = Path(__file__).resolve().parent.parent / "skills" / "gemma-dev"
PAGE = SKILL / "references" / "models.md"
sys.path.insert(0, str(SKILL / "assets"))

import pick_model  # noqa: E402

INTRO = """# Gemma models: what is known of each

Contents: [Models](#models) · [Memory](#memory) · [Checkpoints beside them](#checkpoints-beside-them) ·
[Mind](#mind) · [Others](#others) · [Sources](#sources)

Written by `scripts/models_page.py` from `assets/gemma_models.json`, which names the source of each fact; looked at on
{looked}. `?`: not published, or not found. *Italic*: not verified. To choose, run `pick_model.py`; this page is for
looking things up.
"""
MEMORY = """GiB of weights (bf16, GGUF Q8_0, GGUF Q4_0; encoders in 16 bits), and of the KV cache of one conversation.
The formula is at the top of `pick_model.py`; the sizes of the vendor's own files in 4 bits are met within 1.5 %.
bitsandbytes leaves embeddings in 16 bits: E2B and E4B are then far larger than here.
"""


def page(facts: dict) -> str:
    """The whole page."""
    models = facts["models"]
    parts = [INTRO.format(looked=facts["looked"]), "## Models\n", *models_table(models)]
    parts += ["\n## Memory\n", MEMORY, *memory_table(models)]
    parts += ["\n## Checkpoints beside them\n", *checkpoints(models)]
    parts += ["\n## Mind\n", *caveats(models)]
    parts += ["\n## Others\n", *(f"- `{other['id']}`: {other['what']}" for other in facts["others"])]
    parts += ["\n## Sources\n", *(f"- {key}: <{one['url']}> ({one['read']})" for key, one in facts["sources"].items())]
    return "\n".join(parts) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]


def models_table(models: list[dict]) -> list[str]:
    head = [
        "id",
        "billions (a token)",
        "takes",
        "context",
        "languages",
        "thinks",
        "calls functions",
        "license",
        "released",
    ]
    return table(head, [model_row(model) for model in models])


def model_row(model: dict) -> list[str]:
    parts, unsure = model["parameters"], model.get("not_verified", [])
    size = f"{parts['total']:g}" + (f" ({parts['per_token']:g})" if parts["per_token"] < 0.9 * parts["total"] else "")
    cells = {
        "parameters": size,
        "inputs": ", ".join(model["inputs"]),
        "context": f"{model['context'] // 1024}K" if model["context"] else "?",
        "languages": model["languages"] or "?",
        "thinking": "yes" if model["thinking"] else "no",
        "function_calling": "yes" if model["function_calling"] else "no",
        "license": model["license"],
        "released": model["released"],
    }
    return [f"`{model['id']}`"] + [f"*{text}*" if key in unsure else text for key, text in cells.items()]


def memory_table(models: list[dict]) -> list[str]:
    rows = []
    for model in models:
        if "parameters" in model.get("not_verified", []):
            continue
        sizes = [f"{pick_model.weights(model, precision) / pick_model.GIB:.1f}" for precision in pick_model.BITS]
        lengths = [8192, 32768, 131072, 262144]
        fitting = [length for length in lengths if model["kv"] and length <= (model["context"] or 0)]
        caches = [f"{pick_model.kv_cache(model['kv'], length) / pick_model.GIB:.2f}" for length in fitting]
        rows.append([f"`{model['id']}`", *sizes, *caches, *["-"] * (len(lengths) - len(caches))])
    return table(["id", *pick_model.BITS, "KV at 8K", "32K", "128K", "256K"], rows)


def checkpoints(models: list[dict]) -> list[str]:
    """Base models, drafters and quantization-aware checkpoints."""
    rows = []
    for model in models:
        others = {"base": model["base"], "drafter": model["drafter"]} | (model["qat"] or {})
        if told := [f"{kind}: `{name}`" for kind, name in others.items() if name]:
            rows.append(f"- `{model['id']}`: {', '.join(told)}")
    return rows


def caveats(models: list[dict]) -> list[str]:
    told = [f"- `{model['id']}`: {caveat['text']}" for model in models for caveat in model["caveats"]]
    limits = [f"- `{model['id']}`: {json.dumps(model['limits'])}" for model in models if model["limits"]]
    gated = ", ".join(f"`{model['id']}`" for model in models if model["gated"])
    return [*told, f"- behind terms that must be accepted on the page: {gated}", "\nLimits of media:\n", *limits]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page is stale")
    text = page(json.loads(pick_model.FACTS.read_text(encoding="utf-8")))
    if parser.parse_args().check:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text
        print("stale: run scripts/models_page.py" if stale else "references/models.md is in step")
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
