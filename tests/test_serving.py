"""What vLLM would do with each update of an adapter is told; the commands that are printed have flags that exist."""

import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import export
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from gemma_trainer import families, models, ollama, serving
from gemma_trainer.errors import CannotLoad

# From the tools' own sources: vllm/engine/arg_utils.py and entrypoints/*/cli_args.py (0.33.0), mlx_vlm/convert.py and
# generate/dispatch.py (0.7.10), mlx_lm/convert.py and generate.py (0.32.2), litert_torch export_hf/export.py (0.10.0).
FLAGS = {
    "vllm serve": """--enable-lora --lora-modules --max-lora-rank --enable-tower-connector-lora --served-model-name
    --chat-template --enable-auto-tool-choice --tool-call-parser --reasoning-parser --limit-mm-per-prompt""",
    "mlx_vlm.convert": "--hf-path --model --mlx-path -q --quantize --q-bits --q-group-size --q-mode --dtype",
    "mlx_vlm.generate": "--model --prompt --image --audio --max-tokens --temperature --system",
    "mlx_lm.convert": "--hf-path --model --mlx-path -q --quantize --q-bits --q-group-size --q-mode --dtype",
    "mlx_lm.generate": "--model --prompt --max-tokens --temp --top-p --top-k --seed",
    "litert-torch export_hf": "--model --output_dir --task --externalize_embedder --quantization_recipe --cache_length",
    "pip install": "",
}


@pytest.fixture(scope="module")
def made():
    """{name: (config, class, names of linear layers)} of each tiny model."""
    found = {}
    for name in tiny.NAMES:
        model = tiny.make_model(name, tiny.make_processor(name))
        linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        found[name] = (model.config, type(model).__name__, linear)
    return found


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    return Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("served") / "model"))


@pytest.fixture
def adapt(folder, tmp_path):
    """Makes an adapter of the tiny Gemma 4, with other names of its keys, and other entries of its config."""

    def make(targets="language", rename=lambda name: name, save=(), **options):
        config, _ = models.load_config(str(folder))
        model = models.load_model(str(folder), config, torch.float32)
        wanted = {"r": 4, "target_modules": models.lora_modules(model, targets), "modules_to_save": list(save) or None}
        get_peft_model(model, LoraConfig(**(wanted | options))).save_pretrained(tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)
        shutil.copy(folder / "chat_template.jinja", tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


def vllm(path, **more) -> dict:
    return serving.vllm(export.VllmFlags(path=str(path), **more))


def told(result) -> str:
    return " | ".join(check["told"] for check in result["checks"] if check["passed"] is False)


def check_flags(text: str) -> None:
    """Each word that is a flag is one of the tool's; each line is of a tool that is known."""
    for line in text.splitlines():
        tool = next(tool for tool in FLAGS if line.startswith(tool))
        words = shlex.split(line.removeprefix(tool))
        given = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        assert set(given) <= set(FLAGS[tool].split()), line


SHARES = {  # of the updates on each part's layers, by what vLLM does with them
    ("gemma3_text", "language"): {"served": 28},
    ("gemma3", "language"): {"served": 28},
    ("gemma3", "vision"): {"dropped": 12},  # transformers 5 has no `vision_model` in these names, vLLM has
    ("gemma4", "language"): {"served": 24},
    ("gemma4", "vision"): {"tower": 15},
    ("gemma4", "audio"): {"tower": 21},
    ("gemma4_moe", "language"): {"served": 24, "half": 2},
    ("gemma4_dense", "language"): {"served": 24, "half": 2},
    ("gemma4_dense", "vision"): {"tower": 15},
    ("gemma4_unified", "language"): {"served": 24, "half": 2},
    ("gemma4_unified", "vision"): {"dropped": 2},
    ("gemma4_unified", "audio"): {"tower": 1},
}


@pytest.mark.parametrize("case", SHARES)
def test_what_becomes_of_the_updates_of_each_part(made, case):
    config, name, linear = made[case[0]]
    wanted = families.family_of_config(config).lora_targets[case[1]]
    updates = [layer for layer in linear if re.fullmatch(wanted, layer)]
    assert Counter(serving.fates_of(updates, config, name).values()) == SHARES[case]


def test_updates_that_have_no_place_are_told_from_those_that_have(made):
    config, name, _ = made["gemma4"]
    layer = "model.language_model.layers"
    fates = {
        f"{layer}.1.self_attn.v_proj": "served",
        f"{layer}.2.self_attn.k_proj": "shared",  # of a layer without keys of its own: an older transformers had them
        f"{layer}.3.self_attn.q_proj": "served",
        f"{layer}.4.mlp.up_proj": "dropped",  # of a larger model
        "model.layers.1.mlp.up_proj": "served",  # of a text-only model: vLLM puts it there, too
        "model.model.layers.1.mlp.up_proj": "dropped",
        "language_model.model.layers.1.mlp.up_proj": "served",  # an older transformers' name, and vLLM's own
        f"{layer}.1.self_attn.query": "refused",
        f"{layer}.1.experts.base_layer": "experts",
        "model.language_model.embed_tokens": "embedding",
        "lm_head": "embedding",
    }
    assert serving.fates_of(list(fates), config, name) == fates
    config, name, _ = made["gemma3"]
    assert serving.fates_of(["model.layers.1.mlp.up_proj"], config, name) == {"model.layers.1.mlp.up_proj": "dropped"}


def test_an_adapter_that_is_served_gets_a_line_that_serves_it(adapt, folder):
    adapter = adapt("language,vision", r=20, lora_alpha=40)
    result = vllm(adapter, name="mine")
    assert "exit_code" not in result and len(result["checks"]) == 2
    words = shlex.split(result["command"])
    assert words[:3] == ["vllm", "serve", str(folder)] and f"mine={adapter}" in words
    assert words[words.index("--max-lora-rank") + 1] == "32" and "--enable-tower-connector-lora" in words
    assert words[words.index("--chat-template") + 1] == str(adapter / "chat_template.jinja")
    check_flags(result["command"])
    assert "--enable-tower-connector-lora" not in vllm(adapt())["command"]


def test_a_wrong_prefix_would_be_answered_by_the_base_and_is_told(adapt):
    result = vllm(adapt(rename=lambda name: name.replace("language_model.layers", "model.layers")))
    assert result["exit_code"] == 8 and result["command"] is None and "merge" in result["remedy"]
    assert "24 of 24 updates have no layer" in told(result) and "answer as the base" in told(result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"save": ["embed_vision"]}, "whole trained modules (embed_vision)"),
        ({"bias": "lora_only"}, "adapters with biases"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora"),
        ({"rank_pattern": {"q_proj": 600}}, "rank 600, over 512"),
        ({"trainable_token_indices": {"embed_tokens": [7]}}, "trained tokens"),
        ({"task_type": "SEQ_CLS"}, "reward adapter"),
    ],
)
def test_what_vllm_refuses_of_an_adapters_config(adapt, options, said):
    result = vllm(adapt(**options))
    assert result["exit_code"] == 8 and said in told(result)
    assert ("merge" in result.get("remedy", "")) == (said != "reward adapter")  # merged it would score, not speak


def test_a_reward_model_or_lost_weights_are_told(adapt, made, tmp_path):
    assert "reward_score.py" in vllm(adapt(task_type="SEQ_CLS"))["remedy"]  # merged it speaks no more than before
    config, name, _ = made["gemma4"]
    named = {"architectures": [name.replace("ConditionalGeneration", "SequenceClassification")]}
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | named))
    assert "reward_score.py" in vllm(tmp_path)["remedy"]
    with pytest.raises(CannotLoad, match="reward_score.py"):
        ollama._model_source(tmp_path)
    adapter = adapt()
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model-00001-of-00001.safetensors")
    assert "the one file vLLM reads" in told(vllm(adapter))


def test_gemma3n_takes_no_adapters_and_is_served_whole(made, tmp_path):
    config, name, _ = made["gemma3n"]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name]}))
    result = vllm(tmp_path, name="n")
    assert "exit_code" not in result and "--tool-call-parser" not in result["command"]
    check_flags(result["command"])
    assert [f.passed for f in serving._config_findings({"r": 8}, name)] == [False]


def save(name: str, folder: Path, **config) -> Path:
    processor = tiny.make_processor(name)
    tiny.make_model(name, processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "tool", "task"),
    [("gemma3_text", "mlx_lm", "text_generation"), ("gemma4_unified", "mlx_vlm", "image_text_to_text"),
     ("gemma3n", "mlx_vlm", "image_text_to_text"), ("gemma4", "mlx_vlm", "multimodal_lm")],
)  # fmt: skip
def test_the_commands_for_devices_have_the_tools_own_flags(tmp_path, name, tool, task):
    place = save(name, tmp_path / "it's a model")
    flags = export.CommandFlags(path=str(place))
    for result in (serving.mlx(flags), serving.litert(flags)):
        check_flags(result["command"])
        assert str(place) in shlex.split(result["command"].replace("=", " "))
    assert f"{tool}.convert" in serving.mlx(flags)["command"]
    told = serving.litert(flags)
    assert f"--task={task}" in told["command"]
    per_layer = name in ("gemma3n", "gemma4")
    assert ("--externalize_embedder=True" in told["command"]) == per_layer
    assert ("will not hear" in str(told["checks"])) == (name in ("gemma3n", "gemma4_unified"))


def test_what_these_tools_do_not_take_is_refused(adapt, tmp_path, folder):
    for command in (serving.mlx, serving.litert):
        with pytest.raises(CannotLoad, match="export.py merge"):
            command(export.CommandFlags(path=str(adapt())))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(CannotLoad, match="there is a gguf"):
        vllm(tmp_path / "a.gguf")
