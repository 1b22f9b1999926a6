"""DPO and reward training on pairs with media: the right loss, no second model, nothing learnt without the media."""

import copy

import numpy as np
import pytest
import tiny
import torch

from conftest import SAMPLES
from gemma_trainer import callbacks, checkpoints, demo, families, models, precision, preparation, sources
from gemma_trainer.collator import MultimodalCollator
from gemma_trainer.preference_trainers import GemmaDPOTrainer, GemmaRewardTrainer, dpo_arguments, reward_arguments

FAMILIES = ["gemma3_text", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "gemma4_moe"]
KINDS = ["dpo", "reward"]
DEFAULTS = dict(
    max_length=2048, batch_size=8, grad_accum=1, lr=5e-3, epochs=1, seed=0, save_steps=10_000, eval_steps=10_000,
    evaluate=False, workers=0, report_to=[], checkpointing=False,
)  # fmt: skip


def samples(name):
    return sources.open_rows([str(SAMPLES / name)])


TRAIN, HELD = samples("preferences.jsonl"), samples("preferences-heldout.jsonl")
FEW = [TRAIN[i] for i in range(4, 20)]


def make(kind, folder, processor, model=None, rows=TRAIN, held=None, steps=1, own_reference=True, **options):
    """A trainer on a tiny model, a Gemma 4 unless another is given, with LoRA on its language layers."""
    torch.manual_seed(0)
    if model is None:
        model = demo.make_model(processor.tokenizer, reward=kind == "reward")
    if not hasattr(model, "peft_config") and not options.pop("full", False):
        model = models.add_lora(model, "language", 16, 32, 0.0)
    options_of = {"task": "preference", "modalities": families.modalities(processor, model.config)}
    collators = [MultimodalCollator(processor, 2048, **options_of) for _ in range(2)]
    special = {"dpo": dict(beta=0.1, loss_type=["sigmoid"], loss_weights=None, label_smoothing=0.0),
               "reward": dict(center_rewards_coefficient=None)}[kind]  # fmt: skip
    special |= {key: options.pop(key) for key in list(options) if key in special}
    arguments = {"dpo": dpo_arguments, "reward": reward_arguments}[kind]
    args = arguments(
        folder,
        precision.choose("fp32", "cpu"),
        **(DEFAULTS | {"max_steps": steps, "steps": steps} | options),
        **special,
    )
    trainer = {"dpo": GemmaDPOTrainer, "reward": GemmaRewardTrainer}[kind]
    more = {"own_reference": own_reference} if kind == "dpo" else {}
    return trainer(model, args, rows, collators[0], processor, held, collators[1], **more)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, processor, preference_runs, tmp_path_factory):
    """A trainer with what the demo run has made."""
    base = demo.make_model(processor.tokenizer, reward=request.param == "reward")
    model = models.load_adapter(base, str(preference_runs[request.param][2]))
    return make(request.param, tmp_path_factory.mktemp(request.param), processor, model)


def test_held_out_pairs_are_told_with_the_media_and_only_with_them(trained):
    assert trained.pair_accuracy(HELD) >= 0.85
    assert 0.35 <= trained.pair_accuracy(HELD, blind=True) <= 0.65


def test_with_other_media_or_none_at_all_it_is_chance(trained):
    plain = [dict(row) for row in HELD if isinstance(row.get("prompt"), str)]
    without = [{key: value for key, value in row.items() if key not in ("image", "audio")} for row in plain]
    assert 0.35 <= trained.pair_accuracy(without) <= 0.65
    random, mixed = np.random.default_rng(0), []
    for _ in range(5):
        for kind in ("image", "audio"):
            some = [row for row in plain if kind in row]
            files = random.permutation([row[kind] for row in some]).tolist()
            mixed += [row | {kind: file} for row, file in zip(some, files, strict=True)]
    assert 0.35 <= trained.pair_accuracy(mixed) <= 0.65


def test_before_training_it_is_chance(processor, tmp_path):
    assert make("dpo", tmp_path, processor).pair_accuracy(HELD) == 0.5  # the model is its own reference


# ---- the loss


def by_hand(model, batch):
    """Log-probabilities of both sides' answers from whole logits."""
    batch = {key: value for key, value in batch.items() if key not in ("margin",)}
    mask = batch.pop("completion_mask")[:, 1:]
    logs = model(**batch).logits[:, :-1].float().log_softmax(-1)
    picked = logs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0] * mask
    return picked.sum(1).chunk(2)


@pytest.mark.parametrize("own_reference", [True, False])
def test_the_loss_is_that_of_dpo_against_the_model_as_it_was(processor, tmp_path, own_reference):
    model = models.add_lora(demo.make_model(processor.tokenizer), "language", 4, 8, 0.0)
    if not own_reference:  # an adapter that was trained before
        shake(model)
    trainer = make("dpo", tmp_path, processor, model, own_reference=own_reference)
    assert list(model.peft_config) == ["default"] if own_reference else ["default", "ref"]
    batch = trainer.data_collator([TRAIN[i] for i in (0, 1, 5, 40)])
    with torch.no_grad():
        reference = by_hand(model, batch)
        shake(model)
        policy = by_hand(model, batch)
        change = [new - old for new, old in zip(policy, reference, strict=True)]
        wanted = -torch.nn.functional.logsigmoid(0.1 * (change[0] - change[1])).mean()
        assert wanted > 0.7 or wanted < 0.68  # the adapter has changed something
        assert torch.allclose(trainer.compute_loss(model, batch), wanted, atol=1e-4)
        inputs = {key: value for key, value in batch.items() if key != "margin"}
        assert torch.allclose(trainer.pair_margins(inputs), change[0] - change[1], atol=1e-3)


def shake(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".default." in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_whole_logits_are_never_made(processor, tmp_path):
    trainer = make("dpo", tmp_path, processor, rows=FEW, held=FEW, batch_size=2)

    def refuse(*_):
        raise AssertionError("the head was asked for every position")

    handle = trainer.model.get_output_embeddings().register_forward_hook(refuse)
    trainer.train()
    trainer.evaluate()
    handle.remove()


def test_there_is_no_second_model_but_where_all_weights_are_trained(processor, tmp_path):
    adapted = make("dpo", tmp_path / "a", processor)
    assert adapted.ref_model is None
    names = {name.partition(".lora_")[2] for name, _ in adapted.model.named_parameters() if ".lora_" in name}
    assert all(".default." in f".{name}" for name in names)
    full = make("dpo", tmp_path / "b", processor, full=True, rows=FEW, batch_size=4, lr=1e-3, steps=3)
    before = copy.deepcopy(full.ref_model.state_dict())
    full.train()
    assert all(torch.equal(before[name], value) for name, value in full.ref_model.state_dict().items())
    assert full.pair_margins(dict(full.data_collator(FEW[:4]))).abs().min() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_whose_pairs_were_all_left_out_teaches_nothing(kind, processor, tmp_path):
    trainer = make(kind, tmp_path, processor)
    bad = {"prompt": "Which?", "image": "absent.png", "chosen": "red", "rejected": "blue"}
    batch = trainer.data_collator([bad, bad])
    assert not batch["completion_mask"].any() and batch.counts["skipped_rows"] == 2
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    grads = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
    assert loss.item() == 0.0 and all(not grad.any() for grad in grads)
    assert not any(trainer._metrics["train"].values())


@pytest.mark.parametrize("kind", KINDS)
def test_each_pair_of_a_step_weighs_the_same(kind, processor, tmp_path):
    """Two batches, of which one has lost two of its three pairs, give the gradient of the four pairs together."""
    bad = {"prompt": "Which?", "image": "absent.png", "chosen": "red", "rejected": "blue"}
    rows = [FEW[0], FEW[5], FEW[9], FEW[13]]
    norms = []
    for some, size, accumulate in (([*rows[:3], rows[3], bad, bad], 3, 2), (rows, 4, 1)):
        trainer = make(kind, tmp_path / str(size), processor, rows=some, batch_size=size, grad_accum=accumulate)
        trainer.max_bad_media = 1.0
        trainer.sampler = torch.utils.data.SequentialSampler(some)
        trainer.sampler.set_epoch, trainer.sampler.lengths = lambda _: None, np.zeros(0)
        trainer.train()
        norms.append([(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e][0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_margins_and_centering_are_part_of_the_reward_loss(processor, tmp_path):
    rows = [{"prompt": "Name a fruit.", "chosen": "Pear", "rejected": "Train", "margin": 2.0}]
    trainer = make("reward", tmp_path, processor, center_rewards_coefficient=0.5)
    batch = trainer.data_collator(rows)
    chosen, rejected = trainer.model(**batch).logits.squeeze(-1)
    wanted = -torch.nn.functional.logsigmoid(chosen - rejected - 2.0) + 0.5 * (chosen + rejected) ** 2
    assert torch.allclose(trainer.compute_loss(trainer.model, batch), wanted, atol=1e-5)


def test_every_loss_of_trl_has_a_gradient(processor, tmp_path):
    smoothing = {"exo_pair": 0.1, "robust": 0.1}
    settings = [
        dpo_arguments(tmp_path, precision.choose("fp32", "cpu"), beta=0.1, loss_type=[loss], loss_weights=[1.0],
                      label_smoothing=smoothing.get(loss, 0.0), steps=1, max_steps=1, **DEFAULTS)
        for loss in preparation.DPO_LOSSES
    ]  # fmt: skip
    trainer = make("dpo", tmp_path, processor, rows=FEW)
    shake(trainer.model)
    batch = trainer.data_collator(FEW[:3])
    trainer.model.train()
    for args in settings:
        trainer.loss_types, trainer.loss_weights = args.loss_type, args.loss_weights
        trainer.label_smoothing = args.label_smoothing
        trainer.model.zero_grad()
        found = trainer.compute_loss(trainer.model, batch)
        found.backward()
        norms = [p.grad.norm().item() for p in trainer.model.parameters() if p.grad is not None]
        assert np.isfinite([found.item(), *norms]).all() and max(norms) > 0, args.loss_type


# ---- every family


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_learns_from_pairs(name, kind, tmp_path, media):
    from gemma_trainer.reward_model import reward_class

    processor = tiny.make_processor(name)
    model = tiny.make_model(name, processor)
    if kind == "reward":
        config = copy.deepcopy(type(model.config)(**model.config.to_dict()))
        config.num_labels = 1
        model = reward_class(config)(config)
    rows = [{"prompt": "What is it?", "chosen": "red", "rejected": "blue"}]
    if name != "gemma3_text":
        rows.append({"prompt": "What is it?", "image": str(media / "red.png"), "chosen": "red", "rejected": "blue"})
    if name in ("gemma3n", "gemma4", "gemma4_unified"):
        rows.append({"prompt": "What is it?", "audio": str(media / "short.flac"), "chosen": "red", "rejected": "blue"})
    trainer = make(kind, tmp_path, processor, model, rows, steps=4, batch_size=len(rows), lr=1e-2)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and trainer.counts["rows"] == 4 * len(rows)


# ---- resuming, saving, telling


@pytest.mark.parametrize("kind", [*KINDS, "dpo from an adapter"])
def test_a_resumed_run_ends_as_an_unbroken_one(kind, processor, tmp_path):
    kind, _, adapter = kind.partition(" ")
    options = dict(rows=FEW, batch_size=4, steps=8, save_steps=4, own_reference=not adapter)

    def begun():
        if not adapter:
            return None
        model = models.add_lora(demo.make_model(processor.tokenizer), "language", 4, 8, 0.0)
        shake(model)
        return model

    whole = make(kind, tmp_path / "run", processor, begun(), **options)
    whole.train()
    again = make(kind, tmp_path / "run", processor, begun(), **options)
    again.train(resume_from_checkpoint=str(checkpoints.checkpoints(tmp_path / "run")[0]))
    for (name, one), (_, other) in zip(whole.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    assert whole.counts == again.counts and whole.counts["rows"] == 32


def test_going_on_from_an_adapter_saves_that_one_alone(processor, tmp_path, model_folder):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(model_folder)
    first = models.add_lora(base, "language", 4, 8, 0.0)
    shake(first)
    first.save_pretrained(tmp_path / "sft")
    assert models.base_of(str(tmp_path / "sft")) == str(model_folder)
    loaded = models.load_adapter(AutoModelForImageTextToText.from_pretrained(model_folder), str(tmp_path / "sft"))
    trainer = make("dpo", tmp_path / "dpo", processor, loaded, own_reference=False, steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "ref").exists()
    alone = AutoModelForImageTextToText.from_pretrained(model_folder)
    again = PeftModel.from_pretrained(alone, tmp_path / "saved").state_dict()
    theirs = {name: value for name, value in trainer.model.state_dict().items() if ".default." in name}
    assert theirs and all(torch.equal(again[name], value) for name, value in theirs.items())


def test_an_adapter_of_another_model_is_refused(tmp_path, processor, model_folder):
    from transformers import AutoModelForImageTextToText

    from gemma_trainer.errors import CannotLoad

    other = models.add_lora(demo.make_model(processor.tokenizer, hidden_size=32), "language", 4, 8, 0.0)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CannotLoad, match="does not fit the model"):
        models.load_adapter(AutoModelForImageTextToText.from_pretrained(model_folder), str(tmp_path / "other"))
    with pytest.raises(CannotLoad, match="no adapter"):
        models.base_of(str(model_folder))


def test_a_model_that_was_never_tuned_on_the_format_is_told(processor, tmp_path):
    trainer = make("dpo", tmp_path, processor)
    assert "hardly tuned on this format" in trainer.untuned(TRAIN)
    end = processor.tokenizer.convert_tokens_to_ids("<turn|>")
    with torch.no_grad():  # a head that always ends the turn
        trainer.model.get_output_embeddings().weight[:] = 0
        states = []
        handle = trainer.model.get_base_model().model.register_forward_hook(lambda *a: states.append(a[-1]))
        trainer.untuned(TRAIN)
        handle.remove()
        mean = states[0].last_hidden_state.mean((0, 1))
        trainer.model.get_output_embeddings().weight[end] = 100 * mean / mean.norm()
    assert trainer.untuned(TRAIN) == ""


def test_a_collapse_of_the_chosen_answers_is_told_once(capfd):
    state = type("State", (), {"global_step": 7})
    watch = callbacks.WarnOfCollapse(beta=0.1)
    watch.on_log(None, state, None, {"rewards/chosen": -0.5, "logps/chosen": -25.0})  # 5 of 20 nats
    watch.on_log(None, state, None, {"loss": 1.0})
    assert capfd.readouterr().err == ""
    for _ in range(2):
        watch.on_log(None, state, None, {"rewards/chosen": -3.0, "logps/chosen": -50.0})
    told = capfd.readouterr().err
    assert told.count("have lost 30 nats, from -20 to -50") == 1
