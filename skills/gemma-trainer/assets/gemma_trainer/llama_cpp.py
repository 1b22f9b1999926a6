"""Turn a whole model into .gguf files with llama.cpp's own tools, and ask such a file something."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import artefacts, gguf_files, models
from .errors import CannotLoad, EnvironmentUnfit, TrainerError, UsageError
from .families import modalities, tokenizer_of
from .files import mib, user_path
from .run_check import Finding

CONVERTER = "convert_hf_to_gguf.py"
# Bits a weight, of a model of 8 billion: llama.cpp, tools/quantize/README.md. A Gemma's large embedding table gets more
# of them, and small layers that a type does not suit keep more, so a file may be larger.
CHOICES = {"Q8_0": 8.50, "Q6_K": 6.56, "Q5_K_M": 5.70, "Q4_K_M": 4.89, "Q3_K_M": 4.00, "Q2_K": 3.16}
OUTTYPES = {"f32": 32.0, "bf16": 16.0, "f16": 16.0, "q8_0": 8.5}
FETCH = """\
git clone https://github.com/ggml-org/llama.cpp
cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release
cmake --build llama.cpp/build -j --target llama-quantize llama-completion llama-mtmd-cli"""
# What the converter ends with -> what to do about it.
CAUSES = {
    r"Can not map tensor '?([\w.]+)": "this llama.cpp does not know the tensor {0}: update it (git pull, build again)",
    r"Model (\w+) is not supported|Architecture ([\w']+) not supported": "this llama.cpp does not know {0}: update it "
    "(git pull, build again)",
    r"BPE pre-tokenizer was not recognized": "it does not know this tokenizer.json; Gemma 3 and 3n are converted with "
    "the base model's tokenizer.model, which must be in the folder",
    r"ModuleNotFoundError: No module named '([\w.]+)'": "it needs a package: pip install {0}",
    r"(has no attribute '?GEMMA\w*)": "its gguf-py is older than its converter ({0}): update llama.cpp",
}


@dataclass(frozen=True)
class Tools:
    """Where llama.cpp's programs are, None for one that is not there."""

    converter: Path | None
    quantize: Path | None
    completion: Path | None
    mtmd: Path | None


def find_tools(folder: str | None = None) -> Tools:
    """Look for llama.cpp: in `folder`, else where the variable LLAMA_CPP says, and on the PATH.

    Raises:
        UsageError: `folder` is none.
    """
    if folder and not user_path(folder).is_dir():
        raise UsageError(f"--llama-cpp {folder}: no such folder")
    named = folder or os.environ.get("LLAMA_CPP")
    root = user_path(named) if named else None
    places = [root, root / "build" / "bin", root / "build" / "bin" / "Release", root / "bin"] if root else []

    def find(name: str) -> Path | None:
        for place in places:
            for file in (place / name, place / f"{name}.exe"):
                if file.is_file():
                    return file.resolve()
        beside = shutil.which(name)
        return Path(beside) if beside else None

    return Tools(*map(find, (CONVERTER, "llama-quantize", "llama-completion", "llama-mtmd-cli")))


def export(config) -> dict:
    """Convert the model in `config.model`, and its towers; quantize, verify, and tell the sizes."""
    folder = user_path(config.model)
    family, parameters = _must_be_whole(folder)
    kinds = [kind.upper() for kind in config.quantize]
    if kinds and config.outtype == "q8_0":
        raise UsageError("--quantize starts from whole weights: leave out --outtype q8_0")
    tools = find_tools(config.llama_cpp)
    lacking = [CONVERTER] if tools.converter is None else []
    lacking += ["llama-quantize"] if kinds and tools.quantize is None else []
    if lacking:
        raise EnvironmentUnfit(_steps(config, lacking))
    _must_be_types(tools, kinds)
    wanted = [OUTTYPES[config.outtype], *(CHOICES.get(kind, 16.0) for kind in kinds)]
    _must_have_room(config.output, int(parameters * sum(wanted) / 8))
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name).strip("-.") or "model"
    with artefacts.new_folder(config.output, "gguf", config.overwrite) as staged:
        files, converted = _make(tools, folder, staged, name, config, kinds)
        checks = {file.name: gguf_files.verify(file, folder) for file in files}
        sizes = {file.name: file.stat().st_size for file in files}
        facts = {key: value for key, value in artefacts.read(folder).items() if key != "made"}
        # The folder is named as it is here: what is handed on leaves this file out.
        artefacts.write(staged, facts | {"made": "gguf", "model": str(folder.resolve()), "files": sizes})
        failed = [told for found in checks.values() for told in found if told.passed is False]
        if failed:
            raise _not_the_model(failed[0])
    return _result(config, sizes, checks, parameters, family.name) | {"converted_bytes": converted}


def _not_the_model(finding: Finding) -> TrainerError:
    """What was converted is not the model: of which nothing is left."""
    error = TrainerError(f"the converted file is not the model ({finding.check}: {finding.told}); nothing was written")
    error.exit_code, error.kind = 8, "check"
    return error


def _must_be_whole(folder: Path):
    """(family, parameters of its language model) of a whole model that speaks; raises CannotLoad for anything else."""
    kind = artefacts.kind_of(folder)
    if kind == "adapter":
        raise CannotLoad(
            f"{folder} is an adapter, and a .gguf holds a whole model: first export.py merge {folder} --output merged"
        )
    if kind != "model":
        raise CannotLoad(f"{folder}: no whole model is there (config.json with its weights)")
    config, family = models.load_config(str(folder))
    if models.is_reward(config):
        raise CannotLoad(f"{folder} is a reward model, which llama.cpp does not know: score with reward_score.py")
    named = models.skeleton(config).named_parameters()
    return family, sum(parameter.numel() for name, parameter in named if not gguf_files.TOWER.search(name))


def _steps(config, lacking: list[str]) -> str:
    """What to do where llama.cpp is not there, for this very model."""
    again = f"export.py gguf {config.model} --llama-cpp llama.cpp --output {config.output or 'gguf'}"
    again += f" --quantize {' '.join(config.quantize)}" if config.quantize else f" --outtype {config.outtype}"
    return f"{' and '.join(lacking)} of llama.cpp not found (--llama-cpp, LLAMA_CPP, PATH). Then:\n{FETCH}\n{again}"


def _must_be_types(tools: Tools, kinds: list[str]) -> None:
    """Refuse a type that this llama-quantize does not list in its help."""
    if not kinds:
        return
    told = subprocess.run([tools.quantize, "--help"], capture_output=True, text=True, errors="replace")
    known = re.findall(r"\bor +(\w+) +:", told.stdout + told.stderr)
    for kind in kinds:
        if known and kind not in known:
            raise UsageError(f"--quantize {kind}: llama-quantize knows {' '.join(known)}")


def _must_have_room(output: str | None, needed: int) -> None:
    place = user_path(output or ".").absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise EnvironmentUnfit(f"{place} has room for {mib(free)}, and the files take some {mib(needed)}")


def _make(tools: Tools, folder: Path, staged: Path, name: str, config, kinds: list[str]) -> tuple[list[Path], int]:
    """Write the files into `staged`; of the converted one, whose size is told, only what is asked for stays."""
    whole = staged / f"{name}-{config.outtype.upper()}.gguf"
    made = []
    with _fit_for_conversion(folder) as source:
        _run_converter(tools, source, whole, config)
        if config.mmproj and _has_towers(folder):
            towers = staged / f"mmproj-{whole.name}"
            _run_converter(tools, source, towers, config, "--mmproj")
            made.append(towers)
    for kind in kinds:
        file = staged / f"{name}-{kind}.gguf"
        _run([tools.quantize, whole, file, kind], f"llama-quantize to {kind}", config.debug)
        made.insert(0, file)
    converted = whole.stat().st_size
    if kinds and config.outtype.upper() not in kinds:
        whole.unlink()
    else:
        made.insert(0, whole)
    return made, converted


def _has_towers(folder: Path) -> bool:
    config, _ = models.load_config(str(folder))
    return bool(modalities(models.load_processor(str(folder), config), config))


def _run_converter(tools: Tools, source: Path, file: Path, config, *more: str) -> None:
    command = [sys.executable, tools.converter, source, "--outfile", file, "--outtype", config.outtype, *more]
    _run(command, f"{CONVERTER} {' '.join(more)}".strip(), config.debug)


def _run(command: list, told: str, debug: bool) -> None:
    """Run a tool of llama.cpp; its log is told with --debug, and else where it fails what it ended with."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", env=_quiet())
    if debug:
        print(done.stdout, done.stderr, file=sys.stderr)
    if done.returncode == 0:
        return
    log = f"{done.stdout}\n{done.stderr}"
    for pattern, remedy in CAUSES.items():
        if found := re.search(pattern, log):
            raise EnvironmentUnfit(f"{told} failed: {remedy.format(*filter(None, found.groups()))}")
    lines = [line.strip() for line in log.splitlines() if line.strip(" ^~\t")] or [f"exit {done.returncode}"]
    last = lines[-1] if ":" in lines[-1] else ": ".join(lines[-2:])  # an AssertionError alone says nothing
    raise EnvironmentUnfit(f"{told} failed: {last[:200]} (--debug shows its log)")


def _quiet() -> dict:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


@contextmanager
def _fit_for_conversion(folder: Path):
    """The folder as the converter takes it: itself, or one of links to its files with what the converter misses.

    Gemma 3 and 3n: the base model's tokenizer.model. Gemma 4: see `_missed_config` and `_named_tokens`.
    """
    if not models.load_config(str(folder))[1].name.startswith("gemma4"):
        written, tokenizer = {}, _base_tokenizer(folder)
    else:
        written, tokenizer = _missed_config(folder) | _named_tokens(folder), None
    if not written and tokenizer is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="gemma-gguf-") as links:
        for file in filter(None, [*folder.resolve().iterdir(), tokenizer]):
            if file.name not in written:
                os.symlink(file, Path(links) / file.name)
        for name, content in written.items():
            (Path(links) / name).write_text(json.dumps(content), encoding="utf-8")
        yield Path(links)


def _missed_config(folder: Path) -> dict[str, dict]:
    """{"config.json": its content} with the keys that transformers leaves out where they say nothing, if any.

    They are `moe_intermediate_size` of a 12B without experts, and the size of full-attention heads that are as large as
    the others (of no published model); for the latter transformers, which the converter asks, must not know the config,
    so that the file itself is read.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    layers = (text.get("per_layer_config") or {}).values()
    missed = {}
    if "moe_intermediate_size" not in text:
        missed["moe_intermediate_size"] = None
    if "global_head_dim" not in text and not any("head_dim" in layer for layer in layers):
        missed["global_head_dim"] = text["head_dim"]
        config.pop("model_type")
    text |= missed
    return {"config.json": config} if missed else {}


def _named_tokens(folder: Path) -> dict[str, dict]:
    """{"tokenizer_config.json": its content} with those special tokens that only tokenizer.json calls so, if any: the
    converter would make words of them, and no prompt would have turns."""
    file = folder / "tokenizer_config.json"
    config, _ = models.load_config(str(folder))
    tokenizer = tokenizer_of(models.load_processor(str(folder), config))
    known = set(tokenizer.all_special_tokens)
    unnamed = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content not in known]
    if not unnamed or not file.is_file():
        return {}
    written = json.loads(file.read_text(encoding="utf-8"))
    more = written.get("extra_special_tokens") or []
    named = list(more.values()) if isinstance(more, dict) else list(more)  # older files name each
    return {file.name: written | {"extra_special_tokens": [*named, *unnamed]}}


def _base_tokenizer(folder: Path) -> Path | None:
    """The tokenizer.model of the model that a folder was tuned from, where the folder has none and it is at hand."""
    from huggingface_hub import try_to_load_from_cache

    from . import metadata

    if (folder / "tokenizer.model").is_file():
        return None
    facts = (metadata.read(folder) or {}).get("base_model") or {}
    base = str(artefacts.read(folder).get("base") or facts.get("name") or "")
    beside = user_path(base) / "tokenizer.model"
    if beside.is_file():
        return beside.resolve()
    cached = try_to_load_from_cache(base, "tokenizer.model") if metadata.HUB_ID.fullmatch(base) else None
    return Path(cached) if isinstance(cached, str) else None


def _result(config, sizes: dict, checks: dict, parameters: int, family: str) -> dict:
    choices = {kind: int(parameters * bits / 8) for kind, bits in CHOICES.items()}
    lines = []
    for name, size in sizes.items():
        bits = "" if name.startswith("mmproj") else f"  ({8 * size / parameters:.1f} bits a weight)"
        lines.append(f"{mib(size):>12}  {name}{bits}")
    if not config.quantize:
        shown = ", ".join(f"{kind} {mib(size)} ({CHOICES[kind]:.2f} bits)" for kind, size in choices.items())
        lines.append(f"--quantize would make some: {shown}")
    lines += [f"verified {name}: {', '.join(found.check for found in checks[name])}" for name in sizes]
    return {
        "output": str(user_path(config.output)),
        "family": family,
        "parameters": parameters,
        "files": sizes,
        "choices": choices,
        "checks": {name: [asdict(finding) for finding in found] for name, found in checks.items()},
        "summary": "\n".join(lines),
    }


# ---- asking


def answer(tools: Tools, file: Path, prompt: str, max_new_tokens: int, context: int = 4096) -> str:
    """What llama.cpp answers to a prompt that is rendered already, with the likeliest token each time.

    Args:
        prompt: without the begin-of-sequence token, which llama.cpp puts there itself.

    Raises:
        EnvironmentUnfit: no llama-completion is there, or it fails.
    """
    if tools.completion is None:
        raise EnvironmentUnfit("llama-completion of llama.cpp not found (--llama-cpp, LLAMA_CPP, PATH)")
    with tempfile.NamedTemporaryFile(suffix=".txt") as text:  # as bytes: its last line break is part of the prompt
        text.write(prompt.encode())
        text.flush()
        flags = ["-no-cnv", "--no-display-prompt", "--temp", "0", "-n", max_new_tokens, "-c", context, "--offline"]
        said = _said([tools.completion, "-m", file, "-bf", text.name, *flags], "llama-completion")
    return said.removesuffix("[end of text]").strip()


def answer_about(
    tools: Tools, file: Path, towers: Path, question: str, media: list[tuple[str, Path]], most: int
) -> str:
    """What llama.cpp answers to one question with media, in the chat template of the file.

    Args:
        media: ("image" | "audio", a .png or .wav file) in order; they stand before the question.
        most: new tokens.

    Raises:
        EnvironmentUnfit: no llama-mtmd-cli is there, or it fails.
    """
    if tools.mtmd is None:
        raise EnvironmentUnfit("llama-mtmd-cli of llama.cpp not found (--llama-cpp, LLAMA_CPP, PATH)")
    given = [word for kind, medium in media for word in (f"--{kind}", medium)]
    flags = ["--jinja", "--temp", "0", "-n", most, "--offline"]
    return _said([tools.mtmd, "-m", file, "--mmproj", towers, *given, "-p", question, *flags], "llama-mtmd-cli").strip()


def _said(command: list, told: str) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", env=_quiet())
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if " E " in line or "error" in line] or ["no word of why"]
        raise EnvironmentUnfit(f"{told} failed: {lines[-1].strip()[:200]}")
    return done.stdout.strip()
