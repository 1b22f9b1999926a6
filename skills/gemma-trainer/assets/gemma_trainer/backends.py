"""Which backend a run takes, and Unsloth's import: decided, and done, before transformers, TRL or PEFT is imported.

Unsloth patches these three as it is imported. Whoever imports one of them first keeps parts of it as they were, with no
more than a warning. Importing Unsloth on Apple Silicon swaps the trainers for ones of MLX.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .cli import note
from .errors import EnvironmentUnfit, Interrupted
from .packages import TESTED

PATCHED = ("transformers", "trl", "peft")  # what has to come after Unsloth
FELL_BACK = "GEMMA_TRAINER_FELL_BACK"  # holds why a process was begun anew without Unsloth
ON_A_MAC = (
    "on Apple Silicon Unsloth means MLX: its trainers take no collator but their own. --backend hf trains on the Mac's "
    "GPU through PyTorch; for MLX itself: python -m mlx_vlm.lora --help"
)
NO_SCORES = "reward models are trained with --backend hf: Unsloth loads the model that speaks in their place"
# With the versions that it accepts beside it; what pip takes by itself may be none of ours.
INSTALL = "pip install " + " ".join(
    f"{name}=={TESTED['default'][name]}" for name in ("unsloth", "transformers", "trl", "datasets")
)
MIXED = "on a GPU Unsloth trains in mixed precision: --precision fp32 is for --backend hf"


@dataclass(frozen=True)
class Backend:
    """`name` is "hf" (transformers, PEFT and TRL as they are) or "unsloth"; `reason` is one line for the user."""

    name: str
    reason: str


def decide(wanted: str = "auto", task: str = "sft", precision: str = "auto") -> Backend:
    """The backend of a run. Imports torch at the most, and only where the answer depends on the device.

    Args:
        wanted: "auto" (Unsloth where it is installed and one CUDA GPU trains), "unsloth" or "hf".
        task: "sft", "dpo" or "reward".
        precision: as --precision has it.

    Raises:
        EnvironmentUnfit: Unsloth is asked for where it is not installed or cannot do this.
    """
    if wanted == "hf":
        return Backend("hf", "asked for")
    if wanted == "auto" and FELL_BACK in os.environ:
        return Backend("hf", os.environ[FELL_BACK])
    if hindrance := _hindrance(task, precision):
        if wanted == "unsloth":
            raise EnvironmentUnfit(f"--backend unsloth: {hindrance}")
        return Backend("hf", hindrance)
    if wanted == "unsloth":
        return Backend("unsloth", "asked for")
    from .precision import device_type

    if (device := device_type()) != "cuda":
        return Backend("hf", f"Unsloth does not accelerate on {device}")
    import torch

    if int(os.environ.get("WORLD_SIZE", 1)) > 1 or torch.cuda.device_count() > 1:
        return Backend("hf", "several GPUs: Unsloth is for one (CUDA_VISIBLE_DEVICES=0 shows it one)")
    return Backend("unsloth", "installed, and a CUDA GPU trains")


def _hindrance(task: str, precision: str) -> str:
    """Why Unsloth cannot be taken here; empty where it can."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return ON_A_MAC
    if task == "reward":
        return NO_SCORES
    found = find_spec("unsloth")
    if found is None or found.origin is None:  # a mere folder of that name
        return f"Unsloth is not installed: {INSTALL}"
    if precision == "fp32":
        from .precision import device_type

        return MIXED if device_type() == "cuda" else ""
    return ""


def start(wanted: str = "auto", task: str = "sft", precision: str = "auto") -> Backend:
    """Decide, and import Unsloth where it is taken. An import that fails under "auto" begins this process anew, without
    it: what it had patched by then cannot be taken back.

    Raises:
        EnvironmentUnfit: as `decide`; Unsloth cannot be imported, or something it patches was imported before it.
    """
    backend = decide(wanted, task, precision)
    if backend.name == "hf":
        return backend
    if early := [name for name in PATCHED if name in sys.modules]:
        raise EnvironmentUnfit(f"{early[0]} was imported before Unsloth, which could not patch it: use --backend hf")
    _prepare_environment()
    try:
        import unsloth  # noqa: F401
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as problem:  # whatever a GPU, a driver or a package that does not fit makes it raise
        lines = str(problem).strip().splitlines()
        why = f"Unsloth cannot be imported ({type(problem).__name__}: {lines[0] if lines else ''})"[:300]
        if wanted == "unsloth":
            raise EnvironmentUnfit(f"--backend unsloth: {why}. See doctor.py, or use --backend hf") from None
        _begin_anew(why)
    return backend


def _begin_anew(why: str) -> None:
    note(f"{why}: going on without it")
    os.environ[FELL_BACK] = why
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _prepare_environment() -> None:
    """What Unsloth reads as it is imported: it reports nothing home, and writes its compiled code where caches are
    instead of into the working directory."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(caches / "gemma-trainer" / "unsloth_compiled_cache"))
