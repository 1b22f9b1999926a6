"""Whether a .gguf file, or the one that a Modelfile names, is its model and answers as the run did."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from . import artefacts, asking, export_check, gguf_files, llama_cpp
from .answer_checks import normalize
from .errors import UsageError
from .files import user_path
from .media import open_audio, open_image
from .run_check import Finding

MARK = "<__media__>"  # where llama-mtmd-cli puts a medium: llama.cpp, tools/mtmd/mtmd.cpp, mtmd_default_marker
RATE = 16_000  # samples a second, of every Gemma that hears


def check(config) -> dict:
    """Verify a .gguf file against its model, and ask it through llama.cpp; `config` is `export.CheckFlags`.

    Raises:
        CannotLoad: no whole GGUF file.
        UsageError: a folder of several, or a Modelfile of another model.
    """
    path = user_path(config.path)
    file, towers = files_of(path)
    made = artefacts.read(path)
    folder = Path(made["model"]) if Path(made.get("model") or "-").is_dir() else None
    findings = gguf_files.verify(file, folder)
    if folder is None:
        findings.append(Finding("model", None, "the folder it was made from is gone: only the file was looked at"))
    if towers:
        findings += gguf_files.verify(towers, folder)
    asked: list[dict] = []
    if not any(finding.passed is False for finding in findings):
        samples, told = export_check.known_answers(config)
        tools = llama_cpp.find_tools()
        if tools.completion is None:
            findings.append(Finding("answers", None, "llama-completion not found (LLAMA_CPP, PATH): it was not asked"))
        else:
            template = gguf_files.value(gguf_files.open_gguf(file), "tokenizer.chat_template")
            asked = [found for sample in samples if (found := ask(tools, file, towers, template, sample)) is not None]
            findings.append(_answers(asked, samples, told))
    return export_check.result(str(path), artefacts.kind_of(path), findings, asked)


def files_of(path: Path) -> tuple[Path, Path | None]:
    """(the language model, its towers or None) of a .gguf file, a folder with one, or a folder with a Modelfile."""
    if (path / "Modelfile").is_file():
        text = (path / "Modelfile").read_text(encoding="utf-8", errors="replace")
        named = [path / name.strip().strip('"') for name in re.findall(r"^FROM (.+)$", text, re.M)]
        if not named or named[0].suffix != ".gguf":
            raise UsageError(f"{path}: its Modelfile names no .gguf file: check the model it names")
        return named[0], next((file for file in named[1:] if file.suffix == ".gguf"), None)
    place = path if path.is_dir() else path.parent
    towers = sorted(place.glob("mmproj*.gguf"))
    files = [path] if path.is_file() else sorted(set(place.glob("*.gguf")) - set(towers))
    if len(files) != 1:
        raise UsageError(f"{path}: {len(files)} models are there; name one of {', '.join(file.name for file in files)}")
    return files[0], towers[0] if towers and files[0] not in towers else None


def ask(tools, file: Path, towers: Path | None, template: str, sample: dict) -> dict | None:
    """{"name", "same", "said"} of a sample, None where llama.cpp's programs cannot be asked it: media in any but the
    one turn, or without towers or llama-mtmd-cli.

    Args:
        template: the file's chat template, which llama.cpp puts media questions into itself.
    """
    if "answer" not in sample:
        return None
    messages = sample["row"]["messages"][:-1]
    if sample["kinds"]:
        if len(messages) != 1 or towers is None or tools.mtmd is None:
            return None
        with tempfile.TemporaryDirectory(prefix="gemma-media-") as place:
            question, media = _question(messages[0]["content"], Path(place))
            said = llama_cpp.answer_about(tools, file, towers, question, media, asking.ANSWER_TOKENS)
    else:
        text = gguf_files.rendered(template, messages, sample["row"].get("tools"))
        said = llama_cpp.answer(tools, file, text.removeprefix("<bos>"), asking.ANSWER_TOKENS)
    return {"name": sample["name"], "same": normalize(said) == normalize(sample["answer"]), "said": said}


def _question(content: list[dict], place: Path) -> tuple[str, list[tuple[str, Path]]]:
    """(the text with marks where media are, [(kind, a file that llama.cpp reads)]) of a message's blocks."""
    import soundfile

    text, media = "", []
    for block in content:
        kind = block["type"]
        if kind == "text":
            text += block["text"]
            continue
        file = place / f"{len(media)}.{'png' if kind == 'image' else 'wav'}"
        if kind == "image":
            open_image(block[kind]).save(file)
        else:
            soundfile.write(file, open_audio(block[kind], RATE)[0], RATE)
        text += MARK
        media.append((kind, file))
    return text, media


def _answers(asked: list[dict], samples: list[dict], told: str) -> Finding:
    """What came of asking. Fewer bits may change an answer, so that only a model that gives none of them is another."""
    if not asked:
        why = "none of them can be put to llama.cpp's programs" if samples else "no answers are known to compare with"
        return Finding("answers", None, why)
    same = sum(one["same"] for one in asked)
    passed = True if same == len(asked) else None if same else False
    left = f"; {len(samples) - len(asked)} more could not be asked" if len(asked) < len(samples) else ""
    return Finding("answers", passed, f"{same} of {len(asked)} are those {told}{left}")
