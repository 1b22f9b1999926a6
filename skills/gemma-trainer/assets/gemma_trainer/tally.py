"""What is found out about each row of a data set, added up piece by piece."""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import duplicates
from .checks import CONTROL, check_pair, check_structure, check_text, count_lengths, format_of, texts_of
from .errors import MediaError, RowError
from .findings import KINDS, Findings
from .inspection import Facts, inspect
from .media import MediaAccess
from .preferences import Preference, read_preference
from .rows import Row, read_row

if TYPE_CHECKING:  # a model's tokens need torch, which takes seconds to import
    from .tokens import Length, Shape, TokenChecker

LABEL_LENGTH, MAX_LABELS = 40, 2_000  # an answer of so many characters may be a label; distinct ones that are counted
MOSTLY = 0.9  # share of a row's text that many rows have, above which it can hardly be told from them
MEASURED = 256  # rows that are tokenized at a time
MAX_KNOWN_MEDIA = 50_000  # files whose facts are kept, in case another row names them


@dataclass
class Tally:
    """What a piece of a data set holds. `lengths` are (tokens, trained) of the rows that were measured for the figures,
    of a pair those of both sides; `media` are (hash of the content, row)."""

    findings: Findings
    rows: int = 0
    bad_rows: int = 0
    trained_rows: int = 0
    bad_media: int = 0
    counts: defaultdict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    lengths: list[tuple[int, int]] = field(default_factory=list)
    longest: int = 0  # tokens of the longest row that was measured
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    clip_seconds: list[float] = field(default_factory=list)
    labels: Counter = field(default_factory=Counter)
    pairs: Counter = field(default_factory=Counter)
    media: tuple[array, array] = field(default_factory=lambda: (array("Q"), array("Q")))
    records: np.ndarray | None = None

    def count(self, group: str, name: str, by: int = 1) -> None:
        self.counts[group][name] += by

    def merge(self, other: Tally) -> None:
        """Add the tally of another piece; its records are left alone."""
        self.findings.merge(other.findings)
        self.longest = max(self.longest, other.longest)
        for name in ("rows", "bad_rows", "trained_rows", "bad_media"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for group, counts in other.counts.items():
            self.counts[group].update(counts)
        for name in ("lengths", "image_sizes", "clip_seconds"):
            getattr(self, name).extend(getattr(other, name))
        if len(self.labels) < MAX_LABELS:
            self.labels.update(other.labels)
        self.pairs.update(other.pairs)
        for mine, theirs in zip(self.media, other.media, strict=True):
            mine.extend(theirs)


@dataclass
class Checker:
    """Looks at the rows of a piece: `checker(start, stop)` returns its `Tally`. Picklable.

    Args:
        rows: a `sources.Rows`; those from `evaluation` on are for evaluation, and train nothing.
        task: "sft", "dpo" or "reward"; "any" reads each row as what it is.
        tokens: measures rows, where a model is known.
        sampled: rows that are measured for the figures, whatever their size; None for all.
        common: windows that many rows share (see `duplicates.common_windows`).
    """

    rows: object
    task: str
    access: MediaAccess
    sampled: frozenset[int] | None
    common: np.ndarray
    evaluation: int
    tokens: TokenChecker | None = None
    keep_all: bool = False

    def __post_init__(self):
        self.known: dict[tuple, Facts | MediaError] = {}
        self.control, self.bos, self.rate, self.max_seconds = CONTROL, "<bos>", 16_000, 30.0
        if self.tokens:
            collator = self.tokens.collator
            self.bos = collator.tokenizer.bos_token
            self.control = re.compile(f"{collator.renderer.control.pattern}|{CONTROL.pattern}")  # and other Gemmas'
            self.max_seconds = collator.family.max_audio_seconds
            extractor = getattr(collator.processor, "feature_extractor", None)
            self.rate = extractor.sampling_rate if extractor else self.rate

    def __call__(self, start: int, stop: int) -> Tally:
        tally = Tally(Findings(self.keep_all), rows=stop - start)
        keys, texts = [], []
        waiting: list[tuple[_Seen, Row]] = []  # rows, and sides of pairs, that are to be measured
        for position, raw in enumerate(self.rows.read(start, stop), start):
            seen = self._read(position, raw, tally)
            texts.append(seen.telling if seen else "")
            if not seen:
                keys.append((0, 0, 0))
                continue
            self._media(seen, tally)
            keys.append(identify(seen.entry, [known and known.key for known in seen.facts]))
            self._describe(seen, raw, tally)
            waiting += self._judge(seen, tally)
            if len(waiting) >= MEASURED:
                self._measure(waiting, tally)
                waiting = []
        self._measure(waiting, tally)
        self._compare(keys, texts, start, tally)
        return tally

    def _compare(self, keys: list[tuple[int, int, int]], texts: list[str], start: int, tally: Tally) -> None:
        """Write down what the rows are compared by."""
        sketches, shared = duplicates.sketches(texts, self.common)
        for at in np.flatnonzero(shared > MOSTLY).tolist():
            tally.findings.add("mostly_shared", start + at, self.rows.name(start + at), f"{shared[at]:.0%} of its text")
        tally.records = np.zeros(len(keys), duplicates.ROW)
        tally.records["row"], tally.records["prompt"], media = np.array(keys, np.uint64).T
        # With media, rows are near only where these are the same: their hash is mixed into the sketch.
        tally.records["text"] = np.where(sketches != 0, sketches ^ media[:, None], 0)

    # -- one row

    def _read(self, position: int, raw, tally: Tally) -> _Seen | None:
        try:
            if isinstance(raw, RowError):
                raise raw
            seen = _Seen(position, read_entry(raw, f"row {position}", self.task))
        except RowError as problem:
            code = problem.code if problem.code in KINDS else "bad_row"
            tally.findings.add(code, position, problem.row, problem.reason)
            tally.bad_rows += 1
            return None
        notes = list(check_structure(raw, seen.row))
        if isinstance(seen.entry, Preference):
            notes += check_pair(seen.entry)
        notes += check_text(seen.text, self.control, self.bos)
        for code, detail in notes:
            tally.findings.add(code, position, seen.row.name, detail)
        return seen

    def _media(self, seen: _Seen, tally: Tally) -> None:
        """Look at a row's media; `seen.facts` has None for those that cannot be read."""
        for medium in seen.entry.media:
            tally.count("media", medium.kind)
            facts = self._inspected(medium, seen.row.folder)
            if isinstance(facts, MediaError):
                tally.findings.add(facts.code, seen.position, seen.row.name, str(facts))
                tally.bad_media += 1
                seen.facts.append(None)
                continue
            for code, detail in facts.notes:
                tally.findings.add(code, seen.position, seen.row.name, detail)
            tally.media[0].append(facts.key)
            tally.media[1].append(seen.position)
            seen.facts.append(facts)

    def _inspected(self, medium, folder: Path | None) -> Facts | MediaError:
        key = (medium.kind, medium.value, str(folder)) if isinstance(medium.value, str) else None
        if key in self.known:
            return self.known[key]
        try:
            facts = inspect(medium, folder, self.access, self.rate, self.max_seconds)
        except MediaError as problem:
            facts = problem
        if key is not None and len(self.known) < MAX_KNOWN_MEDIA and len(key[1]) < 1000:
            self.known[key] = facts
        return facts

    def _describe(self, seen: _Seen, raw, tally: Tally) -> None:
        """Count what a training row is made of."""
        if seen.position >= self.evaluation:
            return
        row = seen.row
        kinds = sorted({medium.kind for medium in seen.entry.media}) if row.media else ()
        tally.count("formats", format_of(raw))
        tally.count("modalities", "+".join(["text", *kinds]))
        tally.count("turns", str(len(row.messages) or 1))
        tally.counts["roles"].update([message["role"] for message in row.messages])
        if self.sampled is None or seen.position in self.sampled:
            tally.count("scripts", _script(seen.telling))
            tally.image_sizes += [known.size for known in seen.facts if known and known.size]
            tally.clip_seconds += [known.seconds for known in seen.facts if known and known.seconds]
        if isinstance(seen.entry, Preference):
            count_lengths(seen.entry, tally.pairs)
        elif row.messages and row.messages[-1]["role"] == "assistant":
            answer = "".join(texts_of(row.messages[-1]))
            if len(answer) <= LABEL_LENGTH and answer.strip() and "tool_calls" not in row.messages[-1]:
                tally.count("answers", "short")
                tally.labels[answer.strip()] += 1

    # -- tokens

    def _judge(self, seen: _Seen, tally: Tally) -> list[tuple[_Seen, Row]]:
        """Count a row as trained where that is plain without tokenizing it; else return what has to be measured."""
        row, sides = seen.row, seen.sides
        loss_on = self.tokens.collator.labeller.loss_on if self.tokens else "all-turns"
        trains = seen.whole and seen.position < self.evaluation and all(_trains(side, loss_on) for side in sides)
        if not self.tokens:
            tally.trained_rows += trains
            return []
        if missing := {medium.kind for medium in seen.entry.media} - self.tokens.collator.modalities:
            tally.findings.add("media_unsupported", seen.position, row.name, " and ".join(sorted(missing)))
            return []
        shapes = [self.tokens.shape(side) for side in sides]
        if refusal := next((shape.error for shape in shapes if shape and shape.error), None):
            self._refuse(seen, refusal, tally)
            return []
        if self._has_to_be_measured(seen, shapes):
            return [(seen, side) for side in sides]
        if inexact := sum(shape.inexact for shape in shapes):
            tally.findings.add("inexact_prompt", seen.position, row.name, str(inexact))
        tally.trained_rows += trains
        return []

    def _has_to_be_measured(self, seen: _Seen, shapes: list[Shape | None]) -> bool:
        if self.sampled is None or seen.position in self.sampled or None in shapes:
            return True
        limit = self.tokens.collator.max_length
        if limit is None:
            return False
        soft = sum(self.tokens.soft_tokens(known) for known in seen.facts if known)
        return max(shape.cost for shape in shapes) + soft + len(seen.text.encode()) > limit

    def _measure(self, waiting: list[tuple[_Seen, Row]], tally: Tally) -> None:
        if not waiting:
            return
        soft = [self._soft_tokens(seen, row) for seen, row in waiting]
        lengths = self.tokens.measure([row for _, row in waiting], soft)
        of_row: dict[int, list[Length | RowError]] = {}
        for (seen, _), length in zip(waiting, lengths, strict=True):
            of_row.setdefault(seen.position, []).append(length)
        for seen in {seen.position: seen for seen, _ in waiting}.values():
            found = of_row[seen.position]
            if refusal := next((length for length in found if isinstance(length, RowError)), None):
                self._refuse(seen, refusal, tally)
                continue
            tally.longest = max(tally.longest, *(length.tokens for length in found))
            for code, detail in self._told(found):
                tally.findings.add(code, seen.position, seen.row.name, detail)
            if seen.position < self.evaluation:
                tally.trained_rows += seen.whole and all(length.kept_trained for length in found)
                if self.sampled is None or seen.position in self.sampled:
                    tally.lengths += [(length.tokens, length.trained) for length in found]

    def _soft_tokens(self, seen: _Seen, row: Row) -> list[int | None] | None:
        """The soft tokens of a row's media; None for the rejected side of a pair, whose media may be others."""
        if row is not seen.row or not row.media:
            return None
        return [self.tokens.soft_tokens(known) if known else None for known in seen.facts[: len(row.media)]]

    def _told(self, found: list[Length]):
        limit = self.tokens.collator.max_length
        longest = max(length.tokens for length in found)
        if limit is not None and longest > limit:
            lost = max(length.trained - length.kept_trained for length in found)
            yield "over_max_len", f"{longest} tokens, {lost} trained ones are cut"
        if any(length.trained and not length.kept_trained for length in found):
            yield "cut_to_nothing", f"{longest} tokens"
        for code, count in (
            ("media_cut", sum(length.media_cut for length in found)),
            ("reasoning_dropped", sum(length.reasoning_dropped for length in found)),
            ("inexact_prompt", sum(length.inexact for length in found)),
        ):
            if count:
                yield code, str(count)
        if any(length.split for length in found):
            yield "split_tokens", ""

    def _refuse(self, seen: _Seen, problem: RowError, tally: Tally) -> None:
        code = problem.code if problem.code in KINDS else "template_refuses"
        tally.findings.add(code, seen.position, seen.row.name, problem.reason)


class _Seen:
    """A row that could be read, on its way through the checks."""

    def __init__(self, position: int, entry: Row | Preference):
        self.position, self.entry, self.facts = position, entry, []
        self.sides = [entry] if isinstance(entry, Row) else [entry.chosen, entry.rejected]
        self.row = self.sides[0]  # of a pair the chosen one, which has the prompt and its media
        self.telling = "\n".join(_texts(entry))
        more = [text for m in self.row.messages if m["role"] == "system" for text in texts_of(m)]
        more += [_json(m.get(key)) for m in self.row.messages if len(m) > 2 for key in ("tool_calls", "reasoning")]
        self.text = "\n".join([self.telling, *more, _json(self.row.tools)]) if more or self.row.tools else self.telling

    @property
    def whole(self) -> bool:
        """Whether all its media can be read."""
        return None not in self.facts


def read_entry(raw, name: str, task: str = "any") -> Row | Preference:
    """Read a row for a task; for "any" as what it is. Raises RowError."""
    paired = task != "sft" and (task != "any" or (isinstance(raw, Mapping) and format_of(raw) == "preference"))
    return read_preference(raw, name) if paired else read_row(raw, name)


def main_row(entry: Row | Preference) -> Row:
    """The row itself; of a pair the chosen one, which has the prompt and its media."""
    return entry if isinstance(entry, Row) else entry.chosen


def prompt_of_entry(rows, position: int, task: str) -> str:
    """The text before a row's last answer; empty where it cannot be read."""
    try:
        entry = read_entry(rows[position], "", task)
    except RowError:
        return ""
    messages = main_row(entry).messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = messages[: answers[-1]] if answers else messages
    return "\n".join(text for message in prompt if message["role"] != "system" for text in texts_of(message))


def texts_of_entry(rows, position: int, task: str) -> str:
    """The text that tells a row from others; empty where it cannot be read."""
    try:
        return "\n".join(_texts(read_entry(rows[position], "", task)))
    except RowError:
        return ""


def identify(entry: Row | Preference, media_keys: list[int | None]) -> tuple[int, int, int]:
    """Hashes of a row, of its prompt (what is before the last answer; 0 without one), and of its media (0 without any).

    Args:
        media_keys: a hash of each medium's content; None for one that cannot be read, and may be any.
    """
    row = main_row(entry)
    kind = "" if row.trained else "context"
    if row.text is not None:
        return duplicates.keys_of(["text", kind, row.text])[0], 0, 0
    media = ",".join(row.name if key is None else str(key) for key in media_keys)
    if isinstance(entry, Preference):
        asked = entry.shared
        rest = ["rejected", str(entry.margin), *_spelled(entry.rejected.messages[asked:])]
    else:
        answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        asked, rest = answers[-1] if answers else len(row.messages), []
    spelled = _spelled(row.messages)
    prompt, whole = duplicates.keys_of([media, *spelled[:asked]], [*spelled[asked:], kind, _json(row.tools), *rest])
    return whole, prompt if asked else 0, duplicates.keys_of([media])[0] if media else 0


def _texts(entry: Row | Preference) -> list[str]:
    """The texts that tell rows apart: not the system message, which many share."""
    row = main_row(entry)
    if row.text is not None:
        return [row.text]
    messages = row.messages if isinstance(entry, Row) else row.messages + entry.rejected.messages[entry.shared :]
    return [text for message in messages if message["role"] != "system" for text in texts_of(message)]


def _spelled(messages: list[dict]) -> list[str]:
    """Messages as strings that differ where the messages do."""
    spelled = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else _json(content)
        if len(message) > 2:
            text += _json({key: value for key, value in message.items() if key not in ("role", "content")})
        spelled.append(f"{message['role']}\x1f{text}")
    return spelled


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str) if value else ""


def _trains(row: Row, loss_on: str) -> bool:
    """Whether a row that is not cut has anything trained."""
    if not row.trained or row.text is not None:
        return row.trained
    answers = [message.get("train", True) for message in row.messages if message["role"] == "assistant"]
    return any(answers[-1:] if loss_on == "last-turn" else answers)


def _script(text: str) -> str:
    """The script that most letters of a text's beginning are of, such as Latin; "none" for a text without letters."""
    start = text[:60]
    if start.isascii():
        return "Latin" if any(map(str.isalpha, start)) else "none"
    letters = Counter(unicodedata.name(c, "other").split()[0] for c in start if c.isalpha())
    return letters.most_common(1)[0][0].capitalize() if letters else "none"
