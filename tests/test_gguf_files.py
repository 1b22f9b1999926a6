"""A .gguf file is told from the model that it claims to be; llama.cpp's tools are run, and what they lack is said."""

import json
import shutil
import sys
from pathlib import Path

import export
import gguf
import llama_stand_in as stand_in
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from conftest import ASSETS
from gemma_trainer import artefacts, gguf_check, gguf_files, llama_cpp, models
from gemma_trainer.errors import CannotLoad, EnvironmentUnfit, TrainerError, UsageError

PROMPT = "<|turn>user\nHi<turn|>\n<|turn>model\n"
QUESTION = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "."}]}


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    """The tiny model, and what an export keeps beside it."""
    place = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("whole") / "tiny gemma"))
    samples = [{"name": "rows:1", "kinds": [], "row": QUESTION, "answer": "Blue.", "log_prob": -0.1}]
    artefacts.write(place, {"made": "merge", "run": "run1", "samples": samples})
    return place


@pytest.fixture
def llama(tmp_path):
    """A folder of llama.cpp's programs, as far as a test needs them."""
    place = tmp_path / "llama.cpp"
    (place / "build" / "bin").mkdir(parents=True)
    shutil.copy(stand_in.__file__, place / "convert_hf_to_gguf.py")
    for name in ("llama-quantize", "llama-completion"):
        program = place / "build" / "bin" / name
        text = Path(stand_in.__file__).read_text()
        if name == "llama-completion":  # which says what it was asked
            text = "import sys\nasked = open(sys.argv[sys.argv.index('-bf') + 1]).read()\n"
            text += (
                "print('blue' if asked == '<|turn>user\\nHi<turn|>\\n<|turn>model\\n' else asked, '[end of text]')\n"
            )
        program.write_text(f"#!{sys.executable}\n{text}")
        program.chmod(0o755)
    return place


def failed(findings) -> list[str]:
    return [finding.check for finding in findings if finding.passed is False]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_a_file_of_the_model_passes_in_every_type(folder, tmp_path, kind):
    stand_in.write(folder, tmp_path / "model.gguf", kind)
    findings = gguf_files.verify(tmp_path / "model.gguf", folder)
    assert all(finding.passed for finding in findings)
    names = ["numbers", "architecture", "tensors", "weights", "vocabulary", "chat template"]
    assert [finding.check for finding in findings] == names and f"{kind} " in findings[0].told
    assert failed(gguf_files.verify(tmp_path / "model.gguf")) == []


DAMAGE = {
    "numbers": lambda f: f["tensors"]["blk.3.ffn_up.weight"].__setitem__((0, 0), np.nan),
    "architecture": lambda f: f.update(architecture="llama"),
    "tensors": lambda f: f["tensors"].pop("blk.2.attn_output.weight"),
    "tensors 2": lambda f: f["tensors"].update({"blk.1.ffn_up.weight": np.ones((64, 128), np.float32)}),
    "weights": lambda f: f["tensors"].update({"blk.3.attn_q.weight": f["tensors"]["blk.0.attn_q.weight"] * 1.01}),
    "vocabulary": lambda f: (f["tokens"].pop(), f["tensors"].update(token_rows(f, -1))),
    "vocabulary 2": lambda f: f["tokens"].__setitem__(f["tokens"].index("<turn|>"), "<end>"),
    "vocabulary 3": lambda f: f.update(eos=5),
    "vocabulary 4": lambda f: f.update(tokens=[*f["tokens"][:24], *reversed(f["tokens"][24:])]),
    "vocabulary 5": lambda f: f["types"].__setitem__(f["tokens"].index("<|turn>"), gguf.TokenType.NORMAL),
    "chat template": lambda f: f.update(template=f["template"] + " "),
    "chat template 2": lambda f: f.update(template=None),
}


def token_rows(facts: dict, end: int) -> dict:
    tables = ("token_embd.weight", "per_layer_token_embd.weight")
    return {name: facts["tensors"][name][:end] for name in tables}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_with_a_file_is_named(folder, tmp_path, damage):
    stand_in.write(folder, tmp_path / "model.gguf", change=DAMAGE[damage])
    found = failed(gguf_files.verify(tmp_path / "model.gguf", folder))
    assert found[0] == damage.rstrip(" 2345") and len(found) <= 2


def test_a_file_that_is_cut_off_or_none_is_refused(folder, tmp_path):
    whole = tmp_path / "model.gguf"
    stand_in.write(folder, whole)
    for size in (0, 3, 200, whole.stat().st_size // 2, whole.stat().st_size - 40_000):
        (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:size])
        with pytest.raises(CannotLoad, match="no whole GGUF file"):
            gguf_files.verify(tmp_path / "cut.gguf", folder)
    with pytest.raises(CannotLoad, match="no such file"):
        gguf_files.verify(tmp_path / "absent.gguf")


@pytest.mark.parametrize("kind", gguf_files.SCALES)
def test_the_scales_of_each_type_are_where_they_are_looked_for(kind):
    kind = gguf.GGMLQuantizationType[kind]
    for offset in gguf_files.SCALES[kind.name]:
        rows = np.ones((2, GGML_QUANT_SIZES[kind][1]), np.uint8)
        assert np.isfinite(gguf_files._scales(rows, kind)).all() and np.isfinite(dequantize(rows, kind)).all()
        rows[1, offset : offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
        assert np.isnan(gguf_files._scales(rows, kind)).sum() == 1
        assert np.isnan(dequantize(rows, kind)[1]).any() and not np.isnan(dequantize(rows, kind)[0]).any()


def test_towers_are_told_from_those_of_another_model(folder, tmp_path):
    for name, options, wrong in (("a", {}, []), ("b", {"audio": False}, ["audio"]), ("c", {"width": 32}, ["vision"])):
        stand_in.write_towers(tmp_path / name, **options)
        assert failed(gguf_files.verify(tmp_path / name, folder))[:1] == wrong


def test_parameters_have_llama_cpps_names():
    assert gguf_files.gguf_name("model.language_model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
    assert gguf_files.gguf_name("language_model.model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_files.gguf_name("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight") is None


def flags(folder, output, llama=None, **more):
    return export.GgufFlags(model=str(folder), output=str(output), llama_cpp=llama and str(llama), **more)


def test_a_model_is_converted_quantized_and_verified(folder, llama, tmp_path, monkeypatch):
    result = export.gguf(flags(folder, tmp_path / "out", llama, quantize=("q8_0", "Q4_0"), outtype="f32"))
    names = ["tiny-gemma-Q4_0.gguf", "tiny-gemma-Q8_0.gguf", "mmproj-tiny-gemma-F32.gguf"]
    assert list(result["files"]) == names and {path.name for path in (tmp_path / "out").iterdir()} == {
        *names,
        "export.json",
    }
    assert result["files"][names[0]] < result["files"][names[1]]
    assert all(check["passed"] for found in result["checks"].values() for check in found)
    assert artefacts.kind_of(tmp_path / "out") == "gguf" and artefacts.read(tmp_path / "out")["made"] == "gguf"
    monkeypatch.setenv("LLAMA_CPP", str(llama))
    asked = gguf_check.check(export.CheckFlags(path=str(tmp_path / "out" / names[1])))
    assert asked["sound"] and asked["asked"] == [{"name": "rows:1", "same": True, "said": "blue"}]
    with pytest.raises(UsageError, match="2 models are there"):
        gguf_check.check(export.CheckFlags(path=str(tmp_path / "out")))
    with pytest.raises(UsageError, match="is there already"):
        export.gguf(flags(folder, tmp_path / "out", llama, outtype="f32"))
    again = export.gguf(flags(folder, tmp_path / "out", llama, outtype="f32", mmproj=False, overwrite=True))
    assert list(again["files"]) == ["tiny-gemma-F32.gguf"] and len(list((tmp_path / "out").iterdir())) == 2


def test_a_model_that_answers_otherwise_does_not_pass(folder, llama, tmp_path, monkeypatch):
    stand_in.write(folder, tmp_path / "model.gguf")
    sample = {"name": "a", "kinds": [], "row": QUESTION, "answer": "red"}
    artefacts.write(tmp_path, {"model": str(folder), "samples": [sample]})
    monkeypatch.setenv("LLAMA_CPP", str(llama))
    assert gguf_check.check(export.CheckFlags(path=str(tmp_path / "model.gguf")))["exit_code"] == 8
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gguf_check.check(export.CheckFlags(path=str(tmp_path / "model.gguf")))
    assert found["sound"] and "not asked" in found["checks"][-1]["told"]


def test_a_conversion_that_lost_the_template_leaves_nothing(folder, llama, tmp_path):
    (llama / "loses-template").touch()
    with pytest.raises(TrainerError, match="is not the model .chat template") as caught:
        export.gguf(flags(folder, tmp_path / "out", llama, outtype="f32"))
    assert caught.value.exit_code == 8 and {path.name for path in tmp_path.iterdir()} == {"llama.cpp"}


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (
            "ValueError: Can not map tensor 'model.vision_tower.x.weight'",
            "does not know the tensor model.vision_tower.x",
        ),
        ("ERROR:hf-to-gguf:Model Gemma4ForConditionalGeneration is not supported", "does not know Gemma4ForCond"),
        ("NotImplementedError: BPE pre-tokenizer was not recognized - update", "tokenizer.model"),
        ("ModuleNotFoundError: No module named 'sentencepiece'", "pip install sentencepiece"),
        ("    assert head is not None\n           ^^^^^\nAssertionError", "assert head is not None: AssertionError"),
    ],
)
def test_what_the_converter_ends_in_says_what_is_missing(folder, llama, tmp_path, ends, told):
    (llama / "broken").write_text(ends)
    with pytest.raises(EnvironmentUnfit, match=told):
        export.gguf(flags(folder, tmp_path / "out", llama))
    assert not (tmp_path / "out").exists()


def test_without_llama_cpp_the_steps_for_this_model_are_told(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(EnvironmentUnfit) as caught:
        export.gguf(flags(folder, tmp_path / "out", quantize=("Q4_K_M",)))
    assert "git clone" in str(caught.value) and "--quantize Q4_K_M" in str(caught.value)
    assert str(folder) in str(caught.value) and caught.value.exit_code == 4
    with pytest.raises(UsageError, match="no such folder"):
        export.gguf(flags(folder, tmp_path / "out", tmp_path / "absent"))


def test_what_cannot_be_a_gguf_file_is_refused(folder, llama, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(CannotLoad, match="export.py merge"):
        export.gguf(flags(adapter, tmp_path / "out", llama))
    with pytest.raises(UsageError, match="llama-quantize knows Q4_0 Q8_0"):
        export.gguf(flags(folder, tmp_path / "out", llama, quantize=("Q4",)))
    reward = Path(shutil.copytree(folder, tmp_path / "reward"))
    config = json.loads((reward / "config.json").read_text())
    (reward / "config.json").write_text(json.dumps(config | {"architectures": ["Gemma4ForSequenceClassification"]}))
    with pytest.raises(CannotLoad, match="reward model"):
        export.gguf(flags(reward, tmp_path / "out", llama))


def test_the_converter_is_given_what_it_misses_and_the_folder_stays_as_it_was(folder):
    before = (folder / "config.json").read_text()
    with llama_cpp._fit_for_conversion(folder) as given:
        written = json.loads((given / "config.json").read_text())
        assert given != folder and "model_type" not in written and written["text_config"]["global_head_dim"] == 16
        named = json.loads((given / "tokenizer_config.json").read_text())["extra_special_tokens"]
        assert {"<|turn>", "<turn|>", "<|video|>"} <= set(named)  # which the tokenizer has, and does not call special
        assert (given / "model.safetensors").resolve() == (folder / "model.safetensors").resolve()
    assert (folder / "config.json").read_text() == before and models.load_config(str(folder))[1].name == "gemma4"
    assert not given.exists() and ASSETS not in given.parents
