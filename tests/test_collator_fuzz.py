"""Random batches, random faults, random options: the collator always gives a batch that its model can take."""

import collections
import gc
import io
import pickle
import random
import statistics
import time

import numpy as np
import psutil
import pytest
import soundfile
import tiny
import torch
from PIL import Image

from conftest import ask, talk
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.losses import use_chunked_loss

BATCHES = 2000
PER_FAMILY = {name: BATCHES // 5 if name == "gemma4" else BATCHES * 4 // 5 // (len(tiny.NAMES) - 1) + 1
              for name in tiny.NAMES}  # fmt: skip
WORDS = ["Rome.", "Say it", "", " ", "\n\n", "naïve ☂ 雪", "\U0001f469\u200d\U0001f692",
         "<|turn>model\nno<turn|>", "<start_of_turn>model\n", "<bos>",
         "<|image|>", "<start_of_image>",
         "<image>", "\ue000\uf8fd", "x " * 80, "{'a': 1}", "a\u0301", "<|tool_response>",
         "<|channel>thought\nhm\n<channel|>", "\x00", "مرحبا"]  # fmt: skip


def encoded(picture, kind="PNG"):
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def waveform(rng, seconds):
    return np.sin(np.arange(int(seconds * 16000)) * rng.uniform(0.01, 0.3)).astype(np.float32)


def image_value(rng, folder):
    picture = Image.new(
        rng.choice(["RGB", "RGBA", "L", "P", "1", "CMYK", "LA"]), (rng.randint(1, 80), rng.randint(1, 80))
    )
    array = np.full((rng.randint(1, 40), rng.randint(4, 40), rng.choice([1, 3, 4])), rng.randint(0, 255), np.uint8)
    good = [
        lambda: picture,
        lambda: array,
        lambda: {"bytes": encoded(picture.convert("RGB")), "path": None},
        lambda: str(folder / "red.png"),
        lambda: {"path": "blue.jpg", "bytes": None},
        lambda: encoded(picture.convert("RGB"), "JPEG"),
    ]
    bad = [
        lambda: "absent.png",
        lambda: {"bytes": b"", "path": "x.png"},
        lambda: encoded(Image.new("RGB", (60, 60)), "PNG")[:40],
        lambda: str(folder / "page.jpg"),
        lambda: "https://example.org/a.png",
        lambda: "data:image/png;base64,!!!!",
        lambda: str(folder / "one.wav"),
        lambda: np.zeros((0, 4, 3), np.uint8),
        lambda: 17,
        lambda: "\x00",
    ]
    return rng.choice(bad if rng.random() < 0.2 else good)()


def audio_value(rng, folder):
    samples = waveform(rng, rng.choice([0.0101, 0.03, 0.05, 0.4, 0.77, 1.3]))
    good = [
        lambda: {"array": samples, "sampling_rate": 16000},
        lambda: {"array": np.stack([samples, samples]), "sampling_rate": 22050},
        lambda: {"array": (samples * 3e4).astype(np.int16), "sampling_rate": 8000},
        lambda: str(folder / "short.flac"),
        lambda: {"bytes": (folder / "one.wav").read_bytes(), "path": None},
    ]
    bad = [
        lambda: "absent.wav",
        lambda: str(folder / "text.wav"),
        lambda: {"array": np.array([0.1, np.nan] * 500, np.float32), "sampling_rate": 16000},
        lambda: {"array": samples[:100], "sampling_rate": 16000},
        lambda: {"array": samples},
        lambda: {"array": [], "sampling_rate": 16000},
        lambda: samples,
        lambda: {"bytes": b"RIFF0000WAVEfmt ", "path": "a.wav"},
        lambda: str(folder / "red.png"),
    ]
    if rng.random() < 0.01:
        return {"array": np.zeros(31 * 16000, np.float32) + 0.1, "sampling_rate": 16000}
    return rng.choice(bad if rng.random() < 0.2 else good)()


def content(rng, folder, kinds, media=0.5):
    if rng.random() > media:
        return rng.choice(WORDS)
    blocks = [{"type": "text", "text": rng.choice(WORDS)} for _ in range(rng.randint(0, 2))]
    for kind in sorted(kinds):
        for _ in range(rng.choice([0, 1, 1, 2])):
            value = image_value(rng, folder) if kind == "image" else audio_value(rng, folder)
            blocks.insert(rng.randint(0, len(blocks)), {"type": kind, rng.choice([kind, "url", "path"]): value})
    return blocks


def conversation(rng, folder, kinds):
    messages = (
        [{"role": rng.choice(["system", "developer"]), "content": rng.choice(WORDS)}] if rng.random() < 0.2 else []
    )
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content(rng, folder, kinds)})
        if rng.random() < 0.1:
            messages.append({"role": "user", "content": rng.choice(WORDS)})
        answer = {"role": rng.choice(["assistant", "model"]), "content": content(rng, folder, kinds, media=0.05)}
        if rng.random() < 0.2:
            answer["reasoning"] = rng.choice(WORDS)
        if rng.random() < 0.15:
            arguments = {rng.choice(WORDS) or "k": rng.choice([*WORDS, 3, None, [1, "a"]])}
            answer["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages.append(answer)
        if "tool_calls" in answer and rng.random() < 0.8:
            messages.append({"role": "tool", "tool_call_id": "1", "content": rng.choice(WORDS)})
            if rng.random() < 0.8:
                messages.append({"role": "assistant", "content": rng.choice(WORDS)})
        if rng.random() < 0.1:
            messages[-1]["train"] = False
    return {"messages": messages}


def random_row(rng, folder, kinds):
    pick = rng.random()
    if pick < 0.7:
        row = conversation(rng, folder, kinds)
    elif pick < 0.8:
        row = {"prompt": rng.choice(WORDS), "completion": rng.choice(WORDS)}
    elif pick < 0.85:
        row = {"instruction": rng.choice(WORDS), "input": rng.choice([*WORDS, None]), "output": rng.choice(WORDS)}
    elif pick < 0.9:
        row = {"conversations": [{"from": "human", "value": rng.choice(WORDS)}, {"from": "gpt", "value": "Pear"}]}
    elif pick < 0.95:
        row = {"text": rng.choice(WORDS)}
    else:
        row = rng.choice([{}, {"messages": None}, {"messages": "x"}, {"messages": [{"role": "user"}]}, {"x": 1}])
    if kinds and rng.random() < 0.15:
        kind = rng.choice(sorted(kinds))
        row[kind + rng.choice(["", "s"])] = image_value(rng, folder) if kind == "image" else audio_value(rng, folder)
    if rng.random() < 0.05:
        row["loss_type"] = rng.choice(["context_only", "supervised", "other"])
    return row | {"__source__": ("rows.jsonl:1", str(folder))}


def random_options(rng):
    return {
        "max_length": rng.choice([1, 3, 17, 40, 90, 250, None]),
        "loss_on": rng.choice(["all-turns", "last-turn"]),
        "train_reasoning": rng.random() < 0.8,
        "thinking": rng.choice(["auto", "on", "off"]),
        "on_bad_media": rng.choice(["placeholder", "placeholder", "skip", "error"]),
        "long_audio": rng.choice(["cut", "refuse"]),
        "truncation": rng.choice(["cut", "cut", "cut", "error"]),
        "placeholders": rng.choice(["rows", "needed", "always"]),
        "pad_to_multiple_of": rng.choice([None, None, 8, 64]),
    }


def check_batch(collator, rows, batch):
    """What holds for any batch of any rows."""
    ids, labels, mask = batch["input_ids"], batch["labels"], batch["attention_mask"]
    assert ids.shape == labels.shape == mask.shape
    assert ((labels == -100) | (labels == ids)).all() and (labels[mask == 0] == -100).all()
    assert (mask[:, 1:] <= mask[:, :-1]).all() and (mask[:, 0] == 1).all()
    assert (ids[:, 0] == collator.tokenizer.bos_token_id).all()
    assert ((ids == collator.tokenizer.bos_token_id).sum(1) == 1).all()
    for token in collator.soft_tokens.values():
        assert (labels != token).all()
    lengths = mask.sum(1)
    assert collator.max_length is None or int(lengths.max()) <= collator.max_length
    counts = collections.Counter(batch.counts)
    assert counts.get("rows", 0) + counts["bad_rows"] + counts["skipped_rows"] == len(rows)
    if counts.get("rows"):
        assert counts["rows"] == len(ids) and counts["tokens"] == int(mask.sum())
        assert counts["trained_tokens"] == int((labels != -100).sum())
        assert counts["padding"] == ids.numel() - counts["tokens"]
        assert counts["untrained_rows"] == int(((labels != -100).sum(1) == 0).sum())
    else:
        assert ids.shape[0] == 1 and (labels == -100).all()
    assert counts["bad_media"] <= counts["images"] + counts["clips"]
    assert len(batch.problems) >= counts["bad_rows"]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_random_batches(name, media):
    """Nothing is raised but a named row's error where one is asked for; the loss is finite, 0 with nothing trained."""
    rng = random.Random(name)
    processor = tiny.make_processor(name)
    model = tiny.make_model(name, processor)
    use_chunked_loss(model)
    seen = dict.fromkeys(("trained", "untrained", "refused"), 0)
    for number in range(PER_FAMILY[name]):
        options = random_options(rng)
        collator = MultimodalCollator(processor, **options, modalities=tiny.MODALITIES[name])
        rows = [random_row(rng, media, tiny.MODALITIES[name]) for _ in range(rng.randint(1, 4))]
        before = pickle.dumps(rows)
        try:
            batch = collator(rows)
        except RowError as problem:
            assert "error" in (options["on_bad_media"], options["truncation"]), (number, problem)
            assert str(problem).startswith("rows.jsonl:1: ")
            seen["refused"] += 1
            continue
        assert pickle.dumps(rows) == before, number
        check_batch(collator, rows, batch)
        assert {key: collator.stats[key] for key in batch.counts} == batch.counts
        with torch.no_grad():
            loss = model(**batch).loss.item()
        trained = bool((batch["labels"][:, 1:] != -100).any())
        assert np.isfinite(loss) and (loss > 0) == trained, (number, loss)
        seen["trained" if trained else "untrained"] += 1
    assert min(seen.values()) > 0.05 * PER_FAMILY[name], seen


def test_speed_memory_and_open_files_do_not_grow_over_many_batches(processor, media):
    soundfile.write(media / "cd.wav", np.zeros((4410, 2)), 44100)
    batches = [[ask(media, "red.png"), talk("Hi", "Hello")], [ask(media, "cd.wav"), ask(media, "page.jpg")],
               [talk("Hi", "Hello")] * 3, [ask(media, "text.wav"), {"messages": "broken"}]]  # fmt: skip
    collator = MultimodalCollator(processor, 512)
    process = psutil.Process()
    times, sizes, files = [], [], []
    for number in range(BATCHES):
        started = time.thread_time()
        collator(batches[number % len(batches)])
        times.append(time.thread_time() - started)
        if len(times) % 200 == 0:
            gc.collect()
            sizes.append(process.memory_info().rss)
            files.append(process.num_fds())
    assert files[-1] == files[0]
    assert sizes[-1] - sizes[0] < 16 * 2**20, [size / 2**20 for size in sizes]
    first, last = (statistics.median(times[start : start + 400 : 4]) for start in (200, BATCHES - 400))
    assert last < 1.5 * first
