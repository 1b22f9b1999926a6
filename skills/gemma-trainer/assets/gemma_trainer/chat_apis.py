"""The two ways in which servers of models are asked: OpenAI's chat completions, which vLLM, llama.cpp and most services
speak, and Ollama's own /api/chat.

Facts are from the documentation of the OpenAI API (chat completions), of vLLM (reasoning outputs: `reasoning`, formerly
`reasoning_content`) and of Ollama (docs/api.md and its `ChatRequest`: `format`, `think`, `truncate`, `shift`).
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from .errors import RowError
from .media import ORIENTATION, MediaAccess, open_audio, open_image
from .media_files import embedded, suffix_of
from .replies import Reply, Request, split_thought
from .rows import Row
from .slots import blocks_of

IMAGES = {".png": "image/png", ".jpg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif"}  # that are taken
CLIPS = {".wav": "wav", ".mp3": "mp3"}
RATE = 16_000  # of clips that have to be written anew
SHOWN = 60  # characters of a medium in a request that is shown


@dataclass(frozen=True)
class Api:
    """How a server is asked. `body(request, model, thinking, room, access)` is the JSON of a request, `read(data)` the
    answer in what comes back (KeyError, TypeError, IndexError or ValueError where there is none), `names(data)` the
    models that are served."""

    name: str
    chat: str
    models: str
    body: Callable[..., dict]
    read: Callable[[Mapping], Reply]
    names: Callable[[Mapping], list[str]]


def base_url(url: str, api: str) -> str:
    """The address that an API's paths are added to, of one as users write it.

    Example:
        "http://localhost:8000" gives "http://localhost:8000/v1" for openai, "http://localhost:11434/api/" gives
        "http://localhost:11434" for ollama.
    """
    url = url.rstrip("/")
    for end in ("/chat/completions", "/completions", "/models", "/api/chat", "/api/tags"):
        url = url.removesuffix(end)
    if api == "ollama":
        return url.removesuffix("/api").removesuffix("/v1")
    return url if urlsplit(url).path.strip("/") else f"{url}/v1"


def told_url(url: str) -> str:
    """A URL without the name and password that it may hold, and without its query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


# ---- media


def encoded_image(value, row: Row, access: MediaAccess) -> tuple[str, str]:
    """(mime type, base64) of an image: its file where servers take its kind and it stands upright, else PNG."""
    content = embedded(value, "image", row.folder, access)["bytes"]
    suffix = suffix_of(content)
    if suffix not in IMAGES or _turned(content):
        file = io.BytesIO()
        open_image(content).save(file, "PNG")
        content, suffix = file.getvalue(), ".png"
    return IMAGES[suffix], base64.b64encode(content).decode()


def _turned(content: bytes) -> bool:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return image.getexif().get(ORIENTATION, 1) != 1


def encoded_clip(value, row: Row, access: MediaAccess) -> tuple[str, str]:
    """("wav" or "mp3", base64) of a clip: its file as it is where servers take its kind, else WAV of 16 kHz, mono."""
    found = embedded(value, "audio", row.folder, access)
    content, suffix = found["bytes"], suffix_of(found["bytes"], found["path"])
    if suffix not in CLIPS:
        import soundfile

        samples, _ = open_audio(content, RATE)
        file = io.BytesIO()
        soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
        content, suffix = file.getvalue(), ".wav"
    return CLIPS[suffix], base64.b64encode(content).decode()


# ---- OpenAI


def openai_body(request: Request, model: str, thinking: str | None, room: int, access: MediaAccess) -> dict:
    media = iter(request.row.media)
    body = {
        "model": model,
        "messages": [_openai_message(m, media, request.row, access) for m in _with_ids(request.row.messages)],
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
    }
    if request.row.tools:
        body["tools"] = request.row.tools
    if request.schema:
        form = {"name": "answer", "schema": request.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if thinking in ("on", "off"):  # vLLM, llama.cpp and SGLang hand it to the chat template
        body["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
    return body


def _with_ids(messages: list[dict]) -> list[dict]:
    """Messages whose calls all have an id, as this API wants, and whose results name it."""
    made, waiting, count = [], [], 0
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                calls.append({**call, "id": call.get("id") or f"call_{count}"})
                count += 1
            message, waiting = message | {"tool_calls": calls}, [call["id"] for call in calls]
        elif message["role"] == "tool" and waiting:
            own = message.get("tool_call_id")
            message = message | {"tool_call_id": own or waiting[0]}
            waiting = [known for known in waiting if known != message["tool_call_id"]]
        made.append(message)
    return made


def _openai_message(message: dict, media, row: Row, access: MediaAccess) -> dict:
    role = "system" if message["role"] == "developer" else message["role"]
    made = {"role": role, "content": message["content"]}
    if not isinstance(message["content"], str):
        made["content"] = [_openai_block(block, media, row, access) for block in message["content"]]
    if message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return made | {key: message[key] for key in ("name", "tool_call_id") if key in message}


def _openai_block(block: dict, media, row: Row, access: MediaAccess) -> dict:
    if block["type"] == "text":
        return block
    medium = next(media)
    if medium.kind == "image":
        mime, content = encoded_image(medium.value, row, access)
        return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{content}"}}
    form, content = encoded_clip(medium.value, row, access)
    return {"type": "input_audio", "input_audio": {"data": content, "format": form}}


def read_openai(data: Mapping) -> Reply:
    choice = data["choices"][0]
    message, usage = choice["message"], data.get("usage") or {}
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    reasoning, text = split_thought(content, message.get("reasoning") or message.get("reasoning_content") or "")
    finish = choice.get("finish_reason") or "stop"
    if message.get("refusal") or finish == "content_filter":
        text, finish = text or str(message.get("refusal") or ""), "refused"
    counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Reply(text, reasoning, tuple(message.get("tool_calls") or ()), finish, *map(_count, counts))


def _count(value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


# ---- Ollama


def ollama_body(request: Request, model: str, thinking: str | None, room: int, access: MediaAccess) -> dict:
    media = iter(request.row.media)
    options = {"temperature": request.temperature, "seed": request.seed, "num_predict": request.max_tokens}
    body = {
        "model": model,
        "messages": [_ollama_message(m, media, request.row, access) for m in request.row.messages],
        "stream": False,
        # Its own context is often 4096 tokens, and what is longer loses its beginning without a word.
        "options": options | {"num_ctx": room + request.max_tokens},
        "truncate": False,
        "shift": False,
    }
    if request.row.tools:
        body["tools"] = request.row.tools
    if request.schema:
        body["format"] = request.schema
    if thinking in ("on", "off"):
        body["think"] = thinking == "on"
    return body


def _ollama_message(message: dict, media, row: Row, access: MediaAccess) -> dict:
    texts, images = [], []
    for block in blocks_of(message["content"]):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        medium = next(media)
        if medium.kind == "audio":
            raise RowError(row.name, "a clip, which Ollama's API has no place for: take a server of --api openai",
                           "media_unsupported")  # fmt: skip
        images.append(encoded_image(medium.value, row, access)[1])
    role = "system" if message["role"] == "developer" else message["role"]
    made = {"role": role, "content": "\n".join(texts)} | ({"images": images} if images else {})
    if message.get("tool_calls"):
        made["tool_calls"] = [{"function": call["function"]} for call in message["tool_calls"]]
    return made | ({"tool_name": message["name"]} if "name" in message else {})


def read_ollama(data: Mapping) -> Reply:
    message = data["message"]
    reasoning, text = split_thought(message.get("content") or "", message.get("thinking") or "")
    finish = data.get("done_reason") or "stop"
    counts = data.get("prompt_eval_count"), data.get("eval_count")
    return Reply(text, reasoning, tuple(message.get("tool_calls") or ()), finish, *map(_count, counts))


APIS = {
    "openai": Api("openai", "/chat/completions", "/models", openai_body, read_openai,
                  lambda data: [entry["id"] for entry in data["data"]]),
    "ollama": Api("ollama", "/api/chat", "/api/tags", ollama_body, read_ollama,
                  lambda data: [entry["name"] for entry in data["models"]]),
}  # fmt: skip


def shortened(value):
    """A request for a reader: long runs of base64 are cut."""
    if isinstance(value, Mapping):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str) and len(value) > 4 * SHOWN and " " not in value:
        return f"{value[:SHOWN]}... ({len(value):,} characters)"
    return value
