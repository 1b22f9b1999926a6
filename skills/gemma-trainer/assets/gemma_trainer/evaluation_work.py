"""What each arm of an evaluation makes of the rows: answers, log-probabilities, and the scores of a judge."""

from __future__ import annotations

from .evaluation_book import Book
from .evaluation_rows import CHAT, Item
from .generation import InBatches, Question, generate, prompts_of
from .inference import Policy
from .likelihood import token_log_probs
from .rows import read_row
from .scan import Progress

# What is kept of a row, and how. A judge's scores are kept under SCORE.
ANSWER, LOG_PROBS, SCORE = "answer", "log_probs", "score"
GUARD_ANSWER, GUARD_LOG_PROBS = "guard_answer", "guard_log_probs"
BASE, FEW_SHOT, TUNED = "base", "few_shot", "tuned"  # the arms


def wanted_of(items: list[Item], measure: str) -> list[int]:
    """The numbers of the items that a measure is taken of."""
    if measure == ANSWER:
        return [at for at, item in enumerate(items) if item.kind == CHAT and item.question]
    return [at for at, item in enumerate(items) if item.scored]


def ask(policy: Policy, arm: str, items: list[Item], measures: list[str], book: Book, config, shots=None) -> None:
    """Have a model answer and score the rows, and keep what comes of it under the arm's name.

    Args:
        measures: which of ANSWER and LOG_PROBS are wanted.
        shots: `Shots`, examples that are put before each row.
    """
    for measure in measures:
        numbers = wanted_of(items, measure)
        raws = {at: (items[at].question.answered(),) if measure == ANSWER else items[at].scored for at in numbers}
        _measure(policy, arm, measure, raws, book, config, shots)


def ask_guard(policy: Policy, arm: str, questions: list[Question], book: Book, config) -> None:
    """Have a model answer the general prompts, and how likely it finds those of the base, which comes first."""
    asked = {at: (question.answered(),) for at, question in enumerate(questions)}
    _measure(policy, arm, GUARD_ANSWER, asked, book, config)
    said = {at: book.found[BASE, GUARD_ANSWER, at].get("text") for at in asked}
    scored = {at: (with_answer(questions[at], text),) for at, text in said.items() if text is not None}
    _measure(policy, arm, GUARD_LOG_PROBS, scored, book, config)


def with_answer(question: Question, text: str) -> dict:
    """The raw row of a question that is answered with `text`, which alone is trained."""
    raw = question.answered()
    before = [m | {"train": False} if m["role"] == "assistant" else m for m in raw["messages"][:-1]]
    return raw | {"messages": [*before, {"role": "assistant", "content": text}]}


def _measure(policy: Policy, arm: str, measure: str, raws: dict[int, tuple], book: Book, config, shots=None) -> None:
    """Measure items, {number: their raw rows}, in batches of near-equal length. The batches are the same however often
    the work is begun anew: one that is not whole in the book is done again."""
    if book.has(arm, measure, raws):
        return
    counts: dict[int, int] = {}
    if shots:
        put = {at: shots.before(*given) for at, given in raws.items()}
        raws, counts = {at: rows for at, (rows, _) in put.items()}, {at: count for at, (_, count) in put.items()}
    lengths = iter(policy.collator.lengths([raw for given in raws.values() for raw in given]))
    longest = {at: max(next(lengths) for _ in given) for at, given in raws.items()}
    numbers = sorted(raws, key=lambda at: (-longest[at], at))  # what takes the most memory shows at once if it fits
    size = config.batch_size
    batches = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    left = [at for batch in batches if not book.has(arm, measure, batch) for at in batch]
    take = _answers if measure in (ANSWER, GUARD_ANSWER) else _log_probs
    work = InBatches(lambda some: take(policy, [raws[at] for at in some], config), size)
    with Progress(len(left), f"{arm} {measure}") as progress:
        for done, (at, found) in enumerate(work(left), 1):
            entry = {"error": found} if isinstance(found, str) else found
            book.add(arm, measure, at, entry | ({"shots": counts[at]} if shots else {}))
            progress.add(1)
            if done % size == 0 or done == len(left):
                book.flush()


def _answers(policy: Policy, some: list[tuple], config) -> list[dict]:
    """{"text", "tokens", "stopped", "reasoning"?} of each item."""
    questions = [Question.of(read_row(raws[0])) for raws in some]
    said = generate(policy.model, policy.collator, prompts_of(policy.collator, questions), config.max_new_tokens)
    return [
        {"text": a.text, "tokens": a.tokens, "stopped": a.stopped} | ({"reasoning": a.reasoning} if a.reasoning else {})
        for a in said
    ]


def _log_probs(policy: Policy, some: list[tuple], config) -> list[dict | str]:
    """{"log_probs": of each raw row of an item those of its trained tokens}, or why one of them has none."""
    found = dict(token_log_probs(policy, [raw for raws in some for raw in raws], config.batch_size))
    taken = iter(range(len(found)))
    items = [[found[next(taken)] for _ in raws] for raws in some]
    return [next((one for one in item if isinstance(one, str)), {"log_probs": item}) for item in items]


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
