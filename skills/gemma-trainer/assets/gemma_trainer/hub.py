"""Whether the hub can be asked, and whether a model can be had, is a Gemma, and has all that training needs."""

from __future__ import annotations

import functools
from pathlib import Path

from .errors import CannotLoad
from .packages import Item, fail, gib, ok, told, warn

TIMEOUT = 4.0  # seconds


@functools.cache
def unreachable() -> str:
    """Why the hub cannot be asked, "" where it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "offline by HF_HUB_OFFLINE"
    try:
        answer = get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as problem:
        return told(problem)
    return f"it answers {answer.status_code}" if answer.status_code >= 500 else ""


def connection() -> Item:
    from huggingface_hub import get_token

    try:
        token = get_token()
    except OSError as problem:
        return warn(f"the hub's folder cannot be read ({told(problem)})", "export HF_HOME=/a/folder/of/yours")
    problem, facts = unreachable(), {"token": bool(token)}
    if problem.startswith("offline"):
        return ok(f"{problem}: models must be local", offline=True, **facts)
    if problem:
        mend = "check the network and HTTPS_PROXY; or HF_HUB_OFFLINE=1 with models that are local"
        return warn(f"cannot be reached ({problem}): models must be local", mend, offline=False, **facts)
    shown = "a token is set" if token else "no token is set, which gated models need (`hf auth login`)"
    return ok(f"can be reached; {shown}", offline=False, **facts)


def is_local(model: str) -> bool:
    return model == "demo" or model.startswith((".", "/", "~")) or model.count("/") > 1 or Path(model).is_dir()


def gemma(name: str) -> Item:
    """Whether a model can be had, is a Gemma that is supported, and has all that training needs."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name == "demo":
        return ok("demo: a tiny random Gemma 4, made when it is needed")
    if is_local(name):
        return _whole_model(name, name)
    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise CannotLoad(f"{name} is no folder here, and no name that the hub could have: check it") from None
    if isinstance(config, str) and _has_weights(Path(config).parent):
        return _whole_model(str(Path(config).parent), f"{name} in the local cache")
    if problem := unreachable():
        what = f"{name} is not in the local cache, and the hub cannot be asked ({problem})"
        return fail(what, f"go online and run `hf download {name}`, or give --model a folder")
    return _model_on_hub(name)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))


def _whole_model(folder: str, shown: str) -> Item:
    from . import models
    from .collator import MultimodalCollator

    config, family = models.load_config(folder)
    processor = models.load_processor(folder, config)
    MultimodalCollator(processor)  # which refuses a chat template that is missing, or not its family's
    if not _has_weights(Path(folder)):
        return fail(f"{shown} has no weights (*.safetensors)", "copy the model's own there", family=family.name)
    return ok(f"{shown}: {family.name}, with processor, chat template and weights", family=family.name)


def _model_on_hub(name: str) -> Item:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    from . import models

    try:
        HfApi().auth_check(name)
        files = HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT).siblings or []
    except GatedRepoError:
        mend = "accept its licence on its model page, then log in with `hf auth login`"
        return fail(f"{name} is gated, and access has not been granted", mend, gated=True)
    except RepositoryNotFoundError:
        raise CannotLoad(
            f"{name} is not on the hub, or is private: check the name, or log in with `hf auth login`"
        ) from None
    _, family = models.load_config(name)
    size = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
    return ok(f"{name}: {family.name}, {gib(size)} to be downloaded", family=family.name, size=size)
