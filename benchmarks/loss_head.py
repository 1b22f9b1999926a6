#!/usr/bin/env python3
"""Peak memory and time of the loss over Gemma's vocabulary: the plain head against the chunked one, in one run.

Usage: python benchmarks/loss_head.py [--rows 4] [--length 512] [--trained 64] [--vocabulary 262144] [--hidden 256]

Each measurement runs in a process of its own (peak memory is a process's high-water mark), in turn, several times; the
table gives medians and their ratio to the plain loss. "trl" is the loss that the installed TRL computes on the CPU: the
chunked one before 1.15, the fused head after.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in dict(rows=4, length=512, trained=64, vocabulary=262_144, hidden=256, repeats=3).items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--only", help=argparse.SUPPRESS)
options = parser.parse_args()


def build():
    """Hidden states that want a gradient, a frozen head, and labels at the end of each row."""
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(options.rows, options.length, options.hidden, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden) * 0.02
    labels = torch.full((options.rows, options.length), -100)
    labels[:, -options.trained :] = torch.randint(0, options.vocabulary, (options.rows, options.trained))
    return hidden, weight, labels


def plain(hidden, weight, labels):
    """What `model(**batch).loss` does: logits at every position, soft-capped, in float32."""
    import torch

    logits = 30.0 * torch.tanh((hidden @ weight.t()).float() / 30.0)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def chunked(hidden, weight, labels):
    from gemma_trainer.losses import chunked_loss

    return chunked_loss(hidden, weight, labels, softcap=30.0).loss


def trl(hidden, weight, labels):
    import torch

    try:
        from trl.trainer.sft_trainer import _CHUNKED_LM_HEAD_CHUNK_SIZE, _chunked_cross_entropy_loss

        return _chunked_cross_entropy_loss(
            hidden, weight, _CHUNKED_LM_HEAD_CHUNK_SIZE, labels, final_logit_softcapping=30.0
        )[0]
    except ImportError:
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE, _ChunkedLogProbFunction

        states, targets = hidden[:, :-1], labels[:, 1:]
        mask = targets != -100
        result = _ChunkedLogProbFunction.apply(
            states.reshape(-1, states.size(-1)), weight, None, targets.clamp(min=0).reshape(-1), 1.0,
            _CHUNKED_LOGPROB_CHUNK_SIZE, 30.0, 1.0, ("log_probs",),
        )  # fmt: skip
        return -torch.where(mask, result[0].view(mask.shape), 0.0).sum() / mask.sum()


def measure(name: str) -> None:
    inputs = build()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    loss = {"plain": plain, "chunked": chunked, "trl": trl}[name](*inputs)
    loss.backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        json.dumps({"loss": loss.item(), "seconds": seconds, "mib": peak / 1024, "grad": inputs[0].grad.norm().item()})
    )


if options.only:
    measure(options.only)
    sys.exit()

found = {name: [] for name in ("plain", "chunked", "trl")}
for _ in range(options.repeats):
    for name in found:
        done = subprocess.run([sys.executable, *sys.argv, "--only", name], capture_output=True, text=True, check=True)
        found[name].append(json.loads(done.stdout.splitlines()[-1]))

median = {n: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for n, runs in found.items()}
print(f"vocabulary {options.vocabulary:,}, batch {options.rows} x {options.length}, {options.trained} trained a row")
print(f"{'loss head':10} {'peak MiB':>9} {'ratio':>6} {'seconds':>8} {'ratio':>6} {'loss':>9} {'gradient':>9}")
for name, figures in median.items():
    memory, speed = (figures[key] / median["plain"][key] for key in ("mib", "seconds"))
    print(
        f"{name:10} {figures['mib']:9.0f} {memory:6.2f} {figures['seconds']:8.2f} {speed:6.2f} "
        f"{figures['loss']:9.5f} {figures['grad']:9.6f}"
    )
