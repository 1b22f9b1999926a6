"""An adapter merged into its base: the same numbers as PEFT's own merge, in the base's own files."""

import ctypes
import gc
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from conftest import ASSETS
from gemma_trainer import artefacts, asking, inference, merge_check, merger, merging, models, tensors
from gemma_trainer.errors import CannotLoad, EnvironmentUnfit, UsageError


def write_base(name, folder, dtype=torch.float32, **options):
    """A tiny model with its processor on the disk."""
    processor = tiny.make_processor(name)
    tiny.make_model(name, processor).to(dtype).save_pretrained(folder, **options)
    processor.save_pretrained(folder)
    return folder


def write_adapter(base, folder, reward=False, zero=False, **lora):
    """A LoRA adapter on all linear layers of a base, the towers' too, whose every update is felt."""
    from peft import LoraConfig, get_peft_model

    config, _ = models.load_config(str(base))
    model = models.load_model(str(base), config, torch.float32, reward=reward)
    options = dict(r=4, lora_alpha=8, target_modules=models.lora_modules(model, "all"), task_type="CAUSAL_LM")
    options |= dict(task_type="SEQ_CLS", modules_to_save=["score"]) if reward else {}
    model = get_peft_model(model, LoraConfig(**(options | lora)))
    torch.manual_seed(1)
    for part, value in model.named_parameters():
        if any(word in part for word in ("lora_B", "lora_embedding", ".score.modules_to_save")):
            torch.nn.init.zeros_(value) if zero else torch.nn.init.normal_(value, std=0.05)
        elif "magnitude" in part or ("bias" in part and value.requires_grad) or "trainable_tokens_delta" in part:
            value.data = value.data * 1.5 + 0.01
    model.save_pretrained(folder)
    models.load_processor(str(base), config).save_pretrained(folder)
    return folder


def merged_by_peft(base, run):
    """The weights of the whole model in memory, merged by PEFT and saved by transformers."""
    from peft import PeftModel

    config, _ = models.load_config(str(base))
    model = models.load_model(str(base), config, torch.float32)
    PeftModel.from_pretrained(model, run).merge_and_unload().save_pretrained(run / "whole")
    return weights_in(run / "whole")


def weights_in(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for path in files for name, value in load_file(path).items()}


def merge_files(run, base, folder, **options):
    folder.mkdir()
    job = merging.Merge(run, base, **options)
    tensors.write_files(folder, job.files)
    return job


def flags(run, output, **more):
    defaults = dict(base=None, dtype="auto", shard_size=None, logits=False, overwrite=False)
    return SimpleNamespace(run=str(run), output=str(output), **(defaults | more))


VARIANTS = {
    "dora": ("gemma4", dict(use_dora=True)),
    "rslora with patterns": (
        "gemma3",
        dict(use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 32, "fc1": 1}),
    ),
    "experts": ("gemma4_moe", dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    "tokens": ("gemma4", dict(target_modules=["q_proj"], exclude_modules=".*tower.*", trainable_token_indices=[5, 9])),
    "per-layer embeddings": ("gemma4", dict(target_modules=["embed_tokens_per_layer"])),
    "whole module and biases": (
        "gemma3",
        dict(target_modules=["fc1"], modules_to_save=["multi_modal_projector"], bias="lora_only"),
    ),
}
CASES = {name: (name, {}) for name in tiny.NAMES} | VARIANTS


@pytest.mark.parametrize("case", CASES)
def test_each_tensor_is_what_peft_makes_of_the_whole_model(case, tmp_path):
    name, lora = CASES[case]
    base = write_base(name, tmp_path / "base")
    run = write_adapter(base, tmp_path / "run", **lora)
    job = merge_files(run, base, tmp_path / "merged")
    wanted, before, found = merged_by_peft(base, run), weights_in(base), weights_in(tmp_path / "merged")
    assert list(found) == list(before) and job.changed > 0
    changed = {key for key in found if not torch.equal(found[key], before[key])}
    assert len(changed) == job.changed
    for key, value in found.items():
        if key in changed:
            torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value, wanted[key])
    kinds = {part for part, words in models.TOWERS.items() if any(word in key for key in changed for word in words)}
    if case in tiny.NAMES:
        towers = {medium: part for part, medium in models.MEDIA.items()}
        assert kinds == {towers[medium] for medium in tiny.MODALITIES[name]}


def test_a_16_bit_base_is_merged_in_float32_and_rounded_once(tmp_path):
    base = write_base("gemma3", tmp_path / "base", torch.bfloat16)
    run = write_adapter(base, tmp_path / "run")
    merge_files(run, base, tmp_path / "merged")
    found, wanted = weights_in(tmp_path / "merged"), merged_by_peft(base, run)
    assert all(
        value.dtype == torch.bfloat16 and torch.equal(value, wanted[key].bfloat16()) for key, value in found.items()
    )
    merge_files(run, base, tmp_path / "wide", dtype="F32")
    torch.testing.assert_close(weights_in(tmp_path / "wide"), wanted)


def test_files_names_and_index_stay_those_of_the_base(tmp_path):
    base = write_base("gemma4", tmp_path / "base", max_shard_size="400KB")
    run = write_adapter(base, tmp_path / "run")
    merge_files(run, base, tmp_path / "merged")
    indices = [json.loads((tmp_path / place / tensors.INDEX).read_text()) for place in ("base", "merged")]
    assert indices[0]["weight_map"] == indices[1]["weight_map"] and len(set(indices[0]["weight_map"].values())) > 3
    assert indices[0]["metadata"]["total_size"] == indices[1]["metadata"]["total_size"]
    for path in base.glob("model-*"):
        assert load_file(path).keys() == load_file(tmp_path / "merged" / path.name).keys()

    merge_files(run, base, tmp_path / "again", limit=700_000)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert all(path.stat().st_size < 700_000 + 50_000 for path in files)  # of which the latter are the header's
    torch.testing.assert_close(weights_in(tmp_path / "again"), weights_in(tmp_path / "merged"), equal_nan=True)


NAMES = (  # of Gemma 3's parts as it was published and as transformers still saves it, and inside transformers 5
    ("language_model.model.", "model.language_model."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def test_a_base_keeps_its_names_be_they_old_or_new(tmp_path):
    base = write_base("gemma3", tmp_path / "base")
    run = write_adapter(base, tmp_path / "run")
    wanted = merged_by_peft(base, run)
    assert all(key.startswith(tuple(old for old, _ in NAMES)) for key in wanted)
    renamed = {next(key.replace(old, new, 1) for old, new in NAMES if key.startswith(old)): key for key in wanted}
    held = load_file(base / "model.safetensors")
    save_file({new: held[old] for new, old in renamed.items()}, base / "model.safetensors", {"format": "pt"})
    assert merge_files(run, base, tmp_path / "merged").changed == 40
    found = weights_in(tmp_path / "merged")
    torch.testing.assert_close(found, {new: wanted[old] for new, old in renamed.items()}, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(base, run) of the tiny Gemma 3 without towers."""
    place = tmp_path_factory.mktemp("pair")
    base = write_base("gemma3_text", place / "base")
    return base, write_adapter(base, place / "run")


def changed_config(run, folder, **facts):
    shutil.copytree(run, folder)
    known = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(known | facts))
    return folder


def test_an_adapter_that_does_not_fit_is_refused_by_name(pair, tmp_path):
    base, run = pair
    held = load_file(run / "adapter_model.safetensors")
    key = next(name for name in held if "layers.1.self_attn.q_proj.lora_A" in name)
    foreign = shutil.copytree(run, tmp_path / "foreign")
    save_file(held | {key.replace("layers.1", "layers.9"): held[key].clone()}, foreign / "adapter_model.safetensors")
    with pytest.raises(CannotLoad, match=r"no place for .*layers.9.*the base has model\.layers\.\d\.self_attn.q_proj"):
        merging.Merge(foreign, base)
    lacking = shutil.copytree(run, tmp_path / "lacking")
    save_file({name: held[name] for name in held if name != key}, lacking / "adapter_model.safetensors")
    with pytest.raises(CannotLoad, match="the adapter lacks, .*layers.1.self_attn.q_proj.lora_A"):
        merging.Merge(lacking, base)
    with pytest.raises(CannotLoad, match="does not fit the base model"):
        merging.Merge(run, write_base("gemma4_unified", tmp_path / "other"))


@pytest.mark.parametrize(
    "facts, told",
    [
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"peft_type": "IA3", "feedforward_modules": []}, "IA3"),
    ],
)
def test_what_no_sum_of_weights_can_hold_is_refused(pair, tmp_path, facts, told):
    base, run = pair
    with pytest.raises(CannotLoad, match=told):
        merging.Merge(changed_config(run, tmp_path / "run", **facts), base)


def test_embeddings_that_would_part_from_the_head_are_refused(pair, tmp_path):
    base, _ = pair
    run = write_adapter(base, tmp_path / "run", target_modules=["embed_tokens"])
    with pytest.raises(CannotLoad, match=r"embed_tokens.weight by itself, .* one tensor with lm_head.weight"):
        merging.Merge(run, base)


def test_embeddings_that_are_tied_are_merged_once(pair, tmp_path):
    """PEFT's own merge adds the update once for the embeddings and once for the head, which are one tensor."""
    base, _ = pair
    lora = dict(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True)
    run = write_adapter(base, tmp_path / "run", **lora)
    result = merger.merge(flags(run, tmp_path / "merged", logits=True))
    assert result["sound"] and result["changed"] == 5, result["summary"]
    assert "lm_head.weight" not in weights_in(tmp_path / "merged")


def test_bases_that_cannot_be_merged_into_are_refused(pair, tmp_path):
    base, run = pair
    quantized = shutil.copytree(base, tmp_path / "gemma-bnb-4bit")
    config = json.loads((base / "config.json").read_text())
    bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": bits}))
    with pytest.raises(CannotLoad, match=r"quantized weights \(bitsandbytes\).*--base .*/gemma$"):
        merging.base_folder(run, str(quantized), {})
    pickled = shutil.copytree(base, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CannotLoad, match=r"\.bin files, which are not read: .*save_pretrained"):
        merging.Merge(run, pickled)
    cut = shutil.copytree(base, tmp_path / "cut")
    content = (base / "model.safetensors").read_bytes()
    for damaged, told in ((content[:-10], "cut off"), (content[:50], "damaged"), (b"", "damaged")):
        (cut / "model.safetensors").write_bytes(damaged)
        with pytest.raises(CannotLoad, match=told):
            merging.Merge(run, cut)
    with pytest.raises(CannotLoad, match="no such folder"):
        merging.base_folder(run, str(tmp_path / "absent"), {})


def test_runs_without_an_adapter_are_told_apart(pair, tmp_path):
    base, _ = pair
    with pytest.raises(CannotLoad, match="whole model .*nothing to merge"):
        merging.Merge(base, base)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(CannotLoad, match="no model has been saved yet"):
        merging.Merge(tmp_path, base)


def test_a_merge_that_changes_nothing_fails_and_leaves_nothing(pair, tmp_path):
    base, _ = pair
    run = write_adapter(base, tmp_path / "run", zero=True)
    result = merger.merge(flags(run, tmp_path / "merged"))
    assert result["exit_code"] == 8 and not result["sound"] and result["merged"] is None
    failed = [check for check in result["checks"] if check["passed"] is False]
    assert [check["check"] for check in failed] == ["change"] and "updates are zero" in failed[0]["told"]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_the_output_is_whole_or_not_there(pair, tmp_path, monkeypatch):
    _, run = pair
    output = tmp_path / "merged"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(EnvironmentUnfit, match="takes .* are free"):
        merger.merge(flags(run, output))
    monkeypatch.undo()
    monkeypatch.setattr(merger, "write_configs", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merger.merge(flags(run, output))
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()

    assert merger.merge(flags(run, output))["merged"] == str(output)
    with pytest.raises(UsageError, match="--overwrite"):
        merger.merge(flags(run, output))
    first = (output / "model.safetensors").stat().st_ino
    assert merger.merge(flags(run, output, overwrite=True))["sound"]
    assert (output / "model.safetensors").stat().st_ino != first and not list(tmp_path.glob(".*"))
    for other in (run, pair[0]):
        with pytest.raises(UsageError, match="not made by this command"):
            merger.merge(flags(run, other, overwrite=True))
    with pytest.raises(UsageError, match="base model's folder"):  # which was merged itself
        merger.merge(flags(run, output, base=str(output), overwrite=True))


def test_the_processor_is_the_runs_and_the_configs_are_the_bases(pair, tmp_path):
    base, run = pair
    run = shutil.copytree(run, tmp_path / "run")
    (run / "chat_template.jinja").write_text("{# its own #}" + (base / "chat_template.jinja").read_text())
    assert merger.merge(flags(run, tmp_path / "merged", dtype="bf16"))["sound"]
    merged = tmp_path / "merged"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (merged / name).read_bytes() == (run / name).read_bytes()
    assert (merged / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    known, found = (json.loads((place / "config.json").read_text()) for place in (base, merged))
    assert found == known | {"dtype": "bfloat16"}
    card = (merged / "README.md").read_text()
    assert "library_name: transformers" in card and "merged into its weights" in card
    made = artefacts.read(merged)
    assert made["made"] == "merge" and made["dtype"] == ["BF16"] and made["license"] == "gemma" and made["run"] == "run"


def test_a_reward_adapter_becomes_a_whole_reward_model(model_folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    import gemma_trainer  # noqa: F401  which knows the class

    run = write_adapter(model_folder, tmp_path / "run", reward=True)
    result = merger.merge(flags(run, tmp_path / "merged", logits=True))
    assert result["sound"] and result["architecture"] == "Gemma4ForSequenceClassification", result["summary"]
    assert {"logits of text", "logits of image", "logits of audio", "answers"} <= {c["check"] for c in result["checks"]}
    added = set(weights_in(tmp_path / "merged")) - set(weights_in(model_folder))
    assert added == {"score.weight"}
    model, told = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    trained = load_file(run / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert model.config.num_labels == 1 and torch.equal(model.score.weight, trained)
    processor = models.load_processor(str(tmp_path / "merged"), model.config)
    collator = inference.prompting_collator(processor, model.config, {}, 512)
    for probe in asking.bundled_rows(collator.modalities):  # compared by what the score is the sum of: it may be near 0
        score = asking.said_by(model.eval(), collator, probe["row"], reward=True)["score"]
        parts = asking.logits_of(model, collator, probe["row"], reward=True)
        assert len(parts) > 1 and float(parts.sum()) == pytest.approx(score, abs=1e-5)


def test_memory_stays_near_one_layer(tmp_path):
    """Peak of the process while it writes, beyond what it had; the model has 16 layers in a dozen files."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    processor = tiny.make_processor("gemma3_text")
    wide = tiny._text_config(processor) | dict(hidden_size=512, intermediate_size=1280, num_hidden_layers=16)
    wide["layer_types"] *= 4
    base = tmp_path / "base"
    Gemma3ForCausalLM(Gemma3TextConfig(**wide)).save_pretrained(base, max_shard_size="10MB")
    processor.save_pretrained(base)
    job = merging.Merge(write_adapter(base, tmp_path / "run"), base)
    (tmp_path / "merged").mkdir()
    allocator = ctypes.CDLL(None)
    allocator.mallopt(M_MMAP_THRESHOLD, 2**20)  # what is larger goes back as it is freed: else the heap keeps it
    try:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, proc(5)
        before = memory("VmRSS")
        tensors.write_files(tmp_path / "merged", job.files)
        grown = memory("VmHWM") - before
    finally:
        allocator.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    assert job.changed == 16 * 7 and job.size > 130e6 and len(job.files) > 10
    assert grown < 0.3 * job.size


def verdicts(result):
    return {check["check"]: check["passed"] for check in result["checks"]}


def left_out(right, module, attribute, base, at):
    return base if at == 5 else right(module, attribute, base)


def scaled(right, module, attribute, base, at):
    return base + 0.7 * (right(module, attribute, base.clone()) - base)


@pytest.mark.parametrize(("name", "lora"), [("gemma3_text", {}), CASES["experts"]])
@pytest.mark.parametrize("fault", [left_out, scaled])
def test_a_layer_merged_wrong_is_noticed_in_16_bits(name, lora, fault, tmp_path, monkeypatch):
    """Logits do not tell: one layer of many is less than what their roundings come to."""
    base = write_base(name, tmp_path / "base", torch.bfloat16)
    run = write_adapter(base, tmp_path / "run", **lora)
    monkeypatch.setattr(asking, "ANSWER_TOKENS", 4)
    right, at = merging._merged, iter(range(1000))
    monkeypatch.setattr(merging, "_merged", lambda *given: fault(right, *given, next(at)))
    result = merger.merge(flags(run, tmp_path / "merged", logits=True))
    assert result["exit_code"] == 8 and verdicts(result)["layers"] is False, result["summary"]
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("name", "lora", "dtype"),
    [
        ("gemma4_moe", {}, "auto"),  # rounding chooses other experts
        ("gemma3", {}, "fp32"),  # the base itself computes in 16 bits
        ("gemma3", dict(target_modules=["fc1"]), "auto"),  # changes no answer to text
        (*CASES["dora"], "auto"),
        (*CASES["tokens"], "auto"),
    ],
)
def test_what_rounding_does_is_no_fault(name, lora, dtype, tmp_path, monkeypatch):
    base = write_base(name, tmp_path / "base", torch.bfloat16)
    run = write_adapter(base, tmp_path / "run", **lora)
    monkeypatch.setattr(asking, "ANSWER_TOKENS", 4)
    result = merger.merge(flags(run, tmp_path / "merged", logits=True, dtype=dtype))
    assert result["sound"] and verdicts(result)["layers"] is True, result["summary"]


def test_a_change_that_rounding_takes_away_is_told(tmp_path):
    base = write_base("gemma3_text", tmp_path / "base", torch.bfloat16)
    run = write_adapter(base, tmp_path / "run")
    held = load_file(run / "adapter_model.safetensors")
    small = {name: value * 1e-3 if "lora_B" in name else value for name, value in held.items()}
    save_file(small, run / "adapter_model.safetensors")
    result = merger.merge(flags(run, tmp_path / "merged"))
    assert result["exit_code"] == 8 and verdicts(result)["change"] is False and "--dtype fp32" in result["summary"]
    assert verdicts(merger.merge(flags(run, tmp_path / "merged", dtype="fp32")))["change"] is True


def test_tensors_that_the_adapter_is_not_for_are_the_bases(pair, tmp_path):
    base, run = pair
    job = merge_files(run, base, tmp_path / "merged")
    assert merge_check.files(tmp_path / "merged", job, base).passed
    held = load_file(tmp_path / "merged" / "model.safetensors")
    held["model.norm.weight"][3] += 0.25
    save_file(held, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    finding = merge_check.files(tmp_path / "merged", job, base)
    assert finding.passed is False and "model.norm.weight is not the base's" in finding.told


M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def memory(name):
    """Bytes of this process, by their name in its status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


KILLED = """
import os, signal, sys
sys.path.insert(0, {assets!r})
from types import SimpleNamespace
from gemma_trainer import merger
merger.write_configs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
merger.merge(SimpleNamespace(**{flags!r}))
"""


def test_a_killed_merge_leaves_nothing_that_lasts(pair, tmp_path):
    run, output = pair[1], tmp_path / "merged"
    code = KILLED.format(assets=str(ASSETS), flags=vars(flags(run, output)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".merged.unfinished-") and not output.exists()
    assert merger.merge(flags(run, output))["sound"]
    assert list(tmp_path.iterdir()) == [output]
