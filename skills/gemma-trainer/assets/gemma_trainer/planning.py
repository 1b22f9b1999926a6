"""What a run would take of memory, on this machine or another, and what to change where that is too much."""

from __future__ import annotations

import dataclasses
import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import forecast, models, ranks
from .cli import note
from .errors import OutOfMemory
from .forecast import Memory, Setting, smallest_change, spread
from .machine import memory_limit
from .outcome import described
from .precision import Precision, choose
from .preparation import make_collators
from .recipe import checkpointing_of, dtype_of

if TYPE_CHECKING:
    from .heaviest import Measured

MIB = 2**20
CONTEXT = 600 * MIB  # what CUDA takes of a GPU before there is a tensor
OWN = 90 * MIB  # what training takes of a CPU's memory beside tensors: threads, and buffers that libraries keep

FEATURES = {"image": "pixel_values", "audio": "input_features"}  # what a batch has of each kind


@dataclass(frozen=True)
class Machine:
    """Where a run is forecast for. `available` and `base` (taken before there is a model) in bytes."""

    name: str
    precision: Precision
    available: int
    base: int


def this_machine(config) -> Machine:
    """The machine here, or, with --device-memory, a GPU of that size; of several ranks' the one with least room, so
    that all decide alike."""
    found = _machine_of_rank(config)
    available, base = zip(*ranks.gathered((found.available, found.base)), strict=True)
    return dataclasses.replace(found, available=min(available), base=max(base))


def _machine_of_rank(config) -> Machine:
    import psutil
    import torch

    if config.device_memory:
        precision = Precision("cuda", "bfloat16", "bfloat16 on cuda: as --device-memory asks")
        if config.precision in ("fp16", "fp32"):
            precision = choose(config.precision, "cuda")
        return Machine(f"a GPU of {config.device_memory:g} GB", precision, round(config.device_memory * 2**30), CONTEXT)
    precision = choose(config.precision)
    if precision.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return Machine(torch.cuda.get_device_name(), precision, free + CONTEXT, CONTEXT)
    for name in ("peft", "trl", "trl.trainer.sft_trainer"):  # a run has them, so they are part of what it takes
        importlib.import_module(name)
    if precision.device == "mps":
        return Machine("the Mac's GPU", precision, torch.mps.recommended_max_memory(), 0)
    own, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available
    limit, used = memory_limit()
    if limit:
        free = min(free, max(limit - used, 0))
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks that share the memory
    return Machine("this machine", precision, free // beside + own, own + OWN)


class Forecast:
    """What a run with a config's flags, or with some of them changed, takes of memory at its worst moment.

    Args:
        config: the flags, with their defaults filled in.
        measured: the rows' lengths.
        model_config, processor: of the model.
    """

    def __init__(self, config, machine: Machine, measured: Measured, model_config, processor):
        self.config, self.machine, self.measured = config, machine, measured
        self.model_config, self.processor = model_config, processor
        self._known: dict[Setting, Memory] = {}
        quantizes = machine.precision.device == "cuda" and not config.full
        if config.device_memory:
            self.four_bit, self.may_quantize = quantizes and config.quantize != "none", quantizes
            self.told = models.FOUR_BIT if self.four_bit else "weights not quantized"
        else:
            self.four_bit, self.told = models.decide_quantization(
                config.quantize, machine.precision.device, config.full
            )
            self.may_quantize = quantizes and models.decide_quantization("auto", "cuda", False)[0]

    @property
    def setting(self) -> Setting:
        """What the flags say of what may be changed."""
        config = self.config
        checkpointing = checkpointing_of(config, self.machine.precision)
        shape = config.batch_size, config.grad_accum, self.four_bit, checkpointing, config.max_len, config.lora_r
        return Setting(*shape)

    def memory(self, setting: Setting) -> Memory:
        """What a run takes, of the heaviest batches the larger."""
        if setting not in self._known:
            config = dataclasses.replace(self.config, max_len=setting.max_len)
            collator = make_collators(config, self.processor, self.model_config)[0]
            batches = [collator(rows) for rows in self.measured.batches(setting.batch_size)]
            media = {kind for batch in batches for kind, key in FEATURES.items() if key in batch}
            played = [self._played(batch, setting, frozenset(media)) for batch in batches]
            self._known[setting] = max(played, key=lambda one: one.peak)
        return self._known[setting]

    def _played(self, batch, setting: Setting, media: frozenset) -> Memory:
        from .rehearsal import Step, play_deep

        config, precision = self.config, self.machine.precision

        def make_model(model_config):
            model = models.skeleton(model_config, config.task == "reward")
            if config.full:
                return model
            return models.add_lora(model, config.lora_targets, setting.lora_r, config.lora_alpha, config.lora_dropout)

        held, device = dtype_of(config, precision), precision.device
        # On a CPU weights that keep their dtype stay in the file until they are used, or copied.
        mapped = device == "cpu" and self.model_config.dtype == held and not (config.full and config.task == "dpo")
        step = Step(
            config.task, precision.torch_dtype, held, config.full, setting.four_bit, setting.checkpointing,
            setting.grad_accum > 1, device, media, mapped,
        )  # fmt: skip
        whole = Memory(base=self.machine.base, **play_deep(self.model_config, make_model, dict(batch), step).peak)
        text = self.model_config.get_text_config()
        embedding = text.vocab_size * text.hidden_size * held.itemsize
        return spread(whole, ranks.kind(), ranks.world(), embedding, text.num_hidden_layers)

    def verdict(self, setting: Setting) -> str:
        return forecast.verdict(self.memory(setting).peak, self.machine.available)

    def quantized(self, setting: Setting | None) -> str:
        """What is said of the weights' form."""
        return models.FOUR_BIT if setting and setting.four_bit else self.told

    def smaller(self) -> Setting | None:
        """The smallest change that makes the run fit; None where none does."""
        return smallest_change(
            self.setting, lambda setting: self.memory(setting).peak, self.machine.available, self.measured.longest,
            self.may_quantize, not self.config.full and not getattr(self.config, "adapter", None),
        )  # fmt: skip


# ---- what a dry run says


def plan(config, run, data, model_config, processor, collator) -> dict:
    """What a dry run says; `exit_code` 8 where the run does not fit."""
    ahead = look_ahead(config, data, model_config, processor, collator)
    setting, memory, verdict = ahead.setting, ahead.memory(ahead.setting), ahead.verdict(ahead.setting)
    found = ahead.smaller() if verdict == forecast.TOO_MUCH or (config.auto_fit and verdict == forecast.TIGHT) else None
    flags = found.flags_from(setting) if found else []
    fitted = bool(config.auto_fit and found)
    if fitted:
        config, memory, verdict = with_setting(config, setting, found), ahead.memory(found), ahead.verdict(found)
        collator = make_collators(config, processor, model_config)[0]
    told = described(config, run, data, model_config, collator, ahead.machine.precision, ahead.quantized(found))
    told |= _lengths(config, ahead.measured)
    told["memory"] = memory.parts() | {
        "peak": memory.peak, "available": ahead.machine.available, "verdict": verdict, "change": flags,
        "change_cuts": ahead.measured.longer_than(found.max_len) if found and found.max_len < setting.max_len else 0,
        "spread_over": 1 if ranks.kind() == "whole" else ranks.world(),
    }  # fmt: skip
    if fitted:
        told["auto_fit"] = flags
    if verdict == forecast.TOO_MUCH:
        told["exit_code"] = 8
    told["summary"] += "\n" + "\n".join([_told_lengths(told, ahead.measured), *_told_memory(ahead, told, fitted)])
    return told


def look_ahead(config, data, model_config, processor, collator) -> Forecast:
    """The forecast of a run."""
    from .heaviest import Measured

    return Forecast(config, this_machine(config), Measured(data.rows, collator, data.size), model_config, processor)


def _lengths(config, measured: Measured) -> dict:
    return {
        "tokens": measured.tokens(),
        "longest_row": min(measured.longest, config.max_len),
        "padding_share": round(measured.padding(config.batch_size, config.seed), 4),
        "lengths_measured": len(measured.at),
    }


def _told_lengths(told: dict, measured: Measured) -> str:
    about = "" if measured.exact else f" (estimated from {len(measured.at):,} rows)"
    tokens = "an unknown number" if told["tokens"] is None else f"{told['tokens']:,}"
    side = " (of a pair, its longer side)" if measured.collator.paired else ""
    return (
        f"tokens   {tokens} in all rows{side}, at most {told['longest_row']:,} in one; "
        f"{told['padding_share']:.1%} of the batches is padding{about}"
    )


def _told_memory(ahead: Forecast, told: dict, fitted: bool) -> list[str]:
    """The forecast in a few lines."""
    parts = {name: size for name, size in told["memory"].items() if isinstance(size, int) and name not in BESIDE}
    shown = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in parts.items() if size >= MIB)
    peak, available, verdict, flags = (told["memory"][key] for key in ("peak", "available", "verdict", "change"))
    lines = [
        f"memory   {verdict}: {gib(peak)} at the peak of {gib(available)} on {ahead.machine.name}",
        f"         {shown}",
    ]
    if told["memory"]["spread_over"] > 1:
        lines.append(f"         weights, gradients and optimizer divided by {ranks.world()} processes, not rehearsed")
    if fitted:
        lines.append(f"fitted   with {' '.join(flags)}{_told_cuts(told, ahead)}")
    elif flags:
        lines.append(f"to fit   {' '.join(flags)} (--auto-fit takes this){_told_cuts(told, ahead)}")
    elif verdict == forecast.TOO_MUCH:
        lines.append(f"to fit   {nothing_fits(ahead.config)}")
    return lines


BESIDE = ("peak", "available", "change_cuts", "spread_over")


def _told_cuts(told: dict, ahead: Forecast) -> str:
    cuts = told["memory"]["change_cuts"]
    return f"; it cuts {cuts:,} of the {len(ahead.measured.at):,} rows measured" if cuts else ""


def nothing_fits(config) -> str:
    lora = ", or LoRA in place of --full" if config.full else ""
    return f"nothing these flags can lower suffices: take a smaller model or a larger machine{lora}"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / MIB:.0f} MiB"


# ---- --auto-fit


def with_setting(config, before: Setting, setting: Setting):
    """The config with what a setting changes."""
    changed = {
        name: getattr(setting, name)
        for name in ("batch_size", "grad_accum", "max_len", "lora_r")
        if getattr(setting, name) != getattr(before, name)
    }
    if setting.four_bit and not before.four_bit:
        changed["quantize"] = "4bit"
    if setting.checkpointing and not before.checkpointing:
        changed["gradient_checkpointing"] = "on"
    return dataclasses.replace(config, **changed)


def fitted(config, run, data, model_config, processor, collators):
    """(config, collators) of a run; with --auto-fit those of the smallest change that makes it fit, which is told and
    recorded. A resumed run keeps what it was begun with.

    Raises:
        OutOfMemory: no change makes it fit.
    """
    if not config.auto_fit:
        return config, collators
    if before := run.previous.get("auto_fit"):
        return _refitted(config, before["changed"], model_config, processor)
    ahead = look_ahead(config, data, model_config, processor, collators[0])
    setting = ahead.setting
    verdict = ahead.verdict(setting)
    found = ahead.smaller() if verdict != forecast.FITS else None
    if found is None and verdict != forecast.TOO_MUCH:
        return config, collators
    if found is None:
        peak, available = gib(ahead.memory(setting).peak), gib(ahead.machine.available)
        raise OutOfMemory(f"--auto-fit: it would take {peak}, there are {available}; {nothing_fits(config)}")
    other, flags = with_setting(config, setting, found), found.flags_from(setting)
    names = [field.name for field in dataclasses.fields(config)]
    changed = {name: getattr(other, name) for name in names if getattr(other, name) != getattr(config, name)}
    run.record["auto_fit"] = {"flags": flags, "changed": changed, "forecast": ahead.memory(found).peak}
    note(f"--auto-fit: going on with {' '.join(flags)}")
    return _refitted(config, changed, model_config, processor)


def _refitted(config, changed: dict, model_config, processor):
    config = dataclasses.replace(config, **changed)
    return config, make_collators(config, processor, model_config)
