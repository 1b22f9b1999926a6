"""Every family collates every kind of row it takes, and its model trains on the batch."""

import json

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from conftest import talk, trained_runs
from gemma_trainer import families
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import CannotLoad, RowError

MULTIMODAL = [name for name in tiny.NAMES if tiny.MODALITIES[name]]
FIXED = ("gemma3", "gemma3n")


@pytest.fixture(scope="module")
def built():
    """Each family's processor and model, made when first asked for; weights are not changed."""
    made = {}

    def build(name):
        if name not in made:
            processor = tiny.make_processor(name)
            made[name] = processor, tiny.make_model(name, processor)
        return made[name]

    return build


def image(colour="red", width=96, height=64):
    return {"type": "image", "image": Image.new("RGB", (width, height), colour)}


def clip(seconds, hertz=440.0):
    samples = np.sin(np.arange(round(seconds * 16000)) * (hertz / 16000 * 2 * np.pi)).astype(np.float32)
    return {"type": "audio", "audio": {"array": samples, "sampling_rate": 16000}}


def asked(answer, *media, question="What is it?"):
    return talk([*media, {"type": "text", "text": question}], answer)


def rows_of(name):
    """Rows of every kind that the family takes: text, one and two media, both kinds in one."""
    kinds = tiny.MODALITIES[name]
    rows = [talk("What is the capital of Italy?", "Rome."), talk("Say a", "a", "Say b", "b")]
    if "image" in kinds:
        rows += [asked("Red.", image()), asked("Two.", image("blue", 20, 90), image("green", 7, 3))]
    if "audio" in kinds:
        rows += [asked("A tone.", clip(0.4)), asked("Two tones.", clip(1.3), clip(0.05))]
    if kinds == {"image", "audio"}:
        rows.append(asked("Both.", image(), clip(0.7)))
    return rows


def collator_of(name, processor, **options):
    return MultimodalCollator(processor, 2048, modalities=tiny.MODALITIES[name], **options)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_mixed_batch_trains(name, built):
    """Loss and gradients are finite in train mode, and reach each part that has something to see."""
    processor, _ = built(name)
    model = tiny.make_model(name, processor).train()
    batch = collator_of(name, processor)(rows_of(name))
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    seen = {key: 0.0 for key in ("vision", "audio", "layers")}
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), parameter_name
            for key in seen:
                seen[key] += float(parameter.grad.abs().sum()) if key in parameter_name else 0.0
    kinds = tiny.MODALITIES[name]
    assert (
        seen["layers"] > 0 and (seen["vision"] > 0) == ("image" in kinds) and (seen["audio"] > 0) == ("audio" in kinds)
    )


@pytest.mark.parametrize("name", tiny.NAMES)
def test_token_type_ids_are_there_for_text_batches_too(name, built):
    processor, model = built(name)
    batch = collator_of(name, processor)([talk("Hi", "Hello")])
    key = "token_type_ids" if name in FIXED else "mm_token_type_ids"
    expected = {"input_ids", "attention_mask", "labels"} | ({key} if tiny.MODALITIES[name] else set())
    assert set(batch) == expected
    assert torch.isfinite(model.train()(**batch).loss)
    model.eval()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_three_steps_lower_the_loss(name, built):
    processor, _ = built(name)
    model = tiny.make_model(name, processor).train()
    rows = rows_of(name)
    batch = collator_of(name, processor)([rows[0], rows[1], rows[-1], rows[-2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[3] < losses[0] - 0.1, losses


@pytest.mark.parametrize("name", MULTIMODAL)
def test_losses_are_equal_in_all_placeholder_modes(name, built):
    """Whatever a batch holds: "always" carries each modality, "rows" and "needed" only what is there."""
    processor, model = built(name)
    rows = rows_of(name)
    for part in (rows, rows[:2], rows[-1:], rows[2:3]):
        losses, keys = {}, {}
        for mode in ("rows", "needed", "always"):
            batch = collator_of(name, processor, placeholders=mode)(part)
            with torch.no_grad():
                losses[mode] = model(**batch).loss
            keys[mode] = {"image": "pixel_values" in batch, "audio": "input_features" in batch}
        assert torch.allclose(losses["rows"], losses["needed"], rtol=1e-5)
        assert torch.allclose(losses["rows"], losses["always"], rtol=1e-5)
        assert {kind for kind, there in keys["always"].items() if there} == tiny.MODALITIES[name]
        assert keys["rows"] == keys["needed"]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_always_gives_the_towers_finite_gradients_on_a_text_batch(name, built):
    processor, _ = built(name)
    model = tiny.make_model(name, processor).train()
    model(**collator_of(name, processor, placeholders="always")([talk("Hi", "Hello")])).loss.backward()
    towers = [(n, p) for n, p in model.named_parameters() if "vision" in n or "audio" in n]
    touched = {kind for kind, part in (("image", "vision"), ("audio", "audio")) if any(
        part in n and p.grad is not None for n, p in towers)}  # fmt: skip
    assert touched == tiny.MODALITIES[name]
    for parameter_name, parameter in towers:
        assert parameter.grad is None or not parameter.grad.isnan().any(), parameter_name
        assert parameter.grad is None or float(parameter.grad.abs().max()) < 1e-6, parameter_name


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in tiny.NAMES for k in ("image", "audio") if k not in tiny.MODALITIES[n]]
)
def test_media_without_a_tower_are_refused_by_row_and_family(name, kind, built):
    processor, _ = built(name)
    row = asked("x", image() if kind == "image" else clip(1.0)) | {"__source__": ("rows.jsonl:7", ".")}
    with pytest.raises(RowError, match=rf"rows.jsonl:7: {kind} in the row, but this {name.split('_')[0]}"):
        collator_of(name, processor)([row])


# ---- what a batch holds equals what the family's own processor makes


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("question", ["What?", "\nWhat?\n", "What?\n\n\n"])
def test_tokens_equal_those_of_the_processor(name, question, built):
    """Also where line breaks of the text meet those that a processor puts around its media."""
    processor, _ = built(name)
    pictures = [Image.new("RGB", (96, 64), "red"), Image.new("RGB", (33, 90), "blue")]
    sounds = [clip(0.4)["audio"]["array"], clip(1.3)["audio"]["array"]]
    media, given = [{"type": "image", "image": picture} for picture in pictures], {"images": [pictures]}
    if "audio" in tiny.MODALITIES[name]:
        media += [{"type": "audio", "audio": {"array": sound, "sampling_rate": 16000}} for sound in sounds]
        given["audio"] = sounds
    text = {"type": "text", "text": question}
    blocks = [text, media[0], text, *media[1:], text]
    batch = collator_of(name, processor)([talk(blocks, "Yes")])
    shown = [{"type": b["type"]} if b["type"] != "text" else b for b in blocks]
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": shown}, {"role": "assistant", "content": "Yes"}], tokenize=False
    )
    wanted = processor(text=[rendered], **given, add_special_tokens=False, return_tensors="pt")
    assert batch["input_ids"].tolist() == wanted["input_ids"].tolist()
    key = families.family_of_processor(processor).type_ids_key
    assert batch[key].tolist() == wanted[key].tolist()
    # Together, Gemma 3n's extractor lets padding of the shorter clip pass for sound; ours are as they are alone.
    audio = set() if name == "gemma3n" else {"input_features", "input_features_mask"}
    for tensor in set(batch) & {"pixel_values", "image_position_ids", *audio}:
        assert torch.equal(batch[tensor], wanted[tensor])


@pytest.mark.parametrize("name", [n for n in MULTIMODAL if "audio" in tiny.MODALITIES[n]])
def test_a_clip_is_heard_alike_alone_and_beside_a_longer_one(name, built):
    processor, model = built(name)
    collator = collator_of(name, processor)
    for samples in (2500, 6400):  # other lengths differ in Gemma 3n's last token, whose convolutions reach beyond it
        row = asked("A tone.", clip(samples / 16000))
        alone, beside = collator([row]), collator([row, asked("Another tone, much longer than the first.", clip(3.0))])
        length = alone["input_ids"].shape[1]
        with torch.no_grad():
            assert torch.allclose(model(**alone).logits[0], model(**beside).logits[0, :length], atol=1e-3), samples


@pytest.mark.parametrize("name", [n for n in MULTIMODAL if "audio" in tiny.MODALITIES[n]])
def test_soft_tokens_equal_what_the_model_makes_of_a_clip(name, built):
    """The model refuses a batch whose counts differ; and the header's count is the batch's."""
    processor, model = built(name)
    collator = collator_of(name, processor)
    for samples in (161, 162, 320, 480, 513, 640, 641, 800, 1600, 15_999, 16_000, 16_001, 63_520, 479_999, 720_000):
        row = asked("x", clip(samples / 16000))
        batch = collator([row])
        with torch.no_grad():
            assert torch.isfinite(model(**batch).loss), samples
        assert collator.lengths([row]) == [int(batch["attention_mask"].sum())], samples


@pytest.mark.parametrize("name", ["gemma4", "gemma4_unified"])
def test_the_length_of_a_clip_at_any_rate_is_known_from_its_header(name, built):
    collator = collator_of(name, built(name)[0])
    for samples, rate in ((8159, 22050), (2206, 44100), (44101, 44100), (1765, 44100), (30721, 48000), (960, 7999),
                          (16000, 16000), (44100, 44100), (24000, 48000)):  # fmt: skip
        value = {"array": np.full(samples, 0.1, np.float32), "sampling_rate": rate}
        row = asked("x", {"type": "audio", "audio": value})
        assert collator.lengths([row]) == [int(collator([row])["attention_mask"].sum())], (samples, rate)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_soft_tokens_equal_what_the_model_makes_of_an_image(name, built):
    processor, model = built(name)
    collator = collator_of(name, processor)
    for size in ((1, 1), (2, 3), (16, 16), (48, 48), (640, 480), (481, 641), (1, 1000), (1000, 1), (16, 16000),
                 (20000, 16), (5000, 1), (4000, 3000)):  # fmt: skip
        row = asked("x", image("green", *size))
        batch = collator([row])
        with torch.no_grad():
            assert torch.isfinite(model(**batch).loss), size
        assert collator.lengths([row]) == [int(batch["attention_mask"].sum())], size


@pytest.mark.parametrize("on", [True, False])
def test_pan_and_scan_is_as_in_a_plain_call_of_the_processor(on):
    """Gemma 3's processor makes no crops unless a caller asks for them, whatever its image processor is set to."""
    processor = tiny.make_processor("gemma3")
    processor.image_processor.do_pan_and_scan = on
    processor.image_processor.pan_and_scan_min_crop_size = 32
    picture = Image.new("RGB", (300, 100), "red")
    collator = collator_of("gemma3", processor)
    batch = collator([asked("x", {"type": "image", "image": picture})])
    shown = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": shown}, {"role": "assistant", "content": "x"}], tokenize=False
    )
    wanted = processor(text=[rendered], images=[[picture]], add_special_tokens=False, return_tensors="pt")
    assert batch["input_ids"].tolist() == wanted["input_ids"].tolist()
    assert torch.equal(batch["pixel_values"], wanted["pixel_values"])


# ---- bad media and cuts


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_bad_image_leaves_the_text_and_its_row_untrained(name, built):
    processor, model = built(name)
    collator = collator_of(name, processor)
    bad = asked("Never.", {"type": "image", "image": {"bytes": b"<html>"}}, image())
    batch = collator([bad, asked("Red.", image()), talk("Hi", "Hello")])
    assert trained_runs(collator.tokenizer, batch, 0) == []
    assert trained_runs(collator.tokenizer, batch, 1) != []
    alone = collator([asked("Red.", image()), talk("Hi", "Hello")])
    with torch.no_grad():
        assert torch.allclose(model(**batch).loss, model(**alone).loss, rtol=1e-5)
    per_image = 16 if name in FIXED else None
    if per_image:
        assert int((batch["input_ids"] == collator.soft_tokens["image"]).sum()) == 2 * per_image


@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_cut_inside_a_medium_takes_the_whole_of_it(name, built):
    processor, model = built(name)
    media = [image(), clip(1.0)] if "audio" in tiny.MODALITIES[name] else [image(), image("blue")]
    row = asked("x", *media)
    whole = collator_of(name, processor)([row])
    length = whole["input_ids"].shape[1]
    soft = set(collator_of(name, processor).soft_tokens.values())
    for limit in range(1, length, max(1, length // 12)):
        batch = MultimodalCollator(processor, limit, modalities=tiny.MODALITIES[name])([row])
        assert batch["input_ids"].shape[1] <= limit
        assert batch["input_ids"][0, -1].item() not in soft
        with torch.no_grad():
            assert torch.isfinite(model(**batch, return_dict=True).logits).all()


# ---- loading


def test_a_processor_of_another_family_is_refused(tmp_path, built):
    from gemma_trainer.models import load_config, load_processor

    processor, _ = built("gemma4")
    _, model = built("gemma4_unified")
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    config, _ = load_config(str(tmp_path))
    with pytest.raises(CannotLoad, match="Gemma4Processor instead of a Gemma4UnifiedProcessor"):
        load_processor(str(tmp_path), config)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_family_loads_from_its_folder_and_takes_lora(name, tmp_path, built):
    """Adapters go where --lora-targets says, and every adapter gets a gradient from a batch that it can see."""
    from gemma_trainer import models

    processor, model = built(name)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    config, family = models.load_config(str(tmp_path))
    loaded = models.load_processor(str(tmp_path), config)
    assert families.family_of_processor(loaded) is family
    assert families.modalities(loaded, config) == tiny.MODALITIES[name]
    wrapped = models.add_lora(models.load_model(str(tmp_path), config, torch.float32), "all", 4, 8, 0.0)
    parts = {"language"} | {{"image": "vision"}.get(kind, kind) for kind in tiny.MODALITIES[name]}
    told = models.describe_trained(wrapped)["trains"]
    assert {part for part in models.PARTS if part in told} == parts, told
    assert ("not on the experts" in told) == (name == "gemma4_moe")
    wrapped.train()(**collator_of(name, loaded)(rows_of(name))).loss.backward()
    lora_b = {n: p.grad for n, p in wrapped.named_parameters() if "lora_B" in n}
    still = [n for n, grad in lora_b.items() if grad is None or not grad.any()]
    # Gemma 3n's layers that share keys and values of an earlier one keep projections that nothing uses.
    shared = [n for n in still if ".k_proj" in n or ".v_proj" in n] if name == "gemma3n" else []
    assert lora_b and still == shared, still


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_trainer_trains_every_family(name, tmp_path, built):
    """Through TRL, in accumulated steps, with its loss at trained positions only: the same as the model's own."""
    from gemma_trainer import arguments, models, precision, trainers

    processor, _ = built(name)
    rows, kinds = rows_of(name), tiny.MODALITIES[name]
    model = tiny.make_model(name, processor)
    collator = collator_of(name, processor)
    with torch.no_grad():
        before = model(**collator([rows[0]])).loss.item()
    args = arguments.sft_arguments(
        tmp_path, precision.choose("fp32", "cpu"), max_length=512, batch_size=1, grad_accum=2, lr=1e-2, epochs=1,
        max_steps=6, steps=6, seed=0, save_steps=1000, eval_steps=1000, evaluate=True, workers=0, report_to=[],
        checkpointing=True,
    )  # fmt: skip
    tuned = models.add_lora(model, "all", 8, 16, 0.0)
    trainer = trainers.GemmaSFTTrainer(tuned, args, rows, collator, processor, rows[:1], collator_of(name, processor))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-3)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6 and np.isfinite(losses).all()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    assert bool(trainer.counts.get("images")) == ("image" in kinds)
    assert bool(trainer.counts.get("clips")) == ("audio" in kinds)


def test_the_script_trains_a_text_only_gemma_and_refuses_pictures(tmp_path, built, script):
    processor, model = built("gemma3_text")
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(talk(f"Say {n}", f"{n} {n}")) for n in range(8)))
    flags = ["--model", folder, "--dataset", rows, "--output", tmp_path / "run", "--max-steps", "3", "--json"]
    done = script("sft_train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "done" and (tmp_path / "run" / "tokenizer.json").is_file()
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    rows.write_text(json.dumps(talk("Say a", "a")) + "\n" + json.dumps(talk("Look", "a", image="a.png")))
    refused = script("sft_train.py", *flags, "--overwrite")
    assert refused.returncode == 3
    assert "rows.jsonl:2: image in the row, but this gemma3 model takes text only" in refused.stderr


def test_an_unknown_model_type_is_named():
    class Config:
        model_type = "gemma2"

    with pytest.raises(CannotLoad, match="gemma2.*gemma3, gemma3_text, gemma3n, gemma4"):
        families.family_of_config(Config())


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_lengths_of_rows_are_worked_out_without_decoding(name, built, monkeypatch):
    processor, _ = built(name)
    collator = collator_of(name, processor)
    rows = [*rows_of(name), {"messages": "broken"}, json.loads('{"prompt": "a", "completion": "b"}')]
    batch = collator(rows)
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("an image was decoded"))
    lengths = collator.lengths(rows)
    assert lengths.pop(-2) == 1
    assert lengths == batch["attention_mask"].sum(1).tolist()
    assert max(MultimodalCollator(processor, 10, modalities=tiny.MODALITIES[name]).lengths(rows)) == 10
