"""What a key that matches nothing may have meant."""

from __future__ import annotations

import pytest

from narrowcast.plan.nearest import nearest_paths

PATHS = [
    "",
    "encoder",
    *(f"encoder/layer/{i}/attention/self/{n}" for i in range(12) for n in ("query", "key", "value")),
]
PATHS += [f"encoder/layer/{i}/output/dense" for i in range(12)] + ["pooler/dense"]


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("encoder/layers/0/attention/self/query", "encoder/layer/0/attention/self/query"),
        (r"encoder/layers/\d+/attention/self/query", "encoder/layer/0/attention/self/query"),
        (r"encoder\.layer\.\d+\.output\.dense", "encoder/layer/0/output/dense"),
        ("pooler/dens", "pooler/dense"),
        (r"encoder/layer/[0-9]/attention/self/valu", "encoder/layer/0/attention/self/value"),
        (".*/attention/self/qery", "encoder/layer/0/attention/self/query"),
        (".*/quer", "encoder/layer/0/attention/self/query"),
    ],
)
def test_the_nearest_path_comes_first(key: str, first: str) -> None:
    assert nearest_paths(key, PATHS)[0] == first


def test_paths_that_differ_only_in_numbers_are_one_suggestion() -> None:
    assert (
        len(
            {path.split("/")[2] for path in nearest_paths("encoder/layer/0/attention/self", PATHS) if "/layer/" in path}
        )
        == 1
    )


def test_nothing_near_gives_nothing() -> None:
    assert nearest_paths("qqqqqq", PATHS) == []
