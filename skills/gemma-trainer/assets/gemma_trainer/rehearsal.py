"""A training step played through without weights: every tensor has a shape and a size, none has a value.

The step is that of the real modules, with autograd, checkpointing, autocast and the optimizer as they are, on PyTorch's
fake tensors. A ledger sees each tensor come and go, so what it tells of memory is counted, not estimated: what autograd
keeps for the backward pass, what the backward pass makes besides, the gradients, the optimizer's state and temporaries.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .fsdp import inner_model
from .ledger import MAPPED, Ledger, Played
from .models import MEDIA, TOWERS, quantized_linears

# ---- 4-bit weights


def nf4_bytes(numel: int) -> int:
    """What bitsandbytes keeps of a weight in nf4 with double quantization: 4 bits a number, for each block of 64 an
    8-bit scale, for each 256 of those a float32, and of each weight one float32 offset and the 16 float32 that the bits
    mean. The table of the 8-bit scales is one for all weights.

    Source: bitsandbytes/functional.py, quantize_4bit and quantize_blockwise.
    """
    blocks = -(-numel // 64)
    return -(-numel // 2) + blocks + 4 * -(-blocks // 256) + 4 + 16 * 4


class _FourBitProduct(torch.autograd.Function):
    """What a 4-bit layer's product takes: the weights in the computation's dtype for as long as each pass lasts, and
    nothing kept in between."""

    @staticmethod
    def forward(ctx, hidden, shape):
        ctx.shape = shape
        return hidden @ hidden.new_empty(shape).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ grad.new_empty(ctx.shape), None


class _FourBitLinear(torch.nn.Module):
    """Stands in for a layer that bitsandbytes quantized, [out, in] weights in `dtype`."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.shape, self.dtype, self.bias = tuple(linear.weight.shape), dtype, linear.bias
        packed = torch.empty(nf4_bytes(linear.weight.numel()), dtype=torch.uint8, device="meta")
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, hidden):
        """hidden: [..., in] -> [..., out]."""
        out = _FourBitProduct.apply(hidden.to(self.dtype), self.shape)
        return (out if self.bias is None else out + self.bias).to(hidden.dtype)


# ---- the step


@dataclass(frozen=True)
class Step:
    """How a step is taken. `dtype` is that of the computation, `held` that of the weights; the rest as flags say."""

    task: str = "sft"
    dtype: torch.dtype = torch.float32
    held: torch.dtype = torch.float32
    full: bool = False
    four_bit: bool = False
    checkpointing: bool = False
    accumulates: bool = False  # gradients of earlier batches are there already
    device: str = "cpu"
    media: frozenset = frozenset({"image", "audio"})  # the kinds that the data have
    mapped: bool = False  # weights stay in their file until they are used


def _is_idle(name: str, step: Step) -> bool:
    """Whether a parameter is one of a tower that the data have nothing for: it never gets a gradient."""
    words = name.split(".")
    return any(tower in words for part, towers in TOWERS.items() if MEDIA[part] not in step.media for tower in towers)


def play(model, batch: dict, step: Step) -> Played:
    """Play a training step of a model on a batch.

    Args:
        model: on the meta device, with its adapters (`models.skeleton`, `models.add_lora`). It is used up.
        batch: what the collator gives: tensors of token ids [B, T] and so on; of pairs [2B, T].
    """
    _as_loaded(model, step)
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(fakes)
    _make_fake(model, fakes, ledger, step)
    reference = _reference_bytes(model) if step.full and step.task == "dpo" else 0
    ledger.add(reference, "weights")
    _mark_media(model, ledger)
    named = list(model.named_parameters())
    trained = [parameter for name, parameter in named if parameter.requires_grad and not _is_idle(name, step)]
    with fakes, ledger:
        optimizer = _optimizer(trained, ledger, step)
        inputs = {name: ledger.fake(value) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        ledger.kind = "activations"
        with torch.autocast("cpu", step.dtype, enabled=step.dtype != torch.float32):
            loss = LOSSES[step.task](model, inputs, ledger)
        ledger.moment, ledger.kind = "backward", "activations"
        loss.backward()
        del loss, inputs
        ledger.moment, ledger.kind = "optimizer", "optimizer"
        ledger.add(0, "optimizer")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return Played(ledger.moments)


def play_deep(config, make_model, batch: dict, step: Step) -> Played:
    """Play a step of a model, of which a deep one is worked out from two shallow ones: each layer takes what the others
    of its kind do. Models whose layers share keys and values are played whole.

    Args:
        config: the model's; `make_model` makes of one like it the model that `play` takes.
    """
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, text.layer_types
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers
    if getattr(text, "num_kv_shared_layers", 0) or layers < 4 * period:
        return play(make_model(copy.deepcopy(config)), batch, step)
    shallow, other = (play(make_model(_cut(config, count)), batch, step) for count in (period, 2 * period))
    return shallow.deeper(other, (layers - period) / period)


def _cut(config, layers: int):
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = layers, text.layer_types[:layers]
    return config


def _as_loaded(model, step: Step) -> None:
    """Give weights the dtypes and forms that a run's have."""
    adapters = step.dtype if step.four_bit else torch.float32  # TRL casts those on 4-bit weights
    for parameter in model.parameters():
        adapter = parameter.requires_grad and not step.full
        parameter.data = parameter.data.to(adapters if adapter else step.held)
    if step.four_bit:
        quantize(model, step.dtype)
    model.train()
    if step.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        if not step.full:
            model.enable_input_require_grads()


def quantize(model, dtype) -> None:
    """Put in the place of each linear layer that bitsandbytes quantizes one of its size in 4 bits."""
    for name in quantized_linears(model):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, _FourBitLinear(model.get_submodule(name), dtype))


def _make_fake(model, fakes: FakeTensorMode, ledger: Ledger, step: Step) -> None:
    """Exchange a meta model's tensors for fakes on the CPU; tied weights stay tied."""
    made: dict[int, tuple] = {}
    for path, module in model.named_modules():
        resident = not (step.mapped and _is_idle(path, step))
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _fake_of(tensor, fakes), tensor  # kept, or its id would be another's
                    kind = "adapters" if tensor.requires_grad and not step.full else "weights"
                    ledger.count(made[id(tensor)][0], kind if resident else MAPPED)
                held[name] = made[id(tensor)][0]
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda one: ledger.count(one.grad, "gradients"))


def _fake_of(tensor, fakes: FakeTensorMode):
    with fakes:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


def _reference_bytes(model) -> int:
    """What a second copy of the weights takes."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _mark_media(model, ledger: Ledger) -> None:
    """Have what the towers make, and what joins them to the text, counted as theirs."""

    def enter(*_):
        if ledger.moment == "forward":
            ledger.kind = "media_towers"

    def leave(*_):
        if ledger.moment == "forward":
            ledger.kind = "activations"

    for name, module in model.named_modules():
        if any(name.rpartition(".")[2] in towers for towers in TOWERS.values()):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)


def _optimizer(trained: list, ledger: Ledger, step: Step):
    """AdamW in the middle of a run: with its state, and, where batches are accumulated, gradients.

    On a GPU it goes over all tensors at once, with temporaries as large as what is trained; on a CPU one by one.
    """
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=step.device == "cuda")
    ledger.kind = "optimizer"
    for parameter in trained:
        state = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    if step.accumulates:
        ledger.kind = "gradients"
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
    return optimizer


def _sft_loss(model, inputs: dict, ledger: Ledger):
    """The loss as the trainer makes it: TRL's own in chunks where it has one, else ours."""
    from .arguments import trl_chunks
    from .losses import trl_scores_trained_only, use_chunked_loss

    inner = inner_model(model)
    _mark_head(inner, ledger)
    if trl_chunks() and trl_scores_trained_only("cpu"):
        from trl.trainer.sft_trainer import _CHUNKED_LM_HEAD_CHUNK_SIZE, _patch_chunked_ce_lm_head

        _patch_chunked_ce_lm_head(inner, _CHUNKED_LM_HEAD_CHUNK_SIZE)
    else:
        use_chunked_loss(inner)
    return model(**inputs, use_cache=False).loss


def _mark_head(inner, ledger: Ledger) -> None:
    """Have what is made after the last layer counted as the loss head's."""

    def leave(*_):
        ledger.kind = "loss_head"

    def enter(*_):
        ledger.kind = "activations"

    inner.base_model.register_forward_pre_hook(enter)
    inner.base_model.register_forward_hook(leave)


def _dpo_loss(model, inputs: dict, ledger: Ledger):
    """The policy's log-probabilities, and, while what they keep is there, those of the reference."""
    from .losses import use_log_probs

    inner = inner_model(model)
    _mark_head(inner, ledger)
    use_log_probs(inner)
    answers = inputs.pop("completion_mask")
    inputs.pop("margin", None)
    labels = inputs["input_ids"].masked_fill(answers == 0, -100)
    own = model(**inputs, labels=labels, fused_lm_head=True, use_cache=False)
    ledger.kind = "activations"
    off = model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext()
    with torch.no_grad(), off:
        reference = model(**inputs, labels=labels, fused_lm_head=True, use_cache=False)
    chosen, rejected = (own.log_probs.sum(1) - reference.log_probs.sum(1)).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _reward_loss(model, inputs: dict, ledger: Ledger):
    chosen, rejected = model(**inputs, use_cache=False).logits.squeeze(-1).chunk(2)
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


LOSSES = {"sft": _sft_loss, "dpo": _dpo_loss, "reward": _reward_loss}
