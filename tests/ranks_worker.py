"""One optimizer step of each trainer on each mix of rows: alone, or as one of several ranks under `accelerate launch`.

Each rank writes what it found to the file that it is given, with its number behind: gradients, losses, evaluation.
"""

import copy
import faulthandler
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"))

from gemma_trainer import arguments, demo, fsdp, models, precision, preference_trainers, ranks, trainers
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.demo import SAMPLES

RED = str(SAMPLES / "images" / sorted(path.name for path in (SAMPLES / "images").iterdir())[0])
TONE = str(SAMPLES / "audio" / sorted(path.name for path in (SAMPLES / "audio").iterdir())[0])
LONG = "what is the weather in the city today " * 4


def sft(text: str, answer: str = "Yes.", **media) -> dict:
    return {"prompt": text, "completion": answer, **media}


def pair(text: str, chosen: str = "red one", rejected: str = "blue", **media) -> dict:
    return {"prompt": text, "chosen": chosen, "rejected": rejected, **media}


def mixes(row) -> dict[str, list[dict]]:
    """Rows of one optimizer step; those at even places go to rank 0 of two, the others to rank 1."""
    image, clip = {"image": RED}, {"audio": TONE}
    return {
        "text": [row("hi"), row(LONG), row("one two"), row("Well, " + LONG)],
        "image and text": [row("See?", **image), row("hi"), row("What is it?", **image), row(LONG)],
        "audio and text": [row("Hear?", **clip), row("hi"), row("What is it?", **clip), row(LONG)],
        "audio and image": [row("Hear?", **clip), row("See?", **image), row("So?", **clip), row("It?", **image)],
        "text and image": [row(LONG), row("See?", **image), row("hi"), row("What is it?", **image)],
        "one row for two": [row("See?", **image)],
        "untrained": [row("hi"), row("See?", **image) | {"loss_type": "context_only"}],
    }


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of the first optimizer step, whole."""

    found: dict | None = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.found is None:
            named = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
            whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named.items()}
            self.found = {name.removeprefix("module."): grad.clone() for name, grad in whole.items()}


def make(kind: str, folder: str, rows, targets: str, world: int):
    """A trainer whose one step has all the rows, its adapters away from zero, so that each gradient shows."""
    processor = demo.make_processor()
    base = demo.make_model(processor.tokenizer, reward=kind == "reward")
    torch.manual_seed(0)
    model = models.add_lora(base, targets, 4, 8, 0.0)
    fsdp.declare_layers(model)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    options = dict(max_length=512, batch_size=-(-len(rows) // world), grad_accum=1, lr=1e-3, epochs=1, max_steps=1,
                   steps=1, seed=0, save_steps=1000, eval_steps=1000, evaluate=True, workers=0, report_to=[],
                   checkpointing=True)  # fmt: skip
    chosen = precision.choose("fp32", "cpu")
    collators = [MultimodalCollator(processor, 512, task="sft" if kind == "sft" else "preference") for _ in range(2)]
    if kind == "sft":
        make_one, args = trainers.GemmaSFTTrainer, arguments.sft_arguments(folder, chosen, **options)
    elif kind == "dpo":
        make_one = preference_trainers.GemmaDPOTrainer
        more = {"beta": 0.1, "loss_type": ["sigmoid"], "loss_weights": None, "label_smoothing": 0.0}
        args = preference_trainers.dpo_arguments(folder, chosen, **options, **more)
    else:
        make_one = preference_trainers.GemmaRewardTrainer
        args = preference_trainers.reward_arguments(folder, chosen, **options, center_rewards_coefficient=0.1)
    args.max_grad_norm, args.save_strategy = 1e9, "no"
    trainer = make_one(model, args, rows, collators[0], processor, copy.deepcopy(rows[:3]), collators[1])
    trainer.sampler = torch.utils.data.SequentialSampler(rows)
    trainer.sampler.set_epoch, trainer.sampler.lengths = lambda _: None, np.zeros(0)
    if trained_or_spread := models.trained_kinds(trainer.model) or trainer.spread:
        for collator in collators if world > 1 else ():
            collator.placeholders, collator.always = "always", frozenset({"image", "audio"})
    assert trained_or_spread or targets == "language"
    return trainer


def first_step(kind: str, rows, targets: str, world: int = 1) -> dict:
    """{"grads", "loss", "eval_loss"} of one step, and of an evaluation behind it, of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, watch = make(kind, folder, rows, targets, world), Gradients()
        trainer.add_callback(watch)
        assert trainer.spread == (os.environ.get("ACCELERATE_USE_FSDP") == "true" and world > 1)
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        found = {"grads": watch.found, "loss": logged["loss"], "eval_loss": trainer.evaluate()["eval_loss"]}
        return found | {"collected": trainer.collected()["counts"]}


def everything(cases) -> dict:
    """{case: what `first_step` finds} of (kind, mix, targets)."""
    found = {}
    for kind, mix, targets in cases:
        rows = mixes(sft if kind == "sft" else pair)[mix]
        faulthandler.dump_traceback_later(60, exit=ranks.world() > 1)
        found[kind, mix, targets] = first_step(kind, rows, targets, ranks.world())
        faulthandler.cancel_dump_traceback_later()
    return found


if __name__ == "__main__":
    ranks.begin()
    torch.save(everything(torch.load(sys.argv[1])), f"{sys.argv[1]}.{ranks.rank()}")
