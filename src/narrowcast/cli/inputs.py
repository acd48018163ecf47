"""What the arguments of a verb name: models, policies and a user's own callables."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from narrowcast.dtype_policies import files
from narrowcast.errors import ModelError, PolicyFileError, UnsupportedError, closest

__all__ = ["call_address", "need_torch", "open_model", "read_policy"]


def open_model(address: str, *, weights: bool) -> Any:
    """Returns the model at an address.

    Args:
        address: `package.module:callable` or a Hugging Face folder.
        weights: whether the values are needed. Otherwise a folder gives a model without data, in milliseconds.

    Raises:
        UnsupportedError: PyTorch is not installed.
        ModelError: there is no such model.
    """
    need_torch()
    _search_current_folder()
    from narrowcast.torch.address import open_model as open_torch

    if not Path(address).is_dir():
        return open_torch(address, weights=weights)
    # What transformers and its companions log while they are imported is not about the folder.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return open_torch(address, weights=weights)
    finally:
        logging.disable(before)


def read_policy(policy: str) -> Any:
    """Returns what `--policy` names: the map in a file, or the text of a policy's name as it stands.

    Raises:
        PolicyFileError: the file cannot be read as a policy map.
    """
    path = Path(policy)
    if path.suffix.lower() in (".toml", ".json") or path.is_file():
        try:
            return files.read(path)
        except OSError as error:
            raise PolicyFileError(
                f"Policy file cannot be read: {error.strerror}",
                got={"policy": policy},
                expected="a policy file, or the name of one policy",
            ) from error
    return policy


def call_address(address: str) -> Any:
    """Calls what `package.module:callable` names, without arguments, and returns what it returns.

    Raises:
        ModelError: it cannot be found, is not callable, or raises.
    """
    _search_current_folder()
    module_name, colon, attribute = address.partition(":")
    if not (module_name and colon and attribute):
        raise ModelError(
            "Address of the inputs is not one", got={"inputs": address}, expected="package.module:callable"
        )
    found: Any = None
    try:
        found = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        near = closest(getattr(error, "name", None) or "", dir(found)) if isinstance(error, AttributeError) else []
        raise ModelError(
            f"Address of the inputs cannot be imported: {error}",
            got={"inputs": address},
            expected="package.module:callable" if near else "",
            suggestion=near[0] if near else None,
            fix="Check the name, and run from the folder that holds the module",
        ) from error
    if not callable(found):
        raise ModelError(
            "Address of the inputs names no callable", got={"inputs": address, "type": type(found).__name__}
        )
    try:
        return found()
    except Exception as error:
        raise ModelError(
            f"Callable of the inputs failed: {type(error).__name__}: {error}",
            got={"inputs": address},
            expected="a callable that takes no arguments and returns batches",
        ) from error


def need_torch() -> None:
    """Raises `UnsupportedError` where PyTorch is not installed, without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(
            "Models are PyTorch models in this version, and PyTorch is not installed",
            fix="Run `pip install 'narrowcast[torch]'`",
        )


def _search_current_folder() -> None:
    """Lets addresses name modules of the current folder, as `python -m` does; a console script would not."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
