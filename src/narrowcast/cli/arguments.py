"""The arguments and options that several verbs share, described once."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AsJson", "Fallback", "FallbackOption", "Html", "Model", "OptionalPolicy", "Policy", "Strict"]


class Fallback(str, Enum):
    """What happens where a layer cannot carry the policy it is asked."""

    SOURCE = "source"
    ERROR = "error"


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="package.module:callable, or a Hugging Face folder.", show_default=False),
]
Policy = Annotated[
    str,
    typer.Option(
        "--policy", "-p", metavar="POLICY", help="A policy file, or one policy's name (int8).", show_default=False
    ),
]
OptionalPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        "-p",
        metavar="POLICY",
        help="A policy file, or one policy's name (int8). Without it the model's tree is shown.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone to standard output.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict/--no-strict",
        help="Whether overlaps, and rules that match or can do nothing, are errors or warnings.",
    ),
]
FallbackOption = Annotated[
    Fallback,
    typer.Option(
        "--fallback", help="Where a shape cannot carry what is asked: give the source policy, or make it an error."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write one self-contained HTML page.", show_default=False),
]
