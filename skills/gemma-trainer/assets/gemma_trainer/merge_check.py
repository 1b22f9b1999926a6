"""Whether a merged model is its base with the adapter in it: its files, what it computes, what it answers."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from . import asking, models
from .cli import note
from .merging import Merge, quiet
from .run_check import Finding
from .tensors import stored_files

# Results are rounded some ten times a layer, each by eps / 2 of what they are at most. In 16 bits sums are formed in
# float32; in float32 itself each product that is added is one more rounding. Errors of independent roundings add up as
# their squares do; four times that is left as a margin.
ROUNDINGS, MARGIN = 10, 4


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
    dtypes = ", ".join(sorted({dtype for dtype, _ in found.values()}))
    more = f", and {', '.join(added)}" if added else ""
    return Finding("files", True, f"names and shapes of all {len(wanted)} tensors are the base's{more} ({dtypes})")


def change(merge: Merge) -> Finding:
    """Whether the adapter has changed anything."""
    if not merge.changed:
        return Finding("change", False, "no tensor differs from the base's: its updates are zero, or are rounded away")
    return Finding("change", True, f"{merge.changed} of {merge.adapted} tensors that the adapter is for have changed")


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
    collator = asking.collator_of(models.load_processor(str(folder), merge.config), merge.config, facts)
    probes = asking.bundled_rows(collator.modalities)
    rows = (asking.rows_of_run(run) if not merge.reward else []) or probes[: asking.ASKED]
    note("Comparing the adapter on its base with the merged model.")
    with quiet():
        tuned, plain, samples, unexpected = _adapter(run, base, merge.reward, collator, probes, rows)
    gc.collect()
    model, loaded = asking.load_plain(str(folder), merge.reward)
    findings = [_keys(loaded, unexpected, model)]
    merged = [asking.logits_of(model, collator, probe["row"], merge.reward) for probe in probes]
    findings += _logits(probes, tuned, plain, merged, tolerance(model))
    findings += _answers(model, collator, samples)
    return findings, samples


def _adapter(run: Path, base: Path, reward: bool, collator, probes: list[dict], rows: list[dict]):
    """(logits of the probes with the adapter, and without it; samples; keys of the base that have no place)."""
    from peft import PeftModel

    model, loaded = asking.load_plain(str(base), reward)
    model = PeftModel.from_pretrained(model, run).eval()
    tuned = [asking.logits_of(model, collator, probe["row"], reward) for probe in probes]
    with model.disable_adapter():
        plain = [asking.logits_of(model, collator, probe["row"], reward) for probe in probes]
    samples = [row | asking.said_by(model, collator, row["row"], reward) for row in rows]
    return tuned, plain, [sample for sample in samples if {"answer", "score"} & set(sample)], loaded["unexpected_keys"]


def tolerance(model) -> float:
    """How far the logits of a merged model may be from those of its adapter, relative to their size."""
    config = model.config.get_text_config()
    products = config.hidden_size if model.dtype == torch.float32 else 1
    return MARGIN * torch.finfo(model.dtype).eps / 2 * math.sqrt(ROUNDINGS * config.num_hidden_layers * products)


def _keys(loaded: dict, unexpected: set[str], model) -> Finding:
    """Whether the auto class has found a place for each tensor, and a tensor for each place."""
    wrong = [*loaded["missing_keys"], *loaded["mismatched_keys"], *(set(loaded["unexpected_keys"]) - set(unexpected))]
    if wrong:
        return Finding("reload", False, f"{len(wrong)} keys are missing, unexpected or misshapen: {wrong[0]}")
    return Finding("reload", True, f"{type(model).__name__}, no keys missing, unexpected or misshapen")


def _logits(probes: list[dict], tuned, plain, merged, allowed: float) -> Iterator[Finding]:
    """Of each probe, whether the merged model computes what the adapter does, and not what the base does."""
    for probe, wanted, before, found in zip(probes, tuned, plain, merged, strict=True):
        name = f"logits of {' and '.join(probe['kinds']) or 'text'}"
        apart, effect = (float((one - wanted).norm() / wanted.norm()) for one in (found, before))
        told = f"{apart:.1e} from the adapter's (at most {allowed:.1e}), whose own are {effect:.1e} from the base's"
        if not math.isfinite(apart) or apart > allowed:
            yield Finding(name, False, told)
        elif effect <= apart:  # it changes nothing that is more than rounding
            yield Finding(name, None if effect else False, f"{told}: not to be told from the base")
        else:
            yield Finding(name, True, told)


def _answers(model, collator, samples: list[dict]) -> Iterator[Finding]:
    """Whether the merged model says the same; where rounding makes it say other things, that is told."""
    if not samples:
        yield Finding("answers", None, "there is no row to ask")
        return
    same = sum(asking.asked_again(model, collator, sample)["same"] for sample in samples)
    yield Finding("answers", True if same == len(samples) else None, f"{same} of {len(samples)} are the adapter's")
