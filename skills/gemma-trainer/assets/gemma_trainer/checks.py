"""What is wrong with one row, told from the row alone: how it is built, and what its text holds.

Each check returns (code, detail) of what it found, as `findings.KINDS` names it. Details never quote the text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise

from .preferences import Preference
from .rows import ROLES, Row
from .slots import TEXT_PLACEHOLDER, blocks_of, is_blank, media_columns

Notes = Iterator[tuple[str, str]]

# What Gemma's chat templates and tokenizers write as control tokens: where no model is given to ask.
CONTROL = re.compile(
    r"<\|(?:turn|channel|think|tool|tool_call|tool_response|image|audio|video)\|?>"
    r"|<(?:turn|channel|tool|tool_call|tool_response|image|audio)\|>"
    r"|<(?:start|end)_of_(?:turn|image|audio)>|<(?:image|audio)_soft_token>|<[be]os>"
)
BOS = "<bos>"
# ChatML (Qwen and others), Llama 3 and 2, Phi and Zephyr, the headings of Alpaca's prompt, and what others write
# reasoning and tool calls as.
FOREIGN = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "[INST]",
    "[/INST]", "<<SYS>>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "### Instruction:", "### Response:",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
)  # fmt: skip
# How UTF-8 looks that was read as Latin-1 or Windows-1252, as Windows-1251, or as Mac Roman: a sign to ask ftfy, which
# looks closer but takes long.
MANGLED = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u2122]"
    "|[\u0420\u0421][\u0400-\u040f\u0450-\u045f\u00a0-\u00bb\u2013-\u2122]"
    "|\u221a[\u00a0-\u00bf\u2202-\u22ff]|\u201a\u00c4"
)
MANGLED_START = re.compile("[\u00c2-\u00f4\u0420\u0421\u221a\u201a]")
# How keys begin, which is looked for first, and how they go on. From what their makers document.
SECRETS = {
    "AKIA": ("an AWS key", r"\bAKIA[0-9A-Z]{16}\b"),
    "AIza": ("a Google API key", r"\bAIza[\w-]{35}"),
    "ghp_": ("a GitHub token", r"\bghp_[A-Za-z0-9]{36}"),
    "github_pat_": ("a GitHub token", r"\bgithub_pat_\w{22,}"),
    "glpat-": ("a GitLab token", r"\bglpat-[\w-]{20}"),
    "hf_": ("a Hugging Face token", r"\bhf_[A-Za-z]{34}\b"),
    "sk-": ("an API key (sk-...)", r"\bsk-(?=[\w-]*\d)[\w-]{20,}"),
    "sk_live_": ("a Stripe key", r"\bsk_live_[A-Za-z0-9]{16,}"),
    "xox": ("a Slack token", r"\bxox[abposr]-[\w-]{15,}"),
    "npm_": ("an npm token", r"\bnpm_[A-Za-z0-9]{36}"),
    "eyJ": ("a JSON web token", r"\beyJ[\w-]{17,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
}
PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY")
# Every one of them has a run of 20 such characters, which can be told ten times as fast.
RUN, AS_RUN = b"w" * 20, bytes(ord("w" if chr(c).isalnum() and c < 128 or c in b"_-" else " ") for c in range(256))


def texts_of(message: dict) -> list[str]:
    """The texts of a canonical message's content."""
    content = message["content"]
    return [content] if isinstance(content, str) else [b["text"] for b in content if b["type"] == "text"]


# ---- how a row is built


def format_of(raw: Mapping) -> str:
    """The name of a row's format, told by its columns."""
    if raw.get("chosen") is not None and raw.get("rejected") is not None:
        return "preference"
    if raw.get("messages") is None:
        for columns in (("conversations",), ("prompt", "completion"), ("instruction", "output"), ("text",)):
            if all(raw.get(column) is not None for column in columns):
                return " + ".join(columns)
    return "messages"


def check_structure(raw: Mapping, row: Row) -> Notes:
    """What is odd about a conversation that can be read. `raw` shows what reading has mended."""
    if row.text is not None:
        return
    yield from _check_order(raw, row)
    yield from _check_blanks(row)
    if any("tool_calls" in message for message in row.messages):
        yield from _check_calls(raw, row)
    asked = "\n".join([text for m in row.messages if m["role"] == "user" for text in texts_of(m)])
    if "<" in asked and TEXT_PLACEHOLDER.search(asked):
        yield "unfilled_placeholder", ""
    elif row.media and any((columns := media_columns(raw)).values()) and _placed_first(raw, columns):
        yield "media_placed_first", ""


def _check_order(raw: Mapping, row: Row) -> Notes:
    roles = [message["role"] for message in row.messages]
    spoken = [role for role in roles if role not in ("system", "developer")]
    if "assistant" not in spoken:
        yield "no_answer", ""
    elif spoken[0] == "assistant":
        yield "assistant_first", ""
    elif spoken[-1] == "user":
        yield "ends_without_answer", ""
    given = raw.get("messages") or raw.get("conversations")
    if isinstance(given, list) and len(given) != len(roles):  # reading has joined some
        spelled = [ROLES.get(str(m.get("role") or m.get("from")), "") for m in given if isinstance(m, Mapping)]
        if any(a == b != "tool" for a, b in pairwise(spelled)):
            yield "repeated_role", ""


def _check_blanks(row: Row) -> Notes:
    for message in row.messages:
        content = message["content"]
        if content.strip() if isinstance(content, str) else not is_blank(content):
            continue
        if message["role"] == "assistant" and "tool_calls" not in message:
            yield "empty_answer", ""
            return
        if message["role"] in ("user", "system", "developer"):
            yield "empty_message", ""
            return


def _check_calls(raw: Mapping, row: Row) -> Notes:
    for position, message in enumerate(row.messages[:-1]):  # a conversation may end with a call
        if "tool_calls" not in message:
            continue
        after = row.messages[position + 1 :]
        results = next((i for i, other in enumerate(after) if other["role"] != "tool"), len(after))
        if results < len(message["tool_calls"]):
            yield "call_without_result", f"{len(message['tool_calls'])} calls, {results} results"
            break
    messages = raw.get("messages")
    calls = [c for m in messages for c in m.get("tool_calls") or ()] if isinstance(messages, list) else []
    functions = [call.get("function") or call for call in calls if isinstance(call, Mapping)]
    if any(isinstance(function.get("arguments"), str) for function in functions):
        yield "arguments_as_text", ""


def _placed_first(raw: Mapping, columns: dict[str, list]) -> bool:
    """Whether nothing in the row says where the media of its columns belong."""
    texts = json.dumps([raw.get(key) for key in ("messages", "conversations", "prompt", "instruction")], default=str)
    return not any(f"<{kind}>" in texts or f'"{kind}"' in texts for kind in columns if columns[kind])


# ---- what the text holds


def check_text(text: str, control: re.Pattern = CONTROL, bos: str = BOS) -> Notes:
    """What should not stand in the joint text of a row's messages."""
    if "<" in text:
        if bos in text:
            yield "stray_bos", ""
        if found := set(control.findall(text)) - {bos}:
            yield "control_text", ", ".join(sorted(found)[:5])
    if "<" in text or "[" in text or "#" in text:  # one character is found at once, words take long
        if found := [marker for marker in FOREIGN if marker[0] in text and marker in text]:
            yield "foreign_markers", ", ".join(found)
    if not text.isascii() and is_mojibake(text):
        yield "mojibake", ""
    if kinds := _secrets(text):
        yield "secret", ", ".join(kinds)


def _secrets(text: str) -> list[str]:
    kinds = ["a private key"] if "-----BEGIN" in text and PRIVATE_KEY.search(text) else []
    if RUN in text.encode("utf-8", "replace").translate(AS_RUN):
        kinds += [kind for start, (kind, key) in SECRETS.items() if start in text and re.search(key, text, re.ASCII)]
    return list(dict.fromkeys(kinds))


def is_mojibake(text: str) -> bool:
    """Whether a text was read in a wrong encoding, or holds characters that were lost so."""
    if "\ufffd" in text:
        return True
    if not (MANGLED_START.search(text) and MANGLED.search(text)):
        return False
    from ftfy import badness

    return badness.is_bad(text)


# ---- pairs


def check_pair(pair: Preference) -> Notes:
    """What makes a preference pair useless, or odd."""
    chosen, rejected = (_said(side.messages[pair.shared :]) for side in (pair.chosen, pair.rejected))
    if chosen == rejected and len(pair.media) == len(pair.chosen.media):  # with media in the answers they may differ
        yield "equal_answers", ""
    if pair.margin is not None and pair.margin < 0:
        yield "negative_margin", f"{pair.margin:g}"


def _said(messages: list[dict]) -> list:
    """Messages as they are compared: without white space around their texts."""
    said = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content", "train")}
        if more or not is_blank(message["content"]):
            texts = [block.get("text", block["type"]).strip() for block in blocks_of(message["content"])]
            said.append((message["role"], texts, more))
    return said


def answer_length(pair: Preference, side: Row) -> int:
    """Characters of an answer."""
    return sum(len(text) for message in side.messages[pair.shared :] for text in texts_of(message))


def count_lengths(pair: Preference, counts: Counter) -> None:
    """Count a pair for `length_bias`."""
    chosen, rejected = (answer_length(pair, side) for side in (pair.chosen, pair.rejected))
    longer = "chosen_longer" if chosen > rejected else "rejected_longer" if chosen < rejected else "equal"
    counts.update({"pairs": 1, longer: 1})
    counts["log_ratio"] += math.log((chosen + 1) / (rejected + 1))


def length_bias(counts: Counter) -> str:
    """A figure where chosen answers are longer, or shorter, in far more than half of the pairs (beyond 3 sigma)."""
    longer, shorter = counts["chosen_longer"], counts["rejected_longer"]
    unequal = longer + shorter
    if unequal < 20:
        return ""
    share = longer / unequal
    if abs(share - 0.5) < max(0.15, 1.5 / unequal**0.5):
        return ""
    ratio, side = math.exp(counts["log_ratio"] / counts["pairs"]), "chosen"
    if share < 0.5:
        share, ratio, side = 1 - share, 1 / ratio, "rejected"
    return (
        f"{side} is longer in {share:.0%} of {unequal:,} pairs that differ in it, {ratio:.2f} times as long on average"
    )
