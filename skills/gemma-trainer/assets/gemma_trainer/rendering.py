"""From a row to the model's own words: the chat template's text, and its tokens.

The text is rendered by the processor's chat template and tokenized as `apply_chat_template` would. What differs is
text that spells a control token (`<|turn>model` in a user's message): it is hidden from the template and encoded as
ordinary characters, so that it can neither open a turn nor become a media slot, and loses nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import islice

from .errors import RowError
from .families import MEDIA_TOKENS, Family, tokenizer_of
from .rows import Row, strings_in
from .slots import blocks_of, is_blank
from .words import Words

PRIVATE_USE = range(0xF0000, 0xFFFFE)  # characters that mean nothing; nearly no text has them
# What a chat template is asked about, to learn what it does.
ASKED = {"role": "user", "content": "x"}
ANSWERED = {"role": "assistant", "content": "y"}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "zwei", "arguments": {}}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "y"}
_BEFORE = {"system": [], "developer": [], "user": [], "assistant": [ASKED], "tool": [ASKED, CALLED]}
_AFTER = {"system": [ASKED], "developer": [ASKED]}


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
        RowError: by `render`, when the template refuses a row, or has no place for the tools that it brings.
    """

    def __init__(self, processor, family: Family, thinking: str = "auto"):
        self.tokenizer = tokenizer_of(processor)
        templates = processor.chat_template
        self.template = templates.get("default") if isinstance(templates, dict) else templates
        self.family = family
        self.thinking = thinking
        added = self.tokenizer.added_tokens_decoder.values()
        control = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        control |= {marker for marker in (family.turn_start, family.turn_end, family.channel) if marker}
        names = {name for kind in family.slots for name in MEDIA_TOKENS[kind]}
        control |= {getattr(self.tokenizer, name) for name in names if getattr(self.tokenizer, name, None)}
        if self.template:
            _remember_safe_attributes(self.template)
        slots = {getattr(self.tokenizer, name, None): kind for kind, name in family.slots.items()}
        self.slots = {token: kind for token, kind in slots.items() if token}
        self.slot = re.compile("|".join(map(re.escape, self.slots)) or r"(?!)")
        self.control_ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in control}
        self.words = Words(self.tokenizer, self.control_ids)
        self.control = self.words.control
        self.first_letters = sorted({token[0] for token in control})
        self.joined_roles = frozenset(role for role in _BEFORE if self.template and self._garbles_blocks(role))
        self.shows_tools = bool(self.template) and self._shows_tools()

    # -- text

    def render(self, row: Row, marked: bool = False, thinking: bool = False) -> Rendered:
        """Render a row; with `marked`, the assistant messages carry their `marks` in their texts; with `thinking`, the
        thinking switch is on, as it is in the other side of a pair."""
        if row.text is not None:
            return Rendered(row.name, row.text, restore={}, raw=True)
        marks, tools = self.marks(row) if marked else {}, row.tools
        messages = [self._for_template(message, marks.get(i)) for i, message in enumerate(row.messages)]
        if not self.shows_tools and (tools or any("tool_calls" in message for message in messages)):
            told = "tools or tool calls in the row, which the model's chat template does not show"
            raise RowError(row.name, told, "template_refuses")
        hidden = self._hide(row.name, (messages, tools))
        (messages, tools), restore = hidden if hidden else ((messages, tools), None)
        reasons = self.family.channel is not None and any("reasoning" in message for message in messages)
        forced = thinking or self.thinking == "on"
        thinking = forced or (self.thinking == "auto" and reasons)
        text = self._apply(row.name, messages, tools, thinking)
        if thinking and not forced and self.family.channel not in text:
            thinking, text = False, self._apply(row.name, messages, tools, False)
        return Rendered(row.name, text, restore, thinking)

    def marks(self, row: Row) -> dict[int, str]:
        """A character for each of a row's assistant messages, by position, that no text of the row has."""
        positions = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
        letters = _unused(row.name, strings_in((row.messages, row.tools)), len(positions))
        return dict(zip(positions, letters, strict=True))

    def generation_prompt(self, row: Row, count: int, thinking: bool) -> str:
        """The prompt that the template makes of the row's first `count` messages for the model to go on from."""
        messages = [self._for_template(m) for m in row.messages[:count]]
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
            told = f"the chat template refuses the row ({type(problem).__name__}: {problem})"
            raise RowError(name, told, "template_refuses") from None

    def _for_template(self, message: dict, mark: str | None = None) -> dict:
        """A canonical message as the template takes it: without our own keys, with both names of reasoning."""
        shown = {key: value for key, value in message.items() if key != "train"}
        if "reasoning" in shown:
            shown["reasoning_content"] = shown["reasoning"]
        if mark:
            shown |= _marked(shown, mark)
        blocks = shown["content"]
        if message["role"] in self.joined_roles and all(block["type"] == "text" for block in blocks_of(blocks)):
            shown["content"] = "".join(block["text"] for block in blocks_of(blocks))
        return shown

    def _garbles_blocks(self, role: str) -> bool:
        """Whether the template loses text blocks of a role, or shows them as a Python list; strings it can show."""
        blocks = [{"type": "text", "text": "Uno"}, {"type": "text", "text": "Dos"}]
        message = {"role": role, "content": blocks, "tool_call_id": "1"}
        try:
            text = self._apply("the probe", [*_BEFORE[role], message, *_AFTER.get(role, [])], None, False)
        except RowError:
            return True
        return not ("Uno" in text and "Dos" in text) or "'type'" in text

    def _shows_tools(self) -> bool:
        tool = {"type": "function", "function": {"name": "zwei", "description": "", "parameters": {}}}
        try:
            told = self._apply("the probe", [ASKED], [tool], False)
            called = self._apply("the probe", [ASKED, CALLED], None, False)
        except RowError:
            return False
        return "zwei" in told and "zwei" in called

    def _hide(self, name: str, value):
        """Swap the letters control tokens begin with for private-use ones, if the row may spell a control token.

        Each role's texts are looked at joined, too: a template may put neighbours side by side.
        Returns (value, restore), or None where there is nothing to hide.
        """
        strings = list(strings_in(value))
        if not any(letter in text for letter in self.first_letters for text in strings):
            return None
        if not any(map(self.control.search, [*strings, *_joined(value[0])])):
            return None
        free = _unused(name, strings, len(self.first_letters))
        swap = dict(zip(self.first_letters, free, strict=True))
        restore = {ord(stand_in): letter for letter, stand_in in swap.items()}
        return _translate(value, str.maketrans(swap)), restore

    # -- tokens

    def slots_in(self, rendered: Rendered) -> list[str]:
        """The kinds of media that the template's text has slots for, in order."""
        return [] if rendered.raw else [self.slots[token] for token in self.slot.findall(rendered.text)]

    def fill(self, rendered: Rendered, media: list[str]) -> Rendered:
        """The rendering with its slots, in order, replaced by the texts of `media`.

        It is done before tokenizing, since a family may put line breaks around its media, and those join with others.
        """
        texts = iter(media)
        return replace(rendered, text=self.slot.sub(lambda _: next(texts), rendered.text)) if media else rendered

    def encode(self, rendered: list[Rendered]) -> list[list[int]]:
        """Token ids of each rendering, one BOS first. A run of media soft tokens is still one token."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = False  # first those texts whose control tokens are meant
        plain = iter([self.words.encode(r.text) for r in rendered if r.restore is None])
        return [self._one_bos(next(plain) if r.restore is None else self._encode_hidden(r)) for r in rendered]

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


def _remember_safe_attributes(template: str) -> None:
    """Let the sandbox that a template runs in ask once, and not at each use, whether an attribute of a type is safe: a
    third of the time of rendering. The answer depends on nothing else (jinja2/sandbox.py, is_safe_attribute)."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(template).environment  # the one that is used from now on: it is cached
        ask, known = environment.is_safe_attribute, {}
    except Exception:  # another transformers, or a template that cannot be compiled: told when it is used
        return

    def is_safe_attribute(value, name, attribute):
        key = type(value), name
        if key not in known:
            known[key] = ask(value, name, attribute)
        return known[key]

    environment.is_safe_attribute = is_safe_attribute


def _marked(message: dict, mark: str) -> dict:
    """The message with `mark` before its texts and call names. Blank content beside calls stays as it is: templates
    look whether there is any."""
    content, calls = message["content"], message.get("tool_calls", [])
    if not calls or not is_blank(content):
        content = mark + content if isinstance(content, str) else [{"type": "text", "text": mark}, *content]
    calls = [call | {"function": call["function"] | {"name": mark + call["function"]["name"]}} for call in calls]
    marked = {key: mark + message[key] for key in ("reasoning", "reasoning_content") if key in message}
    return marked | {"content": content} | ({"tool_calls": calls} if calls else {})


def _unused(name: str, strings, count: int) -> list[str]:
    """`count` private-use characters that are in none of the strings."""
    taken = set().union(*strings)
    free = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in taken), count))
    if len(free) < count:
        raise RowError(name, "text that uses too many private-use characters", "template_refuses")
    return free


def _joined(messages: list[dict]):
    """The texts of each role as a template may join them: as they are, and trimmed."""
    for role in {message["role"] for message in messages}:
        blocks = [block for m in messages if m["role"] == role for block in blocks_of(m["content"])]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
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
