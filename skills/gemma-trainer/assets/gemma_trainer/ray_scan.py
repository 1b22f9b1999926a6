"""All rows of a data set, looked at by the machines of a Ray cluster: the pieces, and the order, of `scan.scan`.

Ray Data runs the pieces: a pool of actors, each of which keeps the checker with its processor and what it knows of
media; results in the order of the pieces, and no more of them in flight than Ray's object store has room for. A piece
gives the same result wherever, and however often, it is done, so Ray may do those of a lost node anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DataError, EnvironmentUnfit, Interrupted, OutOfMemory
from .files import silent_stderr
from .scan import Progress, cores, cut

if TYPE_CHECKING:  # imports numpy, which is too heavy to tell that Ray is not there
    from .tally import Checker, Tally

INSTALL = 'pip install "ray[data]==2.60.0"'
RETRIES = 2  # times that a worker is begun anew, or a piece is given to another, after a node or a process died
CONNECT_SECONDS = 10
BLOCKS = 10_000  # that Ray Data keeps account of; of a set with more pieces, each block has several
SHARED = "data, their media and the cache of hub and parquet files (HF_HOME) must lie on a disk that all nodes share"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
         "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # fmt: skip


def must_be_installed() -> None:
    """Refuse to begin without Ray, before anything heavy is imported; raises EnvironmentUnfit."""
    if find_spec("ray") is None:
        raise EnvironmentUnfit(f"--engine ray: Ray is not installed: {INSTALL}")


def scan(checker: Checker, total: int, workers: int | None = None, doing: str = "rows") -> Iterator[Tally]:
    """Yield `checker(start, stop)` of consecutive pieces of `range(total)`, in order, as `scan.scan` does.

    Args:
        workers: actors, of a core each; by default one for each core that the cluster has when the scan begins.

    The cluster is the one that RAY_ADDRESS names; without that a Ray of this machine alone is started, and ended.

    Raises:
        EnvironmentUnfit: no cluster answers there, or a node of it lacks a package.
        DataError: a node lacks a file.
        OutOfMemory: a worker was killed, and those begun in its place.
    """
    with _native_code_silent(), _connected(workers) as ray, Progress(total, doing) as progress:
        workers = workers or int(ray.cluster_resources().get("CPU", 0))
        if not workers:
            raise EnvironmentUnfit("the Ray cluster has no node with a core to give")
        pieces = cut(total, workers)
        lacking = _Lacking(checker)
        with contextlib.closing(_answers(ray, checker, pieces, workers)) as answers:  # before Ray is gone
            for (start, stop), answer in zip(pieces, answers, strict=True):
                tally, problem, node = pickle.loads(answer)
                if problem is not None:
                    raise problem
                lacking.look(tally, node)
                progress.add(stop - start)
                yield tally


# ---- on this machine


@contextlib.contextmanager
def _connected(workers: int | None):
    """Ray, connected to a cluster; all of it gone at the end, with the signals handled as before."""
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    import ray

    if ray.is_initialized():
        raise EnvironmentUnfit("--engine ray: this process is connected to a Ray cluster already: ray.shutdown() first")
    address = os.environ.get("RAY_ADDRESS") or "local"  # without an address Ray looks for any cluster in /tmp
    _must_answer(address)
    local = {"num_cpus": workers or cores(), "include_dashboard": False} if address == "local" else {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if _is_main() else {}
    try:
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, runtime_env=_environment(), **local)
        finally:
            for number, handler in handlers.items():  # Ray's own ends the process, with another exit code
                signal.signal(number, handler)
        yield ray
    except SystemExit:  # of Ray's handler, while it was connecting
        raise Interrupted("terminated before anything new was saved; what was there stays as it is", 143) from None
    except (ConnectionError, TimeoutError) as problem:
        told = str(problem).strip().splitlines()[0][:200]
        raise EnvironmentUnfit(f"no Ray cluster answers at RAY_ADDRESS={address} ({told})") from None
    except (ray.exceptions.RayError, RuntimeError) as problem:
        raise _told(problem, ray) from None
    finally:
        ray.shutdown()


def _must_answer(address: str) -> None:
    """Refuse an address where nothing listens, for which Ray would wait for minutes (EnvironmentUnfit)."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not (separator and port.isdigit()):  # local, or auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as problem:
        raise EnvironmentUnfit(f"no Ray cluster answers at RAY_ADDRESS={address} ({problem})") from None


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def _native_code_silent():
    """Ray's C++ writes errors to file descriptor 2 that are none, such as one of the arguments of Ray Data's actors:
    what Python writes to stderr goes around it."""
    told, around = sys.stderr, None
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no stderr, or none of the operating system
        if told.fileno() == 2:
            around = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    try:
        with silent_stderr():
            yield
    finally:
        sys.stderr = told
        if around:
            around.close()


def _environment() -> dict:
    """What the workers need of this process: this library, which is installed nowhere, and where to look for models."""
    taken = {name: value for name, value in os.environ.items() if name.startswith("HF_") and "TOKEN" not in name}
    return {"py_modules": [str(Path(__file__).resolve().parent)], "excludes": ["__pycache__"],
            "env_vars": taken | {"TOKENIZERS_PARALLELISM": "false"}}  # fmt: skip


def _answers(ray, checker: Checker, pieces: list[tuple[int, int]], workers: int) -> Iterator[bytes]:
    """What `_Worker` makes of each piece, in order."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False
    if not pieces:
        return
    items = [{"start": start, "stop": stop} for start, stop in pieces]
    # From items rather than a range: a range is read by tasks, which would want a core beside the actors.
    blocks = ray.data.from_items(items, override_num_blocks=min(len(items), BLOCKS))
    with warnings.catch_warnings():
        # Ray 2.64 is to take the last two away. Without them a piece that kills its worker is tried for ever.
        warnings.simplefilter("ignore")
        rows = blocks.map_batches(
            _Worker,
            fn_constructor_args=(ray.put(checker), os.getcwd()),
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
            batch_size=1,
            batch_format="pyarrow",
            max_restarts=RETRIES,
            max_task_retries=RETRIES,
        )
    for row in rows.iter_rows():
        yield row["answer"]


def _told(problem: Exception, ray):
    """The error to tell for one of Ray."""
    gone = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)
    seen, found = set(), problem
    while found is not None and id(found) not in seen:
        if isinstance(found, gone) or isinstance(getattr(found, "cause", None), gone):
            return OutOfMemory("workers of the Ray cluster were killed, again and again, probably for lack of memory: "
                               "lower --num-workers")  # fmt: skip
        if isinstance(found, ray.exceptions.RuntimeEnvSetupError):
            return EnvironmentUnfit(f"a node of the Ray cluster cannot take this library's code ({_first_line(found)})")
        if isinstance(found, ray.exceptions.ObjectStoreFullError | ray.exceptions.OutOfDiskError):
            return EnvironmentUnfit("no room left for Ray's object store: free memory, /dev/shm or disk on the nodes")
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return problem


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [""])[0][:200]


class _Lacking:
    """Finds nodes that miss media which lie on this machine: there a set would look worse than it is."""

    def __init__(self, checker: Checker):
        self.checker, self.looked = checker, set()

    def look(self, tally: Tally, node: str) -> None:
        """Raises DataError, where the first medium that a node misses is here."""
        missing = tally.findings.found.get("media_missing")
        if not missing or node in self.looked:
            return
        self.looked.add(node)
        position, name, _ = missing.rows[0]
        if not self.checker(position, position + 1).findings.count("media_missing"):
            raise DataError(f"{name}: its media are here, but not on node {node}: {SHARED}")


# ---- on the machines of the cluster


class _Worker:
    """An actor of Ray Data. Problems are handed back as they are, where Ray would wrap them and write them out."""

    def __init__(self, checker, folder: str):
        self.reference, self.folder, self.checker = checker, folder, None

    def __call__(self, batch):
        import pyarrow

        node, (piece,) = node_name(), batch.to_pylist()
        try:
            self.checker = self.checker or self._ready(node)
            answer = self.checker(piece["start"], piece["stop"]), None, node
        except Exception as problem:
            answer = None, problem, node
        return pyarrow.table({"answer": pyarrow.array([_pickled(answer)], pyarrow.large_binary())})

    def _ready(self, node: str) -> Checker:
        """The checker, once it is sure that this node has what it needs."""
        import ray

        with contextlib.suppress(OSError):
            os.chdir(self.folder)  # where relative names begin
        try:
            checker = ray.get(self.reference)
        except ray.exceptions.RaySystemError as problem:  # of what went wrong as the checker was unpacked
            raise _unfit(problem.__cause__ or problem, node) from None
        except Exception as problem:
            raise _unfit(problem, node) from None
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        for part in checker.rows.parts:
            _must_be_here(part, node, self.folder)
        return checker


def node_name() -> str:
    import ray

    return f"{socket.gethostname()} ({ray.util.get_node_ip_address()})"


def _unfit(problem: BaseException, node: str) -> Exception:
    if isinstance(problem, ImportError) or "No module named" in str(problem):
        told = str(problem).strip().splitlines()[-1][:200]
        return EnvironmentUnfit(f"node {node}: {told}: install there what assets/requirements.txt lists")
    if isinstance(problem, OSError):
        return DataError(f"node {node}: {problem.filename}: {problem.strerror}: {SHARED}")
    return problem


def _must_be_here(part, node: str, folder: str) -> None:
    """Refuse to read another file than the one that was indexed (DataError). Times may differ between nodes."""
    if part.stamp is None:  # of a hub data set, which was found in the cache
        return
    now = part._stamp()
    if now is None:
        raise DataError(f"{Path(folder, part.place)}: not there on node {node}: {SHARED}")
    if now[0] != part.stamp[0]:
        raise DataError(f"{Path(folder, part.place)}: another file on node {node}: {SHARED}")


def _pickled(answer: tuple) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception as problem:  # an error that holds what cannot be sent
        return pickle.dumps(
            (None, RuntimeError(f"{type(answer[1]).__name__} on node {answer[2]}: {problem}"), answer[2])
        )
