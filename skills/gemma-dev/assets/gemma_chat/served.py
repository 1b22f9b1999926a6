"""A Gemma behind an OpenAI-compatible API: vLLM, llama-server, Ollama, transformers serve and others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from . import Chat, ChatError, media, parts

SECONDS_TO_CONNECT, SECONDS_TO_ANSWER = 10, 300


def connect(endpoint: str, model: str | None, key: str | None) -> Chat:
    """A chat with a served model.

    Args:
        endpoint: the URL up to and with `/v1`.
        model: its name there; None takes the first one that the server lists.
        key: sent as the bearer token, and never told.

    Raises:
        ChatError: no model is named, and the server lists none.
    """
    endpoint = endpoint.rstrip("/")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = model or _first_model(endpoint, headers)

    def answer(messages: list[dict], temperature: float, max_tokens: int, thinking: str) -> Iterator[list[parts.Part]]:
        asked = {
            "model": model,
            "messages": [message | {"content": _content(message["content"])} for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stream": True,
        }
        if thinking in ("on", "off"):
            asked["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
        thought = raw = ""
        for delta in _deltas(f"{endpoint}/chat/completions", asked, headers):
            # vLLM and Ollama say reasoning, llama-server and transformers serve reasoning_content.
            thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
            raw += delta.get("content") or ""
            thoughts = [parts.Part("thought", thought.strip(), bool(raw))] if thought.strip() else []
            yield thoughts + parts.split(raw)

    return Chat(model, ("image", "audio"), ("default", "off", "on"), 1.0, answer, at_once=16)


def _first_model(endpoint: str, headers: dict) -> str:
    import httpx

    with _told(endpoint, headers):
        answer = httpx.get(f"{endpoint}/models", headers=headers, timeout=SECONDS_TO_CONNECT)
        _check(answer)
        listed = answer.json()["data"]
    if not listed:
        raise ChatError(f"{endpoint} lists no model: name one with --model")
    return listed[0]["id"]


def _content(blocks: list[dict]) -> str | list[dict]:
    """A message's content in the API's form; text alone as a string."""
    if all(block["type"] == "text" for block in blocks):
        return "\n".join(block["text"] for block in blocks)
    forms = {
        "text": lambda block: block,
        "image": lambda block: {"type": "image_url", "image_url": {"url": media.as_png(block["image"])}},
        "audio": lambda block: {
            "type": "input_audio",
            "input_audio": {"data": media.as_wav(block["audio"]), "format": "wav"},
        },
    }
    return [forms[block["type"]](block) for block in blocks]


def _deltas(url: str, asked: dict, headers: dict) -> Iterator[dict]:
    """What the server adds to its answer, bit by bit. Closing the iterator hangs up, which stops the server."""
    import httpx

    timeout = httpx.Timeout(SECONDS_TO_ANSWER, connect=SECONDS_TO_CONNECT)
    with _told(url.removesuffix("/chat/completions"), headers):
        with httpx.stream("POST", url, json=asked, headers=headers, timeout=timeout) as answer:
            if answer.status_code != 200:
                answer.read()
                _check(answer)
            if "event-stream" not in answer.headers.get("content-type", ""):
                raise ValueError("no stream")
            ended = False
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    ended = ended or data == "[DONE]"
                    continue
                event = json.loads(data)
                if event.get("error"):
                    raise ChatError(f"the server says: {_message(event)}")
                for choice in event.get("choices") or []:
                    ended = ended or bool(choice.get("finish_reason"))
                    yield choice.get("delta") or {}
            if not ended:
                raise ChatError("the server broke off its answer")


def _check(answer) -> None:
    """Raises ChatError for any status but 200, with what the server says of it."""
    if answer.status_code == 200:
        return
    try:
        said = _message(answer.json())
    except ValueError:
        said = answer.reason_phrase
    hint = {401: ": is its key in the variable that --api-key-env names?", 404: ": does --endpoint end in /v1?"}
    raise ChatError(f"the server says {answer.status_code}, {said}{hint.get(answer.status_code, '')}")


def _message(answer) -> str:
    """The first line of an error in any of the forms that servers give it."""
    error = answer.get("error") or answer.get("message") or answer.get("detail") if isinstance(answer, dict) else answer
    error = error.get("message") if isinstance(error, dict) else error
    return (str(error).strip().splitlines() or [""])[0][:300]


@contextlib.contextmanager
def _told(endpoint: str, headers: dict):
    """What goes wrong with a server, in one line, without the key."""
    import httpx

    try:
        yield
    except httpx.ConnectError:
        raise ChatError(f"{endpoint} does not answer: is the server running?") from None
    except httpx.TimeoutException:
        raise ChatError(f"{endpoint} took too long: nothing came for {SECONDS_TO_ANSWER} seconds") from None
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise ChatError(f"{endpoint} broke off ({type(problem).__name__})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ChatError(f"{endpoint} does not speak the OpenAI API: does it end in /v1?") from None
    except ChatError as problem:
        key = headers.get("Authorization", "").removeprefix("Bearer ")
        raise ChatError(str(problem).replace(key, "(key)") if key else str(problem)) from None
