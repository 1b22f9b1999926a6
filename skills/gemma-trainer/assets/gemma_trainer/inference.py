"""A model that speaks, loaded as its user would: what evaluate, export and distill share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import families, metadata, models
from .collator import MultimodalCollator
from .errors import CannotLoad
from .precision import choose, device_type


@dataclass(frozen=True)
class Policy:
    """A model in eval mode, with its processor, and the collator that renders its prompts as they were in training.

    `base` names the model that its adapter belongs to, None where it has none.
    """

    name: str
    model: Any
    processor: Any
    collator: MultimodalCollator
    base: str | None = None

    def untuned(self):
        """A context in which the model is its base; raises ValueError where it has no adapter."""
        if self.base is None:
            raise ValueError(f"{self.name} has no adapter to switch off")
        return self.model.disable_adapter()


def load_policy(name: str, flags, like: dict | None = None) -> Policy:
    """Load a model: a hub id, the folder of a whole model, of a run, a checkpoint or an adapter, or `demo`.

    Args:
        flags: `flags.InferenceFlags`.
        like: the facts (`metadata.read`) of a model that one without facts of its own is loaded and asked like.

    Raises:
        CannotLoad: not found, gated, offline, no supported Gemma, an adapter of another model, or a reward model.
    """
    adapted = (Path(name) / "adapter_config.json").is_file()
    facts = metadata.read(Path(name)) or like or {}
    if metadata.is_reward_model(Path(name)):
        raise _scores(name)
    base = models.base_of(name) if adapted else name
    precision = choose(flags.precision)
    config, processor, model = _load(base, name, flags, precision, facts)
    if adapted:
        model = models.load_adapter(model, name)
    if not getattr(model, "is_quantized", False):
        model = model.to(precision.device)
    model.requires_grad_(False)
    allowed = {"media_root": flags.media_root, "allow_remote_media": flags.allow_remote_media}
    collator = prompting_collator(processor, config, facts, flags.max_len, flags.thinking, **allowed)
    return Policy(name, model.eval(), processor, collator, base if adapted else None)


def prompting_collator(
    processor, config, facts: dict, max_len: int, thinking: str | None = None, **options
) -> MultimodalCollator:
    """The collator that renders prompts as in training.

    Args:
        facts: of `metadata.facts_of`.
        thinking: the template's thinking switch; None for that of the training.
        options: further ones of `MultimodalCollator`.
    """
    return MultimodalCollator(
        processor,
        max_len,
        thinking=thinking or (facts.get("labels") or {}).get("thinking", "auto"),
        on_bad_media="skip",
        placeholders="needed",
        modalities=families.modalities(processor, config),
        **options,
    )


def _scores(name: str) -> CannotLoad:
    return CannotLoad(f"{name} is a reward model, which scores and does not speak: see reward_score.py")


def _load(base: str, name: str, flags, precision, facts: dict):
    """(config, processor, model) of a base model; the processor is the one beside the adapter."""
    if base == "demo":
        from . import demo

        processor = demo.make_processor()
        model = demo.make_model(processor.tokenizer).to(precision.torch_dtype)
        return model.config, processor, model
    config, _ = models.load_config(base)
    if models.is_reward(config):  # of a hub id
        raise _scores(base)
    beside = (Path(name) / "tokenizer.json").is_file()
    processor = models.load_processor(name if beside else base, config)
    trained = str((facts.get("training") or {}).get("quantization"))
    wanted = flags.quantize
    if wanted == "auto":  # as it was trained
        wanted = "4bit" if trained.startswith("4-bit") and device_type() == "cuda" else "none"
    quantize, _ = models.decide_quantization(wanted, precision.device, full=False)
    return config, processor, models.load_model(base, config, precision.torch_dtype, quantize)
