"""All cores look at the pieces of a data set; results come in order, and nothing outlives the main process."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import ASSETS
from gemma_trainer import duplicates
from gemma_trainer.errors import OutOfMemory
from gemma_trainer.scan import FEW, PIECE, scan

NONE_COMMON = np.zeros(2**duplicates.TABLE_BITS, bool)


def numbers(start, stop):
    return list(range(start, stop))


def fails(start, stop):
    raise ValueError(f"piece {start}")


def dies(start, stop):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("workers", [None, 1, 2, 3])
@pytest.mark.parametrize("total", [0, 1, FEW, FEW + 1, 5 * PIECE + 3])
def test_every_row_comes_once_and_in_order(total, workers):
    assert [row for piece in scan(numbers, total, workers) for row in piece] == list(range(total))


def test_an_error_and_a_killed_worker_end_the_scan():
    with pytest.raises(ValueError, match="piece"):
        list(scan(fails, 1000, 2))
    with pytest.raises(OutOfMemory, match="killed"):
        list(scan(dies, 1000, 2))


def writes_much(start, stop):
    return b"x" * 10_000_000


def test_a_worker_that_is_killed_while_it_answers_does_not_hang_the_scan():
    before = children()
    pieces = scan(writes_much, 40 * PIECE, 2)
    next(pieces)
    time.sleep(0.5)  # both workers are in the middle of an answer that nobody takes
    workers = children() - before
    assert len(workers) == 2
    workers.pop().kill()
    with pytest.raises(OutOfMemory):
        for _ in pieces:
            pass


def children():
    """The processes that this one has started; other tests may have left some."""
    import psutil

    return set(psutil.Process().children())


def sketched(start, stop):
    return duplicates.sketches([f"some text of row {number}" for number in range(start, stop)], NONE_COMMON)[0]


def test_what_the_main_process_has_used_does_not_hang_its_workers():
    sketched(0, 10)
    sketched(0, 5000)  # enough for threads
    assert len(np.concatenate(list(scan(sketched, 5000, 2)))) == 5000


def test_who_stops_early_leaves_no_process_behind():
    before = children()
    for piece in scan(numbers, 100_000, 2):
        assert piece
        break
    deadline = time.monotonic() + 10
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children() - before


def test_workers_end_when_the_main_process_is_killed(tmp_path):
    import psutil

    code = f"""
import sys, time
sys.path.insert(0, {str(ASSETS)!r})
from gemma_trainer.scan import scan
def slow(start, stop):
    print(flush=True)
    time.sleep(0.2)
for _ in scan(slow, 10**6, 2):
    pass
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.read(1)
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
