"""All rows of a data set, looked at by all cores: pieces go out, results come back in order, and memory stays flat."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait

from .errors import OutOfMemory

PIECE = 1024  # rows a worker takes at a time
FEW = 64  # rows that are not worth a second process
TELL_EVERY = 10.0  # seconds, where stderr is no terminal


def scan(work: Callable[[int, int], object], total: int, workers: int | None = None, doing: str = "rows") -> Iterator:
    """Yield `work(start, stop)` of consecutive pieces of `range(total)`, in order.

    Args:
        work: picklable, where the platform cannot fork.
        workers: processes; by default all cores, and none beside this one for a few rows.
        doing: what the progress bar calls it.

    Raises:
        OutOfMemory: a worker was killed.
    """
    workers = workers or (cores() if total > FEW else 1)
    pieces = cut(total, workers)
    with Progress(total, doing) as progress:
        results = (work(*piece) for piece in pieces) if workers == 1 else _in_processes(work, pieces, workers)
        for (start, stop), result in zip(pieces, results, strict=True):
            progress.add(stop - start)
            yield result


def cut(total: int, workers: int) -> list[tuple[int, int]]:
    """Consecutive pieces (start, stop) of `range(total)`: several for each worker, and none too large."""
    size = max(1, min(PIECE, -(-total // (4 * workers))))
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _in_processes(work, pieces: list[tuple[int, int]], workers: int) -> Iterator:
    """Hand pieces out to a team of processes, each with a pipe of its own, and yield the results in order."""
    team = _Team(work, workers)
    try:
        given, results = 0, {}
        for wanted in range(len(pieces)):
            while wanted not in results:
                while given < len(pieces) and team.idle and given < wanted + 4 * workers:
                    team.give(given, pieces[given])
                    given += 1
                results |= team.take()
            yield results.pop(wanted)
    finally:
        team.end()


class _Team:
    """Processes that do pieces of work. They hold nothing of worth, so they are killed when no longer needed."""

    def __init__(self, work, workers: int):
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")  # a fork shares memory
        self.processes, self.idle, self.busy = [], [], []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()  # so that a worker's death ends what it was writing
            self.processes.append(process)
            self.idle.append(ours)

    def give(self, number: int, piece: tuple[int, int]) -> None:
        pipe = self.idle.pop()
        self.busy.append(pipe)
        try:
            pipe.send((number, piece))
        except OSError:
            raise _killed() from None

    def take(self) -> dict[int, object]:
        """What has been done since, by the numbers of the pieces; waits for one at least."""
        done = {}
        for pipe in wait(self.busy):
            try:
                number, result, error = pipe.recv()
            except (EOFError, OSError):
                raise _killed() from None
            if error is not None:
                raise error
            self.busy.remove(pipe)
            self.idle.append(pipe)
            done[number] = result
        return done

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _killed() -> OutOfMemory:
    return OutOfMemory("a worker process was killed, probably for lack of memory: lower --num-workers")


def _serve(work, pipe, parent: int) -> None:
    """What a worker does all its life."""
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a group: the main process ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    gc.freeze()  # what was loaded before need not be looked through for garbage, nor its memory be written to
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        number, piece = pipe.recv()
        try:
            answer = number, work(*piece), None
        except Exception as problem:
            answer = number, None, problem
        pipe.send(answer)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # the main process was killed


def cores() -> int:
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
