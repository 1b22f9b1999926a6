"""Load and adapt a model through Unsloth, so that the run is the one that the plain backend would be: the same weights,
layers, adapters and training arguments. `backends.start` has imported Unsloth before.

Facts are those of Unsloth 2026.10.9: unsloth/models/loader.py, vision.py and rl.py, unsloth_zoo/cpu/.
"""

from __future__ import annotations

import copy
import os

from . import models
from .errors import CannotLoad, EnvironmentUnfit

# What Unsloth may set as it makes a trainer, since it comes to the same: AdamW in one kernel.
SAME_OPTIMIZERS = {"adamw_torch", "adamw_torch_fused"}


def on_a_cpu() -> bool:
    """Whether Unsloth took its CPU backend: plain transformers and PEFT, nothing of it faster."""
    import unsloth

    return unsloth._IS_CPU_BACKEND


def checkpoints_itself(backend: str) -> bool:
    """Whether the model, and not the trainer, has been told of gradient checkpointing."""
    return backend == "unsloth" and not on_a_cpu()


def caveat() -> str:
    """What Unsloth makes of the number format that was chosen, where that is another."""
    forced = os.environ.get("UNSLOTH_FORCE_FLOAT32") == "1"
    return "; Unsloth computes parts of it in float16, since this GPU has no bfloat16" if forced else ""


def load_model(name: str, dtype, max_length: int, quantize: bool, full: bool, checkpointing: bool):
    """Load the weights through `FastModel`.

    Args:
        name: a hub id or a folder; exactly this one, where Unsloth would take its own copy of a hub's model.
        dtype: torch dtype of the weights; of the computation where they are quantized.
        max_length: tokens of the longest row.
        quantize: 4-bit, as `models.nf4` has it.
        full: all weights are trained.
        checkpointing: with Unsloth's own gradient checkpointing, which keeps activations in the machine's memory.

    Raises:
        CannotLoad: the weights cannot be found or read, or another model came of them.
    """
    from unsloth import FastModel

    options = dict(model_name=name, dtype=dtype, max_seq_length=max_length, load_in_4bit=False, full_finetuning=full)
    if not on_a_cpu():
        options |= dict(use_exact_model_name=True, fix_tokenizer=False)
        options |= dict(float32_mixed_precision=True) if full else {}  # float32 weights under autocast
        options |= dict(quantization_config=models.nf4(dtype)) if quantize else {}
    options["use_gradient_checkpointing"] = _checkpointing(checkpointing)
    model, _ = models.loading(name, lambda: FastModel.from_pretrained(**options))  # its tokenizer is not ours
    wanted = models.load_config(name)[0].architectures or [type(model).__name__]
    if type(model).__name__ not in wanted:
        made = type(model).__name__
        raise CannotLoad(f"{name} holds a {wanted[0]}, of which Unsloth made a {made}: use --backend hf")
    return model


def _checkpointing(wanted: bool) -> str | bool:
    return "unsloth" if wanted and not on_a_cpu() else wanted


def add_lora(model, targets: str, r: int, alpha: int, dropout: float, seed: int, checkpointing: bool):
    """Wrap a model with LoRA adapters, on the layers that `models.lora_modules` names and no others."""
    from unsloth import FastModel

    options = {} if on_a_cpu() else {"target_parameters": []}  # else it adapts experts, which PEFT alone does not
    return FastModel.get_peft_model(
        model,
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=models.lora_modules(model, targets),
        random_state=seed,
        use_gradient_checkpointing=_checkpointing(checkpointing),
        **options,
    )


def load_adapter(model, adapter: str, checkpointing: bool):
    """Wrap a model with an adapter that is to be trained on (see `models.load_adapter`)."""
    model = models.load_adapter(model, adapter)
    if on_a_cpu():
        return model
    from unsloth import FastModel

    return FastModel.post_patch_model(model, use_gradient_checkpointing=_checkpointing(checkpointing))


def keep_arguments(make, args):
    """make(), which makes a trainer with `args`, with each of these as it was before: Unsloth sets some anew.

    Raises:
        EnvironmentUnfit: it changed the number format, which cannot be taken back.
    """
    asked = copy.copy(vars(args))
    trainer = make()
    for name, value in asked.items():
        now = getattr(trainer.args, name)
        if now == value or (name == "optim" and {str(getattr(o, "value", o)) for o in (now, value)} <= SAME_OPTIMIZERS):
            continue
        if name in ("bf16", "fp16"):
            told = f"Unsloth turned {name} {'on' if now else 'off'}, against --precision"
            raise EnvironmentUnfit(f"{told}: use another --precision, or --backend hf")
        setattr(trainer.args, name, value)
    return trainer
