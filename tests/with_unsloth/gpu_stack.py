"""Run a script on Unsloth's GPU Python stack with the tensors on the CPU: python gpu_stack.py SCRIPT ARGUMENTS...

Unsloth has a switch for machines without a GPU (UNSLOTH_ALLOW_CPU=1, unsloth_zoo/device_type.py) that keeps its GPU
code, but leaves TRL's trainers as they are; those are rewritten here, after its import, as they are on a GPU. What it
asks a GPU is answered for one of 24 GiB. torch.compile is off, since only its speed would differ.
"""

import os
import runpy
import sys
import types
from pathlib import Path

os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ.setdefault("UNSLOTH_COMPILE_DISABLE", "1")
os.environ.setdefault("UNSLOTH_ENABLE_FLEX_ATTENTION", "0")  # which has no gradient on a CPU

import torch

GPU = types.SimpleNamespace(
    name="GPU that is none", total_memory=24 * 2**30, major=8, minor=0, multi_processor_count=64, warp_size=32
)
ANSWERS = {
    "get_device_properties": GPU,
    "get_device_capability": (8, 0),
    "get_device_name": GPU.name,
    "current_device": 0,
    "mem_get_info": (20 * 2**30, 24 * 2**30),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "synchronize": None,
    "empty_cache": None,
    "reset_peak_memory_stats": None,
}


def answer_for_a_gpu() -> None:
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def rewrite_trl() -> None:
    """What `import unsloth` does to TRL where there is a GPU (unsloth/models/llama.py, unsloth/_gpu_init.py)."""
    os.environ["UNSLOTH_ALLOW_CPU"] = "0"
    from unsloth.context_parallel import patch_sft_trainer
    from unsloth.models.llama import FastLlamaModel
    from unsloth.models.rl import PatchFastRL
    from unsloth.trainer import _patch_trl_trainer

    PatchFastRL(FastLanguageModel=FastLlamaModel)
    _patch_trl_trainer()
    patch_sft_trainer()
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"


def install(assets: str) -> None:
    """Have the scripts in `assets` find this stack when they start Unsloth."""
    sys.path.insert(0, assets)
    from gemma_trainer import backends, unsloth_backend

    answer_for_a_gpu()
    unsloth_backend._checkpointing = bool  # "unsloth" moves activations between a GPU and the machine
    plain = backends.start

    def start(*args, **kwargs):
        backend = plain(*args, **kwargs)
        if backend.name == "unsloth":
            if not os.environ.get("GPU_STACK_PLAIN_TRL"):
                rewrite_trl()
            import unsloth.models._utils

            unsloth.models._utils.SUPPORTS_BFLOAT16 = True  # else it emulates what a GPU without it does
        return backend

    backends.start = start


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    install(str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
