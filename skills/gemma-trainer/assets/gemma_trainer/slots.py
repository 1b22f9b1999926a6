"""Where a row's images and clips go: into the blocks that name them, or from columns into the slots left open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Fault

MEDIA_COLUMNS = {"image": ("image", "images"), "audio": ("audio", "audios")}
TEXT_PLACEHOLDER = re.compile(r"<(image|audio)>")  # the llava way of marking a slot; no control token of any Gemma


@dataclass(frozen=True)
class Media:
    """One image or clip of a row, still as the user gave it: a path, bytes, an array, a PIL image, a URL."""

    kind: str  # "image" or "audio"
    value: Any


def blocks_of(content) -> list[dict]:
    """A content as a list of blocks: a string is one block of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def is_blank(content) -> bool:
    """Whether a canonical content shows nothing: no medium, and no text but white space."""
    return all(block["type"] == "text" and not block["text"].strip() for block in blocks_of(content))


def media_in(message: dict) -> bool:
    """Whether a canonical message holds an image or a clip."""
    return any(block["type"] != "text" for block in blocks_of(message["content"]))


def media_columns(fields: Mapping) -> dict[str, list]:
    """The values of a row's `image(s)` and `audio(s)` columns, by kind, in order; None values are absent."""
    columns: dict[str, list] = {"image": [], "audio": []}
    for kind, keys in MEDIA_COLUMNS.items():
        for key in keys:
            value = fields.get(key)
            if isinstance(value, list | tuple):
                columns[kind] += [item for item in value if item is not None]
            elif value is not None and not (isinstance(value, str) and not value):
                columns[kind].append(value)
    return columns


def place_media(messages: list[dict], columns: dict[str, list]) -> tuple[list[dict], list[Media]]:
    """Fill empty media blocks from the columns, in order; take every block's value out into the media list.

    Args:
        messages: in canonical form, a media block's value under "value" (None where it is to be filled).

    Returns:
        (messages whose media blocks are `{"type": kind}`, the media in the order of their blocks).

    Raises:
        Fault: a block without its medium, or more media in the columns than places for them.
    """
    if any(columns.values()):
        messages = _open_slots(messages, columns)
    waiting = {kind: iter(values) for kind, values in columns.items()}
    media, placed = [], []
    for message in messages:
        if isinstance(message["content"], list):
            blocks = []
            for block in message["content"]:
                if block["type"] != "text":
                    value = block.get("value")
                    value = next(waiting[block["type"]], None) if value is None else value
                    if value is None:
                        told = f"an {block['type']} block without its {block['type']}"
                        raise Fault("placeholder_without_media", told)
                    media.append(Media(block["type"], value))
                    block = {"type": block["type"]}
                blocks.append(block)
            message = message | {"content": blocks}
        placed.append(message)
    for kind, rest in waiting.items():
        if left := len(list(rest)):
            told = f"{left} more {kind} in the columns than {kind} placeholders in the messages"
            raise Fault("media_without_placeholder", told)
    return placed, media


def _open_slots(messages: list[dict], columns: dict[str, list]) -> list[dict]:
    """Give the columns' media blocks to go to: empty ones, `<image>` in a text, or the front of the first user turn."""
    need = {kind: len(values) for kind, values in columns.items()}
    for message in messages:
        for block in message["content"] if isinstance(message["content"], list) else []:
            if block["type"] != "text" and block.get("value") is None:
                need[block["type"]] = 0
    marked = {
        found for m in messages if m["role"] == "user" for t in _texts(m) for found in TEXT_PLACEHOLDER.findall(t)
    }
    split = {kind for kind in marked if need[kind]}
    messages = [m | {"content": _split_slots(m["content"], split)} if m["role"] == "user" else m for m in messages]
    front = [{"type": kind, "value": None} for kind in need for _ in range(need[kind]) if kind not in split]
    if front:
        first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
        if first is None:
            raise Fault("media_without_placeholder", "media columns, but no user message to put them in")
        messages[first] = messages[first] | {"content": front + blocks_of(messages[first]["content"])}
    return messages


def _texts(message: dict) -> list[str]:
    return [block["text"] for block in blocks_of(message["content"]) if block["type"] == "text"]


def _split_slots(content, kinds: set[str]):
    """Turn `<image>` / `<audio>` in text into blocks, for the kinds named."""
    if not kinds:
        return content
    blocks = []
    for block in blocks_of(content):
        if block["type"] != "text":
            blocks.append(block)
            continue
        for position, piece in enumerate(TEXT_PLACEHOLDER.split(block["text"])):
            if position % 2 and piece in kinds:
                blocks.append({"type": piece, "value": None})
            elif position % 2:
                blocks.append({"type": "text", "text": f"<{piece}>"})
            elif piece.strip():
                blocks.append({"type": "text", "text": piece})
    return blocks
