"""Plans as tables: containers left out, equal layers folded, totals below."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.plan import Tree
from narrowcast.plan.folding import fold_paths
from tests.plan.models import encoder, plan, site, tied

TABLE = """\
Plan of Encoder
path                sites  kind       policy             status        rule       before    after  notes
──────────────────  ─────  ─────────  ─────────────────  ────────────  ────────  ───────  ───────  ─────
embedding               1  embedding  keep               kept                    12.8 kB  12.8 kB
layer/{0..2}/query      3  linear     int8_from_float32  applied       layer/.*  24.6 kB   6.1 kB  1
layer/{0..2}/small      3  linear     keep               fell back     layer/.*   1.5 kB   1.5 kB  2
layer/{0..2}/norm       3  norm       keep               not a target  layer/.*    384 B    384 B  3
head                    1  linear     keep               kept          head      12.8 kB  12.8 kB
1  int8 kernel, for float32 kernel
2  fewer than 8 outputs
3  int8 does not exist for ('norm',)
11 layers: 3 applied, 2 kept, 3 not a target, 3 fell back; 5 without parameters not shown
52.1 kB -> 33.7 kB (65%), and 48 B of kernel layouts in memory
now    float32 52.1 kB in 11 layers
after  float32 27.5 kB in 8 layers, int8_from_float32 6.1 kB in 3 layers
left   12.8 kB in 1 layer: no rule names it
left   12.8 kB in 1 layer: keep
left   1.5 kB in 3 layers: fewer than 8 outputs
left   384 B in 3 layers: int8 does not exist for ('norm',)"""


def test_a_plan_prints_as_a_table() -> None:
    assert str(plan(encoder(), {r"layer/.*": "int8", "head": "keep"})) == TABLE


def test_every_layer_is_shown_on_demand() -> None:
    bound = plan(encoder(), {r"layer/.*": "int8"})
    assert [row[0] for row in bound.table(every=True).rows] == [row.path or "(root)" for row in bound]


def test_layers_that_differ_in_more_than_their_numbers_are_not_folded() -> None:
    paths = [row[0] for row in plan(encoder(), {r"layer/.*": "int8", "layer/1/query": "keep"}).table().rows]
    assert paths == [
        "embedding",
        *("layer/{0,2}/query", "layer/{0..2}/small", "layer/{0..2}/norm"),
        *("layer/1/query", "head"),
    ]


def test_layers_of_other_shapes_are_not_folded() -> None:
    tree = Tree((site("a/0"), site("a/1", shape=(8, 8))))
    assert [row[0] for row in plan(tree, {}).table().rows] == ["a/0", "a/1"]


def test_a_shared_layer_shows_all_its_paths() -> None:
    assert plan(tied(), {}).table().rows[0][0] == "embedding = head"


def test_warnings_stand_below_the_table() -> None:
    bound = plan(encoder(), {"nothing": "keep"}, strict=False)
    assert bound.table().footer[-1] == "warning: Rule 'nothing' matches no layer"


def test_a_container_that_a_rule_names_is_shown() -> None:
    assert "layer" in [row[0] for row in plan(encoder(), {"layer": "bfloat16"}).table().rows]


def test_notebooks_show_a_table_in_html() -> None:
    html = plan(encoder(), {r"layer/\d+/(query|small)": "int8"})._repr_html_()
    assert html.startswith('<table class="narrowcast">')
    assert "layer/\\d+/(query|small)" in html


def test_an_empty_model_has_a_plan() -> None:
    assert "none with parameters" in str(plan(Tree(()), {}))


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["a/0", "a/1", "a/2"], ["a/{0..2}"]),
        (["a/0", "a/1", "a/3", "a/7", "a/8", "a/9"], ["a/{0,1,3,7..9}"]),
        (["a/0/b/0", "a/0/b/1", "a/1/b/0", "a/1/b/1"], ["a/{0,1}/b/{0,1}"]),
        (["a/0/b/0", "a/1/b/1"], ["a/0/b/0", "a/1/b/1"]),
        (["a1/x", "a2/x"], ["a{1,2}/x"]),
        (["x", "x"], ["x", "x"]),
    ],
)
def test_paths_fold_only_where_their_numbers_are_every_combination(paths: list[str], folded: list[str]) -> None:
    assert fold_paths(paths) == folded


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 5), min_size=1))
def test_a_folded_path_stands_for_exactly_its_paths(outer: set[int], inner: set[int]) -> None:
    paths = [f"a/{i}/b{j}/c" for i in sorted(outer) for j in sorted(inner)]
    (folded,) = fold_paths(paths)
    assert _expand(folded) == set(paths)


def _expand(folded: str) -> set[str]:
    if "{" not in folded:
        return {folded}
    head, _, rest = folded.partition("{")
    inside, _, tail = rest.partition("}")
    found = set()
    for run in inside.split(","):
        first, _, last = run.partition("..")
        for number in range(int(first), int(last or first) + 1):
            found |= _expand(f"{head}{number}{tail}")
    return found
