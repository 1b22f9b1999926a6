"""What people write as a row, turned into one canonical row.

`read_row` takes a conversation (`messages`), `prompt` + `completion`, `instruction` / `input` / `output`,
`conversations` with `from` / `value`, or `text`, with media inline or in columns, and returns a `Row`. It never opens a
media file and never changes what it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import RowError
from .slots import Media, blocks_of, media_columns, place_media
from .text_rows import read_turns

SOURCE = "__source__"  # (row name, folder of the data file): added by sources.py, never by a user

ACCEPTED = (
    "messages; prompt + completion; instruction [+ input] + output; conversations (from / value); text; "
    "each with media inline or in image(s) / audio(s) columns"
)

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "model": "assistant", "gpt": "assistant", "bot": "assistant", "tool": "tool", "observation": "tool",
    "function": "tool",
}  # fmt: skip
BLOCK_TYPES = {"text": "text", "image": "image", "image_url": "image", "audio": "audio", "input_audio": "audio",
               "audio_url": "audio", "input_image": "image", "input_text": "text", "output_text": "text"}  # fmt: skip
THOUGHT = re.compile(r"\s*<\|channel>thought\n?(.*?)\n?<channel\|>", re.DOTALL)


@dataclass
class Row:
    """A canonical row.

    `messages` hold `role`, `content` (a string, or blocks `{"type": "text", "text"}`, `{"type": "image"}`,
    `{"type": "audio"}`), and where given `tool_calls`, `reasoning`, `name`, `tool_call_id`, `train`. `media` lists the
    row's images and clips in the order of their blocks. A raw row has `text` instead of `messages`.
    """

    name: str
    messages: list[dict] = field(default_factory=list)
    text: str | None = None
    tools: list | None = None
    media: list[Media] = field(default_factory=list)
    trained: bool = True
    folder: Path | None = None


def read_row(raw: Mapping, name: str = "row") -> Row:
    """Turn one row of any accepted format into a `Row`.

    Args:
        raw: the row as read from a file or a data set, e.g. `{"prompt": "Name a fruit", "completion": "Pear"}`.
        name: what errors call it, where the row does not bring its own name.

    Raises:
        RowError: the row is in no known format, or something in it cannot be read; the message names the row.
    """
    if not isinstance(raw, Mapping):
        raise RowError(name, f"a row must be an object, found {type(raw).__name__}")
    name, folder = raw.get(SOURCE) or (name, None)
    try:
        fields = {key: value for key, value in _without_none(raw).items() if key != SOURCE}
        row = Row(name=name, folder=Path(folder) if folder else None, tools=_tools(fields.get("tools")))
        row.trained = _loss_type(fields.get("loss_type", "supervised"))
        row.messages, row.text = _conversation(fields)
        if row.text is None:
            row.messages = merge_consecutive(row.messages)
            _check_results(row.messages)
            row.messages, row.media = place_media(row.messages, media_columns(fields))
        elif any(media_columns(fields).values()):
            raise ValueError("a text row has no place for media: write the row as messages")
        _check_unicode(row)
    except ValueError as problem:
        raise RowError(name, str(problem)) from None
    except (TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise RowError(name, f"not built as a row is ({type(problem).__name__})") from None
    return row


def _check_unicode(row: Row) -> None:
    for text in strings_in((row.messages, row.tools, row.text)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text with half a surrogate pair, which is no character") from None


def strings_in(value):
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _without_none(value):
    """Drop the keys that Arrow filled with None. Payloads (arrays, bytes) are left alone."""
    if isinstance(value, Mapping):
        payload = ("array", "bytes", SOURCE)
        return {k: v if k in payload else _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and not (value and isinstance(value[0], int | float)):
        return [_without_none(item) for item in value]
    return value


def _loss_type(value) -> bool:
    if value not in ("supervised", "context_only"):
        raise ValueError("loss_type must be supervised or context_only")
    return value == "supervised"


def _conversation(fields: dict) -> tuple[list[dict], str | None]:
    """(messages, None) of a conversation in any format, or ([], text) of a raw text row."""
    if "messages" in fields:
        return [_message(m) for m in _list_of(fields["messages"], "messages")], None
    if "conversations" in fields:
        return [_message(m) for m in _list_of(fields["conversations"], "conversations")], None
    if "prompt" in fields and "completion" in fields:
        prompt, completion = _side(fields["prompt"], "user"), _side(fields["completion"], "assistant")
        return [m | {"train": False} if m["role"] == "assistant" else m for m in prompt] + completion, None
    if "instruction" in fields and "output" in fields:
        request = "\n\n".join(_string(fields[key], key) for key in ("instruction", "input") if fields.get(key))
        system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
        pair = [{"role": "user", "content": request}, {"role": "assistant", "content": fields["output"]}]
        return [_message(m) for m in system + pair], None
    if "text" in fields:
        turns = read_turns(_string(fields["text"], "text"))
        # BOS and EOS are added when the row is tokenized: those that the text spells out itself are the same ones.
        text = None if turns else fields["text"].removeprefix("<bos>").removesuffix("<eos>")
        return [_message({"role": role, "content": said}) for role, said in turns], text
    if "chosen" in fields or "rejected" in fields:
        raise ValueError("a preference row (chosen / rejected) cannot be used for supervised fine-tuning")
    words = [key for key in sorted(map(str, fields)) if re.fullmatch(r"[\w.-]{1,40}", key)]  # a table without a header
    others = f" and {len(fields) - len(words)} that are no names" if len(words) < len(fields) else ""
    found = (", ".join(words[:12]) or "no keys") + others
    raise ValueError(f"no known format; found: {found}; accepted: {ACCEPTED}")


def _list_of(value, what: str) -> list:
    if isinstance(value, str):  # CSV and some exporters write the list as JSON text
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise ValueError(f"{what} is a string that is not JSON") from None
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} must be a list with at least one message")
    return value


def _side(value, role: str) -> list[dict]:
    """A prompt or completion: a string is one message of `role`, a list is messages."""
    if isinstance(value, str):
        return [_message({"role": role, "content": value})]
    return [_message(m) for m in _list_of(value, "prompt" if role == "user" else "completion")]


def _word(value) -> str:
    """A value for an error message, if it is a single word; errors never quote the data's text."""
    return f" {value!r}" if re.fullmatch(r"[\w-]{1,20}", str(value)) else ""


def _string(value, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, found {type(value).__name__}")
    return value


# ---- messages


def _message(raw) -> dict:
    """One message in canonical form; media blocks keep their value under "value" until `_place_media` takes it."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"a message must be an object, found {type(raw).__name__}")
    spelled = str(raw.get("role", raw.get("from", "")))
    if spelled == "function_call":  # sharegpt: a call written as JSON text
        calls = _tool_calls(_string(raw.get("value", raw.get("content")), "function_call"))
        return {"role": "assistant", "content": "", "tool_calls": calls, **_train_flag(raw)}
    if spelled not in ROLES:
        raise ValueError(f"unknown role{_word(spelled)}; known: {', '.join(ROLES)}")
    message = {"role": ROLES[spelled], "content": _content(raw.get("content", raw.get("value", "")))}
    if message["role"] == "assistant":
        _read_assistant(message, raw)
    elif message["role"] == "tool":
        message |= {key: _string(raw[key], key) for key in ("name", "tool_call_id") if key in raw}
    return message


def _read_assistant(message: dict, raw: Mapping) -> None:
    if raw.get("tool_calls"):
        message["tool_calls"] = _tool_calls(raw["tool_calls"])
    reasoning = _string(raw.get("reasoning") or raw.get("reasoning_content") or "", "reasoning")
    thought, message["content"] = _split_thought(message["content"])
    if thought and thought != reasoning.strip():
        reasoning = f"{reasoning}\n{thought}" if reasoning else thought
    if reasoning:
        message["reasoning"] = reasoning
    message |= _train_flag(raw)


def _train_flag(raw: Mapping) -> dict:
    """{"train": False} where a message is not to be trained; `weight` is how OpenAI's fine-tuning files say it."""
    wanted = raw.get("train", raw.get("weight", True))
    if wanted not in (True, False):  # 0 and 1 are equal to them
        raise ValueError("train must be true or false")
    return {} if wanted else {"train": False}


def _split_thought(content) -> tuple[str, Any]:
    """Read a complete leading `<|channel>thought...<channel|>` of assistant content as reasoning."""
    first = content if isinstance(content, str) else content[0].get("text", "") if content else ""
    found = THOUGHT.match(first)
    if not found:
        return "", content
    rest = first[found.end() :]
    return found[1].strip(), rest if isinstance(content, str) else [content[0] | {"text": rest}, *content[1:]]


def _tool_calls(calls) -> list[dict]:
    """OpenAI or flat calls, with JSON-text arguments parsed: templates want a mapping."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except json.JSONDecodeError:
            raise ValueError("a tool call that is not JSON") from None
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a tool call must be an object with a function")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError:
                raise ValueError("the arguments of a tool call are not JSON") from None
        if not isinstance(arguments, Mapping):
            raise ValueError("the arguments of a tool call must be a JSON object")
        named = {"name": _string(function.get("name"), "the name of a tool call"), "arguments": dict(arguments)}
        identity = {"id": call["id"]} if "id" in call else {}
        result.append(identity | {"type": "function", "function": named})
    return result


def _tools(tools) -> list | None:
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("tools must be a list of function declarations")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _content(content):
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        is_block = content.get("type") in BLOCK_TYPES or str(content.get("type")).startswith("video")
        content = [content] if is_block else json.dumps(content, ensure_ascii=False)  # a tool's structured result
    if isinstance(content, list):
        return [_block(block) for block in content]
    if isinstance(content, str):
        return content
    raise ValueError(f"content must be a string or a list of blocks, found {type(content).__name__}")


def _block(block) -> dict:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, Mapping):
        raise ValueError(f"a content block must be an object, found {type(block).__name__}")
    spelled = block.get("type") or next((key for key in ("text", "image", "audio", "video") if key in block), None)
    if str(spelled).startswith("video") or str(spelled) == "input_video":
        raise ValueError("video blocks are not supported: give frames as images, or leave the row out")
    kind = BLOCK_TYPES.get(spelled)
    if kind is None:
        raise ValueError(f"unknown content block type{_word(spelled)}; known: text, image, audio")
    if kind == "text":
        return {"type": "text", "text": _string(block.get("text", ""), "the text of a block")}
    return {"type": kind, "value": _media_value(block, kind)}


def _media_value(block: Mapping, kind: str):
    """The media of a block: under the key named like the type, or `url` / `path`, or the OpenAI shapes."""
    for key in (kind, f"{kind}_url", f"input_{kind}", "url", "path", "bytes"):
        if key in block:
            value = block[key]
            if key == "bytes":
                return {"bytes": value}
            if isinstance(value, Mapping) and "url" in value:  # image_url: {"url"}
                return value["url"]
            if isinstance(value, Mapping) and isinstance(value.get("data"), str):  # input_audio: {"data", "format"}
                return f"data:{kind}/{value.get('format', '')};base64,{value['data']}"
            return value
    return None


# ---- merging


def merge_consecutive(messages: list[dict]) -> list[dict]:
    """Join neighbours of one role (texts by a newline); the joint message is trained only if all parts are.

    Tool messages stay apart: each answers its own call.
    """
    merged: list[dict] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] != "tool":
            last = merged[-1] = dict(merged[-1])
            last["content"] = _join(last["content"], message["content"])
            if "tool_calls" in message:
                last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
            if "reasoning" in message:
                last["reasoning"] = _join(last.get("reasoning", ""), message["reasoning"])
            if message.get("train") is False:
                last["train"] = False
        else:
            merged.append(message)
    return merged


def _check_results(messages: list[dict]) -> None:
    """Refuse a tool result that answers no call, which would vanish in most templates without a word; one that does not
    say which call it answers is that of the next call, or of the next one of its name."""
    waiting: list[dict] | None = None  # calls that are not answered yet; None where none was made
    known: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            waiting = list(calls) if calls else None
            known = {call["id"] for call in calls or () if call.get("id")}
        elif message["role"] != "tool":
            waiting = None
        elif waiting is None:
            raise ValueError("a tool message that answers no tool call")
        elif known:
            if "tool_call_id" not in message:
                named = [call for call in waiting if call["function"]["name"] == message.get("name")]
                message["tool_call_id"] = next((call.get("id") for call in named + waiting), None)
            if message["tool_call_id"] not in known:
                raise ValueError("a tool message whose tool_call_id is that of no call before it")
            waiting = [call for call in waiting if call.get("id") != message["tool_call_id"]]


def _join(first, second):
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    first, second = blocks_of(first), blocks_of(second)
    if first[-1]["type"] == second[0]["type"] == "text":
        joint = {"type": "text", "text": f"{first[-1]['text']}\n{second[0]['text']}"}
        return [*first[:-1], joint, *second[1:]]
    return first + second
