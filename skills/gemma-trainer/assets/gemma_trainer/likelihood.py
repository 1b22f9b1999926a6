"""How likely a model finds texts: log-probabilities of trained tokens, of the answers of a pair, and of choices.

Rows are rendered, labelled and padded as in training, so that an answer counts with the token that ends it. Logits are
made at trained positions only, some at a time. A row that does not fit into `--max-len` is not measured: what is left
of it would be another text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from .collator import MultimodalCollator
from .errors import RowError
from .fsdp import inner_model
from .generation import InBatches, stands_alone
from .inference import Policy
from .labels import IGNORE
from .losses import CHUNK
from .preferences import read_preference
from .rows import read_row
from .slots import Media
from .targets import messages_row

MEASURED = 1000  # rows whose lengths are worked out at once
UNMEASURED = ("bad_rows", "bad_media", "skipped_rows", "truncated", "untrained_rows")


class Likelihood(NamedTuple):
    """The summed log-probability of an answer, its end token included, and how many tokens it has."""

    log_prob: float
    tokens: int

    @classmethod
    def of(cls, log_probs: list[float]) -> Likelihood:
        return cls(sum(log_probs), len(log_probs))

    @property
    def per_token(self) -> float:
        return self.log_prob / self.tokens


def token_log_probs(policy: Policy, raws: Sequence, batch_size: int) -> Iterator[tuple[int, list[float] | str]]:
    """The log-probability of each trained token of each row, in the order of length, the longest rows first.

    Args:
        raws: rows in any format but pairs. Which turns are trained is told by them and by the policy's collator.
        batch_size: rows at a time; halved where memory runs out.

    Yields:
        (index of the row, log-probabilities in float32, natural logarithm), or (index, why the row has none): it cannot
        be read, has a bad medium, is longer than --max-len, or has nothing that is trained.
    """
    yield from _in_batches(policy, policy.collator, raws, batch_size)


def pair_log_probs(
    policy: Policy, raws: Sequence, batch_size: int
) -> Iterator[tuple[int, tuple[Likelihood, Likelihood] | str]]:
    """(index, (the chosen answer, the rejected one)) of preference rows; see `token_log_probs`. Both stand behind the
    same prompt, as in training, also where only one of them shows its reasoning."""
    collator = copy.copy(policy.collator)
    collator.task = "preference"
    for index, found in _in_batches(policy, collator, raws, batch_size):
        yield index, found if isinstance(found, str) else tuple(map(Likelihood.of, found))


def choice_log_probs(
    policy: Policy, asked: Sequence[tuple[Mapping, Sequence[str]]], batch_size: int
) -> Iterator[tuple[int, list[Likelihood] | str]]:
    """How likely each choice is as the answer to a question.

    Args:
        asked: (row in any format, its choices). An answer at the end of the row is left out.

    Yields:
        (index of the question, one for each choice in their order), or (index, why there are none).
    """
    answered: list[tuple[int, int, dict]] = []  # question, choice, the row that ends with it
    found: dict[int, dict[int, Likelihood]] = {}
    for index, (raw, choices) in enumerate(asked):
        try:
            rows = _with_choices(raw, choices)
        except RowError as problem:
            yield index, problem.reason
            continue
        answered += [(index, choice, row) for choice, row in enumerate(rows)]
        found[index] = {}
    for at, log_probs in token_log_probs(policy, [row for _, _, row in answered], batch_size):
        index, choice, _ = answered[at]
        if index not in found:  # one of its choices could not be measured
            continue
        if isinstance(log_probs, str):
            del found[index]
            yield index, log_probs
            continue
        found[index][choice] = Likelihood.of(log_probs)
        if len(found[index]) == len(asked[index][1]):
            measured = found.pop(index)
            yield index, [measured[choice] for choice in sorted(measured)]


def _with_choices(raw: Mapping, choices: Sequence[str]) -> list[dict]:
    """The row with each choice as the one answer that is trained; raises RowError."""
    row = read_row(raw)
    if not row.messages:
        raise RowError(row.name, "a text without turns asks nothing", "bad_text_row")
    if not choices:
        raise RowError(row.name, "there is nothing to choose from", "bad_value")
    asked = messages_row(row)
    asked.pop("loss_type", None)
    messages = asked["messages"][:-1] if row.messages[-1]["role"] == "assistant" else asked["messages"]
    before = [message | {"train": False} if message["role"] == "assistant" else message for message in messages]
    return [asked | {"messages": [*before, {"role": "assistant", "content": choice}]} for choice in choices]


def _in_batches(policy: Policy, collator: MultimodalCollator, raws: Sequence, batch_size: int) -> Iterator:
    lengths: list[int] = []
    for start in range(0, len(raws), MEASURED):
        lengths += collator.lengths([raws[index] for index in range(start, min(start + MEASURED, len(raws)))])
    order = sorted(range(len(raws)), key=lambda index: -lengths[index])
    yield from InBatches(
        lambda batch: _measure(policy, collator, [raws[index] for index in batch]),
        batch_size,
        lambda index: stands_alone(collator, _media_of(raws[index], collator.paired)),
    )(order)


def _media_of(raw: Mapping, paired: bool) -> list[Media]:
    try:
        return read_preference(raw).media if paired else read_row(raw).media
    except RowError:
        return []


@torch.no_grad()
def _measure(policy: Policy, collator: MultimodalCollator, raws: list) -> list:
    """The log-probabilities of each row, of a pair those of both sides; RowError where a row has none."""
    batch = collator(raws)
    if any(batch.counts.get(name) for name in UNMEASURED):
        raise RowError(*_why(batch, collator))
    labels = batch.pop("labels", None)
    if labels is None:
        labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, IGNORE)
    batch.pop("margin", None)
    media = {key: batch[key].to(policy.model.dtype) for key in ("pixel_values", "input_features") if key in batch}
    inputs = {key: value.to(policy.model.device) for key, value in (batch | media).items()}
    inner = inner_model(policy.model)
    hidden = inner.base_model(**inputs, use_cache=False).last_hidden_state
    targets = labels[:, 1:].to(hidden.device)
    asked = targets != IGNORE
    found = _log_probs(inner, hidden[:, :-1][asked], targets[asked]).split(asked.sum(1).tolist())
    rows = [part.tolist() for part in found]
    return rows if not collator.paired else list(zip(rows[: len(raws)], rows[len(raws) :], strict=True))


def _log_probs(inner, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability [N] of each target after its hidden state [N, H]."""
    head, found = inner.get_output_embeddings(), []  # called as a module, so that an adapter of it counts
    softcap = getattr(inner.config.get_text_config(), "final_logit_softcapping", None)
    for states_part, wanted in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
        logits = head(states_part).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        found.append(logits.gather(-1, wanted[:, None].to(logits.device))[:, 0] - logits.logsumexp(-1))
    return torch.cat(found)


def _why(batch, collator: MultimodalCollator) -> tuple[str, str]:
    """(row, reason) why a batch cannot be measured, which is that of its row where it has one row."""
    name = (batch.rows or ["row"])[0]
    if batch.counts.get("truncated"):
        return name, f"longer than --max-len ({collator.max_length})"
    if batch.counts.get("untrained_rows") and not batch.problems:
        return name, "nothing in it is trained"
    return batch.problems[-1]
