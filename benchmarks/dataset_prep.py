#!/usr/bin/env python3
"""How fast dataset_prep.py looks at rows, against the plain loop over them, and how much memory it takes.

Usage: python benchmarks/dataset_prep.py [--rows 200000] [--media-rows 1000] [--memory] [--json]

The plain loop is what most people write: read a line, `processor.apply_chat_template(tokenize=True)` (with the media,
where there are any), count and decode the tokens; on text rows also with the tokenizer alone, which has less to do. It
runs in this process; ours takes all cores, as `dataset_prep.py check` does, and finds everything that it finds. Both
start from files with a processor that is loaded. Texts are pieces of Python's own documentation, 60 to 250 words in one
to three turns; images are JPEG and PNG of 640 x 480, clips 2 to 8 s of WAV and FLAC, each row's own. The loop and ours
take turns, and the best of --repeats counts; of the text rows the loop does a part (--loop-rows).

--memory runs `dataset_prep.py check` on 10,000 and on 1,000,000 rows (1 GB) without a model and with the demo's, and
tells the most memory of all its processes together (PSS, so that what they share counts once).
"""

import os

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"})

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"
sys.path.insert(0, str(ASSETS))

from pydoc_data.topics import topics

import dataset_prep
import numpy as np
import psutil
import soundfile
from PIL import Image
from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor

from gemma_trainer import demo, survey, verdict
from gemma_trainer.collator import MultimodalCollator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=200_000, help="text rows; a fourth of them for --exact")
parser.add_argument(
    "--loop-rows", type=int, default=2_000, help="text rows that the plain loop does; a tenth of media rows"
)
parser.add_argument("--media-rows", type=int, default=1_000, help="image rows, and as many audio rows")
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--memory", action="store_true", help="measure memory instead")
parser.add_argument("--json", action="store_true")
options = parser.parse_args()

WORDS = " ".join(topics.values()).split()

# ---- the rows


def chat(rng: random.Random, media: tuple[dict, ...] = ()) -> dict:
    messages, turns = [], 2 * rng.randint(1, 3)
    words = rng.randint(60, 250) // turns
    for turn in range(turns):
        start = rng.randrange(len(WORDS) - words)
        text = " ".join(WORDS[start : start + words])
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text})
    if media:
        messages[0]["content"] = [*media, {"type": "text", "text": messages[0]["content"]}]
    return {"messages": messages}


def write_rows(path: Path, rows) -> Path:
    with path.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    return path


def image_rows(folder: Path, count: int, rng: random.Random):
    noise = np.random.default_rng(0)
    x, y = np.meshgrid(np.linspace(0, 1, 640), np.linspace(0, 1, 480))
    for index in range(count):
        waves = [np.sin(6.3 * (x * rng.uniform(1, 9) + y * rng.uniform(1, 9) + rng.random())) for _ in range(3)]
        pixels = np.stack(waves, -1) * 90 + 128 + noise.normal(0, 9, (480, 640, 3))
        path = folder / f"{index}.{'png' if index % 4 == 3 else 'jpg'}"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        yield chat(rng, ({"type": "image", "image": str(path)},))


def audio_rows(folder: Path, count: int, rng: random.Random):
    noise = np.random.default_rng(0)
    for index in range(count):
        at = np.arange(int(16_000 * rng.uniform(2, 8))) / 16_000
        tone = sum(np.sin(6.3 * rng.uniform(90, 3000) * at) for _ in range(3)) / 6 + noise.normal(0, 0.01, len(at))
        path = folder / f"{index}.{'flac' if index % 2 else 'wav'}"
        soundfile.write(path, tone, 16_000)
        yield chat(rng, ({"type": "audio", "audio": str(path)},))


# ---- the two ways


def make_processor():
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        tokenizer=demo.make_tokenizer(16_384, corpus=topics.values()),
        video_processor=Gemma4VideoProcessor(),
        chat_template=demo.chat_template(),
    )


def plain_loop(path: Path, processor, count: int) -> float:
    """Seconds a row, with a processor or with a tokenizer."""
    start, tokenizer, longest = time.perf_counter(), getattr(processor, "tokenizer", processor), 0
    options = {} if tokenizer is processor else {"return_tensors": "np"}
    with path.open() as file:
        for _, line in zip(range(count), file, strict=False):
            messages = json.loads(line)["messages"]
            ids = processor.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
            ids = ids if tokenizer is processor else ids[0]
            longest = max(longest, len(ids))
            assert tokenizer.decode(ids)
    return (time.perf_counter() - start) / count


def ours(path: Path, collator, **flags) -> float:
    """Seconds a row."""
    config = dataclasses.replace(dataset_prep.CheckFlags(), data=(str(path),), model="loaded", **flags)
    start = time.perf_counter()
    result = verdict.result_of(survey.take_survey(config, collator), config)
    assert result["verdict"] != verdict.INVALID, result["findings"]
    return (time.perf_counter() - start) / result["counts"]["rows"]


def compare(folder: Path) -> list[dict]:
    rng, processor = random.Random(0), make_processor()
    collator = MultimodalCollator(processor, 2048)
    # A copy of its own for the loop: ours lets the one that it uses be rendered faster, for all in the process.
    processor.chat_template = processor.tokenizer.chat_template = processor.chat_template + "{# #}"
    text = write_rows(folder / "text.jsonl", (chat(rng) for _ in range(options.rows)))
    image = write_rows(folder / "image.jsonl", image_rows(folder, options.media_rows, rng))
    audio = write_rows(folder / "audio.jsonl", audio_rows(folder, options.media_rows, rng))
    part, media_part = min(options.loop_rows, options.rows), min(options.loop_rows // 10, options.media_rows)
    fourth = write_rows(folder / "fourth.jsonl", (chat(rng) for _ in range(options.rows // 4)))
    loops = {
        "text": lambda: plain_loop(text, processor, part),
        "tokenizer": lambda: plain_loop(text, processor.tokenizer, part),
        "image": lambda: plain_loop(image, processor, media_part),
        "audio": lambda: plain_loop(audio, processor, media_part),
    }
    cases = {  # name: (the loop, ours, the ratio that is wanted)
        "text": ("text", lambda: ours(text, collator), 20),
        "text, --exact": ("text", lambda: ours(fourth, collator, exact=True), 4),
        "image": ("image", lambda: ours(image, collator), 5),
        "audio": ("audio", lambda: ours(audio, collator), 5),
    }
    found = []
    for name, (loop, check, wanted) in cases.items():
        pairs = [(loops[loop](), check()) for _ in range(options.repeats)]
        theirs, own = (min(seconds) for seconds in zip(*pairs, strict=True))
        line = {"rows": name, "loop": 1 / theirs, "ours": 1 / own, "ratio": theirs / own, "wanted": wanted}
        if loop == "text":
            line["ratio_tokenizer"] = min(loops["tokenizer"]() for _ in range(options.repeats)) / own
        found.append(line)
    return found


# ---- memory


def peak_memory(command: list[str]) -> tuple[int, float]:
    """(MiB of all processes together at the worst moment, seconds) of a command."""
    start, peak = time.monotonic(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            family = [watched, *watched.children(recursive=True)]
            peak = max(peak, sum(member.memory_full_info().pss for member in family))
        except (psutil.NoSuchProcess, psutil.AccessDenied, AttributeError):
            pass
        time.sleep(0.1)
    assert process.returncode == 0, command
    return peak >> 20, time.monotonic() - start


def memory(folder: Path) -> list[dict]:
    rng, found = random.Random(0), []
    for rows in (10_000, 1_000_000):
        path = write_rows(folder / f"{rows}.jsonl", (chat(rng) for _ in range(rows)))
        for model in ([], ["--model", "demo"]):
            command = [sys.executable, str(ASSETS / "dataset_prep.py"), "check", str(path), *model]
            mib, seconds = peak_memory(command)
            found.append({"rows": rows, "gb": path.stat().st_size / 1e9, "model": " ".join(model) or "none",
                          "peak_mib": mib, "seconds": seconds})  # fmt: skip
        path.unlink()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = (memory if options.memory else compare)(Path(folder))
    if options.json:
        print(json.dumps(result))
    elif options.memory:
        print(f"{'rows':>10}{'GB':>8}{'model':>16}{'peak MiB':>10}{'seconds':>9}")
        for line in result:
            print(f"{line['rows']:10,}{line['gb']:8.2f}{line['model']:>16}{line['peak_mib']:10,}{line['seconds']:9.0f}")
    else:
        print(f"{'rows a second':16}{'plain loop':>12}{'ours':>10}{'ratio':>8}{'wanted':>8}   tokenizer alone: ratio")
        for line in result:
            alone = f"{line['ratio_tokenizer']:14.1f}" if "ratio_tokenizer" in line else ""
            print(
                f"{line['rows']:16}{line['loop']:12,.0f}{line['ours']:10,.0f}{line['ratio']:8.1f}{line['wanted']:8}{alone}"
            )
