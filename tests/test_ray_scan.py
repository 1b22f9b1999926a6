"""`check --engine ray`: the verdict of the local engine, by two nodes of a Ray cluster; what a node lacks is told."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image
from test_dataset_prep import BAD, check, found, plain, said, write  # noqa: F401
from test_duplicates import texts

from conftest import ASSETS, ask, talk
from gemma_trainer import ray_scan
from gemma_trainer.errors import DataError, EnvironmentUnfit, OutOfMemory
from gemma_trainer.findings import Findings
from gemma_trainer.tally import Tally

PREP = str(ASSETS / "dataset_prep.py")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of a core each, on this machine; RAY_ADDRESS names them."""
    os.environ.update(ray_scan.QUIET)
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    made.add_node(wait=False, num_cpus=1, include_dashboard=False)
    made.add_node(wait=False, num_cpus=1)
    made.wait_for_nodes(timeout=120)  # 30 are too few for a machine that is busy
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()  # of a test that failed
    made.shutdown()


def troubled(folder, media):
    """A set with every kind of trouble: (rows, rows for evaluation)."""
    rng = random.Random(0)
    rows = [talk(text, rng.choice(["yes", "no", "", "<bos>", "long " * 30])) for text in texts(700, words=30)]
    rows += rng.sample(rows, 40) + list(BAD.values()) + [ask(media, "red.png", "one.wav", answer="Both")]
    close = texts(1, words=200)[0]
    rows += [talk(close, "fine"), talk(f"{close} indeed", "fine"), talk("Hi", "b" * 9000), talk("schÃ¶n", "hm")]
    rows += [talk([{"type": "image", "image": str(media / "page.jpg")}], "b"), {"prompt": "a", "completion": "b"}]
    rows += [
        {"messages": [said("user", "a"), said("assistant", "b", reasoning="Hm."), said("user"), said("assistant")]}
    ]
    Image.new("RGB", (40, 400), "red").save(folder / "thin.png")
    soundfile.write(folder / "loud.wav", np.random.default_rng(0).normal(0, 0.1, (44_100, 2)), 44_100)
    rows += [talk("What?", "x", image="thin.png"), talk("What?", "x", audio="loud.wav")]
    held = [rows[3], talk("something else", "fine"), ask(media, "red.png", answer="Red")]
    return write(folder / "rows.jsonl", rows), write(folder / "held.jsonl", held)


def test_two_nodes_find_what_the_local_engine_finds(cluster, check, media, tmp_path, monkeypatch):  # noqa: F811
    data, held = troubled(tmp_path, media)
    monkeypatch.chdir(tmp_path)  # relative names, too, mean the same to the workers
    flags = [data.name, "--eval-dataset", held.name, "--model", "demo", "--max-len", "300", "--num-workers", "2"]
    local = check(*flags, "--output", "local.jsonl")
    handlers = signal.getsignal(signal.SIGTERM)
    code, result = check(*flags, "--output", "ray.jsonl", "--engine", "ray")
    assert (code, result | {"output": "local.jsonl"}) == local
    assert Path("ray.jsonl").read_text() == Path("local.jsonl").read_text()
    assert len(found(result)) > 30 and found(result).keys() >= {"over_max_len", "near_duplicates", "eval_overlap"}
    assert signal.getsignal(signal.SIGTERM) is handlers
    import ray

    assert not ray.is_initialized()


class Telling:
    """In place of a checker: each piece tells where it was done, in the code that its node was sent."""

    def __init__(self, path, dies=False):
        from gemma_trainer.sources import open_rows

        self.rows, self.dies = open_rows([str(path)]), dies

    def __call__(self, start, stop):
        import ray

        import gemma_trainer

        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        tally = Tally(Findings(), rows=stop - start)
        tally.count("node", ray.get_runtime_context().get_node_id())
        tally.count("code", gemma_trainer.__file__)
        tally.lengths = [(start, stop)]
        met = self.rows.parts[0].place.parent / "nodes"
        met.mkdir(exist_ok=True)
        (met / ray.get_runtime_context().get_node_id()).touch()
        deadline = time.monotonic() + 60
        while len(list(met.iterdir())) < 2 and time.monotonic() < deadline:  # until the other one is at work, too
            time.sleep(0.05)
        time.sleep(0.05 if start else 0.5)  # the first piece is done last
        return tally


@pytest.fixture
def telling(monkeypatch):
    """Makes such checkers; this file is no module that the nodes could import."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield Telling
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_both_nodes_work_with_the_code_that_is_sent_and_results_come_in_order(cluster, telling, tmp_path):
    data = write(tmp_path / "rows.jsonl", plain(40, words=8))
    total, spans = Tally(Findings()), []
    for tally in ray_scan.scan(telling(data), 40, 2):
        spans += tally.lengths
        total.merge(tally)
    assert spans == [(start, start + 5) for start in range(0, 40, 5)]
    assert len(total.counts["node"]) == 2
    assert all("py_modules_files" in path for path in total.counts["code"]), total.counts["code"]


def test_a_worker_that_is_killed_each_time_ends_the_scan(cluster, telling, tmp_path):
    data = write(tmp_path / "rows.jsonl", plain(4, words=8))
    with pytest.raises(OutOfMemory, match="again and again"):
        list(ray_scan.scan(telling(data, dies=True), 4, 1))


def test_a_node_that_lacks_the_file_ends_the_scan_and_is_named(cluster, tmp_path):
    from gemma_trainer.media import MediaAccess
    from gemma_trainer.sources import open_rows
    from gemma_trainer.tally import Checker

    rows = open_rows([str(write(tmp_path / "rows.jsonl", plain(4, words=8)))])
    rows.parts[0].place = tmp_path / "only-here.jsonl"
    checker = Checker(rows, "sft", MediaAccess(), None, np.zeros(2**20, bool), 4)
    with pytest.raises(DataError, match=r"only-here.jsonl: not there on node \S+ \([\d.]+\): data, their media"):
        list(ray_scan.scan(checker, 4, 1))


# ---- without a cluster


def part(path):
    from gemma_trainer.sources import open_rows

    return open_rows([str(path)]).parts[0]


def test_a_node_without_the_data_is_named(tmp_path):
    data = write(tmp_path / "rows.jsonl", plain(4, words=8))
    there = part(data)
    ray_scan._must_be_here(there, "node-7", str(tmp_path))
    os.utime(data, (1, 1))  # another time is no other file
    ray_scan._must_be_here(there, "node-7", str(tmp_path))
    write(data, plain(5, words=8))
    with pytest.raises(DataError, match="another file on node node-7"):
        ray_scan._must_be_here(there, "node-7", str(tmp_path))
    data.unlink()
    with pytest.raises(DataError, match=f"{data}: not there on node node-7: .*disk that all nodes share"):
        ray_scan._must_be_here(there, "node-7", str(tmp_path))


def test_a_node_without_the_media_is_named_and_media_that_are_nowhere_are_not(tmp_path, media):
    from gemma_trainer.media import MediaAccess
    from gemma_trainer.sources import open_rows
    from gemma_trainer.tally import Checker

    data = write(tmp_path / "rows.jsonl", [ask(media, "red.png"), talk("a", "b", image="none.png")])
    common = np.zeros(2**20, bool)
    lacking = ray_scan._Lacking(Checker(open_rows([str(data)]), "sft", MediaAccess(), None, common, 2))
    tally = Tally(Findings())
    tally.findings.add("media_missing", 1, "rows.jsonl:2")
    lacking.look(tally, "node-1")
    tally = Tally(Findings())
    tally.findings.add("media_missing", 0, "rows.jsonl:1")
    with pytest.raises(DataError, match="rows.jsonl:1: its media are here, but not on node node-2"):
        lacking.look(tally, "node-2")


def test_a_node_without_a_package_or_the_cache_is_named():
    problem = ray_scan._unfit(ModuleNotFoundError("No module named 'rensa'"), "node-3")
    assert isinstance(problem, EnvironmentUnfit) and "node node-3: No module named 'rensa'" in str(problem)
    problem = ray_scan._unfit(FileNotFoundError(2, "No such file or directory", "/cache/a.arrow"), "node-3")
    assert isinstance(problem, DataError) and "node node-3: /cache/a.arrow: No such file" in str(problem)


def test_an_address_where_no_cluster_is(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    checker = types.SimpleNamespace()
    with pytest.raises(EnvironmentUnfit, match="no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"):
        list(ray_scan.scan(checker, 4, 1))


def test_without_ray_the_command_that_installs_it_is_told_before_anything_is_imported(tmp_path):
    data = write(tmp_path / "rows.jsonl", plain(4, words=8))
    code = f"""
import runpy, sys
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *more: None if name == "ray" else find(name, *more)
sys.argv = [{PREP!r}, "check", {str(data)!r}, "--engine", "ray"]
try:
    runpy.run_path({PREP!r}, run_name="__main__")
finally:
    print("numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4 and done.stdout == "False\n", done.stderr
    assert 'pip install "ray[data]==' in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_ray_of_this_machine_is_started_and_ended_with_the_command(tmp_path):
    """Here by SIGTERM, in the middle of the work: nothing of it is left, and nothing of Ray's chatter told."""
    import psutil

    data = write(tmp_path / "rows.jsonl", [json.dumps(talk("question " * 30, ""))] * 400_000)
    command = [sys.executable, PREP, "check", str(data), "--engine", "ray", "--num-workers", "2", "--json"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    mine, deadline = psutil.Process(process.pid), time.monotonic() + 60
    started = []
    while time.monotonic() < deadline and not any("_Worker" in name for name in map(title, started)):
        started = mine.children(recursive=True)
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143 and json.loads(stdout)["error"]["kind"] == "interrupted", stderr
    assert [line for line in stderr.splitlines() if not line.startswith("checked: ")] == [
        "error: terminated before anything new was saved; what was there stays as it is"
    ]
    assert started and not psutil.wait_procs(started, timeout=20)[1]


def title(process):
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
