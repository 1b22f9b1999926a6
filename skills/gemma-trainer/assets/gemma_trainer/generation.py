"""Let a model answer rows, as a user of plain transformers would ask it."""

from __future__ import annotations

from .families import family_of_processor, tokenizer_of
from .media import open_audio, open_image
from .rows import Row, read_row


def prompt_of(row: Row) -> tuple[list[dict], str]:
    """The messages before the last assistant message, and that message's text (the answer expected)."""
    last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    content = row.messages[last]["content"]
    expected = content if isinstance(content, str) else "".join(block.get("text", "") for block in content)
    return row.messages[:last], expected


def model_inputs(processor, row: Row, messages: list[dict]):
    """The processor's own encoding of a prompt with its media, batch of one, tensors on the CPU."""
    text = tokenizer_of(processor).apply_chat_template(
        messages, tools=row.tools, chat_template=processor.chat_template, tokenize=False, add_generation_prompt=True
    )
    if tokenizer_of(processor) is processor:
        return processor([text], add_special_tokens=False, return_tensors="pt")
    slots = sum(block["type"] != "text" for m in messages if isinstance(m["content"], list) for block in m["content"])
    media = row.media[:slots]
    images = [open_image(medium.value, row.folder) for medium in media if medium.kind == "image"]
    rate, limit = processor.feature_extractor.sampling_rate, family_of_processor(processor).max_audio_seconds
    clips = [open_audio(medium.value, rate, limit, row.folder)[0] for medium in media if medium.kind == "audio"]
    return processor(
        text=[text],
        images=[images] if images else None,
        audio=clips or None,
        add_special_tokens=False,
        return_tensors="pt",
    )


def answer(model, processor, raw: dict, max_new_tokens: int = 64, blind: bool = False) -> dict:
    """Greedy answer to a row's last question.

    Args:
        raw: a row in any accepted format, with an assistant message to leave out.
        blind: zero the media tensors, to see what the model says without them.

    Returns:
        {"row": name, "prompt": the template's text, "expected": str, "answer": str}
    """
    import torch

    row = read_row(raw)
    messages, expected = prompt_of(row)
    inputs = model_inputs(processor, row, messages).to(model.device)
    for key in ("pixel_values", "input_features"):
        if key in inputs:
            inputs[key] = torch.zeros_like(inputs[key]) if blind else inputs[key].to(model.dtype)
    with torch.no_grad():
        produced = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    tokenizer = tokenizer_of(processor)
    said = tokenizer.decode(produced[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for marker in (family_of_processor(processor).turn_end, "<eos>"):
        said = said.removesuffix(marker)
    asked = "\n".join(part for message in messages for part in _told(message))
    return {"row": row.name, "prompt": asked, "expected": expected, "answer": said.strip()}


def _told(message: dict) -> list[str]:
    """A message for a reader: its role, its text, and [image] / [audio] where media stand."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    shown = " ".join(block["text"] if block["type"] == "text" else f"[{block['type']}]" for block in blocks)
    return [f"{message['role']}: {shown}"] if shown else []


def media_accuracy(model, processor, rows) -> dict[str, float]:
    """How often a model answers media rows right with its eyes and ears open, and with the media zeroed.

    `chance` is what a guess at each question's most common answer would get.
    """
    right = {False: 0, True: 0}
    for raw in rows:
        for blind in right:
            said = answer(model, processor, raw, max_new_tokens=12, blind=blind)
            right[blind] += said["answer"] == said["expected"]
    kinds: dict[tuple, list[str]] = {}
    for raw in rows:
        row = read_row(raw)
        kinds.setdefault(tuple(medium.kind for medium in row.media), []).append(prompt_of(row)[1])
    guessed = sum(max(map(answers.count, set(answers))) for answers in kinds.values())
    total = len(rows)
    return {"accuracy": right[False] / total, "accuracy_blind": right[True] / total, "chance": guessed / total}
