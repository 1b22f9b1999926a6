"""What people write as a row, turned into one canonical row.

`read_row` takes a conversation (`messages`), `prompt` + `completion`, `instruction` / `input` / `output`,
`conversations` with `from` / `value`, or `text`, with media inline or in columns, and returns a `Row`. It never opens a
media file and never changes what it is given.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import Fault, RowError
from .slots import Media, blocks_of, media_columns, place_media
from .stores import is_url
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
FILE_COLUMN = re.compile(r"(?:^|_)file_names?$", re.IGNORECASE)  # names a media file, in the layout of `datasets`
COLUMN = re.compile(r"[\w.-]{1,40}(?: [\w.-]{1,20})?")  # what may be told as a column's name
SAID = {"role", "content", "from", "value"}  # the keys of a message that is nothing but said
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
    folder: Path | str | None = None  # where its relative paths begin; a URL where the row is from an object store
    margin: float | None = None  # of the chosen side of a pair, by how much it is better


def read_row(raw: Mapping, name: str = "row") -> Row:
    """Turn one row of any accepted format into a `Row`.

    Args:
        raw: the row as read from a file or a data set, e.g. `{"prompt": "Name a fruit", "completion": "Pear"}`.
        name: what errors call it, where the row does not bring its own name.

    Raises:
        RowError: the row is in no known format, or something in it cannot be read; the message names the row.
    """
    with opened(raw, name) as (name, folder, fields):
        messages, text = _conversation(fields)
        return make_row(name, folder, fields, messages, text)


@contextlib.contextmanager
def opened(raw: Mapping, name: str):
    """A row's name, its folder, and its fields without what Arrow filled with None; faults met inside become a
    RowError that names the row."""
    if isinstance(raw, RowError):  # which stands where a row could not even be read
        raise raw
    if not isinstance(raw, Mapping):
        raise RowError(name, f"a row must be an object, found {type(raw).__name__}", "wrong_type")
    name, folder = raw.get(SOURCE) or (name, None)
    try:
        yield name, folder, {key: value for key, value in without_none(raw).items() if key != SOURCE}
    except Fault as problem:
        raise RowError(name, str(problem), problem.code) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise RowError(name, f"not built as a row is ({type(problem).__name__})", "wrong_type") from None


def make_row(name: str, folder, fields: dict, messages: list[dict], text: str | None = None) -> Row:
    """The canonical row of messages as `read_messages` returns them, or of a raw text; raises Fault."""
    row = Row(name=name, text=text, folder=_folder(folder))
    row.tools = _tools(fields.get("tools") or fields.get("functions"))
    row.trained = _loss_type(fields.get("loss_type", "supervised"))
    columns = media_columns(fields)
    if text is None:
        row.messages = merge_consecutive(messages)
        _check_results(row.messages)
        row.messages, row.media = place_media(row.messages, columns)
    elif any(columns.values()):
        raise Fault("media_without_placeholder", "a text row has no place for media: write the row as messages")
    _check_unicode(row)
    return row


@functools.lru_cache(16)
def _folder(folder: str | None) -> Path | str | None:
    if not folder:
        return None
    return folder if is_url(folder) else Path(folder)


def _check_unicode(row: Row) -> None:
    plain, others = [], [row.tools, row.text]
    for message in row.messages:
        if len(message) == 2 and isinstance(message["content"], str):
            plain.append(message["content"])
        else:
            others.append(message)
    try:
        "".join(plain + strings_in(others)).encode()
    except UnicodeEncodeError:
        raise Fault("bad_encoding", "text with half a surrogate pair, which is no character") from None


def strings_in(value) -> list[str]:
    """Every string in nested lists and mappings, keys included."""
    found: list[str] = []
    _collect(value, found)
    return found


def _collect(value, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict) or isinstance(value, Mapping):  # the latter takes long to tell
        for key, item in value.items():
            found.append(str(key))
            _collect(item, found)


def without_none(value):
    """Drop the keys that Arrow filled with None. Payloads (arrays, bytes) are left alone."""
    if isinstance(value, dict) or isinstance(value, Mapping):
        payload = ("array", "bytes", SOURCE)
        return {
            k: v if isinstance(v, str) or k in payload else without_none(v) for k, v in value.items() if v is not None
        }
    if isinstance(value, list) and not (value and isinstance(value[0], int | float)):
        return [without_none(item) for item in value]
    return value


def _loss_type(value) -> bool:
    if value not in ("supervised", "context_only"):
        raise Fault("bad_value", "loss_type must be supervised or context_only")
    return value == "supervised"


def _conversation(fields: dict) -> tuple[list[dict], str | None]:
    """(messages, None) of a conversation in any format, or ([], text) of a raw text row."""
    if "prompt" in fields and "completion" in fields and "messages" not in fields:
        prompt, completion = read_messages(fields["prompt"], "user"), read_messages(fields["completion"], "assistant")
        return with_system(fields, untrained(prompt)) + completion, None
    if "instruction" in fields and "output" not in fields and "messages" not in fields:
        raise Fault("missing_field", "instruction without its output")
    if prompt := read_request(fields):
        answer = read_messages(fields["output"], "assistant") if "output" in fields and "instruction" in fields else []
        return prompt + answer, None
    if any(FILE_COLUMN.search(str(key)) for key in fields):
        raise Fault("media_folder", "a row of a folder of media (file_name), which has to be converted")
    if "text" in fields:
        turns = read_turns(_string(fields["text"], "text"))
        # BOS and EOS are added when the row is tokenized: those that the text spells out itself are the same ones.
        text = None if turns else fields["text"].removeprefix("<bos>").removesuffix("<eos>")
        return [_message({"role": role, "content": said}) for role, said in turns], text
    if "chosen" in fields or "rejected" in fields:
        raise Fault("wrong_task", "a preference row (chosen / rejected), which is for dpo_train.py and reward_train.py")
    if "prompt" in fields or "completion" in fields:
        there, absent = ("prompt", "completion") if "prompt" in fields else ("completion", "prompt")
        raise Fault("missing_field", f"{there} without its {absent}")
    words = [key for key in sorted(map(str, fields)) if COLUMN.fullmatch(key)]  # else a table without a header
    others = f" and {len(fields) - len(words)} that are no names" if len(words) < len(fields) else ""
    found = (", ".join(words[:12]) or "no keys") + others
    raise Fault("unknown_format", f"no known format; found: {found}; accepted: {ACCEPTED}")


def read_request(fields: dict) -> list[dict]:
    """The messages of `messages`, `conversations` or `instruction` [+ `input`], with the `system` column before them;
    empty where the row has none of these. Raises Fault."""
    key = next((key for key in ("messages", "conversations") if key in fields), None)
    if key:
        messages = [_message(m) for m in _list_of(fields[key], key)]
    elif "instruction" in fields:
        parts = (_string(fields[name], name) for name in ("instruction", "input") if fields.get(name))
        messages = read_messages("\n\n".join(parts), "user")
    else:
        return []
    return with_system(fields, messages)


def with_system(fields: dict, messages: list[dict]) -> list[dict]:
    """Messages behind the text of a `system` column, if there is one and they bring no such message of their own."""
    text = fields.get("system") or ""
    if not _string(text, "system") or messages[0]["role"] in ("system", "developer"):
        return messages
    return read_messages(text, "system") + messages


def untrained(messages: list[dict]) -> list[dict]:
    """Messages whose answers are context."""
    return [m | {"train": False} if m["role"] == "assistant" else m for m in messages]


def _list_of(value, what: str) -> list:
    if isinstance(value, str):  # CSV and some exporters write the list as JSON text
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise Fault("missing_field", f"{what} is a string that is not JSON") from None
    if not isinstance(value, list) or not value:
        raise Fault("missing_field", f"{what} must be a list with at least one message")
    return value


def read_messages(value, role: str) -> list[dict]:
    """A prompt or an answer: a string is one message of `role`, a list is messages. Raises Fault."""
    if isinstance(value, str):
        return [_message({"role": role, "content": value})]
    return [_message(m) for m in _list_of(value, "prompt" if role == "user" else "completion")]


def _word(value) -> str:
    """A value for an error message, if it is a single word; errors never quote the data's text."""
    return f" {value!r}" if re.fullmatch(r"[\w-]{1,20}", str(value)) else ""


def _string(value, what: str) -> str:
    if not isinstance(value, str):
        raise Fault("wrong_type", f"{what} must be a string, found {type(value).__name__}")
    return value


# ---- messages


def _message(raw) -> dict:
    """One message in canonical form; media blocks keep their value under "value" until `_place_media` takes it."""
    if not isinstance(raw, dict):  # which `without_none` makes of any mapping
        raise Fault("wrong_type", f"a message must be an object, found {type(raw).__name__}")
    spelled = str(raw.get("role", raw.get("from", "")))
    if spelled == "function_call":  # sharegpt: a call written as JSON text
        calls = _tool_calls(_string(raw.get("value", raw.get("content")), "function_call"))
        return {"role": "assistant", "content": "", "tool_calls": calls, **_train_flag(raw)}
    if spelled not in ROLES:
        raise Fault("unknown_role", f"unknown role{_word(spelled)}; known: {', '.join(ROLES)}")
    content = _content(raw.get("content", raw.get("value", "")))
    if raw.get("plain") is True and len(content) == 1:  # a string, in a .parquet file that `writing.py` wrote
        content = content[0]["text"]
    message = {"role": ROLES[spelled], "content": content}
    if message["role"] == "assistant":
        _read_assistant(message, raw)
    elif message["role"] == "tool":
        message |= {key: _string(raw[key], key) for key in ("name", "tool_call_id") if key in raw}
    return message


def _read_assistant(message: dict, raw: Mapping) -> None:
    reasoning = ""
    if not raw.keys() <= SAID:
        if calls := raw.get("tool_calls") or raw.get("function_call"):  # the latter in OpenAI's older files
            message["tool_calls"] = _tool_calls(calls)
        names = ("reasoning", "reasoning_content", "thinking")
        reasoning = _string(next((raw[name] for name in names if raw.get(name)), ""), "reasoning")
        message |= _train_flag(raw)
    thought, message["content"] = _split_thought(message["content"])
    if thought and thought != reasoning.strip():
        reasoning = f"{reasoning}\n{thought}" if reasoning else thought
    if reasoning:
        message["reasoning"] = reasoning


def _train_flag(raw: Mapping) -> dict:
    """{"train": False} where a message is not to be trained; `weight` is how OpenAI's fine-tuning files say it."""
    wanted = raw.get("train", raw.get("weight", True))
    if wanted not in (True, False):  # 0 and 1 are equal to them
        raise Fault("bad_value", "train must be true or false")
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
            raise Fault("bad_tool_call", "a tool call that is not JSON") from None
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise Fault("bad_tool_call", "a tool call must be an object with a function")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError:
                raise Fault("bad_tool_call", "the arguments of a tool call are not JSON") from None
        if not isinstance(arguments, Mapping):
            raise Fault("bad_tool_call", "the arguments of a tool call must be a JSON object")
        named = {"name": _string(function.get("name"), "the name of a tool call"), "arguments": dict(arguments)}
        identity = {"id": call["id"]} if "id" in call else {}
        result.append(identity | {"type": "function", "function": named})
    return result


def _tools(tools) -> list | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError:
            raise Fault("bad_tools", "tools is a string that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Fault("bad_tools", "tools must be a list of function declarations")
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
    raise Fault("wrong_type", f"content must be a string or a list of blocks, found {type(content).__name__}")


def _block(block) -> dict:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, Mapping):
        raise Fault("wrong_type", f"a content block must be an object, found {type(block).__name__}")
    spelled = block.get("type") or next((key for key in ("text", "image", "audio", "video") if key in block), None)
    if str(spelled).startswith("video") or str(spelled) == "input_video":
        raise Fault("video", "video blocks are not supported: give frames as images, or leave the row out")
    kind = BLOCK_TYPES.get(spelled)
    if kind is None:
        raise Fault("unknown_block", f"unknown content block type{_word(spelled)}; known: text, image, audio")
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
            raise Fault("result_without_call", "a tool message that answers no tool call")
        elif known:
            if "tool_call_id" not in message:
                named = [call for call in waiting if call["function"]["name"] == message.get("name")]
                message["tool_call_id"] = next((call.get("id") for call in named + waiting), None)
            if message["tool_call_id"] not in known:
                raise Fault("result_without_call", "a tool message whose tool_call_id is that of no call before it")
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
