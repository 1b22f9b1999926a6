"""Models that answer: on a server, many at a time, or in this process, in batches.

Both are asked alike: `open()` finds out who answers and sets `model`; `ask(requests, tell)` calls
`tell(request, Reply | Failure)` for each request, as answers come; `close()` frees what `open()` took.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from .asked import hashed
from .cli import note
from .errors import UsageError
from .pacing import Budget, Pace, estimate_tokens
from .replies import Failure, Reply, Request, split_thought
from .server import ServerTeacher

Tell = Callable[[Request, Reply | Failure], None]


def make_teacher(flag: str, name: str, model: str | None, config, budget: Budget):
    """The teacher that a flag names: a URL is a server, all else a model that is loaded here.

    Args:
        flag: "--teacher" or "--judge".
        model: which one of the server's, where it serves several.
        config: the flags of distill_dataset.py.

    Raises:
        UsageError: a URL of another kind, a key that is none, or a model's name where there is no server.
    """
    if re.match(r"https?://", name, re.IGNORECASE):
        try:
            parts = urlsplit(name)
            readable = parts.hostname and (parts.port or 80) and not parts.query
        except ValueError:
            readable = False
        if not readable:
            raise UsageError(f"{flag}: an address that cannot be read; give http://host:port or https://host/path")
        key = os.environ.get(config.api_key_env, "").strip() or None
        if key and not (key.isascii() and key.isprintable()):
            raise UsageError(f"what is in the environment variable {config.api_key_env} is no key: copy it anew")
        pace = Pace(config.requests_per_minute, config.tokens_per_minute)
        return ServerTeacher(name, model, key, config, pace, budget)
    if "://" in name:
        raise UsageError(f"{flag}: a server's address begins with http:// or https://")
    if model:
        raise UsageError(f"{flag}-model is for a server at a URL; {name} is the model itself")
    return LocalTeacher(name, config, budget)


class LocalTeacher:
    """A model in this process."""

    api = "local"

    def __init__(self, name: str, config, budget: Budget):
        self.name = self.model = name
        self.config, self.budget, self.policy, self.told = config, budget, None, False

    def open(self) -> None:
        """Load the model; raises CannotLoad."""
        from .inference import load_policy

        if self.policy is None:
            note(f"Loading {self.name}.")
            self.policy = load_policy(self.name, self.config)

    def close(self) -> None:
        """Free the memory that the model takes."""
        if self.policy is None:
            return
        from accelerate.utils.memory import clear_device_cache

        self.policy = None
        clear_device_cache(garbage_collection=True)

    def example(self, request: Request) -> dict:
        """A request for a reader."""
        return {"model": self.model, "messages": request.row.messages, "temperature": request.temperature}

    def ask(self, requests: Sequence[Request], tell: Tell) -> None:
        """Answer requests in batches, long ones together."""
        from .generation import InBatches

        if self.config.json_schema and requests[0].schema and not self.told:
            self.told = True
            note("A model in this process is not held to --json-schema: say in the prompts what the answer looks like.")
        ordered = sorted(requests, key=lambda request: (estimate_tokens(request.row), request.key))
        in_batches = InBatches(self._answer, self.config.batch_size)
        for request, found in in_batches(ordered, lambda: not self.budget.take(0)):
            if isinstance(found, Reply):
                self.budget.settle(0, self.budget.cost_of([found]))
            tell(request, Failure("refused_by_model", found, own=True) if isinstance(found, str) else found)

    def _answer(self, requests: list[Request]) -> list[Reply]:
        import torch

        from .generation import Question, generate, prompts_of

        first, collator = requests[0], self.policy.collator
        prompts = prompts_of(collator, [Question(request.row, None) for request in requests])
        lengths = prompts["attention_mask"].sum(1).tolist()
        torch.manual_seed(first.seed + int(hashed(first.key)[:8], 16))
        made = generate(self.policy.model, collator, prompts, first.max_tokens, first.temperature)
        return [self._reply(answer, length) for answer, length in zip(made, lengths, strict=True)]

    @staticmethod
    def _reply(answer, prompt_tokens: int) -> Reply:
        reasoning, text = split_thought(answer.text, answer.reasoning)
        finish = "stop" if answer.stopped else "length"
        return Reply(text, reasoning, finish=finish, tokens_in=prompt_tokens, tokens_out=answer.tokens)
