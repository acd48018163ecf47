"""Folders that earlier versions wrote load as they did then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import narrowcast
from tests.golden.make import MAP
from tests.torch.models import tiny_lm

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v*") if path.is_dir())


def test_there_is_a_folder_of_the_present_format():
    assert "v1" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_outputs_are_those_of_then(version):
    model = narrowcast.load(tiny_lm(seed=7), HERE / version)
    expected = load_file(HERE / version / "expected.safetensors")
    # Codes are the same everywhere; float32 sums of up to 64 products may be taken in another order on another CPU, and
    # where a bfloat16 layer rounds, by one step of its 8 bits.
    torch.testing.assert_close(model(expected["ids"]), expected["outputs"], rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("version", VERSIONS)
def test_stored_tensors_are_those_of_the_file(version):
    model = narrowcast.load(tiny_lm(seed=7), HERE / version)
    state = model.state_dict()
    for name, tensor in load_file(HERE / version / "model.safetensors").items():
        assert torch.equal(state[name], tensor)
        assert state[name].dtype == tensor.dtype


@pytest.mark.parametrize("version", VERSIONS)
def test_quantizing_anew_gives_the_codes_of_then(version):
    """The same weights give the same codes in every version: the definition of int8 does not drift."""
    fresh = narrowcast.apply(tiny_lm(), MAP).state_dict()
    for name, tensor in load_file(HERE / version / "model.safetensors").items():
        assert torch.equal(fresh[name], tensor), name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plan_of_then_is_the_plan_of_now(version):
    model = narrowcast.load(tiny_lm(), HERE / version)
    now = narrowcast.plan(tiny_lm(), MAP)
    then = narrowcast.plan_of(model)
    assert [(row.path, row.given, row.status, row.rule) for row in then] == [
        (row.path, row.given, row.status, row.rule) for row in now
    ]
