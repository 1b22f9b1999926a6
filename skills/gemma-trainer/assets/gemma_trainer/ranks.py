"""The processes of one run, as `accelerate launch` and `torchrun` start them: who is who, and what they must agree on.

A rank that does something alone, such as stopping, leaves the others waiting for it for ever. So whatever is decided
from one rank's own clock, signals or rows is agreed upon here first. With a single process all of it is free.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import time


def rank() -> int:
    """The number of this process, 0 for the one that writes and tells."""
    return int(os.environ.get("RANK", 0))


def world() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", 1))


def kind() -> str:
    """How the weights lie, by what `accelerate launch` was told: "whole" on each rank, or "fsdp" or "deepspeed"."""
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            return name.lower()
    return "whole"


def begin() -> None:
    """Join the other ranks, before anything is agreed upon. Nothing to do where there are none.

    Raises:
        RuntimeError: the others cannot be reached.
    """
    if world() > 1:
        import torch
        from accelerate import PartialState

        on_cpu = not torch.cuda.is_available()
        state = PartialState(cpu=on_cpu)
        if state.num_processes != world():
            raise RuntimeError(f"{world()} processes were started, and {state.num_processes} found each other")
        if on_cpu and kind() == "fsdp":
            _spread_over_cpus()


def _spread_over_cpus() -> None:
    """Have accelerate use FSDP on CPUs, too, where a run can be tried out as it will be on GPUs. It does so for a list
    of devices (accelerate/state.py, `AcceleratorState.__init__`) that lacks CPUs, which PyTorch's FSDP2 knows."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    begin_state = AcceleratorState.__init__

    @functools.wraps(begin_state)
    def init(self, *args, fsdp_plugin=None, **kwargs):
        begin_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.fsdp_plugin, self.distributed_type = fsdp_plugin, DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def gathered(value) -> list:
    """Every rank's value, in the order of the ranks. All of them have to ask."""
    if world() == 1:
        return [value]
    from accelerate.utils import gather_object

    return gather_object([value])


def agreed(value):
    """What rank 0 has, for all."""
    return gathered(value)[0]


def summed(numbers: list[int]) -> list[int]:
    """The sums over the ranks. All of them have to ask, with as many numbers."""
    return [sum(column) for column in zip(*gathered(numbers), strict=True)]


def name() -> str:
    """What this rank is called in messages: nothing where it is alone."""
    return f"rank {rank()} on {platform.node()}: " if world() > 1 else ""


def leave_word(message: str, exit_code: int) -> None:
    """Tell the launcher why this rank ends, in the form that torch.distributed.elastic reads; it shows the rank that
    failed first as the root cause, and ends the others (torch/distributed/elastic/multiprocessing/errors)."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}, "errorCode": exit_code}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": told}, file)
        except OSError:  # it has been told on stderr
            pass
