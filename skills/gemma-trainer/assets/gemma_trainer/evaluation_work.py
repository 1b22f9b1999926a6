"""What each arm of an evaluation makes of the rows: answers, log-probabilities, and the scores of a judge."""

from __future__ import annotations

import functools

from .evaluation_book import Book
from .evaluation_rows import CHAT, CHOICES, PAIR, Item
from .generation import InBatches, Question, generate, prompts_of, stands_alone
from .inference import Policy
from .likelihood import choice_log_probs, pair_log_probs, token_log_probs
from .rows import SOURCE, read_row
from .scan import Progress

BASE, FEW_SHOT, TUNED = "base", "few_shot", "tuned"  # the arms
# What is kept of a row, and how: the answer to it, and the log-probabilities of the row, the pair, or the choices.
ANSWER, LOSS, PAIRED, CHOSEN = "answer", "loss", "pair", "choices"
KINDS = {ANSWER: CHAT, LOSS: CHAT, PAIRED: PAIR, CHOSEN: CHOICES}
GUARD_ANSWER, GUARD_LOG_PROBS, SCORE = "guard_answer", "guard_log_probs", "score"


def wanted_of(items: list[Item], measure: str) -> list[int]:
    """The numbers of the items that a measure is taken of."""
    ready = [at for at, item in enumerate(items) if item.kind == KINDS[measure] and not item.problem]
    return [at for at in ready if (items[at].question if measure == ANSWER else items[at].scored)]


def ask(policy: Policy, arm: str, items: list[Item], measures: list[str], book: Book, config, shots=None) -> None:
    """Have a model answer and score the rows, and keep what comes of it under the arm's name.

    Args:
        measures: which of `KINDS` are wanted.
        shots: `few_shots.Shots`, examples that are put before each row.
    """
    choices = functools.partial(_choices, {at: item.choices for at, item in enumerate(items)})
    take = {ANSWER: _answers, LOSS: _losses, PAIRED: _pairs, CHOSEN: choices}
    for measure in measures:
        numbers = wanted_of(items, measure)
        raws = {at: (items[at].question.answered(),) if measure == ANSWER else items[at].scored for at in numbers}
        _measure(policy, arm, measure, raws, take[measure], book, config, shots)


def ask_guard(policy: Policy, arm: str, questions: list[Question], book: Book, config) -> None:
    """Have a model answer the general prompts, and how likely it finds those of the base, which comes first."""
    asked = {at: (question.answered(),) for at, question in enumerate(questions)}
    _measure(policy, arm, GUARD_ANSWER, asked, _answers, book, config)
    said = {at: book.found[BASE, GUARD_ANSWER, at].get("text") for at in asked}
    scored = {at: (with_answer(questions[at], text),) for at, text in said.items() if text is not None}
    _measure(policy, arm, GUARD_LOG_PROBS, scored, _log_probs, book, config)


def guarded(book: Book, at: int) -> tuple[dict[str, dict], list[list[float] | None]]:
    """What base and tuned have answered to a general prompt, by arm, and how likely each finds the base's answer."""
    answers = {arm: book.found[arm, GUARD_ANSWER, at] for arm in (BASE, TUNED)}
    return answers, [book.found.get((arm, GUARD_LOG_PROBS, at), {}).get("log_probs") for arm in (BASE, TUNED)]


def with_answer(question: Question, text: str) -> dict:
    """The raw row of a question that is answered with `text`, which alone is trained."""
    raw = question.answered()
    before = [m | {"train": False} if m["role"] == "assistant" else m for m in raw["messages"][:-1]]
    return raw | {"messages": [*before, {"role": "assistant", "content": text}]}


def _measure(policy, arm: str, measure: str, raws: dict[int, tuple], take, book: Book, config, shots=None) -> None:
    """Measure items, {number: their raw rows}, in batches of near-equal length. The batches are the same however often
    the work is begun anew: one that is not whole in the book is done again.

    Args:
        take: (policy, [(number, raw rows)], config) -> what is kept of each, or as a text why there is nothing.
    """
    if book.has(arm, measure, raws):
        return
    counts: dict[int, int] = {}
    if shots:
        put = {at: shots.before(*given) for at, given in raws.items()}
        raws, counts = {at: rows for at, (rows, _) in put.items()}, {at: count for at, (_, count) in put.items()}
    batches = _batches(policy, raws, config.batch_size)
    left = [batch for batch in batches if not book.has(arm, measure, batch)]
    work = InBatches(lambda some: take(policy, [(at, raws[at]) for at in some], config), config.batch_size)
    with Progress(sum(map(len, left)), f"{arm} {measure}") as progress:
        for batch in left:
            for at, found in work(batch):
                entry = {"error": found} if isinstance(found, str) else found
                book.add(arm, measure, at, entry | ({"shots": counts[at]} if shots else {}))
            book.flush()
            progress.add(len(batch))


def _batches(policy: Policy, raws: dict[int, tuple], size: int) -> list[list[int]]:
    """The numbers of items in batches of near-equal length: the longest first, so that it shows at once whether the
    memory suffices."""
    lengths = iter(policy.collator.lengths([raw for given in raws.values() for raw in given]))
    longest = {at: max(next(lengths) for _ in given) for at, given in raws.items()}
    numbers = sorted(raws, key=lambda at: (-longest[at], at))
    alone = {at for at in numbers if stands_alone(policy.collator, read_row(raws[at][0]).media)}
    others = [at for at in numbers if at not in alone]
    cut = [others[start : start + size] for start in range(0, len(others), size)]
    return cut + [[at] for at in numbers if at in alone]


# ---- what is kept of items


def _answers(policy: Policy, some: list[tuple], config) -> list[dict]:
    """{"text", "tokens", "stopped", "reasoning"?} of each item."""
    questions = [Question.of(read_row(raws[0])) for _, raws in some]
    said = generate(policy.model, policy.collator, prompts_of(policy.collator, questions), config.max_new_tokens)
    return [
        {"text": a.text, "tokens": a.tokens, "stopped": a.stopped} | ({"reasoning": a.reasoning} if a.reasoning else {})
        for a in said
    ]


def _log_probs(policy: Policy, some: list[tuple], config) -> list[dict | str]:
    """{"log_probs": those of the row's trained tokens}."""
    found = dict(token_log_probs(policy, [raws[0] for _, raws in some], config.batch_size))
    return [found[at] if isinstance(found[at], str) else {"log_probs": found[at]} for at in range(len(some))]


def _losses(policy: Policy, some: list[tuple], config) -> list[dict | str]:
    """{"sides": [[log-probability, tokens]]} of the row's trained tokens."""
    found = [one if isinstance(one, str) else one["log_probs"] for one in _log_probs(policy, some, config)]
    return [one if isinstance(one, str) else {"sides": [[sum(one), len(one)]]} for one in found]


def _pairs(policy: Policy, some: list[tuple], config) -> list[dict | str]:
    """{"sides": [log-probability, tokens] of the chosen answer and of the rejected one}."""
    both = (tuple(raw["messages"] for raw in raws) for _, raws in some)
    more = (raws[0] for _, raws in some)
    pairs = [
        {"chosen": chosen, "rejected": rejected} | {key: raw[key] for key in ("tools", SOURCE) if key in raw}
        for (chosen, rejected), raw in zip(both, more, strict=True)
    ]
    return _sides(dict(pair_log_probs(policy, pairs, config.batch_size)), len(some))


def _choices(choices: dict[int, tuple], policy: Policy, some: list[tuple], config) -> list[dict | str]:
    """{"sides": [log-probability, tokens] of each choice}."""
    asked = [(raws[0], choices[at]) for at, raws in some]
    return _sides(dict(choice_log_probs(policy, asked, config.batch_size)), len(some))


def _sides(found: dict[int, list | tuple | str], count: int) -> list[dict | str]:
    kept = [found[at] for at in range(count)]
    return [one if isinstance(one, str) else {"sides": [list(side) for side in one]} for one in kept]


# ---- a judge


def is_judged(items: list[Item], arm: str, book: Book) -> bool:
    """Whether all answers that an arm has given have a score."""
    return book.has(arm, SCORE, _given(items, arm, book))


def _given(items: list[Item], arm: str, book: Book) -> dict[int, str]:
    """The answers that an arm has given, by the numbers of the items."""
    said = {at: book.found[arm, ANSWER, at].get("text") for at in wanted_of(items, ANSWER)}
    return {at: text for at, text in said.items() if text is not None}


def judge(model, collator, items: list[Item], arm: str, book: Book, config) -> None:
    """Keep a reward model's score of each answer that an arm has given."""
    from .scoring import score_rows

    raws = {at: with_answer(items[at].question, text) for at, text in _given(items, arm, book).items()}
    lengths = dict(zip(raws, collator.lengths(list(raws.values())), strict=True))
    numbers = sorted(raws, key=lambda at: (-lengths[at], at))
    found = score_rows(model, collator, [raws[at] for at in numbers], config.batch_size)
    with Progress(len(numbers), f"{arm} judged") as progress:
        for at, line in zip(numbers, found, strict=True):
            book.add(arm, SCORE, at, {key: line[key] for key in ("score", "error") if key in line})
            progress.add(1)
    book.flush()
