"""The page a person opens after a run: one HTML file with its figures, charts, problems and sample answers.

Everything in it but the labels comes from data and flags, so all text goes through `esc`.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from .files import write_whole
from .page import (
    BOX,
    as_text,
    at,
    axis,
    count,
    dicts,
    document,
    duration,
    esc,
    figure_grid,
    frame,
    histogram,
    num,
    part,
    share,
    table,
)

MAX_LISTED, MAX_POINTS, SMOOTH_FROM, MAX_COMMAND = 20, 2000, 50, 1000
SMALL_CHARTS = {
    "Learning rate": "learning_rate",
    "Gradient norm": "grad_norm",
    "Tokens per second": "tokens_per_second",
    "Peak memory (MB)": "memory_mb",
    "Share of time waiting for data": "data_wait",
    "Share of padding": "padding",
}


def write_report(path: str | Path, run: dict, metrics: list[dict], shown: dict | None = None) -> Path:
    """Write the report of one run to `path`, replacing what is there in one step, and return the path.

    `run` is the parsed run.json; every key may be missing or null: script, status, why, demo, started, model {name,
    family, trainable_parameters, total_parameters, trains}, precision, arguments {flag: value}, versions, data
    {sources, rows, eval_rows, fingerprint}, counters {name: number}, problems [str], timing {total_s, train_s},
    peak_memory_mb, metrics {train_loss, eval_loss}, lengths [tokens of each row], samples [{row, prompt, expected,
    answer}], command, notes [str]. `metrics` are the lines of metrics.jsonl: {step, epoch, loss, learning_rate,
    grad_norm, tokens_per_second, ...}, {step, eval_loss}, {step, gen/...} or {step, answers: [{prompt, answer, passed,
    missed}]}; a value that is missing or not finite is not drawn. `shown` is the parsed samples.json, {name of a sample
    or prompt: {prompt, expected, media: [{kind, source}]}}. Raises OSError if the file cannot be written; then an older
    report stays as it was.
    """
    write_whole(path, _page(run, [line for line in metrics if isinstance(line, dict)], shown or {}))
    return Path(path)


def _page(run: dict, metrics: list[dict], shown: dict) -> str:
    model, counters = part(run, "model", dict), part(run, "counters", dict)
    title = f"{as_text(run.get('script')) or 'Training run'}: {as_text(model.get('name')) or 'no model'}"
    loss = _chart("Loss", metrics, "loss", dots_key="eval_loss")
    small = "".join(_chart(name, metrics, key) for name, key in SMALL_CHARTS.items())
    body = [
        _head(run, title),
        _figures(run, metrics),
        loss or "<section><h2>Loss</h2><p>No finite loss was logged.</p></section>",
        _pass_rates(metrics),
        _answers(metrics, shown),
        _samples(dicts(run, "samples"), shown),
        f'<div class="pair">{small}</div>',
        histogram("Row lengths", part(run, "lengths", list)),
        table("Counters", {name.replace("_", " "): count(n) or n for name, n in counters.items() if n}),
        _problems(part(run, "problems", list)),
        _notes(part(run, "notes", list)),
        _command(run),
        table("Arguments", part(run, "arguments", dict), closed=True),
        table("Versions", part(run, "versions", dict), closed=True),
    ]
    return document(title, body)


def _head(run: dict, title: str) -> str:
    model, data = part(run, "model", dict), part(run, "data", dict)
    status = esc(run.get("status")) or "unknown"
    trained, total = num(model.get("trainable_parameters")), num(model.get("total_parameters"))
    share = f" of {count(total)} ({trained / total:.2%})" if trained and total else ""
    facts = {
        "Family": model.get("family"),
        "Trains": model.get("trains"),
        "Trained parameters": count(trained) + share,
        "Precision": run.get("precision"),
        "Backend": _backend(part(run, "backend", dict)),
        "Data": ", ".join(as_text(source) for source in part(data, "sources", list)),
        "Data fingerprint": data.get("fingerprint"),
        "Started": as_text(run.get("started")).replace("T", " "),
    }
    rows = "".join(f"<dt>{name}</dt><dd>{esc(value)}</dd>" for name, value in facts.items() if as_text(value))
    css = status if status in ("done", "interrupted", "failed") else "soft"
    why = f": {esc(run['why'])}" if as_text(run.get("why")) else ""
    demo = '<p class="demo">This is the built-in demo. Its figures show that training works, no more.</p>'
    return (
        f'<header><h1>{esc(title)}</h1><p>Status: <b class="{css}">{status}</b>{why}</p>'
        f'{demo if run.get("demo") is True else ""}<dl class="facts">{rows}</dl></header>'
    )


def _backend(backend: dict) -> str:
    """What trained, and whether Unsloth made it faster."""
    name, verdict = as_text(backend.get("name")), as_text(part(backend, "audit", dict).get("verdict"))
    return f"{name}, {verdict}" if name == "unsloth" and verdict else name


def _figures(run: dict, metrics: list[dict]) -> str:
    counters, timing, data, final = (part(run, key, dict) for key in ("counters", "timing", "data", "metrics"))
    losses, evals = ([line[key] for line in metrics if line.get(key) is not None] for key in ("loss", "eval_loss"))
    steps, epochs = ([n for line in metrics if (n := num(line.get(key))) is not None] for key in ("step", "epoch"))
    # The trainer's own train_loss is a mean over the run; it stands in only where no step was logged.
    loss = losses[-1] if losses else final.get("train_loss")
    beside = "" if len(losses) == 1 else f"first {_loss(losses[0])}" if losses else "mean of the run"
    eval_loss = final["eval_loss"] if final.get("eval_loss") is not None else evals[-1] if evals else None
    rows = count(data.get("rows")) or count(counters.get("rows"))
    tokens, padding, memory = map(num, (counters.get("tokens"), counters.get("padding"), run.get("peak_memory_mb")))
    share = "" if not tokens or padding is None else f"{padding / ((tokens + padding) or 1):.1%}"
    size = "" if memory is None else f"{memory / 1024:,.1f} GB" if memory >= 1024 else f"{memory:,.0f} MB"
    figures = [
        ("Final loss", _loss(loss), beside),
        ("Eval loss", _loss(eval_loss), f"first {_loss(evals[0])}" if len(evals) > 1 else ""),
        ("Steps", count(max(steps, default=None)), f"{max(epochs):.3g} epochs" if epochs else ""),
        ("Rows", rows, count(data.get("eval_rows"), "and {} to evaluate")),
        ("Trained tokens", count(counters.get("trained_tokens")), count(tokens, "of {}")),
        ("Padding", share, count(padding, "{} tokens")),
        ("Time", duration(timing.get("total_s")), duration(timing.get("train_s"), "{} training")),
        ("Peak memory", size, ""),
    ]
    return figure_grid([(*figure, "no" if figure[1] == "not finite" else "") for figure in figures])


def _chart(title: str, metrics: list[dict], key: str, dots_key: str = "", whole_range: bool = False) -> str:
    """A line of `key` over steps, with `dots_key` as dots; `whole_range` is that of a share. Nothing if neither has a
    point."""
    line, dots = _points(metrics, key), _points(metrics, dots_key)
    if not line and not dots:
        return ""
    smooth = key != "learning_rate" and len(line) > SMOOTH_FROM
    series = [("raw" if smooth else "train", "train loss" if dots_key else title.lower(), line)]
    series += [("train", "smoothed", _smooth(line) if smooth else []), ("dots", "eval loss", dots)]
    x = axis([step for step, _ in line + dots], whole=True)
    # A loss is read for its change; the others start at zero.
    low, high, step = axis([value for _, value in line + dots] + ([] if dots_key else [0.0]) + [1.0] * whole_range)
    y = (math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)
    marks = legend = ""
    for css, name, points in series:
        if points:
            marks += _draw(css, name, _thin(points), x, y)
            legend += f'<span><i class="{css}"></i>{name}</span>'
    values = [record.get(name) for record in metrics for name in (key, dots_key)]
    lost = sum(isinstance(value, float) and num(value) is None for value in values)
    note = f'<p class="no">Not drawn, as NaN or infinite: {lost:,}</p>' if lost else ""
    return frame(title, marks, x, y, legend=legend, x_name="step", note=note, css="tall" if dots_key else "")


def _draw(css: str, name: str, points: list[tuple], x: tuple, y: tuple) -> str:
    spots = [f"{at(step, x):.1f} {BOX - at(value, y):.1f}" for step, value in points]
    if css != "dots" and len(points) > 1:
        return f'<path class="{css}" d="M{"L".join(spots)}"/>'
    # A dot is a line of no length with round ends: it stays round when the square is stretched.
    css = "dots" if css == "dots" else "single"
    says = (f"<title>Step {step:g}: {name} {value:.4g}</title>" for step, value in points)
    return "".join(f'<path class="{css}" d="M{spot}h0">{text}</path>' for spot, text in zip(spots, says, strict=True))


def _problems(problems: list) -> str:
    items = "".join(f"<li>{esc(problem)}</li>" for problem in problems[:MAX_LISTED])
    cut = f", the first {MAX_LISTED} of them shown" if len(problems) > MAX_LISTED else ""
    total = f"{len(problems):,} in all{cut}." if problems else "None was recorded."
    return f'<section><h2>Problems</h2><p class="soft">{total}</p><ol>{items}</ol></section>'


def _notes(notes: list) -> str:
    items = "".join(f"<li>{esc(note)}</li>" for note in notes[:MAX_LISTED])
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if items else ""


def _command(run: dict) -> str:
    command = as_text(run.get("command"))
    return f"<section><h2>Command</h2><pre>{esc(command, MAX_COMMAND)}</pre></section>" if command else ""


def _pass_rates(metrics: list[dict]) -> str:
    """How many of the prompts pass, over time, and each check at first and at last."""
    asked = [line for line in metrics if num(line.get("gen/pass_rate")) is not None]
    if not asked:
        return ""
    chart = _chart("Prompts that pass", metrics, "gen/pass_rate", whole_range=True)
    hidden = ("gen/pass_rate", "gen/seconds", "gen/share", "gen/failed")
    names = [name for name in asked[-1] if name.startswith("gen/") and name not in hidden]
    names = [name for name in names if num(asked[-1][name]) is not None]  # the answers may stand there, too
    cells = {name.removeprefix("gen/"): _first_and_last(asked, name) for name in ("gen/pass_rate", *names)}
    lost = num(asked[-1].get("gen/failed"))
    failed = f'<p class="no">Prompts that could not be answered: {lost:,.0f}</p>' if lost else ""
    spent = duration(sum(num(line.get("gen/seconds")) or 0 for line in asked), "Asking took {} in all")
    spent += share(num(asked[-1].get("gen/share")), 1, ", {} of the run")
    return chart + table("Checks, first and last", cells) + f'<p class="soft">{spent}</p>{failed}'


def _first_and_last(asked: list[dict], name: str) -> str:
    values = [num(line.get(name)) for line in (asked[0], asked[-1])]
    whole = name in ("gen/tokens", "gen/wer", "gen/cer")
    shown = [count(value) if whole else share(value, 1) or count(value) for value in values if value is not None]
    return " → ".join(shown)


def _answers(metrics: list[dict], shown: dict) -> str:
    """What the prompts were answered at first and at last, of those prompts that are kept to be shown."""
    asked = [line for line in metrics if dicts(line, "answers")]
    if not asked or not shown:
        return ""
    first, last = (
        {as_text(one.get("prompt")): one for one in dicts(line, "answers")} for line in (asked[0], asked[-1])
    )
    body = ""
    for name, one in last.items():
        if not isinstance(shown.get(name), dict):
            continue
        missed = ", ".join(as_text(check) for check in part(one, "missed", list)) or as_text(one.get("error"))
        told = ("yes", "passes") if one.get("passed") is True else ("no", f"fails: {esc(missed)}")
        body += f'<article><header><b>{esc(name)}</b><span class="{told[0]}">{told[1]}</span></header>'
        body += _asked(shown[name])
        steps = [(asked[0], first.get(name, {}))] if len(asked) > 1 else []
        sides = [*steps, (asked[-1], one)]
        boxes = (_box(f"Step {count(line.get('step'))}", answer.get("answer")) for line, answer in sides)
        body += f'<div class="pair">{"".join(boxes)}</div></article>'
    return f"<section><h2>Answers to the prompts</h2>{body}</section>" if body else ""


def _asked(shown: dict) -> str:
    """A prompt with its media, and the answer that was expected."""
    media = "".join(_medium(medium) for medium in dicts(shown, "media"))
    expected = _box("Expected", shown["expected"]) if as_text(shown.get("expected")) else ""
    wanted = ", ".join(as_text(check) for check in part(shown, "wanted", list))
    expected += f'<p class="soft">Checked for {esc(wanted)}</p>' if wanted else ""
    return (f'<div class="media">{media}</div>' if media else "") + _box("Prompt", shown.get("prompt")) + expected


def _medium(medium: dict) -> str:
    source = as_text(medium.get("source"))
    if not source.startswith(("data:image/jpeg;base64,", "data:audio/mpeg;base64,")):
        return f'<span class="soft">[{esc(medium.get("kind"))} that cannot be shown]</span>'
    safe = esc(source, len(source))
    return f'<img alt="" src="{safe}">' if medium.get("kind") == "image" else f'<audio controls src="{safe}"></audio>'


def _box(name: str, text) -> str:
    shown = "(empty)" if text == "" else esc(text) or "–"
    return f'<div><h3>{name}</h3><pre dir="auto">{shown}</pre></div>'


def _samples(samples: list[dict], shown: dict) -> str:
    body = ""
    for sample in samples:
        prompt, expected, answer = (_box(key.capitalize(), sample.get(key)) for key in ("prompt", "expected", "answer"))
        media = "".join(map(_medium, dicts(part(shown, as_text(sample.get("row")), dict), "media")))
        prompt = (f'<div class="media">{media}</div>' if media else "") + prompt
        verdict, same = "", sample.get("expected") == sample.get("answer")
        if sample.get("expected") is not None and sample.get("answer") is not None:
            verdict = f'<span class="{"yes" if same else "no"}">{"matches exactly" if same else "differs"}</span>'
        body += f"<article><header><b>{esc(sample.get('row'))}</b>{verdict}</header>{prompt}"
        body += f'<div class="pair">{expected}{answer}</div></article>'
    return f"<section><h2>Sample answers</h2>{body}</section>" if body else ""


def _points(metrics: list[dict], key: str) -> list[tuple[float, float]]:
    """Sorted (step, value). A resumed run may log a step twice: the later line counts."""
    pairs = ((num(line.get("step")), num(line.get(key))) for line in metrics)
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


def _loss(value) -> str:
    if isinstance(value, float) and num(value) is None:
        return "not finite"
    return "" if num(value) is None else f"{value:#.4g}".rstrip(".")
