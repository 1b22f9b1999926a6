"""Rows to a batch: the one collator behind supervised fine-tuning, and every check of a data set.

It reads each row, scans the batch for images and audio, renders the chat template, decides the labels, opens the media,
expands their slots, cuts what is too long, pads, and fills the gaps with zero placeholders, in that order.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import families
from .batch import Batch
from .errors import MediaError, RowError
from .features import clip_features, clip_tokens, image_features, image_tokens, media_text
from .gaps import place_clips, place_images
from .labels import IGNORE, Labelled, Labeller
from .media import MediaAccess, open_audio, open_image
from .media_headers import audio_seconds, image_size
from .rendering import Rendered, Renderer
from .rows import Row, read_row
from .slots import Media, media_in
from .stats import Stats

CHOICES = {
    "task": ("sft",),
    "loss_on": ("all-turns", "last-turn"),
    "thinking": ("auto", "on", "off"),
    "on_bad_media": ("placeholder", "skip", "error"),
    "long_audio": ("cut", "refuse"),
    "truncation": ("cut", "error"),
    "placeholders": ("rows", "needed", "always"),
}


@dataclass
class _Slot:
    """One image or clip of a row, on its way to the batch."""

    kind: str
    medium: Any = None  # PIL image or float32 samples; None when it was bad
    tokens: int | None = None  # its soft tokens; None when it was bad
    line: int = -1  # where it stands in the tensors
    run: tuple[int, int] = (0, 0)  # where its tokens stand in the row
    kept: bool = True


@dataclass
class _Item:
    """A row on its way to the batch. `tokens` [3, T] holds its ids, labels and token type ids."""

    row: Row
    slots: list[_Slot] = field(default_factory=list)
    rendered: Rendered | None = None
    tokens: np.ndarray | None = None

    @property
    def bad(self) -> bool:
        """Whether a medium could neither be opened nor measured."""
        return any(slot.medium is None and slot.tokens is None for slot in self.slots)

    def cut(self, max_length: int) -> int:
        """Where a cut at `max_length` falls: a medium that it would meet goes whole."""
        met = (start for start, end in (slot.run for slot in self.slots) if start < max_length < end)
        return min([max_length, self.tokens.shape[1], *met])

    def lines(self, kind: str) -> list[int | None]:
        """Where the row's media of a kind stand in the tensors; None for those that could not be read."""
        slots = [slot for slot in self.slots if slot.kind == kind and slot.kept]
        return [None if slot.medium is None else slot.line for slot in slots]


@dataclass(frozen=True)
class Measured:
    """What the collator makes of a row before the cut. `tokens` [3, T] holds ids, labels and token type ids; the first
    `kept` columns are within max_length; `media_cut` counts the media that would go."""

    rendered: Rendered
    tokens: np.ndarray
    kept: int
    media_cut: int
    reasoning_dropped: int
    inexact_turns: int


class MultimodalCollator:
    """Collates rows of text, images and audio for a Gemma model.

    Args:
        processor: a Gemma processor, or the bare tokenizer of a text-only Gemma.
        max_length: most tokens in a row, media tokens included; None for no limit.
        task: "sft".
        loss_on: "all-turns" trains every model turn, "last-turn" the last one only.
        train_reasoning: train the reasoning that the template renders.
        thinking: "auto" sets the template's thinking switch for rows whose reasoning is rendered; "on", "off".
        on_bad_media: "placeholder" keeps the row as untrained context, "skip" drops it, "error" stops.
        long_audio: clips longer than the model hears are "cut", or "refuse"d as bad media.
        truncation: rows longer than max_length are "cut" at the end, or an "error".
        placeholders: zero media in the gaps, "rows", "needed" or "always" (see `gaps.place_clips`).
        pad_to_multiple_of: round the batch's length up.
        modalities: what the model takes, a subset of {"image", "audio"}; the processor's by default.
        media_root, allow_remote_media: what may be opened (see `media.MediaAccess`).

    Example:
        collator = MultimodalCollator(AutoProcessor.from_pretrained("google/gemma-4-E2B-it"), max_length=2048)
        batch = collator([{"prompt": "Name a fruit", "completion": "Pear"}])
        loss = model(**batch).loss

    Calling it returns a `Batch`: `input_ids`, `attention_mask`, `labels` [B, T] int64; the family's token type ids
    [B, T]; with images `pixel_values` and what else the image processor makes; with audio `input_features`
    [clips, frames, F] and `input_features_mask` [clips, frames]. Rows are left as they are.

    Raises:
        RowError: a row asks for what the model has no tower for; a bad medium with on_bad_media="error"; a row that is
            too long with truncation="error". Rows that cannot be read are left out, counted and named instead.
        ValueError: an option has no such value.
        CannotLoad: the processor is of no supported family, or its chat template is not its family's.
    """

    def __init__(
        self,
        processor,
        max_length: int | None = 2048,
        *,
        task: str = "sft",
        loss_on: str = "all-turns",
        train_reasoning: bool = True,
        thinking: str = "auto",
        on_bad_media: str = "placeholder",
        long_audio: str = "cut",
        truncation: str = "cut",
        placeholders: str = "rows",
        pad_to_multiple_of: int | None = None,
        modalities: frozenset[str] | None = None,
        media_root: str | Path | None = None,
        allow_remote_media: bool = False,
    ):
        options = {key: value for key, value in locals().items() if key in CHOICES}
        for name, value in options.items():
            if value not in CHOICES[name]:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(CHOICES[name])}")
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1")
        self.processor, self.tokenizer = processor, families.tokenizer_of(processor)
        self.family = families.family_of_processor(processor)
        # A text-only model has a bare tokenizer, and takes no token type ids.
        self.type_ids_key = self.family.type_ids_key if self.tokenizer is not processor else None
        soft = {kind: getattr(self.tokenizer, f"{kind}_token_id", None) for kind in self.family.slots}
        self.soft_tokens: dict[str, int] = {kind: token for kind, token in soft.items() if token is not None}
        self.max_length, self.pad_to_multiple_of = max_length, pad_to_multiple_of
        self.on_bad_media, self.long_audio = on_bad_media, long_audio
        self.truncation, self.placeholders = truncation, placeholders
        self.modalities = frozenset(families.modalities(processor) if modalities is None else modalities)
        self.access = MediaAccess(Path(media_root) if media_root else None, allow_remote_media)
        self.renderer = Renderer(processor, self.family, thinking)
        self.labeller = Labeller(self.renderer, loss_on, train_reasoning)
        self.stats = Stats()

    def __call__(self, rows: list[dict]) -> Batch:
        if torch.utils.data.get_worker_info() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads did not survive the fork
        counts, problems = Counter(), []
        items = self._read(rows, counts, problems)
        items = self._open_media(items, counts, problems)
        tensors = self._media_tensors(items)
        items = self._tokenize(items, counts, problems)
        for item in items:
            self._truncate(item, counts)
        left_out = not items
        items = items or [self._empty_item()]
        batch = Batch(self._assemble(items, tensors, counts), counts, problems)
        if not left_out:
            self._count(items, batch)
        if torch.utils.data.get_worker_info() is None:
            self.stats.add(batch.counts)
        else:
            batch.count_for = self.stats.key
        return batch

    def lengths(self, rows: list[dict]) -> list[int]:
        """How many tokens each row will take, its media worked out from their headers, without decoding any.

        A row that cannot be read counts as one token, a medium that cannot be read as none; a generation prompt's tail
        is left out, and a medium that the cut meets counts up to the cut.
        """
        read: list[tuple[Rendered, list[_Slot]] | None] = []
        for position, raw in enumerate(rows):
            try:
                row = read_row(raw, f"row {position}")
                slots = [_Slot(m.kind, tokens=self._tokens_from_header(row, m)) for m in row.media]
                read.append((self.renderer.fill(self._render(row, slots), self._media_texts(slots)), slots))
            except RowError:
                read.append(None)
        encoded = iter(self.renderer.encode([found[0] for found in read if found]))
        media = [sum(slot.tokens - 1 for slot in found[1] if slot.tokens is not None) if found else 0 for found in read]
        lengths = [len(next(encoded)) + more if found else 1 for found, more in zip(read, media, strict=True)]
        return [length if self.max_length is None else min(length, self.max_length) for length in lengths]

    def measure(self, rows: list[Row], tokens: list | None = None) -> list[Measured | RowError]:
        """Render, tokenize and label rows without opening their media, which are worked out from their headers.

        Args:
            tokens: for each row the soft tokens of its media, a list with None for one that cannot be read; None where
                they are not known.

        Returns, for each row, what it becomes, or why the chat template refuses it. A row with a medium that cannot be
        measured trains nothing.
        """
        items = []
        for row, known in zip(rows, tokens or [None] * len(rows), strict=True):
            known = known or [self._tokens_from_header(row, medium) for medium in row.media]
            items.append(_Item(row, [_Slot(m.kind, tokens=n) for m, n in zip(row.media, known, strict=True)]))
        measured: list[Measured | RowError] = []
        for item, labelled in zip(items, self._labelled(items), strict=True):
            if isinstance(labelled, RowError):
                measured.append(labelled)
                continue
            kept = item.tokens.shape[1] if self.max_length is None else item.cut(self.max_length)
            gone = sum(slot.run[1] > kept for slot in item.slots)
            found = labelled.reasoning_dropped, labelled.inexact_turns
            measured.append(Measured(item.rendered, item.tokens, kept, gone, *found))
        return measured

    def _tokens_from_header(self, row: Row, medium: Media) -> int | None:
        try:
            if medium.kind not in self.modalities:
                return None
            if medium.kind == "image":
                size = image_size(medium.value, row.folder, self.access)
                return image_tokens(self.processor, self.family, *size)
            seconds = audio_seconds(medium.value, row.folder, self.access)
            rate = self.processor.feature_extractor.sampling_rate
            samples = math.ceil(round(seconds * rate, 3))  # resampling rounds up
            return clip_tokens(self.processor, self.family, samples)
        except (MediaError, ValueError):
            return None

    # -- rows and media

    def _read(self, rows, counts, problems) -> list[_Item]:
        items = []
        for position, raw in enumerate(rows):
            with _leaving_out_bad_rows(counts, problems):
                row = read_row(raw, f"row {position}")
                items.append(_Item(row, [_Slot(medium.kind) for medium in row.media]))
        for item in items:
            for medium in item.row.media:
                self.check_modality(medium.kind, item.row.name)
        return items

    def check_modality(self, kind: str, row: str) -> None:
        """Raise RowError where a row brings a kind of medium that the model has no tower for."""
        if kind not in self.modalities:
            takes = " and ".join(["text", *sorted(self.modalities)])
            told = f"{kind} in the row, but this {self.family.name} model takes {takes} only"
            raise RowError(row, told, "media_unsupported")

    def _open_media(self, items, counts, problems) -> list[_Item]:
        kept = []
        for item in items:
            for slot, medium in zip(item.slots, item.row.media, strict=True):
                counts["images" if slot.kind == "image" else "clips"] += 1
                try:
                    slot.medium = self._open(item.row, medium, counts, problems)
                except MediaError as problem:
                    if self.on_bad_media == "error":
                        raise RowError(item.row.name, str(problem), problem.code) from None
                    counts["bad_media"] += 1
                    problems.append((item.row.name, str(problem)))
            if item.bad and self.on_bad_media == "skip":
                counts["skipped_rows"] += 1
            else:
                kept.append(item)
        return kept

    def _open(self, row, medium, counts, problems):
        if medium.kind == "image":
            return open_image(medium.value, row.folder, self.access)
        limit, rate = self.family.max_audio_seconds, self.processor.feature_extractor.sampling_rate
        samples, seconds = open_audio(medium.value, rate, limit, row.folder, self.access)
        if seconds > limit:
            counts["long_audio"] += 1
            if self.long_audio == "refuse":
                raise MediaError(f"audio of {seconds:.1f} s, longer than the {limit:.0f} s the model hears")
            problems.append((row.name, f"audio of {seconds:.1f} s was cut to the {limit:.0f} s the model hears"))
        return samples

    def _media_tensors(self, items) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of each kind of medium that the batch has; counts the soft tokens of each slot."""
        tensors = {}
        for kind, make in (("image", image_features), ("audio", clip_features)):
            slots = [s for item in items for s in item.slots if s.kind == kind and s.medium is not None]
            if slots:
                tensors[kind], tokens = make(self.processor, self.family, [slot.medium for slot in slots])
                for line, (slot, count) in enumerate(zip(slots, tokens, strict=True)):
                    slot.tokens, slot.line = count, line
        return tensors

    # -- tokens and labels

    def _tokenize(self, items, counts, problems) -> list[_Item]:
        """Render, tokenize and label the rows, and leave out those that the chat template refuses."""
        kept = []
        for item, labelled in zip(items, self._labelled(items), strict=True):
            with _leaving_out_bad_rows(counts, problems):
                if isinstance(labelled, RowError):
                    raise labelled
                counts["reasoning_dropped"] += labelled.reasoning_dropped
                counts["inexact_turns"] += labelled.inexact_turns
                kept.append(item)
        return kept

    def _labelled(self, items: list[_Item]) -> Iterator[Labelled | RowError]:
        """The labels of each item, whose `tokens` are set; an error in the place of a row that the template refuses."""
        errors = {}
        for position, item in enumerate(items):
            try:
                item.rendered = self._render(item.row, item.slots)
            except RowError as problem:
                errors[position] = problem
        shown = [item for item in items if item.rendered is not None]
        filled = [self.renderer.fill(item.rendered, self._media_texts(item.slots)) for item in shown]
        encoded = iter(self.renderer.encode(filled))
        for position, item in enumerate(items):
            if position in errors:
                yield errors[position]
                continue
            try:
                labelled = self.labeller.label(item.row, item.rendered, next(encoded))
                self._expand(item, labelled)
                yield labelled
            except RowError as problem:
                yield problem

    def _render(self, row: Row, slots: list[_Slot]) -> Rendered:
        """Render a row whose media stand in the template's text in the order of the row."""
        holders = {message["role"] for message in row.messages if media_in(message)} if slots else set()
        if {"assistant", "tool"} <= holders:
            told = "media both in an answer and in a tool result, whose order templates may change"
            raise RowError(row.name, told, "template_refuses")
        rendered = self.renderer.render(row)
        if (found := self.renderer.slots_in(rendered)) != [slot.kind for slot in slots]:
            raise RowError(
                row.name,
                f"the chat template shows {len(found)} of the row's {len(slots)} images and clips "
                "(it has no place for them in this role)",
                "template_refuses",
            )
        return rendered

    def _media_texts(self, slots: list[_Slot]) -> list[str]:
        return ["" if slot.tokens is None else media_text(self.processor, self.family, slot.kind) for slot in slots]

    def _expand(self, item: _Item, labelled: Labelled) -> None:
        """Repeat each run's one soft token as often as the medium has soft tokens."""
        ids = np.asarray(labelled.ids)
        if not item.slots:
            item.tokens = np.stack([ids, np.where(labelled.trained, ids, IGNORE), np.zeros_like(ids)])
            return
        readable = [slot for slot in item.slots if slot.tokens is not None]
        times, types = np.ones_like(ids), np.zeros_like(ids)
        trained = labelled.trained & (not item.bad)
        at = np.flatnonzero(np.isin(ids, list(self.soft_tokens.values())))
        times[at] = [slot.tokens for slot in readable]
        for kind, token in self.soft_tokens.items():
            types[ids == token] = families.TYPE_IDS[kind]
        for beside in (-1, 0, 1):  # the begin and end token stand beside the soft one
            trained[at + beside] = False
        ends = np.cumsum(times)
        for slot, position in zip(readable, at.tolist(), strict=True):
            slot.run = int(ends[position - 2]), int(ends[position + 1])
        item.tokens = np.repeat(np.stack([ids, np.where(trained, ids, IGNORE), types]), times, axis=1)

    def _truncate(self, item: _Item, counts) -> None:
        """Cut the tail at max_length; a medium that the cut meets goes whole."""
        length = item.tokens.shape[1]
        if self.max_length is None or length <= self.max_length:
            return
        if self.truncation == "error":
            raise RowError(item.row.name, f"{length} tokens, over the limit of {self.max_length}", "over_max_len")
        cut = item.cut(self.max_length)
        for slot in item.slots:
            slot.kept = slot.run[1] <= cut
        trained = item.tokens[1] != IGNORE
        counts["truncated"] += 1
        counts["cut_to_nothing"] += bool(trained.any() and not trained[:cut].any())
        item.tokens = item.tokens[:, :cut]

    def _empty_item(self) -> _Item:
        """What stands for a batch whose rows were all left out: one BOS, untrained."""
        return _Item(Row("none"), tokens=np.array([[self.tokenizer.bos_token_id], [IGNORE], [0]]))

    # -- the batch

    def _assemble(self, items, tensors, counts) -> dict[str, torch.Tensor]:
        media, behind = self._place_media(items, tensors, counts)
        lengths = [item.tokens.shape[1] for item in items]
        width = max(length + count for length, count in zip(lengths, behind, strict=True))
        if self.pad_to_multiple_of:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        padded = np.zeros((4, len(items), width), np.int64)  # the mask, and the three lines of tokens
        padded[1:3] = np.array([self.tokenizer.pad_token_id, IGNORE])[:, None, None]
        for line, (item, length, count) in enumerate(zip(items, lengths, behind, strict=True)):
            padded[0, line, :length] = 1
            padded[1:, line, :length] = item.tokens
            # The soft tokens of zero images stand in the padding, where no token attends to them.
            padded[1, line, length : length + count] = self.soft_tokens["image"] if count else 0
        keys = ["attention_mask", "input_ids", "labels", *([self.type_ids_key] if self.type_ids_key else [])]
        return {key: torch.from_numpy(padded[i].copy()) for i, key in enumerate(keys)} | media

    def _place_media(self, items, tensors, counts) -> tuple[dict, list[int]]:
        """The media tensors in batch order with their placeholders, and how many soft tokens of zero images stand
        behind each row."""
        behind, media = [0] * len(items), {}
        lines = {kind: [item.lines(kind) for item in items] for kind in self.modalities}
        if "image" in self.modalities:
            shortest = min(range(len(items)), key=lambda index: items[index].tokens.shape[1])
            images, behind, zeros = place_images(
                lines["image"], tensors.get("image"), self.processor, self.family, self.placeholders, shortest
            )
            media |= images
            counts["placeholders"] += zeros
        if "audio" in self.modalities:
            clips, zeros = place_clips(
                lines["audio"], tensors.get("audio"), self.processor, self.family, self.placeholders
            )
            media |= clips
            counts["placeholders"] += zeros
        return media, behind

    def _count(self, items, batch: Batch) -> None:
        trained = (batch["labels"] != IGNORE).sum(1)
        tokens = int(batch["attention_mask"].sum())
        batch.counts |= {
            "rows": len(items),
            "tokens": tokens,
            "trained_tokens": int(trained.sum()),
            "padding": batch["input_ids"].numel() - tokens,
            "untrained_rows": int((trained == 0).sum()),
        }


@contextlib.contextmanager
def _leaving_out_bad_rows(counts, problems):
    """Count and name a row that cannot be read or rendered, and go on without it."""
    try:
        yield
    except RowError as problem:
        counts["bad_rows"] += 1
        problems.append((problem.row, problem.reason))
