"""An adapter merged into its base model, tensor by tensor, as PEFT's own layers do it.

The model is built without weights, and the adapter put on it. Then the base's files are read and written anew one
tensor at a time; a tensor that the adapter changes is handed to its layer in float32, merged there, and rounded once.
So names, files and dtypes stay those of the base, and no more than one layer is in memory.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import models
from .errors import CannotLoad
from .run_check import near_name
from .tensors import FLOATS, Planned, Stored, regrouped, stored_files

# Between a base's name of a module and a parameter's, what PEFT puts around the module.
INSIDE = re.compile(r"\.(base_layer|token_adapter|original_module|modules_to_save\.default)(?=\.|$)")
# Beginnings that change the base's weights, too: what is saved does not fit the weights of the base alone.
OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def base_folder(run: Path, base: str | None, facts: dict) -> tuple[Path, str]:
    """(folder of the base model's files, its name): from the disk, the cache or the hub.

    Args:
        base: what the user names; without it what the adapter belongs to, in the revision that it was trained on.

    Raises:
        CannotLoad: it is not to be had, or is no whole model in full precision.
    """
    adapter_in(run)
    name, revision = base or models.base_of(str(run)), None if base else (facts.get("base_model") or {}).get("revision")
    folder = Path(name) if Path(name).is_dir() else _downloaded(name, revision)
    config, _ = models.load_config(str(folder))
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        plain = re.sub(r"-(unsloth-)?bnb-4bit$", "", name)
        such = f" {plain}" if plain != name else ", which its model page names"
        raise CannotLoad(
            f"{name} holds quantized weights ({getattr(method, 'value', method)}), and an adapter is merged into those "
            f"of full precision: give the model that it was made from with --base{such}"
        )
    return folder, name


def _downloaded(name: str, revision: str | None) -> Path:
    """The folder of a model of the hub, in the local cache."""
    from huggingface_hub import snapshot_download

    models.load_config(name)  # which tells what to do where it is not to be had
    wanted = ["*.safetensors", "*.json", "*.jinja", "*.model", "README.md"]
    return Path(models.loading(name, lambda: snapshot_download(name, revision=revision, allow_patterns=wanted)))


def adapter_in(run: Path):
    """The PEFT config of an adapter that can be merged.

    Raises:
        CannotLoad: none is there, or a kind whose effect is no sum of weights.
    """
    if not (run / "adapter_config.json").is_file():
        from .checkpoints import checkpoints

        if (run / "config.json").is_file():
            raise CannotLoad(f"{run} is a whole model already: there is nothing to merge")
        whole = checkpoints(run)
        last = f"; its last whole checkpoint is {whole[-1]}" if whole else ""
        raise CannotLoad(f"{run} has no adapter: no model has been saved yet{last}")
    if not next(run.glob("adapter_model.*"), None):
        raise CannotLoad(f"{run} has an adapter_config.json, but no weights (adapter_model.safetensors)")
    config = models.adapter_config(str(run))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    began = str(getattr(config, "init_lora_weights", "")).lower()
    if kind != "LORA":
        raise CannotLoad(f"{run} is an adapter of the kind {kind}, which is not merged: serve it as it is")
    if began.startswith(OWN_BASE):
        raise CannotLoad(
            f"{run} began from weights of its own ({began}), which the base does not have: save it anew with "
            "path_initial_model_for_weight_conversion of PEFT"
        )
    for name, told in {
        "layer_replication": "repeats layers",
        "lora_bias": "has biases of its own",
        "alora_invocation_tokens": "acts only behind certain tokens",
    }.items():
        if getattr(config, name, None):
            raise CannotLoad(f"{run} {told} ({name}), which no weights of the base can hold: serve it as it is")
    return config


def put_on(run: Path, config, reward: bool):
    """The base model without weights, and on it the adapter with its own.

    Returns:
        (the base model, `PeftModel` around it, {name: the base's tensor}, the names of a tensor that has two).

    Raises:
        CannotLoad: the adapter does not fit the model: keys without a place, or missing, or misshapen.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    skeleton = models.skeleton(config, reward)
    _blank(skeleton)
    blanks, tied = skeleton.state_dict(keep_vars=True), _tied(skeleton)
    modules = [name for name, _ in skeleton.named_modules()]
    try:
        held = load_peft_weights(str(run), device="cpu")
        model = PeftModel.from_pretrained(skeleton, run, torch_device="cpu", low_cpu_mem_usage=True)
        known = get_peft_model_state_dict(model, save_embedding_layers=True)
        needed = get_peft_model_state_dict(model, save_embedding_layers=False)
    except Exception as problem:
        line = (str(problem).strip().splitlines() or [""])[0][:200]
        raise CannotLoad(f"{run} does not fit the base model ({type(problem).__name__}: {line})") from None
    for told, keys in (
        ("has no place for", [key for key in held if key not in known]),
        ("needs, and the adapter lacks,", [key for key in needed if key not in held]),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" * (len(keys) > 1)
            raise CannotLoad(
                f"{run} does not fit the base model, which {told} {keys[0]}{more}{near_name(keys[0], modules)}"
            )
    return skeleton, model, blanks, tied


def _blank(skeleton) -> None:
    """Make a model's weights zeros that take no memory; PEFT would move an adapter to the meta device, too."""
    made = {}
    for name, value in list(skeleton.named_parameters(remove_duplicate=False)):
        zeros = torch.nn.Parameter(torch.zeros(1).expand(value.shape), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(owner), leaf, made.setdefault(id(value), zeros))


def _tied(skeleton) -> set[str]:
    """The names of the embeddings and of the head, where they are one tensor."""
    head = skeleton.get_output_embeddings()
    if head is None:
        return set()
    same = {name for name, value in skeleton.named_parameters(remove_duplicate=False) if value is head.weight}
    return same if len(same) > 1 else set()


def changes_of(model, blanks: dict, tied: set[str]) -> dict[str, Callable]:
    """What an adapter makes of its base: {name of a tensor in the base: base's tensor, float32 -> the merged one}. For
    a tensor that the base does not have, such as a reward head, None is taken.

    Args:
        model, blanks, tied: of `put_on`.

    Raises:
        CannotLoad: one tensor would have to become two.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    inner, changes = model.base_model.model, {}
    for name, module in inner.named_modules():
        if isinstance(module, BaseTunerLayer):
            attribute = getattr(module, "parameter_name", "weight")
            changes[f"{INSIDE.sub('', name)}.{attribute}"] = functools.partial(_merged, module, attribute)
    for name, parameter in inner.named_parameters():
        own = INSIDE.sub("", name)
        if own not in changes and parameter is not blanks.get(own, parameter):  # trained whole
            changes[own] = functools.partial(_replaced, parameter)
    together = getattr(model.active_peft_config, "ensure_weight_tying", False) or any(
        getattr(getattr(module, "token_adapter", None), "tied_adapter", None) for module in inner.modules()
    )
    if tied & set(changes) and not together:
        raise CannotLoad(
            f"the adapter changes {min(tied & set(changes))} by itself, which in the base is one tensor with "
            f"{min(tied - {min(tied & set(changes))})}: it cannot be merged. Serve it as it is"
        )
    return changes


@torch.no_grad()
def _merged(module, attribute: str, base: torch.Tensor) -> torch.Tensor:
    layer = module.get_base_layer()
    without = getattr(layer, attribute)
    setattr(layer, attribute, torch.nn.Parameter(base, requires_grad=False))
    try:
        module.merge(safe_merge=True, adapter_names=["default"])
        return getattr(layer, attribute).data
    except (ValueError, RuntimeError, NotImplementedError) as problem:
        if "memory" in str(problem):
            raise
        raise CannotLoad(f"the adapter cannot be merged ({str(problem).strip().splitlines()[0][:200]})") from None
    finally:
        setattr(layer, attribute, without)
        module.merged_adapters.clear()


def _replaced(trained: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    return trained.detach()


class Merge:
    """The files of a merged model: `files` is what to write. As they are written, `adapted` counts the tensors that the
    adapter is for, and `changed` those that became others. `untouched` names those that the adapter is not for.

    Args:
        run, base: folders of the adapter and of its base.
        dtype: of all numbers, spelled as in a file; None for those of the base.
        limit: bytes of a file; None for the base's own files.

    Raises:
        CannotLoad: the adapter does not fit, or a tensor that it changes is stored in another form.
    """

    def __init__(self, run: Path, base: Path, dtype: str | None = None, limit: int | None = None):
        adapter = adapter_in(run)
        self.config, _ = models.load_config(str(base))
        self.reward = "SEQ_CLS" in str(adapter.task_type)
        with quiet():
            skeleton, model, blanks, tied = put_on(run, self.config, self.reward)
        self.architecture, self.dtype = type(skeleton).__name__, dtype
        self.changes = changes_of(model, blanks, tied)
        self.changed = self.adapted = 0  # as they are written
        self._wanted = self._kept = 0.0
        stored = stored_files(base)
        places = self._places(skeleton, blanks, [tensor.name for held in stored.values() for tensor in held])
        found = {tied_name for place in places.values() for tied_name in (tied if place in tied else {place})}
        self.added = [name for name in self.changes if name not in found]
        if lost := [name for name in self.added if not name.startswith("score.")]:
            raise CannotLoad(f"the adapter changes {lost[0]}, which is not in the files of {base}")
        self.untouched = [name for name, place in places.items() if place not in self.changes]
        self.files = {name: [self._planned(tensor, places) for tensor in held] for name, held in stored.items()}
        for name in self.added:
            value = self.changes[name](None)
            self.files[list(self.files)[-1]].append(
                Planned.of(name, "F32", tuple(value.shape), lambda value=value: value)
            )
        if limit:
            self.files = regrouped(self.files, limit)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(tensor.size for held in self.files.values() for tensor in held)

    @property
    def kept(self) -> float:
        """How much of the change is left after rounding to the dtype of the files: 1 is all of it, along its own
        direction. A change of less than half a step of a number is lost; that of a short run in 16 bits may be."""
        return self._kept / self._wanted if self._wanted else 1.0

    def _places(self, skeleton, blanks: dict, keys: list[str]) -> dict[str, str]:
        """What transformers calls each key of the files as it loads them."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        steps = get_model_conversion_mapping(skeleton)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        places = {}
        for key in keys:
            place, converted = rename_source_key(key, renamings, converters, skeleton.base_model_prefix, blanks)
            if converted and place in self.changes:
                raise CannotLoad(
                    f"the base keeps {place} in another form ({key}), which the adapter cannot be merged into: load it "
                    "with transformers, save it with save_pretrained, and give that as --base"
                )
            places[key] = place
        return places

    def _planned(self, tensor: Stored, places: dict[str, str]) -> Planned:
        change = self.changes.get(places[tensor.name])
        dtype = self.dtype if self.dtype and tensor.dtype in FLOATS else tensor.dtype
        if change is not None:
            return Planned.of(tensor.name, dtype, tensor.shape, lambda: self._make(tensor, change, FLOATS[dtype]))
        if dtype == tensor.dtype:
            return Planned(tensor.name, dtype, tensor.shape, tensor.size, tensor.pieces)
        return Planned.of(tensor.name, dtype, tensor.shape, tensor.read)

    def _make(self, tensor: Stored, change: Callable, dtype: torch.dtype) -> torch.Tensor:
        merged = change(tensor.read())
        if merged.shape != tensor.shape:
            raise CannotLoad(f"the adapter makes {tensor.name} another shape than it has in the base")
        changed = False
        for new, old in zip(_slices(merged), _slices(tensor.read()), strict=True):
            wanted, rounded = new - old, new.to(dtype).float() - old.to(dtype).float()
            changed |= bool(rounded.any())
            self._wanted += float((wanted * wanted).sum())
            self._kept += float((wanted * rounded).sum())
        self.adapted, self.changed = self.adapted + 1, self.changed + changed
        return merged


def _slices(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor as float32, some million numbers at a time."""
    return tensor.reshape(-1).float().split(2**22)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PEFT warns of things that are looked at here."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
