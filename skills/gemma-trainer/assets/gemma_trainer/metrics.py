"""How good answers are: each metric turns an answer into a few numbers, and the sums of these over rows into a figure.

Figures of sums can be made again from any choice of rows, which is what `significance.py` does. Texts are compared as
`answer_checks.normalize` leaves them (no case, no punctuation), where not said otherwise.

Words are what stands between spaces. Scripts that put none between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese)
count letter by letter: there `f1` and `rouge_l` compare letters, and `wer` comes near `cer`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .answer_checks import Answer, Check, as_json, last_number, normalize, same_text

CHRF_ORDER, CHRF_BETA = 6, 2  # letters in the longest n-gram, and the weight of recall: those of chrF2, as in sacrebleu
UNSPACED = ("Han", "Hira", "Kana", "Thai", "Laoo", "Khmr", "Mymr")
OTHER = "(other)"  # the column of answers that are no label


@dataclass(frozen=True)
class Wanted:
    """What the answer to a row should be: its expected text, the labels that there are, and the row's own checks."""

    expected: str | None
    labels: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Metric:
    """A metric. `worst` and `best` are its figures for answers that are all wrong and all right.

    `stats` takes an answer, None where none could be made, and what was wanted, and returns k numbers; `finish` makes
    sums of these, [..., k], into figures [...]. `fits` tells whether a row can be measured so.

    Example:
        metric = METRICS["wer"]
        stats = np.array([metric.stats(answer, wanted) for answer, wanted in pairs])
        figure = float(metric.finish(stats.sum(0)))
    """

    name: str
    stats: Callable[[Answer | None, Wanted], tuple[float, ...]]
    finish: Callable[[np.ndarray], np.ndarray]
    fits: Callable[[Wanted], bool]
    worst: float = 0.0
    best: float = 1.0

    @property
    def higher_is_better(self) -> bool:
        return self.best > self.worst


# ---- texts


@functools.cache
def _word():
    import regex  # which knows scripts

    unspaced = "".join(rf"\p{{scx={script}}}" for script in UNSPACED)
    return regex.compile(rf"[{unspaced}]\p{{M}}*|[^\s{unspaced}]+")


def words(text: str) -> list[str]:
    """The words of a text as they are compared; see the module for scripts without spaces."""
    return _word().findall(normalize(text))


def _f1(said: str, expected: str) -> float:
    """Harmonic mean of precision and recall of the words, each as often as it occurs (SQuAD, articles kept)."""
    ours, theirs = words(said), words(expected)
    if not ours or not theirs:
        return float(same_text(said, expected))
    return 2 * (Counter(ours) & Counter(theirs)).total() / (len(ours) + len(theirs))


def _rouge_l(said: str, expected: str) -> float:
    """The same of the longest common subsequence of words: ROUGE-L's F-measure."""
    from rapidfuzz.distance import LCSseq  # in C; rouge-score's own table takes a second for two texts of 2,000 words

    ours, theirs = words(said), words(expected)
    if not ours or not theirs:
        return float(same_text(said, expected))
    return 2 * LCSseq.similarity(ours, theirs) / (len(ours) + len(theirs))


def _edits(answer: Answer | None, expected: list | str, split: Callable[[str], list | str]) -> tuple[float, float]:
    """(substituted, left out and added parts, parts of the expected text); no answer leaves out all, or is one added
    part where nothing was to be said."""
    from rapidfuzz.distance import Levenshtein  # what jiwer counts with

    if answer is None:
        return max(1, len(expected)), len(expected)
    return Levenshtein.distance(expected, split(answer.text)), len(expected)


def _chrf_stats(answer: Answer | None, wanted: Wanted) -> tuple[float, ...]:
    """For each order the n-grams of the answer, of the expected text, and those in both."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    found: list[float] = []
    sides = (extract_all_char_ngrams(text, CHRF_ORDER) for text in (answer.text if answer else "", wanted.expected))
    for ours, theirs in zip(*sides, strict=True):  # sacrebleu leaves out orders that the expected text is too short for
        found += [ours.total() if theirs else 0, theirs.total(), (ours & theirs).total()]
    return tuple(found)


def _chrf(sums: np.ndarray) -> np.ndarray:
    """chrF2 of a corpus, 0 to 100: mean precision and recall over the orders that both sides have, recall weighing
    more."""
    ours, theirs, both = np.moveaxis(sums.reshape(*sums.shape[:-1], CHRF_ORDER, 3), -1, 0)
    present = (ours > 0) & (theirs > 0)
    orders = np.maximum(present.sum(-1), 1)
    precision = (both / np.maximum(ours, 1) * present).sum(-1) / orders
    recall = (both / np.maximum(theirs, 1) * present).sum(-1) / orders
    weight = CHRF_BETA**2
    below = weight * precision + recall
    return 100 * (1 + weight) * precision * recall / np.where(below > 0, below, 1)


# ---- JSON


NO_JSON = object()


def _json_of(text: str | None):
    """The JSON value of a text; NO_JSON where it is none."""
    try:
        return as_json(text or "")
    except (ValueError, RecursionError):
        return NO_JSON


def leaves(value) -> dict[tuple, object]:
    """The values at the ends of nested objects and lists by their path, such as {("tags", 0): "a"}. An empty object
    or list is such a value."""
    found, waiting = {}, [((), value)]
    while waiting:
        path, value = waiting.pop()
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if isinstance(value, dict | list) and value:
            waiting += [((*path, key), one) for key, one in inner]
        else:
            found[path] = value
    return found


def _alike(one, other) -> bool:
    """1 and 1.0 are alike; 1, true and "1" are not."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _json_valid(answer: Answer, wanted: Wanted) -> bool:
    """It is JSON, in a fence or not, and an object or list where the expected one is."""
    value, model = _json_of(answer.text), _json_of(wanted.expected)
    return value is not NO_JSON and (not isinstance(model, dict | list) or isinstance(value, type(model)))


def _json_fields(answer: Answer, wanted: Wanted) -> float:
    """The share of the expected leaves that are there and equal. The order of keys does not matter, that of lists does;
    more fields than expected cost nothing; texts must be the same to the letter."""
    said, expected = leaves(_json_of(answer.text)), leaves(_json_of(wanted.expected))
    return sum(_alike(said.get(path, NO_JSON), value) for path, value in expected.items()) / len(expected)


# ---- labels


@functools.lru_cache(4096)  # labels are asked for again and again
def _key(text: str) -> tuple[str, ...]:
    """A label, or an answer that may be one, as it is compared."""
    return tuple(words(text)) or (text.strip(),)


def label_of(text: str, labels: tuple[str, ...]) -> int | None:
    """Which label an answer is: the one that it equals, else the only one that it names in whole words; None where it
    names none or several. A label within a longer one that is named ("positive" in "very positive") is not meant."""
    key, keys = _key(text), [_key(label) for label in labels]
    if key in keys:
        return keys.index(key)
    named: list[tuple[int, int, int]] = []
    for label, wanted in enumerate(keys):
        size = len(wanted)
        named += [(at, at + size, label) for at in range(len(key) - size + 1) if key[at : at + size] == wanted]
    meant = {
        label
        for start, end, label in named
        if not any(s <= start and end <= e and e - s > end - start for s, e, _ in named)
    }
    return meant.pop() if len(meant) == 1 else None


def _right_label(answer: Answer, wanted: Wanted) -> bool:
    return label_of(answer.text, wanted.labels) == label_of(wanted.expected, wanted.labels)


def _label_counts(answer: Answer | None, wanted: Wanted) -> tuple[float, ...]:
    """For each label whether it was rightly answered, answered, and expected."""
    said = label_of(answer.text, wanted.labels) if answer else None
    right = label_of(wanted.expected, wanted.labels)
    found = [0.0] * (3 * len(wanted.labels))
    found[3 * right] = float(said == right)
    found[3 * right + 2] = 1.0
    if said is not None:
        found[3 * said + 1] = 1.0
    return tuple(found)


def _macro_f1(sums: np.ndarray) -> np.ndarray:
    """The mean F1 of the labels that were expected or answered at all."""
    both, ours, theirs = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
    seen = ours + theirs > 0
    return (2 * both / np.where(seen, ours + theirs, 1)).sum(-1) / np.maximum(seen.sum(-1), 1)


def find_labels(expected: list[str]) -> tuple[str, ...]:
    """The labels of a classification, in the order of their names, if the expected answers look like one: 2 to 50
    different texts of at most five words, each three times or more on average. Else ()."""
    found = {_key(text): text.strip() for text in reversed(expected)}  # the first spelling of each
    short = all(0 < len(text) and len(key) <= 5 for key, text in found.items())
    if not short or not 2 <= len(found) <= min(50, len(expected) // 3):
        return ()
    return tuple(sorted(found.values()))


def confusion(answers: list[Answer | None], wanted: list[Wanted]) -> dict:
    """What was answered where each label was expected.

    Returns:
        {"labels": [L names], "columns": the same and OTHER, "counts": [L][L + 1] rows expected, columns answered}.
    """
    labels = wanted[0].labels
    counts = np.zeros((len(labels), len(labels) + 1), int)
    for answer, row in zip(answers, wanted, strict=True):
        said = label_of(answer.text, labels) if answer else None
        counts[label_of(row.expected, labels), len(labels) if said is None else said] += 1
    return {"labels": list(labels), "columns": [*labels, OTHER], "counts": counts.tolist()}


def confusion_text(table: dict, most: int = 12) -> str:
    """A confusion table for people: a line for each expected label, the commonest `most` of them."""
    counts = np.array(table["counts"])
    kept = sorted(np.argsort(-counts.sum(1), kind="stable")[:most])
    rest = [label for label in range(len(counts)) if label not in kept]
    shown = counts[kept]
    shown = np.column_stack([shown[:, kept], shown[:, rest].sum(1), shown[:, -1]])
    names = [_short(table["labels"][label]) for label in kept]
    heads = [*names, "(others)", OTHER] if rest else [*names, OTHER]
    shown = shown if rest else np.delete(shown, -2, axis=1)
    first = max(map(len, ["expected", *names]))
    lines = ["  ".join(["expected".ljust(first), *heads])]
    for name, row in zip(names, shown.tolist(), strict=True):
        lines.append("  ".join([name.ljust(first), *(str(n).rjust(len(h)) for n, h in zip(row, heads, strict=True))]))
    if rest:
        lines.append(f"... and {len(rest)} more labels")
    return "\n".join(lines)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 16 else text[:15] + "…"


# ---- the table of metrics


def mean(sums: np.ndarray) -> np.ndarray:
    """The mean of values, from sums of (value, 1)."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def ratio(sums: np.ndarray) -> np.ndarray:
    """Errors for each part of the expected texts, from sums of (errors, parts)."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def _mean_of(name: str, value: Callable[[Answer, Wanted], float], fits: Callable[[Wanted], bool]) -> Metric:
    """A metric that is the mean over rows of a value from 0 to 1; 0 for an answer that could not be made."""
    return Metric(name, lambda answer, wanted: (float(value(answer, wanted)) if answer else 0.0, 1.0), mean, fits)


def _passes(answer: Answer, wanted: Wanted) -> bool:
    try:
        return all(check.passes(answer) for check in wanted.checks)
    except Exception:  # a check that cannot cope with what was said
        return False


def _is_number(answer: Answer, wanted: Wanted) -> bool:
    said, right = last_number(answer.text), last_number(wanted.expected)
    return said is not None and bool(np.isclose(said, right, rtol=1e-6, atol=1e-6))


def _has_text(wanted: Wanted) -> bool:
    return wanted.expected is not None


def _has_label(wanted: Wanted) -> bool:
    return wanted.expected is not None and label_of(wanted.expected, wanted.labels) is not None


def _table() -> dict[str, Metric]:
    found = [
        _mean_of("exact", lambda answer, wanted: answer.text == wanted.expected.strip(), _has_text),
        _mean_of("normalized", lambda answer, wanted: same_text(answer.text, wanted.expected), _has_text),
        _mean_of("f1", lambda answer, wanted: _f1(answer.text, wanted.expected), _has_text),
        _mean_of("numeric", _is_number, lambda wanted: last_number(wanted.expected or "") is not None),
        _mean_of("json_valid", _json_valid, lambda w: w.expected is None or _json_of(w.expected) is not NO_JSON),
        _mean_of("json_fields", _json_fields, lambda wanted: isinstance(_json_of(wanted.expected), dict | list)),
        _mean_of("accuracy", _right_label, _has_label),
        Metric("macro_f1", _label_counts, _macro_f1, _has_label),
        Metric("wer", lambda a, wanted: _edits(a, words(wanted.expected), words), ratio, _has_text, 1.0, 0.0),
        Metric("cer", lambda a, wanted: _edits(a, normalize(wanted.expected), normalize), ratio, _has_text, 1.0, 0.0),
        _mean_of("rouge_l", lambda answer, wanted: _rouge_l(answer.text, wanted.expected), _has_text),
        Metric("chrf", _chrf_stats, _chrf, _has_text, 0.0, 100.0),
        _mean_of("checks", _passes, lambda wanted: bool(wanted.checks)),
    ]
    return {metric.name: metric for metric in found}


METRICS = _table()


# ---- which to take


def choose(expected: list[str], checked: float = 0.0, heard: float = 0.0) -> dict[str, str]:
    """The metrics that suit the expected answers, with the reason for each; the first is the one to judge by.

    Args:
        expected: the expected answers of the rows that have one.
        checked: the share of the rows that bring checks of their own.
        heard: the share of the rows that are asked with audio.
    """
    own = {"checks": "rows bring checks of their own"} if checked else {}
    found = own if checked > 0.5 else {}
    if expected:
        found = found | _by_form(expected, heard > 0.5)
        found |= {name: "the whole answer" for name in ("normalized", "exact") if name not in found}
    return found | own


def _by_form(expected: list[str], audio: bool) -> dict[str, str]:
    def most(holds: Callable[[str], bool]) -> bool:
        return sum(map(holds, expected)) >= 0.9 * len(expected)

    lengths = sorted(len(words(text)) for text in expected)
    middle = lengths[len(lengths) // 2]
    if most(lambda text: isinstance(_json_of(text), dict | list)):
        return dict.fromkeys(("json_fields", "json_valid"), "the expected answers are JSON")
    if labels := find_labels(expected):
        return dict.fromkeys(("accuracy", "macro_f1"), f"the expected answers are {len(labels)} labels")
    if most(_is_amount):
        return {"numeric": "the expected answers are numbers"}
    if audio and middle > 1:
        return dict.fromkeys(("wer", "cer"), "the expected answers look like transcripts of audio")
    if middle <= 10:
        return dict.fromkeys(("normalized", "f1"), "the expected answers are short")
    return dict.fromkeys(("rouge_l", "chrf"), "the expected answers are long")


def _is_amount(text: str) -> bool:
    """A number with a unit or without, or a solution that ends with one behind #### (as in GSM8K)."""
    said = text.rsplit("####", 1)[-1]
    return last_number(said) is not None and len(said.split()) <= 2
