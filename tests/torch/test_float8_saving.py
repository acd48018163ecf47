"""float8 state in checkpoints: resumed bit for bit, resized, missing, from another layout."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import CheckpointError
from narrowcast.numerics.delayed_scaling import in_order
from narrowcast.torch.float8_state import HISTORY, INDEX, PENDING, SCALE
from tests.torch.models import tiny_lm

ROOT = Path(__file__).parents[2]
MAP = {r"blocks/\d+/(attention|up|down)": "float8"}


def model_of(length=16, seed=0):
    model = tiny_lm(seed, num_blocks=1).train()
    policy = narrowcast.QuantizedFloat8DTypePolicy("float32", length)
    return narrowcast.apply(model, dict.fromkeys(MAP, policy))


def train(model, optimizer, steps, first=0):
    losses = []
    for index in range(first, first + steps):
        ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(index))
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def linear(length=4, values=(3.0, 5.0, 6.0, 7.0, 4.0)):
    """A layer whose input history is the values, oldest first."""
    layer = narrowcast.apply(nn.Linear(4, 4), narrowcast.QuantizedFloat8DTypePolicy("float32", length))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for value in values:
        layer(torch.full((1, 4), value)).sum().backward()
        optimizer.step()
    return layer


def history(layer):
    return in_order(layer.float8_amax_history, layer.float8_history_index)[0].tolist()


def test_a_run_resumed_from_a_file_has_the_same_losses_for_fifty_steps(tmp_path):
    model = model_of()
    optimizer = adam(model)
    train(model, optimizer, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    expected = train(model, optimizer, 50, first=5)
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    resumed = model_of(seed=1)
    optimizer = adam(resumed)
    resumed.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert train(resumed, optimizer, 50, first=5) == expected


def test_a_run_resumed_from_a_saved_folder_in_a_new_process_has_the_same_losses(tmp_path):
    model = model_of()
    optimizer = adam(model)
    train(model, optimizer, 3)
    narrowcast.save(model, tmp_path / "model")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = train(model, optimizer, 5, first=3)
    script = (
        "import sys, torch, narrowcast\n"
        "from tests.torch.test_float8_saving import adam, tiny_lm, train\n"
        "torch.set_num_threads(1)\n"
        "model = narrowcast.load(tiny_lm(1, num_blocks=1).train(), sys.argv[1] + '/model')\n"
        "optimizer = adam(model)\n"
        "optimizer.load_state_dict(torch.load(sys.argv[1] + '/optimizer.pt', weights_only=True))\n"
        "print(train(model, optimizer, 5, first=3))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert out.stdout.strip() == str(expected), out.stderr


def test_a_checkpoint_between_micro_batches_holds_what_was_seen():
    model = model_of()
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    model(ids).sum().backward()
    twin = model_of(seed=1)
    twin.load_state_dict(model.state_dict())
    pending = model.blocks[0].up.float8_pending_amax
    assert pending.count_nonzero() == 3
    assert torch.equal(twin.blocks[0].up.float8_pending_amax, pending)


def test_the_state_is_four_plain_tensors_a_layer():
    state = linear().state_dict()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items() if "float8" in name} == {
        SCALE: (torch.float32, (3,)),
        HISTORY: (torch.float32, (3, 4)),
        INDEX: (torch.int64, (3,)),
        PENDING: (torch.float32, (3,)),
    }
    assert all(type(tensor) is torch.Tensor for tensor in state.values())


@pytest.mark.parametrize(
    "length, expected", [(2, [7.0, 4.0]), (4, [5.0, 6.0, 7.0, 4.0]), (6, [0.0, 0.0, 5.0, 6.0, 7.0, 4.0])]
)
def test_another_length_of_history_keeps_the_newest_entries(length, expected):
    old = linear(4)
    new = linear(length, values=())
    new.load_state_dict(old.state_dict())
    assert history(new) == expected
    assert torch.equal(new.float8_scale, old.float8_scale)
    new(torch.full((1, 4), 8.0)).sum().backward()
    torch.optim.SGD(new.parameters(), lr=0.0).step()
    assert history(new) == [*expected[1:], 8.0]


def test_applying_another_length_resizes_the_history_of_a_layer_in_training():
    layer = linear(4)
    scale = layer.float8_scale.clone()
    narrowcast.apply(layer, narrowcast.QuantizedFloat8DTypePolicy("float32", 2))
    assert history(layer) == [7.0, 4.0]
    assert torch.equal(layer.float8_scale, scale)


def test_a_layer_in_training_changes_its_recipe():
    layer = linear(4)
    weight = layer.weight
    narrowcast.apply(layer, "float8/current_from_float32")
    assert layer.weight is weight
    assert set(layer.state_dict()) == {"weight", "bias"}
    narrowcast.apply(layer, "float8_from_float32")
    assert layer.float8_scale.count_nonzero() == 0


def test_weights_without_history_reset_it_with_a_warning():
    layer = linear()
    plain = nn.Linear(4, 4).state_dict()
    with pytest.warns(UserWarning, match="without the float8 state of their layers, which starts anew"):
        layer.load_state_dict(plain)
    assert torch.equal(layer.weight, plain["weight"])
    assert all(getattr(layer, name).count_nonzero() == 0 for name in (SCALE, HISTORY, INDEX, PENDING))


def test_a_partial_load_of_other_layers_keeps_the_state():
    model = nn.Sequential(linear(), nn.Linear(4, 2))
    before = history(model[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(nn.Sequential(nn.Identity(), nn.Linear(4, 2)).state_dict(), strict=False)
    assert history(model[0]) == before


def test_histories_of_another_layout_are_refused_with_the_way_to_read_them():
    layer = linear()
    state = layer.state_dict()
    state[HISTORY] = torch.zeros(1024, 3)
    with pytest.raises(
        RuntimeError,
        match=r"float8 state of 'the module' has another layout: float8_amax_history is \(1024, 3\) as saved, "
        r"\(3, any length\) in the module; narrowcast\.torch\.float8_import reads those of other libraries",
    ):
        layer.load_state_dict(state)
    state = {**linear().state_dict(), SCALE: torch.zeros(9)}
    with pytest.raises(RuntimeError, match=r"float8_scale is \(9,\) as saved, \(3,\) in the module"):
        layer.load_state_dict(state)


def test_a_state_dict_from_before_apply_and_one_from_after_load_strictly():
    plain, layer = nn.Linear(4, 4), linear()
    with pytest.warns(UserWarning, match="starts anew"):
        assert layer.load_state_dict(plain.state_dict(), strict=True) == ([], [])
    assert linear().load_state_dict(layer.state_dict(), strict=True) == ([], [])


def test_loading_by_assignment_keeps_the_clock_going():
    layer = linear(4, values=(2.0,))
    layer.load_state_dict(copy.deepcopy(linear(4).state_dict()), assign=True)
    assert history(layer) == [5.0, 6.0, 7.0, 4.0]
    layer(torch.full((1, 4), 9.0)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert history(layer) == [6.0, 7.0, 4.0, 9.0]


@pytest.mark.parametrize("with_state", [True, False])
def test_a_model_on_the_meta_device_takes_its_state_by_assignment_and_trains_on(with_state):
    given = {name: t for name, t in linear(4, values=(2.0,)).state_dict().items() if with_state or "float8" not in name}
    layer = linear(4, values=()).to("meta")
    with nullcontext() if with_state else pytest.warns(UserWarning, match="starts anew"):
        layer.load_state_dict(given, assign=True, strict=with_state)
    layer(torch.full((1, 4), 9.0)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.0).step()
    assert history(layer) == ([0.0, 0.0, 2.0, 9.0] if with_state else [0.0, 0.0, 0.0, 9.0])


def test_a_saved_folder_without_its_state_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    narrowcast.save(nn.Sequential(linear()), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["0." + INDEX]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        narrowcast.load(nn.Sequential(nn.Linear(4, 4)), tmp_path)


def test_safetensors_itself_takes_a_model_in_training(tmp_path):
    from safetensors.torch import load_model, save_model

    model = nn.Sequential(linear(), linear(values=(2.0,)))
    save_model(model, tmp_path / "model.safetensors")
    twin = nn.Sequential(linear(values=()), linear(values=()))
    load_model(twin, tmp_path / "model.safetensors")
    assert [history(layer) for layer in twin] == [history(layer) for layer in model]


def test_a_saved_layer_holds_its_own_histories_only(tmp_path):
    model = nn.Sequential(*(linear(64, values=()) for _ in range(20)))
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    narrowcast.save(model[0], tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 3000
