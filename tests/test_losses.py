"""The chunked loss equals the plain one, in value and gradient, and scores trained positions only."""

import pytest
import torch

from conftest import talk
from gemma_trainer import demo, losses
from gemma_trainer.collator import MultimodalCollator


def plain_loss(hidden, weight, labels, num_items, softcap):
    logits = (hidden @ weight.t()).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total / num_items


@pytest.mark.parametrize("softcap", [None, 30.0, 3.0])
@pytest.mark.parametrize("trained", [0.0, 0.2, 1.0])
def test_value_and_gradients_equal_the_plain_loss(softcap, trained, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 7)  # several chunks, the last one short
    torch.manual_seed(0)
    hidden = torch.randn(3, 20, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.where(torch.rand(3, 20) < trained, torch.randint(0, 50, (3, 20)), -100)
    found = losses.chunked_loss(hidden, weight, labels, num_items=11, softcap=softcap)
    gradients = torch.autograd.grad(found.loss, (hidden, weight))
    expected = plain_loss(hidden, weight, labels, 11, softcap)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected, (hidden, weight)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert found.scored == (labels[:, 1:] != -100).sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probabilities_and_their_gradients_equal_those_of_whole_logits(softcap, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 7)
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 20, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    labels = torch.where(torch.rand(3, 20) < 0.4, torch.randint(0, 50, (3, 20)), -100)
    found, scale = losses.log_probs(hidden, weight, labels, softcap), torch.randn(3, 19)
    logits = hidden @ weight.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logs, wanted = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    asked = wanted != -100
    plain = logs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0] * asked
    assert torch.allclose(found.log_probs, plain, atol=1e-5)
    assert torch.allclose(found.entropy, -(logs.exp() * logs).sum(-1) * asked, atol=1e-5)
    assert torch.equal(found.is_top1, (logits[:, :-1].argmax(-1) == wanted) & asked)
    assert torch.allclose(found.mean_logits, logits[:, :-1].mean(-1) * asked, atol=1e-5)
    gradients = torch.autograd.grad((found.log_probs * scale).sum(), (hidden, weight))
    for one, other in zip(gradients, torch.autograd.grad((plain * scale).sum(), (hidden, weight)), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_log_probabilities_of_nothing_are_zero_with_zero_gradients():
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    found = losses.log_probs(hidden, torch.randn(9, 8), torch.full((2, 5), -100)).log_probs
    found.sum().backward()
    assert not found.any() and not hidden.grad.any()


def test_nothing_trained_is_zero_with_zero_gradients():
    hidden = torch.randn(1, 5, 8, requires_grad=True)
    loss = losses.chunked_loss(hidden, torch.randn(9, 8), torch.full((1, 5), -100)).loss
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(1, 5, 8, requires_grad=True), torch.randn(9, 8)
    losses.chunked_loss(hidden, weight, torch.randint(0, 9, (1, 5))).loss.backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_no_tensor_of_all_positions_by_the_vocabulary_is_made():
    rows, length, vocabulary, trained = 2, 400, 3000, 10
    labels = torch.full((rows, length), -100)
    labels[:, -trained:] = 1
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == vocabulary:
                    largest = max(largest, value.shape[0])
            return result

    hidden = torch.randn(rows, length, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8)
    with Watch():
        losses.chunked_loss(hidden, weight, labels).loss.backward()
    assert largest == rows * trained


def test_a_model_with_the_chunked_loss_agrees_with_itself(processor):
    model = demo.make_model(processor.tokenizer)
    batch = MultimodalCollator(processor)([talk("hi", "hello"), talk("What is the capital of Italy?", "Rome.")])
    plain = model(**batch).loss
    losses.use_chunked_loss(model)
    assert model(**batch).loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert model(**{key: value for key, value in batch.items() if key != "labels"}).logits is not None
    produced = model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=2, do_sample=False)
    assert produced.shape[1] == batch["input_ids"].shape[1] + 2
