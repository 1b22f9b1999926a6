#!/usr/bin/env python3
"""Which learning rate a reward model wants: accuracy and loss on held-out pairs, rate by rate, for LoRA and for --full.

Usage: python benchmarks/reward_lr.py [--model demo|FOLDER] [--tokenizer FOLDER] [--ways lora,full] [--rates 1e-4,1e-3]
                                      [--steps 120] [--batch 8] [--seeds 3] [--json]

With `--model demo` the tiny random model is trained on the bundled pairs, as `reward_train.py` does without --dataset.
With the folder of a text Gemma it is trained on pairs made here: spelling, repeating, sorting, sums, units and days,
one answer right and one of the same form with a wrong value. Held-out pairs are about other words and numbers. Such
a model gets a head of random weights, so untrained it guesses; the table's first line tells how well.

Everything else is as in `reward_train.py`: its LoRA, its head, its optimizer and schedule; only the batch is --batch
pairs at once. Seeds choose the order of the pairs, the adapters and a new head. "loss" is the mean over the held-out
pairs of -log sigmoid(chosen - rejected - the row's margin), which is 0.693 for a model that sees no difference; "+-" is
the standard deviation over the seeds. It does not hold the error of having few held-out pairs: for 100, up to 5 points.
A run that diverges counts as guessing, with an infinite loss.
"""

import os

os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"})

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "skills" / "gemma-trainer" / "assets"
sys.path.insert(0, str(ASSETS))

from pydoc_data.topics import topics

import transformers
from reward_train import Config

from gemma_trainer import data, demo, models, preparation, sources
from gemma_trainer.callbacks import StopOnDivergence
from gemma_trainer.errors import Diverged
from gemma_trainer.precision import choose
from gemma_trainer.preference_trainers import GemmaRewardTrainer, reward_arguments

RATES = {  # (the demo's model, way) -> rates
    (True, "lora"): (1e-4, 3e-4, 1e-3, 3e-3, 5e-3, 1e-2, 3e-2),
    (True, "full"): (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    (False, "lora"): (1e-5, 5e-5, 1e-4, 3e-4, 1e-3),
    (False, "full"): (1e-6, 3e-6, 1e-5, 3e-5, 1e-4),
}

# ---- pairs for a model that knows some English

TRAINING, HELD_OUT = 200, 100
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
UNITS = (("hours", "minutes", 60), ("metres", "centimetres", 100), ("weeks", "days", 7), ("dozen", "pieces", 12))


def other(rng: random.Random, value: int) -> int:
    """A wrong number near the right one."""
    return value + rng.choice([step for step in (-10, -2, -1, 1, 2, 10) if value + step > 0])


def swapped(rng: random.Random, text: str) -> str:
    """The text with two different neighbours swapped, behind the first character."""
    at = rng.choice([i for i in range(1, len(text) - 1) if text[i] != text[i + 1]])
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def spelling(rng, words, numbers):
    word = rng.choice(words)
    wrong = swapped(rng, word)
    first, second = rng.sample((word, wrong), 2)
    return f"Which spelling is right, {first} or {second}?", word, wrong


def repeating(rng, words, numbers):
    number = "00"
    while len(set(number[1:])) < 2:  # nothing to swap
        number = f"{rng.choice(numbers)}{rng.choice(numbers)}"
    return f"Repeat the number {number}.", number, swapped(rng, number)


def sorting(rng, words, numbers):
    right = sorted(rng.sample(words, 3))
    given = rng.sample(right, 3)
    wrong = rng.choice([[right[i] for i in order] for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0))])
    return f"Sort by the alphabet: {', '.join(given)}", ", ".join(right), ", ".join(wrong)


def sums(rng, words, numbers):
    first, second = rng.choice(numbers), rng.randint(2, 9)
    return f"What is {first} + {second}?", str(first + second), str(other(rng, first + second))


def units(rng, words, numbers):
    (large, small, factor), count = rng.choice(UNITS), rng.choice([number for number in numbers if number < 30])
    wrong = rng.choice([count * another for _, _, another in UNITS if another != factor])
    return f"How many {small} are {count} {large}?", f"{count * factor} {small}", f"{wrong} {small}"


def dates(rng, words, numbers):
    shift, ahead, number = rng.randint(1, 28), rng.randint(1, 3), rng.choice(numbers)
    start = (number + shift) % 7
    right, wrong = DAYS[(start + ahead) % 7], DAYS[(start + ahead + rng.randint(1, 6)) % 7]
    return f"Day {number} is a {DAYS[start]}. What is day {number + ahead}?", right, wrong


def make_pairs() -> tuple[list[dict], list[dict]]:
    """(training, held-out) rows; each word and each number is used by one of them only."""
    rng = random.Random(0)
    words = sorted({word for word in " ".join(topics.values()).split() if word.isalpha() and word.islower()})
    words = [word for word in words if 5 <= len(word) <= 9]
    numbers = list(range(11, 99))
    rng.shuffle(words)
    rng.shuffle(numbers)
    found, kinds = [], (spelling, repeating, sorting, sums, units, dates)
    for count, pool, values in (
        (TRAINING, words[: len(words) * 2 // 3], numbers[: len(numbers) * 2 // 3]),
        (HELD_OUT, words[len(words) * 2 // 3 :], numbers[len(numbers) * 2 // 3 :]),
    ):
        rows: dict[str, dict] = {}
        while len(rows) < count:
            prompt, chosen, rejected = kinds[len(rows) % len(kinds)](rng, pool, values)
            rows[prompt] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        found.append(list(rows.values()))
    return found[0], found[1]


# ---- runs


class Bench:
    """A model, its pairs, and what is the same in all runs."""

    def __init__(self, options):
        self.options, self.tiny = options, options.model == "demo"
        self.config = Config(model=options.model)
        if options.tokenizer and not self.tiny:
            self.model_config, _ = models.load_config(options.model)
            self.processor = models.load_processor(options.tokenizer, self.model_config)
        else:
            self.model_config, self.processor = preparation.load_processor(self.config)
        if not self.processor.chat_template:
            self.processor.chat_template = demo.chat_template("gemma3")
        self.collators = preparation.make_collators(self.config, self.processor, self.model_config)
        names = [str(demo.SAMPLES / name) for name in data.DEMO[True]]
        self.rows, self.held_out = (sources.open_rows([n]) for n in names) if self.tiny else make_pairs()

    def trainer(self, folder: str, way: str, rate: float, seed: int) -> GemmaRewardTrainer:
        """A trainer as `recipe.make_reward_trainer` makes it, which saves nothing."""
        config, steps, precision = self.config, self.options.steps, choose(self.config.precision)
        transformers.set_seed(seed)
        if self.tiny:
            model = demo.make_model(self.processor.tokenizer, reward=True)
        else:
            dtype = precision.torch_dtype if way == "lora" else choose("fp32").torch_dtype
            model = models.load_model(self.options.model, self.model_config, dtype, reward=True)
        if way == "lora":
            model = models.add_lora(model, config.lora_targets, config.lora_r, config.lora_alpha, config.lora_dropout)
        args = reward_arguments(
            folder, precision, center_rewards_coefficient=None, max_length=config.max_len,
            batch_size=self.options.batch,
            grad_accum=1, lr=rate, epochs=1, max_steps=steps, steps=steps, seed=seed, save_steps=None, eval_steps=None,
            evaluate=False, workers=0, report_to=[], checkpointing=False,
        )  # fmt: skip
        args.save_strategy = "no"
        train, evaluation = self.collators
        return GemmaRewardTrainer(model, args, self.rows, train, self.processor, self.held_out, evaluation,
                                  callbacks=[StopOnDivergence()])  # fmt: skip

    def measure(self, way: str, rate: float | None, seed: int) -> dict:
        """Train, unless there is no rate, and ask for the held-out pairs."""
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(folder, way, rate or 0.0, seed)
            try:
                if rate:
                    trainer.train()
                accuracy, loss = trainer.pair_accuracy(self.held_out), trainer.evaluate()["eval_loss"]
            except Diverged:
                accuracy, loss = 0.5, float("inf")
        return {"accuracy": accuracy, "loss": loss, "seconds": time.perf_counter() - start}


def line_of(way: str, rate: float | None, runs: list[dict]) -> dict:
    line = {"way": way, "rate": rate, "runs": runs}
    for name in ("accuracy", "loss"):
        values = [run[name] for run in runs]
        line[name] = statistics.mean(values)
        line[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 and max(values) < float("inf") else 0.0
    return line | {"seconds": statistics.mean(run["seconds"] for run in runs)}


def show(line: dict) -> None:
    rate = f"{line['rate']:g}" if line["rate"] else "-"
    print(
        f"{line['way']:10}{rate:>8}{line['accuracy']:10.1%} +- {line['accuracy_sd']:5.1%}"
        f"{line['loss']:9.3f} +- {line['loss_sd']:5.3f}{line['seconds']:9.0f}",
        flush=True,
    )


def main(options) -> None:
    bench, lines = Bench(options), []
    plans = [("untrained", None)]
    for way in options.ways.split(","):
        rates = options.rates.split(",") if options.rates else RATES[bench.tiny, way]
        plans += [(way, float(rate)) for rate in rates]
    if not options.json:
        print(
            f"{options.model}: {len(bench.rows)} pairs, {len(bench.held_out)} held out, {options.steps} steps of "
            f"{options.batch} pairs, {options.seeds} seeds\n"
            f"{'way':10}{'rate':>8}{'accuracy':>19}{'loss':>18}{'s a run':>9}",
            flush=True,
        )
    for way, rate in plans:
        lines.append(line_of(way, rate, [bench.measure(way, rate, seed) for seed in range(options.seeds)]))
        if not options.json:
            show(lines[-1])
    if options.json:
        print(json.dumps(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or the folder of a text Gemma")
    parser.add_argument("--tokenizer", help="folder of the tokenizer, where the model's folder has none")
    parser.add_argument("--ways", default="lora,full", help="lora, full, or both")
    parser.add_argument("--rates", help="comma-separated, for each way (default: a range of the model's and the way's)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 120 for the demo, else 50)")
    parser.add_argument("--batch", type=int, help="pairs a step (default: 8 for the demo, else 4)")
    parser.add_argument("--seeds", type=int, help="runs for each rate (default: 3 for the demo, else 1)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table, with each run")
    chosen = parser.parse_args()
    for name, (tiny, real) in {"steps": (120, 50), "batch": (8, 4), "seeds": (3, 1)}.items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, tiny if chosen.model == "demo" else real)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(chosen)
