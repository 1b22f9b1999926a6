"""Canonical rows written as the three forms that trainers take: messages, prompt + completion, preference."""

from __future__ import annotations

from .errors import Fault
from .preferences import Preference
from .rows import SOURCE, Row

TARGETS = ("messages", "prompt-completion", "preference")


def messages_row(row: Row) -> dict:
    """A canonical row as `{"messages": [...], "tools"?, "loss_type"?}` with its media in their blocks.

    The row's name and folder are under `rows.SOURCE`, as `writing.RowsWriter` wants them. Raises Fault for a raw text.
    """
    return {"messages": filled(row)} | _rest(row)


def prompt_completion_row(row: Row) -> dict:
    """A canonical row as `{"prompt", "completion", ...}`: its last answer and what led to it.

    Both are strings where each is one plain text, else lists of messages. Answers in the prompt are context.

    Raises:
        Fault: the row does not end with an answer, or holds nothing before it.
    """
    messages = filled(row)
    if messages[-1]["role"] != "assistant":
        raise Fault("missing_field", "the row does not end with an answer of the assistant")
    if len(messages) == 1:
        raise Fault("missing_field", "an answer without a prompt")
    prompt, completion = _context(messages[:-1]), messages[-1:]
    if _is_plain(prompt, "user") and _is_plain(completion, "assistant"):
        prompt, completion = prompt[0]["content"], completion[0]["content"]
    return {"prompt": prompt, "completion": completion} | _rest(row)


def preference_row(pair: Preference) -> dict:
    """A pair as `{"prompt", "chosen", "rejected", "margin"?, ...}`, strings where all three are one plain text."""
    sides = [filled(side) for side in (pair.chosen, pair.rejected)]
    prompt = _context(sides[0][: pair.shared])
    chosen, rejected = (side[pair.shared :] for side in sides)
    if _is_plain(prompt, "user") and _is_plain(chosen, "assistant") and _is_plain(rejected, "assistant"):
        prompt, chosen, rejected = (part[0]["content"] for part in (prompt, chosen, rejected))
    margin = {} if pair.margin is None else {"margin": pair.margin}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | margin | _rest(pair.chosen)


def filled(row: Row) -> list[dict]:
    """A row's messages with its media back in their blocks, `{"type": "image", "image": value}`; raises Fault."""
    if row.text is not None:
        raise Fault("bad_text_row", "a text without turns is no conversation: it can be trained on as it is")
    media = iter(row.media)
    messages = []
    for message in row.messages:
        if isinstance(message["content"], list):
            blocks = [
                block if block["type"] == "text" else block | {block["type"]: next(media).value}
                for block in message["content"]
            ]
            message = message | {"content": blocks}
        messages.append(message)
    return messages


def _rest(row: Row) -> dict:
    tools = {"tools": row.tools} if row.tools else {}
    kind = {} if row.trained else {"loss_type": "context_only"}
    return tools | kind | {SOURCE: (row.name, str(row.folder) if row.folder else None)}


def _context(messages: list[dict]) -> list[dict]:
    """Messages of a prompt, whose answers need not say that they are not trained."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def _is_plain(messages: list[dict], role: str) -> bool:
    return messages == [{"role": role, "content": messages[0]["content"]}] and isinstance(messages[0]["content"], str)
