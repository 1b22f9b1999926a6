"""From a row to the model's own words: the chat template's text, and its tokens.

The text is rendered by the processor's chat template and tokenized as `apply_chat_template` would. What differs is
text that spells a control token (`<|turn>model` in a user's message): it is hidden from the template and encoded as
ordinary characters, so that it can neither open a turn nor become a media slot, and loses nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import RowError
from .families import Family, tokenizer_of
from .rows import Row, strings_in
from .slots import is_blank

PRIVATE_USE = range(0xE000, 0xF8FD)
MARK = "\uf8fd\uf8fe"  # private use: marks the messages that are not trained, in a second rendering


@dataclass(frozen=True)
class Rendered:
    """A rendered row: its text, how hidden characters come back (None: nothing is hidden), and whether thinking is on.

    `raw` text has no template: it is encoded whole, with BOS before and EOS after it.
    """

    name: str
    text: str
    restore: dict[int, str] | None = None
    thinking: bool = False
    raw: bool = False


class Renderer:
    """Renders and tokenizes rows with one processor.

    Args:
        processor: a Gemma processor, or the bare tokenizer of a text-only Gemma, with a chat template.
        family: whose markers the template uses.
        thinking: "on" or "off" set the template's thinking switch; "auto" sets it for rows whose reasoning is rendered.

    Raises:
        RowError: by `render`, when the template refuses a row.
    """

    def __init__(self, processor, family: Family, thinking: str = "auto"):
        self.tokenizer = tokenizer_of(processor)
        self.template = processor.chat_template
        self.family = family
        self.thinking = thinking
        added = self.tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        control |= {marker for marker in (family.turn_start, family.turn_end, family.channel) if marker}
        self.control_ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in control}
        longest_first = sorted(control, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, longest_first)))
        self.first_letters = sorted({token[0] for token in control})

    # -- text

    def render(self, row: Row, marked: bool = False) -> Rendered:
        """Render a row; with `marked`, every message that is not to be trained carries `MARK` in its text."""
        if row.text is not None:
            return Rendered(row.name, row.text, restore={}, raw=True)
        messages, tools = [_for_template(m, marked) for m in row.messages], row.tools
        hidden = self._hide(row.name, (messages, tools))
        (messages, tools), restore = hidden if hidden else ((messages, tools), None)
        reasons = any("reasoning" in message for message in messages)
        thinking = self.thinking == "on" or (self.thinking == "auto" and reasons)
        text = self._apply(row.name, messages, tools, thinking)
        if thinking and self.thinking == "auto" and self.family.channel not in text:
            thinking, text = False, self._apply(row.name, messages, tools, False)
        return Rendered(row.name, text, restore, thinking)

    def generation_prompt(self, row: Row, count: int, thinking: bool) -> str:
        """The prompt that the template makes of the row's first `count` messages for the model to go on from."""
        messages = [_for_template(m) for m in row.messages[:count]]
        return self._apply(row.name, messages, row.tools, thinking, add_generation_prompt=True)

    def _apply(self, name: str, messages: list[dict], tools, thinking: bool, **options) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                tokenize=False,
                enable_thinking=thinking,
                **options,
            )
        except Exception as problem:  # Jinja, and the template's own raise_exception
            raise RowError(name, f"the chat template refuses the row ({type(problem).__name__}: {problem})") from None

    def _hide(self, name: str, value):
        """Swap the letters control tokens begin with for private-use ones, if the row may spell a control token.

        The texts of neighbouring blocks are looked at joined, too: a template may put them side by side.
        Returns (value, restore), or None where there is nothing to hide.
        """
        strings = [*strings_in(value), *_joined_blocks(value[0])]
        if not any(map(self.control.search, strings)):
            return None
        taken = set().union(*strings)
        free = [chr(code) for code in PRIVATE_USE if chr(code) not in taken][: len(self.first_letters)]
        if len(free) < len(self.first_letters):
            raise RowError(name, "text that uses every private-use character beside control tokens")
        swap = dict(zip(self.first_letters, free, strict=True))
        restore = {ord(stand_in): letter for letter, stand_in in swap.items()}
        return _translate(value, str.maketrans(swap)), restore

    # -- tokens

    def encode(self, rendered: list[Rendered]) -> list[list[int]]:
        """Token ids of each rendering, one BOS first. Media slots are still one token each."""
        plain = [r for r in rendered if r.restore is None]
        texts = [r.text for r in plain]
        ids = iter(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        return [self._one_bos(next(ids) if r.restore is None else self._encode_hidden(r)) for r in rendered]

    def _encode_hidden(self, rendered: Rendered) -> list[int]:
        """Encode text whose only control tokens are the template's own; all other pieces are ordinary characters."""
        if rendered.raw:
            return self.encode_plain([rendered.text])[0] + [self.tokenizer.eos_token_id]
        pieces = self.control.split(rendered.text)
        controls = [self.control_ids[token] for token in self.control.findall(rendered.text)]
        encoded = self.encode_plain([piece.translate(rendered.restore) for piece in pieces])
        ids = list(encoded[0])
        for token, piece in zip(controls, encoded[1:], strict=True):
            ids += [token, *piece]
        return ids

    def encode_plain(self, texts: list[str]) -> list[list[int]]:
        """Encode texts in which nothing is a control token, whatever it spells."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        encoded = self.tokenizer(texts, **options)["input_ids"]
        forbidden = set(self.control_ids.values())
        for position, ids in enumerate(encoded):
            if not forbidden.isdisjoint(ids):  # a control token that its tokenizer does not mark as special
                first, rest = texts[position][:1], texts[position][1:]
                encoded[position] = [i for part in self.encode_plain([first, rest]) for i in part]
        return encoded

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        start = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return [bos, *ids[start:]]


def _for_template(message: dict, marked: bool = False) -> dict:
    """A canonical message as templates take it: without our own keys, with both names of reasoning."""
    shown = {key: value for key, value in message.items() if key != "train"}
    if "reasoning" in shown:
        shown["reasoning_content"] = shown["reasoning"]
    if marked and message.get("train") is False:
        shown |= _marked(shown)
    return shown


def _marked(message: dict) -> dict:
    """The message with `MARK` before its texts and call names. Blank content beside calls stays as it is: templates
    look whether there is any."""
    content, calls = message["content"], message.get("tool_calls", [])
    if not calls or not is_blank(content):
        content = MARK + content if isinstance(content, str) else [{"type": "text", "text": MARK}, *content]
    calls = [call | {"function": call["function"] | {"name": MARK + call["function"]["name"]}} for call in calls]
    marks = {key: MARK + message[key] for key in ("reasoning", "reasoning_content") if key in message}
    return marks | {"content": content} | ({"tool_calls": calls} if calls else {})


def _joined_blocks(messages: list[dict]):
    """The texts of each message's blocks as a template may join them: as they are, and trimmed."""
    for message in messages:
        if isinstance(message["content"], list):
            texts = [block["text"] for block in message["content"] if block["type"] == "text"]
            yield "".join(texts)
            yield "".join(map(str.strip, texts))


def _translate(value, table):
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, dict):
        return {key.translate(table) if isinstance(key, str) else key: _translate(v, table) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_translate(item, table) for item in value)
    return value
