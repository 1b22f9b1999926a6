"""The flags that scripts share, as fields of dataclasses. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .errors import UsageError


def flag(default=None, help: str = "", choices=None, metavar: str | None = None):
    """A dataclass field that is also a command-line flag; the type annotation tells how its value is read."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


def words(help: str):
    """A dataclass field that holds the command's words that belong to no flag."""
    return dataclasses.field(default=(), metadata={"help": help, "words": True})


def word(help: str):
    """A dataclass field that holds the one word of the command that belongs to no flag."""
    return dataclasses.field(default=None, metadata={"help": help, "word": True})


@dataclass(frozen=True)
class TrainingFlags:
    """The flags every training script has."""

    less_memory = (
        "lower in this order: --batch-size (raise --grad-accum instead; --auto-batch does both), --max-len, --lora-r"
    )

    model: str | None = flag(help="hub id or folder of a Gemma; `demo` is a tiny random Gemma 4")
    dataset: tuple[str, ...] = flag(
        (),
        "files, folders or globs (.jsonl .json .csv .parquet), or hub ids org/name[:split]; "
        "with --streaming .jsonl[.gz] .parquet .tar files and URLs",
    )
    eval_dataset: tuple[str, ...] = flag((), "rows to evaluate on")
    test_size: float = flag(0.0, "share of --dataset to keep for evaluation instead, such as 0.1")
    streaming: bool = flag(
        False, "read --dataset from front to end, shard by shard: .jsonl[.gz], .parquet, .tar, also by URL (s3:// ...)"
    )
    shuffle_buffer: int = flag(10_000, "rows that --streaming shuffles in (256 MiB at most)")
    output: str | None = flag(help="run folder (default: runs/<script>-<date-time>)")
    overwrite: bool = flag(False, "replace the run that --output holds")
    resume: bool = flag(False, "go on from the last whole checkpoint in --output; begin where there is none")
    max_len: int = flag(2048, "most tokens in a row, media tokens included")
    epochs: float = flag(1.0, "passes over the data")
    max_steps: int | None = flag(help="optimizer steps, whatever --epochs says (demo: 120; of a reward model 200)")
    batch_size: int | None = flag(help="rows at a time on each device (default: 1; the demo's own data 8)")
    grad_accum: int | None = flag(help="batches to an optimizer step (default: 8; the demo's own data 1)")
    lr: float | None = flag(help="peak learning rate (default: LoRA 2e-4, --full 1e-5; for --model demo 1e-2, 3e-3)")
    lora_r: int = flag(16, "LoRA rank")
    lora_alpha: int = flag(32, "LoRA scale: updates are multiplied by alpha / r")
    lora_dropout: float = flag(0.0, "LoRA dropout")
    lora_targets: str = flag("language", "language, vision, audio (comma-separated), all, or a regular expression")
    full: bool = flag(False, "train all weights instead of LoRA adapters")
    quantize: str = flag("auto", "4-bit weights under LoRA; auto: on CUDA", ("auto", "4bit", "none"))
    precision: str = flag("auto", "auto: bf16 where native, else fp32", ("auto", "bf16", "fp16", "fp32"))
    backend: str = flag(
        "auto", "what loads and trains; auto: Unsloth, where it is installed, on a CUDA GPU", ("auto", "unsloth", "hf")
    )
    gradient_checkpointing: str = flag("auto", "less memory, more time; auto: on a GPU", ("auto", "on", "off"))
    seed: int = flag(0, "seed of data order, dropout and adapters")
    num_workers: int | None = flag(
        help="processes that prepare batches ahead (default: for each GPU half of its share of the cores, at most 4)"
    )
    save_steps: int | None = flag(help="steps between checkpoints (default: a tenth of the run)")
    eval_steps: int | None = flag(help="steps between evaluations (default: a tenth of the run)")
    stop_when: str | None = flag(
        help="end as soon as a logged metric meets this, such as 'gen/pass_rate>=0.95'", metavar="METRIC>=NUMBER"
    )
    best_by: str | None = flag(
        help="save the model of the step where this metric was best (a loss or error rate: lowest), such as eval_loss",
        metavar="METRIC",
    )
    max_minutes: float | None = flag(help="end so many minutes after the script began, with the result saved")
    on_divergence: str = flag(
        "stop", "a loss or gradient that is no number: stop, or leave the step out", ("stop", "skip")
    )
    auto_batch: bool = flag(False, "out of memory: halve --batch-size, double --grad-accum, and go on")
    auto_fit: bool = flag(
        False, "where the memory forecast does not fit, take the smallest change that does, before anything is loaded"
    )
    device_memory: float | None = flag(
        help="with --dry-run: forecast for a GPU of so many GB instead of this machine", metavar="GB"
    )
    metadata: tuple[str, ...] = flag(
        (), "facts to be saved with the model, such as data_version=3", metavar="KEY=VALUE"
    )
    metadata_file: str | None = flag(help="a JSON object of such facts", metavar="FILE")
    report_to: tuple[str, ...] = flag((), "experiment trackers, such as tensorboard or wandb; they get figures only")
    save_first_batch: bool = flag(
        False,
        "write first_batch.json: token ids, labels and row names of the first batch, and what the trained model "
        "makes of them",
    )
    dry_run: bool = flag(
        False, "check everything, say what would be done and what memory it takes (exit 8: too much); load no weights"
    )
    json: bool = flag(False, "print the result as one JSON object")
    debug: bool = flag(False, "show the traceback of an error")

    @property
    def demo(self) -> bool:
        """Whether the built-in demo's data are used, since none were given."""
        return not self.dataset

    task = "sft"  # "sft", "dpo" or "reward": what the rows are, and what is made of them

    @property
    def paired(self) -> bool:
        """Whether a row is a pair of answers."""
        return self.task != "sft"


@dataclass(frozen=True)
class PolicyFlags(TrainingFlags):
    """The flags of scripts that train a model that speaks."""

    adapter: str | None = flag(
        help="run folder or hub id of an adapter to go on from; its base model is taken where --model is not given"
    )
    eval_prompts: str | None = flag(
        help="rows that the model answers while it trains, with `checks` of the answers (references/running.md)",
        metavar="FILE",
    )
    eval_prompts_every: int | None = flag(help="steps between two times of asking (default: a tenth of the run)")
    eval_prompts_max_tokens: int = flag(256, "most tokens of an answer")
    eval_prompts_temperature: float = flag(0.0, "0 takes the likeliest token each time")
    report_samples: bool = flag(False, "send --report-to the answers to --eval-prompts, too")


@dataclass(frozen=True)
class CollatorFlags:
    """The collator's options as flags."""

    loss_on: str = flag("all-turns", "which model turns are trained", ("all-turns", "last-turn"))
    train_reasoning: bool = flag(
        True, "train the reasoning that the chat template shows; what it leaves out is counted"
    )
    thinking: str = flag("auto", "the template's thinking switch; auto: for rows with reasoning", ("auto", "on", "off"))
    on_bad_media: str = flag(
        "placeholder",
        "an unreadable image or clip: keep its row as untrained context (leave a pair out), leave the row out, or stop",
        ("placeholder", "skip", "error"),
    )
    max_bad_media: float = flag(0.05, "stop when more of the media (or rows) read so far are unreadable")
    long_audio: str = flag(
        "cut", "a clip longer than the model hears: cut it, or treat it as unreadable", ("cut", "refuse")
    )
    truncation: str = flag(
        "cut", "a row over --max-len: cut its end (of pairs the prompt's oldest turns first), or stop", ("cut", "error")
    )
    placeholders: str | None = flag(
        None,
        "masked zero media: for each row without audio in a batch with audio, only where the model needs them, "
        "or so that every batch has every kind of medium (default: rows; always, where several processes need it)",
        ("rows", "needed", "always"),
    )
    media_root: str | None = flag(help="refuse media files outside this folder")
    allow_remote_media: bool = flag(False, "fetch media from http(s) URLs")

    def collator_options(self) -> dict:
        """The options that `MultimodalCollator` takes."""
        names = {field.name for field in dataclasses.fields(CollatorFlags)} - {"max_bad_media"}
        return {name: getattr(self, name) for name in names} | {"placeholders": self.placeholders or "rows"}


@dataclass(frozen=True)
class InferenceFlags:
    """How a model that speaks is loaded and asked (`inference.load_policy`)."""

    less_memory = "lower --batch-size, then --max-len; or load in 4 bits with --quantize 4bit"

    max_len: int = flag(2048, "most tokens in a row, media tokens included")
    batch_size: int = flag(8, "rows at a time; halved where memory runs out")
    max_new_tokens: int = flag(256, "most tokens of an answer")
    thinking: str | None = flag(
        help="the template's thinking switch (default: as the model was trained, else auto)",
        choices=("auto", "on", "off"),
    )
    precision: str = flag("auto", "auto: bf16 where native, else fp32", ("auto", "bf16", "fp16", "fp32"))
    quantize: str = flag("auto", "4-bit weights; auto: on CUDA, where it was trained so", ("auto", "4bit", "none"))
    media_root: str | None = flag(help="refuse media files outside this folder")
    allow_remote_media: bool = flag(False, "fetch media from http(s) URLs")


def check_ranges(values: dict) -> None:
    """Refuse numbers that mean nothing (UsageError)."""
    positive = """max_len max_steps batch_size grad_accum lora_r lora_alpha epochs lr save_steps eval_steps max_minutes
    eval_prompts_every eval_prompts_max_tokens shuffle_buffer device_memory max_new_tokens"""
    for name in positive.split():
        if values.get(name) is not None and not 0 < values[name] < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} must be more than 0, got {values[name]}")
    if not 0 <= (values.get("eval_prompts_temperature") or 0) < math.inf:
        raise UsageError(f"--eval-prompts-temperature must be at least 0, got {values['eval_prompts_temperature']}")
    if values.get("beta") is not None and not 0 < values["beta"] < math.inf:
        raise UsageError(f"--beta must be more than 0, got {values['beta']}")
    for name in ("test_size", "lora_dropout", "max_bad_media"):
        if values.get(name) is not None and not 0 <= values[name] <= (1 if name == "max_bad_media" else 0.99):
            top = 1 if name == "max_bad_media" else 0.99
            raise UsageError(f"--{name.replace('_', '-')} must lie between 0 and {top}, got {values[name]}")
    for name, top in (("num_workers", 1024), ("seed", 2**32 - 1)):
        if values.get(name) is not None and not 0 <= values[name] <= top:
            raise UsageError(f"--{name.replace('_', '-')} must lie between 0 and {top}, got {values[name]}")
