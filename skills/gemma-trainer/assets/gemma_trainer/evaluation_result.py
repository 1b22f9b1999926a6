"""What comes of an evaluation: its figures as a result, the verdict, and whether what is required is met."""

from __future__ import annotations

import json

from . import evaluation_figures as figures
from .errors import DataError
from .evaluation import Work
from .evaluation_book import RESULT
from .evaluation_figures import Figure
from .evaluation_table import conclusion, summary
from .evaluation_work import ANSWER
from .files import finite, write_whole
from .goals import Goal

SHOWN = 5  # rows that are told by name


def conclude(work: Work) -> dict:
    """The figures, the verdict, and whether --require is met, written into the folder.

    Returns:
        the result, with a "summary" for people.

    Raises:
        DataError: nothing could be found of any row.
    """
    found = figures.figures_of(work.names, work.labels, work.items, list(work.arms), work.book)
    problems = _problems(work)
    if not found or not _found_any(work):
        raise DataError(f"none of {len(work.items):,} rows can be evaluated. First: {(problems or ['?'])[0]}")
    result = _result(work, found, problems)
    result["conclusion"] = conclusion(result)
    result["required"] = _required(work.goals, result)
    result["notes"] = work.notes + _notes(work, result)
    result["output"] = str(work.folder)
    write_whole(work.folder / RESULT, json.dumps(finite(result), indent=1, ensure_ascii=False) + "\n")
    failed = {"exit_code": 8} if not all(goal["passed"] for goal in result["required"]) else {}
    return finite(result) | failed | {"summary": summary(result)}


def _result(work: Work, found: list[Figure], problems: list[str]) -> dict:
    measured = {figure.name: _told(figure, list(work.arms), work.compared) for figure in found}
    judged = next((figure for figure in found if figure.name == "judge"), None)
    drift = figures.drift_of(len(work.guard), work.book) if work.guard else {}
    primary = found[0].name
    by_label = figures.confusion(work.labels, work.items, "tuned", work.book) if "accuracy" in measured else None
    return {
        "status": "done",
        "demo": work.rows.demo,
        "verdict": measured[primary]["difference"]["verdict"] if work.compared else None,
        "primary": primary,
        "arms": work.arms,
        "rows": len(work.items),
        "failed_rows": len(problems),
        "problems": problems[:SHOWN],
        "unfinished": _unfinished(work),
        "metrics": measured,
        "drift": {name: figure.of("tuned") | {"prompts": len(figure.rows)} for name, figure in drift.items()},
        "judge": {"win_rate": figures.win_rate(judged).of("tuned")} if judged and work.compared else None,
        "confusion": by_label,
        "worse": _worse(work, found[0]) if work.compared else None,
    }


def _told(figure: Figure, arms: list[str], compared: bool) -> dict:
    """A metric's line of the result."""
    told = {"rows": len(figure.rows), "failed": figure.failed, "higher_is_better": figure.higher_is_better}
    told |= {arm: figure.of(arm) for arm in arms}
    if compared:
        told["difference"] = figure.difference("base", "tuned")
    if "few_shot" in arms:
        told["difference_few_shot"] = figure.difference("few_shot", "tuned")
    return told


def _found_any(work: Work) -> bool:
    """Whether the tuned model has made anything of any row."""
    entries = work.book.found.items()
    return any(arm == "tuned" and not m.startswith("guard") and "error" not in e for (arm, m, _), e in entries)


def _unfinished(work: Work) -> dict[str, int]:
    """How many answers of each arm were cut."""
    said = [(arm, entry) for (arm, measure, _), entry in work.book.found.items() if measure == ANSWER]
    return {arm: sum(a == arm and entry.get("stopped") is False for a, entry in said) for arm in work.arms}


def _problems(work: Work) -> list[str]:
    """`row: why` of each row of which something could not be found in some arm."""
    reasons = {at: item.problem for at, item in enumerate(work.items) if item.problem}
    for (_, measure, at), entry in work.book.found.items():
        if "error" in entry and not measure.startswith("guard"):
            reasons.setdefault(at, entry["error"])
    return [f"{work.items[at].name}: {reasons[at]}" for at in sorted(reasons)]


def _worse(work: Work, figure: Figure) -> dict:
    """How many rows the tuned model does worse on than the base, and the first of them."""
    base, tuned = figure.each("base"), figure.each("tuned")
    worse = (tuned < base) if figure.higher_is_better else (tuned > base)
    names = [work.items[at].name for at, is_worse in zip(figure.rows, worse, strict=True) if is_worse]
    return {"rows": len(names), "first": names[:SHOWN]}


def _values(result: dict) -> dict[str, float]:
    """The figures that --require may name, as far as they were found."""
    values: dict[str, float] = {}

    def add(name: str, value: float, low: float, high: float) -> None:
        values.update({name: value, f"{name}.low": low, f"{name}.high": high})

    for name, told in result["metrics"].items():
        for arm in result["arms"]:
            add(name if arm == "tuned" else f"{arm}/{name}", *(told[arm][key] for key in ("value", "low", "high")))
        gap = told.get("difference")
        if gap and gap["verdict"] != figures.INCOMPARABLE:
            bounds = (gap["difference"], gap["low"], gap["high"])
            if not told["higher_is_better"]:  # a gain is always for the better
                bounds = (-gap["difference"], -gap["high"], -gap["low"])
            add(f"gain/{name}", *bounds)
    for name, told in result["drift"].items():
        add(f"drift/{name}", told["value"], told["low"], told["high"])
    if result["judge"]:
        add("judge/win_rate", *(result["judge"]["win_rate"][key] for key in ("value", "low", "high")))
    return values


def _required(goals: list[Goal], result: dict) -> list[dict]:
    """Each goal with its figure; one whose figure could not be found is not met."""
    values = _values(result)
    found = [(goal, values.get(goal.metric)) for goal in goals]
    return [
        {"goal": str(goal), "value": value, "passed": value is not None and goal.met(value)} for goal, value in found
    ]


def _notes(work: Work, result: dict) -> list[str]:
    told, first = [], result["metrics"][result["primary"]]
    counted = "are left out" if result["primary"] in ("loss", "perplexity", "judge") else "count as wrong"
    for arm, count in first["failed"].items():
        if count > min(first["failed"].values()):
            told.append(f"{arm} could not be asked {count:,} rows that others could; they {counted} (see problems)")
    if cut := ", ".join(f"{arm} {count:,}" for arm, count in result["unfinished"].items() if count):
        told.append(f"answers that did not end within --max-new-tokens {work.config.max_new_tokens}: {cut}")
    if work.compared and not figures.cut_alike(work.book):
        told.append("the models cut the answers into different tokens: losses per token and drift/kl tell nothing")
    broken = [result["drift"].get(name) for name in ("broken", "broken_base")]
    if all(broken) and broken[0]["low"] > broken[1]["value"]:
        tuned, base = (round(one["value"] * one["prompts"]) for one in broken)
        told.append(f"answers to general prompts that are empty or do not end: tuned {tuned}, base {base}")
    if first["rows"] < figures.FEW:
        told.append(f"{first['rows']} rows are too few to tell small differences: take 100 or more")
    counts = [entry["shots"] for entry in work.book.found.values() if "shots" in entry]
    if short := sum(count < work.config.few_shot for count in counts):
        told.append(f"few-shot: fewer than {work.config.few_shot} examples before {short:,} of {len(counts):,} prompts")
    return told
