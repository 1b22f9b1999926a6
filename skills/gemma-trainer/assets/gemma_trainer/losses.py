"""The language-model loss without the whole logits: scored at trained positions only, a chunk of them at a time.

Gemma's vocabulary has 262,144 entries; logits of 2,048 positions in float32 take 2 GiB, and their gradient again.
"""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

CHUNK = 256  # positions scored at once: 256 MiB of float32 logits at Gemma's vocabulary


@dataclass
class LossOutput(ModelOutput):
    """What a model returns for labels: the loss, how many tokens were scored, and how many were the model's first
    choice."""

    loss: torch.Tensor | None = None
    scored: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class _SummedCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of hidden states against a head, with the gradient made in the forward pass.

    The gradient needs the same softmax as the loss, so making both at once saves a projection over the vocabulary.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, softcap):
        loss = hidden.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        head = weight.to(hidden.dtype)
        for start in range(0, len(targets), CHUNK):
            part, wanted = hidden[start : start + CHUNK], targets[start : start + CHUNK, None]
            logits = (part @ head.t()).float()
            if softcap:
                logits = logits.div_(softcap).tanh_()
                slope = 1 - logits.square() if grad_hidden is not None or grad_weight is not None else None
                logits = logits.mul_(softcap)
            correct += (logits.argmax(-1, keepdim=True) == wanted).sum()
            log_total = logits.logsumexp(-1, keepdim=True)
            loss += (log_total - logits.gather(-1, wanted)).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            grad = logits.sub_(log_total).exp_()  # softmax, in place of the logits
            grad.scatter_add_(-1, wanted, grad.new_full(wanted.shape, -1.0))
            grad = (grad.mul_(slope) if softcap else grad).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[start : start + CHUNK] = grad @ head
            if grad_weight is not None:
                grad_weight += (grad.t() @ part).float()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def chunked_loss(hidden, weight, labels, num_items=None, softcap: float | None = None) -> LossOutput:
    """Next-token cross-entropy at the trained positions.

    Args:
        hidden: [B, T, H] last hidden states.
        weight: [V, H] output embeddings.
        labels: [B, T] token ids, -100 where nothing is trained; position t is scored by the state at t - 1.
        num_items: trained tokens of the whole optimizer step, to divide the sum by; None divides by this batch's own.
        softcap: `final_logit_softcapping` of the text config.

    Returns:
        The loss (0, with zero gradients, where nothing is trained), and counts of scored and of rightly guessed tokens.
    """
    targets = labels[:, 1:]
    mask = targets != -100
    loss, correct = _SummedCrossEntropy.apply(hidden[:, :-1][mask], weight, targets[mask], softcap)
    scored = mask.sum()
    divisor = scored if num_items is None else torch.as_tensor(num_items, device=loss.device)
    return LossOutput(loss=loss / divisor.clamp(min=1), scored=scored, correct=correct)


def use_chunked_loss(model) -> None:
    """Make `model(**batch)` with labels return `chunked_loss`; without labels its forward stays as it is.

    Args:
        model: a causal or conditional-generation model of transformers (inside any PEFT wrapper), whose `base_model`
            gives hidden states. Changed in place.
    """
    plain_forward = model.forward
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        if labels is None:
            return plain_forward(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state
        return chunked_loss(hidden, self.get_output_embeddings().weight, labels, num_items_in_batch, softcap)

    model.forward = types.MethodType(forward, model)


@dataclass
class LogProbs(ModelOutput):
    """Of each position but the last, for the token behind it: its log-probability, the entropy, the mean of the logits,
    and whether it was the first choice; [B, T - 1] each, 0 where nothing was asked for."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def log_probs(hidden, weight, labels, softcap: float | None = None) -> LogProbs:
    """Log-probabilities of the labels, at the positions that have one; logits are made a chunk of these at a time, and
    again for the gradient.

    Args:
        hidden: [B, T, H] last hidden states.
        weight: [V, H] output embeddings.
        labels: [B, T] token ids, -100 where nothing is asked for; position t is scored by the state at t - 1.
        softcap: `final_logit_softcapping` of the text config.
    """
    targets = labels[:, 1:]
    mask = targets != -100
    states, wanted = hidden[:, :-1][mask], targets[mask]
    starts = range(0, max(1, len(wanted)), CHUNK)  # one chunk at least: a gradient of nothing is 0
    chunks = [
        checkpoint(_score, states[at : at + CHUNK], weight, wanted[at : at + CHUNK], softcap, use_reentrant=False)
        for at in starts
    ]
    found = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return LogProbs(*(part.new_zeros(mask.shape).masked_scatter(mask, part) for part in found))


def _score(hidden, weight, wanted, softcap):
    logits = (hidden @ weight.to(hidden.dtype).t()).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, wanted[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(logs.exp() * logs).sum(-1)
        return chosen, entropy, logits.mean(-1), logits.argmax(-1) == wanted


def use_log_probs(model) -> None:
    """Make `model(**batch, labels=labels, fused_lm_head=True)` return `log_probs`: the call that TRL's trainers make
    since 1.16. Other calls stay as they are. `model` is changed in place (see `use_chunked_loss`)."""
    plain_forward = model.forward
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    @functools.wraps(type(model).forward)
    def forward(self, *args, labels=None, fused_lm_head=False, **kwargs):
        if not fused_lm_head:
            return plain_forward(*args, **kwargs | ({} if labels is None else {"labels": labels}))
        hidden = self.base_model(*args, **kwargs | {"use_cache": False}).last_hidden_state
        return log_probs(hidden, self.get_output_embeddings().weight, labels, softcap)

    model.forward = types.MethodType(forward, model)


def trl_scores_trained_only(device: str) -> bool:
    """Whether the installed TRL's own loss head scores the trained positions alone on this device.

    TRL 1.14's `chunked_nll` does everywhere; the fused head that replaced it does where it has Triton, and scores
    every position elsewhere (trl/trainer/utils.py, `add_fused_lm_head`). Beside Unsloth, which rewrites TRL's trainers
    on a GPU and patches them on a CPU, nothing is relied upon.
    """
    if "unsloth" in sys.modules:
        return False
    import trl
    from packaging.version import Version
    from transformers.utils import is_triton_available

    if Version(trl.__version__) < Version("1.15"):
        return True
    return device == "cuda" and is_triton_available()
