#!/usr/bin/env python3
"""Rows a second of the collator, and whether its labels are right, against TRL's, Unsloth's and the bare processor.

Usage: python benchmarks/collator.py [--rows 32] [--repeats 9] [--json] [--profile]

Texts of 50 to 400 words in one to three turns, images of 640 x 480 (JPEG, some PNG) and clips of 2 to 8 s (16 kHz WAV
and FLAC, some 44.1 kHz stereo) are written to a temporary folder, always the same ones. Every line of the table takes
the same rows, in batches of eight, on one thread, with a copy of one Gemma 4 processor (280 tokens an image; only its
vocabulary is small). All but the bare floor start from files. The lines take turns, batch by batch and in an order that
changes, and what counts is the processor time of this process. A line that cannot do a column says "no", and why.

Unsloth is measured where `unsloth` and `unsloth_zoo` are installed; its collator itself needs no GPU.
"""

import os

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
)
os.environ.update({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
os.environ["UNSLOTH_IS_PRESENT"] = "1"  # as `import unsloth` sets it, which itself wants a GPU

import argparse
import contextlib
import copy
import ctypes
import gc
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image
from transformers import Gemma4AudioFeatureExtractor, Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor
from transformers.utils import logging
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"))

from gemma_trainer import demo
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.labels import find_spans
from gemma_trainer.media import open_audio, open_image
from gemma_trainer.rows import read_row

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=32, help="rows a column, rounded up to whole batches (default 32)")
parser.add_argument("--repeats", type=int, default=9, help="how often each line collates each batch (default 9)")
parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
parser.add_argument("--profile", action="store_true", help="print the time of each stage of our collator, too")
options = parser.parse_args()

warnings.simplefilter("ignore")
logging.set_verbosity_error()
torch.set_num_threads(1)
with contextlib.suppress(OSError, AttributeError):  # glibc
    # A batch of images is 60 MiB. Without this, memory goes back to the system and comes again whenever the heap just
    # happens to end in a free piece, and the page faults, which are luck, take as long as the images.
    for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(setting, 2**30)

BATCH, MAX_LENGTH, RATE, MAX_SECONDS = 8, 2048, 16_000, 30.0
COLUMNS = {  # what the rows of a column carry, in turn
    "text": [""],
    "image": ["image"],
    "audio": ["audio"],
    "mixed": ["", "image", "audio", "image audio"],
}

# ---- the rows: `messages` whose media are paths, in batches


def write_media(folder: Path, rng: random.Random) -> dict[str, list[str]]:
    """Eight images and eight clips, neither flat nor mere noise, as paths."""
    x, y = np.meshgrid(np.linspace(0, 1, 640), np.linspace(0, 1, 480))
    noise = np.random.default_rng(0)
    paths = {"image": [], "audio": []}
    for index in range(8):
        waves = [np.sin(6.3 * (x * rng.uniform(1, 9) + y * rng.uniform(1, 9) + rng.random())) for _ in range(3)]
        pixels = np.stack(waves, -1) * 90 + 128 + noise.normal(0, 9, (480, 640, 3))
        path = folder / f"{index}.{'png' if index % 4 == 3 else 'jpg'}"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        paths["image"].append(str(path))
    for index in range(8):
        rate = 44_100 if index % 4 == 3 else RATE
        at = np.arange(int(rate * rng.uniform(2, 8))) / rate
        tone = sum(np.sin(6.3 * rng.uniform(90, 3000) * at) * np.sin(rng.uniform(1, 9) * at) for _ in range(4)) / 8
        tone += noise.normal(0, 0.01, len(at))
        path = folder / f"{index}.{'flac' if index % 2 else 'wav'}"
        soundfile.write(path, np.stack([tone, tone * 0.5], 1) if rate == 44_100 else tone, rate)
        paths["audio"].append(str(path))
    return paths


def chat(*texts: str, media: tuple[dict, ...] = ()) -> dict:
    """A row of user and assistant in turn, with media before the first text."""
    messages = [
        {"role": "assistant" if turn % 2 else "user", "content": [{"type": "text", "text": text}]}
        for turn, text in enumerate(texts)
    ]
    messages[0]["content"] = [*media, *messages[0]["content"]]
    return {"messages": messages}


def make_texts(rng: random.Random, words: int, turns: int) -> list[str]:
    return [" ".join(rng.choices(demo.CORPUS.split(), k=words // (2 * turns))) for _ in range(2 * turns)]


def make_columns(paths: dict[str, list[str]], rng: random.Random) -> dict[str, list[list[dict]]]:
    columns = {}
    for column, carried in COLUMNS.items():
        rows = []
        for index in range(-(-options.rows // BATCH) * BATCH):
            kinds = carried[index % len(carried)].split()
            media = tuple({"type": kind, kind: rng.choice(paths[kind])} for kind in kinds)
            rows.append(chat(*make_texts(rng, rng.randint(50, 400), rng.randint(1, 3)), media=media))
        columns[column] = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    return columns


def blocks(row: dict, kind: str) -> list[dict]:
    contents = [message["content"] for message in row["messages"] if isinstance(message["content"], list)]
    return [block for content in contents for block in content if block["type"] == kind]


# ---- the lines: each is a function that readies a batch, which is not timed, and one that collates it, which is


def make_processor():
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        tokenizer=demo.make_tokenizer(),
        video_processor=Gemma4VideoProcessor(),
        chat_template=demo.chat_template(),
    )


def render(processor, rows) -> list[str]:
    return processor.apply_chat_template([row["messages"] for row in rows], tokenize=False)


def open_media(rows) -> tuple[list, list]:
    """The images of each row, and the clips of all."""
    images = [[open_image(block["image"]) for block in blocks(row, "image")] for row in rows]
    clips = [open_audio(block["audio"], RATE, MAX_SECONDS)[0] for row in rows for block in blocks(row, "audio")]
    return images, clips


def template_line(processor):
    """What nobody can do without: render the rows, and tokenize them in one call."""
    settings = {"add_special_tokens": False, "padding": True, "return_tensors": "pt"}
    return lambda rows: rows, lambda rows: processor.tokenizer(render(processor, rows), **settings)


def floor_line(processor, decoding: bool):
    """One call of the processor on rendered text and media, which are open already or (`decoding`) opened as well."""

    def ready(rows):
        return render(processor, rows), rows if decoding else open_media(rows)

    def collate(readied):
        text, media = readied
        images, clips = open_media(media) if decoding else media
        given = {"images": images if any(images) else None, "audio": clips or None}
        return processor(text=text, **given, padding=True, return_tensors="pt", add_special_tokens=False)

    return ready, collate


def our_line(processor):
    return lambda rows: rows, MultimodalCollator(processor, MAX_LENGTH)


def trl_line(processor, completion_only_loss: bool):
    """TRL takes images in a column, and trains whole conversations or the completion behind a prompt."""

    def ready(rows):
        rows = copy.deepcopy(rows)
        for row in rows:
            row["images"] = [block.pop("image") for block in blocks(row, "image")]
            if completion_only_loss:
                *row["prompt"], answer = row.pop("messages")
                row["completion"] = [answer]
        return rows

    return ready, DataCollatorForVisionLanguageModeling(
        processor, max_length=MAX_LENGTH, completion_only_loss=completion_only_loss
    )


def unsloth_line(processor):
    """As Unsloth's notebooks have it: media in the messages, all but the answers left out by the two headers."""
    from unsloth_zoo.vision_utils import UnslothVisionDataCollator

    def ready(rows):
        return [row | {"chat_template_kwargs": {"tools": row.get("tools")}} for row in copy.deepcopy(rows)]

    return ready, UnslothVisionDataCollator(
        demo.make_model(processor.tokenizer),
        processor,
        max_seq_length=MAX_LENGTH,
        train_on_responses_only=True,
        instruction_part="<|turn>user\n",
        response_part="<|turn>model\n",
    )


def make_lines() -> dict[str, tuple]:
    made = make_processor()
    makers = {
        "template + tokenizing": template_line,
        "floor": lambda processor: floor_line(processor, decoding=False),
        "floor + decoding": lambda processor: floor_line(processor, decoding=True),
        "ours": our_line,
        "TRL, messages": lambda processor: trl_line(processor, completion_only_loss=False),
        "TRL, completion only": lambda processor: trl_line(processor, completion_only_loss=True),
    }
    lines = {name: maker(copy.deepcopy(made)) for name, maker in makers.items()}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it has something to say
            lines["Unsloth"] = unsloth_line(copy.deepcopy(made))
    except Exception as problem:
        print(f"Unsloth: not installed ({problem})", file=sys.stderr)
    return lines


# ---- what a line can do, and which labels it makes


def refusal(name: str, line, column: str, rows: list[dict]) -> str | None:
    """None if a line can collate a batch; else why not. "-" where it would say nothing new."""
    if name == ("floor + decoding" if column == "text" else "template + tokenizing"):
        return "-"
    ready, collate = line
    try:
        batch = collate(ready(rows))
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0][:80]}"
    for kind, key in (("image", "pixel_values"), ("audio", "input_features")):
        if any(blocks(row, kind) for row in rows) and key not in batch:
            return f"no error, but the batch of rows with {kind} has no {key}: the media are left out"
    return None


def make_probes(paths) -> list[tuple[str, dict, list[str]]]:
    """(column, row, the runs of text that are to be trained in it)."""
    called = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    steps = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "snow, -3 degrees"},
        {"role": "assistant", "content": "It is snowing."},
    ]
    city = {"type": "object", "properties": {"city": {"type": "string", "description": "City"}}}
    tool = {"name": "get_weather", "description": "Weather of a city", "parameters": city}
    call = '<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_response>'
    media = [(kind, {"type": kind, kind: paths[kind][0]}) for kind in ("image", "audio")]
    return [
        ("text", chat("Colour of the sky?", "Blue", "And of grass?", "Green"), ["Blue<turn|>", "Green<turn|>"]),
        *((kind, chat("What is it?", "Blue", media=(block,)), ["Blue<turn|>"]) for kind, block in media),
        (
            "text",
            {"messages": steps, "tools": [{"type": "function", "function": tool}]},
            [call, "It is snowing.<turn|>"],
        ),
    ]


MISTAKES = {  # what no trained run may hold
    "trains the user's text": ("sky?", "grass?", "What is", "Weather in"),
    "trains turn headers": ("<|turn>",),
    "trains media tokens": ("<|image|>", "<|audio|>"),
    "trains the tool result": ("snow, -3",),
    "trains the newline after the end token": ("<turn|>\n",),
}


def label_mistakes(line, can: dict, probes, tokenizer) -> list[str]:
    """What is wrong with a collator's labels; nothing, if the runs it trains are exactly those that should be."""
    ready, collate = line
    found = []
    for column, row, expected in probes:
        if can[column] is not None:
            continue
        batch = collate(ready([row]))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        edges = np.flatnonzero(np.diff(np.r_[False, labels != -100, False])).reshape(-1, 2).tolist()
        runs = [tokenizer.decode(labels[start:end]) for start, end in edges]
        if runs != expected:
            trained = "".join(runs)
            wrong = [name for name, signs in MISTAKES.items() if any(sign in trained for sign in signs)]
            wrong += ["leaves out answers before the last"] * (expected[0] not in trained)
            wrong += ["leaves out the end token"] * (not trained.rstrip().endswith("<turn|>"))
            found += wrong or ["trains other text than it should"]
        if "tools" in row and "Weather of a city" not in tokenizer.decode(ids):
            found.append("leaves the tool declarations out of the prompt")
    return list(dict.fromkeys(found))


# ---- measuring


def seconds_of(step, *arguments) -> float:
    start = time.process_time()
    step(*arguments)
    return time.process_time() - start


def measure(lines, columns, able) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds of each line and column: a list of the repeats for each batch."""
    seconds = {name: {c: [[] for _ in columns[c]] for c in columns if able[name][c] is None} for name in lines}
    rng = random.Random(0)
    gc.collect()
    gc.freeze()  # what stands by now is not looked through again in the middle of a measurement
    for _ in range(options.repeats):
        for column, batches in columns.items():
            for number, rows in enumerate(batches):
                turns = [name for name in lines if column in seconds[name]]
                rng.shuffle(turns)
                for name in turns:
                    ready, collate = lines[name]
                    seconds[name][column][number].append(seconds_of(collate, ready(rows)))
    return seconds


def total(by_batch: list[list[float]]) -> float:
    return sum(map(statistics.median, by_batch))


def times_ours(theirs: list[list[float]], ours: list[list[float]]) -> list[float]:
    """How many times their rows a second ours makes, and the quartiles of that over the single batches."""
    pairs = [(a, b) for batch in zip(theirs, ours, strict=True) for a, b in zip(*batch, strict=True)]
    quarters = statistics.quantiles([a / b for a, b in pairs], n=4)
    return [total(theirs) / total(ours), quarters[0], quarters[2]]


def long_row_milliseconds(processor) -> dict[str, float]:
    """What the labels of a row of 32k tokens cost: all of the step, and its search for spans."""
    collator = MultimodalCollator(processor, None)
    row = read_row(chat(*make_texts(random.Random(0), 24_000, 40)))
    rendered = collator.renderer.render(row)
    ids = collator.renderer.encode([rendered])[0]
    assert len(ids) > 32_000, len(ids)
    steps = {
        "label": lambda: collator.labeller.label(row, rendered, ids),
        "find_spans": lambda: find_spans(ids, collator.labeller.markers),
    }
    return {name: 1000 * statistics.median(seconds_of(step) for _ in range(20)) for name, step in steps.items()}


STAGES = {  # of the collator, and of what it holds; indented: a part of the stage before
    "_read": "read the rows",
    "_open_media": "open the media",
    "_media_tensors": "image processor, feature extractor",
    "_tokenize": "render, tokenize and label",
    "renderer.render": "  render the template",
    "renderer.encode": "  tokenize",
    "labeller.label": "  label",
    "_expand": "  expand the slots",
    "_assemble": "pad, place the media",
    "_count": "count",
    "__call__": "all",
}


def print_stages(column: str, batches) -> None:
    """Milliseconds a row of each stage, timed in a collator of its own."""
    collator = our_line(make_processor())[1]
    spent = dict.fromkeys(STAGES, 0.0)

    def timed(stage, function):
        def call(*arguments, **named):
            start = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                spent[stage] += time.process_time() - start

        return call

    for stage in STAGES:
        *holder, name = stage.split(".")
        held = getattr(collator, holder[0]) if holder else collator
        if hasattr(held, name) and name != "__call__":
            setattr(held, name, timed(stage, getattr(held, name)))
    whole = timed("__call__", collator)
    for repeat in range(options.repeats + 1):
        if repeat == 1:  # the first was to warm up
            spent.update(dict.fromkeys(STAGES, 0.0))
        for rows in batches:
            whole(rows)
    print(f"our collator's stages, {column}, milliseconds a row")
    for stage, told in STAGES.items():
        print(f"  {told:36}{1000 * spent[stage] / options.repeats / len(batches) / BATCH:8.3f}")


# ---- what is wanted, and what is printed


def check_targets(ratios) -> list[tuple[str, float, bool]]:
    """(what is wanted, what was found, whether it is met)."""
    wanted = [("floor + decoding", column, 0.9) for column in ("image", "audio")]
    for name in ratios:
        if name.startswith(("TRL", "Unsloth")):  # who wants only answers trained gives TRL completions
            wanted += [(name, c, 2.0 if (name, c) == ("TRL, completion only", "text") else 1.0) for c in ratios[name]]
    return [
        (f"{column}: at least {least} times {name}", ratios[name][column][0], ratios[name][column][0] >= least)
        for name, column, least in wanted
    ]


def print_lines(title: str, figures: dict[str, dict[str, str]], able, mistakes=None) -> None:
    print(f"{title:24}" + "".join(f"{column:>19}" for column in COLUMNS) + "   labels right" * bool(mistakes))
    for name, found in figures.items():
        cells = [found.get(column, "-" if able[name][column] == "-" else "no") for column in COLUMNS]
        right = "" if not mistakes else "   -" if name not in mistakes else "   no" if mistakes[name] else "   yes"
        print(f"{name:24}" + "".join(f"{cell:>19}" for cell in cells) + right)
    print()


def print_report(speed, ratios, able, mistakes, long_row, targets) -> None:
    rates = {name: {column: f"{rate:.1f}" for column, rate in found.items()} for name, found in speed.items()}
    print_lines("rows a second", rates, able, mistakes)
    shown = {
        name: {column: f"{middle:.2f} ({low:.2f}-{high:.2f})" for column, (middle, low, high) in found.items()}
        for name, found in ratios.items()
    }
    print_lines("ours / line (quartiles)", shown, able)
    for name, found in mistakes.items():
        print(f"labels, {name}: {', '.join(found) or 'exactly the text that is to be trained'}")
    for name, reasons in able.items():
        for column, reason in reasons.items():
            if reason not in (None, "-"):
                print(f"no {column}, {name}: {reason}")
    if "Unsloth" not in speed:
        print("Unsloth: not installed")
    print(f"labels of a 32k-token row: {long_row['label']:.2f} ms (find_spans {long_row['find_spans']:.2f} ms)\n")
    for aim, value, met in targets:
        print(f"{'met' if met else 'not met':8} {aim}: {value:.2f}")


# ---- the run

with tempfile.TemporaryDirectory() as folder:
    dice = random.Random(0)
    paths = write_media(Path(folder), dice)
    columns, lines, tokenizer = make_columns(paths, dice), make_lines(), make_processor().tokenizer
    able = {name: {c: refusal(name, line, c, columns[c][0]) for c in COLUMNS} for name, line in lines.items()}
    probes = make_probes(paths)
    collators = [name for name in lines if name.startswith(("ours", "TRL", "Unsloth"))]
    mistakes = {name: label_mistakes(lines[name], able[name], probes, tokenizer) for name in collators}
    seconds = measure(lines, columns, able)
    if options.profile:
        for column in COLUMNS:
            print_stages(column, columns[column])

count = BATCH * len(columns["text"])
speed = {name: {c: count / total(found) for c, found in by_column.items()} for name, by_column in seconds.items()}
ratios = {
    name: {column: times_ours(found, seconds["ours"][column]) for column, found in seconds[name].items()}
    for name in lines
    if name != "ours"
}
long_row, targets = long_row_milliseconds(make_processor()), check_targets(ratios)
packages = ["torch", "transformers", "trl", "numpy", "pillow", *["unsloth_zoo"] * ("Unsloth" in lines)]
versions = {package: version(package) for package in packages}
if options.json:
    result = {"versions": versions, "rows": count, "repeats": options.repeats, "rows_per_second": speed}
    result |= {"times_ours": ratios, "label_mistakes": mistakes, "cannot": able, "labels_of_32k_tokens_ms": long_row}
    print(json.dumps(result | {"targets": [dict(zip(("target", "found", "met"), t, strict=True)) for t in targets]}))
else:
    print(f"{count} rows a column in batches of {BATCH}, one thread, medians of {options.repeats} repeats")
    print(", ".join(f"{package} {number}" for package, number in versions.items()) + "\n")
    print_report(speed, ratios, able, mistakes, long_row, targets)
