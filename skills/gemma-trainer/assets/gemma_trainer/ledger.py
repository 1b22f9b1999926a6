"""The memory of tensors that have a shape and a size but no value: counted as each one comes and goes.

Token ids, masks and counts are small and do have values, since models look at them: where an image's tokens go, how
many tokens are trained.
"""

from __future__ import annotations

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
