"""What an evaluation's answers and log-probabilities come to: figures with their intervals, and what differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from . import metrics, significance
from .answer_checks import Answer
from .evaluation_book import Book
from .evaluation_rows import CHAT, PAIR, Item
from .evaluation_work import ANSWER, BASE, CHOSEN, KINDS, LOSS, PAIRED, SCORE, TUNED, guarded, wanted_of

FEW = 30  # rows below which a difference that is not shown may well be there
LEVEL = 0.05  # p below which a difference counts as shown
BETTER, WORSE, NONE, TOO_FEW = "BETTER", "WORSE", "NO DIFFERENCE SHOWN", "TOO FEW TO TELL"
INCOMPARABLE = "NOT COMPARABLE"
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Figure:
    """A metric on the rows that have it. `stats` are those of each arm, [rows, k], in the order of `rows`.

    `ends` are its worst and its best, None where it has none; `failed` counts for each arm the rows that nothing was
    found of; it is not `comparable` where it is per token and the arms cut texts into different ones.
    """

    name: str
    rows: list[int]
    stats: dict[str, np.ndarray]
    finish: Callable[[np.ndarray], np.ndarray]
    higher_is_better: bool = True
    ends: tuple[float, float] | None = SHARE
    failed: dict[str, int] = field(default_factory=dict)
    comparable: bool = True

    def of(self, arm: str) -> dict:
        """{"value", "low", "high"} of an arm, the latter the ends of its 95 % interval."""
        low, high = significance.interval(self.stats[arm], self.finish, ends=self.ends)
        return {"value": float(self.finish(self.stats[arm].sum(0))), "low": low, "high": high}

    def difference(self, before: str, after: str) -> dict:
        """{"difference", "low", "high", "p", "verdict"} between two arms."""
        found = significance.compare(self.stats[before], self.stats[after], self.finish, ends=self.ends)
        return found | {"verdict": self._verdict(found)}

    def _verdict(self, found: dict) -> str:
        if not self.comparable:
            return INCOMPARABLE
        shown = found["p"] < LEVEL and (found["low"] > 0 or found["high"] < 0)
        if not shown:
            return TOO_FEW if len(self.rows) < FEW else NONE
        return BETTER if (found["difference"] > 0) == self.higher_is_better else WORSE

    def each(self, arm: str) -> np.ndarray:
        """The figure of each row alone."""
        return self.finish(self.stats[arm])


def figures_of(
    names: list[str], labels: tuple[str, ...], items: list[Item], arms: list[str], book: Book
) -> list[Figure]:
    """The figures of metrics by name (see `NAMES`), without those that no row has."""
    makers = {"loss": _loss, "perplexity": _loss, "judge": _judge} | dict.fromkeys(SIDES, _likeliest)
    found = []
    for name in names:
        if name in metrics.METRICS:
            found.append(_answered(name, labels, items, arms, book))
        else:
            found.append(makers[name](name, items, arms, book))
    return [figure for figure in found if figure.rows]


# ---- answers


def wanted(item: Item, labels: tuple[str, ...]) -> metrics.Wanted:
    return metrics.Wanted(item.expected, labels, item.checks)


def said(book: Book, arm: str, at: int) -> Answer | None:
    """An arm's answer to a row, None where there is none."""
    entry = book.found.get((arm, ANSWER, at), {})
    return Answer(entry["text"], entry["tokens"], entry["stopped"]) if "text" in entry else None


def measured_by(metric: metrics.Metric, labels: tuple[str, ...], items: list[Item]) -> list[int]:
    """The rows that a metric of answers takes, with those that could not even be read, which count as wrong where the
    metric is a mean over rows."""
    asked = [at for at in wanted_of(items, ANSWER) if metric.fits(wanted(items[at], labels))]
    if not asked or metric.finish is not metrics.mean:
        return asked
    return sorted(asked + [at for at, item in enumerate(items) if item.kind == CHAT and item.problem])


def _answered(name: str, labels: tuple[str, ...], items: list[Item], arms: list[str], book: Book) -> Figure:
    metric = metrics.METRICS[name]
    rows = measured_by(metric, labels, items)
    stats, failed = {}, {}
    for arm in arms:
        answers = [said(book, arm, at) for at in rows]
        failed[arm] = answers.count(None)
        stats[arm] = np.array(
            [
                (0.0, 1.0) if items[at].problem else metric.stats(answer, wanted(items[at], labels))
                for at, answer in zip(rows, answers, strict=True)
            ]
        )
    ends = (metric.worst, metric.best)
    return Figure(name, rows, stats, metric.finish, metric.higher_is_better, ends, failed)


def confusion(labels: tuple[str, ...], items: list[Item], arm: str, book: Book) -> dict:
    """`metrics.confusion` of an arm's answers."""
    rows = [at for at in measured_by(metrics.METRICS["accuracy"], labels, items) if not items[at].problem]
    return metrics.confusion([said(book, arm, at) for at in rows], [wanted(items[at], labels) for at in rows])


# ---- log-probabilities


def _sides(book: Book, arm: str, measure: str, at: int) -> list[tuple[float, int]] | None:
    """(log-probability, tokens) of each side of an item; None where there are none, or some that are no numbers."""
    found = book.found.get((arm, measure, at), {}).get("sides")
    return found if found and all(math.isfinite(log_prob) for log_prob, _ in found) else None


def cut_alike(book: Book) -> bool:
    """Whether base and tuned cut texts into the same number of tokens, so that figures per token can be compared."""

    def counts(arm: str, measure: str, at: int) -> list[int]:
        found = book.found.get((arm, measure, at), {})
        return [tokens for _, tokens in found.get("sides", ())] or [len(found.get("log_probs", ()))]

    both = [key[1:] for key in book.found if key[0] == BASE and (TUNED, *key[1:]) in book.found]
    sizes = ((counts(BASE, *key), counts(TUNED, *key)) for key in both)
    return all(ours == theirs for ours, theirs in sizes if ours != [0] and theirs != [0])


def _perplexity(sums: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(metrics.ratio(sums), 700.0))  # the largest that a float holds


def _loss(name: str, items: list[Item], arms: list[str], book: Book) -> Figure:
    """Mean negative log-likelihood of the trained tokens, over the rows of which all arms have it."""
    there = wanted_of(items, LOSS)
    found = {arm: {at: _sides(book, arm, LOSS, at) for at in there} for arm in arms}
    rows = [at for at in there if all(found[arm][at] for arm in arms)]
    stats = {arm: np.array([(-found[arm][at][0][0], found[arm][at][0][1]) for at in rows]) for arm in arms}
    failed = {arm: sum(not one for one in found[arm].values()) for arm in arms}
    finish = metrics.ratio if name == "loss" else _perplexity
    return Figure(name, rows, stats, finish, False, None, failed, cut_alike(book))


SIDES = {  # the measure, and whether its log-probabilities are taken per token
    "choice_accuracy": (CHOSEN, False),
    "choice_accuracy_per_token": (CHOSEN, True),
    "pair_accuracy": (PAIRED, False),
    "pair_accuracy_per_token": (PAIRED, True),
}
NAMES = (*metrics.METRICS, *SIDES, "loss", "perplexity")


def measure_of(name: str) -> str:
    """What a metric needs of the rows."""
    return SIDES[name][0] if name in SIDES else LOSS if name in ("loss", "perplexity") else ANSWER


def _likeliest(name: str, items: list[Item], arms: list[str], book: Book) -> Figure:
    """How often the right one of several answers is the likeliest; of a pair a tie is half."""
    measure, per_token = SIDES[name]
    rows = [at for at, item in enumerate(items) if item.kind == KINDS[measure]]
    stats, failed = {}, {}
    for arm in arms:
        found = {at: _sides(book, arm, measure, at) for at in rows}
        failed[arm] = sum(one is None for one in found.values())
        stats[arm] = np.array([(_is_right(found[at], items[at], per_token), 1.0) for at in rows])
    return Figure(name, rows, stats, metrics.mean, failed=failed)


def _is_right(sides: list[tuple[float, int]] | None, item: Item, per_token: bool) -> float:
    if sides is None:
        return 0.0
    values = [log_prob / tokens if per_token else log_prob for log_prob, tokens in sides]
    right = values.pop(item.right)
    return 0.5 if item.kind == PAIR and right == values[0] else float(right > max(values))


# ---- a judge


def _judge(name: str, items: list[Item], arms: list[str], book: Book) -> Figure:
    """The mean score of the answers that all arms have a score of."""
    there = wanted_of(items, ANSWER)
    scores = {arm: {at: book.found.get((arm, SCORE, at), {}).get("score") for at in there} for arm in arms}
    rows = [at for at in there if all(_is_number(scores[arm][at]) for arm in arms)]
    stats = {arm: np.array([(scores[arm][at], 1.0) for at in rows]) for arm in arms}
    failed = {arm: sum(not _is_number(score) for score in scores[arm].values()) for arm in arms}
    return Figure(name, rows, stats, metrics.mean, ends=None, failed=failed)


def _is_number(score: float | None) -> bool:
    return score is not None and math.isfinite(score)


def win_rate(judged: Figure) -> Figure:
    """How often the tuned model's answer scores higher than the base's; a tie is half."""
    ours, theirs = judged.each(TUNED), judged.each(BASE)
    wins = (ours > theirs) + 0.5 * (ours == theirs)
    return Figure("win_rate", judged.rows, {TUNED: np.column_stack([wins, np.ones(len(wins))])}, metrics.mean)


# ---- drift


DRIFT = ("kl", "log_prob_drop", "same", "broken", "broken_base")


def drift_of(count: int, book: Book) -> dict[str, Figure]:
    """How far the tuned model is from its base on `count` general prompts, by name.

    `kl` and `log_prob_drop` are nats a token of the base's own greedy answers. Where the base gives the token that it
    takes the probability p, and the tuned model gives it q, the drop is log p - log q, and the divergence that of the
    two shares, p log(p/q) + (1-p) log((1-p)/(1-q)). By the data-processing inequality the latter is never more than the
    divergence KL(base || tuned) of the whole distributions there, so that it is a lower bound of it. There are neither
    for two models that cut these answers into different tokens.
    """
    stats: dict[str, list] = {name: [] for name in DRIFT}
    alike = cut_alike(book)
    for at in range(count):
        answers, sides = guarded(book, at)
        same = "text" in answers[BASE] and answers[BASE]["text"] == answers[TUNED].get("text")
        stats["same"].append((float(same), 1.0))
        stats["broken"].append((_is_broken(answers[TUNED]), 1.0))
        stats["broken_base"].append((_is_broken(answers[BASE]), 1.0))
        if alike and all(side and np.isfinite(side).all() for side in sides):
            # The end of an answer that the base did not end is not its own.
            tokens = len(sides[0]) - (not answers[BASE]["stopped"])
            base, tuned = (np.array(side[:tokens]) for side in sides)
            stats["kl"].append((_divergence(base, tuned).sum(), tokens))
            stats["log_prob_drop"].append(((base - tuned).sum(), tokens))
    ends = {"kl": None, "log_prob_drop": None}
    found = {name: np.array(rows) for name, rows in stats.items() if rows}
    return {
        name: Figure(name, list(range(len(rows))), {TUNED: rows}, metrics.mean, name == "same", ends.get(name, SHARE))
        for name, rows in found.items()
    }


def _is_broken(entry: dict) -> float:
    return float(not entry.get("stopped") or not entry.get("text", "").strip())


def _divergence(base: np.ndarray, tuned: np.ndarray) -> np.ndarray:
    """KL divergence of two shares, given by their logarithms."""
    p, q = (np.clip(np.exp(one), 1e-9, 1 - 1e-9) for one in (base, tuned))
    tuned = np.maximum(tuned, -700.0)
    return np.maximum(p * (np.log(p) - np.minimum(tuned, np.log(q))) + (1 - p) * (np.log1p(-p) - np.log1p(-q)), 0.0)


# ---- names


def known_figures(names: list[str], arms: list[str], judged: bool, guarded: bool) -> list[str]:
    """What --require may name."""
    compared = "base" in arms
    sides = ["", *(f"{arm}/" for arm in arms if arm != "tuned"), *(["gain/"] if compared else [])]
    known = [side + name for name in names for side in sides]
    known += [f"drift/{name}" for name in DRIFT] if compared and guarded else []
    known += ["judge/win_rate"] if compared and judged else []
    return [name + end for name in known for end in ("", ".low", ".high")]
