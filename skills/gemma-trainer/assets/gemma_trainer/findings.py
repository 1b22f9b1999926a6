"""What can be wrong with a data set: every kind has a code, how bad it is, and what to do about it.

Codes are stable; `references/data.md` lists them. A row is told by its name, never by its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

ERROR, WARNING, INFO = "error", "warning", "info"
SHOWN = 5  # rows told by name for each finding
# What dataset_prep.py does about a finding: `fix` mends rows and puts aside those that cannot be read or whose media
# cannot; `fix --drop CODE` leaves the rows out; `convert`.
FIX, DROP, CONVERT = "fix", "drop", "convert"


@dataclass(frozen=True)
class Kind:
    """A kind of finding. An error is what training refuses; a "share" is one where more than --max-bad-media of the
    media (or rows) have it, and a warning else."""

    severity: str
    title: str
    remedy: str
    action: str = ""


KINDS: dict[str, Kind] = {
    # Rows that cannot be read.
    "bad_json": Kind(ERROR, "lines that are not valid JSON", "write one JSON object on each line", FIX),
    "bad_csv": Kind(ERROR, "records that are not valid CSV", "quote fields with commas, quotes or line breaks", FIX),
    "bad_encoding": Kind(ERROR, "text that is not UTF-8", "write it as UTF-8 (iconv -f <encoding> -t UTF-8)", FIX),
    "line_too_long": Kind(ERROR, "lines that are too long for a row", "write one row on each line", FIX),
    "unknown_format": Kind(ERROR, "rows in no known format", "convert them; where columns are not understood, add "
                           "--map user=... assistant=...", CONVERT),
    "media_folder": Kind(ERROR, "rows of a folder of media", "convert them: the files that they name are their media",
                         CONVERT),
    "wrong_task": Kind(ERROR, "rows for another task", "check preference rows with --task dpo or --task reward, "
                       "others without; tables: convert with --map prompt=... chosen=... rejected=...", CONVERT),
    "missing_field": Kind(ERROR, "rows without a field they need", "fill the field, or leave the rows out", FIX),
    "wrong_type": Kind(ERROR, "fields of a wrong type", "see the reason; rows must be built as the formats say", FIX),
    "bad_value": Kind(ERROR, "fields with a value that they cannot have", "see the reason for what is possible", FIX),
    "bad_row": Kind(ERROR, "rows that cannot be read", "see the reason", FIX),
    "unknown_role": Kind(ERROR, "messages of an unknown role", "roles: system, user, assistant, tool", FIX),
    "unknown_block": Kind(ERROR, "content blocks of an unknown type", "blocks: text, image, audio", FIX),
    "video": Kind(ERROR, "video, which is not supported", "give frames as images, or leave the rows out", FIX),
    "bad_tools": Kind(ERROR, "tools that are no list of declarations", "they must be a list of declarations", FIX),
    "bad_tool_call": Kind(ERROR, "tool calls that cannot be read", "a call: {function: {name, arguments: {...}}}", FIX),
    "result_without_call": Kind(ERROR, "tool results that answer no call", "put each result behind its call, with its "
                                "tool_call_id", FIX),
    "placeholder_without_media": Kind(ERROR, "media blocks without their medium", "give each block its file, or each "
                                      "placeholder an entry in the media column", FIX),
    "media_without_placeholder": Kind(ERROR, "more media than places for them", "put a block or placeholder where each "
                                      "medium belongs", FIX),
    "bad_text_row": Kind(ERROR, "text rows whose turns cannot be told apart", "write the rows as messages", FIX),
    "no_common_prompt": Kind(ERROR, "pairs without one prompt for both answers", "give the prompt its own field", FIX),
    "template_refuses": Kind("share", "rows that the model's chat template refuses", "see the reason; leave the rows "
                             "out, or use a model whose template takes them"),
    "media_unsupported": Kind(ERROR, "media that the model has no tower for", "choose a model that takes them"),
    "nothing_trained": Kind(ERROR, "nothing to train on in any row", "rows need an assistant message within --max-len"),
    # How conversations are built.
    "mixed_formats": Kind(INFO, "rows in several formats", "all are read; convert makes them one", CONVERT),
    "repeated_role": Kind(WARNING, "two messages of one role in a row", "they are trained as one, joined by a line "
                          "break: see whether an answer is missing", DROP),
    "no_answer": Kind(WARNING, "rows without an answer", "they train nothing: add the answer, or leave them out", DROP),
    "assistant_first": Kind(WARNING, "conversations that the assistant begins", "put a user message first, or make it "
                            "a system message", DROP),
    "ends_without_answer": Kind(WARNING, "conversations that end before the answer", "the last question trains "
                                "nothing: add the answer or cut it", DROP),
    "empty_answer": Kind(WARNING, "empty answers", "the model learns to say nothing: fill or drop them", DROP),
    "empty_message": Kind(WARNING, "empty messages of user, system or tool", "fill them, or leave the rows out", DROP),
    "call_without_result": Kind(WARNING, "tool calls without their result", "put a tool message behind each", DROP),
    "arguments_as_text": Kind(INFO, "tool arguments given as JSON text", "they are read as an object", FIX),
    "unfilled_placeholder": Kind(WARNING, "<image> or <audio> in a text without a medium for it", "it stays text: add "
                                 "the medium or take the word out", DROP),
    "media_placed_first": Kind(INFO, "media columns without placeholders", "the media go before the first user text"),
    # What the model reads and learns.
    "over_max_len": Kind(WARNING, "rows over --max-len", "raise --max-len; their ends are cut"),
    "cut_to_nothing": Kind(WARNING, "rows whose answer goes with the cut", "raise --max-len, or shorten their prompts"),
    "media_cut": Kind(WARNING, "rows that lose a picture or clip to the cut", "raise --max-len"),
    "control_text": Kind(WARNING, "text that spells a control token", "it is trained as plain text: take it out where "
                         "it is not meant; fix does so with that of turns and at the ends of texts", FIX),
    "stray_bos": Kind(WARNING, "text that spells <bos>", "BOS is added once by itself: take it out", FIX),
    "foreign_markers": Kind(WARNING, "markers of another model's format in the text", "write turns as messages, "
                            "reasoning and tool calls in their fields", FIX),
    "inexact_prompt": Kind(WARNING, "answers trained behind another prompt than in use", "--loss-on last-turn, or a "
                           "model with a newer chat template"),
    "reasoning_dropped": Kind(WARNING, "reasoning that the chat template leaves out", "it is not trained: use a model "
                              "with a newer chat template"),
    "split_tokens": Kind(WARNING, "prompt and answer that are other tokens together than apart", "take white space "
                         "from the beginning of the answers"),
    # Media.
    "media_missing": Kind("share", "media that are not there", "paths are relative to the data file", FIX),
    "media_unreadable": Kind("share", "media that cannot be decoded", "make the files anew, or drop the rows", FIX),
    "media_wrong_kind": Kind("share", "media of another kind than the row says", "an image block needs an image, an "
                             "audio block a recording", FIX),
    "media_remote": Kind("share", "media that are remote URLs", "download them, or add --allow-remote-media"),
    "media_outside_root": Kind("share", "media outside --media-root", "move them, or change --media-root"),
    "media_nan": Kind("share", "media that hold NaN or infinity", "make the files anew", FIX),
    "image_bomb": Kind("share", "images with too many pixels", "scale them down", FIX),
    "audio_short": Kind("share", "clips too short for one token", "leave the rows out", FIX),
    "audio_long": Kind(WARNING, "clips longer than the model hears", "cut them into pieces; the rest is not heard"),
    "audio_silent": Kind(WARNING, "clips without a sound", "check the recordings"),
    "audio_low_rate": Kind(WARNING, "clips of a lower rate than the model hears", "high frequencies are missing in "
                           "them: use the original recordings, if there are any"),
    "audio_resampled": Kind(INFO, "clips of a higher rate than the model hears", "each epoch converts them: fix does "
                            "it once", FIX),
    "audio_channels": Kind(INFO, "clips of several channels", "they are mixed to one"),
    "image_small": Kind(WARNING, "images with a side under 32 pixels", "check that they show what they should"),
    "image_thin": Kind(WARNING, "images ten times as long as wide, or more", "cut them into pieces"),
    "image_large": Kind(INFO, "images over 12 megapixels", "decoding takes long: scale them down once"),
    "image_rotated": Kind(INFO, "images that their EXIF turns or mirrors", "they are turned upright in training", FIX),
    # Preferences.
    "equal_answers": Kind(WARNING, "pairs whose answers are equal", "they teach nothing: leave them out", FIX),
    "length_bias": Kind(WARNING, "one side is longer in most pairs", "the model may learn length: balance the pairs"),
    "negative_margin": Kind(WARNING, "pairs with a negative margin", "swap the answers, or drop the margin", DROP),
    # The set as a whole.
    "duplicate_rows": Kind(WARNING, "rows that stand there more than once", "leave the copies out", FIX),
    "near_duplicates": Kind(WARNING, "rows that are nearly the same as another", "look at them; split keeps them on "
                            "one side"),
    "mostly_shared": Kind(INFO, "rows whose text many others share", "a prompt template, or near copies that are not "
                          "counted as such: look at some"),
    "eval_overlap": Kind(WARNING, "evaluation rows that are also in the training data", "leave them out of one of the "
                         "two, or join both and split anew"),
    "label_imbalance": Kind(WARNING, "one short answer outweighs the others", "balance the answers, or judge by more "
                            "than accuracy"),
    "mojibake": Kind(WARNING, "text in a wrong encoding", "read the source file in its own encoding, and write UTF-8"),
    "secret": Kind(WARNING, "keys, tokens or private keys", "revoke them and take them out: the model may repeat them"),
}  # fmt: skip
BAD_MEDIA = ("media_missing", "media_unreadable", "media_wrong_kind", "media_remote", "media_outside_root", "media_nan",
             "image_bomb", "audio_short")  # fmt: skip
ORDER = {code: position for position, code in enumerate(KINDS)}


@dataclass
class Found:
    """How often a kind was found, and the first rows: (position in the data set, name, what exactly)."""

    count: int = 0
    rows: list[tuple[int, str, str]] = field(default_factory=list)


class Findings:
    """What was found, by code. Those of several parts of a data set are added up in any order."""

    def __init__(self, keep_all: bool = False):
        self.found: dict[str, Found] = {}
        self.keep_all = keep_all

    def add(self, code: str, position: int, row: str = "", detail: str = "", count: int = 1) -> None:
        """Count a finding of a row, or with `count` of so many rows together."""
        found = self.found.setdefault(code, Found())
        found.count += count
        if self.keep_all or len(found.rows) < SHOWN:
            found.rows.append((position, row, detail))

    def merge(self, other: Findings) -> None:
        for code, found in other.found.items():
            mine = self.found.setdefault(code, Found())
            mine.count += found.count
            mine.rows = sorted(mine.rows + found.rows)[:SHOWN]

    def count(self, code: str) -> int:
        return self.found[code].count if code in self.found else 0

    def lines(self) -> Iterator[dict]:
        """Each finding of each row that was kept, in the order of the rows."""
        found = [(row[0], ORDER[code], code, row) for code, found in self.found.items() for row in found.rows]
        for _, _, code, (_, row, detail) in sorted(found):
            yield {"code": code, "row": row} | ({"detail": detail} if detail else {})
