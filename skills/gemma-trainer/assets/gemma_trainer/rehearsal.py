"""A training step played through without weights: every tensor has a shape and a size, none has a value.

The step is that of the real modules, with autograd, checkpointing, autocast and the optimizer as they are, on PyTorch's
fake tensors. A ledger sees each tensor come and go, so what it tells of memory is counted, not estimated: what autograd
keeps for the backward pass, what the backward pass makes besides, the gradients, the optimizer's state and temporaries.

Token ids, masks and counts are small and do have values, since models look at them: where an image's tokens go, how
many tokens are trained.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

KNOWN = 2**21  # elements of the largest tensors whose values are worked out
MAPPED = "mapped"  # a kind that takes no memory
aten = torch.ops.aten


@dataclass(frozen=True)
class Played:
    """What a step takes: for each of "forward", "backward" and "optimizer" the bytes at its worst, by kind of tensor
    (`weights`, `adapters`, `gradients`, `optimizer`, `activations`, `loss_head`, `media_towers`)."""

    moments: dict[str, dict[str, int]]

    @property
    def moment(self) -> str:
        """When it takes the most."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak(self) -> dict[str, int]:
        return self.moments[self.moment]

    def deeper(self, other: Played, share: float) -> Played:
        """What a deeper model takes, from what this one takes and an `other` of more layers.

        Args:
            share: how many times the layers that the other has more.
        """
        moments = {}
        for moment, here in self.moments.items():
            there = other.moments[moment]
            kinds = here.keys() | there.keys()
            parts = {kind: here.get(kind, 0) + share * (there.get(kind, 0) - here.get(kind, 0)) for kind in kinds}
            moments[moment] = {kind: round(size) for kind, size in parts.items()}
        return Played(moments)


def _is_small(tensor) -> bool:
    """Whether a tensor's value is worth working out; one that repeats another's elements is as large as that."""
    return tensor.untyped_storage().nbytes() <= KNOWN * tensor.element_size()


class Ledger(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, each under the kind that `kind` had when it was made, and works
    out the values of small integer tensors beside their fakes.

    Args:
        fakes: the mode that makes the tensors fake; entered first.
    """

    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.fakes, self.kind, self.moment = fakes, "activations", "forward"
        self.bytes: Counter[str] = Counter()
        self.moments: dict[str, dict[str, int]] = {}
        self.alive, self.highest = 0, Counter()
        self._kinds: dict[int, str] = {}  # of each storage that is alive
        self._values = WeakTensorKeyDictionary()

    # -- bytes

    def count(self, tensor, kind: str | None = None) -> None:
        """Begin to count a tensor's storage, once; with `kind`, under that from now on."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        before = self._kinds.get(key)
        if before is None:
            self._kinds[key] = kind or self.kind
            self.add(size, self._kinds[key])
            weakref.finalize(storage, self._gone, key, size)
        elif kind and kind != before:
            self._kinds[key] = kind
            self.bytes[before] -= size
            self.bytes[kind] += size

    def add(self, size: int, kind: str) -> None:
        """Count bytes that nothing here stands for, until the end."""
        self.bytes[kind] += size
        self.alive += size if kind != MAPPED else 0
        if self.alive > self.highest[self.moment]:
            self.highest[self.moment], self.moments[self.moment] = (
                self.alive,
                self.bytes - Counter({MAPPED: self.bytes[MAPPED]}),
            )

    def _gone(self, key: int, size: int) -> None:
        self.bytes[self._kinds.pop(key)] -= size
        self.alive -= size

    # -- values

    def fake(self, tensor):
        """A fake of a real tensor, whose value is remembered where it is one of integers."""
        fake = self.fakes.from_tensor(tensor)
        if not tensor.is_floating_point():
            self._remember(fake, tensor)
        return fake

    def _remember(self, fake, real) -> None:
        if isinstance(fake, FakeTensor) and _is_small(real):
            self._values[fake] = real

    def _value(self, tensor):
        """A tensor's value, None where it is not known."""
        return self._values.get(tensor) if isinstance(tensor, FakeTensor) else tensor

    def _work_out(self, func, args, kwargs, outs: list) -> None:
        """Do what was done to fakes to their values, where all of them are known."""
        if func in UNKNOWN or torch.Tag.nondeterministic_seeded in func.tags or not all(map(_is_small, outs)):
            return
        leaves, spec = tree_flatten((args, kwargs))
        if outs[0].is_floating_point() and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return
        values = [self._value(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if any(value is None for value, leaf in zip(values, leaves, strict=True) if isinstance(leaf, torch.Tensor)):
            for one in outs:  # written into, perhaps
                self._values.pop(one, None)
            return
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_unflatten(values, spec)
            found = [one for one in tree_flatten(func(*args, **kwargs))[0] if isinstance(one, torch.Tensor)]
        for one, real in zip(outs, found, strict=True):
            self._remember(one, real)

    # -- operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ANSWERED:
            out = ANSWERED[func](self, *args, **kwargs)
        else:
            if func is aten.index.Tensor or func is aten.index_put_.default or func is aten.index_put.default:
                args = (args[0], [place for one in args[1] for place in self._as_places(one)], *args[2:])
            out = func(*args, **kwargs)
            made = [out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]
            outs = [one for one in made if isinstance(one, FakeTensor)]
            if outs:
                self._work_out(func, args, kwargs, outs)
        for one in [out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]:
            if isinstance(one, torch.Tensor):
                self.count(one)
        return out

    def _as_places(self, index) -> list:
        """A mask that selects, as the places that it selects in each dimension. All where the mask is not known."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        value = self._value(index)
        with _disable_current_modes():
            count = index.numel() if value is None else int(value.count_nonzero())
        return [index.new_empty(count, dtype=torch.int64) for _ in range(index.dim())]

    def _scalar(self, tensor):
        value = self._value(tensor)
        if value is None:
            return {torch.bool: True}.get(tensor.dtype, 1.0 if tensor.is_floating_point() else 1)
        with _disable_current_modes():
            return value.item()

    def _nonzero(self, tensor):
        value = self._value(tensor)
        with _disable_current_modes():
            found = (torch.ones(tensor.shape) if value is None else value).nonzero()
        return self.fake(found)

    def _grouped(self, first, second, offsets=None, bias=None, out_dtype=None):
        """A matrix product for each expert. Rows of all experts [S, K] by [E, K, N] -> [S, N]; for the gradient of the
        weights [K, S] by [S, N] -> [E, K, N]."""
        shape = [first.shape[0], second.shape[-1]]
        if first.dim() == second.dim() == 2:
            shape = [len(offsets), *shape]
        return first.new_empty(shape)


UNKNOWN = {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
ANSWERED = {
    aten._local_scalar_dense.default: Ledger._scalar,
    aten.nonzero.default: Ledger._nonzero,
    aten._grouped_mm.default: Ledger._grouped,
    aten.equal.default: lambda ledger, first, second: True,
}


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


TOWERS = {
    "image": ("vision_tower", "vision_embedder", "embed_vision", "multi_modal_projector"),
    "audio": ("audio_tower", "embed_audio"),
}


def _is_idle(name: str, step: Step) -> bool:
    """Whether a parameter is one of a tower that the data have nothing for: it never gets a gradient."""
    words = name.split(".")
    return any(tower in words for kind, towers in TOWERS.items() if kind not in step.media for tower in towers)


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
    from .models import quantized_linears

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

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
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

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
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
