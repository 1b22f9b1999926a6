"""All rows of a data set, looked at by all cores: pieces go out, results come back in order, and memory stays flat."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

PIECE = 256  # rows a worker takes at a time
FEW = 64  # rows that are not worth a second process
TELL_EVERY = 10.0  # seconds, where stderr is no terminal

_work: list = []  # in a worker process: what it does


def scan(work: Callable[[int, int], object], total: int, workers: int | None = None, doing: str = "rows") -> Iterator:
    """Yield `work(start, stop)` of consecutive pieces of `range(total)`, in order.

    Args:
        work: picklable, where the platform cannot fork.
        workers: processes; by default all cores, and none beside this one for a few rows.
        doing: what the progress bar calls it.

    Raises:
        BrokenProcessPool: a worker was killed.
    """
    workers = workers or (_cores() if total > FEW else 1)
    size = max(1, min(PIECE, -(-total // (4 * workers))))
    pieces = [(start, min(start + size, total)) for start in range(0, total, size)]
    with Progress(total, doing) as progress:
        results = (work(*piece) for piece in pieces) if workers == 1 else _in_processes(work, pieces, workers)
        for (start, stop), result in zip(pieces, results, strict=True):
            progress.add(stop - start)
            yield result


def _in_processes(work, pieces, workers: int) -> Iterator:
    method = "fork" if sys.platform == "linux" else "spawn"  # a fork shares what was loaded
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work, os.getpid()))
    try:
        waiting: deque = deque()
        for piece in pieces:
            waiting.append(pool.submit(_do, *piece))
            if len(waiting) > 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    os.environ["RAYON_NUM_THREADS"] = "1"
    gc.freeze()  # what was loaded before need not be looked through for garbage, nor its memory be written to
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work[:] = [work]


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # the main process was killed


def _do(start: int, stop: int):
    return _work[0](start, stop)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """How far a long piece of work has come: a bar on a terminal; else a line now and then. A context."""

    def __init__(self, total: int, doing: str):
        self.total, self.doing, self.done = total, doing, 0
        self.begun = self.told = time.monotonic()
        self.bar = None

    def __enter__(self):
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, unit=" rows", desc=self.doing, leave=False)
        return self

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.bar:
            self.bar.update(count)
        elif now - self.told > TELL_EVERY and self.done < self.total:
            self.told = now
            speed = self.done / (now - self.begun)
            print(f"{self.doing}: {self.done:,} of {self.total:,}, {speed:,.0f} a second", file=sys.stderr, flush=True)

    def __exit__(self, *exception):
        if self.bar:
            self.bar.close()
