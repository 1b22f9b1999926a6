"""What a user relies on in the page about a data set: safe, self-contained, right in its figures, whatever the data."""

from __future__ import annotations

import json
import math
import os
import random
import re

import pytest
from test_report import ALLOWED, EVIL, Page

from gemma_trainer.dataset_report import write_dataset_report

CONTROL = "<|turn>model\n"
FAMILY = "👩\u200d👩\u200d👧\u200d👦"


def finding(code: str, severity: str, **changes) -> dict:
    base = {"code": code, "severity": severity, "title": f"Title of {code}", "count": 7, "rows": ["a.jsonl:3"]}
    return base | {"remedy": f"Mend {code}", "command": f"python fix.py {code}", "note": None} | changes


def full_survey(**changes) -> dict:
    survey = {
        "data": ["train.jsonl", "more.parquet"],
        "rows": 4000,
        "task": "sft",
        "model": "demo/model",
        "max_len": 100,
        "demo": False,
        "verdict": "READY WITH WARNINGS",
        "findings": [finding("exif", "info"), finding("too-long", "warning"), finding("missing", "error")],
        "formats": {"messages": 4000},
        "roles": {"user": 4000, "assistant": 3000, "system": 1000},
        "turns": {"2": 3000, "10": 600, "4": 400},
        "modalities": {"text": 3000, "text+audio": 1000},
        "scripts": {"Latin": 3900, "Arabic": 100},
        "lengths": {
            "tokens": list(range(1, 201)),
            "trained": [n // 2 for n in range(1, 201)],
            "sampled": 200,
            "exact": False,
            "over_max_len": 50,
            "unit": "tokens",
        },
        "images": {"sizes": [[640, 480]] * 12 + [[16, 16000], [1, 1]], "count": 20},
        "audio": {"seconds": [1.5, 2.0, 45.0], "count": 3, "limit": 30.0},
        "answers": {"distinct": 12, "rows": 3000, "top_share": 0.314},
        "pairs": {"pairs": 1000, "chosen_longer": 700, "rejected_longer": 250, "equal": 50, "ratio": 1.84},
        "duplicates": {"exact": 18, "near": 212, "eval_overlap": 3},
        "examples": [
            {
                "row": "train.jsonl:1",
                "runs": [
                    {"text": "\n<|turn>user\nCapital of Italy?<turn|>\n" + CONTROL, "trained": False},
                    {"text": "Rome<turn|>", "trained": True},
                    {"text": "\n", "trained": False},
                ],
                "media": ["image 640 x 480"],
                "tokens": 20,
                "trained": 5,
            }
        ],
    }
    return survey | changes


@pytest.fixture
def page(tmp_path):
    return lambda survey: write_dataset_report(tmp_path / "data.html", survey).read_text(encoding="utf-8")


def example(*runs: tuple[str, bool]) -> dict:
    runs = [{"text": text, "trained": trained} for text, trained in runs]
    return full_survey(examples=[{"row": "a:1", "runs": runs}])


def figure(html: str, name: str) -> str:
    """The value and the small print of a main figure."""
    value, small = re.search(rf"<dt>{name}</dt><dd[^>]*>([^<]*)(?:<small>([^<]*)</small>)?", html).groups()
    return f"{value} {small or ''}".strip()


def test_it_shows_the_main_figures(page):
    html = page(full_survey())
    assert figure(html, "Rows") == "4,000 sft"
    assert figure(html, "Median length") == "100.5 tokens"
    assert figure(html, "95th percentile") == "190 tokens"
    assert figure(html, "Longest") == "200 max-len 100"
    assert figure(html, "Trained share") == "49.8% 10,000 of 20,100 tokens"
    assert figure(html, "Over max-len") == "50 1.2% of rows"
    assert figure(html, "Duplicates") == "18 212 near, 3 also in evaluation"
    assert figure(html, "Media") == "23 20 images, 3 clips"


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        ("READY", "Nothing was found that would stop"),
        ("READY WITH WARNINGS", "Training can start; look at 1 kind of warning first."),
        ("INVALID", "Mend 1 kind of error before training."),
        (None, "No check has looked at this data set."),
    ],
)
def test_the_verdict_stands_first_with_one_sentence(page, verdict, sentence):
    html = page(full_survey(verdict=verdict))
    text = Page(html).text
    assert (verdict or "Not judged") in text and sentence in text
    assert html.index('class="verdict') < html.index('class="figures"') < html.index("<h2>Findings")


def test_only_the_demo_says_so(page):
    assert "built-in demo" in page(full_survey(demo=True)) and "built-in demo" not in page(full_survey())


def test_findings_are_sorted_and_carry_rows_remedy_and_command(page):
    html = page(full_survey())
    assert html.index("Title of missing") < html.index("Title of too-long") < html.index("Title of exif")
    assert "1 error, 1 warning, 1 note" in html and "7 rows" in html
    assert "<code>a.jsonl:3</code> and 6 more" in html and "Mend missing" in html
    assert '<pre class="command">python fix.py missing</pre>' in html


def test_a_long_command_stays_whole(page):
    command = "python sft_train.py " + "--flag value " * 200
    assert f">{command}</pre>" in page(full_survey(findings=[finding("x", "error", command=command)]))


def test_many_findings_are_all_there_and_those_beyond_the_first_are_folded(page):
    html = page(full_survey(findings=[finding(f"code-{n:02}", "warning") for n in range(40)]))
    assert all(f"Title of code-{n:02}" in html for n in range(40))
    assert "28 more findings" in html and html.index("Title of code-11") < html.index("<details>")
    assert html.index("<details>") < html.index("Title of code-12")


def test_text_from_data_never_becomes_markup(page):
    counts = {EVIL: 3}
    survey = full_survey(
        **dict.fromkeys(("formats", "roles", "turns", "modalities", "scripts"), counts),
        data=[EVIL, EVIL],
        task=EVIL,
        model=EVIL,
        verdict=EVIL,
        findings=[finding(EVIL, EVIL, title=EVIL, rows=[EVIL], remedy=EVIL, command=EVIL, note=EVIL)],
        answers={"distinct": 1, "rows": 3, "top_share": 1.0, "labels": counts},
        examples=[{"row": EVIL, "runs": [{"text": EVIL, "trained": True}, {"text": EVIL}], "media": [EVIL]}],
    )
    survey["lengths"]["unit"] = EVIL
    parsed = Page(page(survey))
    assert parsed.tags <= ALLOWED | {"mark", "code", "ul"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name in ("src", "href")]
    assert parsed.text.count("<script>alert(1)</script>") >= 20


def test_it_loads_nothing(page):
    html = page(full_survey())
    assert not re.search(r"https?://|//\w|url\(|@import|@font-face|<script|<link|src=|href=", html)
    assert "default-src 'none'" in html


@pytest.mark.parametrize("key", full_survey())
def test_every_key_may_be_missing_or_null(page, key):
    survey = full_survey()
    del survey[key]
    assert page(survey) == page(full_survey(**{key: None}))


@pytest.mark.parametrize(
    "value", [None, {}, [], "text", 0, -1, 1e-300, 1e279, True, math.nan, math.inf, 10**400, [None], [{}], "\ud800"]
)
def test_no_value_can_break_it(page, value):
    for key, old in full_survey().items():
        html = page(full_survey(**{key: value}))
        assert not re.search(r'(?:d|style|x|y|width|height)="[^"]*(?:nan|inf)', html, re.IGNORECASE)
        if isinstance(old, dict):
            page(full_survey(**{key: dict.fromkeys(old, value)}))
            page(full_survey(**{key: {name: [value, 3] for name in old}}))
    for key in ("findings", "examples"):
        page(full_survey(**{key: [dict.fromkeys(full_survey()[key][0], value)]}))
    page(full_survey(examples=[{"runs": [{"text": value, "trained": value}]}]))
    page(full_survey(images={"sizes": [[value, 3], [5, value], [value], value]}))


def test_values_that_are_not_finite_are_left_out_of_the_figures(page):
    survey = full_survey(lengths={"tokens": [10, math.nan, 30, None], "trained": [5, 1, math.inf, 2], "exact": True})
    html = page(survey)
    assert figure(html, "Median length") == "20 tokens" and figure(html, "Longest") == "30 max-len 100"
    assert figure(html, "Trained share") == "50.0% 5 of 10 tokens"


def test_an_empty_survey_is_a_page_with_no_empty_section(page):
    html = page({})
    assert html.startswith("<!doctype html>") and "Not judged" in html and "<h2>" not in html and "<svg" not in html


def test_no_rows(page):
    lengths = {"tokens": [], "trained": [], "sampled": 0, "exact": True, "over_max_len": 0, "unit": "tokens"}
    html = page({"rows": 0, "max_len": 2048, "verdict": "INVALID", "lengths": lengths})
    assert figure(html, "Rows") == "0" and figure(html, "Over max-len") == "0" and "<svg" not in html


def test_rows_over_max_len_are_counted_from_all_rows_or_else_from_the_lengths(page):
    lengths = full_survey()["lengths"]
    assert "Over max-len 100: 50 of 4,000 rows (1.2%)." in page(full_survey())
    lengths["over_max_len"] = None
    assert "Over max-len 100: 100 of 200 rows (50.0%)." in page(full_survey(lengths=lengths))
    assert figure(page(full_survey(lengths=lengths | {"unit": "bytes"})), "Over max-len") == "–"
    html = page(full_survey(lengths=lengths | {"unit": "bytes", "over_max_len": 50}))
    assert figure(html, "Over max-len") == "up to 50 1.2% of rows" and "Lengths are UTF-8 bytes" in html


def test_it_says_whether_lengths_are_of_all_rows_or_of_a_sample(page):
    lengths = full_survey()["lengths"]
    assert "Measured on a random sample of 200 of 4,000 rows." in page(full_survey())
    assert "Measured on all 4,000 rows." in page(full_survey(lengths=lengths | {"exact": True}))


def test_histograms_show_max_len_where_it_is(page):
    html = page(full_survey(audio=None))
    start, end = (
        [float(part) for part in re.findall(rf'class="{css}" d="M([\d.]+)', html)] for css in ("p95", "limit")
    )
    assert len(start) == 2 and 0 < end[0] < start[0] and 0 < start[1] < end[1] <= 1000
    html = page(full_survey(max_len=100_000, audio=None))
    assert 'd="M' in html and 'class="limit" d=' not in html and "max-len 100,000, right of this chart" in html


def test_a_few_huge_rows_do_not_squeeze_the_others(page):
    html = page(full_survey(images=None, lengths={"tokens": [*range(100, 200)] * 9 + [1_000_000]}))
    assert len(re.findall('<rect class="bar"', html)) > 10
    assert re.search(r"Not drawn, as longer than [\d,]+: 1<", html) and "longest 1,000,000" in html


def test_counts_keep_the_order_of_numbers_and_of_size(page):
    html = page(full_survey())
    assert re.findall(r"<li><span>(\d+)</span>", html) == ["2", "4", "10"]
    assert html.index(">user<") < html.index(">assistant<") < html.index(">system<")
    assert "4,000 (50.0%)" in html and "3,900 (97.5%)" in html


def test_many_names_are_summed_up(page):
    html = page(full_survey(scripts={f"S{n}": 100 - n for n in range(50)}, turns={str(n): 1 for n in range(1, 31)}))
    assert "42 others" in html and ">S7<" in html and ">S8<" not in html
    assert "9 and more" in html


def test_image_sizes_and_clips(page):
    html = page(full_survey())
    assert "640 × 480: 12 images" in html and "16 × 16,000: 1 image<" in html
    assert "Sizes of 14 of 20 images." in html and "1 clip longer than the 30 s the model hears." in html
    spots = [float(place) for spot in re.findall(r'class="dot[^"]*" d="M([\d. ]+)h0', html) for place in spot.split()]
    assert len(spots) == 6 and all(0 <= place <= 1000 for place in spots)


def test_pairs_show_the_length_bias(page):
    html = page(full_survey())
    for words in ("chosen is longer: 700 (70.0%)", "same length: 50 (5.0%)", "rejected is longer: 250 (25.0%)", "1.84"):
        assert words in html
    assert re.findall(r'style="width:([\d.]+)%"', html[html.index('class="stack"') :])[:3] == ["70.0", "5.0", "25.0"]


@pytest.mark.parametrize("place", ["survey", "answers"])
def test_labels_are_shown_only_when_given(page, place):
    assert "Always giving the most frequent one would be right in 31.4% of rows." in page(full_survey())
    labels, survey = {"labels": {"so-called positive": 3}}, full_survey()
    (survey if place == "survey" else survey["answers"]).update(labels)
    assert "so-called positive" in page(survey) and "so-called positive" not in page(full_survey())


def test_trained_text_is_marked_and_no_other(page):
    html = page(full_survey())
    assert "&lt;|turn&gt;model\n<mark>Rome&lt;turn|&gt;</mark>\n</pre>" in html
    assert html.count("<mark>") == 2  # with the legend
    assert "text-decoration: underline" in html  # not by colour alone
    assert "20 tokens · 5 trained (25.0%) · image 640 x 480" in html


@pytest.mark.parametrize("trained", [False, None, 0, "no", "false"])
def test_a_run_is_marked_only_where_it_says_true(page, trained):
    assert "<mark>some words" not in page(example(("some words", trained)))


def test_line_breaks_are_kept_the_first_too(page):
    # A browser drops one line break after <pre>.
    assert '<pre class="runs">\n\na\n\n  b' in page(example(("\na\n\n  b", False)))


def test_long_text_is_cut_in_the_middle_with_a_note(page):
    text = "A" * 5000 + "B" * 5000
    shown = re.search(
        r"<mark>(A+)<span class=\"cut\">([\d,]+) characters not shown</span>(B+)</mark>", page(example((text, True)))
    )
    assert len(shown[1]) + int(shown[2].replace(",", "")) + len(shown[3]) == 10_000 and len(shown[1]) > 500


@pytest.mark.parametrize("sign", [FAMILY, "🇮🇹", "👍🏽", "e\u0301\u0323", "❤\ufe0f"])
def test_a_cut_never_halves_a_sign(page, sign):
    for shift in range(8):
        html = page(example(("x" * shift + sign * 4000, False)))
        head, tail = re.search(
            r'<pre class="runs">\nx*([^<x]*)<span class="cut">[^<]*</span>([^<]*)</pre>', html
        ).groups()
        assert head == sign * (len(head) // len(sign)) and tail == sign * (len(tail) // len(sign)) and head and tail


def test_an_example_of_many_runs_is_cut_with_a_note(page):
    html = page(example(*((f"run {n};", n % 2 == 0) for n in range(1000))))
    assert "960 parts not shown" in html and "run 0;" in html and "run 999;" in html and "run 500;" not in html


def test_the_page_stays_small(page):
    random.seed(1)
    tokens = [int(random.lognormvariate(6, 1)) for _ in range(100_000)]
    survey = full_survey(
        lengths={"tokens": tokens, "trained": tokens, "sampled": 100_000, "exact": True, "unit": "tokens"},
        images={"sizes": [[random.randint(1, 9000), random.randint(1, 9000)] for _ in range(1000)], "count": 1000},
        examples=[{"row": "r", "runs": [{"text": "word & " * 50_000, "trained": True}] * 100}] * 50,
        findings=[finding(f"c{n}", "warning", rows=["a.jsonl:1"] * 1000) for n in range(40)],
    )
    assert len(page(survey).encode()) < 1_000_000
    survey["images"]["sizes"] = [[n, n] for n in range(1, 20_001)]
    html = page(survey)
    assert len(html.encode()) < 1_000_000 and "Drawn are 1,000 of 20,000 different sizes." in html


def test_it_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "data.html"
    target.write_text("old")
    assert write_dataset_report(str(target), full_survey()) == target
    assert target.read_text(encoding="utf-8") != "old" and os.listdir(tmp_path) == ["data.html"]


def test_a_survey_that_went_through_json_is_the_same_page(page):
    survey = full_survey()
    assert page(json.loads(json.dumps(survey))) == page(survey)
