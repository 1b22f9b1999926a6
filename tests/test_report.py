"""What a user relies on in the report of a run: it is one safe, self-contained file, whatever the data holds."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser

import pytest

from gemma_trainer.report import write_report

EVIL = "<script>alert(1)</script>\"'><img src=https://example.com/x.png onerror=alert(2)>"
ALLOWED = set(
    "html head meta title style body main header h1 h2 h3 p b dl dt dd div small section figure svg path rect i span "
    "table tr th td ol ul li article pre details summary img audio".split()
)


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.parts = set(), [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.parts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.parts)


def full_run(**changes) -> dict:
    run = {
        "script": "sft_train",
        "status": "done",
        "demo": False,
        "started": "2026-11-30T10:00:00+00:00",
        "model": {"name": "demo/model", "family": "gemma4", "trainable_parameters": 12, "total_parameters": 1200},
        "precision": "float32 (CPU)",
        "arguments": {"--learning-rate": 2e-4, "--data": ["rows.jsonl"], "--resume": None},
        "versions": {"torch": "2.9.0"},
        "data": {"sources": ["rows.jsonl"], "rows": 40, "eval_rows": 4, "fingerprint": "9f2c"},
        "counters": {"rows": 40, "tokens": 900, "trained_tokens": 300, "padding": 100, "truncated": 3, "bad_media": 0},
        "problems": ["rows.jsonl:7: image: no such file x.png"],
        "timing": {"total_s": 754.2, "train_s": 31.5},
        "peak_memory_mb": 2048,
        "metrics": {"train_loss": 1.9, "eval_loss": 1.234},
        "lengths": [10, 20, 30, 40],
        "samples": [{"row": "rows.jsonl:3", "prompt": "Capital of Italy?", "expected": "Rome", "answer": "Rome"}],
    }
    return run | changes


def steps(count: int) -> list[dict]:
    return [
        {"step": n, "epoch": n / count, "loss": 3 - n / count, "learning_rate": 1e-4, "grad_norm": 1 + n % 7}
        for n in range(1, count + 1)
    ]


@pytest.fixture
def report(tmp_path):
    def write(run: dict, metrics: list[dict], shown: dict | None = None) -> str:
        return write_report(tmp_path / "report.html", run, metrics, shown).read_text(encoding="utf-8")

    return write


def test_it_shows_the_figures_of_a_run(report):
    text = Page(report(full_run(), [*steps(40), {"step": 40, "eval_loss": 1.3}])).text
    for shown in ("sft_train: demo/model", "done", "2.000", "1.234", "12 min 34 s", "2.0 GB", "10.0%", "12 of 1,200"):
        assert shown in text
    assert "no such file x.png" in text and "matches exactly" in text
    assert "built-in demo" not in text


def test_a_demo_run_says_so(report):
    assert "built-in demo" in report(full_run(demo=True), [])


def test_text_from_data_never_becomes_markup(report):
    run = full_run(
        script=EVIL,
        status=EVIL,
        started=EVIL,
        precision=EVIL,
        model={"name": EVIL, "family": EVIL, "trains": EVIL},
        arguments={EVIL: EVIL},
        versions={EVIL: [EVIL]},
        data={"sources": [EVIL], "fingerprint": EVIL},
        counters={EVIL: 3, "tokens": EVIL},
        problems=[EVIL],
        samples=[{"row": EVIL, "prompt": EVIL, "expected": EVIL, "answer": {EVIL: EVIL}}],
        why=EVIL,
        notes=[EVIL],
        command=EVIL,
    )
    answers = [{"prompt": EVIL, "answer": EVIL, "missed": [EVIL]}, {"prompt": "x", "error": EVIL}]
    shown = {
        name: {"prompt": EVIL, "expected": EVIL, "media": [{"kind": EVIL, "source": EVIL}]} for name in (EVIL, "x")
    }
    asked = [{"step": n, "answers": answers} for n in (0, 3)] + [{"step": 3, "gen/pass_rate": 0.5, f"gen/{EVIL}": 0.5}]
    page = Page(report(run, [{"step": 1, "loss": EVIL}, {"step": EVIL, "loss": 1.0}, *steps(3), *asked], shown))
    assert page.tags <= ALLOWED
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.text.count("<script>alert(1)</script>") >= 25


def test_it_loads_nothing(report):
    html = report(full_run(), [*steps(100), {"step": 50, "eval_loss": 2.0}])
    assert not re.search(r"https?://|//\w|url\(|@import|@font-face|<script|<link|src=|href=", html)
    assert "default-src 'none'" in html


ASKED = [
    {"step": 0, "gen/pass_rate": 0.0, "gen/json": 0.0, "gen/tokens": 20.0, "gen/seconds": 2.0, "gen/share": 0.9},
    {"step": 0, "answers": [{"prompt": "a", "answer": "no idea", "passed": False, "missed": ["json"]}]},
    {"step": 40, "gen/pass_rate": 0.5, "gen/json": 0.75, "gen/tokens": 4.0, "gen/wer": 0.25, "gen/failed": 1,
     "gen/answer/a": "{}", "gen/seconds": 3.0, "gen/share": 0.2},
    {"step": 40, "answers": [{"prompt": "a", "answer": "{}", "passed": True, "missed": []},
                             {"prompt": "b", "answer": None, "passed": False, "error": "out of memory"},
                             {"prompt": "unseen", "answer": "x", "passed": True}]},
]  # fmt: skip
JPEG, MP3 = "data:image/jpeg;base64,AAAA", "data:audio/mpeg;base64,BBBB"


def test_answers_are_shown_at_first_and_at_last_with_their_media(report):
    media = [{"kind": "image", "source": JPEG}, {"kind": "audio", "source": MP3}, {"kind": "image"},
             {"kind": "image", "source": "https://example.com/x.jpg"}]  # fmt: skip
    shown = {"a": {"prompt": "user: say {}", "expected": "{}", "media": media}, "b": {"prompt": "user: b"}}
    html = report(full_run(), [*steps(40), *ASKED], shown)
    text = Page(html).text
    wanted = ["Prompts that pass", "0.0% → 50.0%", "0.0% → 75.0%", "20 → 4", "Asking took 5.0 s in all, 20.0% of the"]
    wanted += ["could not be answered: 1", "Step 0", "no idea", "Step 40", "passes", "fails: out of memory"]
    assert [told for told in wanted if told not in text] == []
    assert html.count(f'src="{JPEG}"') == 1 and html.count(f'<audio controls src="{MP3}">') == 1
    assert "answer/a" not in text
    assert text.count("that cannot be shown") == 2 and "example.com" not in html and "unseen" not in text
    assert "Answers to the prompts" not in Page(report(full_run(), ASKED)).text  # whose media were not kept


def test_what_the_machine_did_is_drawn_and_the_command_told(report):
    more = {"tokens_per_second": 900.0, "memory_mb": 1200, "data_wait": 0.1, "padding": 0.02}
    run = full_run(why="90 minutes have passed", command="python sft_train.py --x 'a b'", notes=["fp32 on cpu"])
    text = Page(report(run, [step | more for step in steps(5)])).text
    wanted = ["Tokens per second", "Peak memory (MB)", "waiting for data", "Share of padding", "90 minutes have passed"]
    assert [told for told in [*wanted, "python sft_train.py --x 'a b'", "fp32 on cpu"] if told not in text] == []


def test_values_that_are_not_finite_are_skipped_and_counted(report):
    bad = [{"step": n, "loss": value} for n, value in enumerate((math.nan, math.inf, -math.inf, None), 4)]
    html = report(full_run(), [*steps(3), *bad, {"step": 8}, {"loss": 1.0}, {"step": 9, "eval_loss": math.nan}])
    assert not re.search(r'(?:d|style|x|y|width|height)="[^"]*(?:nan|inf)', html, re.IGNORECASE)
    assert "Not drawn, as NaN or infinite: 4" in html
    line = re.search(r'<path class="train" d="([^"]*)"', html)[1]
    assert len(line.split("L")) == 3


def test_a_run_that_diverged_does_not_show_its_last_good_loss_as_final(report):
    assert re.search(r"Final loss</dt><dd[^>]*>not finite", report({}, [*steps(3), {"step": 4, "loss": math.nan}]))


@pytest.mark.parametrize(
    "value", [None, {}, [], "text", 0, -1, True, math.nan, math.inf, 10**400, [None], [{}], "\ud800"]
)
def test_no_value_of_a_key_can_break_it(report, value):
    for key in full_run():
        report(full_run(**{key: value}), steps(2))
    for key in ("model", "data", "counters", "timing", "metrics"):
        report(full_run(**{key: dict.fromkeys(full_run()[key], value)}), steps(2))
    for key in ("step", "epoch", "loss", "learning_rate", "grad_norm", "eval_loss"):
        report(full_run(), [*steps(2), {"step": 3, key: value}])
        report(full_run(), [{"step": 3, key: value}])
    for at, entry in enumerate(ASKED):
        for key in entry:
            report(
                full_run(), [*ASKED[:at], entry | {key: value}, *ASKED[at + 1 :]], {"a": value, "b": {"media": value}}
            )
    for key in ("why", "notes", "command"):
        report(
            full_run(**{key: value}), steps(2), {"rows.jsonl:3": {"media": [value, {"kind": value, "source": value}]}}
        )


def test_an_empty_run_is_a_page(report):
    html = report({}, [])
    assert html.startswith("<!doctype html>") and "<svg" not in html and "No finite loss was logged." in html


@pytest.mark.parametrize(
    "losses", [[0.0], [2.5] * 3, [1e-300, 1e300], [5e-324, 0.0], [-1e279, 1e279], [1e9, 1e9 + 1], [-3.0, -2.0], [7]]
)
def test_any_finite_losses_get_axes_inside_the_chart(report, losses):
    html = report({}, [{"step": n, "loss": loss, "grad_norm": loss} for n, loss in enumerate(losses)])
    places = [float(place) for place in re.findall(r'style="(?:left|bottom):([-\d.]+)%"', html)]
    assert places and all(-0.1 <= place <= 100.1 for place in places)
    assert len(places) < 60


def test_ticks_are_round_numbers(report):
    html = report({}, [{"step": n, "loss": 1.17 + n / 1000, "learning_rate": n * 1e-7} for n in range(1, 1801)])
    assert re.findall(r'class="y"[^>]*>([^<]*)<', html) == ["1.0", "1.5", "2.0", "2.5", "3.0"] + [
        "0", "5e-5", "1e-4", "1.5e-4", "2e-4",
    ]  # fmt: skip
    assert re.findall(r'class="x"[^>]*>([^<]*)<', html)[:3] == ["500", "1,000", "1,500"]


def test_only_long_lines_are_smoothed(report):
    assert "smoothed" not in report({}, steps(50))
    assert "smoothed" in report({}, steps(51))


def test_a_step_logged_again_after_a_resume_counts_once(report):
    html = report({}, [*steps(10), *steps(10)])
    assert len(re.search(r'<path class="train" d="([^"]*)"', html)[1].split("L")) == 10


def test_ten_thousand_points_stay_small_and_keep_their_spike(report):
    metrics = steps(10_000)
    metrics[4321]["loss"] = 50.0
    html = report(
        full_run(lengths=list(range(10_000))), [*metrics, *({"step": n, "eval_loss": 2.0} for n in range(10_000))]
    )
    assert len(html.encode()) < 500_000
    heights = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", re.search(r'<path class="raw" d="([^"]*)"', html)[1])]
    assert min(heights) < 100 and sorted(heights)[1] > 900


@pytest.mark.parametrize(
    "lengths",
    [[5], [128] * 8, [0, 0, 1], list(range(1000)), [1] * 500 + [1_000_000], [n * n % 977 for n in range(700)]],
)
def test_histogram_counts_add_up(report, lengths):
    html = report(full_run(lengths=lengths), [])
    bars = re.findall(r"<title>([\d,]+)(?:–([\d,]+))? tokens: ([\d,]+) rows</title>", html)
    for first, last, count in [[int(part.replace(",", "") or 0) for part in bar] for bar in bars]:
        assert count == sum(first <= length <= max(first, last) for length in lengths) > 0
    assert sum(int(count.replace(",", "")) for _, _, count in bars) == len(lengths)
    assert len(bars) <= 41


def test_length_statistics(report):
    html = report(full_run(lengths=list(range(1, 101))), [])
    assert "median 50.5" in html and "95th percentile 95" in html and "longest 100" in html


def test_counters_that_are_zero_are_hidden(report):
    text = Page(report(full_run(), [])).text
    assert "truncated" in text and "bad media" not in text


def test_many_problems_are_cut_with_the_total(report):
    text = Page(report(full_run(problems=[f"row {n} is bad" for n in range(1234)]), [])).text
    assert "1,234 in all" in text and "row 19 is bad" in text and "row 20 is bad" not in text


def test_samples_say_whether_they_match_and_long_text_is_cut(report):
    samples = [
        {"row": "a:1", "prompt": "x" * 5000, "expected": "Rome", "answer": "Rome"},
        {"row": "a:2", "prompt": "p", "expected": "Rome", "answer": "rome"},
        {"row": "a:3", "prompt": "p", "answer": "anything"},
    ]
    html = report(full_run(samples=samples), [])
    assert html.count("matches exactly") == 1 and html.count(">differs<") == 1
    assert "x" * 599 + "…" in html and "x" * 600 not in html


def test_it_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "report.html"
    target.write_text("old")
    assert write_report(str(target), full_run(), steps(3)) == target
    assert "old" != target.read_text(encoding="utf-8") and os.listdir(tmp_path) == ["report.html"]


def test_a_failed_write_keeps_the_old_report(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_report(target, full_run(), steps(3))
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["report.html"]


def test_a_run_that_went_through_json_is_the_same_page(report):
    run, metrics = full_run(), [*steps(3), {"step": 4, "loss": math.nan}]
    assert report(json.loads(json.dumps(run)), json.loads(json.dumps(metrics))) == report(run, metrics)
