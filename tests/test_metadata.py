"""What a saved model carries for the next person, and that every loader takes it."""

import json
import shutil
import subprocess
import sys
import warnings

import pytest
import tiny
import torch

from conftest import ASSETS, SAMPLES
from gemma_trainer import demo, metadata, model_card, run_check, runs
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.data import Data
from gemma_trainer.errors import UsageError
from gemma_trainer.families import GEMMA3, GEMMA4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short supervised run with metadata, prompts and a checkpoint."""
    folder = tmp_path_factory.mktemp("metadata")
    (folder / "more.json").write_text('{"ticket": {"id": 5}, "who": "file"}')
    command = [sys.executable, str(ASSETS / "sft_train.py"), "--output", str(folder / "run"), "--max-steps", "4"]
    command += ["--metadata", "data_version=v3", "who=me: <b>you</b>", "--metadata-file", str(folder / "more.json")]
    command += ["--save-steps", "2", "--eval-steps", "2", "--best-by", "eval_loss", "--loss-on", "last-turn"]
    command += ["--eval-prompts", str(SAMPLES / "heldout.jsonl"), "--eval-prompts-max-tokens", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def read(path):
    return json.loads(path.read_text())


def test_every_saved_adapter_carries_the_same_facts(run):
    folders = [run, *run.glob("checkpoint-*")]
    assert len(folders) >= 3
    for name in ("training_metadata.json", "README.md", "adapter_config.json"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1, name
    facts = read(run / "training_metadata.json")
    assert read(run / "adapter_config.json")["custom_metadata"] == facts
    assert facts["task"] == "sft" and facts["max_len"] == 2048 and facts["labels"]["loss_on"] == "last-turn"
    assert "all answers but the last" in facts["labels"]["ignored"]
    assert facts["data"]["names"] == ["train.jsonl"] and facts["data"]["rows"] == 72
    assert facts["data"]["version"] == "v3" and len(facts["data"]["fingerprint"]) == 16
    assert facts["metadata"] == {"ticket": {"id": 5}, "who": "me: <b>you</b>", "data_version": "v3"}
    template = (run / "chat_template.jinja").read_text()
    assert facts["chat_template"] == {"version": "gemma4", "sha256": metadata.template_hash(template)}
    assert facts["tokens"]["stop_token_ids"] == demo.make_model(demo.make_tokenizer()).generation_config.eos_token_id
    assert facts["tokens"]["turn_end"] == "<turn|>" and facts["tokens"]["audio"] == "<|audio|>"
    assert facts["base_model"]["family"] == "gemma4" and facts["base_model"]["license"] == "apache-2.0"
    assert facts["versions"]["transformers"] and facts["training"]["lora_r"] == 16
    told = json.dumps(facts)
    assert (
        str(SAMPLES) not in told and '"step' not in told and '"loss"' not in told
    )  # nothing private, nothing that moves


def test_the_best_step_is_what_is_saved(run):
    record = read(run / "run.json")
    losses = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        losses |= {entry["step"]: entry["eval_loss"]} if "eval_loss" in entry else {}
    best = min(losses, key=losses.get)
    assert record["best"] == {"metric": "eval_loss", "value": losses[best], "step": best}
    kept = run / f"checkpoint-{best}" / "adapter_model.safetensors"
    assert kept.read_bytes() == (run / "adapter_model.safetensors").read_bytes()
    assert (
        record["why"] == "all steps were trained" and record["eta_s"] == 0 and record["command"].startswith("python ")
    )
    assert not list(run.rglob("training_args.bin"))


def test_plain_loaders_take_the_adapter_and_peft_warns_once_and_drops_the_key(run, tmp_path):
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForImageTextToText

    base = read(run / "adapter_config.json")["base_model_name_or_path"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), run)
    assert [str(one.message).count("custom_metadata") for one in caught if "custom_metadata" in str(one.message)] == [1]
    ids = torch.tensor([[2, 300, 301, 302]])
    kinds = torch.zeros_like(ids)
    with torch.no_grad():
        expected = adapted(ids, mm_token_type_ids=kinds).logits
        plain = AutoModelForImageTextToText.from_pretrained(base)
        assert not torch.allclose(plain(ids, mm_token_type_ids=kinds).logits, expected)
        plain.load_adapter(str(run))  # transformers' own
        assert torch.allclose(plain(ids, mm_token_type_ids=kinds).logits, expected, atol=1e-5)
    assert AutoPeftModelForCausalLM is not None
    adapted.save_pretrained(tmp_path / "again")
    assert "custom_metadata" not in read(tmp_path / "again" / "adapter_config.json")
    assert run_check.inspect(str(tmp_path / "again"))["facts"] is None
    shutil.copy(run / "training_metadata.json", tmp_path / "again")  # what lasts
    assert run_check.inspect(str(tmp_path / "again"))["facts"]["metadata"]["data_version"] == "v3"


def front_matter(folder):
    from huggingface_hub import ModelCard

    return ModelCard.load(folder / "README.md").data.to_dict()


def test_the_card_is_one_that_the_hub_reads(run, preference_runs):
    found = front_matter(run)
    assert found["library_name"] == "peft" and found["base_model_relation"] == "adapter"
    assert found["license"] == "apache-2.0" and {"gemma", "lora", "sft", "trl"} <= set(found["tags"])
    assert found["pipeline_tag"] == "any-to-any" and "base_model" not in found  # the demo is on no hub
    facts = read(run / "training_metadata.json")
    facts["base_model"]["name"], facts["data"]["names"] = "google/gemma-4-E2B-it", ["org/rows:train", "own.jsonl"]
    facts["metadata"]["license"] = "cc-by-4.0"
    text = model_card.card(facts, adapter=False)
    (run.parent / "card").mkdir()
    (run.parent / "card" / "README.md").write_text(text)
    found = front_matter(run.parent / "card")
    assert found["base_model"] == "google/gemma-4-E2B-it" and found["datasets"] == ["org/rows"]
    assert found["license"] == "cc-by-4.0" and found["base_model_relation"] == "finetune"
    assert "who: me: <b>you</b>" in text
    reward = front_matter(preference_runs["reward"][2])
    assert reward["pipeline_tag"] == "text-classification" and "reward-model" in reward["tags"]


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "full"])
def test_the_cards_snippet_runs_in_the_folder(run, preference_runs, tmp_path, monkeypatch, capsys, kind):
    folder = run if kind in ("sft", "full") else preference_runs[kind][2]
    if kind == "full":
        folder = demo.write_model(tmp_path / "full")
        (folder / "README.md").write_text(model_card.card(read(run / "training_metadata.json"), adapter=False))
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder)
    exec(code.replace("max_new_tokens=256", "max_new_tokens=3"), {})
    said = capsys.readouterr().out.strip()
    assert said and (kind != "reward" or isinstance(float(said), float))


def test_a_text_only_model_has_a_card_of_its_own_though_its_tokenizer_names_an_image_token(
    run, tmp_path, monkeypatch, capsys
):
    import types

    tokenizer = tiny.make_processor("gemma3_text")
    tokenizer.image_token = "<image_soft_token>"  # as Gemma 3's own
    model = tiny.make_model("gemma3_text", tokenizer)
    collator = MultimodalCollator(tokenizer)
    config = types.SimpleNamespace(task="sft", model="google/gemma-3-270m-it", max_len=64, loss_on="all-turns",
                                   train_reasoning=True, thinking="auto", paired=False)  # fmt: skip
    rows = Data([{}], None, [str(SAMPLES / "train.jsonl")])
    facts = metadata.facts_of(config, {}, rows, model, collator, {})
    assert facts["takes"] == ["text"] and not {"image", "audio"} & facts["tokens"].keys()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    metadata.write(tmp_path, facts)
    assert front_matter(tmp_path)["pipeline_tag"] == "text-generation" and front_matter(tmp_path)["license"] == "gemma"
    monkeypatch.chdir(tmp_path)
    exec((tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("256", "3"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(("pairs", "content", "told"), [
    (("novalue",), None, "key=value"), (("=x",), None, "key=value"), ((), "[1]", "a JSON object"),
    ((), "{", "is not JSON"), ((), None, "No such file"),
])  # fmt: skip
def test_metadata_that_cannot_be_read_is_refused(tmp_path, pairs, content, told):
    if content:
        (tmp_path / "m.json").write_text(content)
    with pytest.raises(UsageError, match=told):
        metadata.read_own(pairs, None if pairs else str(tmp_path / "m.json"))


def test_names_and_licences_as_others_may_know_them(tmp_path):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "README.md").write_text("---\nlicense: mit\n---\n")
    assert metadata.shown_name("google/gemma-4-E2B-it") == "google/gemma-4-E2B-it"
    assert metadata.shown_name("org/rows:train") == "org/rows:train"
    assert metadata.shown_name(str(tmp_path / "org")) == "org" and metadata.shown_name("/home/me/x.jsonl") == "x.jsonl"
    assert metadata.shown_name("data/x.jsonl") == "x.jsonl" and metadata.shown_name("./data/") == "data"
    assert metadata.license_of(str(tmp_path / "org"), GEMMA4) == "mit"
    assert metadata.license_of("google/gemma-3-4b-it", GEMMA3) == "gemma"
    (tmp_path / "org" / "README.md").write_text("---\n: [\n---\n")
    assert metadata.license_of(str(tmp_path / "org"), GEMMA4) == "apache-2.0"


# ---- inspect_run.py


def findings(folder):
    return {one["check"]: (one["passed"], one["told"]) for one in run_check.inspect(str(folder))["checks"]}


def test_a_sound_run_passes_as_text_and_as_json(run, script):
    done = script("inspect_run.py", run, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["sound"] and result["run"]["status"] == "done"
    assert {one["check"]: one["passed"] for one in result["checks"]} == {
        "run": True, "metadata": True, "base model": True, "base's name": None, "chat template": True, "keys": True,
        "numbers": True, "change": True,
    }  # fmt: skip
    told = script("inspect_run.py", max(run.glob("checkpoint-*"))).stdout
    assert "data_version: v3" in told and "ok       keys: all 48 keys" in told


@pytest.fixture
def copied(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint-*"))
    return folder


def spoil_weights(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


@pytest.mark.parametrize(("change", "check", "told"), [
    (lambda w: {name.replace("model.language_model", "language_model.model"): v for name, v in w.items()}, "keys",
     "48 of 48 keys have no place in the base model"),
    (lambda w: {name: v[:, :-1].clone() if "lora_A" in name else v for name, v in w.items()}, "keys", "another shape"),
    (lambda w: w | {next(iter(w)): next(iter(w.values())) * torch.nan}, "numbers", "1 tensors are not numbers"),
    (lambda w: {name: v * 0 if "lora_B" in name else v for name, v in w.items()}, "change", "as the base model does"),
])  # fmt: skip
def test_weights_that_would_silently_do_nothing_or_harm(copied, script, change, check, told):
    spoil_weights(copied, change)
    passed, said = findings(copied)[check]
    assert passed is False and told in said
    if check == "keys" and "no place" in told:
        assert "(the base has model.language_model.layers." in said
        done = script("inspect_run.py", copied)
        assert done.returncode == 8 and "FAILED   keys" in done.stdout


@pytest.mark.parametrize("change", [lambda w: {}, lambda w: {k: v for k, v in w.items() if "lora_A" in k}])
def test_an_adapter_that_does_nothing_is_told(copied, change):
    spoil_weights(copied, change)
    assert any(passed is False for passed, _ in findings(copied).values())


@pytest.mark.parametrize("options", [
    {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]},
    {"trainable_token_indices": [3, 4]}, {"kind": "IA3Config", "feedforward_modules": []},
])  # fmt: skip
def test_adapters_of_other_kinds_made_by_plain_peft_are_sound(run, tmp_path, options):
    import peft
    from transformers import AutoModelForImageTextToText

    config = getattr(peft, options.pop("kind", "LoraConfig"))
    base = read(run / "adapter_config.json")["base_model_name_or_path"]
    layers = {"target_modules": r".*language_model.*\.q_proj"} | options
    if "embed_tokens" in layers["target_modules"]:
        layers["target_modules"] = r".*language_model.*\.(q_proj|embed_tokens)"
    model = peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(base), config(**layers))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "other")
    found = findings(tmp_path / "other")
    assert found["keys"][0] is True, found["keys"]
    assert not [check for check, (passed, _) in found.items() if passed is False]
    special = ("modules_to_save", "trainable_token_indices")
    if options.keys() & set(special):  # what it trained beside its layers is lost
        spoil_weights(tmp_path / "other", lambda w: {k: v for k, v in w.items() if "lora_" in k})
        assert findings(tmp_path / "other")["keys"][0] is False


def test_a_checkpoint_that_rots_is_told(run, tmp_path):
    shutil.copytree(max(run.glob("checkpoint-*")), tmp_path / "checkpoint-4")
    assert findings(tmp_path / "checkpoint-4")["files"][0] is True
    path = tmp_path / "checkpoint-4" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert findings(tmp_path / "checkpoint-4")["files"] == (False, "adapter_model.safetensors is damaged")


@pytest.mark.parametrize(("name", "content"), [
    ("adapter_config.json", b"{"), ("adapter_config.json", b"\xff"), ("adapter_config.json", b"[]"),
    ("chat_template.jinja", b"\xff\xfe"), ("training_metadata.json", b'{"chat_template": 3}'),
    ("training_metadata.json", b"null"), ("run.json", b"null"), ("metrics.jsonl", b'5\n{"step": "\xff'),
    ("samples.json", b'{"x": 5}'), ("adapter_model.safetensors", b""), ("training_metadata.json", b'{"a":'),
    ("training_metadata.json", b'{"data": null, "task": 1}'), ("training_metadata.json", b'{"data": {"names": [1]}}'),
    ("run.json", b'{"status": "done", "metrics": null, "total_steps": 5}'), ("run.json", b'{"best": {"step": 1}}'),
    ("run.json", b'{"status": "running", "pid": null, "step": "4"}'), ("run.json", b'{"best": 1, "metrics": []}'),
])  # fmt: skip
def test_broken_files_are_findings_and_no_faults(copied, script, name, content):
    (copied / name).write_bytes(content)
    result = run_check.inspect(str(copied))
    assert run_check.summary(result)
    harmless = name in ("metrics.jsonl", "samples.json") or b"running" in content or b'"status": "done"' in content
    assert harmless or any(check["passed"] is False for check in result["checks"]), result["checks"]
    if (state := run_check.state_of(copied)) is not None:
        runs.report_again(copied, state)


def test_what_else_may_be_wrong_with_a_folder(copied, tmp_path, script):
    (copied / "chat_template.jinja").write_text("{{ other }}")
    found = findings(copied)
    assert found["chat template"][0] is False and "not the one that was trained on" in found["chat template"][1]
    assert found["base's template"][0] is None
    config = read(copied / "adapter_config.json")
    (copied / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "/gone", "custom_metadata": {}})
    )
    shutil.rmtree(copied / "base-model")
    found = findings(copied)
    assert found["base model"][0] is False and "keys" not in found and found["metadata"][0] is None
    with open(copied / "adapter_model.safetensors", "r+b") as file:
        file.truncate(5000)
    assert findings(copied)["weights"] == (False, "the weights cannot be read (SafetensorError: cut off?)")
    (tmp_path / "empty").mkdir()
    done = script("inspect_run.py", tmp_path / "empty")
    assert done.returncode == 5 and "no run, checkpoint, adapter or model is there" in done.stderr


def test_a_run_that_was_moved_tells_where_its_base_is_now(copied):
    """The adapter names the base by the place where it was."""
    config = read(copied / "adapter_config.json")
    (copied / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "/gone/base-model"}))
    passed, told = findings(copied)["base's name"]
    assert passed is False and f"write {copied / 'base-model'} there" in told


def test_a_run_that_was_killed_is_told_and_can_be_reported(copied, script):
    record = read(copied / "run.json")
    (copied / "run.json").write_text(json.dumps(record | {"status": "running", "pid": 2**22 + 1}))
    for name in ("adapter_config.json", "report.html"):
        (copied / name).unlink()
    result = run_check.inspect(str(copied))
    assert result["kind"] == "run" and result["run"]["status"] == "killed" and "--resume" in result["run"]["why"]
    assert findings(copied)["run"][0] is False and "no model has been saved yet" in findings(copied)["run"][1]
    done = script("inspect_run.py", copied, "--report")
    page = (copied / "report.html").read_text()
    assert done.returncode == 0 and "killed" in page and "Answers to the prompts" in page
    assert page.count("data:image/jpeg;base64,") >= 2 and page.count("data:audio/mpeg;base64,") >= 1
    assert "http" not in page.replace("http-equiv", "")
