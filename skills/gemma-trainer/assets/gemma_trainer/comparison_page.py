"""What a comparison of two arms says: a few lines for a person, and a page with both curves."""

from __future__ import annotations

import math
from pathlib import Path

from .comparison import NOISE, ROLES, told_ratio, told_reload
from .files import write_whole
from .page import BOX, at, axis, count, document, esc, figure_grid, frame, num, table

CURVES = {"loss": "Loss", "grad_norm": "Gradient norm"}
# The other arm is drawn in dashes over the baseline, so that equal curves are both seen.
CSS = """.baseline { --mark: var(--train); } .against { --mark: var(--eval); } path.against { stroke-dasharray: 6 5; }
.SAME { color: var(--good); } .DIFFERENT { color: var(--warn); } .WORSE { color: var(--bad); }"""


def figures_of(result: dict) -> dict[str, str]:
    """What was measured, by name, each in a line."""
    found = {f"smoke, {role}": told["told"] for role, told in result["smoke"].items()}
    if "curves" not in result:
        return found
    labels, curves = result["labels"], result["curves"]
    found["labels"] = _told_labels(labels)
    found |= {CURVES[name].lower(): _told_curve(curves[name]) for name in CURVES}
    if speed := result["speed"]:
        found["speed"] = f"{told_ratio(speed)} of the baseline's {speed['baseline']:,.0f} tokens/s"
    if memory := result["memory"]:
        found["peak memory"] = f"{told_ratio(memory)} of the baseline's {memory['baseline']:,.0f} MB"
    for role, loop in result["closed_loop"].items():
        found[f"closed loop, {role}"] = told_reload(loop) if loop else "not made: no first_batch.json with log_probs"
    return found


def _names(result: dict) -> tuple[str, str]:
    """What the arms are called: the other one with its interpreter, where that is another."""
    one, other = (result["arms"][role] for role in ROLES)
    return one["arm"], other["arm"] + (f" of {other['python']}" if other["python"] != one["python"] else "")


def _told_labels(labels: dict) -> str:
    if labels["same"] is None:
        return "unknown: a run was made by an older version"
    counts = " and ".join(f"{count:,}" for count in labels["trained_tokens"])
    same = "the same, token for token" if labels["same"] else "not the same"
    return f"the first batch is {same} ({counts} trained tokens)"


def _told_curve(found: dict) -> str:
    where = found["first_divergence"]
    told = "within tolerance" if where is None else f"beyond tolerance from step {where} on"
    most, limit = (float(found[name]) for name in ("max_relative", "tolerance"))
    at = f" at step {found['at_step']}" if most else ""
    return f"{told}: at most {most:.2g} of its value apart{at} (tolerance {limit:.2g}, own noise {found['noise']:.2g})"


def remarks(result: dict) -> list[str]:
    """What a reader has to know of the figures."""
    if "curves" not in result:
        return []
    curves = result["curves"]
    own = f"never less than {NOISE} times the baseline's own noise"
    found = [f"Tolerance, {curves['precision']}: {curves['why']}; {own}."]
    if not result["alternated"]:
        found.append("An arm is a finished run: speed and memory were not taken by turns, and are told, not judged.")
    elif result["speed"] and result["speed"]["pairs"] < 2:
        found.append("One run of each arm has no spread: speed and memory are told, not judged (--repeats 2 does).")
    if not result["data_same"]:
        found.append("The data sets of the two arms have different fingerprints.")
    one, other = (result["versions"][role] for role in ROLES)
    names = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    changed = [f"{name} {one.get(name, 'none')} and {other.get(name, 'none')}" for name in names]
    return found + ([f"Versions that differ: {', '.join(changed)}."] if changed else [])


def summary(result: dict) -> str:
    """A result in a few lines for a person."""
    one, other = _names(result)
    lines = [f"{result['verdict']:<10} {other} against the baseline {one}, {result['steps']} steps"]
    lines += [f"  because  {reason}" for reason in result["reasons"]]
    lines += [f"{name:<22} {told}" for name, told in figures_of(result).items()]
    return "\n".join([*lines, *(f"note     {remark}" for remark in remarks(result)), f"report   {result['report']}"])


def write_page(path: Path, result: dict, logged: dict[str, list[dict]]) -> None:
    """Write the page of a result; `logged` has the log of each arm's first run."""
    one, other = _names(result)
    title = f"{result['verdict']}: {other} against {one}"
    reasons = "".join(f"<li>{esc(reason)}</li>" for reason in result["reasons"])
    demo = '<p class="demo">These are the built-in demo\'s rows.</p>' if result["demo"] else ""
    head = f'<header><h1>Is the change safe? <b class="{result["verdict"]}">{result["verdict"]}</b></h1>'
    head += f"<p>{esc(other)} against the baseline {esc(one)}, {result['steps']} steps</p>{demo}"
    body = [head + (f"<ul>{reasons}</ul></header>" if reasons else "</header>"), _grid(result)]
    body += [chart(name, title, logged) for title, name in ((CURVES[name], name) for name in CURVES) if logged]
    body += [table("Figures", figures_of(result))]
    notes = "".join(f"<li>{esc(remark)}</li>" for remark in remarks(result))
    body += [f"<section><h2>Notes</h2><ul>{notes}</ul></section>" if notes else ""]
    body += [_labels(result.get("labels") or {})]
    if versions := result.get("versions"):
        names = dict.fromkeys([*versions["baseline"], *versions["against"]])
        rows = {name: " / ".join(versions[role].get(name, "–") for role in ROLES) for name in names}
        body += [table("Versions, baseline / against", rows, closed=True)]
    body += [table("Interpreters", {role: result["arms"][role]["python"] for role in ROLES}, closed=True)]
    write_whole(path, document(title, body, CSS))


def _grid(result: dict) -> str:
    """The main figures as a grid."""
    if "curves" not in result:
        return ""
    figures = []
    for name, title in CURVES.items():
        found = result["curves"][name]
        css = "" if found["first_divergence"] is None else "no"
        apart, limit = float(found["max_relative"]), float(found["tolerance"])
        figures.append((f"{title}, apart", f"{apart:.2g}", f"tolerance {limit:.2g}", css))
    for name, title in (("speed", "Tokens per second"), ("memory", "Peak memory")):
        if found := result[name]:
            spread = f"{found['low']:.2f} to {found['high']:.2f}, {found['pairs']} pairs"
            figures.append((title, f"{found['ratio']:.2f} x", spread if found["pairs"] > 1 else "one pair", ""))
    return figure_grid(figures)


def chart(name: str, title: str, logged: dict[str, list[dict]]) -> str:
    """The curves of both arms over the steps, with a legend; nothing if there is no number."""
    curves = {role: _points(logged[role], name) for role in ROLES}
    every = [point for points in curves.values() for point in points]
    if not every:
        return ""
    x = axis([step for step, _ in every], whole=True)
    low, high, step = axis([value for _, value in every])
    y = (math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)
    marks = legend = ""
    for role, points in curves.items():
        spots = "L".join(f"{at(step, x):.1f} {BOX - at(value, y):.1f}" for step, value in points)
        marks += f'<path class="{role}" d="M{spots}"/>' if points else ""
        legend += f'<span><i class="{role}"></i>{role}{"" if role == "baseline" else " (dashes)"}</span>'
    return frame(title, marks, x, y, legend=legend, x_name="step", css="tall")


def _points(logged: list[dict], name: str) -> list[tuple[float, float]]:
    pairs = ((num(entry["step"]), num(entry.get(name))) for entry in logged)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _labels(labels: dict) -> str:
    """The tokens around the first that differs, ids and labels only."""
    first = labels.get("first")
    if not first:
        return ""
    rows = {}
    for name in ("ids", "labels"):
        rows |= {f"{name}, {role}": " ".join(map(str, first[name][i])) for i, role in enumerate(ROLES)}
    return table(f"Where the labels differ: {esc(first['row'])}, from token {count(first['position'])} on", rows)
