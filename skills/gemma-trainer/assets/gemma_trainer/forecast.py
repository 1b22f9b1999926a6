"""What a run would take of memory, against what there is, and the smallest change that makes it fit. Numbers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

FITS, TIGHT, TOO_MUCH = "FITS", "TIGHT", "DOES NOT FIT"
ROOM = 0.9  # of what is there: what a run may take without being TIGHT
LENGTHS = (98304, 65536, 49152, 32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384,
           256, 128)  # fmt: skip
RANKS = (64, 32, 16, 8, 4)


@dataclass(frozen=True)
class Memory:
    """A run's worst moment: what each part takes, in bytes.

    `weights` hold the reference model, too, where DPO needs one; `base` is what a process takes before there is a
    model (on a GPU its context).
    """

    weights: int = 0
    adapters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss_head: int = 0
    media_towers: int = 0
    base: int = 0

    @property
    def peak(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def spread(whole: Memory, kind: str, world: int, embedding: int, layers: int) -> Memory:
    """What each of several processes takes, by simple division; not rehearsed.

    With "fsdp" and "deepspeed" (ZeRO-3 in the place of both stages) weights, gradients and optimizer are divided; what
    is gathered while it is used, the embeddings and two of the layers, is whole.
    """
    if kind == "whole" or world == 1:
        return whole
    gathered = min(whole.weights, embedding + 2 * max(whole.weights - embedding, 0) // layers)
    parts = {name: -(-getattr(whole, name) // world) for name in ("weights", "adapters", "gradients", "optimizer")}
    parts["weights"] = min(whole.weights, parts["weights"] + gathered)
    return dataclasses.replace(whole, **parts)


@dataclass(frozen=True)
class Setting:
    """What may be changed to make a run fit. `effective` rows make an optimizer step, however they are batched."""

    batch_size: int
    grad_accum: int
    four_bit: bool
    checkpointing: bool
    max_len: int
    lora_r: int

    @property
    def effective(self) -> int:
        return self.batch_size * self.grad_accum

    def flags_from(self, before: Setting) -> list[str]:
        """The flags that make a run with `before` one with this."""
        told = {
            "batch_size": ["--batch-size", str(self.batch_size), "--grad-accum", str(self.grad_accum)],
            "four_bit": ["--quantize", "4bit"],
            "checkpointing": ["--gradient-checkpointing", "on"],
            "max_len": ["--max-len", str(self.max_len)],
            "lora_r": ["--lora-r", str(self.lora_r)],
        }
        return [word for name, words in told.items() if getattr(self, name) != getattr(before, name) for word in words]


def verdict(peak: int, available: int) -> str:
    """FITS, TIGHT or DOES NOT FIT."""
    return FITS if peak <= ROOM * available else TIGHT if peak <= available else TOO_MUCH


def smallest_change(setting: Setting, peak_of: Callable[[Setting], int], available: int, longest: int,
                    may_quantize: bool, may_shrink_rank: bool) -> Setting | None:  # fmt: skip
    """The setting nearest to the given one that FITS; None where none does.

    In this order, each as little as suffices, with what came before it at its least: smaller batches (and more of them
    to a step), 4-bit weights, checkpointing, a shorter length, a lower rank.

    Args:
        peak_of: the peak of a setting in bytes; it grows with batch, length and rank.
        longest: tokens of the longest row: a limit above it changes nothing.
        may_quantize: whether 4-bit weights are possible there.
        may_shrink_rank: whether there are adapters whose rank is free.
    """
    least = setting
    for smaller in _stages(setting, longest, may_quantize, may_shrink_rank):
        candidates = smaller(least)
        if not candidates:
            continue
        least = candidates[-1]
        if peak_of(least) <= ROOM * available:
            return _first_fit(candidates, lambda one: peak_of(one) <= ROOM * available)
    return None


def _stages(setting: Setting, longest: int, may_quantize: bool, may_shrink_rank: bool) -> Iterator:
    """Functions from the least setting up to now to its smaller neighbours, the nearest first."""

    def batches(least):
        sizes = [size for size in range(least.batch_size - 1, 0, -1) if least.effective % size == 0]
        return [change(least, batch_size=size, grad_accum=least.effective // size) for size in sizes]

    yield batches
    if may_quantize and not setting.four_bit:
        yield lambda least: [change(least, four_bit=True)]
    if not setting.checkpointing:
        yield lambda least: [change(least, checkpointing=True)]
    yield lambda least: [change(least, max_len=length) for length in LENGTHS if length < min(longest, least.max_len)]
    if may_shrink_rank:
        yield lambda least: [change(least, lora_r=rank) for rank in RANKS if rank < least.lora_r]


change = dataclasses.replace


def _first_fit(candidates: list[Setting], fits: Callable[[Setting], bool]) -> Setting:
    """The first of ever smaller candidates that fits, found by halving; the last one is known to."""
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(candidates[middle]) else (middle + 1, high)
    return candidates[high]
