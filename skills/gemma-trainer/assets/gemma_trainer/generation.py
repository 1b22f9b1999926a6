"""Let a model answer a row's last question, behind the very prompt that it was trained behind."""

from __future__ import annotations

import copy

from .rows import Row, read_row
from .slots import media_in


def expected_answer(row: Row) -> str:
    """The text of a row's last assistant message."""
    content = next(m["content"] for m in reversed(row.messages) if m["role"] == "assistant")
    return content if isinstance(content, str) else "".join(block.get("text", "") for block in content)


def answer(model, collator, raw: dict, max_new_tokens: int = 64, blind: bool = False) -> dict | None:
    """Greedy answer to a row's last question.

    The prompt is the collated row up to its last model turn, which is what `apply_chat_template(...,
    add_generation_prompt=True)` gives for the messages before it.

    Args:
        raw: a row in any accepted format, with an assistant message to leave out.
        blind: zero the media tensors, to see what the model says without them.

    Returns:
        {"row": name, "prompt": the messages for a reader, "expected": str, "answer": str}, or None for a row that
        cannot be asked: raw text, no answer at its end, cut, left out, or with a medium that cannot be read.
    """
    import torch

    row = read_row(raw)
    if not row.messages or row.messages[-1]["role"] != "assistant" or row.messages[-1].get("tool_calls"):
        return None
    if media_in(row.messages[-1]):  # whose pixels would have no place in the prompt
        return None
    collator = copy.copy(collator)
    collator.placeholders = "needed"  # a zero image's token would stand behind the prompt
    batch = collator([raw])
    if any(batch.counts.get(name) for name in ("truncated", "bad_media", "bad_rows", "skipped_rows")):
        return None
    start = collator.labeller.answer_start(batch["input_ids"][0].tolist())
    inputs = {
        key: value[:, :start] if value.shape[:2] == batch["labels"].shape else value for key, value in batch.items()
    }
    del inputs["labels"]
    for key in ("pixel_values", "input_features"):
        if key in inputs:
            inputs[key] = torch.zeros_like(inputs[key]) if blind else inputs[key].to(model.dtype)
    inputs = {key: value.to(model.device) for key, value in inputs.items()}
    with torch.no_grad():
        produced = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0, start:].tolist()
    stops = {collator.tokenizer.eos_token_id, collator.labeller.markers.turn_end}
    while produced and produced[-1] in stops:
        produced.pop()
    said = collator.tokenizer.decode(produced, skip_special_tokens=False)
    asked = "\n".join(_told(message) for message in row.messages[:-1])
    return {"row": row.name, "prompt": asked, "expected": expected_answer(row), "answer": said.strip()}


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
