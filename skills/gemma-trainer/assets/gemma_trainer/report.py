"""The page a person opens after a run: one HTML file with its figures, charts, problems and sample answers.

It loads nothing: the CSS and the SVG are inline, and there is no script. Everything in it but the labels comes from
data and flags, so all text goes through `_esc`.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections import Counter
from pathlib import Path

from .files import write_whole

MAX_TEXT, MAX_LISTED, MAX_POINTS, SMOOTH_FROM = 600, 20, 2000, 50
BOX = 1000  # charts are drawn in a BOX x BOX square that the page stretches to its own width

CSS = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2126; --soft: #5d6670; --line: #dde1e5; --fill: #f5f6f8;
  --train: #2566a8; --eval: #b8501a; --good: #1d7340; --warn: #8a5a00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #15181b; --text: #e4e7ea; --soft: #9aa3ac; --line: #30363c;
  --fill: #1e2226; --train: #6cabe8; --eval: #ee9560; --good: #67c08a; --warn: #dfb052; --bad: #f0847c; } }
* { box-sizing: border-box; min-width: 0; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; overflow-wrap: anywhere; }
section, figure, details { display: flow-root; margin: 36px 0 0; } details + details { margin-top: 12px; }
h1 { font-size: 24px; line-height: 1.3; margin: 0; } h2, summary { font-size: 17px; font-weight: 600; margin: 0; }
p { margin: 4px 0; } dd { margin: 0; } ol { margin: 8px 0 0; padding-left: 28px; } summary { cursor: pointer; }
h3, small, .legend, .plot span, .figures dt { font-size: 13px; font-weight: 400; } h3 { margin: 8px 0 2px; }
h3, small, .legend, .plot span, dt, th, .soft { color: var(--soft); } small { display: block; }
.yes, .done { color: var(--good); } .interrupted { color: var(--warn); } .no, .failed { color: var(--bad); }
.demo { border-left: 3px solid var(--warn); padding: 4px 12px; margin: 12px 0; background: var(--fill); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 16px 0 0; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; margin: 28px 0 0; padding: 1px; }
.figures { background: var(--line); } .figures div { background: var(--page); padding: 12px; }
.figures dd { font-size: 22px; line-height: 1.3; } .legend { display: flex; flex-wrap: wrap; gap: 0 20px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px; } .pair > :only-child { grid-column: 1 / -1; }
.train, .raw, .bar, .single { --mark: var(--train); } .dots, .p95 { --mark: var(--eval); }
.median { --mark: var(--text); } .raw { opacity: .4; } .bar { opacity: .7; } i { background: var(--mark); }
i { display: inline-block; width: 16px; height: 3px; margin-right: 6px; vertical-align: middle; }
i.bar, i.dots { width: 9px; height: 9px; } i.dots { border-radius: 50%; } rect { fill: var(--mark); }
path { fill: none; stroke: var(--mark, var(--line)); stroke-width: 1.8; stroke-linejoin: round; }
path { vector-effect: non-scaling-stroke; } path.dots, path.single { stroke-width: 8; stroke-linecap: round; }
.plot { position: relative; height: 200px; margin: 14px 16px 44px 58px; } .tall .plot { height: 300px; }
.plot svg { position: absolute; width: 100%; height: 100%; overflow: visible; } path.grid { stroke-width: 1; }
.plot span { position: absolute; line-height: 1; white-space: nowrap; top: calc(100% + 8px); }
.plot .x { transform: translateX(-50%); } .plot .name { margin-top: 18px; right: 0; }
.plot .y { top: auto; right: calc(100% + 8px); transform: translateY(50%); }
table { border-collapse: collapse; width: 100%; margin-top: 8px; font-size: 14px; } th { width: 40%; }
th, td { text-align: left; font-weight: 400; vertical-align: top; padding: 5px 16px 5px 0; }
tr { border-bottom: 1px solid var(--line); } article { border-top: 1px solid var(--line); margin-top: 14px; }
article header { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; padding-top: 10px; }
pre { margin: 0; padding: 8px 12px; background: var(--fill); white-space: pre-wrap; unicode-bidi: isolate; }
pre { font: 13px/1.5 ui-monospace, monospace; } @media (max-width: 700px) { main { padding: 20px 16px 48px; }
  .figures { grid-template-columns: 1fr 1fr; } .facts, .pair { grid-template-columns: 1fr; }
  .facts dt { margin-top: 6px; font-size: 13px; } }
"""


def write_report(path: str | Path, run: dict, metrics: list[dict]) -> Path:
    """Write the report of one run to `path`, replacing what is there in one step, and return the path.

    `run` is the parsed run.json; every key may be missing or null: script, status, demo, started, model {name,
    family, trainable_parameters, total_parameters, trains}, precision, arguments {flag: value}, versions, data
    {sources, rows, eval_rows, fingerprint}, counters {name: number}, problems [str], timing {total_s, train_s},
    peak_memory_mb, metrics {train_loss, eval_loss}, lengths [tokens of each row], samples [{row, prompt, expected,
    answer}]. `metrics` are the lines of metrics.jsonl: {step, epoch, loss, learning_rate, grad_norm} or {step,
    eval_loss}; a value that is missing or not finite is not drawn. Raises OSError if the file cannot be written; then
    an older report stays as it was.
    """
    write_whole(path, _page(run, [line for line in metrics if isinstance(line, dict)]))
    return Path(path)


def _page(run: dict, metrics: list[dict]) -> str:
    model, counters = _part(run, "model", dict), _part(run, "counters", dict)
    title = f"{_text(run.get('script')) or 'Training run'}: {_text(model.get('name')) or 'no model'}"
    loss = _chart("Loss", metrics, "loss", dots_key="eval_loss")
    small = _chart("Learning rate", metrics, "learning_rate") + _chart("Gradient norm", metrics, "grad_norm")
    body = [
        _head(run, title),
        _figures(run, metrics),
        loss or "<section><h2>Loss</h2><p>No finite loss was logged.</p></section>",
        f'<div class="pair">{small}</div>',
        _histogram(_part(run, "lengths", list)),
        _table("Counters", {name.replace("_", " "): _count(n) or n for name, n in counters.items() if n}),
        _problems(_part(run, "problems", list)),
        _samples([sample for sample in _part(run, "samples", list) if isinstance(sample, dict)]),
        _table("Arguments", _part(run, "arguments", dict), closed=True),
        _table("Versions", _part(run, "versions", dict), closed=True),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        # Even if some text got through unescaped, a browser would run and load nothing.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">\n"""
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_esc(title)}</title>\n<style>{CSS}</style></head>\n<body><main>\n{chr(10).join(body)}\n"
        "</main></body></html>\n"
    )


def _head(run: dict, title: str) -> str:
    model, data = _part(run, "model", dict), _part(run, "data", dict)
    status = _esc(run.get("status")) or "unknown"
    trained, total = _num(model.get("trainable_parameters")), _num(model.get("total_parameters"))
    share = f" of {_count(total)} ({trained / total:.2%})" if trained and total else ""
    facts = {
        "Family": model.get("family"),
        "Trains": model.get("trains"),
        "Trained parameters": _count(trained) + share,
        "Precision": run.get("precision"),
        "Data": ", ".join(_text(source) for source in _part(data, "sources", list)),
        "Data fingerprint": data.get("fingerprint"),
        "Started": _text(run.get("started")).replace("T", " "),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{_esc(value)}</dd>" for name, value in facts.items() if _text(value))
    css = status if status in ("done", "interrupted", "failed") else "soft"
    error = f": {_esc(run['error'])}" if _text(run.get("error")) else ""
    demo = '<p class="demo">This is the built-in demo. Its figures show that training works, no more.</p>'
    return (
        f'<header><h1>{_esc(title)}</h1><p>Status: <b class="{css}">{status}</b>{error}</p>'
        f'{demo if run.get("demo") is True else ""}<dl class="facts">{rows}</dl></header>'
    )


def _figures(run: dict, metrics: list[dict]) -> str:
    counters, timing, data, final = (_part(run, key, dict) for key in ("counters", "timing", "data", "metrics"))
    losses, evals = ([line[key] for line in metrics if line.get(key) is not None] for key in ("loss", "eval_loss"))
    steps, epochs = ([n for line in metrics if (n := _num(line.get(key))) is not None] for key in ("step", "epoch"))
    # The trainer's own train_loss is a mean over the run; it stands in only where no step was logged.
    loss = losses[-1] if losses else final.get("train_loss")
    beside = "" if len(losses) == 1 else f"first {_loss(losses[0])}" if losses else "mean of the run"
    eval_loss = final["eval_loss"] if final.get("eval_loss") is not None else evals[-1] if evals else None
    rows = _count(data.get("rows")) or _count(counters.get("rows"))
    tokens, padding, memory = map(_num, (counters.get("tokens"), counters.get("padding"), run.get("peak_memory_mb")))
    share = "" if not tokens or padding is None else f"{padding / ((tokens + padding) or 1):.1%}"
    size = "" if memory is None else f"{memory / 1024:,.1f} GB" if memory >= 1024 else f"{memory:,.0f} MB"
    figures = [
        ("Final loss", _loss(loss), beside),
        ("Eval loss", _loss(eval_loss), f"first {_loss(evals[0])}" if len(evals) > 1 else ""),
        ("Steps", _count(max(steps, default=None)), f"{max(epochs):.3g} epochs" if epochs else ""),
        ("Rows", rows, _count(data.get("eval_rows"), "and {} to evaluate")),
        ("Trained tokens", _count(counters.get("trained_tokens")), _count(tokens, "of {}")),
        ("Padding", share, _count(padding, "{} tokens")),
        ("Time", _duration(timing.get("total_s")), _duration(timing.get("train_s"), "{} training")),
        ("Peak memory", size, ""),
    ]
    cells = ""
    for name, value, more in figures:
        css = ' class="no"' if value == "not finite" else ""
        cells += f"<div><dt>{name}</dt><dd{css}>{value or '–'}{f'<small>{more}</small>' if value else ''}</dd></div>"
    return f'<dl class="figures">{cells}</dl>'


def _chart(title: str, metrics: list[dict], key: str, dots_key: str = "") -> str:
    """A line of `key` over steps, with `dots_key` as dots. Nothing if neither has a point."""
    line, dots = _points(metrics, key), _points(metrics, dots_key)
    if not line and not dots:
        return ""
    smooth = key != "learning_rate" and len(line) > SMOOTH_FROM
    series = [("raw" if smooth else "train", "train loss" if dots_key else title.lower(), line)]
    series += [("train", "smoothed", _smooth(line) if smooth else []), ("dots", "eval loss", dots)]
    x = _axis([step for step, _ in line + dots], whole=True)
    # A loss is read for its change; the others start at zero.
    low, high, step = _axis([value for _, value in line + dots] + ([] if dots_key else [0.0]))
    y = (math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)
    marks = legend = ""
    for css, name, points in series:
        if points:
            marks += _draw(css, name, _thin(points), x, y)
            legend += f'<span><i class="{css}"></i>{name}</span>'
    values = [record.get(name) for record in metrics for name in (key, dots_key)]
    lost = sum(isinstance(value, float) and _num(value) is None for value in values)
    note = f'<p class="no">Not drawn, as NaN or infinite: {lost:,}</p>' if lost else ""
    return _frame(title, marks, x, y, legend, "step", note, css="tall" if dots_key else "")


def _draw(css: str, name: str, points: list[tuple], x: tuple, y: tuple) -> str:
    spots = [f"{_at(step, x):.1f} {BOX - _at(value, y):.1f}" for step, value in points]
    if css != "dots" and len(points) > 1:
        return f'<path class="{css}" d="M{"L".join(spots)}"/>'
    # A dot is a line of no length with round ends: it stays round when the square is stretched.
    css = "dots" if css == "dots" else "single"
    says = (f"<title>Step {step:g}: {name} {value:.4g}</title>" for step, value in points)
    return "".join(f'<path class="{css}" d="M{at}h0">{text}</path>' for at, text in zip(spots, says, strict=True))


def _frame(title, marks: str, x: tuple, y: tuple, legend: str, x_name: str, note: str = "", css: str = "") -> str:
    """Axes around `marks`. `x` and `y` are (low, high, tick step); labels are HTML so that they keep their size."""
    grid = labels = ""
    for value, label in _ticks(*y):
        grid += f"M0 {BOX - _at(value, y):.1f}H{BOX}"
        labels += f'<span class="y" style="bottom:{_at(value, y) * 100 / BOX:.2f}%">{label}</span>'
    for value, label in _ticks(*x):
        labels += f'<span class="x" style="left:{_at(value, x) * 100 / BOX:.2f}%">{label}</span>'
    return (
        f'<figure class="{css}"><h2>{title}</h2><div class="legend">{legend}</div><div class="plot">'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<path class="grid" d="{grid}"/>{marks}</svg>{labels}<span class="name">{x_name}</span></div>{note}</figure>'
    )


def _histogram(lengths: list) -> str:
    lengths = sorted(int(n) for value in lengths if (n := _num(value)) is not None and n >= 0)
    if not lengths:
        return ""
    width = int(_axis([lengths[0], lengths[-1] + 1], 40, whole=True)[2])
    bins = Counter(length // width * width for length in lengths)
    x = _axis([max(0, min(bins) - width), max(bins) + 2 * width], whole=True)
    _, top, step = _axis([0, max(bins.values())], 4, whole=True)
    y = (0, math.ceil(top / step) * step, step)
    marks, wide = "", width / (x[1] - x[0]) * BOX
    for start, count in bins.items():
        tall = max(_at(count, y), 8)  # one row among thousands is still seen
        says = f"{start:,}–{start + width - 1:,}" if width > 1 else f"{start:,}"
        marks += f'<rect class="bar" x="{_at(start, x) + wide * 0.04:.1f}" y="{BOX - tall:.1f}" '
        marks += f'width="{wide * 0.92:.1f}" height="{tall:.1f}"><title>{says} tokens: {count:,} rows</title></rect>'
    median, p95 = statistics.median(lengths), lengths[math.ceil(0.95 * len(lengths)) - 1]
    legend = f'<span><i class="bar"></i>{len(lengths):,} rows</span>'
    for css, name, value in (("median", "median", median), ("p95", "95th percentile", p95)):
        marks += f'<path class="{css}" d="M{_at(value + 0.5, x):.1f} 0V{BOX}"/>'
        legend += f'<span><i class="{css}"></i>{name} {_count(value)}</span>'
    return _frame("Row lengths", marks, x, y, f"{legend}<span>longest {lengths[-1]:,}</span>", "tokens")


def _problems(problems: list) -> str:
    items = "".join(f"<li>{_esc(problem)}</li>" for problem in problems[:MAX_LISTED])
    cut = f", the first {MAX_LISTED} of them shown" if len(problems) > MAX_LISTED else ""
    total = f"{len(problems):,} in all{cut}." if problems else "None was recorded."
    return f'<section><h2>Problems</h2><p class="soft">{total}</p><ol>{items}</ol></section>'


def _samples(samples: list[dict]) -> str:
    body = ""
    for sample in samples:
        prompt, expected, answer = (
            f'<div><h3>{key.capitalize()}</h3><pre dir="auto">{_esc(sample.get(key)) or "–"}</pre></div>'
            for key in ("prompt", "expected", "answer")
        )
        verdict, same = "", sample.get("expected") == sample.get("answer")
        if sample.get("expected") is not None and sample.get("answer") is not None:
            verdict = f'<span class="{"yes" if same else "no"}">{"matches exactly" if same else "differs"}</span>'
        body += f"<article><header><b>{_esc(sample.get('row'))}</b>{verdict}</header>{prompt}"
        body += f'<div class="pair">{expected}{answer}</div></article>'
    return f"<section><h2>Sample answers</h2>{body}</section>" if body else ""


def _table(title: str, values: dict, closed: bool = False) -> str:
    rows = "".join(f"<tr><th>{_esc(name)}</th><td>{_esc(value) or '–'}</td></tr>" for name, value in values.items())
    box = "<details><summary>{}</summary>{}</details>" if closed else "<section><h2>{}</h2>{}</section>"
    return box.format(title, f"<table>{rows}</table>") if rows else ""


def _points(metrics: list[dict], key: str) -> list[tuple[float, float]]:
    """Sorted (step, value). A resumed run may log a step twice: the later line counts."""
    pairs = ((_num(line.get("step")), _num(line.get(key))) for line in metrics)
    return sorted({step: value for step, value in pairs if step is not None and value is not None}.items())


def _thin(points: list[tuple]) -> list[tuple]:
    """At most about MAX_POINTS of them: the lowest and the highest of each stretch, so that spikes stay visible."""
    if len(points) <= MAX_POINTS:
        return points
    size, keep = math.ceil(len(points) / (MAX_POINTS // 2)), {0, len(points) - 1}
    for start in range(0, len(points), size):
        stretch = sorted(range(start, min(start + size, len(points))), key=lambda i: points[i][1])
        keep |= {stretch[0], stretch[-1]}
    return [points[i] for i in sorted(keep)]


def _smooth(points: list[tuple]) -> list[tuple]:
    """A centred moving mean."""
    half, values = min(max(2, len(points) // 40), 50), [value for _, value in points]
    return [(step, statistics.fmean(values[max(0, i - half) : i + half + 1])) for i, (step, _) in enumerate(points)]


def _axis(values: list, count: int = 5, whole: bool = False) -> tuple[float, float, float]:
    """(lowest, highest, tick step): 1, 2 or 5 times a power of ten, in at most `count` parts. Never an empty range."""
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):
        low, high = (low - abs(low) * 0.1, high + abs(low) * 0.1) if abs(low) > 1e-280 else (0.0, 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((times * power for times in (1, 2, 5) if times * power >= raw * (1 - 1e-9)), 10 * power)
    return low, high, max(step, 1.0) if whole else step


def _ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """(value, label) of each multiple of `step`; all labels but 0 in one style."""
    ticks = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if 0.01 <= max(map(abs, ticks), default=0) < 1e6:
        labels = [f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}" for tick in ticks]
    else:
        parts = (f"{tick:.6e}".split("e") for tick in ticks)
        labels = [f"{float(mantissa):g}e{int(exponent)}" for mantissa, exponent in parts]
    return [(tick, label if tick else "0") for tick, label in zip(ticks, labels, strict=True)]


def _at(value: float, axis: tuple) -> float:
    return (value - axis[0]) / (axis[1] - axis[0]) * BOX


def _num(value) -> float | None:
    """A finite number, or None. Beyond 1e280 a range could overflow, so such a value counts as infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e280:
        return None
    return float(value)


def _count(value, form: str = "{}") -> str:
    number = _num(value)
    return "" if number is None else form.format(f"{number:,.0f}" if number.is_integer() else f"{number:,.4g}")


def _loss(value) -> str:
    if isinstance(value, float) and _num(value) is None:
        return "not finite"
    return "" if _num(value) is None else f"{value:#.4g}".rstrip(".")


def _duration(seconds, form: str = "{}") -> str:
    seconds = _num(seconds)
    if seconds is None or seconds < 60:
        return "" if seconds is None else form.format(f"{seconds:.1f} s")
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return form.format(f"{hours:,} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s")


def _text(value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _esc(value) -> str:
    """Text that is safe in HTML, cut at MAX_TEXT characters."""
    text = _text(value)
    return html.escape(text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1].rstrip() + "…")


def _part(values: dict, key: str, kind: type):
    """`values[key]`, or an empty `kind` where that is missing or something else."""
    return values[key] if isinstance(values.get(key), kind) else kind()
