"""Direct preference optimization through Unsloth, whose reference is the model without its adapter."""

import pytest
from stacks import Runs, assert_same, curve

from conftest import SAMPLES


def test_the_reference_of_preferences_is_the_same_on_the_gpu_stack(tmp_path):
    run = Runs(tmp_path)
    pairs = ("--model", "demo", "--dataset", str(SAMPLES / "preferences.jsonl"), "--max-steps", "5")
    pairs += ("--batch-size", "4", "--grad-accum", "1")
    plain, unsloth = (run(stack, "dpo_train.py", *pairs) for stack in ("hf", "gpu"))
    assert_same(plain, unsloth)
    names = "rewards/chosen", "rewards/margins", "logps/rejected"
    assert curve(plain[1], *names) == [pytest.approx(step, abs=1e-3) for step in curve(unsloth[1], *names)]
