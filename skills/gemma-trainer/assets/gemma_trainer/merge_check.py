"""Whether a merged model is its base with the adapter in it: its files, what it computes, what it answers."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import asking, layer_check, models
from .cli import note
from .inference import prompting_collator
from .merging import Merge, quiet
from .run_check import Finding
from .tensors import FLOATS, stored_files

# Results are rounded some ten times a layer, each by eps / 2 of what they are at most. In 16 bits sums are formed in
# float32; in float32 itself each product that is added is one more rounding. Errors of independent roundings add up as
# their squares do; four times that is left as a margin.
ROUNDINGS, MARGIN = 10, 4
KEPT = 0.5  # of the change, after rounding; with less than this a merged model is rather the base than the tuned one


def files(folder: Path, merge: Merge, base: Path) -> Finding:
    """Whether the files hold the base's tensors by their names, shapes and dtypes, and what was to be added."""
    found, wanted = (
        {tensor.name: (tensor.dtype, tensor.shape) for held in stored_files(place).values() for tensor in held}
        for place in (folder, base)
    )
    added = sorted(set(found) - set(wanted))
    converted = merge.dtype is not None
    wrong = [
        name
        for name in wanted
        if name not in found or found[name][1] != wanted[name][1] or (not converted and found[name] != wanted[name])
    ]
    if wrong or added != sorted(merge.added):
        return Finding("files", False, f"not the base's tensors: {(wrong or added)[0]}")
    if other := _unlike(folder, base, merge.untouched):
        return Finding("files", False, f"{other} is not the base's, and the adapter is not for it")
    dtypes = ", ".join(sorted({dtype for dtype, _ in found.values()}))
    more = f", and {', '.join(added)}" if added else ""
    return Finding("files", True, f"names and shapes of all {len(wanted)} tensors are the base's{more} ({dtypes})")


def _unlike(folder: Path, base: Path, names: list[str]) -> str | None:
    """The first tensor that is not, number for number, what the base has by its name."""
    found, wanted = (
        {tensor.name: tensor for held in stored_files(place).values() for tensor in held} for place in (folder, base)
    )
    for name in names:
        one, other = found[name], wanted[name]
        if one.dtype == other.dtype:
            same = all(piece == its for piece, its in zip(one.pieces(), other.pieces(), strict=True))
        else:
            same = torch.equal(one.read(), other.read().to(FLOATS[one.dtype]).float())
        if not same:
            return name
    return None


def change(merge: Merge) -> Finding:
    """Whether the adapter has changed anything, and rounding has left that."""
    if not merge.changed:
        return Finding("change", False, "no tensor differs from the base's: its updates are zero, or are rounded away")
    told = f"{merge.changed} of {merge.adapted + len(merge.added)} tensors that the adapter is for have changed"
    if merge.kept > 0.9:
        return Finding("change", True, told)
    kept = f"rounding keeps {max(merge.kept, 0):.0%} of the change: --dtype fp32 keeps all of it, or serve the adapter"
    return Finding("change", None if merge.kept >= KEPT else False, f"{told}, and {kept}")


def enough_memory(needed: int) -> bool:
    """Whether a model of so many bytes can be loaded on the device that there is."""
    import psutil

    if torch.cuda.is_available():
        free = sum(torch.cuda.mem_get_info(at)[0] for at in range(torch.cuda.device_count()))
        return needed * 1.2 < free
    return needed * 1.2 < psutil.virtual_memory().available


def compare(folder: Path, run: Path, base: Path, merge: Merge, facts: dict) -> tuple[list[Finding], list[dict]]:
    """Load the adapter on its base and then the merged model, each as its user would, and compare what they compute.

    Returns:
        (findings, up to three rows with what the adapter made of them, for `export.json`).
    """
    processor = models.load_processor(str(folder), merge.config)
    collator = prompting_collator(processor, merge.config, facts, asking.MAX_LEN)
    probes = asking.bundled_rows(collator.modalities)
    rows = (asking.rows_of_run(run) if not merge.reward else []) or probes[: asking.ASKED]
    note("Comparing the adapter on its base with the merged model.")
    with quiet():
        tuned = _adapter(run, base, merge.reward, collator, probes, rows)
    gc.collect()
    model, loaded = asking.load_plain(str(folder), merge.reward)
    findings = [_keys(loaded, tuned.unexpected, model), layer_check.same(model, *tuned.layers)]
    merged = [asking.logits_of(model, collator, probe["row"], merge.reward) for probe in probes]
    dtypes = (model.dtype, tuned.dtype)
    mixture = getattr(model.config.get_text_config(), "enable_moe_block", False)
    routes = bool(mixture) and set(dtypes) != {torch.float32}
    findings += _logits(probes, tuned.logits, tuned.plain, merged, tolerance(model.config, *dtypes), routes)
    findings += _answers(model, collator, tuned.samples)
    return findings, tuned.samples


@dataclass(frozen=True)
class Tuned:
    """What the adapter does on its base: `logits` of the probes, `plain` ones without it, what its `layers` compute
    (of `layer_check.heard`), `samples` with answers; and of the base, keys that have no place, and its dtype."""

    logits: list[torch.Tensor]
    plain: list[torch.Tensor]
    layers: tuple[dict[str, layer_check.Heard], int]
    samples: list[dict]
    unexpected: set[str]
    dtype: torch.dtype


def _adapter(run: Path, base: Path, reward: bool, collator, probes: list[dict], rows: list[dict]) -> Tuned:
    from peft import PeftModel

    model, loaded = asking.load_plain(str(base), reward)
    dtype = model.dtype
    model = PeftModel.from_pretrained(model, run).eval()
    logits = [asking.logits_of(model, collator, probe["row"], reward) for probe in probes]
    with model.disable_adapter():
        plain = [asking.logits_of(model, collator, probe["row"], reward) for probe in probes]
    samples = [row | asking.said_by(model, collator, row["row"], reward) for row in rows]
    samples = [sample for sample in samples if {"answer", "score"} & set(sample)]
    return Tuned(logits, plain, layer_check.heard(model), samples, set(loaded["unexpected_keys"]), dtype)


def tolerance(config, *dtypes: torch.dtype) -> float:
    """How far the logits of a merged model may be from those of its adapter, relative to their size, where the two
    compute in these dtypes."""
    dtype, text = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps), config.get_text_config()
    products = text.hidden_size if dtype == torch.float32 else 1
    return MARGIN * torch.finfo(dtype).eps / 2 * math.sqrt(ROUNDINGS * text.num_hidden_layers * products)


def _keys(loaded: dict, unexpected: set[str], model) -> Finding:
    """Whether the auto class has found a place for each tensor, and a tensor for each place."""
    wrong = [*loaded["missing_keys"], *loaded["mismatched_keys"], *(set(loaded["unexpected_keys"]) - unexpected)]
    if wrong:
        return Finding("reload", False, f"{len(wrong)} keys are missing, unexpected or misshapen: {wrong[0]}")
    return Finding("reload", True, f"{type(model).__name__}, no keys missing, unexpected or misshapen")


def _logits(probes: list[dict], tuned, plain, merged, allowed: float, routes: bool) -> Iterator[Finding]:
    """Of each probe, whether the merged model computes what the adapter does, and not what the base does.

    Args:
        routes: whether a router chooses experts by numbers in 16 bits; where two are as good, rounding chooses, and
            what follows is no longer near. Then it is the layers that tell.
    """
    effects = [float((before - wanted).norm() / wanted.norm()) for wanted, before in zip(tuned, plain, strict=True)]
    for probe, wanted, found, effect in zip(probes, tuned, merged, effects, strict=True):
        name = f"logits of {' and '.join(probe['kinds']) or 'text'}"
        apart = float((found - wanted).norm() / wanted.norm())
        told = f"{apart:.1e} from the adapter's (at most {allowed:.1e}), whose own are {effect:.1e} from the base's"
        if not math.isfinite(apart) or (apart > allowed and not routes):
            yield Finding(name, False, told)
        elif apart > allowed:
            yield Finding(name, None, f"{told}: rounding has chosen other experts")
        elif effect <= apart:  # it changes nothing here that is more than rounding
            yield Finding(name, None, f"{told}: not to be told from the base")
        else:
            yield Finding(name, True, told)
    if not any(effects):
        yield Finding("logits", False, "the adapter changes none of them: what it does cannot be seen")


def _answers(model, collator, samples: list[dict]) -> Iterator[Finding]:
    """Whether the merged model says the same; where rounding makes it say other things, that is told."""
    if not samples:
        yield Finding("answers", None, "there is no row to ask")
        return
    same = sum(asking.asked_again(model, collator, sample)["same"] for sample in samples)
    yield Finding("answers", True if same == len(samples) else None, f"{same} of {len(samples)} are the adapter's")
