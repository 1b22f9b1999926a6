"""What the HTML pages share: the frame and look of a page, safe text, numbers, axes, charts and tables.

A page loads nothing: the CSS and the SVG are inline, and there is no script. All text from data goes through `esc`.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import unicodedata
from collections import Counter

MAX_TEXT, MAX_NAME, MAX_BARS = 600, 120, 8
FLAG_LETTERS = "".join(map(chr, range(0x1F1E6, 0x1F200)))  # two of them are a flag
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
.median { --mark: var(--text); } .limit { --mark: var(--bad); stroke-dasharray: 5 4; }
.raw { opacity: .4; } .bar { opacity: .7; } i { background: var(--mark); }
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
.media { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0; } .media img { max-width: 100%; height: auto; }
.media audio { width: 300px; max-width: 100%; } article ul { margin: 4px 0 0; padding-left: 20px; }
pre { font: 13px/1.5 ui-monospace, monospace; } @media (max-width: 700px) { main { padding: 20px 16px 48px; }
  .figures { grid-template-columns: 1fr 1fr; } .facts, .pair { grid-template-columns: 1fr; }
  .facts dt { margin-top: 6px; font-size: 13px; } }
"""


def document(title: str, parts: list[str], css: str = "") -> str:
    """A whole page: `parts` are HTML, empty ones leave a blank line; `css` is added to what all pages share."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        # Even if some text got through unescaped, a browser would run and load nothing.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; """
        """img-src data:; media-src data:">\n"""
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(title)}</title>\n<style>{CSS}{css}</style></head>\n<body><main>\n{chr(10).join(parts)}\n"
        "</main></body></html>\n"
    )


def figure_grid(figures: list[tuple[str, str, str, str]]) -> str:
    """The main figures, as (name, value, small print below it, CSS class). The values are HTML already."""
    cells = ""
    for name, value, more, css in figures:
        css = f' class="{css}"' if css else ""
        cells += f"<div><dt>{name}</dt><dd{css}>{value or '–'}{f'<small>{more}</small>' if value else ''}</dd></div>"
    return f'<dl class="figures">{cells}</dl>'


def frame(
    title: str,
    marks: str,
    x: tuple,
    y: tuple,
    *,
    legend: str = "",
    x_name: str = "",
    note: str = "",
    css: str = "",
    x_ticks: list | None = None,
    y_ticks: list | None = None,
) -> str:
    """Axes around `marks`; labels are HTML so that they keep their size.

    `x` and `y` are (low, high, tick step); ticks given as [(value, label)] stand in for those of the step.
    """
    grid = labels = ""
    for value, label in ticks(*y) if y_ticks is None else y_ticks:
        grid += f"M0 {BOX - at(value, y):.1f}H{BOX}"
        labels += f'<span class="y" style="bottom:{at(value, y) * 100 / BOX:.2f}%">{label}</span>'
    for value, label in ticks(*x) if x_ticks is None else x_ticks:
        labels += f'<span class="x" style="left:{at(value, x) * 100 / BOX:.2f}%">{label}</span>'
    return (
        f'<figure class="{css}"><h2>{title}</h2><div class="legend">{legend}</div><div class="plot">'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<path class="grid" d="{grid}"/>{marks}</svg>{labels}<span class="name">{x_name}</span></div>{note}</figure>'
    )


def histogram(
    title: str,
    values: list,
    *,
    unit: str = "tokens",
    things: str = "rows",
    whole: bool = True,
    limit: tuple[str, float] | None = None,
    clip: bool = False,
) -> str:
    """How many `things` have how many `unit`, with lines at the median, at the 95th percentile and at `limit`.

    `limit` is (name, value). One so far right that it would squeeze the bars is told in the legend only. With `clip`
    the few values that would squeeze all others are told in a note, not drawn. `whole` cuts numbers to integers.
    Nothing if no value is a number.
    """
    values = sorted(int(n) if whole else n for n in numbers(values))
    if not values:
        return ""
    upto = _reach(values, limit) if clip else values[-1]
    drawn = [value for value in values if value <= upto]
    width, bins = _bins(drawn, whole)
    in_view = limit is not None and limit[1] <= 3 * max(bins) + width
    x = axis([max(0, min(bins) - width), max(max(bins) + 2 * width, limit[1] + width if in_view else 0)], whole=whole)
    _, top, step = axis([0, max(bins.values())], 4, whole=True)
    y = (0, math.ceil(top / step) * step, step)
    marks = "".join(_bar(start, width, n, x, y, unit, things) for start, n in bins.items())
    lines, legend = _lines(values, x, whole, limit, in_view)
    legend = f'<span><i class="bar"></i>{len(values):,} {things}</span>{legend}'
    beyond = len(values) - len(drawn)
    note = f'<p class="soft">Not drawn, as longer than {count(upto)}: {beyond:,}</p>' if beyond else ""
    return frame(title, marks + lines, x, y, legend=legend, x_name=unit, note=note)


def _reach(values: list, limit: tuple | None) -> float:
    """Where a chart of the sorted `values` should end: before the longest, if those before it would be one bar."""
    reach = max(3 * p95(values), 1.5 * limit[1] if limit and limit[1] < values[-1] else 0)
    return reach if 0 < reach < values[-1] / 2 else values[-1]


def _lines(values: list, x: tuple, whole: bool, limit: tuple | None, in_view: bool) -> tuple[str, str]:
    """Upright lines at the middle, the 95th percentile and the limit of the sorted `values`, and their legend."""
    longest = f"{values[-1]:,}" if whole else count(values[-1])
    lines = [("median", "median", statistics.median(values), True)]
    lines += [("p95", "95th percentile", p95(values), True)]
    lines += [("limit", esc(limit[0]), limit[1], in_view)] if limit else []
    marks = legend = ""
    for css, name, value, seen in lines:
        # A whole number n is drawn from n to n + 1; what keeps to a limit ends left of it.
        place = at(value + whole * (1 if css == "limit" else 0.5), x)
        marks += f'<path class="{css}" d="M{place:.1f} 0V{BOX}"/>' if seen else ""
        far = "" if seen else ", right of this chart"
        legend += f'<span><i class="{css}"></i>{name} {count(value)}{far}</span>'
    return marks, f"{legend}<span>longest {longest}</span>"


def _bins(values: list, whole: bool) -> tuple[float, Counter]:
    """The width of at most about 40 bins, and how many of the sorted `values` are in each, by its start."""
    if whole:
        width = int(axis([values[0], values[-1] + 1], 40, whole=True)[2])
        return width, Counter(value // width * width for value in values)
    width = axis([values[0], values[-1]], 40)[2]
    return width, Counter(math.floor(value / width + 1e-9) * width for value in values)


def _bar(start: float, width: float, n: int, x: tuple, y: tuple, unit: str, things: str) -> str:
    wide, tall = width / (x[1] - x[0]) * BOX, max(at(n, y), 8)  # one row among thousands is still seen
    whole = isinstance(width, int)
    first, last = (f"{n:,}" if whole else count(n) for n in (start, start + width - whole))
    says = first if first == last else f"{first}–{last}"
    return (
        f'<rect class="bar" x="{at(start, x) + wide * 0.04:.1f}" y="{BOX - tall:.1f}" '
        f'width="{wide * 0.92:.1f}" height="{tall:.1f}"><title>{says} {unit}: {n:,} {things}</title></rect>'
    )


def p95(values: list[float]) -> float | None:
    """The value that 95 of 100 do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None


def table(title: str, values: dict, closed: bool = False) -> str:
    """Names and values in two columns, under a heading or folded up. Nothing if there are none."""
    rows = "".join(f"<tr><th>{esc(name)}</th><td>{esc(value) or '–'}</td></tr>" for name, value in values.items())
    box = "<details><summary>{}</summary>{}</details>" if closed else "<section><h2>{}</h2>{}</section>"
    return box.format(title, f"<table>{rows}</table>") if rows else ""


def bars(counts: dict, at_least: float = 0.0) -> str:
    """Names with a bar each, the most frequent first; names that are all numbers keep their order.

    What is beyond MAX_BARS names, or less than the share `at_least`, is told as one sum. Nothing if no name stands out.
    """
    found = {as_text(name): n for name, value in counts.items() if (n := num(value)) is not None and n > 0}
    if not found:
        return ""
    numbers = all(name.isdecimal() and len(name) < 10 for name in found)
    entries = sorted(found.items(), key=lambda entry: int(entry[0]) if numbers else -entry[1])
    total = sum(found.values())
    named = [entry for entry in entries if entry[1] >= at_least * total][:MAX_BARS]
    if not named:
        return ""
    rest, lines = entries[len(named) :], ""
    top = max(n for _, n in named)
    for name, n in named:
        lines += _bar_line(name, n, total, f'<i class="bar" style="width:{n / top * 100:.1f}%"></i>')
    if rest:  # together they would dwarf each one that is named, so they get no bar
        name = f"{rest[0][0]} and more" if numbers else plural(len(rest), "other")
        lines += _bar_line(name, sum(n for _, n in rest), total)
    return f'<ul class="bars">{lines}</ul>'


def _bar_line(name: str, n: float, total: float, bar: str = "") -> str:
    value = count(n) + share(n, total, " ({})")
    return f"<li><span>{esc(name, MAX_NAME) or '–'}</span><span>{value}</span>{bar}</li>"


def axis(values: list, parts: int = 5, whole: bool = False) -> tuple[float, float, float]:
    """(lowest, highest, tick step): 1, 2 or 5 times a power of ten, in at most `parts` parts. Never an empty range."""
    low, high = min(values), max(values)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-290):
        low, high = (low - abs(low) * 0.1, high + abs(low) * 0.1) if abs(low) > 1e-280 else (0.0, 1.0)
    raw = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((times * power for times in (1, 2, 5) if times * power >= raw * (1 - 1e-9)), 10 * power)
    return low, high, max(step, 1.0) if whole else step


def log_axis(values: list[float]) -> tuple[tuple[float, float], list[tuple[float, str]]]:
    """(lowest, highest) as powers of ten, with room around `values`, and a few ticks [(power, label)]."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08 * (high - low), (0.7 - (high - low)) / 2, 0.05)
    low, high = low - room, high + room
    powers = range(math.floor(low), math.ceil(high) + 1)
    places = [(power + math.log10(digit), power, digit) for power in powers for digit in (1, 2, 5)]
    places = [place for place in places if low <= place[0] <= high]
    if len(places) > 7:
        places = [place for place in places if place[2] == 1]
        places = places[:: math.ceil(len(places) / 7)]
    labels = [f"{digit * 10**power:,}" if 0 <= power < 6 else f"{digit}e{power}" for _, power, digit in places]
    return (low, high), [(place[0], label) for place, label in zip(places, labels, strict=True)]


def ticks(low: float, high: float, step: float) -> list[tuple[float, str]]:
    """(value, label) of each multiple of `step`; all labels but 0 in one style."""
    found = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if 0.01 <= max(map(abs, found), default=0) < 1e6:
        labels = [f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}" for tick in found]
    else:
        pieces = (f"{tick:.6e}".split("e") for tick in found)
        labels = [f"{float(mantissa):g}e{int(exponent)}" for mantissa, exponent in pieces]
    return [(tick, label if tick else "0") for tick, label in zip(found, labels, strict=True)]


def at(value: float, scale: tuple) -> float:
    """Where a value stands on an axis, from 0 to BOX."""
    return (value - scale[0]) / (scale[1] - scale[0]) * BOX


def num(value) -> float | None:
    """A finite number, or None. Beyond 1e280 a range could overflow, so such a value counts as infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e280:
        return None
    return float(value)


def numbers(values: list) -> list[float]:
    """Those of `values` that are finite numbers from 0 up."""
    return [n for value in values if (n := num(value)) is not None and n >= 0]


def count(value, form: str = "{}") -> str:
    """A number with thousands separators, put into `form`; nothing if it is not a finite number."""
    number = num(value)
    if number is None:
        return ""
    return form.format(f"{number:,.0f}" if number.is_integer() or abs(number) >= 1000 else f"{number:.4g}")


def plural(n, name: str) -> str:
    """1 row or 2 rows, for the name "row"; nothing if `n` is not a finite number."""
    return count(n, f"{{}} {name}" if n == 1 else f"{{}} {name}s")


def share(some, total, form: str = "{}") -> str:
    """A percentage put into `form`; nothing unless `some` is a part of `total`."""
    some, total = num(some), num(total)
    if some is None or not total or not 0 <= some <= total:
        return ""
    ratio = some / total
    return form.format("under 0.1%" if 0 < ratio < 0.001 else "over 99.9%" if 0.999 < ratio < 1 else f"{ratio:.1%}")


def duration(seconds, form: str = "{}") -> str:
    """Seconds as "1 h 2 min", put into `form`; nothing if they are not a finite number."""
    seconds = num(seconds)
    if seconds is None or seconds < 60:
        return "" if seconds is None else form.format(f"{seconds:.1f} s")
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return form.format(f"{hours:,} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s")


def as_text(value) -> str:
    """A string as it is, nothing for None, JSON for all else."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def esc(value, limit: int = MAX_TEXT) -> str:
    """Text that is safe in HTML, cut at `limit` characters."""
    text = as_text(value)
    return html.escape(text if len(text) <= limit else text[: limit - 1].rstrip() + "…")


def part(values: dict, key: str, kind: type):
    """`values[key]`, or an empty `kind` where that is missing or something else."""
    return values[key] if isinstance(values.get(key), kind) else kind()


def dicts(values: dict, key: str) -> list[dict]:
    """The dicts in the list `values[key]`."""
    return [item for item in part(values, key, list) if isinstance(item, dict)]


def cut_middle(text: str, limit: int) -> tuple[str, int, str]:
    """(head, characters left out, tail): all of a text up to `limit`, else its two ends, with no character halved."""
    if len(text) <= limit * 1.1:
        return text, 0, ""
    head, tail = limit * 2 // 3, len(text) - limit // 3
    for _ in range(20):  # an emoji can be a chain of this many
        head -= _joined(text, head)
        tail += _joined(text, tail)
    return text[:head], tail - head, text[tail:]


def _joined(text: str, place: int) -> bool:
    """Whether the characters around `place` are one on the screen: accents, emoji chains, skin tones and flags."""
    if not 0 < place < len(text):
        return False
    before, after = text[place - 1], text[place]
    if before == "\u200d" or after == "\u200d" or "\U0001f3fb" <= after <= "\U0001f3ff":
        return True
    if after in FLAG_LETTERS and (place - len(text[:place].rstrip(FLAG_LETTERS))) % 2:
        return True
    return unicodedata.category(after) in ("Mn", "Mc", "Me")
