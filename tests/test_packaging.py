"""The package as a whole: its public names, what importing it loads, its examples, and its wheel."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import types
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import narrowcast

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "torch", "jax", "keras", "ml_dtypes", "rich", "typer", "jinja2", "matplotlib", "safetensors")

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(narrowcast.__path__, "narrowcast.")
    if not module.name.endswith("__main__")
)


def _loads(statement: str) -> set[str]:
    """Those of `HEAVY` that a fresh process has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_list_is_sorted_and_has_no_name_twice() -> None:
    assert list(narrowcast.__all__) == sorted(set(narrowcast.__all__))


@pytest.mark.parametrize("name", narrowcast.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(narrowcast, name) is not None


def test_everything_public_is_in_the_list() -> None:
    public = {
        name
        for name, value in vars(narrowcast).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in {"annotations", "TYPE_CHECKING"}
    }
    assert public <= set(narrowcast.__all__)


def test_dir_shows_the_public_list() -> None:
    assert set(narrowcast.__all__) <= set(dir(narrowcast))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="appyl"):
        narrowcast.appyl  # noqa: B018


@pytest.mark.parametrize("name", narrowcast.__all__)
def test_public_name_is_documented(name: str) -> None:
    assert (getattr(narrowcast, name).__doc__ or "").strip() or name.startswith("__")
    assert re.search(rf"^\| `{re.escape(name)}`", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)


def test_page_of_public_names_is_what_its_script_writes() -> None:
    code = "import runpy; print(runpy.run_path('docs/api.py')['text'](), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "api.md").read_text("utf-8"), "run `python docs/api.py`"


def test_importing_the_package_loads_no_framework() -> None:
    assert _loads("import narrowcast") == set()


def test_the_test_of_import_weight_can_fail() -> None:
    assert _loads("import numpy") == {"numpy"}


def test_policies_and_maps_need_no_framework() -> None:
    statement = "import narrowcast as n; n.DTypePolicyMap(policy_map={'a/.*': n.DTypePolicy('mixed_bfloat16')})['a/b']"
    assert _loads(statement) == set()


def test_command_line_help_loads_no_framework() -> None:
    assert not _loads("from narrowcast.cli.app import app") & {"torch", "numpy", "jax", "keras", "matplotlib"}


def test_version_is_that_of_the_installed_package() -> None:
    assert narrowcast.__version__ == metadata.version("narrowcast")


def test_package_says_that_it_is_typed() -> None:
    assert (Path(narrowcast.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=flags, raise_on_error=False)
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for_and_what_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip()
    assert all(hasattr(module, exported) for exported in getattr(module, "__all__", ()))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the working tree without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/", 1)[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"narrowcast"}


def test_wheel_has_the_files_that_are_not_python(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "narrowcast/py.typed",
        "narrowcast/report/page.html.jinja",
        "narrowcast/demo/policy.toml",
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import narrowcast
from narrowcast.demo.job import demo_policy
from narrowcast.report import Report, page, read_environment
assert narrowcast.__file__.startswith({str(tmp_path)!r}), narrowcast.__file__
assert len(demo_policy()) == 3
assert page(Report("Title", "Summary.", read_environment())).startswith("<!doctype html>")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
