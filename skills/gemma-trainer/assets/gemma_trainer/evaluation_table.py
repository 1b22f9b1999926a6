"""An evaluation told to people."""

from __future__ import annotations

from .evaluation_figures import BETTER, INCOMPARABLE, NONE, TOO_FEW, WORSE
from .metrics import confusion_text

HEADS = {"base": "base", "few_shot": "few-shot", "tuned": "tuned"}


def number(value: float | None) -> str:
    """Three or four digits are enough of a figure."""
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"


def lines_of(result: dict) -> list[str]:
    """The table: a line for each metric, a column for each arm, and what differs between tuned and base."""
    arms = list(result["arms"])
    heads = ["", "rows", *("model" if arms == ["tuned"] else HEADS[arm] for arm in arms)]
    compared = "base" in arms
    heads += ["difference", "95 % interval", "p", ""] if compared else ["95 % interval"]
    table = [heads]
    for name, found in result["metrics"].items():
        line = [name, f"{found['rows']:,}", *(number(found[arm]["value"]) for arm in arms)]
        if compared:
            gap = found["difference"]
            sign = "+" if gap["difference"] > 0 else ""
            line += [sign + number(gap["difference"]), _interval(gap), _p(gap["p"]), gap["verdict"]]
        else:
            line.append(_interval(found["tuned"]))
        table.append(line)
    widths = [max(len(line[at]) for line in table) for at in range(len(heads))]
    last = len(heads) - 1
    return [
        "  ".join(
            cell.ljust(width) if at in (0, last) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _interval(found: dict) -> str:
    return f"{number(found['low'])} to {number(found['high'])}"


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


MEANING = {
    BETTER: "tuned is better than base: {}; chance alone hardly does that (p {})",
    WORSE: "tuned is worse than base: {}; chance alone hardly does that (p {})",
    NONE: "tuned is shown to be neither better nor worse than base: {}; chance alone may well do that (p {})",
    TOO_FEW: "too few rows to tell tuned from base: {} (p {}); take 100 or more",
    INCOMPARABLE: "nothing can be concluded: {}, but of different tokens",
}
WITH_EXAMPLES = {
    BETTER: "It is better than base with examples in its prompt, too ({})",
    WORSE: "But base with examples in its prompt is better than tuned ({})",
}


def conclusion(result: dict) -> str:
    """What the primary metric says, in words."""
    name = result["primary"]
    found = result["metrics"][name]
    better = "" if found["higher_is_better"] else " (lower is better)"
    tuned = f"{name} {number(found['tuned']['value'])}"
    rows = f"on {found['rows']:,} rows{better}"
    if not result["verdict"]:
        return f"{tuned} {rows}; over many such rows it may be {_interval(found['tuned'])}"
    gap = found["difference"]
    told = MEANING[result["verdict"]].format(f"{tuned} against {number(found['base']['value'])} {rows}", _p(gap["p"]))
    if result["verdict"] == BETTER and "few_shot" in found:
        said = "But it is not shown to be better than base with examples in its prompt ({})"
        shown = WITH_EXAMPLES.get(found["difference_few_shot"]["verdict"], said)
        told += ". " + shown.format(number(found["few_shot"]["value"]))
    return told + "."


def summary(result: dict) -> str:
    """The result for people: what was compared, the table, and what is to be known beside it."""
    lines = [f"verdict   {result['verdict']} ({result['primary']})"] if result["verdict"] else []
    lines.append(f"meaning   {result['conclusion']}")
    lines += [f"{HEADS[arm]:<10}{told}" for arm, told in result["arms"].items()]
    lines += ["", *lines_of(result), ""]
    if result["confusion"]:
        lines += ["expected (rows), answered by the tuned model (columns)", confusion_text(result["confusion"]), ""]
    if drift := result["drift"]:
        told = ", ".join(f"{name} {number(found['value'])}" for name, found in drift.items())
        lines.append(f"drift     {told} (general prompts, against the base)")
    if judged := result["judge"]:
        share = judged["win_rate"]
        lines.append(f"judge     tuned scores higher than base in {share['value']:.1%} ({_interval(share)})")
    if result["failed_rows"]:
        lines.append(f"failed    {result['failed_rows']:,} rows: {'; '.join(result['problems'])}")
    lines += [f"note      {note}" for note in result["notes"]]
    for goal in result["required"]:
        lines.append(f"{'passed' if goal['passed'] else 'FAILED'}    {goal['goal']} ({number(goal['value'])})")
    return "\n".join([*lines, f"written   {result['output']}"])
