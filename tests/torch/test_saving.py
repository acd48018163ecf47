"""Saved and reloaded models: bit-equal, strict, shared tensors once, hostile folders refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import narrowcast
from narrowcast.errors import CheckpointError, ModelError, TreeMismatchError
from tests.torch.models import ConvNet, TinyLM, conv_net, ids, images, tiny_lm

MAPS = {
    "nothing": {},
    "int8 everywhere": {"embedding": "int8", r"blocks/\d+/(up|down|attention)": "int8"},
    "weights only": {r"blocks/\d+/(up|down|attention)": "int8/weight"},
    "mixed_bfloat16": {".*": "mixed_bfloat16"},
    "bfloat16 and int8": {r"blocks/1/.*": "bfloat16", "blocks/0/up": "int8_from_mixed_bfloat16"},
    "float16": {"blocks/0/up": "float16"},
}


@pytest.mark.parametrize("policies", MAPS.values(), ids=MAPS)
def test_a_reloaded_model_gives_bit_equal_outputs(tmp_path, policies):
    model = narrowcast.apply(tiny_lm(), policies)
    narrowcast.save(model, tmp_path)
    fresh = narrowcast.load(tiny_lm(seed=5), tmp_path)
    assert torch.equal(fresh(ids()), model(ids()))
    assert narrowcast.plan_of(fresh) == narrowcast.plan_of(model)
    state, again = model.state_dict(), fresh.state_dict()
    assert list(state) == list(again)
    assert all(torch.equal(state[name], again[name]) and state[name].dtype == again[name].dtype for name in state)


def test_a_new_process_reloads_bit_equal_outputs(tmp_path):
    model = narrowcast.apply(tiny_lm(), MAPS["int8 everywhere"])
    narrowcast.save(model, tmp_path / "saved")
    torch.save(model(ids()), tmp_path / "outputs.pt")
    script = textwrap.dedent(
        """
        import sys, torch, narrowcast
        from tests.torch.models import ids, tiny_lm
        model = narrowcast.load(tiny_lm(seed=9), sys.argv[1] + "/saved")
        assert torch.equal(model(ids()), torch.load(sys.argv[1] + "/outputs.pt", weights_only=True))
        print("equal")
        """
    )
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert out.stdout == "equal\n", out.stderr


def test_a_meta_model_loads_with_its_ties(tmp_path):
    model = narrowcast.apply(tiny_lm(), {r"blocks/.*/(up|down)": "int8"})
    narrowcast.save(model, tmp_path)
    with torch.device("meta"):
        fresh = TinyLM().eval()
    fresh.cache = torch.zeros(3)
    narrowcast.load(fresh, tmp_path)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(fresh(ids()), model(ids()))


def test_a_buffer_that_is_not_saved_and_has_no_values_is_named(tmp_path):
    narrowcast.save(tiny_lm(), tmp_path)
    with torch.device("meta"):
        fresh = TinyLM()
    with pytest.raises(TreeMismatchError, match="buffer 'cache' is not saved and has no values on the meta device"):
        narrowcast.load(fresh, tmp_path)


def test_buffers_and_running_statistics_come_back(tmp_path):
    model = conv_net()
    model.train()(images())
    model.eval()
    narrowcast.apply(model, {"stem|mix": "int8", "head": "int8"})
    narrowcast.save(model, tmp_path)
    fresh = narrowcast.load(ConvNet().eval(), tmp_path)
    assert torch.equal(fresh.norm.running_var, model.norm.running_var)
    assert torch.equal(fresh(images()), model(images()))


def test_parameters_stay_the_same_objects_so_an_optimizer_made_before_is_valid(tmp_path):
    narrowcast.save(tiny_lm(), tmp_path)
    fresh = tiny_lm(seed=3)
    before = dict(fresh.named_parameters())
    narrowcast.load(fresh, tmp_path)
    assert all(parameter is before[name] for name, parameter in fresh.named_parameters())


def test_the_file_decides_the_dtype(tmp_path):
    narrowcast.save(tiny_lm().bfloat16(), tmp_path)
    fresh = narrowcast.load(tiny_lm(seed=3), tmp_path)
    assert fresh.blocks[0].up.weight.dtype == torch.bfloat16


def test_a_shared_tensor_is_written_once(tmp_path):
    narrowcast.save(tiny_lm(), tmp_path)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "narrowcast.json").read_text())["aliases"] == {"head.weight": "embedding.weight"}


def test_views_of_one_buffer_are_written_as_the_values_they_show(tmp_path):
    model = nn.Module()
    flat = torch.arange(12.0)
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[2:8].view(2, 3).t())
    narrowcast.save(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["a"], flat[:4])
    assert torch.equal(saved["b"], flat[2:8].view(2, 3).t())


def test_large_models_are_sharded_with_an_index_and_reload(tmp_path):
    model = narrowcast.apply(tiny_lm(), {r".*/(up|down)": "int8"})
    narrowcast.save(model, tmp_path, max_shard_bytes=8000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(tmp_path / file, framework="pt") as handle:
            tensors = [handle.get_tensor(key) for key in handle.keys()]  # noqa: SIM118
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 8000
    assert torch.equal(narrowcast.load(tiny_lm(seed=2), tmp_path)(ids()), model(ids()))


def test_saving_over_shards_leaves_no_old_file(tmp_path):
    model = tiny_lm()
    narrowcast.save(model, tmp_path, max_shard_bytes=8000)
    (tmp_path / "model_mine.safetensors").write_bytes(b"not ours")
    narrowcast.save(model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model.safetensors",
        "model_mine.safetensors",
        "narrowcast.json",
    ]


def test_a_model_changed_after_apply_is_saved_as_it_is(tmp_path):
    model = narrowcast.apply(tiny_lm(), {"blocks/0/up": "int8", "blocks/1/up": "int8"})
    narrowcast.apply(model, {"blocks/0/down": "int8"})
    narrowcast.save(model, tmp_path)
    fresh = narrowcast.load(tiny_lm(seed=1), tmp_path)
    assert {row.path for row in narrowcast.plan_of(fresh) if row.given.quantization_mode} == {
        "blocks/0/up",
        "blocks/1/up",
        "blocks/0/down",
    }
    assert torch.equal(fresh(ids()), model(ids()))


def test_the_authors_map_is_kept_word_for_word(tmp_path):
    written = narrowcast.DTypePolicyMap(policy_map={r"blocks/\d+/up": "int8", r"blocks/0/.*": "keep"})
    narrowcast.save(narrowcast.apply(tiny_lm(), written), tmp_path)
    fresh = narrowcast.load(tiny_lm(), tmp_path)
    assert narrowcast.plan_of(fresh).policy == written
    assert list(narrowcast.plan_of(fresh).policy) == list(written)


def test_loading_another_architecture_lists_the_differences_and_changes_nothing(tmp_path):
    narrowcast.save(narrowcast.apply(tiny_lm(num_blocks=3), {r".*/up": "int8"}), tmp_path)
    fresh = tiny_lm(width=64)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(TreeMismatchError) as caught:
        narrowcast.load(fresh, tmp_path)
    assert "layer 'blocks/2/up' is saved and not in the model" in str(caught.value)
    assert (
        "parameter 'weight' of 'blocks/0/up' is (64, 32) as saved, (128, 64) in the model" in caught.value.differences
    )
    assert type(fresh.blocks[0].up) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_loading_into_a_model_that_carries_policies_is_refused(tmp_path):
    narrowcast.save(tiny_lm(), tmp_path)
    with pytest.raises(CheckpointError, match="already carries policies"):
        narrowcast.load(narrowcast.apply(tiny_lm(), {"blocks/0/up": "int8"}), tmp_path)


def test_a_folder_without_a_saved_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no model saved by narrowcast"):
        narrowcast.load(tiny_lm(), tmp_path)


@pytest.fixture
def saved(tmp_path):
    narrowcast.save(narrowcast.apply(tiny_lm(), {r".*/up": "int8"}), tmp_path, max_shard_bytes=8000)
    return tmp_path


def refused(folder, match):
    fresh = tiny_lm(seed=4)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        narrowcast.load(fresh, folder)
    assert type(fresh.blocks[0].up) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_a_missing_shard_is_named(saved):
    next(saved.glob("model-00002-*")).unlink()
    refused(saved, "File 'model-00002-of-.*' is missing from the saved model")


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -8])
def test_a_truncated_shard_is_named(saved, keep_bytes):
    shard = next(saved.glob("model-00001-*"))
    shard.write_bytes(shard.read_bytes()[:keep_bytes])
    refused(saved, "File 'model-00001-of-.*' of the saved model is truncated or corrupt")


def test_a_flipped_bit_in_the_data_is_found(saved):
    shard = next(saved.glob("model-00001-*"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    refused(saved, "its bytes are not those that were written")


def test_a_header_of_absurd_size_is_refused(saved):
    shard = next(saved.glob("model-00001-*"))
    shard.write_bytes(struct.pack("<Q", 1 << 62) + shard.read_bytes()[8:])
    refused(saved, "truncated or corrupt")


def test_an_index_that_points_outside_its_folder_is_refused(saved):
    path = saved / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    key = next(iter(index["weight_map"]))
    outside = f"../{saved.name}/" + index["weight_map"][key]
    index["weight_map"][key] = outside
    path.write_text(json.dumps(index))
    manifest = json.loads((saved / "narrowcast.json").read_text())
    manifest["files"][outside] = 0
    (saved / "narrowcast.json").write_text(json.dumps(manifest))
    refused(saved, "names a file outside its folder")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"narrowcast": 2},
            "written by a newer narrowcast. Got format=2. Expected format 1 or older. Upgrade narrowcast",
        ),
        ({"narrowcast": "1"}, "has no format version"),
        ({"narrowcast": 0}, "has no format version"),
        ({"narrowcast": True}, "has no format version"),
        ({"surprise": 1}, "field 'surprise' is unknown"),
        ({"plan": None}, "is not valid"),
        ({"plan": {}}, "is not valid"),
        ({"map": {"default": "nonsense"}}, "is not valid"),
        ({"aliases": {"head.weight": "nowhere"}}, "shares the tensor 'nowhere', and the file does not"),
        ({"aliases": []}, "field 'aliases' is not a table"),
        ({"files": {}}, "does not have the files it was written with"),
        ({"framework": "jax"}, "is of another framework"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(saved, change, match):
    path = saved / "narrowcast.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(saved, match)


def test_tensors_that_do_not_fit_the_model_are_listed(tmp_path):
    narrowcast.save(tiny_lm(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["extra"] = torch.zeros(2)
    del tensors["norm.bias"]
    tensors["norm.weight"] = torch.zeros(3)
    save_file(tensors, file)
    manifest = json.loads((tmp_path / "narrowcast.json").read_text())
    from narrowcast.checkpoint.tensors import crc32

    manifest["files"]["model.safetensors"] = crc32(file)
    (tmp_path / "narrowcast.json").write_text(json.dumps(manifest))
    fresh = tiny_lm()
    with pytest.raises(TreeMismatchError) as caught:
        narrowcast.load(fresh, tmp_path)
    assert caught.value.differences == (
        "tensor 'norm.weight' is (3,) in the file, (32,) in the model",
        "tensor 'norm.bias' is in the model and not in the file",
        "tensor 'extra' is in the file and not in the model",
    )


def test_no_pickle_is_written(saved):
    for path in saved.iterdir():
        assert path.suffix in {".json", ".safetensors"}


def test_state_that_is_not_a_tensor_is_refused(tmp_path):
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"secret": 1}

    with pytest.raises(ModelError, match="holds '_extra_state', which is not a tensor"):
        narrowcast.save(Stateful(2, 2), tmp_path)


def test_a_meta_model_cannot_be_saved(tmp_path):
    with pytest.raises(ModelError, match="'weight' is on the meta device and has no values"):
        narrowcast.save(nn.Linear(2, 2, device="meta"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("saved", "other", "match"),
    [
        (
            lambda: nn.MultiheadAttention(16, 2),
            lambda: nn.MultiheadAttention(16, 8),
            "num_heads of layer '0' is 2 as saved, 8",
        ),
        (
            lambda: nn.Conv2d(2, 2, 3, padding=1),
            lambda: nn.Conv2d(2, 2, 3, stride=2),
            r"stride of layer '0' is \(1, 1\) as",
        ),
        (lambda: nn.ReLU(), lambda: nn.GELU(), "layer '0' is of class ReLU as saved, GELU in the model"),
        (lambda: nn.LayerNorm(4), lambda: nn.LayerNorm(4, eps=1e-12), "eps of layer '0' is 1e-05 as saved, 1e-12"),
        (lambda: nn.LSTM(4, 4), lambda: nn.LSTM(4, 4, batch_first=True), "batch_first of layer '0' is absent as saved"),
    ],
)
def test_layers_of_equal_shapes_that_compute_differently_are_differences(tmp_path, saved, other, match):
    narrowcast.save(nn.Sequential(saved()), tmp_path)
    with pytest.raises(TreeMismatchError, match=match):
        narrowcast.load(nn.Sequential(other()), tmp_path)


def test_dropout_may_differ(tmp_path):
    narrowcast.save(nn.Sequential(nn.MultiheadAttention(16, 2, dropout=0.1)), tmp_path)
    narrowcast.load(nn.Sequential(nn.MultiheadAttention(16, 2)), tmp_path)


@pytest.mark.parametrize("name", ["narrowcast.json", "model.safetensors.index.json"])
def test_json_nested_without_end_is_refused(saved, name):
    (saved / name).write_text("[" * 100_000)
    refused(saved, name)


def test_a_name_that_stands_twice_in_the_manifest_is_refused(saved):
    path = saved / "narrowcast.json"
    path.write_text(path.read_text().replace('"framework"', '"framework": "torch", "framework"', 1))
    refused(saved, "a name stands twice")


def test_every_change_of_a_plan_in_a_manifest_is_refused_or_says_the_same(saved):
    """Fuzzes the manifest: each value in turn is deleted or replaced by one of another type."""
    path = saved / "narrowcast.json"
    whole = json.loads(path.read_text())

    def places(value, trail=()):
        yield trail
        if isinstance(value, dict):
            for key in value:
                yield from places(value[key], (*trail, key))
        elif isinstance(value, list):
            for index in range(min(len(value), 2)):
                yield from places(value[index], (*trail, index))

    for trail in [trail for trail in places(whole["plan"], ("plan",)) if len(trail) > 1]:
        for replacement in (None, 7, "x", [], {}):
            changed = json.loads(json.dumps(whole))
            owner = changed
            for step in trail[:-1]:
                owner = owner[step]
            before = owner[trail[-1]]
            if before == replacement:
                continue
            owner[trail[-1]] = replacement
            path.write_text(json.dumps(changed))
            model = tiny_lm()
            try:
                narrowcast.load(model, saved)
            except CheckpointError:
                assert type(model.blocks[0].up) is nn.Linear
            else:
                # Only what is told and not done: reasons, names of devices and classes.
                assert isinstance(before, str | int | list | dict | None), trail
                assert model.blocks[0].up.dtype_policy.name == "int8_from_float32"


def test_a_dtype_that_files_cannot_hold_is_named(tmp_path):
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ModelError, match="Tensor 'phase' has a dtype that safetensors files cannot hold"):
        narrowcast.save(model, tmp_path)


@pytest.mark.parametrize("folder", ["", "  ", "a\0b"])
def test_a_folder_without_a_name_is_refused(folder):
    with pytest.raises(CheckpointError, match="name of the folder is empty or holds a zero byte"):
        narrowcast.save(nn.Linear(2, 2), folder)


def test_loading_in_inference_mode_gives_parameters_that_train(tmp_path):
    narrowcast.save(narrowcast.apply(tiny_lm(), {"blocks/0/up": "int8"}), tmp_path)
    fresh = tiny_lm(seed=2)
    with torch.inference_mode():
        narrowcast.load(fresh, tmp_path)
    fresh(ids()).sum().backward()
    assert fresh.blocks[1].up.weight.grad is not None


def test_files_have_the_rights_of_any_new_file(tmp_path):
    (tmp_path / "ordinary").touch()
    narrowcast.save(tiny_lm(), tmp_path)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "ordinary").stat().st_mode}
