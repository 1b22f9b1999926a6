"""A teacher on a server: many requests at once, at a pace, tried again where that helps, and ended without a loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from .chat_apis import APIS, base_url, shortened, told_url
from .cli import note
from .errors import CannotLoad, Interrupted, MediaError, RowError, UsageError
from .media import MediaAccess
from .pacing import Budget, Pace, estimate_tokens, with_counts
from .refusals import Again, Refused, check_answer, told_of
from .replies import Failure, Reply, Request

BACKOFF, LONGEST_BACKOFF = 1.0, 60.0  # seconds, of a wait that doubles; what a server asks for may be longer
GRACE = 5.0  # seconds for open requests, once it is to end: they are paid for
FAILED_IN_A_ROW = 10  # requests, each tried so often, after which a server is held to be gone
MAX_ANSWER = 64 * 2**20  # bytes
LONG_WAIT = 30.0  # seconds that a user is told of
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _Ended(Exception):
    """No more is to be asked."""


class ServerTeacher:
    """A model behind a URL. `config` are the flags of distill_dataset.py."""

    def __init__(self, url: str, model: str | None, key: str | None, config, pace: Pace, budget: Budget):
        self.url, self.model, self.key, self.config = url, model, key, config
        self.pace, self.budget, self.name = pace, budget, told_url(url)
        self.api = None if config.api == "auto" else config.api
        self.access = MediaAccess(Path(config.media_root) if config.media_root else None, config.allow_remote_media)
        self.left_out: set[str] = set()  # parts of a request that the server does not take
        self.answered, self.tokens_out, self.in_a_row = 0, 0, 0
        self.ending: BaseException | None = None

    # -- who answers

    def open(self) -> None:
        """Find out how the server is asked, and which model it has, as far as no flag says so.

        Raises:
            CannotLoad: it does not answer, or has no model.
            UsageError: it has several models, and none is named.
        """
        if self.model and self.api:
            return
        try:
            asyncio.run(self._open())
        except (Again, Refused) as problem:
            told = f"{self.name} cannot be reached ({problem}): is it running, and the address right?"
            raise CannotLoad(told) from None
        except _Ended:
            raise CannotLoad(f"{self.name} cannot be reached within --max-minutes") from None

    def close(self) -> None:
        """Nothing is held between two calls."""

    async def _open(self) -> None:
        self._begin()
        async with self._client() as client:
            if self.api is None:
                bare = not urlsplit(self.url).path.strip("/").removeprefix("api")
                found = await self._get(client, f"{base_url(self.url, 'ollama')}/api/version") if bare else None
                self.api = "ollama" if isinstance(found, dict) and "version" in found else "openai"
            if self.model is None:
                self.model = self._only_one(await self._get(client, self._address(APIS[self.api].models)))

    def _only_one(self, listed) -> str:
        try:
            names = APIS[self.api].names(listed)
        except (KeyError, TypeError):
            raise CannotLoad(f"{self.name} does not list its models (--api {self.api}): give --teacher-model") from None
        if not names:
            raise CannotLoad(f"{self.name} has no model: load one there first")
        if len(names) > 1:
            told = ", ".join(map(str, names[:10])) + " ..." * (len(names) > 10)
            raise UsageError(f"{self.name} has {len(names)} models: {told}; give --teacher-model (--judge-model)")
        return names[0]

    async def _get(self, client, url: str):
        """The JSON at an address; None where there is none. Raises Again, CannotLoad."""

        async def once():
            status, headers, content = await self._send(client, "GET", url)
            if status >= 500 or status == 429:
                check_answer(status, headers, content, self)
            if status in (401, 403):
                raise CannotLoad(told_of(status, self))
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(content) if status == 200 else None

        return await self._retrying()(once)

    def _address(self, path: str) -> str:
        return base_url(self.url, self.api) + path

    def example(self, request: Request) -> dict:
        """A request for a reader, its media shortened. Nothing is sent."""
        return shortened(self._body(request, self.api or "openai"))

    def _body(self, request: Request, api: str) -> dict:
        model = self.model or "(the one that is served)"
        return APIS[api].body(request, model, self.config.thinking, self.config.max_len, self.access)

    def _taken(self, body: dict) -> dict:
        """What the server takes of a request's body."""
        if "max_tokens" in self.left_out:  # as newer models of OpenAI want it
            body = body | {"max_completion_tokens": body["max_tokens"]}
        return {name: value for name, value in body.items() if name not in self.left_out}

    # -- asking

    def ask(self, requests: Sequence[Request], tell) -> None:
        """Ask all, `--concurrency` at a time; `tell(request, Reply | Failure)` as answers come.

        Raises:
            CannotLoad: the key or the model is refused, or the server is gone. What came before was told.
            Interrupted: by a signal; open requests had a few seconds to end.
        """
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            asyncio.run(self._ask(requests, tell))
        finally:  # the loop leaves the defaults behind
            with contextlib.suppress(ValueError):  # in another thread
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    async def _ask(self, requests: Sequence[Request], tell) -> None:
        self._begin()
        loop, waiting = asyncio.get_running_loop(), iter(requests)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or another thread
                loop.add_signal_handler(number, self._signalled, number)
        async with self._client() as client:
            count = min(self.config.concurrency, len(requests))
            self.tasks = [asyncio.create_task(self._work(client, waiting, tell)) for _ in range(count)]
            ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        faults = [one for one in ended if isinstance(one, Exception)]  # which a cancelled task's is not
        if self.ending or faults:
            raise self.ending or faults[0]

    def _begin(self) -> None:
        self.stop, self.ending, self.tasks = asyncio.Event(), None, []

    def _signalled(self, number: int) -> None:
        if self.ending:  # the second time
            self._drop()
        else:
            self._end(Interrupted("interrupted", 130 if number == signal.SIGINT else 143))

    def _end(self, reason: BaseException) -> None:
        """Ask no more, and give what is open a moment."""
        self.ending = self.ending or reason
        self.stop.set()
        asyncio.get_running_loop().call_later(GRACE, self._drop)

    def _drop(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _work(self, client, waiting, tell) -> None:
        """Take requests from a shared iterator until there are no more, or it is to end."""
        for request in waiting:
            tokens = estimate_tokens(request.row)
            most = self.budget.cost(tokens, request.max_tokens)
            if self.stop.is_set() or not self.budget.take(most):
                return
            spent = 0.0
            try:
                found = await self._answer(client, request, tokens)
                if isinstance(found, Reply):
                    spent = self.budget.cost_of([found])
                tell(request, found)
            except _Ended:
                return
            except (CannotLoad, UsageError, OSError) as problem:  # the last: of a disk that is full
                return self._end(problem)
            finally:
                self.budget.settle(most, spent)
            self._count(found)

    def _count(self, found: Reply | Failure) -> None:
        if isinstance(found, Reply):
            self.answered, self.in_a_row = self.answered + 1, 0
            self.tokens_out += found.tokens_out or 0
        elif not found.own:
            self.in_a_row += 1
            if self.in_a_row >= FAILED_IN_A_ROW:
                told = f"{self.in_a_row} requests in a row failed, the last one: {found.reason}"
                self._end(CannotLoad(f"{self.name} does not answer any more ({told})"))

    async def _answer(self, client, request: Request, tokens: int) -> Reply | Failure:
        try:
            body = await asyncio.to_thread(self._body, request, self.api)
        except RowError as problem:
            return Failure(problem.code, problem.reason, own=True)
        except MediaError as problem:
            return Failure(problem.code, str(problem), own=True)
        except OSError as problem:  # a medium that is no longer what it was
            return Failure("media_unreadable", f"a medium cannot be read ({type(problem).__name__})", own=True)
        try:
            return await self._retrying()(self._try, client, request, body, tokens)
        except (Again, Refused) as problem:
            return Failure(problem.code, str(problem), own=problem.own)

    def _retrying(self):
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        return AsyncRetrying(
            sleep=self._sleep,
            stop=stop_after_attempt(self.config.retries + 1),
            wait=self._backoff,
            retry=retry_if_exception_type(Again),
            reraise=True,
        )

    def _backoff(self, state) -> float:
        """Seconds to the next try: a random part of a time that doubles, or what the server asked for."""
        doubled = min(LONGEST_BACKOFF, BACKOFF * 2 ** (state.attempt_number - 1))
        return max(state.outcome.exception().wait, random.uniform(doubled / 2, doubled))

    async def _sleep(self, seconds: float) -> None:
        if time.monotonic() + seconds > self.budget.ends_at:
            self.budget.ended = "max_minutes"
            raise _Ended
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)
            raise _Ended

    async def _try(self, client, request: Request, body: dict, tokens: int) -> Reply:
        """One request; raises Again, Refused, CannotLoad."""
        out = self.tokens_out // self.answered if self.answered else request.max_tokens
        await self._sleep(self.pace.wait(tokens + out))
        while (held := self.pace.held) > 0:
            await self._sleep(held)
        api = APIS[self.api]
        sent = self._taken(body)
        status, headers, content = await self._send(client, "POST", self._address(api.chat), sent)
        try:
            data = check_answer(status, headers, content, self, request, sent)
        except Again as problem:
            if problem.wait > max(LONG_WAIT, self.pace.held + 1):
                note(f"{self.name} asks to wait {problem.wait:.0f} s.")
            self.pace.hold(problem.wait)
            raise
        try:
            return with_counts(request, api.read(data))
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            raise Again("no_answer", "an answer without a message in it") from None

    async def _send(self, client, method: str, url: str, body: dict | None = None):
        """(status, headers, content); raises Again where the connection fails."""
        import httpx

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with (
                asyncio.timeout(self.config.timeout),
                client.stream(method, url, json=body, headers=headers) as response,
            ):
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_ANSWER:
                        raise Refused("huge_answer", f"an answer of more than {MAX_ANSWER // 2**20} MiB")
                return response.status_code, response.headers, bytes(content)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError):
            raise UsageError(f"{self.name} is no address of a server") from None
        except (TimeoutError, httpx.TimeoutException):
            raise Again("timeout", f"no answer within {self.config.timeout:g} s") from None
        except (httpx.HTTPError, httpx.StreamError) as problem:
            raise Again("connection", f"{type(problem).__name__}: {problem}"[:160]) from None

    def _client(self):
        import httpx

        many = self.config.concurrency
        local = urlsplit(self.url).hostname in LOOPBACK  # which no proxy stands before
        return httpx.AsyncClient(
            timeout=httpx.Timeout(self.config.timeout),
            limits=httpx.Limits(max_connections=many, max_keepalive_connections=many),
            trust_env=not local,
        )
