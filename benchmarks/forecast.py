#!/usr/bin/env python3
"""The memory that `--dry-run` forecasts beside what the run takes, on the CPU, over a grid of models and flags.

Usage: python benchmarks/forecast.py [--only NAME ...] [--steps 2] [--json]

Each cell is a Gemma 4 with random weights, written to a folder; the script's own dry run, and then the script itself
for a few steps, each in a process of its own. "measured" is the run's `peak_memory_mb` (the process's largest resident
set), from which nothing is subtracted: the forecast has what a process takes before there is a model, too. Exit 1 where
a forecast is off by more than 10 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""})
ASSETS = Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"
sys.path.insert(0, str(ASSETS))

LIMIT = 0.10
# Name -> (hidden size, layers, vocabulary).
SIZES = {"tiny": (64, 4, 2048), "100M": (640, 12, 32_768), "300M": (1024, 18, 65_536)}
# Name -> (size, script, medium, flags).
VISION, AUDIO = "--lora-targets language,vision", "--lora-targets language,audio"
AGAIN = "--gradient-checkpointing on"
CELLS = {
    "tiny, LoRA, 1 x 256": ("tiny", "sft", None, "--batch-size 1 --max-len 256"),
    "tiny, LoRA, 16 x 512": ("tiny", "sft", None, "--batch-size 16 --max-len 512"),
    "tiny, full, 4 x 1024": ("tiny", "sft", None, "--batch-size 4 --max-len 1024 --full"),
    "100M, LoRA, 1 x 256": ("100M", "sft", None, "--batch-size 1 --max-len 256"),
    "100M, LoRA, 4 x 256": ("100M", "sft", None, "--batch-size 4 --max-len 256"),
    "100M, LoRA, 4 x 256, checkpointing": ("100M", "sft", None, "--batch-size 4 --max-len 256 " + AGAIN),
    "100M, LoRA, 1 x 1024": ("100M", "sft", None, "--batch-size 1 --max-len 1024"),
    "100M, LoRA, 2 x 256, bf16": ("100M", "sft", None, "--batch-size 2 --max-len 256 --precision bf16"),
    "100M, LoRA r 128, 1 x 256": ("100M", "sft", None, "--batch-size 1 --max-len 256 --lora-r 128"),
    "100M, full, 1 x 256": ("100M", "sft", None, "--batch-size 1 --max-len 256 --full"),
    "100M, full, 2 x 256, accumulated": ("100M", "sft", None, "--batch-size 2 --grad-accum 2 --max-len 256 --full"),
    "100M, full, 4 x 256, checkpointing": ("100M", "sft", None, "--batch-size 4 --max-len 256 --full " + AGAIN),
    "300M, LoRA, 1 x 256": ("300M", "sft", None, "--batch-size 1 --max-len 256"),
    "300M, LoRA, 2 x 256, checkpointing": ("300M", "sft", None, "--batch-size 2 --max-len 256 " + AGAIN),
    "300M, full, 1 x 128": ("300M", "sft", None, "--batch-size 1 --max-len 128 --full"),
    "100M, DPO, LoRA, 1 x 256": ("100M", "dpo", None, "--batch-size 1 --max-len 256"),
    "100M, DPO, full, 1 x 128": ("100M", "dpo", None, "--batch-size 1 --max-len 128 --full"),
    "100M, reward, LoRA, 1 x 256": ("100M", "reward", None, "--batch-size 1 --max-len 256"),
    "100M, images, 2 x 256": ("100M", "sft", "image", "--batch-size 2 --max-len 256"),
    "100M, images, vision LoRA, 1 x 256": ("100M", "sft", "image", "--batch-size 1 --max-len 256 " + VISION),
    "100M, audio, audio LoRA, 1 x 256": ("100M", "sft", "audio", "--batch-size 1 --max-len 256 " + AUDIO),
}  # fmt: skip


def write_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """A Gemma 4 with towers of its size."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    from gemma_trainer import demo

    processor = demo.make_processor()
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * layers
    count = max(4, hidden // 64)
    heads = dict(num_attention_heads=count, num_key_value_heads=2)
    heads |= dict(head_dim=hidden // count, global_head_dim=hidden // count)
    config = demo.make_config(
        processor.tokenizer, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        layer_types=kinds[-layers:], vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary,
        num_kv_shared_layers=layers // 3, initializer_range=0.02, **heads,
    )  # fmt: skip
    for tower in (config.vision_config, config.audio_config):
        tower.hidden_size, tower.num_hidden_layers = hidden // 2, layers // 2
        tower.num_attention_heads = count // 2
    config.vision_config.intermediate_size = 2 * hidden
    config.vision_config.num_key_value_heads, config.vision_config.head_dim = count // 2, hidden // count
    config.audio_config.output_proj_dims = hidden
    torch.manual_seed(0)
    Gemma4ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_rows(path: Path, script: str, medium: str | None) -> None:
    """Rows that are longer than any limit here, and with a medium if asked for."""
    words = "Say it again hello what colour is the sky".split()
    asked, answer = (" ".join(words[at % len(words)] for at in range(count)) for count in (30, 2000))
    if medium:
        file = sorted((ASSETS / "samples" / {"image": "images", "audio": "audio"}[medium]).iterdir())[0]
        asked = [{"type": medium, medium: str(file)}, {"type": "text", "text": "What is it?"}]
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    row = {"messages": said}
    if script != "sft":
        short = " ".join(words * 8)
        row = {"prompt": said[:1], "chosen": short + " yes", "rejected": short}
    path.write_text((json.dumps(row) + "\n") * 64)


def run(script: str, *flags) -> dict:
    command = [sys.executable, str(ASSETS / f"{script}_train.py"), "--json", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 8):
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout)


def measure(name: str, models: Path, steps: int) -> dict:
    size, script, medium, flags = CELLS[name]
    if not (models / size).is_dir():
        write_model(models / size, *SIZES[size])
    rows = models / f"{script}-{medium}.jsonl"
    write_rows(rows, script, medium)
    with tempfile.TemporaryDirectory() as folder:
        common = ["--model", models / size, "--dataset", rows, "--max-steps", steps, "--output", f"{folder}/run"]
        flags = [*common, "--grad-accum", 1, *flags.split()]
        memory = run(script, *flags, "--dry-run")["memory"]
        measured = run(script, *flags)["peak_memory_mb"]
    forecast = memory["peak"] / 2**20
    return {"forecast": forecast, "measured": measured, "ratio": forecast / measured, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CELLS), choices=CELLS, metavar="NAME")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if not options.json:
            print(f"{'':38}{'forecast MiB':>14}{'measured':>10}{'ratio':>7}")
        for name in options.only:
            found[name] = cell = measure(name, Path(folder), options.steps)
            if not options.json:
                print(f"{name:38}{cell['forecast']:14,.0f}{cell['measured']:10,}{cell['ratio']:7.3f}", flush=True)
    worst = max((cell["ratio"] for cell in found.values()), key=lambda ratio: abs(ratio - 1))
    print(json.dumps(found) if options.json else f"worst ratio {worst:.3f}")
    sys.exit(abs(worst - 1) > LIMIT)


if __name__ == "__main__":
    main()
