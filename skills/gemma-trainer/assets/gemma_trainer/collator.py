"""Rows to a batch: the one collator behind supervised fine-tuning, preferences, and every check of a data set.

It reads each row, scans the batch for images and audio, renders the chat template, decides the labels, opens the media,
expands their slots, cuts what is too long, pads, and fills the gaps with zero placeholders, in that order.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import families
from .batch import Batch
from .errors import MediaError, RowError
from .features import clip_features, clip_tokens, image_features, image_tokens, media_text
from .gaps import place_clips, place_images
from .items import Item, Shown, Slot
from .labels import IGNORE, Labelled, Labeller
from .media import MediaAccess, open_audio, open_image
from .media_headers import audio_seconds, image_size
from .pairs import pair_items, shorten
from .preferences import read_preference
from .rendering import Rendered, Renderer
from .rows import Row, read_row
from .slots import Media, media_in
from .stats import Stats

CHOICES = {
    "task": ("sft", "preference"),
    "loss_on": ("all-turns", "last-turn"),
    "thinking": ("auto", "on", "off"),
    "on_bad_media": ("placeholder", "skip", "error"),
    "long_audio": ("cut", "refuse"),
    "truncation": ("cut", "error"),
    "placeholders": ("rows", "needed", "always"),
}


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
        task: "sft"; "preference" takes pairs (see `preferences.read_preference`).
        loss_on: "all-turns" trains every model turn, "last-turn" the last one only.
        train_reasoning: train the reasoning that the template renders.
        thinking: "auto" sets the template's thinking switch for rows whose reasoning is rendered; "on", "off".
        on_bad_media: "placeholder" keeps the row as untrained context, "skip" drops it, "error" stops; a pair, which
            is of no use as context, is dropped either way.
        long_audio: clips longer than the model hears are "cut", or "refuse"d as bad media.
        truncation: rows longer than max_length are "cut" at the end (pairs as `pairs.shorten` does), or an "error".
        placeholders: zero media in the gaps, "rows", "needed" or "always" (see `gaps.place_clips`).
        always: the kinds of media that "always" puts into every batch; all that the model takes by default.
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

    For pairs there are 2B rows, the chosen ones first, with `completion_mask` [2B, T] int64 instead of `labels`, 1
    where an answer's tokens are; and `margin` [B] float32 where a row has one, 0 for those that have none. A pair with
    nothing trained on a side is left out; of a batch without any, two untrained rows are left.

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
        always: frozenset[str] | None = None,
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
        self.task, self.max_length, self.pad_to_multiple_of = task, max_length, pad_to_multiple_of
        self.on_bad_media, self.long_audio = on_bad_media, long_audio
        self.truncation, self.placeholders = truncation, placeholders
        self.modalities = frozenset(families.modalities(processor) if modalities is None else modalities)
        self.always = self.modalities if always is None else frozenset(always)
        self.access = MediaAccess(Path(media_root) if media_root else None, allow_remote_media)
        self.renderer = Renderer(processor, self.family, thinking)
        self.labeller = Labeller(self.renderer, loss_on, train_reasoning)
        self.stats = Stats()

    def __call__(self, rows: list[dict]) -> Batch:
        if torch.utils.data.get_worker_info() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads did not survive the fork
        counts, problems = Counter(), []
        groups = self._read(rows, counts, problems)  # of one item each, or of both sides of a pair
        groups = self._open_media(groups, counts, problems)
        media = self._media_tensors(groups)
        groups = self._tokenize(groups, counts, problems)
        groups = [group for group in groups if self._fits(group, counts)]
        sides = zip(*groups, strict=True) if groups else [[self._empty_item()]] * (2 if self.paired else 1)
        names = [group[0].row.name for group in groups]
        tensors = self._assemble([item for side in sides for item in side], media, counts)
        batch = Batch(tensors, counts, problems, names)
        if self.paired:
            self._add_margins(groups, batch)
        if groups:
            self._count(len(groups), batch)
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
        shown: list[Rendered] = []
        media: list[list[int]] = []  # for each row, the soft tokens beyond the first of the media of its sides
        for position, raw in enumerate(rows):
            media.append([])
            with contextlib.suppress(RowError):
                items = self._items(raw, f"row {position}")
                for row, medium, given in _media_of(items):
                    medium.tokens = self._tokens_from_header(row, given)
                for item in items:
                    self._show(item, None if item is items[0] else items[0])
                for item in items:
                    shown.append(self.renderer.fill(item.rendered, self._media_texts(item.slots)))
                    counts = (slot.medium.tokens for slot in item.slots)
                    media[-1].append(sum(count - 1 for count in counts if count is not None))
        encoded = iter(self.renderer.encode(shown))
        lengths = [max([len(next(encoded)) + more for more in sides], default=1) for sides in media]
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
            items.append(Item(row, [Slot(Shown(m.kind, tokens=n)) for m, n in zip(row.media, known, strict=True)]))
        measured: list[Measured | RowError] = []
        for item, labelled in zip(items, self._labelled(items), strict=True):
            if isinstance(labelled, RowError):
                measured.append(labelled)
                continue
            kept = item.tokens.shape[1] if self.max_length is None else item.cut_at(self.max_length)
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

    @property
    def paired(self) -> bool:
        return self.task == "preference"

    def _items(self, raw, name: str) -> tuple[Item, ...]:
        """What a row is read as: one item, or both sides of a pair."""
        if self.paired:
            return pair_items(read_preference(raw, name))
        row = read_row(raw, name)
        return (Item(row, [Slot(Shown(medium.kind)) for medium in row.media]),)

    def _read(self, rows, counts, problems) -> list[tuple[Item, ...]]:
        groups = []
        for position, raw in enumerate(rows):
            with _leaving_out_bad_rows(counts, problems):
                groups.append(self._items(raw, f"row {position}"))
        for item in itertools.chain(*groups):
            for medium in item.row.media:
                self.check_modality(medium.kind, item.row.name)
        return groups

    def check_modality(self, kind: str, row: str) -> None:
        """Raise RowError where a row brings a kind of medium that the model has no tower for."""
        if kind not in self.modalities:
            takes = " and ".join(["text", *sorted(self.modalities)])
            told = f"{kind} in the row, but this {self.family.name} model takes {takes} only"
            raise RowError(row, told, "media_unsupported")

    def _open_media(self, groups, counts, problems) -> list[tuple[Item, ...]]:
        kept = []
        for group in groups:
            for row, shown, medium in _media_of(group):
                counts["images" if shown.kind == "image" else "clips"] += 1
                try:
                    shown.content = self._open(row, medium, counts, problems)
                except MediaError as problem:
                    if self.on_bad_media == "error":
                        raise RowError(row.name, str(problem), problem.code) from None
                    counts["bad_media"] += 1
                    problems.append((row.name, str(problem)))
            if any(item.bad for item in group) and (self.paired or self.on_bad_media == "skip"):
                counts["skipped_rows"] += 1
            else:
                kept.append(group)
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

    def _media_tensors(self, groups) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of each kind of medium that the batch has; counts the soft tokens of each medium."""
        tensors = {}
        for kind, make in (("image", image_features), ("audio", clip_features)):
            all_shown = (shown for group in groups for _, shown, _ in _media_of(group))
            media = [shown for shown in all_shown if shown.kind == kind and shown.content is not None]
            if media:
                tensors[kind], tokens = make(self.processor, self.family, [shown.content for shown in media])
                for line, (shown, count) in enumerate(zip(media, tokens, strict=True)):
                    shown.tokens, shown.line = count, line
        return tensors

    # -- tokens and labels

    def _tokenize(self, groups, counts, problems) -> list[tuple[Item, ...]]:
        """Render, tokenize and label the rows, and leave out those that the chat template refuses."""
        kept, results = [], self._labelled(list(itertools.chain(*groups)))
        for group in groups:
            found = [next(results) for _ in group]
            with _leaving_out_bad_rows(counts, problems):
                if refused := [labelled for labelled in found if isinstance(labelled, RowError)]:
                    raise refused[0]
                counts["reasoning_dropped"] += sum(labelled.reasoning_dropped for labelled in found)
                counts["inexact_turns"] += sum(labelled.inexact_turns for labelled in found)
                kept.append(group)
        return kept

    def _labelled(self, items: list[Item]) -> Iterator[Labelled | RowError]:
        """The labels of each item, whose `tokens` are set; an error in the place of a row that the template refuses.

        Of pairs both sides come one after the other.
        """
        errors = {}
        for position, item in enumerate(items):
            try:
                self._show(item, items[position - 1] if self.paired and position % 2 else None)
            except RowError as problem:
                errors[position] = problem
        shown = [item for position, item in enumerate(items) if position not in errors]
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

    def _show(self, item: Item, chosen: Item | None) -> None:
        """Render an item; where it or the chosen side of its pair is shown with thinking on, both are."""
        item.rendered = self._render(item.row, item.slots)
        if chosen and chosen.rendered and chosen.rendered.thinking != item.rendered.thinking:
            for side in (chosen, item):
                side.rendered = self._render(side.row, side.slots, thinking=True)

    def _render(self, row: Row, slots: list[Slot], thinking: bool = False) -> Rendered:
        """Render a row whose media stand in the template's text in the order of the row."""
        holders = {message["role"] for message in row.messages if media_in(message)} if slots else set()
        if {"assistant", "tool"} <= holders:
            told = "media both in an answer and in a tool result, whose order templates may change"
            raise RowError(row.name, told, "template_refuses")
        rendered = self.renderer.render(row, thinking=thinking)
        if (found := self.renderer.slots_in(rendered)) != [slot.medium.kind for slot in slots]:
            raise RowError(
                row.name,
                f"the chat template shows {len(found)} of the row's {len(slots)} images and clips "
                "(it has no place for them in this role)",
                "template_refuses",
            )
        return rendered

    def _media_texts(self, slots: list[Slot]) -> list[str]:
        media = [slot.medium for slot in slots]
        return ["" if shown.tokens is None else media_text(self.processor, self.family, shown.kind) for shown in media]

    def _expand(self, item: Item, labelled: Labelled) -> None:
        """Repeat each run's one soft token as often as the medium has soft tokens."""
        ids = np.asarray(labelled.ids)
        if not item.slots:
            item.tokens = np.stack([ids, np.where(labelled.trained, ids, IGNORE), np.zeros_like(ids)])
            return
        readable = [slot for slot in item.slots if slot.medium.tokens is not None]
        times, types = np.ones_like(ids), np.zeros_like(ids)
        trained = labelled.trained & (not item.bad)
        at = np.flatnonzero(np.isin(ids, list(self.soft_tokens.values())))
        times[at] = [slot.medium.tokens for slot in readable]
        for kind, token in self.soft_tokens.items():
            types[ids == token] = families.TYPE_IDS[kind]
        for beside in (-1, 0, 1):  # the begin and end token stand beside the soft one
            trained[at + beside] = False
        ends = np.cumsum(times)
        for slot, position in zip(readable, at.tolist(), strict=True):
            slot.run = int(ends[position - 2]), int(ends[position + 1])
        item.tokens = np.repeat(np.stack([ids, np.where(trained, ids, IGNORE), types]), times, axis=1)

    def _fits(self, group: tuple[Item, ...], counts) -> bool:
        """Cut a row that is longer than max_length; whether it goes into the batch."""
        length = max(item.tokens.shape[1] for item in group)
        if self.max_length is not None and length > self.max_length:
            if self.truncation == "error":
                told = f"{length} tokens, over the limit of {self.max_length}"
                raise RowError(group[0].row.name, told, "over_max_len")
            trained = all(item.trained.any() for item in group)
            if self.paired:
                shorten(*group, self.max_length, self.labeller.markers)
            else:
                group[0].cut(self.max_length)
            counts["truncated"] += 1
            counts["cut_to_nothing"] += trained and not all(item.trained.any() for item in group)
        if not self.paired:
            return True
        kept = all(item.trained.any() for item in group)
        counts["untrained_rows"] += not kept
        return kept

    def _empty_item(self) -> Item:
        """What stands for a batch whose rows were all left out: one BOS, untrained."""
        return Item(Row("none"), tokens=np.array([[self.tokenizer.bos_token_id], [IGNORE], [0]]))

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
        if self.paired:
            keys[2], padded[2] = "completion_mask", padded[2] != IGNORE
        return {key: torch.from_numpy(padded[i].copy()) for i, key in enumerate(keys)} | media

    def _add_margins(self, groups, batch: Batch) -> None:
        margins = [chosen.row.margin for chosen, _ in groups]
        if any(margin is not None for margin in margins):
            batch["margin"] = torch.tensor([margin or 0.0 for margin in margins], dtype=torch.float32)

    def _place_media(self, items, tensors, counts) -> tuple[dict, list[int]]:
        """The media tensors in batch order with their placeholders, and how many soft tokens of zero images stand
        behind each row."""
        behind, media = [0] * len(items), {}
        lines = {kind: [item.lines(kind) for item in items] for kind in self.modalities}
        if "image" in self.modalities:
            shortest = min(range(len(items)), key=lambda index: items[index].tokens.shape[1])
            images, behind, zeros = place_images(
                lines["image"], tensors.get("image"), self.processor, self.family, self._gaps("image"), shortest
            )
            media |= images
            counts["placeholders"] += zeros
        if "audio" in self.modalities:
            clips, zeros = place_clips(
                lines["audio"], tensors.get("audio"), self.processor, self.family, self._gaps("audio")
            )
            media |= clips
            counts["placeholders"] += zeros
        return media, behind

    def _gaps(self, kind: str) -> str:
        return "rows" if self.placeholders == "always" and kind not in self.always else self.placeholders

    def _count(self, rows: int, batch: Batch) -> None:
        trained = (batch["completion_mask"] if self.paired else batch["labels"] != IGNORE).sum(1)
        tokens = int(batch["attention_mask"].sum())
        batch.counts |= {
            "rows": rows,
            "tokens": tokens,
            "trained_tokens": int(trained.sum()),
            "padding": batch["input_ids"].numel() - tokens,
            "untrained_rows": batch.counts.get("untrained_rows", 0) + int((trained == 0).sum()),
        }


def _media_of(group: tuple[Item, ...]) -> Iterator[tuple[Row, Shown, Media]]:
    """(row, what is shown, as the user gave it) of each medium of a row, those that both sides of a pair show once."""
    seen = set()
    for item in group:
        for slot, medium in zip(item.slots, item.row.media, strict=True):
            if id(slot.medium) not in seen:
                seen.add(id(slot.medium))
                yield item.row, slot.medium, medium


@contextlib.contextmanager
def _leaving_out_bad_rows(counts, problems):
    """Count and name a row that cannot be read or rendered, and go on without it."""
    try:
        yield
    except RowError as problem:
        counts["bad_rows"] += 1
        problems.append((problem.row, problem.reason))
