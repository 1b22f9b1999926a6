#!/usr/bin/env python3
"""What several GPUs are expected to bring: a small model of compute, communication, optimizer and data for each step.

Usage: python benchmarks/scaling.py [--gpus 1,8,64] [--ways lora-ddp,full-ddp,full-fsdp2] [--mfu 0.4] [--inter-gbps 50]
                                    [--tokens-per-step 16384] [--parameters 8] [--markdown | --json] [--check PAGE]

A step of one GPU takes --tokens-per-step tokens, accumulated over --micro-batches, which are by default as of the
scripts (batch 1 x 8 of 2,048 tokens); more GPUs take as many each, so that the batch grows with them. Efficiency is the
share of a step that does not wait for other GPUs: 100 % for one. The model, all of it:

- compute = FLOPs / (--gpu-flops x --mfu). A token costs 2N forward (N weights that a token passes), 2N for the
  gradients of activations, 2N for those of weights, which frozen weights under LoRA do not need, and 2N to compute the
  forward pass again with gradient checkpointing: 6N to train all weights and 4N with LoRA, 8N and 6N with
  checkpointing.
- DDP sums up the gradients of what trains once a step, 4 bytes a weight, since what trains is kept in float32: a ring
  moves 2 (n-1)/n of them through each GPU.
- FSDP2 gathers all weights in the forward and again in the backward pass of each micro-batch, and scatters the
  gradients after the last one, 2 bytes a weight (bf16): (n-1)/n of them each time.
- A group of GPUs in one machine moves bytes at --intra-gbps. Over machines each machine's part is worked out inside
  first, and what goes over the network is the part of each GPU: 1/8 of the bytes at --inter-gbps for each GPU.
- --overlap is the share of the compute that can hide communication; the rest waits for it. The optimizer reads and
  writes 28 bytes for each weight that it holds at --memory-gbps. Data wait as --data-wait says, a share of the compute.

It knows nothing of stragglers, latency, kernels that share the GPU with NCCL, or padding: measured runs are below it.
--check PAGE exits with 1 where the table in that page is not what --markdown prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

# Weights in units of 1e9: (all that are stored, those that a token passes). As published for
# Gemma 4 (apxml.com/models/gemma-4-e2b and its like, read 2026-12): "E" models look their per-layer embeddings up, and
# of the 26B 3.8 are active. LoRA r 16 on the language layers, as the
# scripts' default, is about 1 % of what a token passes.
MODELS = {"E2B": (5.1, 2.3), "E4B": (8.0, 4.5), "12B": (12.0, 12.0), "26B-A4B": (25.2, 3.8), "31B": (30.7, 30.7)}
LORA_SHARE = 0.01
WAYS = ("lora-ddp", "full-ddp", "full-fsdp2")
BILLION = 1e9
ETHERNET = 25 / 8 / 8  # GB/s for each GPU, of 25 Gb/s that eight of them share


@dataclass(frozen=True)
class Hardware:
    """Rates of one GPU. The defaults are an H100 SXM in a machine of eight with a 400 Gb/s adapter for each GPU.

    989e12 FLOP/s in bf16 without sparsity, 3,350 GB/s of memory, NVLink 900 GB/s, which is 450 in each direction:
    glennklockwood.com/garden/processors/h100, read 2026-12. InfiniBand of 400 Gb/s = 50 GB/s for each GPU: what the
    machines of MLPerf's inference results v4.1 have. The shares are assumptions.
    """

    gpu_flops: float = 989e12
    mfu: float = 0.4  # share of that which training is taken to reach: replace it by what one GPU showed
    intra_gbps: float = 450.0
    inter_gbps: float = 50.0
    memory_gbps: float = 3350.0
    gpus_a_machine: int = 8
    network_share: float = 0.8  # of the rated bandwidth that collectives reach
    overlap: float = 0.7
    data_wait: float = 0.02


UNITS = {
    "gpu_flops": "FLOP/s of a GPU",
    "mfu": "share of them that training reaches",
    "intra_gbps": "GB/s (bytes) for each GPU within a machine",
    "inter_gbps": "GB/s (bytes) for each GPU between machines: of an adapter of 25 Gb/s for eight GPUs 0.39",
    "memory_gbps": "GB/s of a GPU's memory",
    "gpus_a_machine": "GPUs in a machine; of more GPUs all machines are taken to be full",
    "network_share": "share of the bandwidth that collectives reach",
    "overlap": "share of the communication that can be hidden behind computing",
    "data_wait": "share of a step spent waiting for data",
}


@dataclass(frozen=True)
class Step:
    """Seconds of one step on each GPU. `exposed` is the communication that nothing hides."""

    compute: float
    communication: float
    exposed: float
    optimizer: float
    data: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.optimizer + self.data

    @property
    def efficiency(self) -> float:
        return 1 - self.exposed / self.total


def flops_a_token(passed: float, full: bool, checkpointing: bool = True) -> float:
    """FLOPs to train on one token, of a model in which it passes `passed` weights."""
    return passed * (2 + 2 + 2 * full + 2 * checkpointing)


def seconds_to_move(size: float, gpus: int, hardware: Hardware, passes: int = 1) -> float:
    """Seconds of ring collectives over `size` bytes.

    Args:
        passes: 1 for each all-gather or reduce-scatter, 2 for an all-reduce, which is both.
    """
    inside = min(gpus, hardware.gpus_a_machine)
    machines = -(-gpus // hardware.gpus_a_machine)
    share = hardware.network_share * BILLION
    local = (inside - 1) / inside * size / (hardware.intra_gbps * share)
    network = (machines - 1) / machines * size / inside / (hardware.inter_gbps * share)
    return passes * (local + network)


def step_of(way: str, stored: float, passed: float, gpus: int, tokens: int, micro_batches: int, hardware: Hardware,
            checkpointing: bool = True) -> Step:  # fmt: skip
    """The expected step.

    Args:
        way: one of WAYS.
        stored, passed: weights of the model, and those that a token passes.
        tokens: of a step on each GPU.
    """
    full, sharded = way != "lora-ddp", way == "full-fsdp2"
    trained = stored if full else LORA_SHARE * passed
    compute = tokens * flops_a_token(passed, full, checkpointing) / (hardware.gpu_flops * hardware.mfu)
    if sharded:  # the 32-bit weights are kept in parts, and gathered as they are computed with, in 16 bits
        communication = seconds_to_move(2 * stored, gpus, hardware, passes=2 * micro_batches + 1)
    else:  # gradients in 32 bits, as the weights that are trained
        communication = seconds_to_move(4 * trained, gpus, hardware, passes=2)
    exposed = max(0.0, communication - hardware.overlap * compute)
    held = trained / gpus if sharded else trained
    # Weight, gradient and two moments are read, weight and moments written, of 4 bytes each.
    optimizer = 28 * held / (hardware.memory_gbps * BILLION)
    return Step(compute, communication, exposed, optimizer, hardware.data_wait * compute)


def table(options, hardware: Hardware) -> list[dict]:
    """One line for each model and way."""
    sizes = MODELS
    if options.parameters:
        sizes = {f"{options.parameters:g}B": (options.parameters, options.active or options.parameters)}
    lines = []
    for name, weights in sizes.items():
        stored, passed = (BILLION * number for number in weights)
        for way in options.ways.split(","):
            common = (options.tokens_per_step, options.micro_batches, hardware, not options.no_checkpointing)
            line = {"model": name, "way": way}
            for gpus in map(int, options.gpus.split(",")):
                step = step_of(way, stored, passed, gpus, *common)
                line[str(gpus)], line["seconds"] = step.efficiency, step.total  # seconds of the last one
            slow = (options.tokens_per_step, options.micro_batches, replace(hardware, inter_gbps=ETHERNET))
            line["ethernet"] = step_of(way, stored, passed, gpus, *slow, not options.no_checkpointing).efficiency
            lines.append(line)
    return lines


def markdown(lines: list[dict], gpus: list[str]) -> str:
    names = [f"{n} GPU{'s' * (n != '1')}" for n in gpus]
    rows = [f"| model | way | {' | '.join(names)} | {names[-1]}, Ethernet |", "|---|---|" + "---|" * (len(gpus) + 1)]
    for line in lines:
        rows.append(
            f"| {line['model']} | {line['way']} | {' | '.join(f'{line[n]:.0%}' for n in (*gpus, 'ethernet'))} |"
        )
    return "\n".join(rows)


def read_options(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,8,64", help="numbers of GPUs (default: 1,8,64)")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--parameters", type=float, help="weights of another model, in billions")
    parser.add_argument("--active", type=float, help="those that a token passes (default: all)")
    parser.add_argument("--tokens-per-step", type=int, default=16_384, help="on each GPU (default: 16384)")
    parser.add_argument("--micro-batches", type=int, default=8, help="that make a step (default: 8)")
    parser.add_argument("--no-checkpointing", action="store_true", help="without gradient checkpointing")
    for name, kind in Hardware.__annotations__.items():
        default = getattr(Hardware, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=eval(kind),
            default=default,
            help=f"{UNITS[name]} (default: {default:g})",
        )
    parser.add_argument("--markdown", action="store_true", help="the table as references/scale.md has it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", metavar="PAGE", help="exit with 1 where the page does not hold the table")
    options = parser.parse_args(argv)
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    if not all(number.isdecimal() and int(number) for number in options.gpus.split(",")):
        parser.error(f"--gpus {options.gpus}: whole numbers from 1, with commas between them")
    for name in ("parameters", "active", "tokens_per_step", "micro_batches", *set(UNITS) - {"overlap", "data_wait"}):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    for name in ("mfu", "network_share", "overlap", "data_wait"):
        if not 0 <= getattr(options, name) <= 1:
            parser.error(f"--{name.replace('_', '-')} is a share of 1")
    if options.active and options.active > (options.parameters or 0):
        parser.error("--active is a part of --parameters")
    return options


def main(argv=None) -> int:
    options = read_options(argv)
    hardware = Hardware(**{name: getattr(options, name) for name in Hardware.__annotations__})
    lines, gpus = table(options, hardware), options.gpus.split(",")
    if options.check:
        held = markdown(lines, gpus) in Path(options.check).read_text(encoding="utf-8")
        print(f"{options.check} {'holds' if held else 'does not hold'} the table")
        return 0 if held else 1
    if options.json:
        print(json.dumps(lines))
    elif options.markdown:
        print(markdown(lines, gpus))
    else:
        print(f"{'model':10}{'way':12}{''.join(f'{n:>9}' for n in gpus)} GPUs   on Ethernet   a step of the last")
        for line in lines:
            shares = "".join(f"{line[n]:9.0%}" for n in gpus)
            print(f"{line['model']:10}{line['way']:12}{shares}{line['ethernet']:19.0%}{line['seconds']:16.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
