"""What llama.cpp's converter and quantizer do, on the tiny Gemma 4: real .gguf files, by the gguf package.

Run as `convert_hf_to_gguf.py` or `llama-quantize` (a test copies this file under those names), or called as `write`.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors import safe_open

NAMES = {
    "embed_tokens": "token_embd",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "language_model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """{llama.cpp's name: values} of the language model in a folder."""
    found = {}
    with safe_open(folder / "model.safetensors", "np") as opened:
        for name in opened.keys():  # noqa: SIM118
            if "language_model." not in name or not name.endswith(".weight"):
                continue
            inner = name.split("language_model.")[1].removesuffix(".weight")
            block = re.fullmatch(r"layers\.(\d+)\.(.+)", inner)
            known = NAMES.get(block[2] if block else inner, NAMES.get(f"language_model.{inner}"))
            if known:
                found[(f"blk.{block[1]}." if block else "") + f"{known}.weight"] = opened.get_tensor(name)
    return found


def write(folder: Path, file: Path, kind: str = "F32", change=lambda facts: None) -> None:
    """Write the language model of a folder; `change` may alter {"tensors", "tokens", "types", "template",
    "architecture", "eos"} before."""
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    facts = {"tensors": tensors_of(folder), "tokens": sorted(ids, key=ids.get), "template": template}
    facts |= {"architecture": "gemma4", "eos": ids["<eos>"], "bos": ids["<bos>"]}
    special = {token["content"] for token in stored["added_tokens"] if token["special"]}
    facts["types"] = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in facts["tokens"]]
    change(facts)
    writer = GGUFWriter(file, facts["architecture"])
    writer.add_block_count(4)
    writer.add_token_list(facts["tokens"])
    writer.add_token_types(facts["types"][: len(facts["tokens"])])
    writer.add_eos_token_id(facts["eos"])
    writer.add_bos_token_id(facts["bos"])
    if facts["template"]:
        writer.add_chat_template(facts["template"])
    for name, values in facts["tensors"].items():
        _add(writer, name, values, kind)
    _close(writer)


def write_towers(file: Path, width: int = 64, audio: bool = True) -> None:
    writer = GGUFWriter(file, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(width)
    if audio:
        writer.add_clip_has_audio_encoder(True)
        writer.add_audio_projection_dim(width)
    writer.add_tensor("v.blk.0.attn_q.weight", np.ones((4, 4), np.float32))
    writer.add_tensor("v.blk.0.attn_q.input_max", np.array([np.inf], np.float32))
    _close(writer)


def _add(writer, name: str, values: np.ndarray, kind: str) -> None:
    plain = kind == "F32" or values.ndim < 2 or values.shape[-1] % 32
    if plain:
        writer.add_tensor(name, values.astype(np.float32))
        return
    kind = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(values.astype(np.float32), kind), raw_dtype=kind)


def _close(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _convert(arguments: list[str]) -> None:
    folder, file = Path(arguments[0]), Path(arguments[arguments.index("--outfile") + 1])
    if (Path(__file__).parent / "broken").is_file():  # what a test wants it to end in
        sys.exit((Path(__file__).parent / "broken").read_text())
    if "--mmproj" in arguments:
        write_towers(file)
        return
    lost = (Path(__file__).parent / "loses-template").is_file()
    write(folder, file, change=lambda facts: facts.update(template="{{ messages }}") if lost else None)


def _quantize(arguments: list[str]) -> None:
    if arguments == ["--help"]:
        print("   2  or  Q4_0    :  4.34G\n   7  or  Q8_0    :  7.96G")
        return
    source, file, kind = arguments
    reader = GGUFReader(source)
    writer = GGUFWriter(file, "gemma4")
    for name in ("tokens", "token_type", "eos_token_id", "bos_token_id"):
        key = f"tokenizer.ggml.{name}"
        value = reader.get_field(key).contents()
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    writer.add_block_count(4)
    writer.add_chat_template(reader.get_field("tokenizer.chat_template").contents())
    for tensor in reader.tensors:
        _add(writer, tensor.name, np.array(tensor.data), kind)
    _close(writer)


if __name__ == "__main__":
    (_quantize if "quantize" in Path(__file__).name else _convert)(sys.argv[1:])
