from __future__ import annotations

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member, Parameter, Site, Tree
from narrowcast.plan.tree_table import tree_table

WEIGHT = Parameter("weight", (8, 4), "float32")


def _site(*paths: str, kind: str = "linear", parameters: tuple[Parameter, ...] = (WEIGHT,), policy: str = "") -> Site:
    carried = DTypePolicy(policy) if policy else None
    return Site((Member(paths, kind, f"package.{kind.title()}", parameters, carried),))


def _tree(*sites: Site) -> Tree:
    return Tree((_site("", kind="container", parameters=()), *sites), "torch", "Net")


def test_row_says_path_kind_class_parameters_and_bytes() -> None:
    table = tree_table(_tree(_site("head")))
    assert [column.title for column in table.columns] == ["path", "kind", "class", "parameters", "bytes"]
    assert table.rows == (("head", "linear", "Linear", "weight 8×4 float32", "128 B"),)


def test_layers_that_differ_only_in_their_numbers_are_one_row() -> None:
    table = tree_table(_tree(*(_site(f"layer/{i}/query") for i in range(3)), _site("head")))
    assert table.rows[0][:2] == ("layer/{0..2}/query", "3")
    assert table.rows[0][-1] == "384 B"
    assert table.rows[1][:2] == ("head", "1")


def test_layers_of_other_shapes_stay_apart() -> None:
    wide = Parameter("weight", (8, 8), "float32")
    table = tree_table(_tree(_site("layer/0"), _site("layer/1", parameters=(wide,))))
    assert [row[0] for row in table.rows] == ["layer/0", "layer/1"]


def test_every_layer_has_a_row_where_that_is_asked() -> None:
    table = tree_table(_tree(_site("layer/0"), _site("layer/1")), every=True)
    assert [row[0] for row in table.rows] == ["(root)", "layer/0", "layer/1"]


def test_shared_layer_shows_all_its_paths() -> None:
    assert tree_table(_tree(_site("a", "b"))).rows[0][0] == "a = b"


def test_footer_counts_what_is_not_shown() -> None:
    assert tree_table(_tree(_site("head"))).footer == (
        "Net: 2 layers, 32 parameters, 128 B; 1 without parameters not shown",
    )


def test_policies_have_a_column_where_there_are_any() -> None:
    table = tree_table(_tree(_site("head", policy="mixed_bfloat16")))
    assert table.columns[4].title == "policy"
    assert table.rows[0][4] == "mixed_bfloat16"


def test_model_without_parameters_shows_its_layers() -> None:
    assert [row[0] for row in tree_table(_tree()).rows] == ["(root)"]


def test_scalar_parameter_is_called_so() -> None:
    scale = Parameter("scale", (), "float32")
    assert tree_table(_tree(_site("a", parameters=(scale,)))).rows[0][3] == "scale scalar float32"
