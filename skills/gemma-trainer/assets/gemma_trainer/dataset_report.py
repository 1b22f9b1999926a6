"""The page a person opens before a run: one HTML file with what a data set holds, what is wrong with it, and how to
mend that.

Names, findings and examples come from data, so all text goes through `esc`.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from pathlib import Path

from .files import write_whole
from .page import (
    BOX,
    MAX_NAME,
    as_text,
    at,
    bars,
    count,
    cut_middle,
    dicts,
    document,
    duration,
    esc,
    figure_grid,
    frame,
    histogram,
    log_axis,
    num,
    numbers,
    p95,
    part,
    plural,
    share,
    table,
)

MAX_COMMAND, MAX_OPEN, MAX_FINDINGS, MAX_DOTS = 4000, 12, 200, 1000
MAX_EXAMPLES, MAX_RUNS, EXAMPLE_TEXT = 12, 40, 3600
SEVERITIES = {"error": ("failed", "✕"), "warning": ("interrupted", "!"), "note": ("soft", "i")}
VERDICTS = {"READY": ("done", "✓"), "READY WITH WARNINGS": ("interrupted", "!"), "INVALID": ("failed", "✕")}

CSS = """
:root { --tint: #dcebfa; } @media (prefers-color-scheme: dark) { :root { --tint: #1f3c59; } }
.verdict { border-left: 4px solid; padding: 10px 16px; margin: 16px 0 0; background: var(--fill); }
.verdict b { font-size: 20px; } .verdict > span { color: var(--text); display: block; }
.mark { display: inline-block; min-width: 1.1em; }
code { font: 13px/1.5 ui-monospace, monospace; unicode-bidi: isolate; }
.finding { display: grid; grid-template-columns: 120px 1fr; gap: 0 20px; padding-top: 12px; }
.finding h3 { font-size: 15px; font-weight: 600; color: var(--text); margin: 0; }
.command { user-select: all; margin: 6px 0; max-height: 164px; overflow-y: auto; }
 section > :first-child, section > .pair > * { margin-top: 0; }
.groups { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 240px), 1fr)); gap: 12px 40px; }
.bars { list-style: none; padding: 0; margin: 0; } .bars span + span { text-align: right; }
.bars li { display: grid; grid-template-columns: minmax(45%, 1fr) auto; gap: 0 16px; margin-top: 6px; font-size: 14px; }
.bars i { grid-column: 1 / -1; height: 5px; min-width: 2px; margin: 2px 0 0; }
.stack { display: flex; gap: 2px; margin: 12px 0 8px; } .stack i { height: 20px; min-width: 2px; }
.stack i, i.box { margin-right: 0; border-radius: 0; } i.box { width: 9px; height: 9px; margin-right: 6px; }
i.limit { background: repeating-linear-gradient(90deg, var(--mark) 0 5px, transparent 5px 8px); }
path.dot { --mark: var(--train); opacity: .55; stroke-width: 6; stroke-linecap: round; }
path.some { stroke-width: 11; } path.many { stroke-width: 18; } .same { --mark: var(--soft); }
.runs { max-height: 1200px; overflow-y: auto; margin-top: 8px; unicode-bidi: plaintext; text-align: start; }
mark { color: var(--text); background: var(--tint); font-weight: 600; text-decoration: underline 2px var(--train); }
mark { text-underline-offset: 3px; box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.cut { font: italic 13px system-ui, sans-serif; color: var(--soft); border: 1px dashed; padding: 0 6px; }
.cut { display: inline-block; }
@media (max-width: 700px) { .finding { grid-template-columns: 1fr; } .finding > p { display: flex; gap: 0 12px; }
  .finding > p { margin: 0 0 2px; align-items: baseline; } section > .pair > * + * { margin-top: 28px; } }
"""


def write_dataset_report(path: str | Path, survey: dict) -> Path:
    """Write the page about a data set to `path`, replacing what is there in one step, and return the path.

    `survey` holds JSON values; every key may be missing or null: data [source], rows, task, model, max_len, demo,
    verdict ("READY", "READY WITH WARNINGS", "INVALID"), findings [{code, severity ("error", "warning", "info"), title,
    count, rows [name], remedy, command, note}], formats / roles / turns / modalities / scripts {name: count}, lengths
    {tokens [n of each row], trained [n of the same rows], of (which rows, in words) or sampled and exact, over_max_len
    (of all rows), unit ("tokens", "bytes")}, train_command, images {sizes [[width, height]], count}, audio {seconds
    [n], count, limit}, answers {distinct, rows, top_share, labels {answer: count}}, pairs {pairs, chosen_longer,
    rejected_longer, equal, ratio (chosen to rejected length)}, duplicates {exact, near, eval_overlap}, examples [{row,
    runs [{text, trained}], media [str], tokens, trained}]. A number that is not finite counts as missing. Raises
    OSError if the file cannot be written; then an older page stays as it was.
    """
    write_whole(path, _page(survey))
    return Path(path)


def _page(survey: dict) -> str:
    names = [as_text(name) for name in part(survey, "data", list)]
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    title = f"Data set: {names[0][:MAX_NAME]}{more}" if names else "Data set"
    body = [
        _head(survey, title),
        _figures(survey),
        _findings(dicts(survey, "findings")),
        _lengths(survey),
        _composition(survey),
        _images(part(survey, "images", dict)),
        _audio(part(survey, "audio", dict)),
        _pairs(part(survey, "pairs", dict)),
        _answers(survey),
        _examples(survey),
        _facts(survey),
    ]
    return document(title, [section for section in body if section], CSS)


def _head(survey: dict, title: str) -> str:
    verdict, findings = as_text(survey.get("verdict")), dicts(survey, "findings")
    kinds = Counter(_severity(finding) for finding in findings)
    sentence = {
        "READY": "Nothing was found that would stop or spoil a training run.",
        "READY WITH WARNINGS": f"Training can start; look at {plural(kinds['warning'], 'kind')} of warning first.",
        "": "No check has looked at this data set.",
        "INVALID": f"Mend {plural(kinds['error'], 'kind')} of error before training.",
    }.get(verdict, "")
    css, sign = VERDICTS.get(verdict, ("soft", "?"))
    rows, limit = num(survey.get("rows")), count(survey.get("max_len"), "max-len {}")
    about = [plural(rows, "row"), as_text(survey.get("task")), as_text(survey.get("model")), limit]
    line = _put('<p class="soft">{}</p>', " · ".join(esc(text, MAX_NAME) for text in about if text))
    demo = '<p class="demo">These are the built-in demo samples, not your data.</p>'
    return (
        f'<header><h1>{esc(title)}</h1>{line}{demo if survey.get("demo") is True else ""}<div class="verdict {css}">'
        f'<b><span class="mark">{sign}</span>{esc(verdict, MAX_NAME) or "Not judged"}</b><span>{sentence}</span>'
        "</div></header>"
    )


def _figures(survey: dict) -> str:
    lengths, double = part(survey, "lengths", dict), part(survey, "duplicates", dict)
    tokens, unit = numbers(part(lengths, "tokens", list)), _unit(lengths)
    middle = statistics.median(tokens) if tokens else None
    trained, total = _trained(lengths)
    over, rows = _over(survey)
    limit = count(survey.get("max_len"))
    near = [count(double.get("near"), "{} near"), count(double.get("eval_overlap"), "{} also in evaluation")]
    images, clips = (_media_count(survey, *key) for key in (("images", "sizes"), ("audio", "seconds")))
    kinds = [plural(n, name) for n, name in ((images, "image"), (clips, "clip")) if n]
    figures = [
        ("Rows", count(survey.get("rows")), esc(survey.get("task"), MAX_NAME), ""),
        ("Median length", count(middle), unit, ""),
        ("95th percentile", count(p95(tokens)), unit, ""),
        ("Longest", count(max(tokens, default=None)), f"max-len {limit}" if limit else unit, ""),
        ("Trained share", share(trained, total), f"{count(trained)} of {count(total)} {unit}", ""),
        ("Over max-len", _over_words(over, lengths), share(over, rows, "{} of rows"), "interrupted" if over else ""),
        ("Duplicates", count(double.get("exact")), ", ".join(text for text in near if text), ""),
        ("Media", count(images + clips) if kinds else "", ", ".join(kinds), ""),
    ]
    return figure_grid(figures) if any(figure[1] for figure in figures) else ""


def _findings(findings: list[dict]) -> str:
    if not findings:
        return ""
    findings = sorted(findings, key=lambda finding: list(SEVERITIES).index(_severity(finding)))
    tally = Counter(map(_severity, findings))
    told = ", ".join(plural(tally[kind], kind) for kind in SEVERITIES if tally[kind])
    cards = [_finding(finding) for finding in findings[:MAX_FINDINGS]]
    cut = f"; the first {MAX_FINDINGS} are shown" if len(findings) > MAX_FINDINGS else ""
    summary = f"<summary>{len(cards) - MAX_OPEN:,} more findings</summary>"
    rest = _put(f"<details>{summary}{{}}</details>", "".join(cards[MAX_OPEN:]))
    shown = "".join(cards[:MAX_OPEN])
    return f'<section><h2>Findings</h2><p class="soft">{told}{cut}</p>{shown}{rest}</section>'


def _finding(finding: dict) -> str:
    name = _severity(finding)
    css, sign = SEVERITIES[name]
    rows, total = part(finding, "rows", list), num(finding.get("count"))
    shown = ", ".join(f"<code>{esc(row, MAX_NAME)}</code>" for row in rows[:5])
    left = max(len(rows), int(total or 0)) - len(rows[:5])
    many = "" if total is None else plural(total, "row") if rows else count(total)
    code = _put("<code>{}</code>", esc(finding.get("code"), MAX_NAME))
    where = shown + (f" and {left:,} more" if shown and left > 0 else "")
    return (
        f'<article class="finding"><p><b class="{css}"><span class="mark">{sign}</span>{name.capitalize()}</b>'
        f"<small>{many}</small></p><div><h3>{esc(finding.get('title'), 2 * MAX_NAME) or code or name.capitalize()}</h3>"
        + _put("<p>First: {}</p>" if rows else "<p>{}</p>", esc(finding.get("note")))
        + _put("<p>To mend it: {}</p>", esc(finding.get("remedy")))
        + _put('<pre class="command">{}</pre>', esc(finding.get("command"), MAX_COMMAND))
        + _put("<small>{}</small>", ": ".join(text for text in (code, where) if text))
        + "</div></article>"
    )


def _lengths(survey: dict) -> str:
    lengths, limit = part(survey, "lengths", dict), num(survey.get("max_len"))
    unit, charts = _unit(lengths), ""
    for title, key in (("Row lengths", "tokens"), ("Trained part of each row", "trained")):
        values = numbers(part(lengths, key, list))
        line = ("max-len", limit) if limit is not None else None
        charts += histogram(title, values, unit=unit, limit=line, clip=True)
    over, rows = _over(survey)
    if not charts:
        return ""
    words = [_scope(survey)]
    if over is not None:
        of = f"{_over_words(over, lengths)}{_put(' of {}', plural(rows, 'row'))}{share(over, rows, ' ({})')}"
        words += [f"Over max-len{count(limit, ' {}')}: {of}."]
    if unit == "bytes":
        words += ["Lengths are UTF-8 bytes, as no model was given; a token usually holds several."]
    told = _put('<p class="soft">{}</p>', " ".join(word for word in words if word))
    return f'<section><div class="pair">{charts}</div>{told}</section>' if told else charts


def _scope(survey: dict) -> str:
    """The sentence that says which rows the lengths are of."""
    lengths, rows = part(survey, "lengths", dict), num(survey.get("rows"))
    sampled = num(lengths.get("sampled"))
    if as_text(lengths.get("of")):
        return f"Measured on {esc(lengths['of'])}."
    if lengths.get("exact") is True:
        return f"Measured on all {plural(rows, 'row')}." if rows else "Measured on all rows."
    if sampled is None:
        return ""
    return f"Measured on a random sample of {count(sampled)}{count(rows, ' of {}')} rows."


def _composition(survey: dict) -> str:
    groups = {"Messages per row": "turns", "Roles": "roles", "Modalities": "modalities", "Scripts": "scripts"}
    groups["Formats"] = "formats"
    blocks = [bars(part(survey, key, dict)) for key in groups.values()]
    body = "".join(f"<div><h3>{title}</h3>{block}</div>" for title, block in zip(groups, blocks, strict=True) if block)
    return _put('<section><h2>Composition</h2><div class="groups">{}</div></section>', body)


def _images(images: dict) -> str:
    """Widths and heights as dots on log axes, for sizes span orders of magnitude; beside them the usual sizes."""
    sizes = [size for size in part(images, "sizes", list) if isinstance(size, list | tuple) and len(size) == 2]
    sizes = Counter((num(w), num(h)) for w, h in sizes if (num(w) or 0) > 0 and (num(h) or 0) > 0)
    if not sizes:
        return ""
    x, x_ticks = log_axis([w for w, _ in sizes])
    y, y_ticks = log_axis([h for _, h in sizes])
    drawn = sorted(sizes)[:: math.ceil(len(sizes) / MAX_DOTS)]
    marks = _square(x, y) + "".join(_dot(w, h, sizes[w, h], x, y) for w, h in drawn)
    total = sum(sizes.values())
    counted = num(images.get("count")) or total
    legend = f"<span>{plural(counted, 'image')}</span><span>width × height in pixels, the line is square</span>"
    legend += "<span>larger dots: 10 and more, 100 and more images</span>" if max(sizes.values()) >= 10 else ""
    note = f"Sizes of {total:,} of {count(counted)} images. " if counted > total else ""
    note += f"Drawn are {len(drawn):,} of {len(sizes):,} different sizes." if len(drawn) < len(sizes) else ""
    note = _put('<p class="soft">{}</p>', note)
    usual = bars({f"{count(w)} × {count(h)}": n for (w, h), n in sizes.items()}, at_least=0.01)
    usual = _put("<section><h2>Usual sizes</h2>{}</section>", usual)
    ticks = {"x_ticks": x_ticks, "y_ticks": y_ticks}
    chart = frame("Image sizes", marks, x, y, legend=legend, x_name="width", note=note, css="tall", **ticks)
    return f'<section><div class="pair">{chart}{usual}</div></section>'


def _square(x: tuple, y: tuple) -> str:
    """The line on which width and height are equal."""
    low, high = max(x[0], y[0]), min(x[1], y[1])
    ends = [f"{at(place, x):.1f} {BOX - at(place, y):.1f}" for place in (low, high)]
    return f'<path class="grid" d="M{"L".join(ends)}"/>' if low < high else ""


def _dot(w: float, h: float, n: int, x: tuple, y: tuple) -> str:
    css = " many" if n >= 100 else " some" if n >= 10 else ""
    spot = f"{at(math.log10(w), x):.1f} {BOX - at(math.log10(h), y):.1f}"
    title = f"<title>{count(w)} × {count(h)}: {plural(n, 'image')}</title>"
    return f'<path class="dot{css}" d="M{spot}h0">{title}</path>'


def _audio(audio: dict) -> str:
    seconds, limit = numbers(part(audio, "seconds", list)), num(audio.get("limit"))
    line = ("heard up to", limit) if limit is not None else None
    chart = histogram("Clip lengths", seconds, unit="seconds", things="clips", whole=False, limit=line, clip=True)
    words, clips = [f"{duration(sum(seconds))} of sound."], num(audio.get("count")) or 0
    if clips > len(seconds):
        words = [f"Lengths of {len(seconds):,} of {count(clips)} clips."]
    if limit is not None:
        words += [
            f"{plural(sum(n > limit for n in seconds), 'clip')} longer than the {count(limit)} s the model hears."
        ]
    return f'<section>{chart}<p class="soft">{" ".join(words)}</p></section>' if chart else ""


def _pairs(pairs: dict) -> str:
    """Which answer of a pair is longer, as one bar: what a model could learn without reading either."""
    sides = {"chosen_longer": ("train", "chosen is longer"), "equal": ("same", "same length")}
    sides["rejected_longer"] = ("dots", "rejected is longer")
    counts = {key: max(num(pairs.get(key)) or 0, 0) for key in sides}
    total = sum(counts.values())
    if not total:
        return ""
    bar = legend = ""
    for key, (css, name) in sides.items():
        bar += f'<i class="{css}" style="width:{counts[key] / total * 100:.1f}%"></i>' if counts[key] else ""
        told = count(counts[key]) + share(counts[key], total, " ({})")
        legend += f'<span><i class="{css} box"></i>{name}: {told}</span>'
    words = count(pairs.get("pairs"), "{} pairs. ")
    words += count(pairs.get("ratio"), "Chosen answers are {} times as long as rejected ones. ")
    words += "The further from half and half, the more a model can win by length alone."
    return (
        f'<section><h2>Length of chosen and rejected</h2><div class="stack">{bar}</div>'
        f'<div class="legend">{legend}</div><p class="soft">{words}</p></section>'
    )


def _answers(survey: dict) -> str:
    answers = part(survey, "answers", dict)
    labels = bars(part(survey, "labels", dict) or part(answers, "labels", dict))
    distinct, rows, top = (num(answers.get(key)) for key in ("distinct", "rows", "top_share"))
    words = "" if distinct is None else f"{plural(distinct, 'different answer')}{_put(' in {}', plural(rows, 'row'))}."
    if top is not None and 0 <= top <= 1:
        words += f" Always giving the most frequent one would be right in {top:.1%} of rows."
    told = _put('<p class="soft">{}</p>', words)
    labels = _put('<div class="groups"><div>{}</div></div>', labels)
    return _put("<section><h2>Short answers</h2>{}</section>", told + labels)


def _examples(survey: dict) -> str:
    body = ""
    for example in dicts(survey, "examples")[:MAX_EXAMPLES]:
        tokens, trained = num(example.get("tokens")), num(example.get("trained"))
        size = [plural(tokens, "token"), count(trained, "{} trained") + share(trained, tokens, " ({})")]
        size += [esc(item, MAX_NAME) for item in part(example, "media", list)[:20]]
        runs = _runs(dicts(example, "runs"))
        body += f"<article><header><b>{esc(example.get('row'), MAX_NAME)}</b>"
        body += f'<span class="soft">{" · ".join(text for text in size if text)}</span></header>'
        # A browser drops the first line break in a <pre>, so there is one to drop.
        body += f'<pre class="runs">\n{runs or "–"}</pre></article>'
    learns = "is what the model learns to write; it only reads the rest."
    if survey.get("task") in ("dpo", "reward"):
        learns = "is an answer: the chosen one is to be preferred to the rejected one."
    title = "Examples, as the model sees them" if as_text(survey.get("model")) else "Examples, as they are read"
    legend = f'<p class="soft"><mark>Marked text</mark> {learns}</p>'
    return f"<section><h2>{title}</h2>{legend}{body}</section>" if body else ""


def _runs(runs: list[dict]) -> str:
    """The runs of an example as HTML. What is too long, or too many, is cut in the middle and says by how much."""
    limit = EXAMPLE_TEXT // min(max(len(runs), 3), MAX_RUNS)
    lost, first = len(runs) - MAX_RUNS, MAX_RUNS * 2 // 3
    shown = [_run(run, limit) for run in (runs if lost <= 0 else runs[:first] + runs[first + lost :])]
    gap = f'<span class="cut">{plural(lost, "part")} not shown</span>\n'
    return "".join(shown if lost <= 0 else [*shown[:first], gap, *shown[first:]])


def _run(run: dict, limit: int) -> str:
    head, hidden, tail = cut_middle(as_text(run.get("text")), limit)
    gap = f'<span class="cut">{hidden:,} characters not shown</span>' if hidden else ""
    text = esc(head, len(head)) + gap + esc(tail, len(tail))
    return f"<mark>{text}</mark>" if text and run.get("trained") is True else text


def _facts(survey: dict) -> str:
    double, lengths = part(survey, "duplicates", dict), part(survey, "lengths", dict)
    facts = {
        "Data": ", ".join(as_text(name) for name in part(survey, "data", list)),
        "Task": survey.get("task"),
        "Model": survey.get("model"),
        "Max-len": count(survey.get("max_len"), "{} tokens"),
        "Lengths": _scope(survey) if lengths else "",
        "Train with": survey.get("train_command"),
        "Exact duplicates": count(double.get("exact")),
        "Near duplicates": count(double.get("near")),
        "Rows also in evaluation": count(double.get("eval_overlap")),
    }
    return table("Facts", {name: value for name, value in facts.items() if as_text(value)})


def _over(survey: dict) -> tuple[float | None, float | None]:
    """(rows over max-len, of how many): as the survey counted them, else from the lengths if those are tokens."""
    lengths, limit = part(survey, "lengths", dict), num(survey.get("max_len"))
    over, tokens = num(lengths.get("over_max_len")), numbers(part(lengths, "tokens", list))
    if over is None and limit is not None and tokens and _unit(lengths) == "tokens":
        return sum(n > limit for n in tokens), len(tokens)
    return over, num(survey.get("rows"))


def _over_words(over: float | None, lengths: dict) -> str:
    # A row has at most as many tokens as bytes, so without a tokenizer the count is an upper bound.
    return count(over, "up to {}" if over and _unit(lengths) == "bytes" else "{}")


def _trained(lengths: dict) -> tuple[float | None, float | None]:
    """(trained, all) tokens of the rows that have both numbers."""
    tokens, trained = part(lengths, "tokens", list), part(lengths, "trained", list)
    pairs = [(num(some), num(n)) for some, n in zip(trained, tokens, strict=False)]
    pairs = [(some, n) for some, n in pairs if some is not None and n is not None]
    if not pairs or len(tokens) != len(trained):
        return None, None
    return sum(some for some, _ in pairs), sum(n for _, n in pairs)


def _media_count(survey: dict, kind: str, key: str) -> float:
    media = part(survey, kind, dict)
    return num(media.get("count")) or len(part(media, key, list))


def _severity(finding: dict) -> str:
    """error, warning or note, as the page calls "info" and whatever else there is."""
    severity = as_text(finding.get("severity"))
    return severity if severity in SEVERITIES else "note"


def _unit(lengths: dict) -> str:
    return "bytes" if lengths.get("unit") == "bytes" else "tokens"


def _put(form: str, text: str) -> str:
    return form.format(text) if text else ""
