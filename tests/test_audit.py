"""What is patched of a model is told by where its code lives, and by what it does."""

import copy
import functools
import sys
import types

import pytest

from conftest import talk
from gemma_trainer import audit, extensions, unsloth_backend
from gemma_trainer.callbacks import Progress
from gemma_trainer.errors import EnvironmentUnfit, TrainerError


def function_in(file: str):
    """A function whose code lives in `file`."""
    made = {}
    exec(compile("def forward(self, x):\n    return x", str(file), "exec"), made)
    return made["forward"]


@pytest.fixture
def unsloth(tmp_path, monkeypatch):
    """An Unsloth of a GPU that is imported, in a folder whose own name does not count."""
    home = tmp_path / "unsloth" / "site-packages"
    for name in ("unsloth", "unsloth_zoo"):
        facts = {"__file__": str(home / name / "__init__.py"), "__version__": "1", "_IS_MLX": False}
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**facts, _IS_CPU_BACKEND=False))
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", str(tmp_path / "cache"))
    monkeypatch.delenv("UNSLOTH_COMPILE_DISABLE", raising=False)
    return home, tmp_path / "cache"


def test_code_is_found_through_wrappers_whatever_it_is_named(unsloth):
    home, cache = unsloth
    plain, patched = function_in(home / "transformers" / "x.py"), function_in(home / "unsloth_zoo" / "x.py")
    patched.__module__ = patched.__qualname__ = "transformers.models.gemma4"
    compiled = functools.partial(types.MethodType(patched, 1))
    wrapper = function_in("torch/_dynamo/eval_frame.py")
    wrapper._torchdynamo_orig_callable = compiled
    for function in (patched, compiled, wrapper, function_in(cache / "module.py")):
        assert audit.in_unsloth(audit.code_file(function))
    assert not audit.in_unsloth(audit.code_file(plain)) and not audit.in_unsloth(audit.code_file(len))


def test_the_share_of_patched_layers_decides(unsloth, make_trainer, monkeypatch):
    home, _ = unsloth
    trainer = make_trainer([talk("a", "b")] * 4)
    found = audit.look_at(trainer, logits=False)
    assert found["verdict"] == "NOT" and found["model"]["of_unsloth"] == found["adapters"]["of_unsloth"] == 0
    one = next(module for module in trainer.model.modules() if hasattr(module, "lora_A"))
    one.forward = types.MethodType(function_in(home / "unsloth" / "kernels.py"), one)
    found = audit.look_at(trainer, logits=False)
    assert found["verdict"] == "PARTLY" and found["adapters"]["of_unsloth"] == 1 < found["adapters"]["all"]
    assert any("LoRA layers 1 are Unsloth's" in reason for reason in found["reasons"])
    assert "PARTLY" in audit.summary(found)


GPU = {"unsloth": True, "version": "1", "backend": "gpu"}
WHOLE = {
    "import": GPU,
    "trainer": {"loop": "_fast_inner_training_loop", "module": "UnslothSFTTrainer", "of_unsloth": True},
    "model": {"of_unsloth": 90, "all": 100},
    "adapters": {"of_unsloth": 24, "all": 24},
    "switches": {"UNSLOTH_RETURN_LOGITS": "0"},
    "makes_logits": False,
}


@pytest.mark.parametrize(
    "changed, verdict, reason",
    [
        ({}, "ACCELERATED", ""),
        ({"import": GPU | {"backend": "cpu"}}, "NOT", "cpu backend"),
        ({"import": {"unsloth": False}}, "NOT", "not in use"),
        ({"switches": {"UNSLOTH_COMPILE_DISABLE": "partial"}}, "PARTLY", "UNSLOTH_COMPILE_DISABLE=partial"),
        ({"makes_logits": True}, "PARTLY", "whole logits"),
        ({"trainer": WHOLE["trainer"] | {"loop": "_inner_training_loop"}}, "PARTLY", "transformers' own"),
        ({"trainer": WHOLE["trainer"] | {"of_unsloth": False}}, "PARTLY", "has not rewritten it"),
        ({"model": {"of_unsloth": 0, "all": 100}}, "PARTLY", "no layer"),
        ({"model": {"of_unsloth": 0, "all": 9}, "adapters": {"of_unsloth": 0, "all": 4}}, "NOT", "no layer"),
        ({"adapters": {"of_unsloth": 0, "all": 0}}, "ACCELERATED", ""),  # all weights are trained
    ],
)
def test_the_verdict(changed, verdict, reason):
    found, reasons = audit.judge(WHOLE | changed)
    assert found == verdict and (reason in reasons[0] if reason else not reasons)


def test_whole_logits_are_seen_by_doing_a_step(model, make_trainer):
    trainer = make_trainer([talk("a", "b")] * 2)
    batch = dict(trainer.data_collator([talk("a", "b"), talk("c", "d e")]))
    trainer.model.eval()
    assert not audit.makes_logits(trainer.model, batch) and not trainer.model.training
    plain = copy.deepcopy(model)
    assert audit.makes_logits(plain, batch) and not plain.training
    assert not plain.get_output_embeddings()._forward_hooks


# ---- what a run adds to its trainer, and what it may not lose


def test_a_run_that_has_lost_something_of_ours_does_not_start(make_trainer):
    trainer = make_trainer([talk("a", "b")] * 2)
    collators, callback = (trainer.data_collator, trainer._eval_collator), Progress()
    trainer.add_callback(callback)
    extensions.check_in_use(trainer, collators, [callback])
    with pytest.raises(TrainerError, match="Progress"):
        extensions.check_in_use(trainer, collators, [callback, Progress()])
    trainer.data_collator = lambda rows: rows
    with pytest.raises(TrainerError, match="the collator"):
        extensions.check_in_use(trainer, collators, [callback])
    trainer.data_collator = collators[0]
    trainer.training_step = lambda *args: None  # as a patch of an instance does
    with pytest.raises(TrainerError, match="the method training_step"):
        extensions.check_in_use(trainer, collators, [callback])


def test_a_method_that_a_patch_puts_before_ours_is_seen(make_trainer):
    trainer = make_trainer([talk("a", "b")] * 2)
    trainer.__class__ = type("Patched", (type(trainer),), {"compute_loss": lambda self, *args: None})
    extensions.check_in_use(trainer, (trainer.data_collator, trainer._eval_collator), [])  # a subclass of ours may
    plain = next(kind for kind in type(trainer).__mro__ if kind.__name__ == "SFTTrainer")
    trainer.__class__ = type("Other", (plain,), {"compute_loss": lambda self, *args: None})
    with pytest.raises(TrainerError, match="the method"):
        extensions.check_in_use(trainer, (trainer.data_collator, trainer._eval_collator), [])


def test_arguments_that_a_trainer_changes_are_put_back_or_refused():
    asked = types.SimpleNamespace(bf16=False, fp16=False, optim="adamw_torch", bf16_full_eval=False, seed=1)

    def make(**changed):
        for name, value in changed.items():
            setattr(asked, name, value)
        return types.SimpleNamespace(args=asked)

    made = unsloth_backend.keep_arguments(
        lambda: make(bf16_full_eval=True, seed=3407, optim="adamw_torch_fused"), asked
    )
    assert (made.args.bf16_full_eval, made.args.seed) == (False, 1)
    assert made.args.optim == "adamw_torch_fused"  # the same, in one kernel
    with pytest.raises(EnvironmentUnfit, match="Unsloth turned bf16 on"):
        unsloth_backend.keep_arguments(lambda: make(bf16=True), asked)
