#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "accelerate>=1.12,<2",
#     "datasets>=4.8,<6",
#     "ftfy>=6.3",
#     "gguf>=0.17",
#     "httpx>=0.27,<1",
#     "jinja2>=3.1",
#     "jiwer>=4",
#     "json-repair>=0.50",
#     "jsonschema>=4.20",
#     "librosa>=0.11",
#     "numpy>=2",
#     "packaging>=24",
#     "peft>=0.21,<1",
#     "pillow>=11",
#     "pyyaml>=6",
#     "regex>=2024.5.15",
#     "rensa>=0.5,<1",
#     "rapidfuzz>=3.9",
#     "sacrebleu>=2.5",
#     "scipy>=1.14",
#     "soundfile>=0.13",
#     "tenacity>=9",
#     "torch>=2.9",
#     "torchvision>=0.24",
#     "tqdm>=4.66",
#     "transformers>=5.17,<6",
#     "trl>=1.14.2,!=1.15.*,<2",
#     "xxhash>=3.5",
# ]
# ///
"""Hand a trained model on: merge its adapter into the base model, and check what is handed on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gemma_trainer import artefacts, cli
from gemma_trainer.errors import CannotLoad, UsageError
from gemma_trainer.flags import flag, word

EXAMPLES = """\
  python export.py merge run1 --output merged --json           # one model, without PEFT
  python export.py merge run1 --output merged --base google/gemma-4-E2B-it
  python export.py check merged --json                         # does it answer as the run did
  python export.py gguf merged --quantize Q4_K_M --llama-cpp ~/llama.cpp --output gguf
  python export.py ollama gguf --name my-gemma --output ollama
  python export.py vllm run1 --json                            # the line that serves it, or what vLLM would not take
  python export.py mlx merged
  python export.py litert merged
  python export.py hub run1 --repo me/my-gemma                 # what would be uploaded; --push does it"""

EXIT_CODES = """exit codes:
  0 done                                       5 run, base model or artefact cannot be loaded
  1 unexpected fault    2 wrong usage          6 out of memory
  3 bad data            4 missing package, or no room on the disk
  8 a check did not pass                       130 interrupted, 143 terminated: nothing was written"""


@dataclass(frozen=True)
class MergeFlags:
    exit_codes = EXIT_CODES
    run: str = word("the folder of a run, a checkpoint or an adapter")
    output: str | None = flag(help="the folder for the merged model (required)")
    base: str | None = flag(help="hub id or folder of the base model in full precision (default: as the adapter says)")
    dtype: str = flag("auto", "of the weights; auto: each as the base has it", ("auto", "bf16", "fp32"))
    shard_size: str | None = flag(
        help="largest file of weights, such as 4GB (default: the files of the base)", metavar="SIZE"
    )
    logits: bool = flag(True, "compare what the merged model computes with what the adapter does on its base")
    overwrite: bool = flag(False, "replace the merged model that --output holds")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class CheckFlags:
    exit_codes = EXIT_CODES
    path: str = word("the folder of an adapter, run or model, or what was exported from it")
    dataset: str | None = flag(
        help="rows to ask, of which the first three (default: those of export.json, or of the run)"
    )
    run: str | None = flag(help="the run whose answers are to be met (default: as export.json says)")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class GgufFlags:
    exit_codes = EXIT_CODES
    model: str = word("the folder of a whole model, as merge writes it")
    output: str | None = flag(help="the folder for the .gguf files (required)")
    quantize: tuple[str, ...] = flag((), "types to make, such as Q8_0 Q6_K Q5_K_M Q4_K_M Q3_K_M (default: none)")
    outtype: str = flag("bf16", "type of what is converted, and of the towers", ("bf16", "f16", "f32", "q8_0"))
    mmproj: bool = flag(True, "also write the vision and audio towers")
    llama_cpp: str | None = flag(help="folder of llama.cpp (default: LLAMA_CPP, then the PATH)", metavar="DIR")
    overwrite: bool = flag(False, "replace what this command has written to --output before")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error, and llama.cpp's log")


@dataclass(frozen=True)
class OllamaFlags:
    exit_codes = EXIT_CODES
    path: str = word("a .gguf file or a folder with one, or the folder of a whole model")
    name: str | None = flag(help="what Ollama is to call the model (required)")
    output: str | None = flag(help="the folder for the Modelfile (required)")
    create: bool = flag(False, "run `ollama create`, too")
    overwrite: bool = flag(False, "replace what this command has written to --output before")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class VllmFlags:
    exit_codes = EXIT_CODES
    path: str = word("the folder of a run or an adapter, or of a whole model")
    name: str | None = flag(help="what the server is to call it (default: the folder's name)")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class CommandFlags:
    exit_codes = EXIT_CODES
    path: str = word("the folder of a whole model, as merge writes it")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


@dataclass(frozen=True)
class HubFlags:
    exit_codes = EXIT_CODES
    path: str = word("the folder of a run, an adapter or a whole model, or of .gguf files")
    repo: str | None = flag(help="where to: ORG/NAME (required)")
    push: bool = flag(False, "upload; without it nothing leaves this machine")
    public: bool = flag(False, "make a new repository public; else it is private")
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")


def merge(config: MergeFlags) -> dict:
    if artefacts.kind_of(config.run) == "gguf":
        raise CannotLoad(f"{config.run}: no adapter is there")
    from gemma_trainer import merger

    return merger.merge(config)


def check(config: CheckFlags) -> dict:
    kind = artefacts.kind_of(config.path)
    if kind in ("gguf", "ollama"):
        from gemma_trainer import gguf_check

        return gguf_check.check(config)
    if kind not in ("adapter", "model"):
        raise UsageError(f"{config.path}: nothing there can be checked")
    from gemma_trainer import export_check

    return export_check.check(config)


def gguf(config: GgufFlags) -> dict:
    artefacts.kind_of(config.model)
    from gemma_trainer import llama_cpp

    return llama_cpp.export(config)


def ollama(config: OllamaFlags) -> dict:
    artefacts.kind_of(config.path)
    from gemma_trainer import ollama

    return ollama.export(config)


def vllm(config: VllmFlags) -> dict:
    artefacts.kind_of(config.path)
    from gemma_trainer import serving

    return serving.vllm(config)


def mlx(config: CommandFlags) -> dict:
    artefacts.kind_of(config.path)
    from gemma_trainer import serving

    return serving.mlx(config)


def litert(config: CommandFlags) -> dict:
    artefacts.kind_of(config.path)
    from gemma_trainer import serving

    return serving.litert(config)


def hub(config: HubFlags) -> dict:
    artefacts.kind_of(config.path)
    from gemma_trainer import publishing

    return publishing.publish(config)


COMMANDS = {
    "merge": (merge, MergeFlags, "Merge an adapter into its base model, in the base's precision; then verify it."),
    "check": (check, CheckFlags, "Load what was exported as its user would, ask it, and compare with the run."),
    "gguf": (gguf, GgufFlags, "Convert a whole model to .gguf files with llama.cpp; quantize and verify them."),
    "ollama": (ollama, OllamaFlags, "Write a Modelfile whose prompt, stops and sampling are the model's own."),
    "vllm": (vllm, VllmFlags, "Tell what of an adapter vLLM would refuse or drop, and the line that serves it."),
    "mlx": (mlx, CommandFlags, "Tell the commands that convert a whole model for MLX (Apple Silicon)."),
    "litert": (litert, CommandFlags, "Tell the commands that convert a whole model for LiteRT (phones, browsers)."),
    "hub": (hub, HubFlags, "Tell what would go to the hub, with licence and gating; --push uploads it."),
}

if __name__ == "__main__":
    sys.exit(cli.run_commands(COMMANDS, __doc__, EXAMPLES))
