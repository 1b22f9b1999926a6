"""Which device and number format a run uses, and why."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from .errors import UsageError


@dataclass(frozen=True)
class Precision:
    """`device` is "cuda", "mps" or "cpu"; `dtype` names a torch dtype; `reason` is one line for the user."""

    device: str
    dtype: str
    reason: str

    @property
    def torch_dtype(self):
        import torch

        return getattr(torch, self.dtype)


def device_type() -> str:
    """The best device here: "cuda", "mps" or "cpu"."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def supports_bf16(device: str) -> bool:
    """Whether a device computes in bfloat16 natively.

    CUDA: compute capability 8.0 and later; what PyTorch emulates on older cards does not count. Apple Silicon: macOS
    14 and later, and a live probe, forward and backward. CPU: AVX512-BF16 or AMX.
    """
    import torch

    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "mps":
        release = platform.mac_ver()[0]
        return bool(release) and int(release.split(".")[0]) >= 14 and _probe("mps")
    return torch.cpu._is_avx512_bf16_supported() if hasattr(torch.cpu, "_is_avx512_bf16_supported") else False


def _probe(device: str) -> bool:
    """One small training step in bfloat16: right to its accuracy, and finite."""
    import torch

    try:
        weight = torch.full((8, 8), 0.5, device=device, dtype=torch.bfloat16, requires_grad=True)
        out = torch.nn.functional.gelu(torch.ones(4, 8, device=device, dtype=torch.bfloat16) @ weight)
        out.float().sum().backward()
        return bool((out.float() - 4.0).abs().max() < 0.05 and torch.isfinite(weight.grad).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def choose(wanted: str = "auto", device: str | None = None) -> Precision:
    """Choose the number format.

    Args:
        wanted: "auto", "bf16", "fp16" or "fp32". Auto takes bf16 where the GPU has it and float32 elsewhere, also on a
            CPU, where bf16 saves memory but seldom time. fp16 is never chosen: Gemma's activations overflow in it.

    Raises:
        UsageError: fp16 off CUDA, where it ends in NaN; bf16 where the GPU has none.
    """
    device = device or device_type()
    if wanted == "fp32":
        return Precision(device, "float32", f"float32 on {device}: asked for")
    if wanted == "fp16":
        if device != "cuda":
            raise UsageError(f"--precision fp16 on {device} ends in NaN: use --precision auto")
        return Precision(device, "float16", "float16 on cuda: asked for; Gemma may overflow in it, watch for NaN")
    native = supports_bf16(device)
    if wanted == "bf16":
        if device != "cpu" and not native:
            raise UsageError(f"--precision bf16: this {device} device has no native bfloat16: use --precision fp32")
        return Precision(device, "bfloat16", f"bfloat16 on {device}: asked for")
    if device == "cpu":
        return Precision(device, "float32", "float32 on cpu: exact, and as fast as bfloat16 on most processors")
    if native:
        return Precision(device, "bfloat16", f"bfloat16 on {device}: native here")
    return Precision(device, "float32", f"float32 on {device}: no native bfloat16, and float16 overflows")
