"""Figures are those of the tools that the field uses, and of what each metric says it is."""

import random

import jiwer
import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer
from sklearn import metrics as sklearn_metrics

from gemma_trainer import significance
from gemma_trainer.answer_checks import Answer, normalize, read_checks
from gemma_trainer.metrics import (
    METRICS,
    OTHER,
    Wanted,
    choose,
    confusion,
    confusion_text,
    find_labels,
    label_of,
    words,
)


def said(text):
    return None if text is None else Answer(text, 3, True)


def figure(name, pairs, **wanted):
    """The figure of a metric for (answer, expected) pairs."""
    metric = METRICS[name]
    rows = [metric.stats(said(answer), Wanted(expected, **wanted)) for answer, expected in pairs]
    return float(metric.finish(np.array(rows, float).sum(0)))


def texts(seed, count=60):
    """Pairs of texts that share some words."""
    chance = random.Random(seed)
    known = "the cat sat on a mat while two dogs ran, far away; from Ülm to 7 houses".split()
    made = [" ".join(chance.choices(known, k=chance.randint(1, 12))) for _ in range(2 * count)]
    return list(zip(made[:count], made[count:], strict=True))


# ---- against other tools


@pytest.mark.parametrize(("name", "measure"), [("wer", jiwer.wer), ("cer", jiwer.cer)])
def test_error_rates_of_a_corpus_are_those_of_jiwer(name, measure):
    pairs = texts(1)
    wanted = measure([normalize(b) for _, b in pairs], [normalize(a) for a, _ in pairs])
    assert figure(name, pairs) == pytest.approx(wanted)


def test_chrf_of_a_corpus_is_that_of_sacrebleu():
    pairs = [*texts(2), ("", "ab"), ("a b c d e f g", "x"), ("東京は晴れ", "東京は雨だ")]
    for some in (pairs, pairs[:1], pairs[-3:], [("", "a")], [("same", "same")]):
        wanted = sacrebleu.corpus_chrf([a for a, _ in some], [[b for _, b in some]]).score
        assert figure("chrf", some) == pytest.approx(wanted)


def test_rouge_l_of_english_is_that_of_rouge_score():
    pairs = [(a.replace("Ülm", "Ulm"), b.replace("Ülm", "Ulm")) for a, b in texts(3)]
    scorer = RougeScorer(["rougeL"])
    wanted = np.mean([scorer.score(b, a)["rougeL"].fmeasure for a, b in pairs])
    assert figure("rouge_l", pairs) == pytest.approx(wanted)


def test_macro_f1_and_accuracy_are_those_of_sklearn():
    chance, labels = random.Random(4), ("red", "green", "blue", "grey")
    pairs = [(chance.choice([*labels[:3], "none of them"]), chance.choice(labels)) for _ in range(200)]
    answers, expected = zip(*pairs, strict=True)
    wanted = sklearn_metrics.f1_score(expected, answers, labels=labels, average="macro")
    assert figure("macro_f1", pairs, labels=labels) == pytest.approx(wanted)
    assert figure("accuracy", pairs, labels=labels) == pytest.approx(sklearn_metrics.accuracy_score(expected, answers))
    table = confusion([said(a) for a in answers], [Wanted(b, labels) for b in expected])
    named = [answer if answer in labels else OTHER for answer in answers]
    matrix = sklearn_metrics.confusion_matrix(expected, named, labels=[*labels, OTHER])
    assert table["counts"] == matrix[:-1].tolist()
    assert (table["labels"], table["columns"]) == (list(labels), [*labels, OTHER])


def test_figures_of_resampled_rows_are_made_of_their_sums():
    for name in ("chrf", "wer", "macro_f1"):
        metric, labels = METRICS[name], ("a", "b")
        pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("c", "a")]
        stats = np.array([metric.stats(said(a), Wanted(b, labels)) for a, b in pairs], float)
        many = metric.finish(np.array([[stats.sum(0), stats[:2].sum(0)], [stats[2:].sum(0), stats[0]]]))
        assert many.shape == (2, 2) and many[0, 1] == figure(name, pairs[:2], labels=labels)
        low, high = significance.interval(stats, metric.finish, ends=(metric.worst, metric.best))
        assert low <= many[0, 0] <= high


# ---- what each metric says


@pytest.mark.parametrize(("name", "answer", "expected", "wanted"), [
    ("exact", "Paris", "Paris", 1), ("exact", "paris", "Paris", 0), ("exact", "Paris", " Paris\n", 1),
    ("normalized", " PARIS!", "Paris", 1), ("normalized", "Paris, France", "Paris", 0), ("normalized", "!", "?", 0),
    ("normalized", "?", "?", 1), ("normalized", "", "", 1), ("normalized", "x", "", 0),
    ("f1", "a red house", "The red house.", 2 / 3), ("f1", "red red", "red", 2 / 3), ("f1", "", "red", 0),
    ("f1", "", "", 1), ("f1", "東京", "東京都", 0.8), ("f1", "สวัสดี", "สวัสดี", 1),
    ("f1", "Привет, мир", "привет", 2 / 3),
    ("rouge_l", "the cat on a mat sat", "the cat sat", 2 / 3), ("rouge_l", "猫が好き", "犬が好き", 0.75),
    ("rouge_l", "", "a", 0),
    ("numeric", "so it is 1,234.5 m", "1234.5", 1), ("numeric", "12.01", "12", 0), ("numeric", "none", "12", 0),
    ("wer", "the cat", "the cat sat", 1 / 3), ("wer", "a b c", "A.", 2), ("wer", "สวัส", "สวัสดี", 0.25),
    ("wer", "", "a b", 1),
    ("cer", "abd", "abc", 1 / 3), ("cer", "", "", 0), ("cer", "东京", "东京都", 1 / 3),
    ("json_valid", '{"a": 1}', "{}", 1), ("json_valid", '```json\n{"a": 1}\n```', "{}", 1),
    ("json_valid", "5", "{}", 0),
    ("json_valid", "[1]", "{}", 0), ("json_valid", '{"a": 1', "{}", 0), ("json_valid", "[" * 100_000, "[]", 0),
    ("json_valid", "null", "7", 1), ("json_valid", "NaN", "7", 0), ("json_valid", "", "{}", 0),
    ("json_fields", '{"b": {"c": "x"}, "a": 1.0}', '{"a": 1, "b": {"c": "x"}}', 1),
    ("json_fields", '{"a": 1}', '{"a": 1, "b": {"c": "x", "d": null}}', 1 / 3),
    ("json_fields", '{"a": 1, "more": 2}', '{"a": 1}', 1), ("json_fields", '{"a": true}', '{"a": 1}', 0),
    ("json_fields", '{"a": "1"}', '{"a": 1}', 0), ("json_fields", '{"a": [1, 3]}', '{"a": [1, 2, 3]}', 1 / 3),
    ("json_fields", '{"a": []}', '{"a": []}', 1), ("json_fields", '{"a": [1]}', '{"a": []}', 0),
    ("json_fields", "{}", "{}", 1),
    ("json_fields", "no", '{"a": null}', 0), ("json_fields", "{}", '{"a": null}', 0),
    ("json_fields", '{"A": 1}', '{"a": 1}', 0),
])  # fmt: skip
def test_one_row(name, answer, expected, wanted):
    assert METRICS[name].fits(Wanted(expected))
    assert figure(name, [(answer, expected)]) == pytest.approx(wanted)


LABELS = ("positive", "very positive", "negative", "正面", "C++", "C", "-")


@pytest.mark.parametrize(("text", "label"), [
    ("Positive.", "positive"), ("It is positive", "positive"), ("It is very positive!", "very positive"),
    ("positive or negative", None), ("positively", None), ("", None), ("none of these", None), ("这是正面的", "正面"),
    ("very positive, not just positive", None), ("positive, quite positive", "positive"), ("I like C++", "C++"),
    ("c", "C"), ("-", "-"), ("?", None),
])  # fmt: skip
def test_the_label_of_an_answer(text, label):
    found = label_of(text, LABELS)
    assert (None if found is None else LABELS[found]) == label


def test_an_answer_that_could_not_be_made_is_all_wrong_and_not_absent():
    checks = tuple(read_checks({"required": ["a"]}, "a b"))
    for name, metric in METRICS.items():
        expected = {"json_fields": '{"a": 1}', "json_valid": "[]", "numeric": "3"}.get(name, "a b")
        wanted = Wanted(expected, ("a b", "c"), checks)
        stats = np.array([metric.stats(None, wanted), metric.stats(None, wanted)], float)
        assert metric.finish(stats.sum(0)) == metric.worst, name
        right = np.array(metric.stats(said(expected if name != "checks" else "a"), wanted), float)
        assert metric.finish(right) == pytest.approx(metric.best), name
        half = metric.finish(stats[0] + right)
        assert min(metric.worst, metric.best) < half < max(metric.worst, metric.best), name
        assert metric.higher_is_better == (name not in ("wer", "cer"))
    assert figure("wer", [(None, ""), ("a b", "a b")]) == 0.5  # silence that nobody heard is an error, too


def test_words_where_nothing_was_said_count_as_errors_of_the_corpus():
    assert figure("wer", [("two words", ""), ("a b", "a b")]) == 1
    assert figure("wer", [("", ""), ("", "")]) == 0


def test_rows_that_a_metric_cannot_measure():
    unfit = {"numeric": Wanted("none"), "json_valid": Wanted("no JSON"), "json_fields": Wanted("5"),
             "accuracy": Wanted("c", ("a", "b")),
             "macro_f1": Wanted("a"), "checks": Wanted("a"), "wer": Wanted(None), "exact": Wanted(None)}  # fmt: skip
    assert not [name for name, wanted in unfit.items() if METRICS[name].fits(wanted)]
    assert METRICS["json_valid"].fits(Wanted(None)) and METRICS["accuracy"].fits(Wanted(" A.", ("a", "b")))


def test_a_check_that_cannot_cope_with_an_answer_does_not_pass(monkeypatch):
    monkeypatch.setattr("gemma_trainer.answer_checks.REGEX_SECONDS", 0.05)
    (check,) = read_checks({"stopped": False, "regex": r"(a|aa)+$"}, None)
    metric = METRICS["checks"]
    assert metric.stats(said("aaa"), Wanted(None, checks=(check,))) == (1, 1)
    assert metric.stats(said("a" * 40_000 + "b"), Wanted(None, checks=(check,))) == (0, 1)


def test_words_of_scripts_with_and_without_spaces():
    assert words("Don't stop, café-bar №5!") == ["don", "t", "stop", "café", "bar", "no5"]
    assert words("コーヒー is コ") == ["コ", "ー", "ヒ", "ー", "is", "コ"]
    assert words("नमस्ते दुनिया 안녕 하세요") == ["नमस्ते", "दुनिया", "안녕", "하세요"]


# ---- which to take


@pytest.mark.parametrize(("expected", "options", "wanted"), [
    (['{"a": 1}', '{"a": 2}', "[1]"], {}, ["json_fields", "json_valid", "normalized", "exact"]),
    (["yes", "no"] * 5, {}, ["accuracy", "macro_f1", "normalized", "exact"]),
    (["yes", "no"] * 5, {"heard": 0.9}, ["accuracy", "macro_f1", "normalized", "exact"]),
    (["yes", "no"] * 5, {"checked": 0.9}, ["checks", "accuracy", "macro_f1", "normalized", "exact"]),
    (["yes", "no"] * 5, {"checked": 0.1}, ["accuracy", "macro_f1", "normalized", "exact", "checks"]),
    (["12", "3.5 kg", "7 %", "So 3 and 4.\n#### 7"], {}, ["numeric", "normalized", "exact"]),
    (["1", "0"] * 9, {}, ["accuracy", "macro_f1", "normalized", "exact"]),
    (["good morning", "how are you"], {"heard": 0.9}, ["wer", "cer", "normalized", "exact"]),
    (["Rome", "Paris in France", "Oslo"], {}, ["normalized", "f1", "exact"]),
    (["a long text of more than ten words, as summaries and letters are", "x " * 30], {},
     ["rouge_l", "chrf", "normalized", "exact"]),
    ([], {"checked": 0.1}, ["checks"]), ([], {}, []),
    (["12 May 1990", "3 June 2001"], {}, ["normalized", "f1", "exact"]),
])  # fmt: skip
def test_the_metrics_that_suit_the_expected_answers(expected, options, wanted):
    found = choose(expected, **options)
    assert list(found) == wanted and all(found.values())


def test_labels_are_few_short_and_repeated():
    assert find_labels(["b", "a", "B.", "A", "a", "a"]) == ("a", "b")
    rare, many, long = ["a", "b", "a", "b", "a"], [str(n) for n in range(60)] * 3, ["x y z a b c", "b"] * 9
    for none in (rare, many, long, ["a"] * 9, ["", "a"] * 5, []):
        assert find_labels(none) == ()


def test_a_confusion_table_is_capped_and_keeps_its_sums():
    labels = tuple(f"label {n:02}" for n in range(30))
    rows = [(labels[n % 30], labels[n * n % 30]) for n in range(300)]
    table = confusion([said(a) for a, _ in rows] + [None], [Wanted(b, labels) for _, b in [*rows, ("", labels[0])]])
    told = confusion_text(table, most=4).splitlines()
    assert len(told) == 6 and told[-1] == "... and 26 more labels" and "(others)" in told[0]
    for line in told[1:5]:
        counts = [int(n) for n in line.split()[2:]]
        assert sum(counts) == sum(table["counts"][labels.index(" ".join(line.split()[:2]))])
    assert sum(map(sum, table["counts"])) == 301
    assert "(others)" not in confusion_text(confusion([said("a")], [Wanted("a", ("a", "b" * 40))]))
