#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "accelerate>=1.12,<2",
#     "gradio>=6.31,<7",
#     "httpx>=0.27,<1",
#     "librosa>=0.11",
#     "numpy>=2",
#     "peft>=0.21,<1",
#     "pillow>=11",
#     "soundfile>=0.13",
#     "torch>=2.9",
#     "torchvision>=0.24",
#     "transformers>=5.17,<6",
# ]
# ///
"""Chat with a Gemma in the browser, with pictures and recordings: a model, a fine-tuning run, or a server."""

from __future__ import annotations

import argparse
import html
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_chat import Chat, ChatError, parts

EXAMPLES = """examples:
  python gradio_app.py --model google/gemma-4-E2B-it
  python gradio_app.py --model runs/sft_train-20261201-101500          (a run of gemma-trainer, or any PEFT adapter)
  python gradio_app.py --endpoint http://localhost:8000/v1             (vLLM, llama-server, Ollama, transformers serve)
  python gradio_app.py --endpoint https://example.com/v1 --model NAME --api-key-env MY_KEY
  python gradio_app.py --model demo                                    (tiny, random weights, no download)

exit codes:
  0 done                 4 missing package, or the port is taken    6 out of memory
  1 unexpected fault     5 model not loaded, server not reached     130 interrupted, 143 terminated
  2 wrong usage"""
UPLOAD = "50mb"
KEPT = (3600, 86400)  # uploads are looked at every hour, and deleted after a day


# ---- flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ChatError(f"{message} (see {self.prog} --help)", 2)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="hub id, folder of a model, a run or an adapter, or demo; with --endpoint its name there")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible API to talk to, up to and with /v1")
    add(
        "--api-key-env",
        metavar="NAME",
        default="OPENAI_API_KEY",
        help="environment variable with the key of the endpoint (default: OPENAI_API_KEY)",
    )
    add("--quantize", choices=["none", "4bit"], default="none", help="4bit: on NVIDIA (default: none)")
    add("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in (default: 127.0.0.1)")
    add("--port", type=int, help="(default: the first free one from 7860)")
    add("--login-env", metavar="NAME", help="environment variable with USER:PASSWORD that the page asks for")
    add("--share", action="store_true", help="a public link through gradio.live, for a week; needs --login-env")
    add("--json", action="store_true", help="one JSON object on stdout, once it runs, also for failures")
    add("--debug", action="store_true", help="tracebacks on stderr")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked; raises ChatError with exit code 2."""
    parser = build_parser()
    asked = parser.parse_args(argv)
    if not (asked.model or asked.endpoint):
        parser.error("give --model or --endpoint; --model demo tries the app without a download")
    if asked.endpoint and not asked.endpoint.startswith(("http://", "https://")):
        parser.error(f"--endpoint {asked.endpoint}: expected http:// or https://")
    if asked.port is not None and not 0 < asked.port < 65536:
        parser.error(f"--port {asked.port}: expected 1 to 65535")
    if asked.share and not asked.login_env:
        parser.error("--share lets in whoever has the link: set a variable to USER:PASSWORD and name it in --login-env")
    return asked


def login(variable: str | None) -> tuple[str, str] | None:
    """(user, password) from an environment variable; raises ChatError where it does not hold them."""
    if variable is None:
        return None
    user, _, password = os.environ.get(variable, "").partition(":")
    if not (user and password):
        raise ChatError(f"--login-env {variable}: that variable does not hold USER:PASSWORD", 2)
    return user, password


# ---- the page


def page(chat: Chat):
    """The app as a gradio.ChatInterface, not launched yet."""
    import gradio as gr

    return gr.ChatInterface(
        answering(chat),
        multimodal=bool(chat.kinds),
        validator=checking(chat) if chat.kinds else None,
        chatbot=gr.Chatbot(
            show_label=False,
            scale=1,
            buttons=["copy", "copy_all"],
            placeholder=f"Ask {html.escape(chat.name)} something",
        ),
        textbox=_textbox(gr, chat.kinds),
        additional_inputs=_settings(gr, chat),
        additional_inputs_accordion=gr.Accordion("Settings", open=False),
        title=html.escape(chat.name),
        concurrency_limit=chat.at_once,
        analytics_enabled=False,
        api_visibility="private",
        delete_cache=KEPT,
    )


def answering(chat: Chat):
    """The function that gradio calls for an answer: it yields the bubbles so far, again and again."""

    def answer(message, history, system, temperature, max_tokens, thinking=""):
        message = message if isinstance(message, dict) else {"text": message, "files": []}
        shown: list[dict] = []
        try:
            messages = conversation(history, message, system, chat.kinds)
            for found in chat.answer(messages, temperature, int(max_tokens), thinking):
                shown = [bubble(part) for part in found]
                yield shown
            if not any("metadata" not in one for one in shown):
                told = f"no answer within {int(max_tokens)} tokens: raise that in the settings"
                raise ChatError(told if shown else "the model said nothing: ask in another way")
        except ChatError as problem:
            yield [*shown, failure(str(problem))]
        except Exception as problem:
            traceback.print_exc()
            yield [*shown, failure(f"it failed ({type(problem).__name__}): see what the app's terminal says")]

    return answer


def checking(chat: Chat):
    """The function that gradio calls before anything is sent: where it refuses a file, the message stays as it is."""
    import gradio as gr
    from gemma_chat import media

    def check(message):
        try:
            for file in message["files"]:
                media.block(file, chat.kinds)
        except ChatError as problem:
            return gr.validate(False, str(problem))
        return gr.validate(True, "")

    return check


def _textbox(gr, kinds: tuple[str, ...]):
    if not kinds:
        return gr.Textbox(placeholder="Message", max_lines=20, autofocus=True, submit_btn=True, stop_btn=True)
    sources = ["upload"] + ["microphone"] * ("audio" in kinds)
    named = " or ".join({"image": "pictures", "audio": "recordings"}[kind] for kind in kinds)
    return gr.MultimodalTextbox(
        placeholder=f"Message, with {named} if you like",
        sources=sources,
        file_types=list(kinds),
        file_count="multiple",
        max_plain_text_length=1_000_000,  # longer text would become a file, which the model does not take
        autofocus=True,
        stop_btn=True,
    )


def _settings(gr, chat: Chat) -> list:
    settings = [
        gr.Textbox(label="System prompt", lines=2),
        gr.Slider(0, 2, chat.temperature, step=0.05, label="Temperature", info="0: always the likeliest token"),
        gr.Slider(16, 8192, 1024, step=16, label="Tokens of an answer, at most", info="Thoughts count"),
    ]
    if chat.thinking:
        settings.append(gr.Radio(list(chat.thinking), value=chat.thinking[0], label="Thinking"))
    return settings


def conversation(history: list[dict], message: dict, system: str, kinds: tuple[str, ...]) -> list[dict]:
    """The messages that a chat takes, from what the page holds.

    Thoughts and tool calls are not sent again, nor are questions that got no answer.

    Args:
        history: gradio's messages: {"role", "content": [{"type": "text" | "file", ...}], "metadata"}.
        message: {"text", "files"}, what is asked now; a file is a path or, where it is asked again, {"path": ...}.

    Raises:
        ChatError: a file cannot be used, or nothing is asked.
    """
    turns = [{"role": role, "content": _blocks(text, files, kinds)} for role, text, files in _answered(history)]
    files = [file["path"] if isinstance(file, dict) else file for file in message["files"]]
    asked = _blocks(message["text"] or "", files, kinds)
    if not asked:
        raise ChatError("nothing is asked: write something, or add a file")
    first = [{"role": "system", "content": _blocks(system, [], kinds)}] if (system or "").strip() else []
    return [*first, *turns, {"role": "user", "content": asked}]


def _answered(history: list[dict]) -> list[tuple[str, str, list[str]]]:
    """(role, text, files) of the turns before, without questions that got no answer."""
    turns: list[tuple[str, str, list[str]]] = []
    for told in history:
        if (told.get("metadata") or {}).get("title"):
            continue
        content = told["content"] if isinstance(told["content"], list) else [{"type": "text", "text": told["content"]}]
        text = "\n".join(one["text"] for one in content if one["type"] == "text")
        files = [one["file"]["path"] for one in content if one["type"] == "file"]
        if turns and turns[-1][0] == told["role"]:  # an answer in two pieces, or a question after one without answer
            before = turns.pop()
            text = f"{before[1]}\n{text}" if told["role"] == "assistant" else text
        turns.append((told["role"], text, files))
    return turns[:-1] if turns and turns[-1][0] == "user" else turns


def _blocks(text: str, files: list[str], kinds: tuple[str, ...]) -> list[dict]:
    """Media first, then the text, as Gemma was trained on."""
    from gemma_chat import media

    blocks = [media.block(file, kinds) for file in files]
    return [*blocks, {"type": "text", "text": parts.plain(text.strip())}] if text.strip() else blocks


def bubble(part: parts.Part) -> dict:
    """A part of an answer as gradio shows it: thoughts and calls folded up once they are complete."""
    if part.kind == "text":
        return {"role": "assistant", "content": part.text}
    title = {"thought": "Thinking", "call": "Tool call"}[part.kind]
    text = part.text if part.kind == "thought" else f"```\n{part.text}\n```"
    return {
        "role": "assistant",
        "content": text,
        "metadata": {"title": title, "status": "done" if part.done else "pending"},
    }


def failure(told: str) -> dict:
    """An error as a bubble of its own, which is not sent again. (Raising gr.Error would leave the message box shut.)"""
    return {"role": "assistant", "content": html.escape(told), "metadata": {"title": "Error"}}


# ---- running


def launch(asked: argparse.Namespace) -> dict:
    """Load or connect, and open the page; returns what to tell of it."""
    credentials = login(asked.login_env)
    chat = _chat(asked)
    import gradio as gr

    app = page(chat)
    try:
        _, url, shared = app.launch(
            server_name=asked.host,
            server_port=asked.port,
            share=asked.share,
            auth=credentials,
            max_file_size=UPLOAD,
            theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
            css='[aria-label="Share"] { display: none }',  # which is for publishing on Spaces
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            prevent_thread_lock=True,
            quiet=True,
        )
    except OSError:
        port = f"port {asked.port}" if asked.port else "every port from 7860 on"
        raise ChatError(
            f"{port} of {asked.host} is taken, or not to be opened: choose another with --port", 4
        ) from None
    if asked.share and not shared:
        raise ChatError("--share: no link to be had from gradio.live", 4)
    return {"status": "serving", "url": url, "share_url": shared, "model": chat.name, "takes": ["text", *chat.kinds]}


def _chat(asked: argparse.Namespace) -> Chat:
    if asked.endpoint:
        from gemma_chat import served

        return served.connect(asked.endpoint, asked.model, os.environ.get(asked.api_key_env, "").strip() or None)
    from gemma_chat import local

    print(f"loading {asked.model}", file=sys.stderr, flush=True)
    return local.load(asked.model, asked.quantize == "4bit")


def _quiet_environment() -> None:
    """Before any heavy import: no telemetry, and no chatter of libraries."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _Terminated(BaseException):
    """SIGTERM came."""


def _terminate(number, frame):
    raise _Terminated


def as_error(problem: BaseException) -> ChatError:
    """What to tell of any exception, and the exit code."""
    if isinstance(problem, ChatError):
        return problem
    if isinstance(problem, KeyboardInterrupt):
        return ChatError("interrupted", 130)
    if isinstance(problem, _Terminated):
        return ChatError("terminated", 143)
    if isinstance(problem, ImportError):
        told = "run the script with `uv run`, which installs what its first lines name, or install that with pip"
        return ChatError(f"{problem}: {told}", 4)
    if isinstance(problem, MemoryError) or "out of memory" in str(problem).lower():
        return ChatError("out of memory: take a smaller model, --quantize 4bit, or serve it and use --endpoint", 6)
    return ChatError(f"unexpected {type(problem).__name__}: run again with --debug for the traceback", 1)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    stdout, as_json, facts = sys.stdout, "--json" in argv, None
    try:
        asked = parse(argv)
        signal.signal(signal.SIGTERM, _terminate)
        _quiet_environment()
        sys.stdout = sys.stderr  # stdout has the result alone, none of the libraries' chatter
        facts = launch(asked)
        told = f"{facts['model']}: {facts['share_url'] or facts['url']} (Ctrl-C ends it)"
        print(json.dumps(facts) if as_json else told, file=stdout, flush=True)
        threading.Event().wait()
    except BaseException as problem:
        if isinstance(problem, SystemExit):  # of --help
            raise
        if "--debug" in argv:
            traceback.print_exc()
        error = as_error(problem)
        print(f"error: {error}", file=sys.stderr, flush=True)
        if as_json and facts is None:
            failed = {"status": "failed", "exit_code": error.exit_code, "error": {"message": str(error)}}
            print(json.dumps(failed), file=stdout, flush=True)
        return error.exit_code
    finally:
        sys.stdout = stdout


if __name__ == "__main__":
    sys.exit(main())
