"""Opening a model by its address: `package.module:callable`, or a Hugging Face folder."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowcast.errors import ModelError, UnsupportedError, closest

__all__ = ["open_model"]

_EXPECTED = "package.module:callable, or a folder with a config.json of transformers"
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def open_model(address: str | os.PathLike[str], *, weights: bool = False) -> nn.Module:
    """Returns the model at an address.

    Args:
        address: `package.module:name`, where `name` is a module, or a callable that takes no arguments and returns one
            (a class, a function; `a.b` reaches into attributes); or a Hugging Face folder, of which transformers builds
            the architecture that its `config.json` names. Code that lies in the folder is never run.
        weights: whether a folder's weights are loaded. Otherwise its model is on the meta device and costs no memory. A
            callable is called in either case.

    Returns:
        The model; a folder's is in eval mode, and in the dtype of its config or of its weights.

    Raises:
        ModelError: there is no such module, callable or folder, the callable fails or returns something else, the
            folder has no `config.json`, or transformers cannot build what it names.
        UnsupportedError: transformers is not installed.

    Example:
        >>> open_model("torch.nn:Identity")
        Identity()
    """
    text = os.fspath(address)
    if Path(text).is_dir():
        return _open_folder(Path(text), weights=weights)
    module_name, colon, name = text.rpartition(":")
    if not (colon and module_name and name) or os.sep in module_name:
        raise ModelError(
            "Model's address leads nowhere",
            got={"address": text},
            expected=_EXPECTED,
            fix="Check the path" if os.sep in text else "Name a callable after a colon, or give a folder that exists",
        )
    return _open_callable(text, module_name, name)


def _open_callable(address: str, module_name: str, name: str) -> nn.Module:
    got = {"address": address}
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"Python module {error.name!r} of the model's address is not there",
            got=got,
            fix="Check the name, install the package, or run from the folder that holds the module",
        ) from error
    except Exception as error:
        raise ModelError(f"Python module {module_name!r} cannot be imported: {_told(error)}", got=got) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = closest(part, dir(found))
            raise ModelError(
                f"Nothing is called {part!r} in {module_name!r}",
                got=got,
                expected="the name of a callable",
                suggestion=near[0] if near else None,
            ) from None
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise ModelError(
            "What the address names is neither a module nor a callable",
            got=got | {"type": type(found).__name__},
            expected="a callable that takes no arguments and returns a torch.nn.Module",
        )
    try:
        model = found()
    except Exception as error:
        raise ModelError(
            f"Callable {address!r} failed: {_told(error)}",
            expected="a callable that takes no arguments and returns a torch.nn.Module",
            fix="Write a function without arguments that builds the model",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Callable {address!r} returned no torch.nn.Module",
            got={"type": type(model).__name__},
            expected="a callable that takes no arguments and returns a torch.nn.Module",
        )
    return model


def _open_folder(folder: Path, *, weights: bool) -> nn.Module:
    got = {"folder": str(folder)}
    if not (folder / "config.json").is_file():
        is_ours = (folder / "narrowcast.json").is_file()
        raise ModelError(
            "Folder has no config.json",
            got=got,
            expected="a folder with a config.json of transformers",
            fix="It holds a model saved by narrowcast: give the address of the model it was made of"
            if is_ours
            else "Give the folder that `save_pretrained` wrote",
        )
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "Folders of Hugging Face models are built with transformers, and it is not installed",
            got=got,
            fix="Run `pip install 'narrowcast[demo]'`, or `pip install transformers`",
        )
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = _architecture(transformers, config)
        name = _dtype_argument(transformers.__version__)
        if weights:
            options = {name: "auto", "local_files_only": True}
            model = model_class.from_pretrained(folder, config=config, **options)
        else:
            with torch.device("meta"):
                model = _from_config(model_class, config, {name: _dtype(config, folder)})
    except Exception as error:
        raise ModelError(
            f"Transformers cannot build the model of the folder: {_told(error)}",
            got=got,
            fix="Write a function that builds it, and give package.module:function",
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError("Transformers built no PyTorch model of the folder", got=got | {"type": type(model).__name__})
    return model.eval()


def _architecture(transformers: Any, config: Any) -> Any:
    """The class that the config names, or the general one where it names none that transformers has."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    return transformers.AutoModel


def _from_config(model_class: Any, config: Any, options: dict[str, Any]) -> Any:
    build = getattr(model_class, "from_config", None) or model_class._from_config
    return build(config, **options)


def _dtype_argument(version: str) -> str:
    """What transformers calls the dtype: `torch_dtype` before 4.56."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return "dtype" if numbers >= (4, 56) else "torch_dtype"


def _dtype(config: Any, folder: Path) -> torch.dtype:
    """The dtype that loading would give the model: that of the config, else that of the weights, else float32."""
    found = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if isinstance(found, torch.dtype):
        return found
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > 100_000_000:
                break
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__" and entry.get("dtype") in _SAFETENSORS_DTYPES:
                return getattr(torch, _SAFETENSORS_DTYPES[entry["dtype"]])  # type: ignore[no-any-return]
    return torch.float32


def _told(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
