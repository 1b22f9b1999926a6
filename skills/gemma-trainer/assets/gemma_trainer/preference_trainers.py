"""TRL's trainers on preference pairs with media: direct preference optimization, and reward models."""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
from pathlib import Path

import torch
import trl
from trl.models.utils import _ForwardRedirection

from . import ranks
from .arguments import common_arguments, trl_chunks
from .families import tokenizer_of
from .fsdp import inner_model
from .losses import trl_scores_trained_only, use_log_probs
from .preferences import share_preferred
from .trainers import WEIGHTS, RowsTrainer

SPEAKS = 0.01  # probability of an answer's end, below which a model was not tuned on the format


class PairsTrainer(RowsTrainer):
    """What both trainers on pairs share: the data are taken as they are, each pair weighs the same, and an empty batch
    has loss 0."""

    _pairs = _batches = 0  # of the optimizer step, over all ranks

    def _prepare_dataset(self, dataset, *args, **kwargs):
        return dataset  # the collator reads the rows

    def weight_of(self, inputs) -> int:
        return int(inputs["completion_mask"].any(1).sum()) // 2

    def get_batch_samples(self, *args, **kwargs):
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._pairs, self._batches = ranks.summed([sum(map(self.weight_of, batches)), len(batches)])
        return batches, items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean over the pairs of an optimizer step, of which some batches have fewer than others."""
        inputs = dict(inputs)
        if pairs := self.weight_of(inputs):
            result = self.pair_loss(model, inputs, return_outputs, num_items_in_batch)
            self._metrics["train" if self.model.training else "eval"][WEIGHTS].append(pairs)
            share = pairs * self._batches / self._pairs if self.model.training and self._pairs else 1.0
            return (result[0] * share, result[1]) if return_outputs else result * share
        # All pairs were left out. The model is asked nevertheless: other ranks wait for it. Nothing is learnt from it.
        metrics = self._metrics["train" if self.model.training else "eval"]
        before = {name: list(values) for name, values in metrics.items()}
        result = self.pair_loss(model, inputs, return_outputs, num_items_in_batch)
        metrics.clear()
        metrics.update(before)
        return (result[0] * 0.0, result[1]) if return_outputs else result * 0.0

    def pair_loss(self, model, inputs, return_outputs, num_items_in_batch):
        with _ungathered(self.accelerator):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (self._with_gradient(loss[0]), loss[1]) if return_outputs else self._with_gradient(loss)

    @torch.no_grad()
    def pair_accuracy(self, rows, blind: bool = False) -> float:
        """The share of pairs whose chosen answer is liked better; a tie is half.

        Args:
            blind: zero the media, to see what is told without them.
        """
        margins, size = [], self.args.eval_batch_size
        self.model.eval()
        for start in range(0, len(rows), size):
            batch = self._eval_collator([rows[index] for index in range(start, min(start + size, len(rows)))])
            if not batch["completion_mask"].any():
                continue
            zeroed = {key: torch.zeros_like(batch[key]) for key in ("pixel_values", "input_features") if key in batch}
            inputs = self._prepare_inputs(dict(batch) | (zeroed if blind else {}))
            inputs.pop("margin", None)
            with self.compute_loss_context_manager():
                margins += self.pair_margins(inputs).tolist()
        return share_preferred(margins)


@contextlib.contextmanager
def _ungathered(accelerator):
    """Leave metrics where they are: TRL gathers those of each batch, which takes as many pairs on all ranks; `log` does
    it once for all."""
    accelerator.gather = accelerator.gather_for_metrics = lambda found, *_, **__: found
    try:
        yield
    finally:
        del accelerator.gather, accelerator.gather_for_metrics


class GemmaDPOTrainer(PairsTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer` on rows (see `RowsTrainer`); log-probabilities are made at the answers' positions only.

    The reference is the model without its adapter; with `own_reference=False` the adapter as it is at the start, of
    which TRL keeps a copy; where all weights are trained, a copy of the model.
    """

    def __init__(self, model, args, *rest, own_reference: bool = True, **kwargs):
        adapted = hasattr(model, "peft_config")
        super().__init__(model, args, *rest, ref_model=None if adapted else copy.deepcopy(model), **kwargs)
        if adapted and own_reference:  # a new adapter changes nothing yet: switched off it is the same, for no memory
            self.model.delete_adapter("ref")
        if trl_chunks() or not trl_scores_trained_only(self.args.device.type):
            for one in filter(None, (self.model, self.ref_model)):
                use_log_probs(inner_model(one))
        if trl_chunks():  # TRL 1.14: makes whole logits, but where it is told to use Liger
            self.use_liger_kernel, self._forward_redirection = True, _ForwardRedirection()

    @torch.no_grad()
    def untuned(self, rows, count: int = 16) -> str:
        """Something to tell where the model, as it is, would not end the chosen answers where they end: it was never
        tuned on this format, and preferences are no way to learn it."""
        found, size = [], self.args.eval_batch_size
        self.model.eval()
        for start in range(0, min(count, len(rows)), size):
            batch = self._eval_collator([rows[index] for index in range(start, min(start + size, len(rows)))])
            inputs = self._prepare_inputs(dict(batch))
            ids, said = inputs["input_ids"], inputs.pop("completion_mask") == 1
            said[len(said) // 2 :] = False
            labels = ids.masked_fill(~said | (ids != self._eval_collator.labeller.markers.turn_end), -100)
            inputs.pop("margin", None)
            with self.compute_loss_context_manager():
                chances = self.model(**inputs, labels=labels, fused_lm_head=True).log_probs
            found += chances[labels[:, 1:] != -100].tolist()
        chance = math.exp(sum(found) / len(found)) if found else 1.0
        if chance > SPEAKS:
            return ""
        return (
            f"the model ends its turn behind a chosen answer with a probability of {chance:.1g}: it was hardly tuned "
            "on this format. Train it with sft_train.py first, or for longer, and go on with --adapter"
        )

    def _get_per_token_logps_and_entropies(self, model, model_kwargs, input_ids, completion_mask):
        """What TRL 1.14 asks for where it uses Liger."""
        labels = input_ids.masked_fill(completion_mask == 0, -100)
        found = model(**model_kwargs, labels=labels, fused_lm_head=True)
        return found.log_probs, found.entropy, found

    def pair_loss(self, model, inputs, return_outputs, num_items_in_batch):
        inputs.pop("margin", None)  # for reward models
        return super().pair_loss(model, inputs, return_outputs, num_items_in_batch)

    def pair_margins(self, inputs) -> torch.Tensor:
        """By how much the chosen answers have become likelier than the rejected ones [B], in nats."""
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        asked = {key: value for key, value in inputs.items() if key != "completion_mask"}
        own = self.model(**asked, labels=labels, fused_lm_head=True).log_probs.sum(1)
        reference = self.model if self.ref_model is None else self.ref_model
        chosen, rejected = (own - torch.cat(self.compute_ref_log_probs(reference, inputs))).chunk(2)
        return chosen - rejected

    def _save(self, output_dir=None, state_dict=None):
        """Save the adapter in training alone: a resumed run takes the one that it began as from where the first did,
        and transformers, where a checkpoint holds others too, loads nothing but those."""
        super()._save(output_dir, state_dict)
        shutil.rmtree(Path(output_dir or self.args.output_dir) / "ref", ignore_errors=True)


class GemmaRewardTrainer(PairsTrainer, trl.RewardTrainer):
    """`trl.RewardTrainer` on rows (see `RowsTrainer`), for a model of `reward_model`."""

    def __init__(self, model, args, rows, collator, processor, *rest, **kwargs):
        super().__init__(model, args, rows, collator, tokenizer_of(processor), *rest, **kwargs)
        self.processing_class = processor  # TRL takes a tokenizer; what is saved is the processor

    def pair_margins(self, inputs) -> torch.Tensor:
        """By how much the chosen answers are scored higher than the rejected ones [B]."""
        chosen, rejected = self.model(**inputs).logits.squeeze(-1).chunk(2)
        return chosen - rejected


def dpo_arguments(output, precision, *, beta: float, loss_type: list[str], loss_weights: list[float] | None,
                  label_smoothing: float, **options) -> trl.DPOConfig:  # fmt: skip
    """The arguments of a DPO run; the others as for `arguments.common_arguments`."""
    return trl.DPOConfig(
        **common_arguments(output, precision, **options),
        beta=beta,
        loss_type=loss_type,
        loss_weights=loss_weights,
        label_smoothing=label_smoothing,
        precompute_ref_log_probs=False,
        padding_free=False,
        disable_dropout=True,  # else the reference is another network at each step
    )


def reward_arguments(output, precision, *, center_rewards_coefficient: float | None, **options) -> trl.RewardConfig:
    """The arguments of a reward run; the others as for `arguments.common_arguments`."""
    return trl.RewardConfig(
        **common_arguments(output, precision, **options),
        center_rewards_coefficient=center_rewards_coefficient,
        disable_dropout=False,
    )
