"""Raw text that holds whole turns, read back into turns, so that only the model's are trained."""

from __future__ import annotations

import re

from .errors import Fault

TURN_STYLES = (("<|turn>", "<turn|>"), ("<start_of_turn>", "<end_of_turn>"))  # Gemma 4, Gemma 3
UNREADABLE = re.compile(
    r"<\|(tool|tool_call|tool_response|image|audio|video)\|?>|<start_of_(image|audio)>|<(image|audio)_soft_token>"
)


def read_turns(text: str) -> list[tuple[str, str]]:
    """The turns of a text with model headers as (role, content); empty for a text without them.

    Example:
        "<bos><|turn>user\\nHi<turn|>\\n<|turn>model\\nHello<turn|>\\n" gives [("user", "Hi"), ("model", "Hello")].

    Raises:
        Fault: the text has model headers, but also parts that are in no turn, or tool or media tokens.
    """
    text = text.replace("\r\n", "\n")
    style = next((style for style in TURN_STYLES if f"{style[0]}model\n" in text), None)
    if style is None:
        return []
    if UNREADABLE.search(text):
        told = "a text row with tool or media tokens cannot be read back: write the row as messages"
        raise Fault("bad_text_row", told)
    text = text.removesuffix(f"{style[0]}model\n")  # where the model is to go on: a prompt without its answer
    start, end = map(re.escape, style)
    turn = re.compile(rf"{start}(\w+)\n(.*?)(?:{end}\n?|\Z)", re.DOTALL)
    turns, position = [], len("<bos>") if text.startswith("<bos>") else 0
    while text[position:].strip() not in ("", "<eos>"):
        found = turn.match(text, position)
        if not found:
            raise Fault("bad_text_row", "a text row with model headers has text outside its turns")
        role, content = found.groups()
        if style[0] in content:
            raise Fault("bad_text_row", "a text row with a turn that is not closed before the next begins")
        if role == "system":  # the thinking switch is set again when the row is rendered
            content = content.removeprefix("<|think|>").lstrip("\n")
        if content or role != "system":
            turns.append((role, content))
        position = found.end()
    return turns
