"""What is loaded and what is trained, and the errors that say how to mend a wrong choice."""

import copy
import shutil

import pytest
import torch

from gemma_trainer import demo, models
from gemma_trainer.errors import CannotLoad, EnvironmentUnfit, UsageError


@pytest.fixture
def fresh(model):
    return copy.deepcopy(model)


def adapted(model):
    return {
        name.split(".lora_")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }


@pytest.mark.parametrize(("targets", "count", "inside"), [
    ("language", 24, ["language_model.layers"]), ("vision", 15, ["vision_tower", "embed_vision"]),
    ("audio", 21, ["audio_tower", "embed_audio"]), ("all", 60, [""]), 
    ("language,audio", 45, ["language_model", "audio"]),
    ("q_proj|v_proj", 14, [""]),
    ("language_model.*(q_proj|v_proj)", 6, ["language_model"]), ("q_proj,v_proj", 14, [""]),
    (r"language_model\.layers\.0\.mlp\..*", 3, ["layers.0.mlp"]),
    (r".*vision_tower.*q_proj", 2, ["vision_tower"]), ("lconv1d.linear_start", 2, ["audio_tower"]),
])  # fmt: skip
def test_lora_targets_by_name_and_by_regex(fresh, targets, count, inside):
    names = adapted(models.add_lora(fresh, targets, 4, 8, 0.0))
    assert len(names) == count and all(any(part in name for part in inside) for name in names)
    assert all(isinstance(fresh.get_submodule(name).base_layer, torch.nn.Linear) for name in names)


@pytest.mark.parametrize(("targets", "told"), [
    ("qproj", "near names: .*q_proj"), ("(", "no expression"), ("lm_head", "output head"),
    ("everything", "matches no linear layer"),
])  # fmt: skip
def test_targets_that_match_nothing_stop_with_near_names(model, targets, told):
    with pytest.raises(UsageError, match=told):
        models.lora_modules(model, targets)


def test_a_part_that_the_model_lacks(processor):
    config = demo.make_config(processor.tokenizer)
    config.audio_config = None
    without = type(demo.make_model(processor.tokenizer))(config)
    with pytest.raises(UsageError, match="has no audio layers"):
        models.lora_modules(without, "audio")
    assert "vision" in models.lora_modules(without, "all")


@pytest.mark.parametrize("wanted", ["language", "vision", "audio"])
def test_tower_adapters_load_in_plain_peft_and_change_the_answer(model, fresh, processor, media, tmp_path, wanted):
    from peft import PeftModel

    from conftest import ask
    from gemma_trainer.collator import MultimodalCollator

    tuned = models.add_lora(fresh, wanted, 4, 8, 0.0)
    for name, parameter in tuned.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    batch = MultimodalCollator(processor)([ask(media, "red.png", "one.wav")])
    with torch.no_grad():
        first, second, base = (m(**batch).logits for m in (tuned.eval(), again, model))
    assert torch.allclose(first, second, atol=1e-5) and not torch.allclose(first, base, atol=1e-3)


def test_quantization_is_decided_by_device_and_said(monkeypatch):
    assert models.decide_quantization("auto", "cpu", False)[0] is False
    assert models.decide_quantization("none", "cuda", False)[0] is False
    with pytest.raises(EnvironmentUnfit, match="NVIDIA GPU"):
        models.decide_quantization("4bit", "cpu", False)
    with pytest.raises(UsageError, match="--full"):
        models.decide_quantization("4bit", "cuda", True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert models.decide_quantization("auto", "cuda", False) == (True, "4-bit nf4 weights with double quantization")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert models.decide_quantization("auto", "cuda", False)[0] is False
    with pytest.raises(EnvironmentUnfit, match="bitsandbytes"):
        models.decide_quantization("4bit", "cuda", False)
    config = models.nf4(torch.bfloat16)
    assert (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == ("nf4", True)


def test_the_tiny_model_loads_from_its_folder(model_folder):
    config, family = models.load_config(str(model_folder))
    assert family.name == "gemma4"
    assert type(models.load_processor(str(model_folder), config)).__name__ == "Gemma4Processor"
    assert models.load_model(str(model_folder), config, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", ["google/gemma-4-E2B-it", "./absent"])
def test_a_model_that_cannot_be_reached_says_what_to_do(name):
    with pytest.raises(CannotLoad, match="hf download|no such folder"):
        models.load_config(name)


def test_a_model_of_another_kind(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CannotLoad, match="'bert' is not supported; supported: gemma3, gemma3_text, gemma3n, gemma4"):
        models.load_config(str(tmp_path))


@pytest.mark.parametrize(("file", "content"), [
    ("model.safetensors", b"\x00" * 9), ("model.safetensors", b""), ("config.json", b"[]"), ("config.json", b"null"),
    ("config.json", b'{"model_type": "gemma4", "text_config": 3}'), ("tokenizer.json", b"[]"),
    ("processor_config.json", b"[]"), ("tokenizer_config.json", b"{}"),
])  # fmt: skip
def test_a_folder_with_a_broken_file_cannot_be_loaded(model_folder, tmp_path, file, content):
    """Such as a download that was interrupted: one line, and not a fault of ours."""
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    (folder / file).write_bytes(content)
    with pytest.raises(CannotLoad) as told:
        config, _ = models.load_config(str(folder))
        models.load_processor(str(folder), config)
        models.load_model(str(folder), config, torch.float32)
    assert str(folder) in str(told.value) and len(str(told.value)) < 500


@pytest.mark.parametrize("targets", ["", " ", "all,visoin", "all-linear,foo"])
def test_lora_targets_that_are_misspelt_are_refused(model, targets):
    with pytest.raises(UsageError):
        models.lora_modules(model, targets)


def test_an_adapter_in_the_place_of_a_model_is_told_with_its_base(tmp_path):
    from peft import LoraConfig

    LoraConfig(base_model_name_or_path="org/base").save_pretrained(tmp_path)
    with pytest.raises(CannotLoad, match="is an adapter of org/base, where a whole model is needed"):
        models.load_config(str(tmp_path))
