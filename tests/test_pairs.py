"""Preference pairs to a batch: two halves that share their prompts and media, on a real tiny model of every family."""

import copy
import functools
import pickle
import random

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from test_collator_fuzz import WORDS, audio_value, conversation, image_value, random_options
from test_labels import with_empty_thought
from torch.utils.data import DataLoader

import gemma_trainer.collator
from conftest import ask
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.rows import SOURCE

WITH_MEDIA = [name for name in tiny.NAMES if tiny.MODALITIES[name]]
GEMMA4 = [name for name in tiny.NAMES if name.startswith("gemma4")]
FUZZED = 60  # batches a family
RED, BLUE = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (50, 90), "blue")
TONE = np.sin(np.arange(16000) / 5).astype(np.float32)
CLIP, SHORT = ({"array": TONE[:samples], "sampling_rate": 16000} for samples in (16000, 6400))
VALUES = {"image": (RED, BLUE), "audio": (CLIP, SHORT)}


@functools.cache
def built(name):
    processor = tiny.make_processor(name)
    return processor, tiny.make_model(name, processor)


def collator(name, max_length=None, task="preference", **options):
    return MultimodalCollator(built(name)[0], max_length, task=task, modalities=tiny.MODALITIES[name], **options)


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def shown(kind, which=0):
    return {"type": kind, kind: VALUES[kind][which]}


def looked(*kinds, text="What is it?"):
    return [*map(shown, kinds), {"type": "text", "text": text}]


def pair(prompt, chosen="Pear", rejected="A chair of wood", **fields):
    prompt = [said("user", prompt)] if isinstance(prompt, list) and prompt and "type" in prompt[0] else prompt
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **fields}


def pairs_of(name):
    """A pair of text, one with earlier turns, and one for each kind of medium and for all of them."""
    kinds = sorted(tiny.MODALITIES[name])
    told = [said("system", "Be brief."), said("user", "Hi"), said("assistant", "Hello."), said("user", "And now?")]
    rows = [pair("Name a fruit"), pair(told, "Bye", "Stay a while")]
    rows += [pair(looked(kind), "Red", "No idea at all") for kind in kinds]
    return rows + ([pair(looked(*kinds), "Both are there", "None")] if len(kinds) > 1 else [])


def sides(row):
    """The pair as two rows of a prompt and its completion: all chosen and rejected come from."""
    rest = {key: value for key, value in row.items() if key not in ("chosen", "rejected", "margin")}
    return [rest | {"completion": row[side]} for side in ("chosen", "rejected")]


def real(batch, key, line):
    """A line of a batch without its padding."""
    return batch[key][line][batch["attention_mask"][line] == 1]


def text(name, batch, line):
    processor = built(name)[0]
    return getattr(processor, "tokenizer", processor).decode(real(batch, "input_ids", line))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def logps(name, batch):
    """The summed log-probability of each row's answer."""
    mask = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != -100
    inputs = {key: value for key, value in batch.items() if key not in ("completion_mask", "margin", "labels")}
    with torch.no_grad():
        logits = built(name)[1](**inputs).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    return (found * mask[:, 1:]).sum(1)


def close(first, second):
    return torch.isfinite(first).all() and torch.allclose(first, second, atol=1e-4, rtol=1e-5)


# ---- two halves


@pytest.mark.parametrize("name", tiny.NAMES)
def test_each_side_is_the_row_that_fine_tuning_makes_of_it(name):
    rows = pairs_of(name)
    batch, sft = collator(name)(rows), collator(name, task="sft")
    alone = [sft([sides(row)[side]]) for side in (0, 1) for row in rows]
    assert len(batch["input_ids"]) == 2 * len(rows) and "labels" not in batch and "margin" not in batch
    keys = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"} & set(batch)
    assert len(keys) == (2 if name == "gemma3_text" else 3)
    for line, one in enumerate(alone):
        assert all(torch.equal(real(batch, key, line), one[key][0]) for key in keys)
        assert torch.equal(real(batch, "completion_mask", line), (one["labels"][0] != -100).long())
        assert not batch["completion_mask"][line][batch["attention_mask"][line] == 0].any()
    assert all(batch[key].dtype == torch.int64 for key in {*keys, "completion_mask"})
    assert close(logps(name, batch), torch.cat([logps(name, one) for one in alone]))


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_media_stand_in_both_halves_in_the_same_order(name):
    kinds = sorted(tiny.MODALITIES[name])
    inline = [pair([shown(kind, which), *looked()]) for which in (1, 0) for kind in kinds] + [pair("Name a fruit")]
    columns = [pair("What is it?", **{kind: VALUES[kind][which]}) for which in (1, 0) for kind in kinds]
    batch = collator(name)(inline)
    assert same(batch, collator(name)([*columns, inline[-1]]))
    for key in set(batch) & {"pixel_values", "image_position_ids", "input_features", "input_features_mask"}:
        chosen, rejected = batch[key].chunk(2)
        assert torch.equal(chosen, rejected) and not torch.equal(chosen[0], chosen[-1])
    swapped = collator(name)([*inline[::-1]])
    assert close(logps(name, swapped).view(2, -1).flip(1).flatten(), logps(name, batch))


def test_what_both_sides_show_is_opened_and_counted_once(monkeypatch):
    opened = []
    for function in ("open_image", "open_audio"):
        of = getattr(gemma_trainer.collator, function)
        monkeypatch.setattr(gemma_trainer.collator, function, lambda v, *a, of=of: opened.append(v) or of(v, *a))
    both = collator("gemma4")
    batch = both([pair(looked("image", "audio")), pair("Hi"), pair("Draw", said("assistant", [shown("image", 1)]))])
    assert len(opened) == 3 and (both.stats.images, both.stats.clips) == (2, 1)
    assert len(batch["pixel_values"]) == 3  # that of the prompt twice, and one in an answer
    opened.clear()
    both.lengths([pair(looked("image", "audio"))])
    assert not opened


@pytest.mark.parametrize("name", WITH_MEDIA)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_medium_in_one_answer_is_that_sides_alone(name, side):
    kinds = tiny.MODALITIES[name]
    row = pair(looked(*sorted(kinds)), "Red", "Blue")
    row[side] = [said("assistant", [{"type": "text", "text": "So:"}, shown("image", 1)])]
    rows = [pair("Hi"), row, pair(looked("image"))]
    batch, sft = collator(name)(rows), collator(name, task="sft")
    alone = [sft([sides(row)[at]]) for at in (0, 1) for row in rows]
    for line, one in enumerate(alone):
        assert torch.equal(real(batch, "input_ids", line), one["input_ids"][0])
    assert len(batch["pixel_values"]) == 5
    assert close(logps(name, batch), torch.cat([logps(name, one) for one in alone]))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_placeholders_leave_the_log_probabilities_as_they_are(name):
    rows = pairs_of(name)
    for part in (rows, rows[:2], rows[:1] + rows[-1:]):
        kept, needed, always = (collator(name, placeholders=mode)(part) for mode in ("rows", "needed", "always"))
        assert close(logps(name, needed), logps(name, kept)) and close(logps(name, always), logps(name, kept))
        media = {"image": "pixel_values", "audio": "input_features"}
        assert {media[kind] for kind in tiny.MODALITIES[name]} <= set(always)


# ---- forms of a row

BEFORE = [said("user", "Hi"), said("assistant", "Hello."), said("user", "Name a fruit")]
PEAR, CHAIR = said("assistant", "Pear"), said("assistant", "Chair")
FORMS = {
    "messages": {"prompt": BEFORE, "chosen": [PEAR], "rejected": [CHAIR]},
    "one message": {"prompt": BEFORE, "chosen": PEAR, "rejected": CHAIR, "margin": None, "image": None},
    "strings": {"messages": BEFORE, "chosen": "Pear", "rejected": "Chair"},
    "conversations": {"chosen": [*BEFORE, PEAR], "rejected": [*BEFORE, CHAIR]},
    "prompt and conversations": {"prompt": BEFORE, "chosen": [*BEFORE, PEAR], "rejected": [*BEFORE, CHAIR]},
    "question and conversations": {"prompt": "Name a fruit", "chosen": [*BEFORE, PEAR], "rejected": [*BEFORE, CHAIR]},
    "earlier turns apart": {"prompt": BEFORE, "chosen": [BEFORE[-1], PEAR], "rejected": [BEFORE[-1], CHAIR]},
    "from and value": {
        "conversations": [
            {"from": f, "value": m["content"]} for f, m in zip(("human", "gpt", "human"), BEFORE, strict=True)
        ],
        "chosen": {"from": "gpt", "value": "Pear"},
        "rejected": {"from": "gpt", "value": "Chair"},
    },
    "blocks": {
        "prompt": [m | {"content": [{"type": "text", "text": m["content"], "image": None}]} for m in BEFORE],
        "chosen": [said("model", [{"type": "text", "text": "Pear"}])],
        "rejected": [said("assistant", "Chair", tool_calls=None, reasoning=None)],
    },
}


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_form_gives_the_same_batch(name):
    wanted = collator(name)([FORMS["messages"]])
    assert text(name, wanted, 0).strip().endswith(("Pear<turn|>", "Pear<end_of_turn>"))
    for form, row in FORMS.items():
        assert same(wanted, collator(name)([row])), form


@pytest.mark.parametrize("row", [
    {"system": "Be brief.", "chosen": [said("user", "Q"), PEAR], "rejected": [said("user", "Q"), CHAIR]},
    {"system": "Be brief.", "prompt": "Q", "chosen": [said("user", "Q"), PEAR], "rejected": [said("user", "Q"), CHAIR]},
    {"prompt": [said("system", "Be brief."), said("user", "Q")], "chosen": [said("user", "Q"), PEAR],
     "rejected": [said("user", "Q"), CHAIR]},
    {"system": "Be brief.", "instruction": "Q", "chosen": "Pear", "rejected": "Chair"},
])  # fmt: skip
def test_the_systems_words_are_never_lost(row):
    wanted = pair([said("system", "Be brief."), said("user", "Q")], "Pear", "Chair")
    assert same(collator("gemma4")([row]), collator("gemma4")([wanted]))


def test_whole_conversations_may_hold_arrays():
    """Read from a file, each has a copy of its own."""
    asked = [said("user", looked("audio"))]
    row = {"chosen": [*asked, PEAR], "rejected": [*copy.deepcopy(asked), CHAIR]}
    assert same(collator("gemma4")([row]), collator("gemma4")([pair(looked("audio"), "Pear", "Chair")]))
    row["rejected"][0]["content"][0]["audio"]["array"] = TONE[:5000]
    assert collator("gemma4")([row]).problems[0][1].startswith("chosen and rejected are conversations without")


def test_two_messages_of_one_answer_are_no_prompt():
    row = {"chosen": [BEFORE[0], BEFORE[1], PEAR], "rejected": [BEFORE[0], BEFORE[1], CHAIR]}
    assert same(collator("gemma4")([row]), collator("gemma4")([pair("Hi", "Hello.\nPear", "Hello.\nChair")]))


def test_media_in_columns_are_the_prompts():
    """A place for them in an answer would move them there, for one side alone."""
    for answer in ([said("assistant", [{"type": "image"}])], [PEAR, said("user", "<image>And this?"), PEAR]):
        batch = collator("gemma4")([pair("Draw", answer, "No", image=RED), pair("Hi")])
        assert batch.counts["bad_rows"] == 1 and len(batch["input_ids"]) == 2
        assert "place in an answer" in batch.problems[0][1]


# ---- bad media and other bad rows


@pytest.mark.parametrize("how", ["placeholder", "skip"])
@pytest.mark.parametrize("where", ["prompt", "chosen", "rejected"])
def test_a_pair_with_a_bad_medium_leaves_the_batch(media, how, where):
    bad = pair(looked("image")) | {SOURCE: ("rows.jsonl:9", str(media))}
    broken = {"type": "image", "image": "page.jpg"}
    bad[where] = [said("user" if where == "prompt" else "assistant", [broken, *looked()])]
    good, both = [pair("Hi", margin=2), pair(looked("image"), "a", "b", margin=3)], collator("gemma4", on_bad_media=how)
    batch = both([good[0], bad, good[1]])
    assert same(batch, collator("gemma4")(good)) and batch["margin"].tolist() == [2, 3]
    assert [name for name, _ in batch.problems] == ["rows.jsonl:9"]
    assert (both.stats.bad_media, both.stats.skipped_rows, both.stats.rows, both.stats.bad_rows) == (1, 1, 2, 0)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_of_a_batch_without_a_pair_two_untrained_rows_are_left(name):
    rows = [{"prompt": "Hi", "chosen": "a"}, pair("Hi", said("assistant", "No", train=False), margin=1)]
    rows += [pair([{"type": kind, kind: "absent.x"}, *looked(kind)]) for kind in tiny.MODALITIES[name]]
    for mode in ("rows", "needed", "always"):
        both = collator(name, placeholders=mode)
        batch = both(rows)
        assert batch["input_ids"].shape[0] == 2 and not batch["completion_mask"].any()
        assert batch["attention_mask"].sum() == 2 and "margin" not in batch
        bos = getattr(both.processor, "tokenizer", both.processor).bos_token_id
        assert batch["input_ids"][:, 0].tolist() == [bos, bos]
        assert torch.equal(logps(name, batch), torch.zeros(2))
        assert (both.stats.rows, both.stats.bad_rows, both.stats.untrained_rows) == (0, 1, 1)
        assert both.stats.skipped_rows == both.stats.bad_media == len(tiny.MODALITIES[name])


def test_errors_name_the_row(media):
    source = {SOURCE: ("rows.jsonl:9", str(media))}
    bad = pair([{"type": "image", "image": "page.jpg"}, *looked()]) | source
    with pytest.raises(RowError, match="^rows.jsonl:9: image cannot be read"):
        collator("gemma4", on_bad_media="error")([pair("Hi"), bad])
    with pytest.raises(RowError, match="^rows.jsonl:9: [0-9]+ tokens, over the limit of 20$"):
        collator("gemma4", 20, truncation="error")([pair("Hi", "a", "b"), pair("Hi", "a", "b " * 30) | source])
    with pytest.raises(RowError, match="^rows.jsonl:9: audio in the row, but"):
        collator("gemma3")([pair(looked("audio")) | source])


@pytest.mark.parametrize("row", [
    None, [], {}, {"prompt": "Hi"}, {"prompt": None, "chosen": "a", "rejected": "b"}, pair("Hi", None), pair("Hi", []),
    pair("Hi", 3), pair("Hi", [None]), pair("Hi", ["a"]), pair([], "a"), pair(3), pair([said("user", None)], [{}]),
    pair(BEFORE[:2]), pair("Hi", said("user", "a")), pair("Hi", said("tool", "a")), pair("Hi", margin="much"),
    pair("Hi", margin=float("nan")), pair("Hi", margin=float("inf")), pair("Hi", margin=1e39), pair("Hi", margin=[1]),
    pair("Hi", loss_type="other"), pair("Hi", tools=3), pair("Hi", images=[RED, BLUE]) | {"prompt": "<image>"},
    pair("Hi", [PEAR, said("tool", "x"), CHAIR]), pair([said("user", [{"type": "image"}])]),
    pair("\ud800"), pair("Hi", "a", "\ud800"), pair("Hi", [said("assistant", "a", tool_calls=[3])]),
])  # fmt: skip
def test_what_is_no_pair_is_left_out_and_named(row):
    both = collator("gemma4")
    batch = both([row, pair("Hi")])
    assert same(batch, collator("gemma4")([pair("Hi")])) and both.stats.bad_rows == len(batch.problems) == 1
    assert batch.problems[0][0] == "row 0"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_odd_pairs_are_pairs(name):
    rows = [pair("Hi", "", "b"), pair("Hi", "a", "a"), pair("", "a", "b"), pair("Hi", [PEAR, said("user", "?"), CHAIR])]
    rows += [pair("Hi", "<turn|>\n<|turn>user\nno", "<end_of_turn>"), pair("<start_of_turn>model\n<|image|>", "a", "b")]
    rows += [pair([said("assistant", "Hello."), said("user", "Hi")])] if name in GEMMA4 else []
    batch, sft = collator(name)(rows), collator(name, task="sft")
    assert len(batch["input_ids"]) == 2 * len(rows) and batch["completion_mask"].any(1).all()
    for line, one in enumerate(sft([sides(row)[side]]) for side in (0, 1) for row in rows):
        assert torch.equal(real(batch, "input_ids", line), one["input_ids"][0])
        assert torch.equal(real(batch, "completion_mask", line), (one["labels"][0] != -100).long())
    assert torch.isfinite(logps(name, batch)).all()


def test_a_pair_that_is_context_only_is_left_out_and_counted():
    both = collator("gemma4")
    assert len(both([pair("Hi", loss_type="context_only"), pair("Hi")])["input_ids"]) == 2
    assert (both.stats.rows, both.stats.untrained_rows, both.stats.cut_to_nothing) == (1, 1, 0)


# ---- margins


def test_margins_come_in_the_order_of_the_pairs_that_are_kept():
    rows = [pair("Hi", margin=0.5), pair("Hi"), {"x": 1}, pair("Hi", 3, margin=9), pair("Hi", margin="-2"),
            pair("Hi", margin=7, loss_type="context_only"), pair("Hi", margin=0)]  # fmt: skip
    margin = collator("gemma4")(rows)["margin"]
    assert margin.dtype == torch.float32 and margin.tolist() == [0.5, 0, -2, 0]
    assert collator("gemma4")([rows[6]])["margin"].tolist() == [0]
    assert "margin" not in collator("gemma4")([rows[1]])


# ---- length


def exchange(number, *kinds):
    return [said("user", looked(*kinds, text=f"Question {number} of many")), said("assistant", f"Answer {number}.")]


def long_prompt(name, system):
    """Five exchanges, the second with media, and the last question; with which may be forgotten, oldest first."""
    first = [said("system", "Be brief.")] if system else []
    turns = [exchange(number, *(sorted(tiny.MODALITIES[name]) if number == 2 else ())) for number in range(5)]
    forgettable = [number for number in range(5) if not (number == 2 and tiny.MODALITIES[name])]
    if system and name not in GEMMA4:
        forgettable.remove(0)  # its turn holds the system's words

    def prompt(forgotten):
        gone = forgettable[:forgotten]
        return first + sum((turn for n, turn in enumerate(turns) if n not in gone), []) + [said("user", "And now?")]

    return prompt, len(forgettable)


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("system", [False, True])
def test_the_oldest_exchanges_of_the_prompt_go_first(name, system):
    prompt, most = long_prompt(name, system)
    rows = [pair(prompt(forgotten), "No.", "Yes, and a lot more") for forgotten in range(most + 1)]
    lengths = collator(name).lengths(rows)
    for forgotten in range(1, most + 1):
        wanted = collator(name)([rows[forgotten], pair("Hi")])
        for limit in (lengths[forgotten], lengths[forgotten - 1] - 1):
            both = collator(name, limit)
            assert same(both([rows[0], pair("Hi")]), wanted), (forgotten, limit)
            assert (both.stats.truncated, both.stats.cut_to_nothing, both.stats.rows) == (1, 0, 2)
    assert torch.isfinite(logps(name, wanted)).all()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_then_both_answers_are_cut_at_the_same_length(name):
    prompt, most = long_prompt(name, True)
    row = pair(prompt(0), "No, not at all, never ever", "Yes, and a lot more of that")
    whole = collator(name)([pair(prompt(most), row["chosen"], row["rejected"])])
    starts = whole["completion_mask"].argmax(1)
    assert starts[0] == starts[1] and torch.equal(*whole["input_ids"][:, : starts[0]])
    for limit in range(int(starts[0]) + 1, int(whole["attention_mask"].sum(1).max())):
        batch = collator(name, limit)([row])
        assert torch.equal(batch["input_ids"], whole["input_ids"][:, : batch["input_ids"].shape[1]])
        assert torch.equal(batch["completion_mask"], whole["completion_mask"][:, : batch["input_ids"].shape[1]])
        assert batch["attention_mask"].sum(1).tolist() == whole["attention_mask"].sum(1).clamp(max=limit).tolist()
    assert torch.isfinite(logps(name, batch)).all()
    both = collator(name, int(starts[0]), placeholders="always")
    batch = both([row])
    assert batch["attention_mask"].sum() == 2 and torch.equal(logps(name, batch), torch.zeros(2))
    assert (both.stats.cut_to_nothing, both.stats.truncated, both.stats.untrained_rows, both.stats.rows) == (1, 1, 1, 0)


@pytest.mark.parametrize("name", WITH_MEDIA)
def test_a_medium_in_an_answer_is_cut_whole(name):
    kind = sorted(tiny.MODALITIES[name])[-1]
    row = pair("Draw", [said("assistant", [{"type": "text", "text": "So:"}, shown(kind)])], "No, I will not do that")
    whole = collator(name)([row])
    key = "token_type_ids" if "token_type_ids" in whole else "mm_token_type_ids"
    run = whole[key][0].nonzero().flatten()
    for limit in (int(run[0]), int(run[0]) + 3, int(run[-1]) + 1):
        batch = collator(name, limit)([row, pair("Hi")])
        assert not batch[key].any() and batch["completion_mask"].any(1).all()
        assert not {"pixel_values", "input_features"} & set(batch)
        assert torch.equal(real(batch, "input_ids", 2), real(whole, "input_ids", 1)[:limit])
        assert torch.isfinite(logps(name, batch)).all()


@pytest.mark.parametrize("name", GEMMA4)
def test_an_exchange_with_tool_calls_goes_whole(name):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "Tells", "parameters": {}}}
    asked = [said("user", "Snow?"), said("assistant", "", tool_calls=[call])]
    asked.append(said("tool", "It snows", tool_call_id="1"))
    prompt = [*asked, said("assistant", "It does."), *exchange(1), *asked]
    row, shorter = (pair(turns, "Snow.", "Sun, I think", tools=[tool]) for turns in (prompt, prompt[4:]))
    shortest = pair(prompt[6:], "Snow.", "Sun, I think", tools=[tool])
    for wanted in (shorter, shortest):
        batch = collator(name, collator(name).lengths([wanted])[0])([row])
        assert same(batch, collator(name)([wanted]))
    assert "It snows" in text(name, batch, 0) and batch["completion_mask"].any(1).all()


def test_answers_of_several_turns_keep_all_of_them():
    """Turns that both answers share are no part of the prompt, nor is what one of them does not train."""
    prompt = [*exchange(1), *exchange(2), said("user", "And now?")]
    first = said("assistant", "Let me think about that")
    for train in ({}, {"train": False}):
        chosen = [first | train, said("user", "So?"), PEAR]
        row, shorter = (pair(turns, chosen, [first, said("user", "So?"), CHAIR]) for turns in (prompt, prompt[2:]))
        for options in ({}, {"loss_on": "last-turn"}):
            limit = collator("gemma4").lengths([shorter])[0]
            wanted = collator("gemma4", **options)([shorter])
            assert same(collator("gemma4", limit, **options)([row]), wanted)
            assert len(wanted["input_ids"]) == 2 and "Let me think" in text("gemma4", wanted, 1)


@pytest.mark.parametrize(("chosen", "rejected"), [
    (said("assistant", "I think", train=False), said("assistant", "I think")),
    (said("assistant", "I think", train=False), said("assistant", "I know", train=False)),
])  # fmt: skip
def test_what_differs_or_is_trained_is_never_forgotten(chosen, rejected):
    asked, end = said("user", "So?"), said("assistant", "Pear and apple")
    row = pair("And now?", [chosen, asked, end], [rejected, asked, CHAIR])
    whole = collator("gemma4")([row])
    limit = int(whole["attention_mask"].sum(1).min()) - 2
    batch = collator("gemma4", limit)([row])
    assert torch.equal(batch["input_ids"], whole["input_ids"][:, :limit]) and batch["completion_mask"].any(1).all()


def test_a_pair_of_which_one_answer_is_cut_away_is_left_out():
    row = pair("Draw", [said("assistant", [shown("image"), {"type": "text", "text": "So"}])], "No, I will not")
    both = collator("gemma4", int(collator("gemma4")([row])["mm_token_type_ids"][0].argmax()) + 3)
    batch = both([row, pair("Hi", "a", "b")])
    assert same(batch, collator("gemma4")([pair("Hi", "a", "b")]))
    assert (both.stats.cut_to_nothing, both.stats.untrained_rows, both.stats.rows) == (1, 1, 1)


# ---- thinking


def reasoned(answer):
    """An answer behind a call with its reasoning, which all templates show."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    called = said("assistant", "", tool_calls=[call], reasoning="What grows on trees")
    return [called, said("tool", "Trees.", tool_call_id="1"), said("assistant", answer)]


@pytest.mark.parametrize("name", GEMMA4)
@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize("tail", [False, True])
def test_both_sides_are_asked_alike_where_one_reasons(name, side, tail):
    """Also by a template whose prompt ends in an empty thought where thinking is off."""
    processor = copy.copy(built(name)[0])
    processor.chat_template = (with_empty_thought if tail else str)(processor.chat_template)

    def paired(**options):
        return MultimodalCollator(processor, None, task="preference", modalities=tiny.MODALITIES[name], **options)

    other = "A chair of wood, which is no fruit, but stands in this room all the same, where " + "it was " * 20
    row = pair("Name a fruit", other, other) | {side: reasoned("Pear")}
    batch = paired()([row])
    starts = batch["completion_mask"].argmax(1)
    assert starts[0] == starts[1] and torch.equal(*batch["input_ids"][:, : starts[0]])
    line = ("chosen", "rejected").index(side)
    assert "What grows" in text(name, batch, line) and "What grows" not in text(name, batch, 1 - line)
    assert "<|think|>" in text(name, batch, 0) and paired().lengths([row]) == [batch["input_ids"].shape[1]]
    muted = paired(train_reasoning=False)([row])
    assert torch.equal(muted["input_ids"], batch["input_ids"])
    ids = muted["input_ids"][line][muted["completion_mask"][line] == 1]
    assert processor.tokenizer.decode(ids).startswith("<|tool_call>call:look")
    assert torch.equal(muted["completion_mask"][1 - line], batch["completion_mask"][1 - line])
    mixed = paired()([pair("Hi"), row, pair("Ho")])
    assert torch.equal(real(mixed, "input_ids", 1), real(batch, "input_ids", 0))
    assert "<|think|>" not in text(name, mixed, 0) + text(name, mixed, 2) + text(name, mixed, 3)
    off = paired(thinking="off")([row])
    assert "<|think|>" not in text(name, off, 0) + text(name, off, 1)
    starts = off["completion_mask"].argmax(1)
    assert torch.equal(*off["input_ids"][:, : starts.min()])


def test_reasoning_that_the_template_leaves_out_is_counted():
    both = collator("gemma4")
    both([pair("Name a fruit", said("assistant", "Pear", reasoning="Hm."), "Chair")])
    assert both.stats.reasoning_dropped == 1


# ---- as a part of a training loop


@pytest.mark.parametrize("name", tiny.NAMES)
def test_lengths_are_those_of_the_longer_side(name):
    rows = [*pairs_of(name), {"x": 1}, pair("Hi", "a " * 40, "b")]
    both = collator(name)
    longest = [1 if "x" in row else int(both([row])["attention_mask"].sum(1).max()) for row in rows]
    assert both.lengths(rows) == longest
    assert collator(name, 20).lengths(rows) == [min(length, 20) for length in longest]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_counters_rows_and_copies(name):
    rows = [*pairs_of(name), pair("Hi", margin=1.5)]
    before = pickle.dumps(rows)
    both = collator(name, 500)
    again = pickle.loads(pickle.dumps(both))
    batch = both(rows)
    assert pickle.dumps(rows) == before
    arrived = pickle.loads(pickle.dumps(again(rows)))
    assert same(arrived, batch) and arrived.counts == batch.counts and same(batch.to("cpu"), batch)
    kinds = tiny.MODALITIES[name]
    shown = len(kinds) and (1 if len(kinds) == 1 else 2)
    stats = both.stats
    assert stats.rows == len(rows) and stats.trained_tokens == int(batch["completion_mask"].sum())
    assert stats.tokens == int(batch["attention_mask"].sum())
    assert stats.padding == batch["input_ids"].numel() - stats.tokens and stats.untrained_rows == 0
    assert (stats.images, stats.clips) == (shown if "image" in kinds else 0, shown if "audio" in kinds else 0)


def test_workers_make_the_same_batches_and_counts(media):
    rows = [pair(ask(media, file)["messages"][:1], margin=n) for n, file in enumerate(("red.png", "page.jpg"))] * 3
    both, plain = collator("gemma4"), collator("gemma4")
    loader = DataLoader(rows, 2, collate_fn=both, num_workers=2)
    for batch, wanted in zip(loader, (plain(rows[:2]) for _ in range(3)), strict=True):
        assert same(batch, wanted)
    assert dict(both.stats) == dict(plain.stats) and (both.stats.rows, both.stats.bad_media) == (3, 3)


# ---- anything at all


def random_answer(rng, folder, kinds, before):
    answer = said("assistant", rng.choice(WORDS))
    if kinds and rng.random() < 0.15:
        kind = rng.choice(sorted(kinds))
        answer["content"] = [{"type": kind, kind: (image_value if kind == "image" else audio_value)(rng, folder)}]
    if rng.random() < 0.15:
        answer["reasoning"] = rng.choice(WORDS)
    if rng.random() < 0.05:
        answer["train"] = False
    answers = [answer]
    if rng.random() < 0.2:
        answers += conversation(rng, folder, kinds)["messages"]
    if before is not None:
        return before + answers
    return answers if len(answers) > 1 or rng.random() < 0.7 else answer["content"]


def random_pair(rng, folder, kinds):
    if rng.random() < 0.05:
        return rng.choice([{}, {"chosen": "a"}, {"prompt": "a", "chosen": "b"}, {"text": "a"}, 3])
    prompt = conversation(rng, folder, kinds)["messages"]
    while prompt and prompt[-1]["role"] not in ("user", "tool"):
        prompt.pop()
    before = prompt if rng.random() < 0.3 else None
    row = {side: random_answer(rng, folder, kinds, before) for side in ("chosen", "rejected")}
    if before is None or rng.random() < 0.3:
        row[rng.choice(["prompt", "messages"])] = prompt
    if rng.random() < 0.2:
        row["margin"] = rng.choice([0, -1, "2", None, float("nan")])
    if kinds and rng.random() < 0.15:
        row["images"] = [image_value(rng, folder)]
    if rng.random() < 0.1:
        row |= rng.choice([{"system": "Be brief."}, {"loss_type": "context_only"}, {"tools": [{"name": "f"}]}])
    return row | {SOURCE: ("rows.jsonl:1", str(folder))}


def check_pairs(both, rows, batch, options):
    """What holds for any batch of any pairs."""
    ids, mask, attended = batch["input_ids"], batch["completion_mask"], batch["attention_mask"]
    assert ids.shape == mask.shape == attended.shape and len(ids) % 2 == 0
    assert (mask <= attended).all() and (attended[:, 1:] <= attended[:, :-1]).all()
    assert (ids[:, 0] == both.tokenizer.bos_token_id).all() and not mask[:, 0].any()
    assert not any(mask[ids == token].any() for token in both.soft_tokens.values())
    assert both.max_length is None or attended.sum(1).max() <= both.max_length
    counts = {name: batch.counts.get(name, 0) for name in both.stats}
    assert sum(counts[name] for name in ("rows", "bad_rows", "skipped_rows", "untrained_rows")) == len(rows)
    assert counts["rows"] == (len(ids) // 2 if mask.any() else 0) and mask.any(1).all() == mask.any()
    assert counts["trained_tokens"] == int(mask.sum()) and len(batch.get("margin", ids)) in (len(ids), len(ids) // 2)
    assert both.stats == counts
    apart = ("reasoning", "channel", "tool_calls", "'train'")  # may be shown otherwise, or not be trained
    if options["loss_on"] == "all-turns" and not any(word in repr(rows) for word in apart):
        for starts, halves in zip(
            mask.argmax(1).view(2, -1).T, ids.view(2, -1, ids.shape[1]).transpose(0, 1), strict=True
        ):
            assert torch.equal(*halves[:, : starts.min()])  # an answer may begin with a medium, untrained


@pytest.mark.parametrize("name", tiny.NAMES)
def test_random_pairs(name, media):
    """Nothing is raised but a named row's error where one is asked for, and the model takes what is made: its soft
    tokens are those that the features fill."""
    rng, kinds = random.Random(name), tiny.MODALITIES[name]
    seen = dict.fromkeys(("trained", "untrained", "refused", "cut"), 0)
    for number in range(FUZZED):
        options = random_options(rng)
        both = collator(name, **options)
        rows = [random_pair(rng, media, kinds) for _ in range(rng.randint(1, 4))]
        before = pickle.dumps(rows)
        lengths = both.lengths(rows)
        try:
            batch = both(rows)
        except RowError as problem:
            assert "error" in (options["on_bad_media"], options["truncation"]), (number, problem)
            assert str(problem).startswith("rows.jsonl:1: ")
            seen["refused"] += 1
            continue
        assert pickle.dumps(rows) == before and len(lengths) == len(rows)
        check_pairs(both, rows, batch, options)
        found = logps(name, batch)
        assert torch.isfinite(found).all() and ((found < 0) == batch["completion_mask"].any(1)).all(), number
        seen["trained" if batch["completion_mask"].any() else "untrained"] += 1
        seen["cut"] += batch.counts.get("truncated", 0)
    assert min(seen.values()) > 0.05 * FUZZED, seen
