"""What doctor.py finds on a machine: this one, and others that small stand-ins make of it."""

import ast
import json
import os
import platform
import re
import subprocess
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from conftest import ASSETS, ROOT
from gemma_trainer import hub, machine, packages

DOCTOR = ASSETS / "doctor.py"


def install(folder, name, version=None, requires=(), code=None):
    """A stand-in of a package in `folder`: its metadata (damaged without a version), and its code."""
    info = folder / f"{name}-{version or '1.0'}.dist-info"
    info.mkdir(parents=True)
    if version:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join(lines + [f"Requires-Dist: {text}" for text in requires]) + "\n")
    if code is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)


def items_of(done):
    return {item["name"]: item for item in json.loads(done.stdout)["items"]}


@pytest.fixture
def cuda(monkeypatch):
    """A machine with two GPUs, which compute on the CPU."""
    gpu = types.SimpleNamespace(name="NVIDIA X", total_memory=80 * 2**30, major=9, minor=0)
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (70 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None: ones(*shape))


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver, of which nvidia-smi tells the version."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "absent")


@pytest.fixture
def forget():
    """Imports are tried once a process; these tests try them anew."""
    packages.import_problem.cache_clear()
    yield
    packages.import_problem.cache_clear()


# ---- the script


def test_here_nothing_fails_and_json_tells_every_item_in_a_few_seconds(script):
    before = os.times()
    done = script("doctor.py", "--model", "demo", "--json", env={"OMP_NUM_THREADS": "1"})
    after = os.times()
    result, items = json.loads(done.stdout), items_of(done)
    assert done.returncode == 0 and result["exit_code"] == 0, done.stdout
    assert result["verdict"] in ("OK", "WARN") and {item["verdict"] for item in items.values()} <= {"OK", "WARN"}
    assert all(bool(item.get("remedy")) == (item["verdict"] != "OK") for item in items.values())
    assert items["python"]["facts"]["version"] == platform.python_version()
    assert items["device"]["facts"]["device"] == "cpu" and items["precision"]["facts"]["dtype"] == "float32"
    assert items["backend"]["facts"]["takes"] == "hf" and items["bitsandbytes"]["finding"].startswith("not needed")
    assert items["torch"]["facts"]["version"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert items["model"]["verdict"] == "OK" and "offline" in items["hub"]["finding"]
    used = after.children_user - before.children_user + after.children_system - before.children_system
    assert used < 15  # seconds of a core; it takes some 8


def test_broken_packages_fail_and_all_else_is_still_told(script, tmp_path):
    install(tmp_path, "torch", "2.14.1", code="raise OSError('libcudart.so.13: cannot open shared object file')")
    install(tmp_path, "soundfile", "0.14.0", code="raise OSError('sndfile library not found')")
    install(tmp_path, "trl", "1.15.0")
    install(tmp_path, "peft")
    done = script("doctor.py", "--json", env={"PYTHONPATH": str(tmp_path)})
    items = items_of(done)
    assert done.returncode == 4 and json.loads(done.stdout)["verdict"] == "FAIL"
    assert "Traceback" not in done.stderr
    trl = packages.TESTED[packages.nearest_set()]["trl"]
    assert "1.15.0 is outside" in items["trl"]["finding"] and "CPU and MPS" in items["trl"]["finding"]
    assert items["trl"]["remedy"] == f"pip install trl=={trl}"
    assert "damaged" in items["peft"]["finding"] and "--force-reinstall" in items["peft"]["remedy"]
    assert "libcudart.so.13" in items["torch pair"]["finding"] and items["torch pair"]["verdict"] == "FAIL"
    assert "sndfile" in items["audio"]["finding"] and items["audio"]["verdict"] == "FAIL"
    for name in ("device", "precision", "threads"):
        assert items[name]["verdict"] == "WARN" and "torch does not work" in items[name]["finding"]
    for name in ("python", "torch", "images", "disk", "locale", "memory", "datasets"):
        assert items[name]["verdict"] != "FAIL", items[name]


def test_the_text_aligns_verdicts_and_puts_remedies_below(script, tmp_path):
    was_imported = tmp_path / "imported"
    install(tmp_path, "torchvision", "0.20.0", ["torch==2.5.0"], "raise RuntimeError('torchvision::nms is not there')")
    install(tmp_path, "unsloth", "2026.10.9", ["trl<1.0"], f"open({str(was_imported)!r}, 'w')")
    done = script("doctor.py", "--backend", "unsloth", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 4 and "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    width = lines[0].index("OK")
    assert all(line[width:].split("  ")[0] in ("OK", "WARN", "FAIL") or line[: width + 6].isspace() for line in lines)
    told = {line[: width - 2].strip(): (line, below) for line, below in zip(lines, [*lines[1:], ""], strict=True)}
    line, remedy = told["torch pair"]
    minor = int(torch.__version__.split(".")[1])
    assert "torchvision::nms is not there" in line and f"'torchvision~=0.{minor + 15}.0'" in remedy
    assert "torchvision requires torch==2.5.0" in told["requirements"][0]
    assert "unsloth requires trl<1.0" in told["requirements"][0] and "pip install" in told["requirements"][1]
    assert "it accelerates NVIDIA GPUs only" in told["backend"][0] and told["backend"][1].strip() == "--backend hf"
    assert re.fullmatch(r"verdict +FAIL +mend torchvision, torch pair, .*requirements first", lines[-1])
    assert not was_imported.exists()


@pytest.mark.parametrize("json_too", [False, True])
def test_an_older_python_is_told_in_one_line(json_too):
    ast.parse(DOCTOR.read_text(), feature_version=(3, 7))
    code = f"import runpy, sys; sys.version_info = (3, 10, 4); sys.argv = ['doctor.py'] + ['--json'] * {json_too}\n"
    code += f"runpy.run_path({str(DOCTOR)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4 and re.fullmatch(r"error: .*3\.11 to 3\.13 is needed.*\n", done.stderr)
    assert json.loads(done.stdout)["exit_code"] == 4 if json_too else not done.stdout


def test_a_newer_python_or_a_system_without_torch_fails(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert machine.python().verdict == "FAIL" and "3.11 to 3.13" in machine.python().finding
    for name, arch, remedy in (("Windows", "AMD64", "WSL"), ("Darwin", "x86_64", "arm64")):
        monkeypatch.setattr(platform, "system", lambda name=name: name)
        monkeypatch.setattr(platform, "machine", lambda arch=arch: arch)
        assert machine.system().verdict == "FAIL" and remedy in machine.system().remedy


def test_a_check_that_raises_is_a_finding():
    def broken():
        raise ZeroDivisionError("by\nzero")

    item = packages.run("odd", broken)
    assert (item.name, item.verdict) == ("odd", "FAIL") and "ZeroDivisionError: by" in item.finding and item.remedy
    assert machine.verdict([item, packages.ok("fine")]) == "FAIL"
    assert machine.verdict([packages.warn("odd", "mend"), packages.ok("fine")]) == "WARN"


# ---- packages


@pytest.mark.parametrize(("kind", "file"), [("default", "constraints.txt"), ("newest", "constraints-newest.txt")])
def test_the_tested_sets_are_what_the_constraints_pin(kind, file):
    lines = [line.split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line]
    pinned = {name.lower(): version for name, version in lines}
    tested = packages.TESTED[kind]
    assert {name: version for name, version in tested.items() if pinned.get(name, version) != version} == {}
    assert set(packages.CORE) <= set(tested) & set(pinned)
    assert set(tested) - set(pinned) <= {"unsloth", "bitsandbytes"}
    assert f'"bitsandbytes{packages.BITSANDBYTES}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("name", "version", "verdict", "words"), [
    ("trl", "1.14.2", "OK", "tested"),
    ("torch", "2.14.1+cu130", "OK", "tested"),
    ("trl", "1.16.3", "OK", "a patch away"),
    ("transformers", "5.20.0", "OK", "between"),
    ("trl", "1.17.0", "WARN", "newer"),
    ("torch", "2.10.0", "WARN", "older"),
    ("torch", "2.15.0.dev20261101", "WARN", "newer"),
    ("trl", "1.15.2", "FAIL", "fused loss head"),
    ("transformers", "5.16.0", "FAIL", "outside"),
    ("datasets", "6.0.0", "FAIL", "outside"),
])  # fmt: skip
def test_versions_alarm_only_where_they_should(monkeypatch, tmp_path, name, version, verdict, words):
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    item = packages.package(name)
    assert item.verdict == verdict and words in item.finding and item.facts["version"] == version
    tested = {versions[name] for versions in packages.TESTED.values()}
    assert verdict == "OK" or re.search(r"pip install \w+==(.*)", item.remedy)[1] in tested


def test_a_package_that_is_missing_or_too_old_is_told_with_what_to_install(monkeypatch, tmp_path):
    install(tmp_path, "jiwer", "3.0.0")
    (tmp_path / "requirements.txt").write_text("# ours\njiwer>=4\nno-such-package>=2,<3\ntorch>=2.9\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "REQUIREMENTS", tmp_path / "requirements.txt")
    item = packages.other_packages()
    assert item.verdict == "FAIL" and item.remedy == "pip install 'jiwer>=4' 'no-such-package<3,>=2'"
    assert "jiwer 3.0.0 is outside >=4" in item.finding and "no-such-package is not installed" in item.finding
    monkeypatch.setitem(packages.TESTED["default"], "no-such-package", "2.1")
    monkeypatch.setitem(packages.TESTED["newest"], "no-such-package", "2.1")
    item = packages.package("no-such-package")
    assert (item.verdict, item.finding) == ("FAIL", "not installed")
    assert item.remedy == "pip install no-such-package==2.1"


@pytest.mark.parametrize(("owner", "requires", "verdict", "remedy"), [
    ("torchvision", ["torch (==2.1.0)"], "FAIL", "'torch==2.1.0'"),
    ("trl", ["datasets>=900", "peft>=900; extra == 'x'", "torch<1; os_name == 'no'"], "FAIL", "'datasets>=900'"),
    ("trl", ["no_such_package>=2"], "WARN", "'no_such_package>=2'"),
    ("unsloth", ["trl<1.0"], "WARN", "'trl<1.0'"),
    ("trl", ["torch>=2.9", "transformers>=5"], "OK", ""),
])  # fmt: skip
def test_what_packages_require_of_each_other_is_checked(monkeypatch, tmp_path, owner, requires, verdict, remedy):
    install(tmp_path, owner, "1.14.2", requires)
    monkeypatch.syspath_prepend(tmp_path)
    item = packages.requirements()
    assert item.verdict == verdict, item
    assert item.remedy == (f"pip install {remedy}" if remedy else "")


def test_what_unsloth_refuses_fails_on_cuda_unless_the_run_does_without(monkeypatch, tmp_path, cuda):
    install(tmp_path, "unsloth", "2026.10.9", ["datasets<1", "peft==0.21.2"])
    install(tmp_path, "peft", "0.21.9")
    monkeypatch.syspath_prepend(tmp_path)
    item = packages.requirements("auto")
    assert item.verdict == "FAIL" and "unsloth requires datasets<1" in item.finding
    assert item.remedy == "pip install 'datasets<1' peft==0.21.2, or --backend hf"
    assert packages.requirements("hf").verdict == "WARN"


def test_torch_and_torchvision_really_work_together():
    item = packages.torch_pair()
    assert item.verdict == "OK" and torch.__version__ in item.finding


# ---- the device


def test_gpus_are_named_and_made_to_compute(monkeypatch, cuda, driver):
    item = machine.accelerator()
    assert item.verdict == "OK" and "2 x NVIDIA X, 80.0 GiB, compute capability 9.0" in item.finding
    assert "driver 550.54.15" in item.finding and f"CUDA {torch.version.cuda}" in item.finding
    assert item.facts["gpus"][1] == {"name": "NVIDIA X", "memory": 80 * 2**30, "capability": "9.0"}

    def no_kernel(*shape, device=None):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device")

    monkeypatch.setattr(torch, "ones", no_kernel)
    assert machine.accelerator().verdict == "FAIL" and "no kernel image" in machine.accelerator().finding


@pytest.mark.parametrize(("built", "hidden", "error", "verdict", "remedy"), [
    (None, None, "", "FAIL", "pip install --force-reinstall torch==2.14.1 torchvision==0.29.1"),
    ("13.0", "", "", "WARN", "unset CUDA_VISIBLE_DEVICES"),
    ("13.0", None, "The NVIDIA driver on your system is too old (12040).", "FAIL", "update the NVIDIA driver"),
    ("13.0", "9", "No CUDA GPUs are available", "FAIL", "unset CUDA_VISIBLE_DEVICES"),
    ("13.0", None, "No CUDA GPUs are available", "FAIL", "--gpus all"),
])  # fmt: skip
def test_why_torch_does_not_see_a_gpu_is_told(monkeypatch, driver, built, hidden, error, verdict, remedy):
    def init():
        raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    item = machine.accelerator()
    assert item.verdict == verdict and "NVIDIA driver 550.54.15 is there" in item.finding
    assert remedy in item.remedy and error in item.finding


def test_the_driver_is_read_where_the_kernel_tells_it(monkeypatch, tmp_path):
    told = tmp_path / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    )
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", told)
    assert machine.nvidia_driver() == "580.65.06"
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_driver() == ""


def test_apple_silicon_is_a_device_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), ""))
    assert machine.accelerator().finding == "Apple Silicon GPU (mps), macOS 15.1"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert machine.accelerator().verdict == "WARN" and "macOS 14" in machine.accelerator().remedy


def test_a_gpu_without_bfloat16_is_warned_of(monkeypatch, cuda):
    for native, verdict in ((False, "WARN"), (True, "OK")):
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, native=native: native or including_emulation,
        )
        assert machine.number_format().verdict == verdict


@pytest.mark.parametrize(("code", "verdict", "words"), [
    ("round(values * 4) / 4", "OK", "4-bit weights work"),
    ("values * 0", "FAIL", "other numbers"),
    ("values.no_such_kernel()", "FAIL", "no_such_kernel"),
])  # fmt: skip
def test_four_bit_weights_are_tried_on_cuda(monkeypatch, tmp_path, cuda, forget, code, verdict, words):
    install(tmp_path, "bitsandbytes", "0.50.2", code="")
    lines = "from torch import round\ndef quantize_4bit(values, quant_type): return values, quant_type\n"
    lines += f"def dequantize_4bit(values, kind):\n    assert kind == 'nf4'\n    return {code}\n"
    (tmp_path / "bitsandbytes" / "functional.py").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *numbers, device: linspace(*numbers))
    try:
        item = packages.bitsandbytes()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
            del sys.modules[name]
    assert item.verdict == verdict and words in item.finding, item
    assert verdict == "OK" or "--quantize none" in item.remedy


def test_without_bitsandbytes_a_gpu_gets_a_warning_and_a_cpu_none(monkeypatch, tmp_path, request):
    if packages.version_of("bitsandbytes") is not None:
        install(tmp_path, "bitsandbytes", "0.40.0")
        monkeypatch.syspath_prepend(tmp_path)
    assert packages.bitsandbytes().verdict == "OK"
    request.getfixturevalue("cuda")
    item = packages.bitsandbytes()
    assert (
        item.verdict != "OK"
        and item.remedy == f"pip install bitsandbytes=={packages.TESTED['default']['bitsandbytes']}"
    )


@pytest.mark.parametrize("with_unsloth", [False, True])
def test_triton_and_xformers_matter_to_unsloth_on_cuda(monkeypatch, tmp_path, request, forget, with_unsloth):
    for name in ("triton", "xformers"):
        install(tmp_path, name, "3.0.0", code="raise ImportError('built for another torch')")
    if with_unsloth:
        install(tmp_path, "unsloth", "2026.10.9", code="raise AssertionError('imported')")
    elif packages.version_of("unsloth"):
        pytest.skip("Unsloth is installed here")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("triton", "xformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert packages.triton().verdict == packages.xformers().verdict == "OK"  # on a CPU
    request.getfixturevalue("cuda")
    assert packages.triton().verdict == ("FAIL" if with_unsloth else "WARN")
    assert "built for another torch" in packages.triton().finding
    assert packages.xformers().verdict == ("WARN" if with_unsloth else "OK")
    assert packages.triton("hf").verdict == "WARN" and packages.xformers("hf").verdict == "OK"
    if with_unsloth:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # several are left to the plain backend
        assert machine.training_backend("auto").facts == {"takes": "unsloth", "unsloth": "2026.10.9"}


# ---- memory, cores, disk


def control_groups(monkeypatch, tmp_path, listing, files):
    (tmp_path / "own").write_text(listing)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(f"{text}\n")
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")


V2 = ("0::/pod/box\n", {
    "pod/memory.max": 3 * 2**30, "pod/memory.current": 2 * 2**30, "pod/memory.stat": f"anon 5\ninactive_file {2**30}",
    "pod/box/memory.max": "max", "pod/box/cpu.max": "150000 100000", "pod/cpu.max": "max 100000",
})  # fmt: skip
V1 = ("5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/\n", {
    "memory/box/memory.limit_in_bytes": 3 * 2**30, "memory/box/memory.usage_in_bytes": 2 * 2**30,
    "memory/box/memory.stat": f"cache 5\ntotal_inactive_file {2**30}", "memory/memory.limit_in_bytes": 2**63 - 4096,
    "cpu/box/cpu.cfs_quota_us": 150000, "cpu/box/cpu.cfs_period_us": 100000, "cpu/cpu.cfs_quota_us": -1,
    "cpu/cpu.cfs_period_us": 100000,
})  # fmt: skip


@pytest.mark.parametrize("groups", [V2, V1], ids=["v2", "v1"])
def test_a_containers_share_of_memory_and_cores_counts(monkeypatch, tmp_path, groups):
    control_groups(monkeypatch, tmp_path, *groups)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.memory_limit() == (3 * 2**30, 2**30)
    item = machine.memory()
    assert item.facts["total"] == 3 * 2**30 and item.facts["free"] <= 2 * 2**30
    assert "3.0 GiB (the container's share" in item.finding
    assert machine.cores() == 1.5


def test_without_a_limit_the_machine_counts(monkeypatch, tmp_path):
    control_groups(monkeypatch, tmp_path, "0::/\n", {"memory.stat": "anon 5"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert machine.memory_limit() == (None, 0) and machine.cores() == 3
    assert machine.memory().facts["total"] == machine.memory().facts["machine"]
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "absent")  # no Linux
    assert machine.memory_limit() == (None, 0)


def test_little_free_memory_is_warned_of(monkeypatch, tmp_path, cuda):
    assert "GPU 1: 70.0 GiB free of 80.0 GiB" in machine.memory().finding
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (10 * 2**30, 80 * 2**30))
    assert machine.memory().verdict == "WARN" and "others use GPU 0, 1" in machine.memory().finding
    files = {"memory.max": 2**30, "memory.current": 2**29, "memory.stat": "inactive_file 0"}
    control_groups(monkeypatch, tmp_path, "0::/\n", files)
    assert machine.memory().verdict == "WARN" and "0.5 GiB free of 1.0 GiB" in machine.memory().finding


def test_threads_are_held_against_the_cores(monkeypatch, tmp_path):
    control_groups(monkeypatch, tmp_path, *V2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads, verdict in ((2, "OK"), (16, "WARN")):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert machine.threads().verdict == verdict
    assert machine.threads().remedy == "export OMP_NUM_THREADS=1"  # of one and a half cores
    control_groups(monkeypatch, tmp_path, "0::/\n", {})
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "none")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert machine.threads().verdict == "OK"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine.threads().verdict == "WARN" and machine.threads().remedy == "unset OMP_NUM_THREADS"


def test_room_on_the_disk(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")

    def free(gib):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(gib * 2**30, 0, gib * 2**30))

    free(0.5)
    assert machine.disk().verdict == "FAIL" and machine.temp_folder().verdict == "WARN"
    free(12)
    assert machine.disk().verdict == machine.hub_cache().verdict == machine.temp_folder().verdict == "OK"
    assert machine.hub_cache("org/model").verdict == "WARN" and "HF_HOME" in machine.hub_cache("org/model").remedy
    assert machine.hub_cache("demo").verdict == machine.hub_cache(str(tmp_path)).verdict == "OK"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_that_cannot_be_written_to(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir("/proc")
    assert machine.disk().verdict == "FAIL" and "cannot be written to" in machine.disk().finding
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/hub")
    assert machine.hub_cache().verdict == "WARN" and machine.hub_cache("org/model").verdict == "FAIL"


def test_small_shared_memory_matters_on_cuda(monkeypatch, tmp_path, request):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(2**26, 0, 2**26))
    assert machine.shared_memory().verdict == "OK"
    request.getfixturevalue("cuda")
    assert machine.shared_memory().verdict == "WARN" and "--shm-size" in machine.shared_memory().remedy


@pytest.mark.parametrize(("env", "stdout", "verdict"), [
    ({"PYTHONUTF8": "1"}, "utf-8", "OK"),
    ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "utf-8", "WARN"),
    ({"PYTHONUTF8": "1"}, "latin-1", "WARN"),
])  # fmt: skip
def test_text_that_is_no_utf8_is_warned_of(env, stdout, verdict):
    code = f"""if 1:
        import sys
        from gemma_trainer import machine
        sys.__stdout__.reconfigure(encoding={stdout!r})
        sys.stdout = sys.stderr  # as it is while a script works
        item = machine.text_encoding()
        print(item.verdict, item.remedy, file=sys.__stdout__)"""
    env = {**os.environ, "PYTHONPATH": str(ASSETS), **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.split() == (["OK"] if verdict == "OK" else ["WARN", "export", "PYTHONUTF8=1"]), done.stderr


# ---- the hub and the model


def test_a_model_folder_is_looked_at_whole(model_folder, tmp_path):
    import shutil

    item = packages.run("model", lambda: hub.gemma(str(model_folder)))
    assert item.verdict == "OK" and item.facts == {"family": "gemma4"}
    copy = shutil.copytree(model_folder, tmp_path / "copy")
    for file, words in (
        ("*.safetensors", "no weights"),
        ("chat_template.jinja", "no chat template"),
        ("processor_config.json", "copy the model's own"),
        ("config.json", "no model can be loaded"),
    ):
        for path in copy.glob(file):
            path.unlink()
        item = packages.run("model", lambda: hub.gemma(str(copy)))
        assert item.verdict == "FAIL" and words in f"{item.finding}: {item.remedy}" and item.remedy, item


@pytest.mark.parametrize(("config", "words", "remedy"), [
    (None, "no such folder", "folder or the hub id"),
    ({"model_type": "llama"}, "'llama' is not supported", "Gemma 3, 3n or 4"),
    ({"model_type": "gemma3n"}, "gemma3n", "pip install timm"),
])  # fmt: skip
def test_a_folder_that_is_no_gemma_or_lacks_a_package(monkeypatch, tmp_path, config, words, remedy):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find_spec(name))
    folder = tmp_path / "model"
    if config:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    item = packages.run("model", lambda: hub.gemma(str(folder)))
    assert item.verdict == "FAIL" and words in item.finding and remedy in item.remedy, item


HUB = """
import json, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        code, error, body = 200, None, b"{}"
        if "secret" in self.path: code, error = 403, "GatedRepo"
        if "absent" in self.path: code, error = 404, "RepoNotFound"
        if self.path.startswith("/api/models/org/open"):
            body = json.dumps({"id": "org/open", "siblings": [{"rfilename": "model.safetensors", "size": 3 * 2**30}]})
            body = body.encode()
        if self.path.endswith("/config.json"): body = b'{"model_type": "gemma3_text"}'
        self.send_response(code)
        if error: self.send_header("X-Error-Code", error)
        for name, value in (("ETag", '"1"'), ("X-Repo-Commit", "a" * 40), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET": self.wfile.write(body)
    do_HEAD = do_GET
    log_message = lambda *given: None

server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
import os
os.environ["HF_ENDPOINT"] = sys.argv[1] if sys.argv[1:] else f"http://127.0.0.1:{server.server_port}"
from gemma_trainer import hub, packages
checks = {"hub": hub.connection}
checks |= {name: (lambda name=name: hub.gemma(f"org/{name}")) for name in ("secret", "absent", "open")}
items = {name: packages.run(name, check) for name, check in checks.items()}
print(json.dumps({name: [item.verdict, f"{item.finding} | {item.remedy}"] for name, item in items.items()}))
"""


@pytest.mark.parametrize("reachable", [True, False])
def test_the_hub_is_asked_for_models_and_access(tmp_path, reachable):
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name != "HF_TOKEN"}
    env |= {"PYTHONPATH": str(ASSETS), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    refused = [] if reachable else ["http://127.0.0.1:9"]
    done = subprocess.run([sys.executable, "-c", HUB, *refused], env=env, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout)
    if reachable:
        assert told["hub"][0] == "OK" and "no token is set" in told["hub"][1]
        assert told["secret"][0] == "FAIL" and "gated" in told["secret"][1] and "hf auth login" in told["secret"][1]
        assert told["absent"][0] == "FAIL" and "not on the hub" in told["absent"][1]
        assert told["open"] == ["OK", "org/open: gemma3, 3.0 GiB to be downloaded | "]
    else:
        assert told["hub"][0] == "WARN" and "HF_HUB_OFFLINE=1" in told["hub"][1]
        assert told["open"][0] == "FAIL" and "hf download org/open" in told["open"][1]


def test_a_model_in_the_local_cache_needs_no_hub(monkeypatch, model_folder, tmp_path):
    import shutil

    from huggingface_hub import constants

    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert packages.run("model", lambda: hub.gemma("org/tiny")).verdict == "FAIL"
    shutil.copytree(model_folder, repo / "snapshots" / ("a" * 40))
    item = packages.run("model", lambda: hub.gemma("org/tiny"))
    assert item.verdict == "OK" and "org/tiny in the local cache: gemma4" in item.finding


def test_sounds_and_pictures_are_read():
    for check in (packages.audio, packages.images):
        assert check().verdict == "OK"
