"""Two arms compared: curves, first batches, speed and memory; and the verdict. Imports nothing heavy."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

ROLES = ("baseline", "against")
NOISE = 3  # differences up to so many times the baseline's own are its own
SMALL = 0.01  # below it, differences are taken relative to it: a loss near 0 has few digits that mean anything
TOO_MUCH = 1.25  # times the memory, or the time, is worse
AROUND = 4  # tokens shown on each side of the first that differs


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference of a figure: `first` at step 1, more by `grows` a step, `most` at most; and never
    less than `NOISE` times `noise`, the largest difference between repeated runs of the baseline."""

    first: float
    grows: float
    most: float
    noise: float = 0.0

    def at(self, step: int) -> float:
        return max(min(self.first + self.grows * (step - 1), self.most), NOISE * self.noise)


# By precision: of the loss, of the gradient's norm, and why.
CURVES = {
    "float32": (
        Tolerance(1e-5, 1e-5, 1e-2),
        Tolerance(1e-4, 1e-4, 1e-1),
        "float32 sums that are made in another order differ by some 1e-6 of their value; each optimizer step adds as "
        "much and hands on what was there, and a gradient is a longer sum than a loss",
    ),
    "float16": (
        Tolerance(5e-3, 0.0, 5e-3),
        Tolerance(5e-2, 0.0, 5e-2),
        "a float16 number has 11 bits: two stacks that round at other places differ by some 0.05 % in each number, and "
        "a gradient's norm by more than the mean over tokens that a loss is",
    ),
    "bfloat16": (
        Tolerance(2e-2, 0.0, 2e-2),
        Tolerance(1e-1, 0.0, 1e-1),
        "a bfloat16 number has 8 bits: two stacks that round at other places differ by some 0.4 % in each number, and "
        "a gradient's norm by more than the mean over tokens that a loss is",
    ),
}
# By precision, of the log-probabilities of a model that was saved and loaded: which figure, how much, and why.
RELOADED = {
    "float32": ("max_difference", 1e-4, "the same weights in float32, whose sums may be made in another order"),
    "float16": ("mean_difference", 0.02, "float16 logits between 16 and 32 are 0.016 apart, and round either way"),
    "bfloat16": ("mean_difference", 0.05, "bfloat16 logits between 16 and 32 are 0.125 apart, and round either way"),
}


def coarser(*precisions: str) -> str:
    """The coarsest of number formats, which a comparison has to allow for."""
    return max(precisions, key=list(CURVES).index)


# ---- curves


def relative(one: float, other: float) -> float:
    """How far apart two numbers are, relative to the larger; infinite where only one of them is a number."""
    if math.isnan(one) or math.isnan(other) or math.isinf(one) or math.isinf(other):
        return 0.0 if one == other or (math.isnan(one) and math.isnan(other)) else math.inf
    return abs(one - other) / max(abs(one), abs(other), SMALL)


def compare_curves(baseline: dict[int, float], against: dict[int, float], tolerance: Tolerance) -> dict:
    """Compare two curves, {step: value}, step by step. A step that only one of them has is a difference, too.

    Returns:
        {"max_relative", "max_absolute", "at_step" (of the largest relative one), "tolerance" (there), "noise",
        "first_divergence" (the first step beyond tolerance, or None)}.
    """
    shared, every = baseline.keys() & against.keys(), sorted(baseline.keys() | against.keys())
    found = {step: relative(baseline[step], against[step]) if step in shared else math.inf for step in every}
    apart = [abs(baseline[step] - against[step]) for step in shared if math.isfinite(baseline[step] - against[step])]
    at = max(found, key=found.get, default=None)
    beyond = [step for step, difference in found.items() if difference > tolerance.at(step)]
    return {
        "max_relative": found.get(at, math.inf),
        "max_absolute": max(apart, default=0.0),
        "at_step": at,
        "tolerance": tolerance.at(at or 1),
        "noise": tolerance.noise,
        "first_divergence": beyond[0] if beyond else None,
    }


def noise_of(curves: list[dict[int, float]]) -> float:
    """The largest relative difference at a step between repeated runs; 0 of a single one."""
    shared = set.intersection(*map(set, curves))
    spans = [(curve[step] for curve in curves) for step in shared]
    found = (relative(min(span), max(span)) for span in map(list, spans))
    return max(filter(math.isfinite, found), default=0.0)


# ---- first batches


def compare_batches(baseline: dict, against: dict) -> dict:
    """Compare two first batches, as `run.json` has them, with what `first_batch.json` adds where it was written.

    Returns:
        {"same", "rows_same", "trained_tokens": [of each], "first": None, or where they first differ: {"row",
        "position", "ids", "labels" (of each arm, around it)}}. "same" is None where one of them is unknown.
    """
    if not baseline or not against:
        return {"same": None, "rows_same": None, "trained_tokens": [], "first": None}
    found = {"rows_same": baseline["rows"] == against["rows"], "first": None}
    found["trained_tokens"] = [batch["trained_tokens"] for batch in (baseline, against)]
    if found["rows_same"] and "labels" in baseline and "labels" in against:
        columns = (batch[key] for batch in (baseline, against) for key in ("input_ids", "labels"))
        lines = zip(baseline["rows"], *columns, strict=False)  # a batch of which no row could be read has one line
        found["first"] = next(filter(None, (_difference(*line) for line in lines)), None)
    return {"same": found["rows_same"] and baseline["hash"] == against["hash"] and not found["first"]} | found


def _difference(row: str, ids: list, labels: list, other_ids: list, other_labels: list) -> dict | None:
    """Where the tokens of a row, padding included, first differ."""
    one, other = list(zip(ids, labels, strict=True)), list(zip(other_ids, other_labels, strict=True))
    if one == other:
        return None
    shared = min(len(one), len(other))
    at = next((place for place in range(shared) if one[place] != other[place]), shared)
    part = slice(max(0, at - AROUND), at + AROUND + 1)
    shown = {"ids": [ids[part], other_ids[part]], "labels": [labels[part], other_labels[part]]}
    return {"row": row, "position": at, **shown}


# ---- speed and memory


def tokens_per_second(logged: list[dict]) -> float | None:
    """The median over a run's steps, but the first few, in which things are set up."""
    speeds = [entry["tokens_per_second"] for entry in logged if "tokens_per_second" in entry]
    return statistics.median(speeds[min(5, len(speeds) // 2) :]) if speeds else None


def ratio(baseline: list[float | None], against: list[float | None]) -> dict | None:
    """{"baseline", "against" (medians), "ratio", "low", "high" (over the pairs)} of figures that were taken by turns;
    None where there is no figure."""
    pairs = [(one, other) for one, other in zip(baseline, against, strict=False) if one and other]
    if not pairs:
        return None
    one, other = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = [theirs / ours for ours, theirs in pairs]
    found = {"baseline": one, "against": other, "ratio": other / one, "low": min(ratios), "high": max(ratios)}
    return found | {"pairs": len(pairs)}


# ---- the closed loop


def reload_verdict(found: dict | None, precision: str) -> dict | None:
    """What `reload.compare` found of an arm, with "passed", "tolerance", "of" (the figure it is for) and "why"."""
    if found is None or "error" in found:
        return found and found | {"passed": False}
    figure, tolerance, why = RELOADED[precision]
    exact = precision == "float32"  # else tokens that are nearly as likely may change places
    said = found["answers_same"] == found["answers"] or not exact
    passed = found["hash_same"] and found[figure] <= tolerance and said
    return found | {"passed": passed, "of": figure, "tolerance": tolerance, "why": why}


# ---- the verdict


def judge(facts: dict) -> tuple[str, list[str]]:
    """("SAME", "DIFFERENT" or "WORSE", the reasons, a line each) of all that was found.

    Args:
        facts: "smoke" {role: {"passed", "told"}}; and, unless the smoke test failed: "labels", "curves", "speed",
            "memory", "closed_loop" {role: `reload_verdict`}, "alternated".
    """
    if not facts["smoke"]["against"]["passed"]:
        return "WORSE", [f"fails where the baseline does not: {facts['smoke']['against']['told']}"]
    worse = [*_worse_loop(facts["closed_loop"]), *_worse_end(facts["curves"])]
    if facts["alternated"]:
        worse += _worse_cost(facts["speed"], facts["memory"])
    different = [*_other_batch(facts["labels"]), *_other_curves(facts["curves"])]
    if (own := facts["closed_loop"]["baseline"]) and not own["passed"]:
        different.append(f"closed loop: the baseline's own model is another once it is loaded: {told_reload(own)}")
    return ("WORSE" if worse else "DIFFERENT" if different else "SAME"), worse + different


def _worse_loop(loops: dict):
    own, other = loops["baseline"], loops["against"]
    if other and not other["passed"] and (own is None or own["passed"]):
        yield f"closed loop: the saved model is another once it is loaded: {told_reload(other)}"


def told_reload(found: dict) -> str:
    """What the closed loop found of an arm, in a line."""
    if "error" in found:
        return found["error"]
    mean, most = (float(found[name]) for name in ("mean_difference", "max_difference"))
    told = f"log-probabilities differ by {mean:.2g} on average, {most:.2g} at most"
    told += f" (tolerance of the {found['of'].split('_')[0]}: {found['tolerance']:g}), "
    told += f"{found['answers_same']} of {found['answers']} answers are the same"
    return told + ("" if found["hash_same"] else "; the rows no longer make the same batch")


def _worse_end(curves: dict):
    end = curves["end"]
    if end["against"] > end["baseline"] and end["relative"] > end["tolerance"]:
        yield f"loss: ends at {end['against']:.4g}, the baseline at {end['baseline']:.4g} (step {end['step']})"


def _worse_cost(speed: dict | None, memory: dict | None):
    """More cost in each pair, of two or more: the spread of a single one is unknown."""
    if speed and speed["pairs"] > 1 and speed["high"] < 1 / TOO_MUCH:
        yield f"speed: {told_ratio(speed)} times the baseline's tokens per second"
    if memory and memory["pairs"] > 1 and memory["low"] > TOO_MUCH:
        yield f"memory: {told_ratio(memory)} times the baseline's peak"


def told_ratio(found: dict) -> str:
    """A ratio with its spread."""
    spread = f" ({found['low']:.2f} to {found['high']:.2f})" if found["pairs"] > 1 else ""
    return f"{found['ratio']:.2f}{spread}"


def _other_batch(labels: dict):
    if labels["rows_same"] is False:
        yield "rows: the first batch holds other rows, or the same in another order"
    elif first := labels["first"]:
        counts = " and ".join(f"{count:,}" for count in labels["trained_tokens"])
        yield f"labels: {first['row']} differs from token {first['position']} on; {counts} tokens are trained"
    elif labels["same"] is False:
        yield "labels: the first batch has another hash"


def _other_curves(curves: dict):
    for name, told in (("loss", "loss"), ("grad_norm", "gradient norm")):
        found = curves[name]
        if found["first_divergence"] is not None:
            most = f"at most {found['max_relative']:.2g} of its value at step {found['at_step']}"
            limit = f"tolerance {found['tolerance']:.2g}"
            yield f"{told}: beyond tolerance from step {found['first_divergence']} on; {most} ({limit})"
