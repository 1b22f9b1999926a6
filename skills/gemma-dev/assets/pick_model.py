#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = []
# ///
"""Pick a Gemma for a task, a memory size and the kinds of input, with the numbers and what speaks against the others.

The facts come from gemma_models.json beside this file, where each has its source. What a model takes of memory:

    weights = weights x bits / 8 + embeddings x their bits / 8 + encoders x 2 bytes       (see BITS)
    KV cache = 2 (keys, values) x 2 bytes x (full layers x KV heads x head size x context
                                             + sliding layers x KV heads x head size x min(window, context))

for one conversation; layers that share another's cache have none of their own. It fits when both together take at most
90 % of the memory: what is left is for activations and the runtime.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

FACTS = Path(__file__).resolve().parent / "gemma_models.json"
TASKS = {
    "chat": "answers, writing, reasoning",
    "code": "writing and reading programs",
    "agent": "calling tools in several steps",
    "vision": "pictures, documents, OCR",
    "audio": "speech: transcribe, translate, answer",
    "video": "short videos, read as frames",
    "translate": "text, or the text in pictures",
    "embed": "vectors for search and retrieval",
    "moderate": "is a text or a picture harmful",
    "narrow": "one small job (classify, extract, route), after fine-tuning",
    "functions": "a sentence to a call of your functions, on a device, after fine-tuning",
    "medical": "medical text and pictures",
}
NEEDS = {"vision": ["text", "image"], "audio": ["text", "audio"], "video": ["text", "video"]}
MODALITIES = ("text", "image", "audio", "video")
# Bits of a weight, and of an embedding. GGUF's Q8_0 is 34 bytes for 32 weights, Q4_0 18; files in Q4_0 hold embeddings,
# also those of each layer, in Q6_K (210 bytes for 256). Encoders stay in 16 bits, as in the mmproj file.
BITS = {"bf16": (16.0, 16.0), "int8": (8.5, 8.5), "4bit": (4.5, 6.5625)}
USABLE = 0.9
CONTEXT = 8192  # tokens, where none are asked for
GIB = 2**30

EXAMPLES = """examples:
  python pick_model.py --task audio --memory 12 --modalities text,audio
  python pick_model.py --task agent --memory 24 --context 65536 --license apache --json
  python pick_model.py --task vision --memory 80 --quantize bf16
  python pick_model.py --task embed --memory 4 --modalities text,image

exit codes:
  0 a choice    1 unexpected fault    2 wrong usage    8 nothing fits (what to change is told)"""


class UsageError(Exception):
    """The command line is wrong; the message says how."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = _refuse
    tasks = "; ".join(f"{name}: {what}" for name, what in TASKS.items())
    parser.add_argument("--task", choices=TASKS, metavar="TASK", default="chat", help=f"{tasks} (default: chat)")
    parser.add_argument("--memory", type=float, required=True, help="GiB of the GPU, or of the Mac's or CPU's memory")
    parser.add_argument(
        "--modalities",
        type=lambda text: text.lower().replace(" ", "").split(","),
        help=f"what goes in, of {', '.join(MODALITIES)}, with commas (default: what the task needs)",
    )
    parser.add_argument("--context", type=int, help=f"tokens of prompt and answer (default: {CONTEXT} or less)")
    parser.add_argument("--license", choices=["any", "apache"], default="any", help="apache: that alone (default: any)")
    parser.add_argument(
        "--quantize",
        choices=["auto", *BITS],
        default="auto",
        help="auto: the most bits that fit, 4bit at worst; int8: GGUF Q8_0, 4bit: GGUF Q4_0 (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, also for failures")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked.

    Raises:
        UsageError: a flag is unknown or missing, or its value wrong.
    """
    asked = build_parser().parse_args(argv)
    if not 0 < asked.memory < math.inf:
        _refuse(f"--memory {asked.memory:g}: expected GiB above 0")
    if asked.context is not None and asked.context < 1:
        _refuse(f"--context {asked.context}: expected 1 token or more")
    asked.modalities = asked.modalities or NEEDS.get(asked.task, ["text"])
    if unknown := [name for name in asked.modalities if name not in MODALITIES]:
        _refuse(f"--modalities: {unknown[0]!r} is none of {', '.join(MODALITIES)}")
    return asked


def _refuse(message: str):
    raise UsageError(f"{message} (see pick_model.py --help)")


# ---- what a model takes


def weights(model: dict, precision: str) -> float:
    """Bytes of all parameters."""
    parts, (bits, embedding_bits) = model["parameters"], BITS[precision]
    rest = parts["total"] - parts["embeddings"] - parts["encoders"]
    return 1e9 * (rest * bits / 8 + parts["embeddings"] * embedding_bits / 8 + parts["encoders"] * 2)


def kv_cache(kv: dict | None, context: int) -> float:
    """Bytes of keys and values of `context` tokens in 16 bits; 0 for a model without a cache."""
    if not kv:
        return 0.0
    full, sliding = kv["full"], kv["sliding"]
    values = full["layers"] * full["kv_heads"] * full["head_size"] * context
    values += sliding["layers"] * sliding["kv_heads"] * sliding["head_size"] * min(sliding["window"], context)
    return 2 * 2 * values


def memory(model: dict, precision: str, context: int) -> dict[str, float]:
    """GiB of weights, KV cache and both."""
    held, cache = weights(model, precision) / GIB, kv_cache(model["kv"], context) / GIB
    return {"weights": round(held, 2), "kv_cache": round(cache, 2), "total": round(held + cache, 2)}


# ---- choosing


def judge(model: dict, asked: argparse.Namespace) -> dict:
    """A model with what it takes; `against` says what keeps it from being chosen, and is empty where nothing does."""
    context = asked.context or min(CONTEXT, model["context"] or CONTEXT)
    against = []
    if missing := [kind for kind in asked.modalities if kind not in model["inputs"]]:
        against.append(f"takes no {' or '.join(missing)}")
    if asked.license == "apache" and model["license"] != "Apache-2.0":
        against.append(f"license: {model['license']}")
    if asked.context and asked.context > (model["context"] or 0):
        against.append(f"context: {model['context'] or 'not published'}")
    tried = list(BITS) if asked.quantize == "auto" else [asked.quantize]
    sizes = {precision: memory(model, precision, context) for precision in tried}
    fitting = [name for name, size in sizes.items() if size["total"] <= USABLE * asked.memory]
    precision = fitting[0] if fitting else tried[-1]
    if not fitting:
        needs = sizes[precision]["total"] / USABLE
        against.append(f"needs {needs:.1f} GiB in {precision} at {context} tokens")
    return {"model": model, "precision": precision, "context": context, "gib": sizes[precision], "against": against}


def candidates(models: list[dict], asked: argparse.Namespace) -> list[dict]:
    """All models for the task, judged: those made for it first, then by rank."""
    suited = [model for model in models if asked.task in model["can"] + model["made_for"]]
    suited.sort(key=lambda model: (asked.task in model["made_for"], model["rank"]), reverse=True)
    return [judge(model, asked) for model in suited]


def choose(facts: dict, asked: argparse.Namespace) -> dict:
    """The answer, as it is printed with --json."""
    judged = candidates(facts["models"], asked)
    good, bad = [one for one in judged if not one["against"]], [one for one in judged if one["against"]]
    answer = {
        "status": "done" if good else "nothing fits",
        "exit_code": 0 if good else 8,
        "asked": {key: value for key, value in vars(asked).items() if key != "json"},
        "facts_of": facts["looked"],
    }
    rejected = [{"id": one["model"]["id"], "why_not": "; ".join(one["against"])} for one in bad]
    if not good:
        possible = changes(facts["models"], asked, bad)
        message = "nothing fits; " + ("what would: " + ", or ".join(possible) if possible else "no one change helps")
        return answer | {"error": {"kind": "check", "message": message}, "changes": possible, "rejected": rejected}
    first = good[0]
    others = [described(one) | {"why_not": why_not(one, first, asked.task)} for one in good[1:4]]
    choice = described(first) | {"reasons": reasons(first, asked), "caveats": caveats(first, asked)}
    return answer | {"choice": choice | {"run": commands(first)}, "runners_up": others, "rejected": rejected}


def described(one: dict) -> dict:
    """What to know of a candidate."""
    model = one["model"]
    kept = ("id", "base", "purpose", "parameters", "inputs", "output", "limits", "license", "gated", "released")
    told = {key: model[key] for key in kept} | {"max_context": model["context"]}
    told |= {key: model[key] for key in ("thinking", "function_calling", "drafter", "qat") if model[key]}
    return told | {key: one[key] for key in ("precision", "context", "gib")}


def reasons(one: dict, asked: argparse.Namespace) -> list[str]:
    model, size = one["model"], one["gib"]
    made = asked.task in model["made_for"]
    told = [f"for this task: {model['purpose']}" if made else "of those that fit, the largest of the newest generation"]
    limit = f"; context up to {model['context']}" if model["context"] else ""
    told.append(f"takes {', '.join(asked.modalities)}{limit}")
    told.append(
        f"{size['weights']} GiB of weights in {one['precision']} + {size['kv_cache']} GiB of KV cache for "
        f"{one['context']} tokens of one conversation = {size['total']}, of {USABLE * asked.memory:.1f} usable"
    )
    if one["precision"] == "4bit":
        told.append(
            "4 bits: take the checkpoint that was trained for it (qat)"
            if model["qat"]
            else "4 bits, without a checkpoint trained for it: compare answers with those in more bits first"
        )
    return told


def why_not(one: dict, first: dict, task: str) -> str:
    """Why a candidate that fits is not the first."""
    model, best = one["model"], first["model"]
    if task in best["made_for"] and task not in model["made_for"]:
        return "general: not made for this task"
    active, told = model["parameters"]["per_token"], []
    if model["family"] != best["family"]:
        told.append(f"{model['family']}: an older generation, {model['license']}")
    elif model["parameters"]["total"] < best["parameters"]["total"]:
        told.append("smaller")
    if 2 * active < best["parameters"]["per_token"]:
        told.append(f"but faster: computes {active}B parameters a token, not {best['parameters']['per_token']}B")
    if one["precision"] != first["precision"] and BITS[one["precision"]] > BITS[first["precision"]]:
        told.append(f"leaves room for {one['precision']}")
    return "; ".join(told) or "ranked behind it"


def caveats(one: dict, asked: argparse.Namespace) -> list[str]:
    model = one["model"]
    told = [caveat["text"] for caveat in model["caveats"] if caveat["about"] in asked.modalities]
    if model["gated"]:
        told.append(f"accept the terms ({model['license']}) on its page and log in before downloading")
    if unsure := model.get("not_verified"):
        told.append(f"not verified: {', '.join(unsure)}")
    return told


def commands(one: dict) -> list[str]:
    """How to serve it, where that is the same for all: 16 bits in vLLM, 4 bits trained for it in llama.cpp."""
    model, context = one["model"], one["context"]
    if "text" not in model["output"]:
        return []
    if one["precision"] == "bf16":
        return [f"vllm serve {model['id']} --max-model-len {context}"]
    if one["precision"] == "4bit" and "gguf" in (model["qat"] or {}):
        return [f"llama-server -hf {model['qat']['gguf']} -c {context}"]
    return []


def changes(models: list[dict], asked: argparse.Namespace, bad: list[dict]) -> list[str]:
    """Changes of one flag that would make something fit, as small as tried, each with what would be chosen."""
    shorter = [2**power for power in range(18, 8, -1) if 2**power < (asked.context or 0)]
    parts = [[other for other in asked.modalities if other != kind] for kind in asked.modalities]
    short = [one for one in bad if len(one["against"]) == 1 and one["against"][0].startswith("needs")]
    needs = sorted(math.ceil(10 * one["gib"]["total"] / USABLE) / 10 for one in short)
    tries = [
        [("--license any", {"license": "any"})],
        [("--quantize auto", {"quantize": "auto"})],
        [(f"--context {less}", {"context": less}) for less in shorter],
        *([(f"--modalities {','.join(fewer)}", {"modalities": fewer})] for fewer in parts if fewer),
        [(f"--memory {more:g}", {"memory": more}) for more in needs],
    ]
    told = []
    for group in tries:
        for flag, change in group:
            changed = candidates(models, argparse.Namespace(**vars(asked) | change))
            if fits := [one for one in changed if not one["against"]]:
                told.append(f"{flag} ({fits[0]['model']['id']})")
                break
    return told


# ---- printing


def summary(answer: dict) -> str:
    """The answer for people."""
    rejected = [f"  {one['id']}: {one['why_not']}" for one in answer["rejected"]]
    if answer["exit_code"]:
        return "\n".join([answer["error"]["message"], *rejected])
    choice = answer["choice"]
    lines = [f"{choice['id']} in {choice['precision']}", *(f"  {reason}" for reason in choice["reasons"])]
    lines += [f"  license: {choice['license']}"]
    lines += [f"  {key}: {choice[key]}" for key in ("drafter",) if key in choice]
    lines += [f"  qat: {', '.join(choice['qat'].values())}"] if "qat" in choice else []
    lines += [f"  mind: {caveat}" for caveat in choice["caveats"]] + [f"  run: {line}" for line in choice["run"]]
    others = [
        f"  {one['id']} in {one['precision']}, {one['gib']['total']} GiB: {one['why_not']}"
        for one in answer["runners_up"]
    ]
    lines += ["runners-up:", *others] if others else []
    lines += ["not possible:", *rejected] if rejected else []
    return "\n".join([*lines, f"facts of {answer['facts_of']}, each with its source, in {FACTS.name}"])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        asked = parse(argv)
    except UsageError as problem:
        print(f"error: {problem}", file=sys.stderr)
        if "--json" in argv:
            facts = {"kind": "usage", "message": str(problem)}
            print(json.dumps({"status": "failed", "exit_code": 2, "error": facts}))
        return 2
    answer = choose(json.loads(FACTS.read_text(encoding="utf-8")), asked)
    try:
        print(json.dumps(answer, ensure_ascii=False) if asked.json else summary(answer), flush=True)
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer["exit_code"]


if __name__ == "__main__":
    sys.exit(main())
