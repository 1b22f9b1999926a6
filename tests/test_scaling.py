"""benchmarks/scaling.py: the limits that can be told without it, and that the page shows what it prints."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from conftest import ROOT

PAGE = ROOT / "skills/gemma-trainer/references/scale.md"


def load():
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "benchmarks" / "scaling.py")
    sys.modules["scaling"] = module = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


scaling = load()
HARDWARE = scaling.Hardware()
N = 8e9


def step(way, gpus, hardware=HARDWARE, tokens=16_384, micro_batches=8):
    return scaling.step_of(way, N, N, gpus, tokens, micro_batches, hardware)


@pytest.mark.parametrize("way", scaling.WAYS)
def test_one_gpu_waits_for_no_other(way):
    assert step(way, 1).communication == 0 and step(way, 1).efficiency == 1


def test_compute_is_flops_over_what_the_gpu_reaches():
    assert [scaling.flops_a_token(N, full, False) / N for full in (True, False)] == [6, 4]
    assert [scaling.flops_a_token(N, full, True) / N for full in (True, False)] == [8, 6]
    assert step("full-ddp", 1).compute == pytest.approx(16_384 * 8 * N / (989e12 * 0.4))


def test_a_ring_moves_its_share_of_the_bytes():
    whole = 1e9 / (HARDWARE.intra_gbps * HARDWARE.network_share * 1e9)
    assert scaling.seconds_to_move(1e9, 2, HARDWARE) == pytest.approx(whole / 2)
    assert scaling.seconds_to_move(1e9, 8, HARDWARE, passes=2) == pytest.approx(2 * whole * 7 / 8)
    over = scaling.seconds_to_move(1e9, 64, HARDWARE) - scaling.seconds_to_move(1e9, 8, HARDWARE)
    assert over == pytest.approx(7 / 8 * 1e9 / 8 / (HARDWARE.inter_gbps * HARDWARE.network_share * 1e9))


def test_adapters_cost_the_network_next_to_nothing_and_all_weights_at_a_slow_one_nearly_everything():
    slow = replace(HARDWARE, inter_gbps=scaling.ETHERNET)
    assert step("lora-ddp", 64, slow).efficiency > 0.95
    bound = step("full-fsdp2", 64, slow)
    assert bound.efficiency < 0.05
    assert (
        step("full-fsdp2", 64, replace(slow, inter_gbps=2 * slow.inter_gbps)).total < 0.6 * bound.total
    )  # half as long
    moved = step("full-fsdp2", 64, slow).communication / step("full-ddp", 64, slow).communication
    # Two gathers a micro-batch and a scatter, of 2 bytes a weight; an all-reduce is two passes over 4 bytes.
    assert moved == pytest.approx((2 * 8 + 1) * 2 / (2 * 4))


def test_what_overlaps_is_not_waited_for():
    assert step("full-ddp", 8, replace(HARDWARE, overlap=0.0)).exposed == step("full-ddp", 8).communication > 0
    assert step("full-ddp", 8).exposed == 0


def test_fewer_micro_batches_and_more_tokens_help_fsdp2():
    slow = replace(HARDWARE, inter_gbps=5)
    assert step("full-fsdp2", 64, slow, micro_batches=1).efficiency > step("full-fsdp2", 64, slow).efficiency
    assert step("full-fsdp2", 64, slow, tokens=65_536).efficiency > step("full-fsdp2", 64, slow).efficiency


def test_the_page_holds_the_table(capsys, tmp_path):
    assert scaling.main(["--check", str(PAGE)]) == 0
    (tmp_path / "old.md").write_text(PAGE.read_text().replace("| E2B | full-ddp |", "| E2B | ddp |"))
    assert scaling.main(["--check", str(tmp_path / "old.md")]) == 1
    capsys.readouterr()
    assert scaling.main(["--json", "--parameters", "8", "--gpus", "1,16"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["way"] for line in lines] == list(scaling.WAYS) and all(line["1"] == 1 for line in lines)
