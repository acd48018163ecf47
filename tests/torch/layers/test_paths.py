"""Paths: attribute paths from the root, a pure function of the tree of modules."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.layers import Dense, Layer, MultiHeadAttention, Sequential
from narrowcast.torch.layers import paths
from tests.torch.layers.models import block, floats


def test_the_root_has_the_empty_path():
    assert Dense(2).path == ""


def test_a_layer_within_a_layer_has_the_name_of_its_attribute():
    assert block().up.path == "up"


def test_a_layer_within_a_module_of_pytorch_counts_from_the_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleList([nn.Sequential(Dense(2))])

    net = Net()
    assert net.body[0][0].path == "body/0/0"


def test_a_name_is_a_label_and_no_part_of_the_path():
    class Parent(Layer):
        def __init__(self):
            super().__init__(name="parent")
            self.child = Dense(2, name="label")

    parent = Parent()
    assert (parent.child.path, parent.child.name, parent.name) == ("child", "label", "parent")


def test_two_children_with_one_name_have_two_paths():
    model = Sequential([Dense(2, name="d"), Dense(2, name="d")])
    assert [layer.path for layer in model] == ["0", "1"]


def test_a_second_instance_has_the_same_paths():
    assert [x.path for x in block()._flatten_layers()] == [x.path for x in block()._flatten_layers()]


def test_paths_are_those_of_the_tree():
    model = block()
    tree = narrowcast.tree(model)
    assert {layer.path for layer in model._flatten_layers()} <= set(tree.paths)


def test_a_path_does_not_depend_on_when_a_layer_is_called_first():
    called, fresh = block(), block()
    called(floats(2, 4))
    assert [x.path for x in called._flatten_layers()] == [x.path for x in fresh._flatten_layers()]


def test_a_path_follows_a_layer_that_moves():
    first, second = Sequential([Dense(2)]), Sequential([Dense(2), Dense(2)])
    layer = first.pop()
    second.add(layer)
    assert layer.path == "2"


def test_a_list_that_renumbers_its_modules_renumbers_their_paths():
    modules = nn.ModuleList([Dense(2), Dense(3)])
    last = modules[1]
    del modules[0]
    assert last.path == "0"


def test_a_layer_that_was_taken_out_is_a_root_again():
    parent = Sequential([Dense(2)])
    assert parent.pop().path == ""


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_has_the_paths_of_the_original(copied):
    model = block()
    again = copied(model)
    assert [x.path for x in again._flatten_layers()] == [x.path for x in model._flatten_layers()]


def test_a_copied_part_is_a_root():
    assert copy.deepcopy(block().up).path == ""


def test_a_shared_layer_has_the_path_where_it_was_put_first():
    class Twice(Layer):
        def __init__(self):
            super().__init__()
            self.first = Dense(2)
            self.second = self.first

    assert Twice().second.path == "first"


def test_a_frame_makes_paths_relative_also_for_a_shared_layer():
    shared = Dense(2)
    first, second = Sequential([shared]), Sequential([Dense(2), shared])
    with paths.frame(second):
        assert shared.path == "1"
    with paths.frame(first):
        assert shared.path == "0"


def test_a_module_that_holds_itself_has_a_path():
    parent = Layer()
    child = Layer()
    parent.child = child
    object.__getattribute__(child, "_modules")["parent"] = parent
    assert child.path == "child"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, when its compiler is imported
def test_a_compiled_model_is_no_root_of_its_own():
    model = block()
    torch.compile(model)
    assert model.up.path == "up"


def test_a_module_without_a_hash_may_stand_above():
    class Odd(nn.Module):
        __hash__ = None

        def __eq__(self, other):
            return self is other

    odd = Odd()
    odd.layer = Dense(2)
    assert odd.layer.path == "layer"


def test_knowing_its_parent_keeps_no_parent_alive():
    parent = Sequential([Dense(2)])
    layer, alive = parent[0], weakref.ref(parent)
    del parent
    gc.collect()
    assert alive() is None
    assert layer.path == ""


def test_the_projections_of_attention_are_named_as_in_keras():
    layer = MultiHeadAttention(2, 4)
    layer.build((None, 3, 8), (None, 3, 8))
    assert [x.path for x in layer._flatten_layers()][1:4] == ["query", "key", "value"]
    assert layer.attention_output.path == "attention_output"


def test_flatten_layers_lists_each_once_and_those_in_other_modules_too():
    model = block()
    assert [x.path for x in model._flatten_layers()] == ["", "up", "scale", "native/1", "norm"]
    assert [x.path for x in model._flatten_layers(include_self=False)] == ["up", "scale", "native/1", "norm"]


def test_flatten_layers_stays_above_the_layers_of_layers_where_it_is_told_to():
    outer = Sequential([block()])
    assert [x.path for x in outer._flatten_layers(recursive=False)] == ["", "0"]
