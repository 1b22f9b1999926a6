#!/usr/bin/env python3
"""Peak memory and time of DPO: the adapter switched off as the reference, against a second model, in one run.

Usage: python benchmarks/dpo_memory.py [--hidden 512] [--layers 8] [--vocabulary 65536] [--length 512] [--steps 3]

A Gemma 4 with random weights, float32, on the CPU; LoRA on its language layers; one pair of two answers of --answer
tokens behind a prompt that fills --length. Each case runs in a process of its own (peak memory is a process's
high-water mark), in turn, several times; the table gives medians of what a process took beyond what it had before the
model was made, and their ratio to the first line:

- "adapter off": as `dpo_train.py` does it;
- "second model": a frozen copy of the weights answers for the reference, as TRL does where it is given one;
- "whole logits": the second model, and logits at every position, as TRL 1.14 makes them (not with later ones).
"""

import argparse
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"})
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
SIZES = dict(hidden=512, layers=8, vocabulary=65_536, length=512, answer=64, steps=3, repeats=3)
for name, default in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--json", action="store_true")
parser.add_argument("--only", help=argparse.SUPPRESS)
options = parser.parse_args()


def measure(case: str) -> None:
    import torch

    from gemma_trainer import demo, models, precision
    from gemma_trainer.collator import MultimodalCollator
    from gemma_trainer.losses import use_log_probs
    from gemma_trainer.preference_trainers import GemmaDPOTrainer, dpo_arguments

    processor = demo.make_processor()
    words = "Say it again hello what colour is the sky".split()
    prompt, answer = (" ".join(words[i % len(words)] for i in range(count)) for count in (4 * options.length, 1000))
    limit = options.length - options.answer
    ids = processor.tokenizer(prompt, add_special_tokens=False)["input_ids"][: limit - 10]
    said = processor.tokenizer(answer, add_special_tokens=False)["input_ids"][: options.answer - 2]
    asked = processor.tokenizer.decode(ids)
    rows = [
        {"prompt": asked, "chosen": processor.tokenizer.decode(said), "rejected": processor.tokenizer.decode(said[1:])}
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"] * (options.layers // 2)
    size = dict(hidden_size=options.hidden, intermediate_size=4 * options.hidden, num_hidden_layers=len(layers))
    model = demo.make_model(
        processor.tokenizer, **size, layer_types=layers, vocab_size=options.vocabulary, initializer_range=0.02
    )
    reference = None if case == "adapter off" else copy.deepcopy(model)
    model = models.add_lora(model, "language", 16, 32, 0.0)
    collators = [MultimodalCollator(processor, options.length, task="preference") for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        args = dpo_arguments(
            folder, precision.choose("fp32", "cpu"), beta=0.1, loss_type=["sigmoid"], loss_weights=None,
            label_smoothing=0, max_length=options.length, batch_size=1, grad_accum=1, lr=1e-4, epochs=1,
            max_steps=options.steps, steps=options.steps, seed=0, save_steps=10_000, eval_steps=10_000, evaluate=False,
            workers=0, report_to=[], checkpointing=False,
        )  # fmt: skip
        trainer = GemmaDPOTrainer(model, args, rows * options.steps, collators[0], processor, None, collators[1])
        trainer.ref_model = reference
        if case == "second model":
            use_log_probs(reference)
        if case == "whole logits":
            trainer.use_liger_kernel = False
        start = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - start) / options.steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    loss = trainer.state.log_history[0]["loss"]
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters()) / 2**20
    print(json.dumps({"mib": peak / 1024, "seconds": seconds, "loss": loss, "weights_mib": weights}))


if options.only:
    measure(options.only)
    sys.exit()

import trl
from packaging.version import Version

cases = ["adapter off", "second model", *(["whole logits"] if Version(trl.__version__) < Version("1.15") else [])]
found: dict[str, list[dict]] = {case: [] for case in cases}
for _ in range(options.repeats):
    for case in cases:
        done = subprocess.run([sys.executable, *sys.argv, "--only", case], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found[case].append(json.loads(done.stdout.splitlines()[-1]))

median = {n: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for n, runs in found.items()}
if options.json:
    print(json.dumps(median))
    sys.exit()
first = median[cases[0]]
print(f"TRL {trl.__version__}, {first['weights_mib']:.0f} MiB of weights, vocabulary {options.vocabulary:,}", end=", ")
print(f"length {options.length}")
print(f"{'reference':14}{'peak MiB':>10}{'ratio':>7}{'s a step':>10}{'ratio':>7}{'first loss':>12}")
for name, figures in median.items():
    memory, speed = (figures[key] / first[key] for key in ("mib", "seconds"))
    print(f"{name:14}{figures['mib']:10.0f}{memory:7.2f}{figures['seconds']:10.2f}{speed:7.2f}{figures['loss']:12.5f}")
