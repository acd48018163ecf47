"""Trees of live modules: kinds, paths, ties, and what is refused."""

from __future__ import annotations

import copy
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import narrowcast
from narrowcast.errors import ModelError
from narrowcast.plan import KINDS, Parameter, Site, Tree
from narrowcast.torch.tree import tree
from tests.torch.models import ConvNet, TinyLM

LAYERS = [
    (nn.Linear(2, 3), "linear"),
    (nn.Bilinear(2, 3, 4), "other"),
    (nn.Embedding(4, 2), "embedding"),
    (nn.EmbeddingBag(4, 2), "embedding"),
    (nn.Conv1d(2, 4, 3), "conv"),
    (nn.Conv2d(2, 4, 3, groups=2), "conv"),
    (nn.Conv3d(2, 4, 3), "conv"),
    (nn.ConvTranspose1d(2, 4, 3), "conv"),
    (nn.ConvTranspose2d(2, 4, 3), "conv"),
    (nn.ConvTranspose3d(2, 4, 3), "conv"),
    (nn.LayerNorm(4), "norm"),
    (nn.RMSNorm(4), "norm"),
    (nn.BatchNorm1d(4), "norm"),
    (nn.BatchNorm2d(4), "norm"),
    (nn.BatchNorm3d(4), "norm"),
    (nn.SyncBatchNorm(4), "norm"),
    (nn.GroupNorm(2, 4), "norm"),
    (nn.InstanceNorm1d(4, affine=True), "norm"),
    (nn.InstanceNorm2d(4), "norm"),
    (nn.InstanceNorm3d(4), "norm"),
    (nn.LocalResponseNorm(2), "norm"),
    (nn.MultiheadAttention(4, 2), "attention"),
    (nn.LSTM(2, 3), "recurrent"),
    (nn.GRU(2, 3), "recurrent"),
    (nn.RNN(2, 3), "recurrent"),
    (nn.LSTMCell(2, 3), "recurrent"),
    (nn.GRUCell(2, 3), "recurrent"),
    (nn.RNNCell(2, 3), "recurrent"),
    (nn.Softmax(-1), "softmax"),
    (nn.LogSoftmax(-1), "softmax"),
    (nn.Softmin(-1), "softmax"),
    (nn.Softmax2d(), "softmax"),
    (nn.CrossEntropyLoss(), "loss"),
    (nn.MSELoss(), "loss"),
    (nn.CTCLoss(), "loss"),
    (nn.ReLU(), "other"),
    (nn.Dropout(), "other"),
    (nn.PReLU(), "other"),
    (nn.Flatten(), "other"),
    (nn.Sequential(nn.ReLU()), "container"),
    (nn.ModuleList([nn.ReLU()]), "container"),
    (nn.TransformerEncoderLayer(4, 2, 8), "container"),
]


class Overridden(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Plain(nn.Linear):
    def extra_repr(self):
        return "mine"


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class OwnWeight(nn.Linear):
    weight = property(lambda self: torch.ones(3, 2))

    def __init__(self):
        nn.Module.__init__(self)
        self.in_features, self.out_features = 2, 3
        self.register_parameter("bias", None)


class OwnBatchNorm(nn.BatchNorm2d):
    def _check_input_dim(self, input):
        pass


class HoldsParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.list = nn.ParameterList([torch.ones(3), torch.ones(4)])
        self.dict = nn.ParameterDict({"a": torch.ones(5)})
        self.inner = nn.Linear(2, 2)


def _site(model: nn.Module, path: str = "") -> Site:
    return tree(model)[path]


def _names(site: Site) -> list[str]:
    return [parameter.name for parameter in site.parameters]


# Kinds


@pytest.mark.parametrize(("module", "kind"), LAYERS, ids=lambda value: type(value).__name__)
def test_kinds_of_layers(module: nn.Module | str, kind: str) -> None:
    assert _site(module).kind == kind
    assert kind in KINDS


@pytest.mark.parametrize("module", [module for module, _ in LAYERS], ids=lambda value: type(value).__name__)
def test_a_site_holds_every_parameter_that_the_module_has(module: nn.Module) -> None:
    found = {
        ".".join(filter(None, (site.path.replace("/", "."), parameter.name))): (parameter.shape, parameter.dtype)
        for site in tree(module)
        for parameter in site.parameters
    }
    assert found == {name: (tuple(p.shape), str(p.dtype)[6:]) for name, p in module.named_parameters()}


@pytest.mark.parametrize("module", [Overridden(2, 3), OwnConvolution(2, 3, 3), OwnWeight(), OwnBatchNorm(3)])
def test_a_subclass_that_computes_otherwise_is_other_and_says_so(module: nn.Module) -> None:
    site = _site(module)
    assert site.kind == "other"
    assert site.members[0].detail("overrides")


def test_a_subclass_that_computes_the_same_has_the_kind() -> None:
    assert _site(Plain(2, 3)).kind == "linear"
    assert _site(Plain(2, 3)).class_name == "tests.torch.test_tree.Plain"
    assert _site(nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2)).kind == "linear"


def test_the_conv1d_of_hugging_face_is_linear_and_transposed() -> None:
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    site = _site(Conv1D(6, 4))
    assert (site.kind, site.members[0].detail("transposed")) == ("linear", True)
    assert site.parameters[0].shape == (4, 6)

    class Mine(Conv1D):
        def forward(self, x):
            return x

    assert _site(Mine(6, 4)).kind == "other"


def test_attention_is_one_site_with_its_output_projection() -> None:
    found = tree(nn.TransformerEncoderLayer(4, 2, 8))
    assert "self_attn/out_proj" not in found
    assert _names(found["self_attn"]) == ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    apart = _site(nn.MultiheadAttention(4, 2, kdim=3, vdim=5))
    assert _names(apart)[:3] == ["q_proj_weight", "k_proj_weight", "v_proj_weight"]


def test_attention_that_computes_otherwise_is_not_one_site() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    assert [(site.path, site.kind) for site in tree(Mine(4, 2))] == [("", "other"), ("out_proj", "linear")]


def test_lists_of_parameters_belong_to_the_module_that_holds_them() -> None:
    found = tree(HoldsParameters())
    assert found.paths == ("", "inner")
    assert found[""].kind == "other"
    assert _names(found[""]) == ["gain", "list.0", "list.1", "dict.a"]


@pytest.mark.parametrize(
    ("module", "facts"),
    [
        (nn.Conv2d(4, 8, 3, groups=2, padding=1, padding_mode="reflect"), {"groups": 2, "padding_mode": "reflect"}),
        (nn.ConvTranspose2d(4, 8, 3), {"transposed": True}),
        (
            nn.Embedding(9, 4, padding_idx=0, max_norm=1.0, sparse=True),
            {"padding_idx": 0, "max_norm": 1.0, "sparse": True},
        ),
        (nn.EmbeddingBag(9, 4, mode="sum"), {"mode": "sum"}),
        (nn.LSTM(2, 3, num_layers=2, bidirectional=True), {"num_layers": 2, "bidirectional": True, "hidden_size": 3}),
        (nn.MultiheadAttention(4, 2, batch_first=True), {"num_heads": 2, "batch_first": True}),
    ],
)
def test_facts_that_decide_what_can_be_done_are_told(module: nn.Module, facts: dict[str, object]) -> None:
    member = _site(module).members[0]
    assert {name: member.detail(name) for name in facts} == facts


def test_facts_are_plain_values() -> None:
    module = nn.Embedding(9, 4, padding_idx=numpy.int64(3))  # type: ignore[arg-type]
    assert type(_site(module).members[0].detail("padding_idx")) is int


# What no policy can be carried out at


def test_script_modules_are_one_site_that_refuses() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch deprecate it
        script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    found = tree(nn.Sequential(script))
    assert found.paths == ("", "0")
    assert "TorchScript" in found["0"].members[0].detail("refuses")
    assert _names(found["0"]) == ["0.weight", "0.bias"]


def test_lazy_modules_refuse_until_they_have_shapes() -> None:
    lazy = nn.LazyLinear(3)
    assert "run one batch" in _site(lazy).members[0].detail("refuses")
    assert _site(lazy).parameters == ()
    lazy(torch.ones(1, 2))
    assert _site(lazy).members[0].detail("refuses") is None
    assert (_site(lazy).kind, _site(lazy).parameters[0].shape) == ("linear", (3, 2))


def test_a_forward_replaced_on_the_instance_refuses() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert (_site(layer).kind, "replaced on the instance" in _site(layer).members[0].detail("refuses")) == (
        "other",
        True,
    )


def test_weights_computed_by_hooks_refuse() -> None:
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(2, 2))
    pruned = nn.Linear(2, 2)
    prune.l1_unstructured(pruned, "weight", 1)
    for layer in (old, pruned, nn.utils.spectral_norm(nn.Linear(2, 2))):
        assert "computes its weight" in _site(layer).members[0].detail("refuses")


def test_a_weight_that_is_a_plain_tensor_refuses() -> None:
    layer = nn.Linear(2, 2)
    del layer.weight
    layer.weight = torch.ones(2, 2)
    assert "plain tensor" in _site(layer).members[0].detail("refuses")


def test_parametrized_modules_own_their_parametrization() -> None:
    found = tree(parametrizations.weight_norm(nn.Linear(3, 3)))
    assert found.paths == ("",)
    assert found[""].members[0].detail("parametrized") == "weight"
    assert _names(found[""]) == ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"]


# Paths


def test_paths_are_attribute_paths_joined_by_slashes_in_order_of_registration() -> None:
    assert tree(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(1, 1))).paths == ("", "0", "0/0", "1")


def test_a_shared_module_is_one_site_with_every_path() -> None:
    shared = nn.Sequential(nn.Linear(2, 2))
    found = tree(nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])}))
    assert found["a/0"].paths == ("a/0", "b/0/0")
    assert len(found["a/0"].members) == 1
    assert found["a"].paths == ("a", "b/0")
    assert found.num_bytes == 24


def test_paths_lead_to_the_modules_that_torch_finds() -> None:
    for model in (TinyLM(), ConvNet(), nn.Transformer(8, 2, 1, 1, 16, batch_first=True)):
        found = tree(model)
        for name, module in model.named_modules(remove_duplicate=False):
            path = name.replace(".", "/")
            if path in found:
                (member,) = (member for member in found[path].members if path in member.paths)
                assert member.class_name == f"{type(module).__module__}.{type(module).__qualname__}"
            else:
                assert path.endswith("out_proj")


def test_a_module_inside_itself_is_entered_once() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model._modules["self"] = model
    assert tree(model).paths == ("", "0")


def test_a_slash_in_a_name_is_an_error() -> None:
    with pytest.raises(ModelError) as caught:
        tree(nn.Sequential(nn.ModuleDict({"a/b": nn.ReLU()})))
    assert str(caught.value) == (
        "Name of a child of '0' holds a '/', which separates the parts of a path. Got name='a/b'. Rename the child."
    )


def test_modules_shared_within_shared_modules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = nn.ReLU()
    for _ in range(40):
        model = nn.ModuleList([model, model])
    monkeypatch.setitem(tree.__globals__, "MAX_PATHS", 1000)
    with pytest.raises(ModelError, match="Model has more than 1,000 paths"):
        tree(model)


def test_deep_models_need_no_deep_stack() -> None:
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(3000):
        outer = nn.Module()
        outer._modules["x"] = model
        model = outer
    assert len(tree(model)) == 3001


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"Model is not a PyTorch module\. Got model=3\. Expected an nn\.Module"):
        tree(3)  # type: ignore[arg-type]


def test_absent_children_and_parameters_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.register_module("none", None)
    assert tree(model).paths == ("", "0")
    assert _names(tree(model)["0"]) == ["weight"]


# Ties


def _tied_model(device: str = "cpu") -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4, device=device), "head": nn.Linear(4, 5, device=device)})
    model["head"].weight = model["embedding"].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_that_share_a_parameter_are_one_site(device: str) -> None:
    found = tree(_tied_model(device))
    site = found["head"]
    assert found["embedding"] is site
    assert site.kinds == ("embedding", "linear")
    assert site.tied == (("embedding.weight", "head.weight"),)
    assert (site.num_bytes, site.device) == (5 * 4 * 4 + 5 * 4, device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_show_the_same_storage_are_tied(device: str) -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4, bias=False, device=device), "b": nn.Linear(4, 4, bias=False, device=device)}
    )
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    assert tree(model)["b"].paths == ("a", "b")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_separate_parameters_are_not_tied(device: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in range(5)))
    assert len(tree(model)) == 6
    assert all(not site.tied for site in tree(model))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_transposed_view_shares_memory_and_is_no_tie(device: str) -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 5, bias=False, device=device), "b": nn.Linear(5, 4, bias=False, device=device)}
    )
    model["b"].weight = nn.Parameter(model["a"].weight.data.t())
    found = tree(model)
    assert found["a"] is not found["b"]
    assert found["a"].members[0].detail("shares_memory") == "b.weight"
    assert found["b"].members[0].detail("shares_memory") == "a.weight"


def test_slices_of_one_buffer_that_do_not_overlap_share_nothing() -> None:
    flat = torch.zeros(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    found = tree(model)
    assert [site.path for site in found] == ["", "0", "1"]
    assert all(site.members[0].detail("shares_memory") is None for site in found)


def test_slices_that_overlap_share_memory() -> None:
    flat = torch.zeros(24)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[8:].view(4, 4))
    assert tree(model)["0"].members[0].detail("shares_memory") == "1.weight"


def test_ties_chain_through_modules() -> None:
    a, b, c = (nn.Linear(3, 3) for _ in range(3))
    b.weight, c.bias = a.weight, b.bias
    found = tree(nn.Sequential(a, nn.ReLU(), b, c))
    assert found["3"].paths == ("0", "2", "3")
    assert found["0"].tied == (("0.weight", "2.weight"), ("2.bias", "3.bias"))
    assert found["0"].num_bytes == (9 + 9 + 3 + 3) * 4


def test_a_parameter_registered_twice_in_one_module_counts_once() -> None:
    layer = nn.Linear(3, 3)
    layer.again = layer.weight
    assert tree(layer)[""].tied == (("weight", "again"),)
    assert tree(layer).num_bytes == (9 + 3) * 4


def test_empty_parameters_are_not_tied_to_each_other() -> None:
    model = nn.Sequential(nn.PReLU(0), nn.PReLU(0))
    assert len(tree(model)) == 3


# The same tree


@pytest.mark.parametrize("make", [TinyLM, ConvNet, lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True)])
def test_the_meta_device_gives_the_same_tree(make: type[nn.Module]) -> None:
    with torch.device("meta"):
        meta = tree(make())
    live = tree(make())
    assert [site.members for site in meta] == [site.members for site in live]
    assert [site.tied for site in meta] == [site.tied for site in live]
    assert {site.device for site in meta} <= {"meta", ""}


def test_a_copy_has_an_equal_tree() -> None:
    model = TinyLM()
    assert tree(copy.deepcopy(model)) == tree(model)
    assert Tree.from_json(tree(model).to_json()) == tree(model)


def test_reading_a_tree_changes_nothing() -> None:
    model = TinyLM()
    before = {name: (id(p), p._version) for name, p in model.named_parameters()}
    tree(model)
    assert {name: (id(p), p._version) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("policy", ["int8", "bfloat16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", [TinyLM, ConvNet])
def test_a_model_that_carries_policies_reports_what_it_was(make: type[nn.Module], policy: str) -> None:
    model = make().eval()
    before = tree(model)
    narrowcast.apply(model, policy)
    after = tree(model)
    assert [site.paths for site in after] == [site.paths for site in before]
    assert [site.tied for site in after] == [site.tied for site in before]
    for old, new in zip(before, after, strict=True):
        assert [(m.kind, m.class_name, m.details) for m in new.members] == [
            (m.kind, m.class_name, m.details) for m in old.members
        ]
        dtype = new.policy.variable_dtype if new.policy is not None else "float32"
        assert new.parameters == tuple(Parameter(p.name, p.shape, str(dtype)) for p in old.parameters)


def test_a_quantized_tie_is_still_one_site() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    narrowcast.apply(model, "int8")
    assert tree(model)["2"].paths == ("0", "2")
    assert tree(model)["2"].tied == (("0.weight", "2.weight"),)
