"""A server of a model on loopback that misbehaves as it is told: OpenAI's chat completions and Ollama's /api/chat.

`BadServer(answer)` answers each request by `answer(request)`, which gets a `Heard` and returns a text or a `Say`, which
may be a misdeed. What it heard stands in `heard`, in order.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Heard:
    path: str
    body: dict
    headers: dict
    at: float
    number: int  # of requests of this very body before it

    @property
    def asked(self) -> str:
        """The text of the last message."""
        content = self.body["messages"][-1]["content"]
        return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


@dataclass
class Say:
    """An answer, or a misdeed: `status` with `error` and `headers`, a `raw` body, `cut` in the middle of it, `wait`
    before it, or `chunked` in pieces."""

    text: str | None = ""
    status: int = 200
    error: object = None
    headers: dict = field(default_factory=dict)
    raw: bytes | None = None
    cut: bool = False
    wait: float = 0.0
    chunked: bool = False
    finish: str = "stop"
    message: dict = field(default_factory=dict)
    usage: bool = True


class BadServer:
    def __init__(self, answer, models=("teacher-1",), ollama=False, port=0, wait=0.0):
        self.answer, self.models, self.ollama, self.wait = answer, models, ollama, wait
        self.heard: list[Heard] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        server = type("Server", (ThreadingHTTPServer,), {"daemon_threads": True, "request_queue_size": 128})
        self.server = server(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *problem):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: BadServer

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        names = self.owner.models
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": name} for name in names]})
        elif self.path == "/api/tags":  # llama.cpp has it, too
            self._send(200, {"models": [{"name": name} for name in names]})
        elif self.path == "/api/version" and self.owner.ollama:
            self._send(200, {"version": "0.13.5"})
        else:
            self._send(404, {"error": "not found"})

    def do_POST(self):
        owner = self.owner
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with owner.lock:
            number = sum(other.body == body for other in owner.heard)
            heard = Heard(self.path, body, dict(self.headers), time.monotonic(), number)
            owner.heard.append(heard)
            owner.open += 1
            owner.most_open = max(owner.most_open, owner.open)
        try:
            time.sleep(owner.wait)
            said = owner.answer(heard)
            self._say(Say(said) if isinstance(said, str) else said, heard)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            with owner.lock:
                owner.open -= 1

    def _say(self, say: Say, heard: Heard) -> None:
        time.sleep(say.wait)
        if say.status != 200 or say.error:
            return self._send(say.status, {"error": say.error}, say.headers)
        if say.raw is not None:
            return self._write(200, say.raw, say.headers, say.cut)
        if heard.path == "/api/chat":
            data = {"message": {"role": "assistant", "content": say.text} | say.message, "done_reason": say.finish}
            data |= {"prompt_eval_count": 11, "eval_count": 7} if say.usage else {}
        else:
            message = {"role": "assistant", "content": say.text} | say.message
            data = {"choices": [{"message": message, "finish_reason": say.finish}]}
            data |= {"usage": {"prompt_tokens": 11, "completion_tokens": 7}} if say.usage else {}
        content = json.dumps(data, ensure_ascii=not say.chunked).encode()
        self._write(200, content, say.headers, say.cut, say.chunked)

    def _send(self, status: int, data, headers=None) -> None:
        self._write(status, json.dumps(data).encode(), headers or {})

    def _write(self, status: int, content: bytes, headers: dict, cut=False, chunked=False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked") if chunked else self.send_header(
            "Content-Length", str(len(content))
        )
        self.end_headers()
        if chunked:
            for at in range(0, len(content), 7):
                piece = content[at : at + 7]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        elif cut:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content)


def distill(capsys, *arguments) -> tuple[int, dict, str]:
    """Run distill_dataset.py in this process; returns its exit code, its JSON and its stderr."""
    import distill_dataset as script

    from gemma_trainer import cli

    capsys.readouterr()
    code = cli.run_commands(
        script.COMMANDS, script.__doc__, script.EXAMPLES, [*map(str, arguments), "--json", "--debug"]
    )
    told = capsys.readouterr()
    assert code != 1, told.err
    return code, json.loads(told.out), told.err
