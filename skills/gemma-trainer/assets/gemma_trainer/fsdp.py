"""What FSDP2, which cuts a model up over the ranks, must be told about Gemma."""

from __future__ import annotations


def declare_layers(model) -> None:
    """Before a model is cut up: have it name the layers that it has. Some name others, too, as Gemma 4 without audio
    those of the audio tower, and accelerate refuses them (accelerate/utils/dataclasses.py, `set_auto_wrap_policy`)."""
    there = {type(module).__name__ for module in model.modules()}
    inner = inner_model(model)
    inner._no_split_modules = [name for name in inner._no_split_modules or [] if name in there]


def keep_embeddings_whole(model) -> None:
    """Once it is cut up: where the embeddings are a group of their own, as in a reward model, keep them whole behind
    their forward pass. Gemma reads a row of their weight beside it (`pad_embedding` in its `modeling_*.py`)."""
    from torch.distributed.fsdp import FSDPModule

    embeddings = inner_model(model).get_input_embeddings()
    if isinstance(embeddings, FSDPModule):
        embeddings.set_reshard_after_forward(False)


def inner_model(model):
    """The model inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
