"""A server on loopback that speaks the OpenAI API, and says what a test has told it to say."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Answers a chat with `thought`, then `words`, one event each, `pause` seconds apart; with `refusal` as (status,
    answer), if that is set; without its end, if `cut`.

    `asked` and `keys` hold what came; `hung_up` is set once a client has gone before the end.
    """

    def __init__(self):
        self.thought: list[str] = []
        self.words, self.reasoning_key = ["Hello."], "reasoning_content"
        self.refusal, self.cut, self.pause = None, False, 0.0
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.hung_up = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self._reply(200, {"object": "list", "data": [{"id": "tiny-gemma", "object": "model"}]})

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.asked.append(json.loads(body))
                server.keys.append(self.headers["Authorization"])
                if server.refusal:
                    return self._reply(*server.refusal)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                thoughts = [{server.reasoning_key: word} for word in server.thought]
                try:
                    for delta in [{"role": "assistant"}, *thoughts, *({"content": word} for word in server.words)]:
                        event = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                        self.wfile.flush()
                        time.sleep(server.pause)
                    self.wfile.write(b"" if server.cut else b"data: [DONE]\n\n")
                except OSError:
                    server.hung_up.set()

            def _reply(self, status, answer):
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
