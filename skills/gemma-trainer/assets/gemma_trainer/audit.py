"""What Unsloth has really patched of a run's model and trainer, and whether the run is faster for it.

A wrong import order, a version or a switch leaves a model that is loaded, but not accelerated. Names do not tell, since
Unsloth's functions carry the `__module__` and `__qualname__` of what they replace. Where their code lives does.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

import torch

SWITCHES = """UNSLOTH_COMPILE_DISABLE UNSLOTH_FORCE_FLOAT32 UNSLOTH_RETURN_LOGITS UNSLOTH_ENABLE_FULL_FINETUNING
UNSLOTH_MIXED_PRECISION UNSLOTH_BLOCK_COMPILE UNSLOTH_ALLOW_CPU UNSLOTH_FORCE_CPU UNSLOTH_ENABLE_CCE""".split()

LOOP = "_fast_inner_training_loop"  # what Unsloth names the training loop that it puts into transformers


def code_file(function) -> str:
    """The file that a function's own code lives in, whatever it is named and however it is compiled."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif hasattr(function, "__func__"):
            function = function.__func__
        else:
            return getattr(getattr(function, "__code__", None), "co_filename", "")


def in_unsloth(file: str) -> bool:
    """Whether code in this file is Unsloth's: of its packages, or what they wrote into their compiled cache."""
    return bool(file) and any(Path(file).resolve().is_relative_to(home) for home in _homes())


def _homes() -> list[Path]:
    packages = [sys.modules[name].__file__ for name in ("unsloth", "unsloth_zoo") if name in sys.modules]
    if not packages:
        return []
    cache = _cache()
    elsewhere = Path(tempfile.gettempdir()) / cache.name  # where it cannot write to that
    return [path.resolve() for path in (*(Path(file).parent for file in packages), cache, elsewhere)]


def _cache() -> Path:
    return Path(os.environ.get("UNSLOTH_COMPILE_LOCATION", "unsloth_compiled_cache"))


def look_at(trainer, logits: bool | None = None) -> dict:
    """What is patched, stage by stage, and the verdict.

    Args:
        trainer: a trainer with its model, before or after it has trained.
        logits: what `makes_logits` found; None where nobody looked.

    Returns:
        {"verdict": "ACCELERATED", "PARTLY" or "NOT", "reasons": [str], "import": {...}, "model": {...}, "adapters":
        {...}, "trainer": {...}, "switches": {...}, "cache": {...}}
    """
    facts = {
        "import": _import_facts(),
        "model": _share(module for module in _own_modules(trainer.model)),
        "adapters": _share(module for module in trainer.model.modules() if hasattr(module, "lora_A")),
        "trainer": _trainer_facts(trainer),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "cache": _cache_facts(),
    }
    if logits is not None:
        facts["makes_logits"] = logits
    verdict, reasons = judge(facts)
    return {"verdict": verdict, "reasons": reasons} | facts


def judge(facts: dict) -> tuple[str, list[str]]:
    """(verdict, why it is no better) of the facts that `look_at` gathers."""
    imported = facts["import"]
    if not imported["unsloth"]:
        return "NOT", ["Unsloth is not in use: plain transformers, PEFT and TRL train"]
    if imported["backend"] != "gpu":
        return "NOT", [f"Unsloth took its {imported['backend']} backend, which changes nothing that takes time"]
    lacking = []
    if facts["trainer"]["loop"] != LOOP:
        lacking.append(f"the training loop is transformers' own ({facts['trainer']['loop']})")
    if not facts["trainer"]["of_unsloth"]:
        lacking.append(f"the trainer is TRL's own ({facts['trainer']['module']}): Unsloth has not rewritten it")
    if not facts["model"]["of_unsloth"]:
        lacking.append("no layer of the model was rewritten")
    if facts["adapters"]["of_unsloth"] < facts["adapters"]["all"]:
        lacking.append("of {all} LoRA layers {of_unsloth} are Unsloth's".format(**facts["adapters"]))
    if facts.get("makes_logits"):
        lacking.append("the loss makes whole logits")
    if (switch := facts["switches"].get("UNSLOTH_COMPILE_DISABLE", "0")) != "0":
        lacking.append(f"UNSLOTH_COMPILE_DISABLE={switch} leaves code uncompiled")
    nothing = not facts["model"]["of_unsloth"] and not facts["adapters"]["of_unsloth"]
    return ("NOT" if nothing else "PARTLY" if lacking else "ACCELERATED"), lacking


def makes_logits(model, batch) -> bool:
    """Whether a train-mode forward with labels makes logits at every position; found by doing it.

    Args:
        model: as it is trained.
        batch: with labels, [B, T], on the model's device.
    """
    from .fsdp import inner_model

    seen, (rows, length) = [], batch["labels"].shape

    def watch(module, args, output):
        seen.append(tuple(output.shape[:2]) == (rows, length))

    head = inner_model(model).get_output_embeddings()
    hook, training = head.register_forward_hook(watch), model.training
    try:
        out = model.train()(**batch)
    finally:
        hook.remove()
        model.train(training)
    logits = getattr(out, "logits", None)
    return any(seen) or (isinstance(logits, torch.Tensor) and tuple(logits.shape[:2]) == (rows, length))


def summary(found: dict) -> str:
    """What `look_at` found, in a few lines for a person."""
    imported, trainer = found["import"], found["trainer"]
    lines = [f"verdict  {found['verdict']}"]
    lines += [f"         {reason}" for reason in found["reasons"]]
    if found.get("reason"):
        lines.append(f"backend  {found['backend']}: {found['reason']}")
    if imported["unsloth"]:
        lines.append(f"import   Unsloth {imported['version']}, {imported['backend']} backend, before what it patches")
    own = "Unsloth's" if trainer["loop"] == LOOP else "transformers' own"
    lines.append(f"loop     {trainer['loop']} ({own})")
    lines.append(f"trainer  {trainer['module']} ({_whose(trainer['of_unsloth'])})")
    for name, told in (("model", "model"), ("adapters", "lora")):
        lines.append(f"{told:8} {found[name]['of_unsloth']} of {found[name]['all']} forwards are Unsloth's")
    if "makes_logits" in found:
        lines.append(f"logits   {'made at every position' if found['makes_logits'] else 'not made in a training step'}")
    if found["switches"]:
        lines.append("switches " + " ".join(f"{name}={value}" for name, value in found["switches"].items()))
    if cache := found["cache"]:
        lines.append(f"cache    {cache['files']} files in {cache['folder']}")
    return "\n".join(lines)


def _whose(of_unsloth: bool) -> str:
    return "Unsloth's" if of_unsloth else "TRL's own"


def _import_facts() -> dict:
    unsloth = sys.modules.get("unsloth")
    if unsloth is None:
        return {"unsloth": False}
    kind = "mlx" if unsloth._IS_MLX else "cpu" if unsloth._IS_CPU_BACKEND else "gpu"
    return {"unsloth": True, "version": unsloth.__version__, "backend": kind}


def _own_modules(model):
    """The model's own layers, also where Unsloth has put classes of its own in their place; without PEFT's and torch's,
    which it has no reason to touch."""
    own = ("transformers.models.", "unsloth_compiled_module_")
    return (module for module in model.modules() if type(module).__module__.startswith(own))


def _share(modules) -> dict[str, int]:
    files = [code_file(module.forward) for module in modules]
    return {"of_unsloth": sum(map(in_unsloth, files)), "all": len(files)}


def _trainer_facts(trainer) -> dict:
    """The training loop's name, and the class of TRL or Unsloth that the trainer is made from."""
    base = next(kind for kind in type(trainer).__mro__ if not kind.__module__.startswith(__package__))
    return {
        "loop": type(trainer)._inner_training_loop.__name__,
        "module": base.__module__,
        "of_unsloth": in_unsloth(code_file(base.__init__)),
    }


def _cache_facts() -> dict:
    if "unsloth" not in sys.modules:
        return {}
    folder = _cache()
    return {"folder": str(folder), "files": len(list(folder.glob("*.py")))} if folder.is_dir() else {}
