"""The arguments of the trainers, every one that matters explicit."""

from __future__ import annotations

from pathlib import Path

import trl

from .losses import trl_scores_trained_only


def common_arguments(
    output: str | Path, precision, *, max_length: int, batch_size: int, grad_accum: int, lr: float, epochs: float,
    max_steps: int | None, steps: int, seed: int, save_steps: int | None, eval_steps: int | None, evaluate: bool,
    workers: int, report_to: list[str], checkpointing: bool,
) -> dict:  # fmt: skip
    """The arguments of any run. TRL's own defaults differ by version (bf16 and checkpointing on, length 1024, also on a
    CPU), so whatever matters is set here.

    Args:
        precision: a `precision.Precision`.
        steps: optimizer steps of the whole run, from which logging, saving and evaluation intervals are taken.
        workers: processes that prepare batches ahead, enough of them for the next optimizer step.
    """
    often = max(1, steps // 10)
    return dict(
        output_dir=str(output),
        max_length=max_length,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=grad_accum,
        num_train_epochs=epochs,
        max_steps=max_steps or -1,
        learning_rate=lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.03 * steps),  # none in a short run: the first step of a warm-up has rate 0
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        bf16=precision.dtype == "bfloat16",
        fp16=precision.dtype == "float16",
        use_cpu=precision.device == "cpu",
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        remove_unused_columns=False,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        # The batches of an optimizer step are taken all at once.
        dataloader_prefetch_factor=1 + -(-grad_accum // workers) if workers else None,
        dataloader_pin_memory=precision.device == "cuda",
        accelerator_config={"non_blocking": precision.device == "cuda"},
        ddp_find_unused_parameters=True,
        logging_strategy="steps",
        logging_steps=max(1, steps // 200),
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=save_steps or often,
        save_total_limit=2,
        eval_strategy="steps" if evaluate else "no",
        eval_steps=eval_steps or often,
        prediction_loss_only=True,
        seed=seed,
        data_seed=seed,
        report_to=report_to or "none",
        disable_tqdm=True,  # `callbacks.Progress` shows the progress
    )


def sft_arguments(output: str | Path, precision, **options) -> trl.SFTConfig:
    """The arguments of a supervised run; `options` as for `common_arguments`."""
    return trl.SFTConfig(
        **common_arguments(output, precision, **options),
        dataset_kwargs={"skip_prepare_dataset": True},
        loss_type="chunked_nll" if trl_chunks() and trl_scores_trained_only(precision.device) else "nll",
        packing=False,
        padding_free=False,
    )


def trl_chunks() -> bool:
    """Whether the installed TRL knows `loss_type="chunked_nll"` as a loss of its own (before 1.15)."""
    from packaging.version import Version

    return Version(trl.__version__) < Version("1.15")
