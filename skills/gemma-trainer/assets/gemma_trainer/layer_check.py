"""Whether each layer of a merged model computes what it does with the adapter beside it.

Logits cannot tell: in 16 bits the roundings of some dozen layers hide a layer that was left out. One layer alone is
exact. It is given inputs that pick a few columns of its weights, so that each number that comes out has been rounded
once, whichever way it was made; an update of low rank shows in every column, and most where weights are small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .merging import INSIDE
from .run_check import Finding

COLUMNS = 8
# What is left of a number's rounding: half a step in the file, half a step beside the adapter, and for DoRA those of
# the weights' sizes. SLACK, of the largest change, is for the order in which products are added.
STEPS, SLACK = 2, 0.02


@dataclass(frozen=True)
class Heard:
    """What a layer made of `given`: with the adapter, and without it, in float32 on the CPU; `eps` of its numbers."""

    given: tuple[torch.Tensor, ...]
    tuned: torch.Tensor
    plain: torch.Tensor
    eps: float


@torch.no_grad()
def heard(model) -> tuple[dict[str, Heard], int]:
    """({name of a layer in the base: what it computes}, how many modules cannot be asked alone) of all that the adapter
    of a `PeftModel` is for."""
    layers, others = {}, 0
    for name, module in _adapted(model.base_model.model).items():
        given = _inputs(module)
        if given is None:
            others += 1
            continue
        tuned = module(*given)
        with model.disable_adapter():
            plain = module(*given)
        held = tuple(one.cpu() for one in given)
        layers[name] = Heard(held, tuned.float().cpu(), plain.float().cpu(), torch.finfo(plain.dtype).eps)
    return layers, others


def _adapted(inner) -> dict[str, torch.nn.Module]:
    """{name in the base: the outermost of PEFT's wrappers around it}."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, torch.nn.Module] = {}
    for name, module in inner.named_modules():  # an outer one comes first
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found.setdefault(INSIDE.sub("", name), module)
    return found


def _inputs(module) -> tuple[torch.Tensor, ...] | None:
    """What picks columns of a linear layer or rows of embeddings, or goes to each expert of a mixture; None for modules
    of other kinds."""
    layer, chosen = _plain(module), torch.Generator().manual_seed(0)
    if isinstance(layer, torch.nn.Embedding):
        some = torch.randint(layer.num_embeddings, (COLUMNS,), generator=chosen).tolist()
        return (torch.tensor([_trained_tokens(module)[:COLUMNS] or some], device=layer.weight.device),)
    if isinstance(layer, torch.nn.Linear):
        at = torch.randperm(layer.in_features, generator=chosen)[:COLUMNS]
        return (torch.nn.functional.one_hot(at, layer.in_features).to(layer.weight),)
    if hasattr(layer, "num_experts") and hasattr(layer, "hidden_dim"):
        like = next(layer.parameters())
        at = torch.arange(layer.num_experts, device=like.device)[:, None]
        given = torch.randn(len(at), layer.hidden_dim, generator=chosen).to(like)
        return given, at, torch.ones_like(at, dtype=like.dtype)
    return None


def _plain(module):
    """The base's own layer, which PEFT has wrapped once or more."""
    for inside in ("base_layer", "original_module"):
        if hasattr(module, inside):
            return _plain(getattr(module, inside))
    return module


def _trained_tokens(module) -> list[int]:
    """The tokens whose embeddings alone are trained; empty where it is not so."""
    adapter = getattr(module, "token_adapter", module)
    return list((getattr(adapter, "token_indices", None) or {}).get("default", []))


@torch.no_grad()
def same(model, layers: dict[str, Heard], others: int) -> Finding:
    """Whether the layers of a merged model compute what was heard with the adapter."""
    wrong = [name for name, known in layers.items() if not _as_heard(model.get_submodule(name), known)]
    beside = f"; {others} modules of other kinds are told by the logits alone" if others else ""
    if wrong:
        more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
        told = f"{wrong[0]}{more} of {len(layers)} compute something else than with the adapter{beside}"
        return Finding("layers", False, told)
    if not layers:
        return Finding("layers", None, f"none can be asked alone{beside}")
    return Finding("layers", True, f"{len(layers)} of {len(layers)} compute what they do with the adapter{beside}")


def _as_heard(layer, known: Heard) -> bool:
    like = next(layer.parameters())
    found = layer(*(one.to(like.device, like.dtype if one.is_floating_point() else None) for one in known.given))
    apart, effect = found.float().cpu() - known.tuned, known.tuned - known.plain
    eps = max(known.eps, torch.finfo(found.dtype).eps)
    if len(known.given) > 1:  # experts: sums of many roundings, which add up as their squares do
        return bool(apart.norm() <= STEPS * eps * known.tuned.norm() + SLACK * effect.norm())
    size = torch.maximum(known.tuned.abs(), known.plain.abs())
    return bool((apart.abs() <= STEPS * eps * size + SLACK * effect.abs().max()).all())  # which NaN is not
