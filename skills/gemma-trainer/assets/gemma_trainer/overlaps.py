"""Prompts that need not be asked, since they are asked already, or must not be, since they are what a model will be
evaluated on. Found before a request is paid for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from . import duplicates
from .answer_checks import normalize
from .asked import Asked, normalized, text_of
from .duplicates import COMMON_ROWS, COMMON_SHARE

COMMON_SAMPLE = 1_000  # prompts, about, that boilerplate is looked for in
GRAM = 13  # words: as in Brown et al., Language Models are Few-Shot Learners (2020), appendix C


@dataclass(frozen=True)
class Overlap:
    """Why a prompt is left out: `code` for counting, and the row that it overlaps with."""

    code: str
    other: str

    REASONS = {
        "duplicate": "asks the same as",
        "near_duplicate": "asks (but for --keep-similar) nearly the same as",
        "in_training_data": "asks the same as a row of --against,",
        "near_training_data": "asks nearly the same as a row of --against,",
        "in_eval_data": "asks the same as a row of --eval-file,",
        "near_eval_data": "asks nearly the same as a row of --eval-file,",
        "shares_words_with_eval": f"shares {GRAM} words in a row with one of --eval-file,",
        "shares_media_with_eval": "shows the same picture or clip as a row of --eval-file,",
    }

    @property
    def reason(self) -> str:
        return f"{self.REASONS[self.code]} {self.other}"


def find_overlaps(
    prompts: list[Asked], against: list[Asked] = (), held: list[Asked] = (), near: bool = True
) -> dict[int, Overlap]:
    """Which prompts, by their position, overlap with others before them or with other data.

    Args:
        against: rows that a model is trained on anyway.
        held: rows that it will be evaluated on: here a shared run of 13 words, or a shared medium, is enough.
        near: whether prompts that are nearly the same as others count, by their 8-byte windows (see `duplicates.py`).
    """
    found = _leaks(prompts, held) | _same(prompts, against, held)
    for position, overlap in _near(prompts, against, held, found).items() if near or held else ():
        if near or overlap.code == "near_eval_data":
            found.setdefault(position, overlap)
    return found


def _same(prompts, against, held) -> dict[int, Overlap]:
    found, seen = {}, {}
    known = {"in_eval_data": _by_text(held), "in_training_data": _by_text(against)}
    for position, asked in enumerate(prompts):
        # Other words of the system, or other tools, make another prompt.
        whole = normalized(text_of(asked.row.messages)), asked.media, str(asked.row.tools)
        code = next((code for code, texts in known.items() if _text_key(asked) in texts), None)
        if code:
            found[position] = Overlap(code, known[code][_text_key(asked)])
        elif whole in seen:
            found[position] = Overlap("duplicate", seen[whole])
        else:
            seen[whole] = asked.name
    return found


def _text_key(asked: Asked) -> tuple:
    return normalized(asked.text), asked.media


def _by_text(rows: Iterable[Asked]) -> dict[tuple, str]:
    return {_text_key(asked): asked.name for asked in rows}


# ---- what must not leak


def _leaks(prompts: list[Asked], held: list[Asked]) -> dict[int, Overlap]:
    """Prompts that share a medium, or 13 words on end, with a row that is held back."""
    if not held:
        return {}
    media = {key: asked.name for asked in held for key in asked.media}
    held_grams = {gram: asked.name for asked in held for gram in grams(f"{asked.text}\n{asked.expected or ''}")}
    shared: dict[int, list[int]] = defaultdict(list)
    for position, asked in enumerate(prompts):
        shared[position] = [gram for gram in set(grams(asked.text)) if gram in held_grams]
    # What many prompts have in common is their template.
    counts = Counter(gram for some in shared.values() for gram in some)
    most = max(COMMON_ROWS, COMMON_SHARE * len(prompts))
    found = {}
    for position, asked in enumerate(prompts):
        if key := next((key for key in asked.media if key in media), None):
            found[position] = Overlap("shares_media_with_eval", media[key])
        elif gram := next((gram for gram in shared[position] if counts[gram] <= most), None):
            found[position] = Overlap("shares_words_with_eval", held_grams[gram])
    return found


def grams(text: str) -> list[int]:
    """Hashes of a text's runs of 13 words, without case and punctuation; none of a shorter text."""
    words = normalize(text).split()
    runs = (" ".join(words[at : at + GRAM]) for at in range(len(words) - GRAM + 1))
    return [xxhash.xxh3_64_intdigest(run.encode("utf-8", "replace")) for run in runs]


# ---- what is nearly the same


def _near(prompts, against, held, left_out: dict) -> dict[int, Overlap]:
    others = [(asked, "near_eval_data") for asked in held] + [(asked, "near_training_data") for asked in against]
    entries = [asked for asked, _ in others] + prompts
    texts = [normalized(asked.text) for asked in entries]
    own = texts[len(others) :]
    common = duplicates.common_windows(own[:: max(1, len(own) // COMMON_SAMPLE)])
    table = duplicates.Table()
    sketches, _ = duplicates.sketches(texts, common)
    records = np.zeros(len(entries), duplicates.ROW)
    records["row"] = [duplicates.keys_of([str(at), asked.key])[0] for at, asked in enumerate(entries)]
    media = np.array([duplicates.keys_of([str(a.media)])[0] if a.media else 0 for a in entries], np.uint64)
    records["text"] = np.where(sketches != 0, sketches ^ media[:, None], 0)
    table.append(records)
    found, first = {}, len(others)
    for one, two in sorted(map(sorted, table.near().tolist()), key=lambda pair: pair[1]):
        position = two - first
        if position < 0 or position in left_out or position in found:
            continue
        if one < first:
            found[position] = Overlap(others[one][1], entries[one].name)
        elif one - first not in left_out and one - first not in found:
            found[position] = Overlap("near_duplicate", entries[one].name)
    return found
