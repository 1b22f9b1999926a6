"""Which packages are installed, and whether they fit our ranges, the tested sets, each other, and the device."""

from __future__ import annotations

import functools
import importlib
import io
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from . import precision
from .errors import CannotLoad, EnvironmentUnfit, TrainerError

OK, WARN, FAIL = "OK", "WARN", "FAIL"
GIB = 2**30
# The versions that matter, of constraints.txt and constraints-newest.txt. Unsloth refuses the newest.
TESTED = {
    "default": {
        "torch": "2.14.1",
        "torchvision": "0.29.1",
        "transformers": "5.17.0",
        "trl": "1.14.2",
        "peft": "0.21.2",
        "datasets": "4.8.5",
        "accelerate": "1.15.0",
        "unsloth": "2026.10.9",
        "bitsandbytes": "0.50.2",
    },
    "newest": {
        "torch": "2.14.1",
        "torchvision": "0.29.1",
        "transformers": "5.24.0",
        "trl": "1.16.0",
        "peft": "0.21.2",
        "datasets": "5.2.0",
        "accelerate": "1.15.0",
    },
}
CORE = tuple(TESTED["newest"])
CUDA_ONLY = ("unsloth", "unsloth_zoo", "xformers", "bitsandbytes")  # nothing uses them elsewhere
IMPORTED = ("transformers", "datasets", "accelerate", "trl")  # PEFT would take as long again
BITSANDBYTES = ">=0.48.1"  # the range of the extra "quantize"
REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"


# ---- items


@dataclass(frozen=True)
class Item:
    """What a check found, in one line; `remedy` is the command or flag that mends it, empty where it is OK."""

    verdict: str
    finding: str
    remedy: str = ""
    facts: dict = field(default_factory=dict)
    name: str = ""


def ok(finding: str, **facts) -> Item:
    return Item(OK, finding, "", facts)


def warn(finding: str, remedy: str, **facts) -> Item:
    return Item(WARN, finding, remedy, facts)


def fail(finding: str, remedy: str, **facts) -> Item:
    return Item(FAIL, finding, remedy, facts)


class NotKnown(Exception):
    """A check needs a package that another item is about."""


def run(name: str, check: Callable[[], Item], debug: bool = False) -> Item:
    """The item of a check; that it cannot be made is a finding, too."""
    try:
        item = check()
    except NotKnown as missing:
        item = warn(f"not known, since {missing} does not work here", f"mend {missing} first")
    except TrainerError as problem:
        item = fail(*_finding_and_remedy(problem))
    except (Exception, SystemExit) as problem:
        if debug:
            traceback.print_exc()
        absent = problem.name if isinstance(problem, ModuleNotFoundError) else None
        remedy = f"pip install {absent}" if absent else "--debug shows the traceback"
        item = fail(f"cannot be checked ({told(problem)})", remedy)
    return replace(item, name=name, finding=" ".join(item.finding.split())[:400])


def _finding_and_remedy(problem: TrainerError) -> list[str]:
    """Our errors say what is wrong, then what to do."""
    parts = re.split(r"\n|: (?=(?:pip|accept|copy|use|go|check|install|drop) )", str(problem), maxsplit=1)
    if len(parts) == 2:
        return parts
    gemma = "give --model the folder or the hub id of a Gemma 3, 3n or 4; `--model demo` is always there"
    return [parts[0], gemma if isinstance(problem, CannotLoad) else "--debug shows more"]


def told(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:200]


def gib(size: float) -> str:
    """A number of bytes for a reader."""
    return f"{size / GIB:,.{0 if size >= 100 * GIB else 1}f} GiB"


# ---- versions


def version_of(name: str):
    """The version of an installed package, None where it is not installed.

    Raises:
        EnvironmentUnfit: its metadata are damaged.
    """
    from packaging.version import Version

    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None
    except Exception:  # no METADATA file, or none that can be read: each Python has its own error
        raise EnvironmentUnfit(
            f"the metadata of {name} are damaged: pip install --force-reinstall --no-deps {pinned(name)}"
        ) from None


def public_version(name: str) -> str | None:
    """A version without its build (2.14.1, not 2.14.1+cpu), None where there is none that can be read."""
    from packaging.version import Version

    try:
        return Version(metadata.version(name)).public
    except Exception:  # see `version_of`
        return None


def ranges() -> dict:
    """{package: `SpecifierSet`}, as requirements.txt has them."""
    from packaging.requirements import Requirement

    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines()]
    return {found.name: found.specifier for found in map(Requirement, filter(None, lines))}


def nearest_set() -> str:
    """The tested set that most of the installed versions are of; the default one where both fit as well."""
    installed = {name: public_version(name) for name in CORE}
    return max(TESTED, key=lambda kind: sum(TESTED[kind][name] == installed[name] for name in CORE))


def pinned(name: str) -> str:
    """What to install of a package: the tested version where there is one."""
    version = {**TESTED["default"], **TESTED[nearest_set()]}.get(name) if name in TESTED["default"] else None
    return f"{name}=={version}" if version else name


def package(name: str) -> Item:
    """A package of the core: outside our range it fails, elsewhere it is compared with the tested versions."""
    from packaging.version import Version

    found, wanted = version_of(name), ranges()[name]
    tested = sorted({Version(versions[name]) for versions in TESTED.values()})
    mend = f"pip install {pinned(name)}"
    facts = {"version": found and str(found), "wanted": str(wanted), "tested": [str(version) for version in tested]}
    if found is None:
        return fail("not installed", mend, **facts)
    if not wanted.contains(found, prereleases=True):
        why = " (its fused loss head fails on CPU and MPS)" if (name, found.release[:2]) == ("trl", (1, 15)) else ""
        return fail(f"{found} is outside {wanted}{why}", mend, **facts)
    both = " and ".join(map(str, tested))
    if Version(public_version(name)) in tested:
        return ok(f"{found}, tested", **facts)
    series = [version.release[:2] for version in tested]
    if found.release[:2] in series and not found.is_prerelease:
        return ok(f"{found}, a patch away from the tested {both}", **facts)
    if tested[0] < found < tested[-1]:
        return ok(f"{found}, between the tested {both}", **facts)
    older = "older" if found < tested[0] else "newer"
    return warn(f"{found} is {older} than the tested {both}", f"if anything fails: {mend}", **facts)


def other_packages() -> Item:
    """The packages of requirements.txt beyond the core, and which tested set the core is of."""
    wrong, needed = [], []
    others = {name: wanted for name, wanted in ranges().items() if name not in CORE}
    for name, wanted in others.items():
        found = public_version(name)
        if found is None or not wanted.contains(found, prereleases=True):
            wrong.append(f"{name} {found} is outside {wanted}" if found else f"{name} is not installed")
            needed.append(f"'{name}{wanted}'")
    if wrong:
        return fail("; ".join(wrong), f"pip install {' '.join(needed)}", wrong=wrong)
    whole = [kind for kind in TESTED if all(TESTED[kind][name] == public_version(name) for name in CORE)]
    told_set = f"the core is the {whole[0]} tested set" if whole else "the core is no tested set as a whole"
    return ok(f"{len(others)} others are in their ranges; {told_set}", set=whole[0] if whole else None)


def requirements(backend: str = "auto") -> Item:
    """What the packages that matter require of others, as their own metadata tell it."""
    unused = CUDA_ONLY if backend == "hf" or device() != "cuda" else ()
    watched = [*TESTED["default"], "unsloth_zoo", "xformers", "triton", "timm", "huggingface_hub", "tokenizers"]
    unmet = [(owner, *found) for owner in watched if public_version(owner) for found in _unmet(owner)]
    if not unmet:
        return ok("what the packages require of each other is met")
    shown = [f"{owner} requires {wanted}, {found or 'not'} installed" for owner, wanted, found, _ in unmet]
    mend = "pip install " + " ".join(dict.fromkeys(need for *_, need in unmet))
    broken = any(found and owner not in unused for owner, _, found, _ in unmet)
    rest = f" ({len(shown) - 4} more)" if len(shown) > 4 else ""
    mend += ", or --backend hf" if all(owner in CUDA_ONLY for owner, *_ in unmet) and not unused else ""
    return (fail if broken else warn)("; ".join(shown[:4]) + rest, mend, unmet=shown)


def _unmet(owner: str) -> Iterator[tuple[str, str | None, str]]:
    """(requirement, the version that is there, what to install) of each requirement that is not met."""
    from packaging.requirements import Requirement

    for text in metadata.requires(owner) or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = public_version(wanted.name)
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            tested = TESTED["default"].get(wanted.name)
            fits = tested and wanted.specifier.contains(tested)
            need = f"{wanted.name}=={tested}" if fits else f"'{wanted.name}{wanted.specifier}'"
            yield f"{wanted.name}{wanted.specifier}", found, need


# ---- imports


@functools.cache
def import_problem(name: str) -> str:
    """Why a package cannot be imported, "" where it can. What failed once is not tried again: it would fail anew in
    another way."""
    try:
        importlib.import_module(name)
        return ""
    except (Exception, SystemExit) as problem:
        return told(problem)


def need_torch():
    """The torch module; NotKnown where it cannot be imported."""
    if import_problem("torch"):
        raise NotKnown("torch")
    return importlib.import_module("torch")


def device() -> str:
    """The type of the best device here; "cpu" also where torch cannot tell."""
    return "cpu" if import_problem("torch") else precision.device_type()


def torch_pair() -> Item:
    """Whether torch and torchvision are made for each other: an operator of the latter runs."""
    if problem := import_problem("torch"):
        return fail(f"torch cannot be imported ({problem})", f"pip install --force-reinstall {pinned('torch')}")
    torch = importlib.import_module("torch")
    major, minor = map(int, torch.__version__.split(".")[:2])
    versions = f"torch {torch.__version__}, torchvision {public_version('torchvision')}"
    partner = f"pip install --force-reinstall --no-deps 'torchvision~=0.{minor + 15}.0'"  # 0.15 came with 2.0
    mend = partner if major == 2 else f"pip install {pinned('torch')} {pinned('torchvision')}"
    if problem := import_problem("torchvision"):
        return fail(f"{versions}: the latter cannot be imported ({problem})", mend)
    try:
        from torchvision.ops import nms

        boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.0], [4.0, 4.0, 6.0, 6.0]])
        kept = nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist()
    except Exception as problem:
        return fail(f"{versions}: an operator does not work ({told(problem)})", mend)
    return ok(f"{versions}: operators work") if kept == [0, 2] else fail(f"{versions}: operators are wrong", mend)


def imports() -> Item:
    """Whether the libraries that train can be imported at all."""
    problems = {name: import_problem(name) for name in IMPORTED if public_version(name)}
    wrong = {name: problem for name, problem in problems.items() if problem}
    if not wrong:
        return ok(f"{', '.join(problems)} can be imported")
    shown = "; ".join(f"{name} cannot be imported ({problem})" for name, problem in wrong.items())
    return fail(shown, f"pip install --force-reinstall --no-deps {' '.join(map(pinned, wrong))}")


# ---- packages for NVIDIA GPUs


def bitsandbytes() -> Item:
    """Whether weights can be held in 4 bits: a small tensor is, and comes back."""
    from packaging.specifiers import SpecifierSet

    if device() != "cuda":
        return ok("not needed here: 4-bit weights are for NVIDIA GPUs")
    found, mend = version_of("bitsandbytes"), f"pip install {pinned('bitsandbytes')}"
    if found is None:
        return warn("not installed: weights will not be in 4 bits", mend)
    if not SpecifierSet(BITSANDBYTES).contains(found, prereleases=True):
        return fail(f"{found} is outside {BITSANDBYTES}", mend)
    try:
        error = four_bit_error("cuda")
    except Exception as problem:
        return fail(f"{found} does not work ({told(problem)})", f"{mend} --force-reinstall, or --quantize none")
    if not error < 0.2:
        return fail(f"{found} gives back other numbers in 4 bits (off by {error:.2g})", f"{mend}, or --quantize none")
    return ok(f"{found}: 4-bit weights work", version=str(found), error=error)


def four_bit_error(place: str) -> float:
    """How far numbers from -1 to 1 are off after they were in nf4, whose widest gap there is 0.3."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = torch.linspace(-1, 1, 4096, device=place)
    return (dequantize_4bit(*quantize_4bit(values, quant_type="nf4")) - values).abs().max().item()


def triton(backend: str = "auto") -> Item:
    """Triton compiles Unsloth's kernels, for which it needs a C compiler."""
    if device() != "cuda":
        return ok("not needed here: it is for NVIDIA GPUs")
    complain = fail if _unsloth_is_used(backend) else warn
    found = public_version("triton")
    if problem := import_problem("triton"):
        return complain(f"{found or 'none'} cannot be imported ({problem})", f"pip install {pinned('torch')} triton")
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))) and sys.platform != "win32":
        return complain(f"{found}, but no C compiler for its kernels", "apt-get install gcc, or set CC")
    return ok(f"{found} can be imported", version=found)


def xformers(backend: str = "auto") -> Item:
    if device() != "cuda" or not _unsloth_is_used(backend):
        return ok("not needed here: only Unsloth uses it")
    found, mend = (
        public_version("xformers"),
        "pip uninstall xformers, or one made for this torch: pip install -U xformers",
    )
    if found is None:
        return ok("not installed: Unsloth takes torch's own attention")
    if problem := import_problem("xformers.ops"):
        return warn(f"{found} cannot be imported ({problem})", mend)
    if not getattr(importlib.import_module("xformers"), "_has_cpp_library", True):
        return warn(f"{found} was built for another torch, and cannot use its kernels", mend)
    return ok(f"{found} can be imported", version=found)


def _unsloth_is_used(backend: str) -> bool:
    return backend != "hf" and public_version("unsloth") is not None


# ---- media


def audio() -> Item:
    """Whether sound can be read: a short clip is written in memory and read again."""
    mend = "pip install --force-reinstall soundfile"
    if problem := import_problem("soundfile"):
        return fail(f"soundfile cannot be imported ({problem})", mend)
    import numpy
    import soundfile

    clip, file = numpy.linspace(-0.5, 0.5, 1600, dtype="float32"), io.BytesIO()
    soundfile.write(file, clip, 16000, format="WAV")
    read, rate = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    if rate != 16000 or read.shape != clip.shape or abs(read - clip).max() > 1e-3:
        return fail("soundfile reads other sound than it wrote", mend)
    if find_spec("librosa") is None:
        return fail("librosa is missing: no other rate than the model's can be read", "pip install 'librosa>=0.11'")
    return ok(f"soundfile {soundfile.__version__} reads clips; librosa is there")


def images() -> Item:
    """Whether pictures can be read: a PNG and a JPEG are written in memory and read again."""
    mend = "pip install --force-reinstall pillow"
    if problem := import_problem("PIL.Image"):
        return fail(f"Pillow cannot be imported ({problem})", mend)
    import PIL
    from PIL import Image

    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (200, 40, 40)).save(file, kind)
        read = Image.open(io.BytesIO(file.getvalue())).convert("RGB").getpixel((4, 4))
        if max(abs(a - b) for a, b in zip(read, (200, 40, 40), strict=True)) > 8:
            return fail(f"Pillow reads another {kind} than it wrote", mend)
    return ok(f"Pillow {PIL.__version__} reads pictures")
