"""Let a model answer questions, each behind the very prompt that it was trained behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .answer_checks import Answer
from .errors import RowError
from .rows import THOUGHT, Row, read_row
from .slots import media_in
from .targets import messages_row

THOUGHT_START = "<|channel>thought"
UNUSABLE = ("truncated", "bad_media", "bad_rows", "skipped_rows")


@dataclass
class Question:
    """A row to be answered, and the answer that it brings at its end, if any."""

    row: Row
    expected: str | None

    @classmethod
    def of(cls, row: Row) -> Question:
        """Take a row's last assistant message, if it ends with one, as the expected answer.

        Raises:
            RowError: raw text; an answer that is a tool call, or holds media.
        """
        if not row.messages:
            raise RowError(row.name, "a text without turns asks nothing", "bad_text_row")
        last = row.messages[-1]
        if last["role"] != "assistant":
            return cls(row, None)
        if media_in(last):  # whose pixels would have no place in the prompt
            raise RowError(row.name, "its answer holds media, which a model cannot make", "bad_value")
        if last.get("tool_calls"):
            raise RowError(row.name, "its answer is a tool call: leave it out, and look for it with regex", "bad_value")
        return cls(row, expected_answer(row))

    @property
    def told(self) -> str:
        """The messages before the answer, for a reader."""
        messages = self.row.messages if self.expected is None else self.row.messages[:-1]
        return "\n".join(_told(message) for message in messages)

    def answered(self) -> dict:
        """The raw row with some answer at its end, which a prompt is cut off before."""
        raw = messages_row(self.row)
        if self.expected is None:
            raw["messages"] = [*raw["messages"], {"role": "assistant", "content": "."}]
        return raw


def expected_answer(row: Row) -> str:
    """The text of a row's last assistant message."""
    content = next(m["content"] for m in reversed(row.messages) if m["role"] == "assistant")
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def prompts_of(collator, questions: list[Question]) -> dict:
    """The prompts of questions as a batch, padded on the left.

    A prompt is the collated row up to its last model turn, which is what `apply_chat_template(...,
    add_generation_prompt=True)` gives for the messages before it.

    Returns:
        Tensors for `generate`: `input_ids`, `attention_mask` and token type ids [B, T], and those of the media.

    Raises:
        RowError: a row is refused, is cut, or has a medium that cannot be read.
    """
    import torch

    collator = copy.copy(collator)
    collator.task, collator.placeholders = "sft", "needed"  # a zero image's token would stand behind the prompt
    batch = collator([question.answered() for question in questions])
    if any(batch.counts.get(name) for name in UNUSABLE):
        name, reason = (batch.problems or [(questions[0].row.name, "longer than --max-len")])[0]
        raise RowError(name, reason)
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = zip(batch["input_ids"].tolist(), lengths, strict=True)
    starts = [collator.labeller.answer_start(ids[:length]) for ids, length in rows]
    width, shape, prompts = max(starts), batch["labels"].shape, {}
    for key, value in batch.items():
        if value.shape[:2] != shape:
            prompts[key] = value
        elif key != "labels":
            padding = collator.tokenizer.pad_token_id if key == "input_ids" else 0
            prompts[key] = torch.full((len(starts), width), padding, dtype=value.dtype)
            for line, start in enumerate(starts):
                prompts[key][line, width - start :] = value[line, :start]
    return prompts


def generate(
    model, collator, prompts: dict, max_new_tokens: int = 64, temperature: float = 0.0, give_up=None, **options
) -> list[Answer]:
    """Answers to prompts as `prompts_of` makes them.

    Args:
        temperature: 0 takes the likeliest token each time.
        give_up: called at each token; where it returns true, no more are made.
        options: for `model.generate`.
    """
    import torch
    from transformers import GenerationConfig

    tokenizer, markers = collator.tokenizer, collator.labeller.markers
    stops = [token for token in (tokenizer.eos_token_id, markers.turn_end, markers.response) if token is not None]
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}),
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
    )
    media = {key: prompts[key].to(model.dtype) for key in ("pixel_values", "input_features") if key in prompts}
    inputs = {key: value.to(model.device) for key, value in (prompts | media).items()}
    if give_up:
        options["stopping_criteria"] = [lambda ids, _: torch.full((len(ids),), give_up(), device=ids.device)]
    with torch.no_grad():
        made = model.generate(**inputs, generation_config=config, **options)
    return [_read_answer(tokenizer, line, stops) for line in made[:, prompts["input_ids"].shape[1] :].tolist()]


def _read_answer(tokenizer, made: list[int], stops: list[int]) -> Answer:
    """What was said before the first stop token. Other control tokens, such as those of a call, stay in the text. A
    thought that does not end is no answer."""
    end = next((at for at, token in enumerate(made) if token in stops), len(made))
    text = tokenizer.decode(made[:end], skip_special_tokens=False).strip()
    thought = THOUGHT.match(text)
    reasoning, said = (thought[1].strip(), text[thought.end() :].strip()) if thought else ("", text)
    if said.startswith(THOUGHT_START):
        reasoning, said = said.removeprefix(THOUGHT_START).strip(), ""
    return Answer(said, end, end < len(made), reasoning)


def stands_alone(collator, media) -> bool:
    """Whether a row with such media must be alone in its batch, to have the same figures whatever is beside it.

    Gemma 3n's audio tower has no mask where it normalizes and convolves, so that the frames that pad a clip change its
    last soft tokens (transformers/models/gemma3n/modeling_gemma3n.py, Gemma3nAudioSSCPConvBlock). Others do not.
    """
    return collator.family.name == "gemma3n" and any(medium.kind == "audio" for medium in media)


class InBatches:
    """Does something for many items, some at a time: as many as memory allows, and the one that fails alone.

    Args:
        work: takes a list of items and returns a result for each.
        at_once: items in a batch, at first; halved where memory runs out.
        alone: of an item, whether it must have a batch of its own (see `stands_alone`); these come last.

    Example:
        for question, answer in InBatches(lambda some: generate(model, collator, prompts_of(collator, some)), 8)(asked):
            ...
    """

    def __init__(self, work: Callable[[list], list], at_once: int, alone: Callable[[Any], bool] = lambda item: False):
        self.work, self.at_once, self.alone = work, at_once, alone

    def __call__(self, items: list, stopping: Callable[[], bool] = lambda: False) -> Iterator[tuple[Any, Any]]:
        """(item, its result, or as a text why it has none), until `stopping()`."""
        last = [self.alone(item) for item in items]
        yield from self._together([item for item, alone in zip(items, last, strict=True) if not alone], stopping)
        for item in (item for item, alone in zip(items, last, strict=True) if alone):
            yield from self._together([item], stopping)

    def _together(self, items: list, stopping: Callable[[], bool]) -> Iterator[tuple[Any, Any]]:
        from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

        at = 0
        while at < len(items) and not stopping():
            some = items[at : at + self.at_once]
            try:
                found = self.work(some)
            except Exception as problem:
                if len(some) == 1:
                    yield some[0], _reason(problem)
                elif should_reduce_batch_size(problem):
                    self.at_once = max(1, self.at_once // 2)
                    clear_device_cache(garbage_collection=True)
                    continue
                else:
                    for item in some:
                        yield from self._together([item], stopping)
            else:
                yield from zip(some, found, strict=True)
            at += len(some)


def _reason(problem: Exception) -> str:
    from accelerate.utils.memory import should_reduce_batch_size

    if isinstance(problem, RowError):
        return problem.reason
    return "out of memory" if should_reduce_batch_size(problem) else f"it failed ({type(problem).__name__})"


def answer(model, collator, raw: dict, max_new_tokens: int = 64, blind: bool = False) -> dict | None:
    """Greedy answer to a row's last question.

    Args:
        raw: a row in any accepted format, with an assistant message to leave out.
        blind: zero the media tensors, to see what the model says without them.

    Returns:
        {"row": name, "prompt": the messages for a reader, "expected": str, "answer": str}, or None for a row that
        cannot be asked: raw text, no answer at its end, cut, left out, or with a medium that cannot be read.
    """
    import torch

    try:
        question = Question.of(read_row(raw))
        if question.expected is None:
            return None
        prompts = prompts_of(collator, [question])
    except RowError:
        return None
    if blind:
        zeroed = [key for key in ("pixel_values", "input_features") if key in prompts]
        prompts |= {key: torch.zeros_like(prompts[key]) for key in zeroed}
    said = generate(model, collator, prompts, max_new_tokens)[0]
    whole = f"{said.reasoning}\n\n{said.text}" if said.reasoning else said.text
    return {"row": question.row.name, "prompt": question.told, "expected": question.expected, "answer": whole}


def _told(message: dict) -> str:
    """A message for a reader: its role, its text, and [image] / [audio] where media stand."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = " ".join(block["text"] if block["type"] == "text" else f"[{block['type']}]" for block in blocks)
    return f"{message['role']}: {shown}"


def media_accuracy(model, collator, rows) -> dict[str, float]:
    """How often a model answers media rows right with its eyes and ears open, and with the media zeroed.

    `chance` is what guessing the most common answer to each kind of medium would get.
    """
    right = {False: 0, True: 0}
    answers: dict[tuple, list[str]] = {}
    for raw in rows:
        row = read_row(raw)
        answers.setdefault(tuple(medium.kind for medium in row.media), []).append(expected_answer(row))
        for blind in right:
            said = answer(model, collator, raw, max_new_tokens=12, blind=blind)
            right[blind] += said is not None and said["answer"] == said["expected"]
    guessed = sum(max(map(known.count, known)) for known in answers.values())
    total = len(rows)
    return {"accuracy": right[False] / total, "accuracy_blind": right[True] / total, "chance": guessed / total}
