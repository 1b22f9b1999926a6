"""A reward model scores each row at its last real token, whatever stands beside it, and comes back as it was saved."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig

from conftest import ASSETS, ask, talk
from gemma_trainer import models, reward_model
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import CannotLoad

NAMES = ["gemma3_text", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "gemma4_moe"]
PAIR = [talk("hi", "hello"), talk("What is the capital of Italy, and since when?", "Rome, 1871.", "Sure?", "Yes.")]

# In a process of its own: the scores of what was saved, of the base, the adapter on it, and both merged.
RELOAD = """
import sys; sys.path.insert(0, sys.argv[1])
import json, pathlib, torch
from transformers import AutoModelForSequenceClassification
import gemma_trainer.reward_model
from peft import PeftModel

found = {}
for folder in map(pathlib.Path, sys.argv[2:]):
    batch = torch.load(folder / "batch.pt")
    load = lambda kind: AutoModelForSequenceClassification.from_pretrained(folder / kind).eval()
    fresh = AutoModelForSequenceClassification.from_pretrained(folder / "causal", num_labels=1)
    models = {"base": load("base"), "merged": load("merged")}
    models["adapter"] = PeftModel.from_pretrained(load("base"), folder / "adapter").eval()
    models["adapter on the causal model"] = PeftModel.from_pretrained(fresh, folder / "adapter").eval()
    with torch.no_grad():
        found[folder.name] = {kind: model(**batch).logits.tolist() for kind, model in models.items()}
    found[folder.name]["class"] = type(models["base"]).__module__
print(json.dumps(found))
"""
# The same without our module: transformers' own class.
STOCK = """
import sys, json, pathlib, torch
from transformers import AutoModelForSequenceClassification

found = {}
for folder in map(pathlib.Path, sys.argv[2:]):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base").eval()
    with torch.no_grad():
        found[folder.name] = {"base": model(**torch.load(folder / "batch.pt")).logits.tolist()}
    found[folder.name]["class"] = type(model).__module__
print(json.dumps(found))
"""


def load(folder, **options):
    return AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()


def score(model, batch):
    with torch.no_grad():
        return model(**batch).logits[:, 0]


def collate(kit, rows, placeholders="needed"):
    """A batch without labels, which in a reward model mean something else."""
    collator = MultimodalCollator(kit.processor, placeholders=placeholders, modalities=tiny.MODALITIES[kit.name])
    return {key: value for key, value in collator(rows).items() if key != "labels"}


def media_rows(kit, media, *, images=True):
    """Rows of text and of each kind of medium that the model takes."""
    rows = list(PAIR)
    if "image" in tiny.MODALITIES[kit.name] and images:
        rows += [ask(media, "red.png"), ask(media, "blue.jpg", "red.png", answer="Two pictures.")]
    if "audio" in tiny.MODALITIES[kit.name]:
        rows += [ask(media, "one.wav"), ask(media, "short.flac", answer="A short tone, no more than that.")]
    return rows


def to_the_right(batch):
    """The batch with each row's padding moved from its right to its left."""
    padding = (batch["attention_mask"] == 0).sum(1).tolist()
    moved = {key: value for key, value in batch.items() if value.shape == batch["input_ids"].shape}
    for key, value in moved.items():
        moved[key] = torch.stack([row.roll(count) for row, count in zip(value, padding, strict=True)])
    return batch | moved


def lora(model):
    """The model with LoRA on all its parts, whose weights are no longer the zeros that they start as."""
    targets = models.lora_modules(model, "all")
    config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=targets, modules_to_save=["score"])
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(std=0.05)
    return adapted


@pytest.fixture(scope="module", params=NAMES)
def kit(request, tmp_path_factory):
    """One family: its processor, the folder of its causal model, and the reward model loaded from there."""
    processor = tiny.make_processor(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    causal = tiny.make_model(request.param, processor)
    causal.save_pretrained(folder)
    torch.manual_seed(1)
    return SimpleNamespace(
        name=request.param, processor=processor, folder=folder, causal=causal, model=load(folder, num_labels=1)
    )


def test_a_causal_checkpoint_loads_whole_and_only_the_head_is_new(kit):
    model, told = AutoModelForSequenceClassification.from_pretrained(kit.folder, num_labels=1, output_loading_info=True)
    assert told["missing_keys"] == {"score.weight"} and not told["unexpected_keys"] and not told["mismatched_keys"]
    saved, loaded = kit.causal.state_dict(), model.state_dict()
    assert saved.keys() - loaded.keys() == {"lm_head.weight"} and loaded.keys() - saved.keys() == {"score.weight"}
    assert all(torch.equal(loaded[name], saved[name]) for name in saved.keys() & loaded.keys())
    assert type(model) is reward_model.reward_class(AutoConfig.from_pretrained(kit.folder))
    assert model.score.weight.shape == (1, 64) and model.score.bias is None


@pytest.mark.parametrize("placeholders", ["rows", "always"])
def test_a_row_scores_the_same_alone_and_padded_on_either_side(kit, media, placeholders):
    rows = media_rows(kit, media, images=placeholders == "rows")  # without images, "always" puts one into the padding
    alone = torch.cat([score(kit.model, collate(kit, [row])) for row in rows])
    batch = collate(kit, rows, placeholders)
    if placeholders == "always" and "image" in tiny.MODALITIES[kit.name]:
        soft = batch["input_ids"] == kit.processor.tokenizer.image_token_id
        assert soft.any() and not (soft & (batch["attention_mask"] == 1)).any()
    assert len({round(value, 4) for value in alone.tolist()}) == len(rows)
    assert torch.allclose(score(kit.model, batch), alone, rtol=0, atol=1e-5)
    assert torch.allclose(score(kit.model, to_the_right(batch)), alone, rtol=0, atol=1e-5)


def test_in_bfloat16_a_row_scores_the_same_within_its_rounding(kit, media):
    model = load(kit.folder, num_labels=1, dtype=torch.bfloat16)
    model.score.weight.data.copy_(kit.model.score.weight)
    rows = media_rows(kit, media)
    alone = torch.cat([score(model, collate(kit, [row])) for row in rows])
    batch = collate(kit, rows)
    # Some forty roundings, each by up to 2^-9 of a hidden state's length, which the last norm makes 8: sqrt(40) 2^-9 is
    # 3 x 2^-8. Another position's score is off by ten times as much.
    tolerance = 4 * 2**-8 * 8 * model.score.weight.float().norm().item()
    assert torch.allclose(score(model, batch), alone, rtol=0, atol=tolerance)
    assert torch.allclose(score(model, to_the_right(batch)), alone, rtol=0, atol=tolerance)


def test_what_stands_in_the_padding_does_not_matter(kit):
    batch = collate(kit, PAIR)
    changed = batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 20)}
    assert not torch.equal(changed["input_ids"], batch["input_ids"])
    assert torch.allclose(score(kit.model, changed), score(kit.model, batch), rtol=0, atol=1e-6)


def test_a_padding_token_that_is_attended_is_the_last_one(kit):
    batch = collate(kit, PAIR[:1])
    pad = batch["input_ids"].new_full((1, 1), kit.model.config.get_text_config().pad_token_id)
    longer = {
        key: torch.cat([value, {"input_ids": pad, "attention_mask": torch.ones_like(pad)}.get(key, 0 * pad)], 1)
        for key, value in batch.items()
    }
    del batch["attention_mask"]
    assert abs(score(kit.model, longer) - score(kit.model, batch)) > 1e-4


@pytest.mark.parametrize("kit", ["gemma3_text"], indirect=True)
def test_a_config_without_a_padding_token_scores_the_same(kit, monkeypatch):
    batch = collate(kit, PAIR)
    expected = score(kit.model, batch)
    monkeypatch.setattr(kit.model.config.get_text_config(), "pad_token_id", None)
    assert torch.equal(score(kit.model, batch), expected)


def test_what_a_medium_shows_changes_the_score(kit, media):
    kinds = tiny.MODALITIES[kit.name]
    files = {"image": ("red.png", "pixel_values"), "audio": ("one.wav", "input_features")}
    for kind in kinds:
        file, tensor = files[kind]
        batch = collate(kit, [ask(media, file)])
        other = batch | {tensor: batch[tensor].flip(1)}
        assert abs(score(kit.model, batch) - score(kit.model, other)) > 1e-4, kind


@pytest.mark.parametrize("kit", ["gemma3", "gemma4_unified", "gemma4_moe"], indirect=True)
def test_an_image_is_attended_both_ways(kit, media):
    batch = collate(kit, [ask(media, "red.png")])
    key = "token_type_ids" if kit.name == "gemma3" else "mm_token_type_ids"
    causal = batch | {key: torch.zeros_like(batch[key])}
    assert abs(score(kit.model, batch) - score(kit.model, causal)) > 1e-4


def test_head_and_lora_get_gradients_which_checkpointing_leaves_as_they_are(kit, media):
    torch.manual_seed(2)
    model = lora(load(kit.folder, num_labels=1))
    model.train()
    batch = collate(kit, media_rows(kit, media), "rows")

    def gradients():
        model.zero_grad()
        rewards = model(**batch, margin=torch.ones(1), use_cache=False).logits[:, 0]
        chosen, rejected = rewards.chunk(2)
        (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert all(value.isfinite().all() for value in plain.values())
    assert [value.any() for name, value in plain.items() if "score" in name] == [True]
    parts = {"language": "layers.", "image": "vision", "audio": "audio"}
    for part in {"language", *tiny.MODALITIES[kit.name]}:
        named = [value for name, value in plain.items() if parts[part] in name and "lora_" in name]
        assert named and any(value.any() for value in named), part
    assert {p.requires_grad for name, p in model.named_parameters() if "modules_to_save" in name} == {True}
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients()
    assert plain.keys() == again.keys()
    assert all(torch.allclose(again[name], plain[name], rtol=1e-4, atol=1e-6) for name in plain)


def test_the_head_sees_one_position_a_row_and_answers_in_float32(kit):
    model = load(kit.folder, num_labels=1, dtype=torch.bfloat16)
    seen = []
    model.score.register_forward_hook(lambda module, given, answer: seen.append((given[0].shape, answer.dtype)))
    batch = collate(kit, PAIR)
    plain = model(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)
    assert seen == [((2, 64), torch.float32)] * 2
    assert model.score.weight.dtype == torch.bfloat16 and not torch.equal(plain, plain.bfloat16().float())


def test_labels_make_a_squared_error_and_what_trainers_add_is_ignored(kit):
    batch = collate(kit, PAIR)
    extra = {"margin": torch.ones(1), "completion_mask": batch["attention_mask"], "use_cache": False}
    reached = set()
    watch = kit.model.model.register_forward_pre_hook(lambda _, __, given: reached.update(given), with_kwargs=True)
    plain, found = kit.model(**batch), kit.model(**batch, **extra, labels=torch.tensor([1.0, -1.0]))
    watch.remove()
    assert set(batch) <= reached and not reached & {"margin", "completion_mask", "labels"}
    assert torch.equal(plain.logits, found.logits) and plain.loss is None
    assert found.loss.item() == pytest.approx(((plain.logits[:, 0] - torch.tensor([1.0, -1.0])) ** 2).mean().item())
    assert torch.equal(kit.model(**batch, return_dict=False)[0], plain.logits)


def test_without_a_mask_the_last_position_is_scored(kit):
    batch = collate(kit, PAIR[:1])
    del batch["attention_mask"]
    assert torch.allclose(score(kit.model, batch), score(kit.model, collate(kit, PAIR[:1])), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "mask, last",
    [([1, 1, 1], 2), ([1, 1, 0], 1), ([0, 1, 1], 2), ([0, 1, 0], 1), ([1, 0, 0], 0), ([1, 0, 1], 2), ([2, 3, 0], 1)],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_the_last_real_token(mask, last, dtype):
    masks = torch.tensor([mask, [1, 1, 1]]).to(dtype)
    assert reward_model.last_real_token(masks).tolist() == [last, 2]


def test_a_text_model_of_a_family_loads_and_scores(kit, tmp_path):
    config = kit.causal.config.get_text_config()
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(config).eval()
    causal.save_pretrained(tmp_path)
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, output_loading_info=True)
    assert type(model).__name__.endswith("TextForSequenceClassification")
    assert told["missing_keys"] == {"score.weight"} and not told["unexpected_keys"]
    saved, loaded = causal.state_dict(), model.state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved.keys() & loaded.keys())
    batch = {key: value for key, value in collate(kit, PAIR).items() if key in ("input_ids", "attention_mask")}
    alone = {key: value[:1, : batch["attention_mask"][0].sum()] for key, value in batch.items()}
    assert torch.allclose(score(model.eval(), batch)[:1], score(model, alone), rtol=0, atol=1e-5)


def test_a_config_of_another_model_is_refused():
    with pytest.raises(CannotLoad, match="'bert'.*gemma3, gemma3_text, .*gemma4_unified_text"):
        reward_model.reward_class(BertConfig())


# ---- saved, and loaded in another process


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory, media):
    """For each family, what was scored before saving and in a new process, and by transformers' own Gemma 3 classes."""
    root, expected = tmp_path_factory.mktemp("saved"), {}
    for name in NAMES:
        kit = SimpleNamespace(name=name, processor=tiny.make_processor(name))
        folder = root / name
        torch.manual_seed(3)
        tiny.make_model(name, kit.processor).save_pretrained(folder / "causal")
        model = load(folder / "causal", num_labels=1)
        model.save_pretrained(folder / "base")
        batch = collate(kit, media_rows(kit, media), "rows")
        torch.save(batch, folder / "batch.pt")
        base = score(model, batch)
        adapted = lora(model).eval()
        adapted.save_pretrained(folder / "adapter")
        expected[name] = {"base": base, "adapter": score(adapted, batch)}
        adapted.merge_and_unload().save_pretrained(folder / "merged")

    def run(code, names):
        command = [sys.executable, "-c", code, str(ASSETS), *(str(root / name) for name in names)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    ours, stock = run(RELOAD, NAMES), run(STOCK, ["gemma3_text", "gemma3"])
    return SimpleNamespace(root=root, expected=expected, ours=ours, stock=stock)


@pytest.mark.parametrize("kind", ["base", "adapter", "adapter on the causal model", "merged"])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_saved_scores_the_same_in_a_new_process(reloaded, name, kind):
    expected = reloaded.expected[name]["base" if kind == "base" else "adapter"]
    assert reloaded.ours[name]["class"] == "gemma_trainer.reward_model"
    assert torch.allclose(torch.tensor(reloaded.ours[name][kind])[:, 0], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(reloaded.expected[name]["base"], reloaded.expected[name]["adapter"], atol=1e-2)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3"])
def test_the_stock_gemma3_class_reads_what_ours_saved_and_scores_the_same(reloaded, name):
    assert reloaded.stock[name]["class"].startswith("transformers.")
    found = torch.tensor(reloaded.stock[name]["base"])[:, 0]
    assert torch.allclose(found, reloaded.expected[name]["base"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_labels_is_saved(reloaded, name):
    for kind in ("base", "merged"):
        config = AutoConfig.from_pretrained(reloaded.root / name / kind)
        assert config.num_labels == 1
        assert config.architectures == [reward_model.reward_class(config).__name__]
