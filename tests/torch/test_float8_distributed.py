"""float8 training on two ranks: DistributedDataParallel and FSDP2 over gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.float8_ranks"]
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def states(ranks, scenario, key="state"):
    return [found[scenario][key] for found in ranks]


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for name in one:
        if "pending" not in name:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(
    "scenario",
    [
        "ddp",
        "ddp_around_a_parent",
        "ddp_accumulates",
        "ddp_with_a_layer_that_one_rank_does_not_use",
        "a_copy_on_one_rank_only",
        "a_model_that_only_one_rank_still_holds",
        "layers_with_histories_of_two_lengths",
        "with_a_given_group",
        "fsdp",
    ],
)
def test_ranks_have_the_same_state(ranks, scenario):
    assert_alike(*states(ranks, scenario))


def test_the_amax_is_the_maximum_over_the_ranks(ranks):
    assert all(found["ddp"]["first"] for found in ranks)


@pytest.mark.parametrize("scenario, num_steps", [("ddp", 3), ("fsdp", 2), ("layers_with_histories_of_two_lengths", 3)])
def test_there_is_one_all_reduce_a_step(ranks, scenario, num_steps):
    assert [found[scenario]["num_reduced"] for found in ranks] == [num_steps] * 2


def test_weights_stay_equal_between_ranks(ranks):
    assert_alike(*states(ranks, "ddp", "weights"))


def test_what_a_micro_batch_saw_outlives_the_broadcast_of_buffers(ranks):
    # DistributedDataParallel writes rank 0's buffers over all others at each forward.
    assert all(found["ddp_accumulates"]["kept"] for found in ranks)


def test_a_layer_that_one_rank_does_not_use_moves_on_all(ranks):
    state = states(ranks, "ddp_with_a_layer_that_one_rank_does_not_use")[0]
    for layer in range(2):
        assert state[f"layers.{layer}.float8_history_index"].tolist() == [3, 3, 3]


def test_sharded_parameters_resume_bit_for_bit(ranks):
    for found in ranks:
        assert found["fsdp"]["is_sharded"]
        assert_alike(found["fsdp"]["resumed"], found["fsdp"]["expected"])


def test_without_a_group_there_is_one_warning_that_says_what_to_do(ranks):
    for found in ranks:
        (warning,) = found["without_a_group"]["warnings"]
        assert "Give the ranks that train this model together: narrowcast.torch.set_clock(model, group=...)" in warning


def test_without_a_group_every_rank_keeps_scales_of_its_own(ranks):
    one, other = states(ranks, "without_a_group")
    assert one["a.float8_scale"][0] != other["a.float8_scale"][0]


def test_a_loss_scaler_takes_one_decision_for_all_ranks(ranks):
    for found in ranks:
        assert found["loss_scaling"]["taken"] == [True, False, True, True]
        assert found["loss_scaling"]["scale"] == 2.0**16
