"""The facts of the Gemma models have sources, agree with what is published, and lead to choices a user can rely on."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

DEV = ROOT / "skills" / "gemma-dev" / "assets"
sys.path[:0] = [str(DEV), str(ROOT / "scripts")]

import pick_model  # noqa: E402

FACTS = json.loads((DEV / "gemma_models.json").read_text())
MODELS = {model["id"].split("/")[1]: model for model in FACTS["models"]}
SIZES = json.loads((ROOT / "scripts" / "gemma_sizes.json").read_text())["sizes"]
# What a model's facts are held against: the same sizes, as this project trains with them.
SAME = {name: next(key for key in MODELS if key.lower() == f"{name}-it".lower()) for name in SIZES}


def pick(capsys, *arguments):
    """(exit code, what `--json` printed)."""
    code = pick_model.main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


# ---- the facts


@pytest.mark.parametrize("name", MODELS)
def test_every_fact_of_a_model_has_its_source(name):
    model = MODELS[name]
    ours = {"id", "rank", "can", "made_for", "sources", "not_verified"}  # how we sort; not facts
    empty = {key for key, value in model.items() if value in (None, [], {}, False)}
    assert set(model) - ours - empty <= set(model["sources"]) <= set(model)
    assert {source for listed in model["sources"].values() for source in listed} <= set(FACTS["sources"])
    assert set(model.get("not_verified", [])) <= set(model)


def test_sources_are_pages_looked_at_on_a_day_and_all_are_used():
    for source in FACTS["sources"].values():
        assert source["url"].startswith("https://") and source["read"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", source["looked"]) and source["looked"] <= FACTS["looked"]
    entries = [*FACTS["models"], *({"sources": {"what": other["sources"]}} for other in FACTS["others"])]
    used = {key for entry in entries for listed in entry["sources"].values() for key in listed}
    assert used == set(FACTS["sources"])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_form_that_the_script_reads(name):
    model = MODELS[name]
    parts = model["parameters"]
    assert 0 < parts["per_token"] <= parts["total"] and parts["embeddings"] + parts["encoders"] < parts["total"]
    assert set(model["inputs"]) <= set(pick_model.MODALITIES)
    assert model["can"] + model["made_for"] and set(model["can"] + model["made_for"]) <= set(pick_model.TASKS)
    assert model["context"] is None or model["context"] % 1024 == 0
    assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", model["released"]) and model["license"]
    assert all(caveat["about"] in model["inputs"] for caveat in model["caveats"])


def test_models_named_on_the_pages_are_among_the_facts():
    known = {other["id"].split(" ")[0].rstrip(",") for other in FACTS["others"]}
    for model in MODELS.values():
        known |= {model["id"], model["base"], model["drafter"], *(model["qat"] or {}).values()}
    for page in (ROOT / "skills" / "gemma-dev").glob("**/*.md"):
        text = re.sub(r"https://\S+", "", page.read_text())
        named = set(re.findall(r"google/[\w*.-]*\w", text)) - {"google/gemma-3-4b-pt"}
        assert not [name for name in named if not fnmatch.filter(filter(None, known), name)]


def test_the_page_of_models_is_in_step():
    import models_page

    assert models_page.PAGE.read_text() == models_page.page(FACTS)


def test_ranks_within_a_task_are_distinct():
    for task in pick_model.TASKS:
        places = [(task in m["made_for"], m["rank"]) for m in MODELS.values() if task in m["can"] + m["made_for"]]
        assert len(places) == len(set(places)) > 0


# ---- the numbers


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_cached_layers_are_those_of_the_published_config(name):
    import memory_table

    facts, size = MODELS[SAME[name]], SIZES[name]
    assert facts["parameters"]["total"] == pytest.approx(size["published"], rel=0.005)
    text = memory_table.make_config(size).get_text_config()
    assert facts["kv"] == cached(text)
    embeddings = text.vocab_size * text.hidden_size
    if each := getattr(text, "hidden_size_per_layer_input", 0):
        embeddings += text.vocab_size_per_layer_input * text.num_hidden_layers * each
    assert facts["parameters"]["embeddings"] == pytest.approx(embeddings / 1e9, rel=0.002)


def cached(text):
    """The `kv` facts of a text config: what layers hold of their own."""
    own = len(text.layer_types) - (getattr(text, "num_kv_shared_layers", 0) or 0)
    found = {}
    for index in range(own):
        layer = text.per_layer_config[index] if hasattr(text, "per_layer_config") else text
        kind = text.layer_types[index].removesuffix("_attention")
        part = found.setdefault(kind, {"layers": 0})
        part |= {"layers": part["layers"] + 1, "kv_heads": layer.num_key_value_heads, "head_size": layer.head_dim}
    found["sliding"]["window"] = text.sliding_window
    return found


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n", "gemma4", "gemma4_dense", "gemma4_moe"])
def test_the_cache_is_as_large_as_the_one_transformers_allocates(name):
    import tiny
    import torch
    from transformers import StaticCache

    processor = tiny.make_processor(name)
    model = tiny.make_model(name, processor)
    text = model.config.get_text_config()
    length = text.sliding_window + 24  # beyond the window, which then counts
    cache = StaticCache(config=text, max_cache_len=length)
    ids = torch.full((1, 8), 5)
    kinds = {key: torch.zeros_like(ids) for key in ("token_type_ids", "mm_token_type_ids")}
    kinds = kinds if name not in ("gemma3_text", "gemma3n") else {}
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **kinds)
    own = [layer for layer in cache.layers if layer.keys is not None]  # those that share another's cache hold nothing
    held = sum(layer.keys.numel() + layer.values.numel() for layer in own)
    assert pick_model.kv_cache(cached(text), length) == 2 * held


def test_the_vendors_table_of_memory_is_parameters_times_bytes_and_a_fifth():
    """https://ai.google.dev/gemma/docs/core gives these GB for BF16, SFP8 and Q4_0: 1.2 x bytes, in GiB."""
    table = {"E2B": (11.4, 5.7, 2.9), "E4B": (17.9, 8.9, 4.5), "12B": (26.7, 13.4, 6.7),
             "26B-A4B": (57.7, 28.8, 14.4), "31B": (69.9, 34.9, 17.5)}  # fmt: skip
    for size, published in table.items():
        total = MODELS[f"gemma-4-{size}-it"]["parameters"]["total"] * 1e9
        for width, shown in zip((2, 1, 0.5), published, strict=True):
            assert total * width * 1.2 / 2**30 == pytest.approx(shown, abs=0.06)


@pytest.mark.parametrize(
    "size, published", [("E2B", 3_349_516_256), ("E4B", 5_154_941_280), ("12B", 6.98e9), ("26B-A4B", 14_439_363_584)]
)
def test_4_bits_are_as_large_as_the_vendors_own_files(size, published):
    """The files google/gemma-4-*-it-qat-q4_0-gguf, without the encoders, which are in a file of their own."""
    model = MODELS[f"gemma-4-{size}-it"]
    text = pick_model.weights(model, "4bit") - 2e9 * model["parameters"]["encoders"]
    assert text == pytest.approx(published, rel=0.015)


def test_bits_are_those_of_the_file_format():
    gguf = pytest.importorskip("gguf")
    kinds = {"int8": ("Q8_0", "Q8_0"), "4bit": ("Q4_0", "Q6_K"), "bf16": ("BF16", "BF16")}
    for precision, names in kinds.items():
        blocks = [gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in names]
        assert pick_model.BITS[precision] == tuple(8 * size / count for count, size in blocks)


# ---- the choice


@pytest.mark.parametrize(
    "arguments, chosen, precision",
    [
        ("--task audio --memory 12 --modalities text,audio", "gemma-4-12B-it", "4bit"),
        ("--task audio --memory 10 --modalities text,audio,image --quantize bf16", None, None),
        ("--memory 80", "gemma-4-31B-it", "bf16"),
        ("--memory 24", "gemma-4-31B-it", "4bit"),
        ("--memory 24 --context 131072", "gemma-4-26B-A4B-it", "4bit"),
        ("--memory 16 --task agent", "gemma-4-12B-it", "int8"),
        ("--memory 8 --task vision --license apache", "gemma-4-12B-it", "4bit"),
        ("--memory 6 --task vision --license apache", "gemma-4-E2B-it", "4bit"),
        ("--memory 4 --task vision", "gemma-3-4b-it", "4bit"),
        ("--memory 1", "gemma-3-1b-it", "4bit"),
        ("--memory 80 --task audio --context 200000", "gemma-4-12B-it", "bf16"),
        ("--memory 80 --task video --modalities text,video,audio", "gemma-4-12B-it", "bf16"),
        ("--memory 8 --task narrow", "gemma-3-270m-it", "bf16"),
        ("--memory 8 --task narrow --license apache", "gemma-4-E4B-it", "4bit"),
        ("--memory 8 --task functions", "functiongemma-270m-it", "bf16"),
        ("--memory 4 --task embed --modalities text,image", "embeddinggemma-2", "bf16"),
        ("--memory 1 --task embed", "embeddinggemma-300m", "bf16"),
        ("--memory 24 --task moderate --modalities image", "shieldgemma-2-4b-it", "bf16"),
        ("--memory 16 --task translate", "translategemma-12b-it", "int8"),
        ("--memory 16 --task translate --context 8192", "gemma-4-12B-it", "int8"),
        ("--memory 16 --task medical", "medgemma-1.5-4b-it", "bf16"),
        ("--memory 8 --license apache --quantize bf16", None, None),
    ],
)
def test_choices(capsys, arguments, chosen, precision):
    code, answer = pick(capsys, *arguments.split())
    assert code == answer["exit_code"] == (0 if chosen else 8)
    if chosen:
        choice = answer["choice"]
        assert (choice["id"], choice["precision"]) == (f"google/{chosen}", precision)
        assert choice["gib"]["total"] <= pick_model.USABLE * answer["asked"]["memory"]
        assert set(answer["asked"]["modalities"]) <= set(choice["inputs"])


@pytest.mark.parametrize("memory", [2, 8, 24, 80])
def test_every_model_for_the_task_is_chosen_or_told_why_not(capsys, memory):
    _, answer = pick(capsys, "--task", "vision", "--memory", memory, "--quantize", "4bit")
    told = [answer["choice"], *answer["runners_up"]] if "choice" in answer else []
    told += answer["rejected"]
    able = [model["id"] for model in MODELS.values() if "vision" in model["can"]]
    fits = [
        pick_model.memory(m, "4bit", 8192)["total"] <= 0.9 * memory for m in MODELS.values() if "vision" in m["can"]
    ]
    assert len(told) == len(able) - max(sum(fits) - 4, 0) and {one["id"] for one in told} <= set(able)
    assert all(one["why_not"] for one in answer.get("runners_up", []) + answer["rejected"])


def test_what_to_know_of_a_choice_is_told(capsys):
    _, answer = pick(capsys, "--task", "audio", "--memory", "12")
    choice = answer["choice"]
    assert any("clip first" in caveat for caveat in choice["caveats"]) and choice["drafter"].endswith("-assistant")
    assert choice["run"] == ["llama-server -hf google/gemma-4-12B-it-qat-q4_0-gguf -c 8192"]
    assert any("faster" in other["why_not"] for other in answer["runners_up"])
    _, answer = pick(capsys, "--task", "chat", "--memory", "12", "--modalities", "text")
    assert not any("clip" in caveat for caveat in answer["choice"]["caveats"])  # no audio, no word of it
    _, answer = pick(capsys, "--task", "narrow", "--memory", "8")
    assert any("terms" in caveat for caveat in answer["choice"]["caveats"])


def test_nothing_fits_says_what_would_and_that_is_true(capsys):
    asked = "--task agent --memory 24 --context 262144 --quantize bf16".split()
    code, answer = pick(capsys, *asked)
    assert code == 8 and answer["status"] == "nothing fits" and len(answer["changes"]) == 3
    for change in answer["changes"]:
        flag, value, model = re.fullmatch(r"(--\w+) (\S+) \((.+)\)", change).groups()
        changed = [value if asked[place - 1] == flag else word for place, word in enumerate(asked)]
        code, answer = pick(capsys, *changed)
        assert code == 0 and answer["choice"]["id"] == model
    assert pick(capsys, "--task", "moderate", "--memory", 24, "--modalities", "text,image")[1]["changes"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--memory nan", "--memory nan"),
        ("--memory -3", "--memory -3"),
        ("--memory inf", "above 0"),
        ("--memory twelve", "invalid float value"),
        ("", "--memory"),
        ("--memory 8 --modalities text,smell", "'smell'"),
        ("--memory 8 --modalities text,", "''"),
        ("--memory 8 --context 0", "--context 0"),
        ("--memory 8 --task sing", "chat"),
        ("--memory 8 --model gemma", "--model"),
    ],
)
def test_wrong_usage_says_what_was_expected(capsys, arguments, words):
    assert pick_model.main([*arguments.split(), "--json"]) == 2
    told = capsys.readouterr()
    answer = json.loads(told.out)
    assert answer["exit_code"] == 2 and words in answer["error"]["message"] and words in told.err


def test_the_skill_copied_alone_needs_nothing_but_python(tmp_path):
    folder = shutil.copytree(DEV, tmp_path / "copy")
    command = [sys.executable, "-I", "-S", str(folder / "pick_model.py")]
    done = subprocess.run([*command, "--memory", "12"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("google/gemma-4-12B-it in 4bit\n") and not done.stderr
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True).stdout
    assert "examples:" in shown and "exit codes:" in shown and "8 nothing fits" in shown
