"""`narrowcast.config` and `narrowcast.mixed_precision`: the global policy under the names of Keras."""

from __future__ import annotations

import subprocess
import sys

import pytest

from narrowcast import config, dtype_policies, mixed_precision


@pytest.mark.parametrize("name", ["DTypePolicy", "dtype_policy", "set_dtype_policy"])
def test_both_modules_have_the_same_objects(name):
    assert getattr(config, name) is getattr(mixed_precision, name) is getattr(dtype_policies, name)


def test_names_of_keras_2_are_aliases():  # H-13
    assert mixed_precision.Policy is mixed_precision.DTypePolicy
    assert mixed_precision.global_policy is mixed_precision.dtype_policy
    assert mixed_precision.set_global_policy is mixed_precision.set_dtype_policy


def test_what_one_module_sets_the_other_reads():
    mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        assert config.dtype_policy().name == "mixed_bfloat16"
    finally:
        config.set_dtype_policy("float32")


def test_scope_restores():
    with config.policy_scope("float16"):
        assert config.dtype_policy().name == "float16"
    assert config.dtype_policy().name == "float32"


@pytest.mark.parametrize("module", ["config", "mixed_precision", "dtype_policies"])
def test_module_loads_no_framework(module):
    frameworks = "{'numpy', 'torch', 'jax', 'keras', 'ml_dtypes'}"
    code = f"import sys, narrowcast.{module}; print(sorted({frameworks} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
