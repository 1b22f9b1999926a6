"""What is on this machine, and whether training will work on it: one short check for each question."""

from __future__ import annotations

import locale
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from . import backends, hub, packages, precision
from .errors import EnvironmentUnfit
from .packages import FAIL, GIB, OK, WARN, Item, device, fail, gib, need_torch, ok, pinned, public_version, told, warn

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")


def examine(model: str | None = None, backend: str = "auto", debug: bool = False) -> list[Item]:
    """The items of every check. None raises: what cannot be checked is a finding.

    Args:
        model: a hub id, a folder or "demo", to be looked at, too.
        backend: as --backend has it.
        debug: print the traceback of a check that fails unexpectedly.
    """
    checks = {
        "python": python,
        "platform": system,
        **{name: partial(packages.package, name) for name in packages.CORE},
        "packages": packages.other_packages,
        "torch pair": packages.torch_pair,
        "imports": packages.imports,
        "requirements": partial(packages.requirements, backend),
        "device": accelerator,
        "memory": memory,
        "precision": number_format,
        "backend": partial(training_backend, backend),
        "bitsandbytes": packages.bitsandbytes,
        "triton": partial(packages.triton, backend),
        "xformers": partial(packages.xformers, backend),
        "hub": hub.connection,
        **({"model": partial(hub.gemma, model)} if model else {}),
        "disk": disk,
        "hub cache": partial(hub_cache, model),
        "temp folder": temp_folder,
        "shared memory": shared_memory,
        "locale": text_encoding,
        "threads": threads,
        "audio": packages.audio,
        "images": packages.images,
    }
    return [packages.run(name, check, debug) for name, check in checks.items()]


def verdict(items: list[Item]) -> str:
    """The worst of the items' verdicts."""
    return max((item.verdict for item in items), key=(OK, WARN, FAIL).index)


def summary(items: list[Item]) -> str:
    """A line for each item, its remedy below it, and the verdict."""
    width = max(len(item.name) for item in items)
    lines = []
    for item in items:
        lines.append(f"{item.name:<{width}}  {item.verdict:<4}  {item.finding}")
        lines += [f"{'':<{width + 8}}{item.remedy}"] if item.remedy else []
    bad = [item.name for item in items if item.verdict == FAIL]
    odd = [item.name for item in items if item.verdict == WARN]
    ends = {OK: "all will work", WARN: f"it will work, but see {', '.join(odd)}", FAIL: f"mend {', '.join(bad)} first"}
    return "\n".join([*lines, f"{'verdict':<{width}}  {verdict(items):<4}  {ends[verdict(items)]}"])


# ---- the system


def python() -> Item:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable}
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return fail(f"{version} is not supported (3.11 to 3.13 are)", "uv run --python 3.12 doctor.py", **facts)
    return ok(f"{version} ({sys.executable})", **facts)


def system() -> Item:
    name, machine = platform.system(), platform.machine()
    facts = {"system": name, "machine": machine}
    if name == "Windows":
        return fail("Windows itself is not supported", "use WSL (wsl --install), which is Linux", **facts)
    if (name, machine) == ("Darwin", "x86_64"):
        return fail(
            "an Intel Mac, or an Intel Python: no PyTorch is made for it any more", "use an arm64 Python", **facts
        )
    return ok(platform.platform(), **facts)


def text_encoding() -> Item:
    """Files and pipes in UTF-8; while a script works, its stdout is stderr, hence `__stdout__`."""
    files, stdout = locale.getpreferredencoding(False), getattr(sys.__stdout__, "encoding", None) or "utf-8"
    facts = {"files": files, "stdout": stdout}
    if any(name.lower().replace("-", "") != "utf8" for name in (files, stdout)):
        return warn(f"not UTF-8 throughout: files {files}, stdout {stdout}", "export PYTHONUTF8=1", **facts)
    return ok("UTF-8", **facts)


# ---- the device


def accelerator() -> Item:
    """The GPUs that torch sees, or why it sees none."""
    torch = need_torch()
    kind = precision.device_type()
    if kind == "cuda":
        return _gpus(torch)
    if kind == "mps":
        return ok(f"Apple Silicon GPU (mps), macOS {platform.mac_ver()[0]}", device=kind)
    if driver := nvidia_driver():
        return _unseen_gpu(torch, driver)
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        mend = f"on macOS 14 or later: pip install --force-reinstall {pinned('torch')}"
        return warn("Apple Silicon, but torch cannot use its GPU (mps)", mend, device=kind)
    return ok(f"cpu ({platform.machine()}): no GPU here", device=kind)


def _gpus(torch) -> Item:
    seen = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    gpus = [{"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in seen]
    counts = Counter(f"{gpu['name']}, {gib(gpu['memory'])}, compute capability {gpu['capability']}" for gpu in gpus)
    driver, hip = nvidia_driver(), getattr(torch.version, "hip", None)
    facts = {"device": "cuda", "gpus": gpus, "driver": driver, "cuda": torch.version.cuda, "rocm": hip}
    built = f"torch is built for {f'ROCm {hip}' if hip else f'CUDA {torch.version.cuda}'}"
    shown = "; ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
    shown += f" (driver {driver or 'unknown'}; {built})"
    try:
        torch.ones(2, device="cuda").sum().item()
    except Exception as problem:
        mend = "free the GPU (nvidia-smi), update its driver, or install a torch made for it"
        return fail(f"{shown} cannot compute ({told(problem)})", mend, **facts)
    if hip:
        return warn(f"{shown}: AMD GPUs are not tested", "--quantize none --backend hf", **facts)
    return ok(shown, **facts)


def nvidia_driver() -> str:
    """The version of the NVIDIA driver, "" where there is none."""
    if NVIDIA_DRIVER.is_file() and (found := re.search(r" (\d+\.[\d.]+) ", NVIDIA_DRIVER.read_text())):
        return found[1]
    if not (tool := shutil.which("nvidia-smi")):
        return ""
    try:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.split() or [""])[0] if done.returncode == 0 else ""


def _unseen_gpu(torch, driver: str) -> Item:
    """Why torch does not see the GPU whose driver is there."""
    facts = {"device": "cpu", "driver": driver, "cuda": torch.version.cuda}
    there = f"NVIDIA driver {driver} is there, but"
    if torch.version.cuda is None:
        pair = f"{pinned('torch')} {pinned('torchvision')}"
        mend = f"pip install --force-reinstall {pair}"
        return fail(f"{there} torch {torch.__version__} is built for CPUs only", mend, **facts)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return warn(f"{there} CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES", **facts)
    reason = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden else "no device answers"
    try:
        torch.cuda.init()
    except Exception as problem:
        reason = told(problem)
    mend = "in a container: start it with --gpus all"
    if "too old" in reason:
        mend = f"update the NVIDIA driver, or install a torch built for a CUDA before {torch.version.cuda}"
    elif hidden:
        mend = "unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists"
    return fail(f"{there} torch, built for CUDA {torch.version.cuda}, sees no GPU ({reason})", mend, **facts)


def number_format() -> Item:
    need_torch()
    chosen = precision.choose("auto")
    facts = {"device": chosen.device, "dtype": chosen.dtype}
    if (chosen.device, chosen.dtype) == ("cuda", "float32"):
        return warn(
            chosen.reason, "expect twice the memory: lower --max-len; --quantize 4bit holds the weights", **facts
        )
    return ok(chosen.reason, **facts)


def training_backend(wanted: str) -> Item:
    """What --backend takes here. Unsloth is looked for, never imported: it changes torch for the whole process."""
    version = public_version("unsloth")
    if version:
        need_torch()  # the answer depends on the device
    try:
        chosen = backends.decide(wanted)
    except EnvironmentUnfit as problem:
        return fail(str(problem), "--backend hf" if version else f"--backend hf, or pip install {pinned('unsloth')}")
    facts = {"takes": chosen.name, "unsloth": version}
    shown = f"--backend {wanted} takes {chosen.name}: {chosen.reason}" + f" (Unsloth {version})" * bool(version)
    if chosen.name == "unsloth" and device() != "cuda":
        return warn(f"{shown}; it accelerates NVIDIA GPUs only, and here is {device()}", "--backend hf", **facts)
    return ok(shown, **facts)


# ---- memory and cores


def memory() -> Item:
    """What is free of the machine's memory, of the container's share of it, and of each GPU's."""
    import psutil

    machine = psutil.virtual_memory()
    limit, used = memory_limit()
    total = min(machine.total, limit or machine.total)
    free = min(machine.available, max(limit - used, 0)) if limit else machine.available
    facts = {"total": total, "free": free, "machine": machine.total, "limit": limit, "gpus": []}
    shown = f"{gib(free)} free of {gib(total)}"
    if total < machine.total:
        shown += f" (the container's share of {gib(machine.total)})"
    if device() == "cuda":
        torch = need_torch()
        facts["gpus"] = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
        shown += "".join(f"; GPU {i}: {gib(left)} free of {gib(size)}" for i, (left, size) in enumerate(facts["gpus"]))
    if free < 2 * GIB:
        return warn(
            f"{shown}: the demo alone takes 1.4 GiB", "end other programs, or raise the container's limit", **facts
        )
    if busy := [str(number) for number, (left, size) in enumerate(facts["gpus"]) if left < size / 2]:
        return warn(
            f"{shown}: others use GPU {', '.join(busy)}", "nvidia-smi tells who; CUDA_VISIBLE_DEVICES picks", **facts
        )
    return ok(shown, **facts)


def _cgroup(controller: str, *names: str) -> Iterator[tuple[Path, str]]:
    """(file, content) of the files of these names that bound this process, from its own cgroup up; v1 and v2."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:  # no Linux
        return
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number != "0" and controller not in controllers.split(","):
            continue
        base = CGROUPS if number == "0" else CGROUPS / controller
        own = base / path.strip("/")
        for folder in [own, *own.parents]:
            if not folder.is_relative_to(base):
                break
            for file in (folder / name for name in names):
                if file.is_file():
                    yield file, file.read_text().strip()


def memory_limit() -> tuple[int | None, int]:
    """(the most bytes that this process's cgroup may take, what it takes now), the former None where it is unbound.
    The page cache does not count: it gives way."""
    bounds = [(int(text), file.parent) for file, text in _cgroup("memory", "memory.max", "memory.limit_in_bytes")
              if text != "max" and int(text) < 2**60]  # fmt: skip
    if not bounds:
        return None, 0
    limit, folder = min(bounds)
    used = next(int((folder / name).read_text()) for name in ("memory.current", "memory.usage_in_bytes")
                if (folder / name).is_file())  # fmt: skip
    cache = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
    return limit, used - int(cache[1] if cache else 0)


def cores() -> float:
    """How many cores this process may use: by affinity, and by the container's quota."""
    usable = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for file, text in _cgroup("cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, *period = text.split()
        period = period or [(file.parent / "cpu.cfs_period_us").read_text()]
        if quota not in ("max", "-1"):
            usable = min(usable, int(quota) / int(period[0]))
    return usable


def threads() -> Item:
    """Whether torch computes with as many threads as there are cores to run them."""
    usable, wanted = cores(), os.environ.get("OMP_NUM_THREADS")
    taken = need_torch().get_num_threads()
    facts = {"cores": usable, "machine_cores": os.cpu_count(), "omp_num_threads": wanted, "torch_threads": taken}
    shown = f"{taken} threads of torch on {usable:g} cores"
    if taken > math.ceil(usable):
        return warn(f"{shown}: they wait for each other", f"export OMP_NUM_THREADS={max(int(usable), 1)}", **facts)
    if wanted == "1" and usable >= 4 and device() == "cpu":
        return warn(f"{shown}: OMP_NUM_THREADS=1 leaves the others idle", "unset OMP_NUM_THREADS", **facts)
    return ok(shown, **facts)


# ---- disk


def disk() -> Item:
    """Room for runs in the working directory."""
    return _room(Path.cwd(), "", "--output a folder on another disk", least=1, wanted=5)


def hub_cache(model: str | None = None) -> Item:
    """Room for models from the hub."""
    from huggingface_hub import constants

    cache, mend = Path(constants.HF_HUB_CACHE), "export HF_HOME=/a/folder/with/room"
    if model and not hub.is_local(model):
        return _room(cache, f"{cache}: ", mend, wanted=20)
    return _room(cache, f"{cache}: ", mend, refused=warn)


def _room(folder: Path, shown: str, mend: str, least: float = 0, wanted: float = 0, refused=fail) -> Item:
    """Whether a folder, or the one in which it will be made, can be written to, and has so many GiB of room."""
    place = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    facts = {"folder": str(folder), "free": free}
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as problem:
        return refused(f"{shown}cannot be written to ({problem.strerror})", mend, **facts)
    shown += f"{gib(free)} free"
    if free < least * GIB:
        return fail(f"{shown}: too little for a run", mend, **facts)
    return warn(f"{shown}: may be too little", mend, **facts) if free < wanted * GIB else ok(shown, **facts)


def temp_folder() -> Item:
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return fail("no temporary folder can be written to", "export TMPDIR=/a/folder/with/room")
    return _room(folder, f"{folder}: ", "export TMPDIR=/a/folder/with/room", wanted=1)


def shared_memory() -> Item:
    """/dev/shm, through which worker processes hand on their batches; containers have 64 MiB of it."""
    if not SHARED_MEMORY.is_dir():
        return ok("not needed here")
    total = shutil.disk_usage(SHARED_MEMORY).total
    shown = f"{SHARED_MEMORY}: {gib(total)}"
    if total < GIB and device() == "cuda":
        return warn(f"{shown} is small for batches", "docker run --shm-size 8g, or --num-workers 0", total=total)
    return ok(shown, total=total)
