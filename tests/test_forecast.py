"""The memory forecast: what is counted, what it is held against, and what is changed to fit."""

import dataclasses
import json

import pytest
import tiny
import torch

from conftest import ROOT, talk
from gemma_trainer import demo, forecast, models, rehearsal
from gemma_trainer.arguments import trl_chunks
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.families import modalities
from gemma_trainer.forecast import Memory, Setting, smallest_change
from gemma_trainer.heaviest import Measured
from gemma_trainer.losses import CHUNK

SETTING = Setting(batch_size=8, grad_accum=2, four_bit=False, checkpointing=False, max_len=2048, lora_r=16)


def config_of(model):
    """A config as a folder has it: that of a model in use has its attention and experts chosen."""
    return type(model.config).from_dict(model.config.to_dict())


def played(processor, model, rows, task="sft", lora=True, **options):
    collator = MultimodalCollator(
        processor, 256, task="sft" if task == "sft" else "preference", modalities=modalities(processor, model.config)
    )
    meta = models.skeleton(config_of(model), task == "reward")
    if lora:
        meta = models.add_lora(meta, "language", 4, 8, 0.0)
    return rehearsal.play(meta, dict(collator(rows)), rehearsal.Step(task, full=not lora, **options))


# ---- what is counted


def test_weights_adapters_gradients_and_optimizer_are_those_of_the_model(processor, model):
    rows = [talk("Hello", "there")]
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    adapted = models.add_lora(demo.make_model(processor.tokenizer), "language", 4, 8, 0.0)
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    count = sum(1 for parameter in adapted.parameters() if parameter.requires_grad)
    found = played(processor, model, rows, accumulates=True).moments["optimizer"]
    assert found["weights"] == size + buffers
    assert found["adapters"] == found["gradients"] == 4 * trained
    assert 0 <= found["optimizer"] - (8 * trained + 4 * count) <= 4 * trained  # and its temporaries
    full = played(processor, model, rows, lora=False).moments["optimizer"]
    assert full["weights"] == size + buffers and "adapters" not in full
    # Not all have gradients here: the towers see nothing.
    assert full["optimizer"] >= 2 * size and size / 3 < full["gradients"] <= size


def test_activations_are_what_autograd_keeps(processor, model):
    """Against the storages that a real forward pass saves for the backward pass."""
    rows = [talk("Hello " * 20, "there " * 30)] * 2
    collator = MultimodalCollator(processor, 256)
    tuned = models.add_lora(demo.make_model(processor.tokenizer), "language", 4, 8, 0.0).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*tuned.parameters(), *tuned.buffers())}
    saved = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    batch = dict(collator(rows))
    labels = batch.pop("labels")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = tuned.get_base_model().base_model(**batch, use_cache=False).last_hidden_state
    assert hidden.requires_grad and labels.shape == hidden.shape[:2]
    kept = sum(storage.nbytes() for storage in saved.values())
    found = played(processor, model, rows).moments["forward"]
    activations = found["activations"] + found.get("loss_head", 0)
    assert kept <= activations < 1.3 * kept + 4 * labels.numel() * 1024 * 6  # and the loss head's logits


def test_checkpointing_and_smaller_batches_take_less(processor, model):
    rows = [talk("Hello " * 30, "there " * 40)] * 4
    kept, again = (played(processor, model, rows, checkpointing=on) for on in (False, True))
    half = played(processor, model, rows[:2])
    assert again.peak["activations"] < 0.7 * kept.peak["activations"]
    assert half.peak["activations"] < 0.6 * kept.peak["activations"]


def test_dpo_of_all_weights_keeps_them_twice(processor, model):
    pair = {"prompt": "Hello", "chosen": "there", "rejected": "you"}
    full = played(processor, model, [pair], "dpo", lora=False).peak["weights"]
    assert full == 2 * played(processor, model, [pair], "dpo").peak["weights"]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_family_can_be_played_with_its_media(name, media):
    processor = tiny.make_processor(name)
    model = tiny.make_model(name, processor)
    blocks = [{"type": kind, kind: str(media / file)} for kind, file in (("image", "red.png"), ("audio", "one.wav"))
              if kind in tiny.MODALITIES[name]]  # fmt: skip
    rows = [talk([*blocks, {"type": "text", "text": "What is it?"}], "A picture."), talk("Hello", "there")]
    found = played(processor, model, rows, lora=False, dtype=torch.bfloat16, device="cuda", checkpointing=True)
    assert set(found.moments) == {"forward", "backward", "optimizer"}
    assert all(size >= 0 for parts in found.moments.values() for size in parts.values())
    assert bool(found.moments["forward"].get("media_towers")) == bool(blocks)


def test_a_mixture_is_played_in_4_bits(media):
    processor = tiny.make_processor("gemma4_moe")
    model = tiny.make_model("gemma4_moe", processor)
    options = dict(dtype=torch.bfloat16, held=torch.bfloat16, four_bit=True, device="cuda", checkpointing=True)
    found = played(processor, model, [talk("Hello", "there")], accumulates=True, **options).peak
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    assert found["weights"] > 2 * experts and found["gradients"] == found["adapters"]


def test_a_deep_model_is_worked_out_from_shallow_ones(processor):
    kinds = ["sliding_attention", "full_attention"] * 5
    config = demo.make_config(
        processor.tokenizer,
        num_hidden_layers=10,
        layer_types=kinds,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )
    batch = dict(MultimodalCollator(processor, 256)([talk("Hello " * 20, "there " * 30)]))
    for lora in (True, False):

        def make(config, lora=lora):
            meta = models.skeleton(config)
            return models.add_lora(meta, "language", 4, 8, 0.0) if lora else meta

        step = rehearsal.Step(full=not lora)
        whole = rehearsal.play(make(config_of(models.skeleton(config))), batch, step)
        worked_out = rehearsal.play_deep(config_of(models.skeleton(config)), make, batch, step)
        assert sum(worked_out.peak.values()) == pytest.approx(sum(whole.peak.values()), rel=0.01)


# ---- 4-bit weights


@pytest.mark.parametrize(
    "shape, size",
    # Bytes of the packed weights, the 8-bit scales, the float32 scales of these, the offset, and the table of 16, as
    # bitsandbytes 0.50.2 holds them: QuantState of quantize_4bit(..., quant_type="nf4", compress_statistics=True).
    [((64, 64), 2048 + 64 + 4 + 4 + 64), ((100, 33), 1650 + 52 + 4 + 4 + 64), ((37, 41), 759 + 24 + 4 + 4 + 64),
     ((2048, 1536), 1572864 + 49152 + 768 + 4 + 64)],
)  # fmt: skip
def test_nf4_bytes_are_those_of_bitsandbytes(shape, size):
    assert rehearsal.nf4_bytes(shape[0] * shape[1]) == size


def test_the_layers_that_bitsandbytes_quantizes_are_counted_so_and_no_others(processor, model):
    plain = played(processor, model, [talk("Hello", "there")]).peak["weights"]
    quantized = played(processor, model, [talk("Hello", "there")], four_bit=True).peak["weights"]
    names = models.quantized_linears(models.skeleton(config_of(model)))
    assert any("self_attn.q_proj" in name for name in names)
    assert not [name for name in names if "tower" in name or "lm_head" in name or "embed_vision" in name]
    sizes = [model.get_submodule(name).weight.numel() for name in names]
    assert plain - quantized == sum(4 * size - rehearsal.nf4_bytes(size) for size in sizes)


# ---- against the machine


def test_verdicts():
    assert forecast.verdict(90, 100) == "FITS" and forecast.verdict(91, 100) == "TIGHT"
    assert forecast.verdict(100, 100) == "TIGHT" and forecast.verdict(101, 100) == "DOES NOT FIT"
    assert Memory(weights=5, base=2, activations=3).peak == 10


def peak_of(setting: Setting) -> int:
    """A run whose weights take 100, or 30 in 4 bits, and each of its rows 10 at 1,024 tokens."""
    row = 10 * setting.max_len / 1024 * (0.5 if setting.checkpointing else 1)
    return round((30 if setting.four_bit else 100) + setting.lora_r / 2 + setting.batch_size * row)


@pytest.mark.parametrize(
    "available, flags",
    [
        (290, ["--batch-size", "4", "--grad-accum", "4"]),
        (143, ["--batch-size", "1", "--grad-accum", "16"]),
        (132, ["--batch-size", "1", "--grad-accum", "16", "--gradient-checkpointing", "on"]),
        (128, "--batch-size 1 --grad-accum 16 --gradient-checkpointing on --max-len 1024".split()),
        (115, "--batch-size 1 --grad-accum 16 --gradient-checkpointing on --max-len 128 --lora-r 4".split()),
    ],
)
def test_the_smallest_change_comes_in_order_and_fits(available, flags):
    found = smallest_change(SETTING, peak_of, available, 2048, may_quantize=False, may_shrink_rank=True)
    assert found.flags_from(SETTING) == flags
    assert forecast.verdict(peak_of(found), available) == "FITS"
    assert found.effective == SETTING.effective


def test_quantization_comes_before_shorter_rows_and_nothing_may_fit():
    found = smallest_change(SETTING, peak_of, 70, 2048, may_quantize=True, may_shrink_rank=True)
    assert found.four_bit and not found.checkpointing and found.max_len == 2048
    assert smallest_change(SETTING, peak_of, 50, 2048, may_quantize=False, may_shrink_rank=True) is None


# ---- the rows


def test_lengths_are_measured_and_the_heaviest_rows_found(processor, media):
    collator = MultimodalCollator(processor, 512)
    rows = [talk(f"Hello {'there ' * (at % 50)}", "yes") for at in range(3000)]
    rows[1777] = talk("Hello " * 200, "yes")
    few, many = Measured(rows[:100], collator, 100), Measured(rows, collator, len(rows))
    assert few.exact and few.tokens() == sum(collator.lengths(rows[:100]))
    assert not many.exact and many.tokens() == pytest.approx(sum(collator.lengths(rows)), rel=0.02)
    assert many.longest == collator.lengths([rows[1777]])[0]
    assert many.batches(2)[0][0] == rows[1777] and 0 <= many.padding(4, seed=0) < 0.2
    picture = talk([{"type": "image", "image": str(media / "red.png")}, {"type": "text", "text": "What?"}], "Red.")
    assert Measured([*rows[:20], talk("Hello " * 200, "yes"), picture], collator, 22).batches(1)[1] == [picture]


# ---- the scripts


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """A dry run in this process of rows and a model folder without weights; returns (exit code, the JSON)."""
    import contextlib
    import io
    import sys

    sys.path.insert(0, str(ROOT / "skills" / "gemma-trainer" / "assets"))
    import sft_train

    from gemma_trainer import cli

    folder = tmp_path_factory.mktemp("dry")
    model = demo.write_model(folder / "model")
    (model / "model.safetensors").unlink()
    rows = [json.dumps(talk(f"Hello {'there ' * at}", "you " * at)) for at in range(1, 60)]
    (folder / "rows.jsonl").write_text("\n".join(rows))

    def run(*flags):
        words = ["--model", model, "--dataset", folder / "rows.jsonl", "--output", folder / "run", "--json", *flags]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.run_script(sft_train.main, sft_train.Config, "", "", [str(word) for word in words])
        return code, json.loads(out.getvalue())

    return run


def test_a_dry_run_forecasts_without_weights(dry):
    code, told = dry("--dry-run")
    memory = told["memory"]
    assert code == 0 and memory["verdict"] == "FITS" and memory["change"] == []
    parts = {field.name for field in dataclasses.fields(Memory)}
    assert memory["peak"] == sum(memory[part] for part in parts) < memory["available"]
    assert told["tokens"] > 1000 and told["padding_share"] == 0 and told["longest_row"] > 60


def test_what_does_not_fit_ends_with_8_and_a_change_that_does(dry):
    flags = "--dry-run --batch-size 32 --gradient-checkpointing off --device-memory 0.8".split()
    code, told = dry(*flags)
    change = told["memory"]["change"]
    assert code == told["exit_code"] == 8 and told["memory"]["verdict"] == "DOES NOT FIT"
    assert change[0] == "--batch-size" and int(change[1]) * int(change[3]) == 32 * 8 and len(change) == 4
    code, told = dry(*flags, "--auto-fit")
    assert code == 0 and told["auto_fit"] == change and told["memory"]["verdict"] == "FITS"


def test_auto_fit_trains_with_the_smaller_batch(tmp_path, monkeypatch, capsys):
    import sft_train

    from gemma_trainer import cli, planning

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(talk("Hello " * 100, "you " * 60)) for _ in range(16)))
    real = planning.this_machine

    def small(config):
        machine = real(config)
        return dataclasses.replace(machine, available=round((machine.base + 25e6) / forecast.ROOM))

    monkeypatch.setattr(planning, "this_machine", small)
    flags = ["--model", "demo", "--dataset", rows, "--output", tmp_path / "run", "--json", "--max-steps", "1"]
    flags += ["--batch-size", "8", "--grad-accum", "1", "--auto-fit"]
    assert cli.run_script(sft_train.main, sft_train.Config, "", "", [str(word) for word in flags]) == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    changed = record["auto_fit"]["changed"]
    assert changed["batch_size"] < 8 and changed["batch_size"] * changed["grad_accum"] == 8
    assert record["arguments"]["batch_size"] == changed["batch_size"] and record["counters"]["rows"] == 8
    monkeypatch.setattr(planning, "this_machine", lambda config: dataclasses.replace(real(config), available=2**20))
    assert (
        cli.run_script(sft_train.main, sft_train.Config, "", "", [str(word) for word in flags] + ["--overwrite"]) == 6
    )


def test_a_run_takes_what_was_forecast(script, tmp_path, model_folder):
    """The peak of a process that trains, against its dry run, with activations that are worth measuring."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(talk("Hello " * 20, "there you " * 400)) for _ in range(16)))
    flags = ["--model", model_folder, "--dataset", rows, "--batch-size", 16, "--grad-accum", 1, "--max-len", 512]
    flags += ["--max-steps", 2, "--output", tmp_path / "run", "--json"]
    ahead = json.loads(script("sft_train.py", *flags, "--dry-run").stdout)["memory"]
    measured = json.loads(script("sft_train.py", *flags).stdout)["peak_memory_mb"] * 2**20
    assert ahead["activations"] > 0.15 * ahead["peak"]
    assert ahead["peak"] == pytest.approx(measured, rel=0.15)


# ---- the table


def test_the_table_is_in_step_and_sizes_are_those_published():
    import sys

    sys.path.insert(0, str(ROOT / "scripts"))
    import memory_table

    page = memory_table.PAGE.read_text()
    figures = json.loads(memory_table.FIGURES.read_text())
    assert memory_table.written(page, memory_table.table(figures)) == page
    for name, size in memory_table.sizes().items():
        parameters = sum(one.numel() for one in models.skeleton(memory_table.make_config(size)).parameters())
        assert parameters == pytest.approx(1e9 * size["published"], rel=0.01), name
    again = memory_table.play(memory_table.sizes()["gemma-3-270m"], "4-bit LoRA", 1024)
    # The table is that of TRL 1.14, whose own loss head makes the float32 logits of a chunk once more than ours does.
    once_more = 0 if trl_chunks() else CHUNK * 262_144 * 4
    assert sum(again.values()) + once_more == pytest.approx(figures["gemma-3-270m"]["4-bit LoRA"][0], rel=0.01)
