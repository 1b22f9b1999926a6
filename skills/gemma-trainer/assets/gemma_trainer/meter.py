"""How fast a run goes, what it waits for, and how much memory it takes, from one log to the next."""

from __future__ import annotations

import platform
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path


class Meter:
    """Reads what happened since the last reading. Evaluation, checkpoints and sample answers are no part of it.

    `waited` is for the caller to add to: seconds spent waiting for batches.
    """

    def __init__(self):
        self._restart()

    def _restart(self) -> None:
        self.waited = self.busy = 0.0
        self.counts: Counter[str] = Counter()
        self._began: float | None = None

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def end_step(self) -> None:
        if self._began is not None:
            self.busy += time.monotonic() - self._began
            self._began = None

    def count(self, counts: Mapping[str, int]) -> None:
        self.counts.update({name: counts.get(name, 0) for name in ("tokens", "padding")})

    def read(self) -> dict[str, float]:
        """{"tokens_per_second", "data_wait" and "padding" (shares of 1), "memory_mb" (the peak so far)}."""
        tokens, padding = self.counts["tokens"], self.counts["padding"]
        read = {
            "tokens_per_second": round(tokens / self.busy, 1) if self.busy else 0.0,
            "data_wait": round(self.waited / self.busy, 4) if self.busy else 0.0,
            "padding": round(padding / max(tokens + padding, 1), 4),
            "memory_mb": peak_memory_mb(),
        }
        self._restart()
        return read


def give_freed_memory_back() -> None:
    """Have memory that is freed go back to the system at once, where glibc manages it; for training on a CPU.

    By itself glibc keeps blocks of up to 32 MiB to hand them out again, and what a step keeps and what it makes in
    passing lie mixed: a run takes a quarter to a half more than it needs, and nobody can say how much.

    Source: mallopt(3); M_TRIM_THRESHOLD is -1, M_MMAP_THRESHOLD -3.
    """
    import ctypes

    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**20)
        libc.mallopt(-1, 2**23)


def peak_memory_mb() -> int:
    """The most memory this process has taken up to now: of the GPU where there is one, else its resident set."""
    import torch

    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.M)):
        return round(int(found[1]) / 2**10)  # what getrusage says begins with the peak of who started the process
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))
