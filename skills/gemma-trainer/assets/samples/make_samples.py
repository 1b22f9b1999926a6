#!/usr/bin/env python3
"""Write the demo's data: train.jsonl, heldout.jsonl and their pictures and recordings, and pairs over the same media in
preferences.jsonl and preferences-heldout.jsonl, into this folder.

Usage: python make_samples.py [OUT_DIR]        (needs numpy, pillow, soundfile; the same files every time)

The answers of picture and recording rows depend on the medium alone: every question is asked about every colour and
every pitch. Held-out media differ from the training ones in shade, size, pitch, loudness, length and noise. The answers
of a pair have one form and differ in one word, and each word is as often the better one as any other: only who sees and
hears can tell which.
"""

import json
import sys
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

COLOURS = {"red": (215, 40, 40), "green": (40, 175, 60), "blue": (45, 70, 210), "yellow": (235, 215, 50)}
PITCHES = {"low": 200.0, "middle": 800.0, "high": 3200.0}
ASK_COLOUR = ["What colour is this picture?", "Name the colour."]
ASK_PITCH = ["Is this tone low, middle or high?", "Name the pitch."]
IMAGE_FORMATS = ("png", "jpg", "webp")
AUDIO_FORMATS = ("flac", "ogg", "flac", "ogg", "wav")

out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
random = np.random.default_rng(7)


def picture(colour: str, name: str, position: int) -> str:
    """A rectangle of the colour, a little darker to one side, in a shade and size of its own."""
    width, height = (int(n) for n in random.integers(40, 160, 2))
    shade = np.array(COLOURS[colour]) * random.uniform(0.75, 1.08)
    slope = np.linspace(1.0, random.uniform(0.8, 1.0), width)[None, :, None]
    pixels = (np.ones((height, width, 1)) * slope * shade).clip(0, 255).astype(np.uint8)
    file = f"images/{name}.{IMAGE_FORMATS[position % len(IMAGE_FORMATS)]}"
    Image.fromarray(pixels).save(out / file, quality=85)
    return file


def recording(pitch: str, name: str, position: int) -> str:
    """A tone near the pitch with some noise: 44.1 kHz stereo WAV, 16 kHz FLAC, or 24 kHz Ogg Vorbis."""
    suffix = AUDIO_FORMATS[position % len(AUDIO_FORMATS)]
    rate = {"wav": 44100, "flac": 16000, "ogg": 24000}[suffix]
    seconds = 0.15 if suffix == "wav" else random.uniform(0.3, 0.7)
    time = np.arange(int(seconds * rate)) / rate
    wave = random.uniform(0.2, 0.6) * np.sin(2 * np.pi * PITCHES[pitch] * random.uniform(0.92, 1.08) * time)
    wave = wave + random.normal(0, 0.003, len(time))
    file = f"audio/{name}.{suffix}"
    soundfile.write(out / file, np.stack([wave, wave * 0.7], 1) if suffix == "wav" else wave, rate)
    return file


def ask(blocks: list, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": blocks}, {"role": "assistant", "content": answer}]}


def media_rows(split: str, each: int) -> list[dict]:
    """Rows about one picture or one recording, `each` for every colour and pitch."""
    rows = []
    for turn in range(each):
        for index, colour in enumerate(COLOURS):
            file = picture(colour, f"{split}-{colour}-{turn}", turn + index)
            question = ASK_COLOUR[turn % len(ASK_COLOUR)]
            rows.append(ask([{"type": "image", "image": file}, {"type": "text", "text": question}], colour))
        for index, pitch in enumerate(PITCHES):
            file = recording(pitch, f"{split}-{pitch}-{turn}", turn + index)
            question = ASK_PITCH[turn % len(ASK_PITCH)]
            rows.append(ask([{"type": "audio", "audio": file}, {"type": "text", "text": question}], pitch))
    return rows


def several_media_rows() -> list[dict]:
    """Two pictures, two recordings, or one of each in a message."""
    rows = []
    for turn, (first, second) in enumerate(
        [("red", "blue"), ("green", "yellow"), ("blue", "green"), ("yellow", "red")]
    ):
        files = [picture(colour, f"pair-{turn}-{colour}", turn) for colour in (first, second)]
        blocks = [{"type": "image", "image": file} for file in files]
        rows.append(ask([*blocks, {"type": "text", "text": "Which colours, in order?"}], f"{first}, {second}"))
    for turn, (first, second) in enumerate([("low", "high"), ("high", "middle"), ("middle", "low")]):
        files = [recording(pitch, f"pair-{turn}-{pitch}", turn) for pitch in (first, second)]
        blocks = [{"type": "audio", "audio": file} for file in files]
        rows.append(ask([*blocks, {"type": "text", "text": "Which pitches, in order?"}], f"{first}, {second}"))
    for turn, (colour, pitch) in enumerate([("red", "high"), ("blue", "low")]):
        blocks = [{"type": "image", "image": picture(colour, f"both-{turn}", turn)},
                  {"type": "audio", "audio": recording(pitch, f"both-{turn}", turn)}]  # fmt: skip
        rows.append(ask([*blocks, {"type": "text", "text": "Colour and pitch?"}], f"{colour}, {pitch}"))
    return rows


def text_rows() -> list[dict]:
    """Single-turn, multi-turn and tool-call rows, in several of the accepted formats."""
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City"}},
                           "required": ["city"]},
        },
    }  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    return [
        {"messages": [{"role": "user", "content": "What is the capital of Italy?"},
                      {"role": "assistant", "content": "Rome."}]},
        {"prompt": "Name a fruit that is green.", "completion": "Pear."},
        {"instruction": "Say yes or no: is two and two four?", "output": "Yes."},
        {"conversations": [{"from": "human", "value": "Say it again: hello."}, {"from": "gpt", "value": "Hello."}]},
        {"messages": [{"role": "system", "content": "Answer in one word."},
                      {"role": "user", "content": "What colour is the sky?"},
                      {"role": "assistant", "content": "Blue"},
                      {"role": "user", "content": "And grass?"},
                      {"role": "assistant", "content": "Green"}]},
        {"messages": [{"role": "user", "content": "Which is louder, a cat or a train?"},
                      {"role": "assistant", "content": "A train."},
                      {"role": "user", "content": "And which is smaller?"},
                      {"role": "assistant", "content": "A cat."}]},
        {"tools": [weather],
         "messages": [{"role": "user", "content": "How is the weather in Oslo?"},
                      {"role": "assistant", "content": "", "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c1", "content": "snow, -3 degrees"},
                      {"role": "assistant", "content": "It is snowing in Oslo."}]},
    ]  # fmt: skip


def pairs(rows: list[dict]) -> list[dict]:
    """Two pairs for each row about one picture or recording: its answer against two of the wrong ones.

    They take turns in the formats that are accepted: a prompt with answers, a question with a column for the medium,
    and whole conversations.
    """
    made = []
    for row in rows:
        (medium, text), right = row["messages"][0]["content"], row["messages"][1]["content"]
        kind, values = medium["type"], list(COLOURS if medium["type"] == "image" else PITCHES)
        at = values.index(right)
        for step in (1, 2):
            wrong = values[(at + step) % len(values)]
            shape = len(made) % 3
            if shape == 0:
                made.append({"prompt": row["messages"][:1], "chosen": right, "rejected": wrong})
            elif shape == 1:
                made.append({"prompt": text["text"], kind: medium[kind], "chosen": right, "rejected": wrong})
            else:
                sides = ([*row["messages"][:1], {"role": "assistant", "content": answer}] for answer in (right, wrong))
                made.append(dict(zip(("chosen", "rejected"), sides, strict=True)))
    return made


def text_pairs() -> list[dict]:
    return [
        {"prompt": "What is the capital of Italy?", "chosen": "Rome.", "rejected": "Oslo.", "margin": 1.0},
        {"prompt": "Name a fruit that is green.", "chosen": "Pear.", "rejected": "Train.", "margin": 0.5},
        {"prompt": "Say yes or no: is two and two four?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": [{"role": "system", "content": "Answer in one word."},
                    {"role": "user", "content": "What colour is the sky?"}], "chosen": "Blue", "rejected": "Green"},
    ]  # fmt: skip


def write(file: str, rows: list[dict]) -> None:
    (out / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


for folder in ("images", "audio"):
    (out / folder).mkdir(parents=True, exist_ok=True)
several, train, heldout = several_media_rows(), media_rows("train", 8), media_rows("heldout", 6)
write("train.jsonl", text_rows() + several + train)
write("heldout.jsonl", heldout)
write("preferences.jsonl", text_pairs() + pairs(train))
write("preferences-heldout.jsonl", pairs(heldout))
