"""Rows to a batch, on the real tiny model: media reach it, gaps change nothing, what is cut goes whole."""

import copy
import itertools
import pickle
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from conftest import ASSETS, ask, talk, trained_runs
from gemma_trainer import demo
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.rows import SOURCE


def counts(tokenizer, batch, line=0):
    """Soft tokens of a row."""
    ids = batch["input_ids"][line][batch["attention_mask"][line] == 1]
    return {kind: int((ids == getattr(tokenizer, f"{kind}_token_id")).sum()) for kind in ("image", "audio")}


def losses(model, batch):
    """The summed loss of each row."""
    with torch.no_grad():
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    flat = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view(len(logits), -1).sum(1)


# ---- text


def test_a_text_batch_equals_plain_tokenizing_and_carries_no_media(processor):
    rows = [talk("hi", "hello"), talk("What is the capital of Italy?", "Rome.", "And now?", "No.")]
    batch = MultimodalCollator(processor)(rows)
    texts = [
        processor.tokenizer.apply_chat_template(row["messages"], chat_template=processor.chat_template, tokenize=False)
        for row in rows
    ]
    plain = processor.tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
    )
    assert torch.equal(batch["input_ids"], plain["input_ids"]) and torch.equal(
        batch["attention_mask"], plain["attention_mask"]
    )
    assert set(batch) == {"input_ids", "attention_mask", "labels", "mm_token_type_ids"}
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_a_text_batch_imports_no_audio_or_image_library():
    code = f"""
import sys; sys.path.insert(0, {str(ASSETS)!r})
from gemma_trainer import demo
from gemma_trainer.collator import MultimodalCollator
collator = MultimodalCollator(demo.make_processor())
before = set(sys.modules)  # transformers' own processor classes import some of these
collator([{{"prompt": "a", "completion": "b"}}])
media = ("PIL", "librosa", "soundfile", "soxr", "torchvision", "torchaudio", "audioread")
print([m for m in set(sys.modules) - before if m.split(".")[0] in media])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_bare_tokenizer_collates_text_and_refuses_media(processor, media):
    tokenizer = demo.make_tokenizer()
    tokenizer.chat_template = processor.chat_template
    collator = MultimodalCollator(tokenizer)
    assert trained_runs(tokenizer, collator([talk("a", "b")])) == ["b<turn|>"]
    row = ask(media, "red.png") | {SOURCE: ("rows.jsonl:4", str(media))}
    with pytest.raises(RowError, match="rows.jsonl:4: image in the row"):
        collator([row])


# ---- media


@pytest.mark.parametrize("order", list(itertools.permutations(["text", "image", "audio"])), ids="-".join)
def test_every_order_of_kinds_in_one_batch(processor, model, media, order):
    rows = {"text": talk("hi", "hello"), "image": ask(media, "red.png"), "audio": ask(media, "one.wav")}
    batch = MultimodalCollator(processor)([rows[kind] for kind in order])
    assert batch["input_features"].shape[0] == 3 and batch["pixel_values"].shape[0] == 1
    assert torch.isfinite(model(**batch).loss)
    alone = {kind: losses(model, MultimodalCollator(processor)([row])) for kind, row in rows.items()}
    assert torch.allclose(losses(model, batch), torch.cat([alone[kind] for kind in order]), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("files", "soft"), [
    (("one.wav", "short.flac"), {"audio": 35, "image": 0}), (("red.png", "blue.jpg"), {"audio": 0, "image": 60 + 66}),
    (("red.png", "one.wav"), {"audio": 25, "image": 60}),
    (("one.wav", "red.png", "short.flac"), {"audio": 35, "image": 60}),
])  # fmt: skip
def test_several_media_in_a_message(processor, model, media, files, soft):
    batch = MultimodalCollator(processor)([talk("hi", "hello"), ask(media, *files)])
    assert counts(processor.tokenizer, batch, 1) == soft
    kinds = batch["mm_token_type_ids"][1]
    assert {"image": int((kinds == 1).sum()), "audio": int((kinds == 3).sum())} == soft
    assert torch.isfinite(model(**batch).loss)


def test_rows_with_one_two_and_three_images(processor, model, media):
    rows = [ask(media, *["red.png"] * n) for n in (1, 2, 3)]
    batch = MultimodalCollator(processor)(rows)
    assert batch["pixel_values"].shape[0] == 6 and torch.isfinite(model(**batch).loss)


def test_three_seconds_keep_their_75_tokens_whatever_the_padding_side(media):
    processor = demo.make_processor()
    for side in ("left", "right"):
        processor.tokenizer.padding_side = side
        for length in (2048, 512):
            batch = MultimodalCollator(processor, length)([ask(media, "three.wav")])
            assert counts(processor.tokenizer, batch)["audio"] == 75


@pytest.mark.parametrize("samples", [161, 200, 640, 6400, 15999, 16000, 16001, 63520, 480000])
def test_soft_tokens_in_the_text_equal_what_the_audio_tower_makes(processor, model, samples):
    clip = {"array": np.full(samples, 0.1, np.float32), "sampling_rate": 16000}
    batch = MultimodalCollator(processor)([talk([{"type": "audio", "audio": clip}], "x")])
    with torch.no_grad():
        made = model.model.get_audio_features(batch["input_features"], batch["input_features_mask"], return_dict=True)
    assert counts(processor.tokenizer, batch)["audio"] == int(made.attention_mask.sum()) <= 750


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (16, 16000), (20000, 16), (640, 480), (33, 47)])
def test_soft_tokens_in_the_text_equal_what_the_vision_tower_makes(processor, model, size):
    from PIL import Image

    batch = MultimodalCollator(processor)([talk([{"type": "image", "image": Image.new("RGB", size)}], "x")])
    with torch.no_grad():
        made = model.get_image_features(batch["pixel_values"], batch["image_position_ids"], return_dict=True)
    assert counts(processor.tokenizer, batch)["image"] == sum(len(part) for part in made.pooler_output)


# ---- gaps


def test_an_audio_row_has_the_same_loss_alone_and_beside_text(processor, model, media):
    collator, row = MultimodalCollator(processor), ask(media, "one.wav")
    alone, beside = (
        collator([row]),
        collator([talk("hi", "hello"), row, talk("What is the capital of Italy?", "Rome.")]),
    )
    assert torch.allclose(losses(model, alone)[0], losses(model, beside)[1], atol=1e-5)
    assert collator.stats.placeholders == 2


def test_placeholders_give_finite_and_zero_gradients_to_the_tower(processor, media):
    model = demo.make_model(processor.tokenizer).train()

    def tower_gradients(rows, **options):
        model.zero_grad(set_to_none=True)
        batch = MultimodalCollator(processor, **options)(rows)
        per_row = model(**batch).loss * (batch["labels"][:, 1:] != -100).sum()
        per_row.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "audio_tower" in name}

    alone = tower_gradients([ask(media, "one.wav")])
    rows = [talk("hi", "hello"), ask(media, "one.wav")]
    beside, needed = tower_gradients(rows), tower_gradients(rows, placeholders="needed")
    assert alone.keys() == beside.keys() == needed.keys() and alone
    assert all(torch.isfinite(grad).all() for grad in beside.values())
    assert all(torch.allclose(beside[name], needed[name], atol=1e-5) for name in beside)
    only_text = tower_gradients([talk("hi", "hello")], placeholders="always")
    assert only_text and all(float(grad.abs().max()) == 0.0 for grad in only_text.values())


@pytest.mark.parametrize("kinds", [("text", "text"), ("text", "image"), ("audio", "text"), ("image", "audio")])
def test_losses_are_equal_in_all_placeholder_modes(processor, model, media, kinds):
    rows = {"text": talk("hi", "hello"), "image": ask(media, "red.png"), "audio": ask(media, "one.wav")}
    found = {}
    for mode in ("rows", "needed", "always"):
        batch = MultimodalCollator(processor, placeholders=mode)([rows[kind] for kind in kinds])
        found[mode] = losses(model, batch)[: len(kinds)]
        if mode == "always":
            assert {"pixel_values", "input_features"} <= set(batch)
    assert torch.allclose(found["rows"], found["needed"], atol=1e-5)
    assert torch.allclose(found["rows"], found["always"], atol=1e-5)


# ---- bad media


@pytest.mark.parametrize("file", ["page.jpg", "absent.png", "text.wav", "absent.wav"])
@pytest.mark.parametrize("beside", [(), ("red.png",), ("one.wav",)])
def test_a_bad_medium_is_named_and_its_row_trains_nothing(processor, model, media, file, beside):
    collator = MultimodalCollator(processor)
    bad = ask(media, *beside, file) | {SOURCE: ("rows.jsonl:9", str(media))}
    batch = collator([talk("hi", "hello"), bad])
    assert (batch["labels"][1] == -100).all() and (batch["labels"][0] != -100).any()
    assert [name for name, _ in batch.problems] == ["rows.jsonl:9"]
    assert collator.stats.bad_media == 1 and collator.stats.untrained_rows == 1 and collator.stats.placeholders >= 1
    assert sum(counts(processor.tokenizer, batch, 1).values()) == {(): 0, ("red.png",): 60, ("one.wav",): 25}[beside]
    good = MultimodalCollator(processor)([talk("hi", "hello")])
    assert torch.allclose(losses(model, batch)[0], losses(model, good)[0], atol=1e-5)


def test_bad_media_alone_in_a_batch(processor, model, media):
    batch = MultimodalCollator(processor)([ask(media, "page.jpg"), ask(media, "text.wav")])
    assert (batch["labels"] == -100).all()
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    assert torch.isfinite(logits).all()


def test_on_bad_media_skip_and_error(processor, media):
    skip = MultimodalCollator(processor, on_bad_media="skip")
    assert len(skip([talk("hi", "hello"), ask(media, "page.jpg")])["input_ids"]) == 1
    assert skip([ask(media, "page.jpg")])["labels"].tolist() == [[-100]]
    assert skip.stats.skipped_rows == 2
    with pytest.raises(RowError, match="^rows.jsonl:9: image cannot be read"):
        MultimodalCollator(processor, on_bad_media="error")([ask(media, "page.jpg") | {SOURCE: ("rows.jsonl:9", "")}])


def test_long_audio_is_cut_or_refused_and_counted(processor):
    clip = {"array": np.full(33 * 16000, 0.1, np.float32), "sampling_rate": 16000}
    row = talk([{"type": "audio", "audio": clip}], "x")
    collator = MultimodalCollator(processor)
    batch = collator([row])
    assert counts(processor.tokenizer, batch)["audio"] == 750 and collator.stats.long_audio == 1
    assert "33.0 s was cut to the 30 s" in batch.problems[0][1] and (batch["labels"] != -100).any()
    refuse = MultimodalCollator(processor, long_audio="refuse")
    assert (refuse([row])["labels"] == -100).all() and refuse.stats.bad_media == refuse.stats.long_audio == 1


def test_rows_that_cannot_be_read_or_rendered_are_left_out_and_named(processor):
    collator = MultimodalCollator(processor)
    image = {"type": "image", "image": np.zeros((8, 8, 3), np.uint8)}
    system_image = {"messages": [{"role": "system", "content": [image]}, *talk("a", "b")["messages"]]}
    batch = collator([{"question": "x"}, talk("hi", "hello"), system_image])
    assert len(batch["input_ids"]) == 1 and collator.stats.bad_rows == 2
    assert "no known format" in batch.problems[0][1] and "no place for them" in batch.problems[1][1]
    assert "pixel_values" not in batch


# ---- length


@pytest.mark.parametrize("file", ["red.png", "one.wav"])
def test_a_cut_inside_a_medium_takes_the_whole_of_it(processor, model, media, file):
    row = ask(media, file, answer="A long answer that ends later")
    whole = MultimodalCollator(processor)([row])
    run = whole["mm_token_type_ids"][0].nonzero().flatten()
    for length in (int(run[0]), int(run[0]) + 5, int(run[-1]) + 1):  # in the run, whose last token closes it
        collator = MultimodalCollator(processor, length)
        batch = collator([row, talk("hi", "hello")])
        assert counts(processor.tokenizer, batch) == {"image": 0, "audio": 0}
        assert batch["attention_mask"][0].sum() == int(run[0]) - 1  # cut before the token that opens it
        assert "pixel_values" not in batch and "input_features" not in batch
        assert collator.stats.truncated >= 1 and collator.stats.cut_to_nothing >= 1
    batch = MultimodalCollator(processor, int(run[-1]) + 2)([row])
    assert sum(counts(processor.tokenizer, batch).values()) == len(run) and torch.isfinite(losses(model, batch)).all()


def test_a_cut_between_clips_keeps_the_first(processor, model, media):
    row = talk(
        [{"type": "audio", "audio": str(media / "one.wav")}],
        "a",
        [{"type": "audio", "audio": str(media / "short.flac")}],
        "b",
    )
    whole = MultimodalCollator(processor)([row])
    starts = (whole["input_ids"][0] == processor.tokenizer.convert_tokens_to_ids("<|audio>")).nonzero().flatten()
    batch = MultimodalCollator(processor, int(starts[1]) + 3)([row])
    assert counts(processor.tokenizer, batch)["audio"] == 25 and batch["input_features"].shape[0] == 1
    assert torch.isfinite(losses(model, batch)).all()
    assert trained_runs(processor.tokenizer, batch) == ["a<turn|>"]


def test_the_tail_is_cut_and_a_row_cut_to_nothing_is_counted(processor):
    row = talk("one two three four five six", "seven eight")
    length = int((MultimodalCollator(processor)([row])["labels"][0] != -100).nonzero()[0])
    collator = MultimodalCollator(processor, length)
    assert (collator([row])["labels"] == -100).all()
    assert (collator.stats.truncated, collator.stats.cut_to_nothing) == (1, 1)
    with pytest.raises(RowError, match="over the limit of 5"):
        MultimodalCollator(processor, 5, truncation="error")([row])


def test_padding_to_a_multiple(processor):
    batch = MultimodalCollator(processor, pad_to_multiple_of=16)([talk("hi", "hello")])
    assert batch["input_ids"].shape[1] % 16 == 0


# ---- as a part of a training loop


def test_rows_are_left_as_they_are(processor, media):
    rows = [ask(media, "red.png"), talk("a", "b", images=[str(media / "blue.jpg")]), {"prompt": "x", "completion": "y"}]
    before = copy.deepcopy(rows)
    MultimodalCollator(processor)(rows)
    assert rows == before


def test_options_are_checked(processor):
    for option in ({"loss_on": "some"}, {"task": "dance"}, {"placeholders": "never"}, {"max_length": 0}):
        with pytest.raises(ValueError, match=next(iter(option))):
            MultimodalCollator(processor, **option)


def test_it_pickles(processor, media):
    rows = [ask(media, "red.png", "one.wav")]
    collator = MultimodalCollator(processor, 100, loss_on="last-turn")
    again = pickle.loads(pickle.dumps(collator))
    first, second = collator(rows), pickle.loads(pickle.dumps(again(rows)))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert first.counts == second.counts


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_counters_are_right_with_workers(processor, media, context):
    rows = [talk("hi", "hello"), ask(media, "page.jpg"), ask(media, "one.wav")] * 4
    collator = MultimodalCollator(processor)
    loader = DataLoader(rows, 3, collate_fn=collator, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    assert collator.stats.rows == 12 and collator.stats.bad_media == 4 and collator.stats.clips == 4
    for name in ("tokens", "trained_tokens", "padding", "placeholders"):
        assert collator.stats[name] == sum(batch.counts.get(name, 0) for batch in batches) > 0
    assert collator.stats.tokens == sum(int(batch["attention_mask"].sum()) for batch in batches)


def test_batches_that_workers_made_ahead_are_not_counted(processor):
    collator = MultimodalCollator(processor)
    loader = iter(DataLoader([talk("hi", "hello")] * 40, 2, collate_fn=collator, num_workers=1, prefetch_factor=6))
    for taken in range(1, 4):
        batch = next(loader)
        time.sleep(0.2)  # the worker goes on with the next ones
        assert collator.stats.rows == 2 * taken
        assert batch.to("cpu").counts == batch.counts


def test_a_copy_of_a_collator_counts_for_itself(processor):
    collator = MultimodalCollator(processor)
    again = pickle.loads(pickle.dumps(collator))
    again([talk("hi", "hello")])
    assert (collator.stats.rows, again.stats.rows) == (0, 1)


@pytest.mark.parametrize("option", [{"on_bad_media": "error"}, {"truncation": "error"}])
def test_an_error_in_a_worker_is_told_as_it_is(processor, media, option):
    row = ask(media, "page.jpg" if "on_bad_media" in option else "red.png") | {SOURCE: ("rows.jsonl:9", "")}
    collator = MultimodalCollator(processor, 20, **option)
    with pytest.raises(RowError) as caught:
        list(DataLoader([row], 1, collate_fn=collator, num_workers=1))
    assert str(caught.value).startswith("rows.jsonl:9: ") and "\n" not in str(caught.value)


def test_a_batch_of_rows_that_were_all_left_out_counts_no_row(processor, model):
    collator = MultimodalCollator(processor)
    batch = collator([{"question": "x"}])
    assert (collator.stats.rows, collator.stats.bad_rows) == (0, 1) and (batch["labels"] == -100).all()


def test_media_both_in_an_answer_and_in_a_result_are_refused(processor, media):
    """Templates that show a result's media may put the answer's own behind them."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    look = {"type": "image", "image": str(media / "red.png")}
    row = {
        "messages": [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [look], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [look]},
            {"role": "assistant", "content": "a"},
        ]
    }
    batch = MultimodalCollator(processor)([row])
    assert batch.counts["bad_rows"] == 1 and "order" in batch.problems[0][1]


def test_the_default_of_several_chat_templates_is_used(processor):
    import copy

    several = copy.copy(processor)
    several.chat_template = {"default": processor.chat_template, "rag": "nothing"}
    rows = [talk("Hi", "Hello")]
    assert torch.equal(MultimodalCollator(several)(rows)["labels"], MultimodalCollator(processor)(rows)["labels"])
