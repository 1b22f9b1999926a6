"""Log-probabilities in batches are those of one row at a time, and of the answers they are said to be of."""

import copy

import pytest
import tiny
import torch

from conftest import ask, talk
from gemma_trainer import first_batch, likelihood, models
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.errors import RowError
from gemma_trainer.inference import Policy

CHATS = [
    talk("hi", "hello"), talk("What is the capital of Italy?", "Rome.", "And of France, west of it?", "Paris."),
    {"prompt": "Name a fruit", "completion": "Pear, a long and sweet one"}, {"text": "a text without turns"},
    talk("Count", "one two three four five six seven eight nine ten eleven twelve"),
]  # fmt: skip


def policy_of(model, processor, max_length=512, base=None):
    collator = MultimodalCollator(processor, max_length, on_bad_media="skip", placeholders="needed")
    return Policy("tiny", model.eval(), processor, collator, base)


def adapted(model):
    """The model with a LoRA that changes what it says."""
    torch.manual_seed(0)
    tuned = models.add_lora(copy.deepcopy(model), "language", 4, 8, 0.0)
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return tuned.eval()


def assert_same(found, alone):
    assert sorted(found) == list(range(len(alone)))
    for index, wanted in enumerate(alone):
        assert wanted and found[index] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3", "gemma3n", "gemma4", "gemma4_unified"])
def test_rows_in_batches_are_rows_alone_with_the_adapter_on_and_off(name, media, monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 5)  # several chunks, the last one short
    processor = tiny.make_processor(name)
    policy = policy_of(adapted(tiny.make_model(name, processor)), processor, base="tiny")
    shown = ["red.png", "blue.jpg"], ["red.png"], ["one.wav"], ["red.png", "three.wav"], ["short.flac"], ["three.wav"]
    kinds = tiny.MODALITIES[name]
    shown = [files for files in shown if kinds >= {"audio" if ".wav" in f or ".flac" in f else "image" for f in files}]
    rows = CHATS + [ask(media, *files, answer="It is red.") for files in shown]
    on = dict(likelihood.token_log_probs(policy, rows, 4))
    assert_same(on, first_batch.log_probs(policy.model, policy.collator, rows))
    with policy.untuned():
        off = dict(likelihood.token_log_probs(policy, rows, 4))
        assert_same(off, first_batch.log_probs(policy.model, policy.collator, rows))
    assert all(abs(sum(on[index]) - sum(off[index])) > 1e-3 for index in on)


def test_the_mean_over_all_tokens_is_the_loss_in_training(model, processor):
    policy = policy_of(model, processor)
    found = [value for _, values in likelihood.token_log_probs(policy, CHATS, 2) for value in values]
    batch = policy.collator(CHATS)
    assert len(found) == (batch["labels"][:, 1:] != -100).sum()
    assert -sum(found) / len(found) == pytest.approx(model(**batch).loss.item(), abs=1e-4)


def test_a_row_without_log_probabilities_says_why_and_leaves_the_others_alone(model, processor, media):
    rows = [
        CHATS[0], {"messages": 3}, ask(media, "page.jpg"), talk("hi", "ho " * 80),
        talk("hi", "ho", loss_type="context_only"), ask(media, "gone.wav"), talk("hi"), RowError("file:7", "not JSON"),
        CHATS[2],
    ]  # fmt: skip
    policy = policy_of(model, processor, max_length=80)
    found = dict(likelihood.token_log_probs(policy, rows, 4))
    alone = dict(likelihood.token_log_probs(policy, [CHATS[0], CHATS[2]], 1))
    assert found[0] == pytest.approx(alone[0], abs=1e-4) and found[8] == pytest.approx(alone[1], abs=1e-4)
    told = {1: "messages must be", 2: "page.jpg", 3: "longer than --max-len (80)", 4: "nothing in it is trained",
            5: "gone.wav", 6: "nothing in it is trained", 7: "not JSON"}  # fmt: skip
    assert len(found) == 9
    for index, reason in told.items():
        assert reason in found[index]
    assert dict(likelihood.token_log_probs(policy, [], 4)) == {}


def test_memory_that_runs_out_halves_the_batch(model, processor, monkeypatch):
    sizes, score = [], likelihood._log_probs

    def scarce(inner, states, targets):
        sizes.append(len(states))
        if len(states) > 12:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return score(inner, states, targets)

    rows = [talk("hi", "hello")] * 9
    policy = policy_of(model, processor)
    wanted = dict(likelihood.token_log_probs(policy, rows, 1))[0]
    monkeypatch.setattr(likelihood, "_log_probs", scarce)
    found = dict(likelihood.token_log_probs(policy, rows, 8))
    assert max(sizes) == 8 * len(wanted) and sizes.count(max(sizes)) == 1
    assert [found[index] == pytest.approx(wanted, abs=1e-4) for index in range(9)] == [True] * 9


def test_logits_are_made_for_trained_tokens_only_some_at_a_time(model, processor, monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 6)
    seen, head = [], model.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, given, made: seen.append(made.shape[:-1].numel()))
    found = dict(likelihood.token_log_probs(policy_of(model, processor), CHATS, 8))
    hook.remove()
    assert max(seen) == 6 and sum(seen) == sum(map(len, found.values()))


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_pairs_have_the_likelihood_of_each_answer(model, processor, media):
    shown = ask(media, "red.png", "one.wav")["messages"][:1]
    sides = [("Rome.", "Paris, I think."), ("It is red.", "Blue.")]
    rows = [pair("What is the capital of Italy?", *sides[0]), pair(shown, *sides[1])]
    policy = policy_of(model, processor)
    found = dict(likelihood.pair_log_probs(policy, [*rows, {"prompt": "hi", "chosen": "ho"}], 3))
    for index, prompt in enumerate([[{"role": "user", "content": rows[0]["prompt"]}], shown]):
        for side, answer in enumerate(sides[index]):
            row = {"messages": [*prompt, {"role": "assistant", "content": answer}]}
            wanted = first_batch.log_probs(model, policy.collator, [row])[0]
            assert found[index][side].log_prob == pytest.approx(sum(wanted), abs=1e-3)
            assert found[index][side].tokens == len(wanted)
            assert found[index][side].per_token == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)
    assert "no rejected answer" in found[2]
    assert policy.collator.task == "sft"


def test_choices_have_the_likelihood_of_each_as_the_answer(model, processor, media):
    chat = talk("Name a town.", "Bonn.", "Another one?", "Rome.")
    asked = [(chat, ["Rome.", "Oslo, in the north.", "Ur"]), (ask(media, "red.png"), ["red", "blue"]), ({}, ["a"]),
             (talk("hi"), []), ({"text": "no turns"}, ["a"]), (talk("hi", "ho"), ["a", "b " * 300])]  # fmt: skip
    policy = policy_of(model, processor)
    found = dict(likelihood.choice_log_probs(policy, asked, 3))
    for choice, measured in zip(asked[0][1], found[0], strict=True):
        row = {"messages": [*chat["messages"][:3], {"role": "assistant", "content": choice}]}
        row["messages"][1] = row["messages"][1] | {"train": False}
        wanted = first_batch.log_probs(model, policy.collator, [row])[0]
        assert measured == (pytest.approx(sum(wanted), abs=1e-3), len(wanted))
    assert len(found[1]) == 2 and found[1][0].log_prob != found[1][1].log_prob
    assert len(found) == 6 and [("format" in found[2]), "choose" in found[3], "turns" in found[4]] == [True] * 3
    assert "longer than --max-len" in found[5]
