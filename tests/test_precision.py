"""Which number format is chosen where; CUDA and Apple Silicon are stood in for."""

import platform

import pytest
import torch

from gemma_trainer import precision
from gemma_trainer.errors import UsageError


def test_a_cpu_takes_float32_and_says_so():
    chosen = precision.choose("auto", "cpu")
    assert (chosen.dtype, chosen.torch_dtype) == ("float32", torch.float32) and "float32 on cpu" in chosen.reason
    assert precision.choose("bf16", "cpu").dtype == "bfloat16"


@pytest.mark.parametrize("native", [True, False])
def test_cuda_counts_native_bf16_only(monkeypatch, native):
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: asked.append(including_emulation) or native
    )
    assert precision.choose("auto", "cuda").dtype == ("bfloat16" if native else "float32")
    assert asked == [False]


@pytest.mark.parametrize(("release", "probe", "dtype"), [
    ("15.1", True, "bfloat16"), ("14.0", True, "bfloat16"), ("14.0", False, "float32"), ("13.6", True, "float32"),
    ("", True, "float32"),
])  # fmt: skip
def test_apple_silicon_needs_macos_14_and_a_live_probe(monkeypatch, release, probe, dtype):
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    monkeypatch.setattr(precision, "_probe", lambda device: probe)
    assert precision.choose("auto", "mps").dtype == dtype


def test_the_probe_trains_a_small_step():
    assert precision._probe("cpu") is True
    assert precision._probe("meta") is False  # a device that computes nothing


@pytest.mark.parametrize("device", ["mps", "cpu"])
def test_fp16_is_refused_where_it_ends_in_nan(device):
    with pytest.raises(UsageError, match="NaN"):
        precision.choose("fp16", device)


def test_bf16_is_refused_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(precision, "supports_bf16", lambda device: False)
    with pytest.raises(UsageError, match="no native bfloat16"):
        precision.choose("bf16", "cuda")
