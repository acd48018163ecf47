"""`keep`: one object, whatever is done with it."""

from __future__ import annotations

import copy
import pickle

import pytest

from narrowcast.dtype_policies import DTypePolicy, KeepPolicy, QuantizedDTypePolicy, keep
from narrowcast.errors import PolicyError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_gives_the_same_object(protocol):
    assert pickle.loads(pickle.dumps(keep, protocol)) is keep


def test_copying_and_configs_give_the_same_object():
    assert copy.deepcopy([keep])[0] is copy.copy(keep) is KeepPolicy.from_config(keep.get_config()) is keep


def test_keep_has_no_dtypes_of_its_own():
    assert (keep.compute_dtype, keep.variable_dtype, keep.quantization_mode, keep.source) == (None, None, None, None)


def test_keep_prints_as_a_policy():
    assert repr(keep) == '<KeepPolicy "keep">'


def test_keep_is_not_the_name_of_a_plain_policy():
    with pytest.raises(PolicyError):
        DTypePolicy("keep")


def test_keep_is_a_source():
    policy = QuantizedDTypePolicy("int8", keep)
    assert policy.source is keep
    assert pickle.loads(pickle.dumps(policy)).source is keep


def test_keep_has_no_settings():
    with pytest.raises(PolicyError, match="Policy 'keep' has no settings"):
        KeepPolicy.from_config({"name": "keep"})
