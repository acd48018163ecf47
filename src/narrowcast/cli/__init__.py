"""The command line: one file a verb.

Exit status: 0 where what was asked was done, 1 where it does not hold (the error or the findings say why), 2 for wrong
usage.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs `narrowcast` on the arguments of the process."""
    from narrowcast.cli.app import app

    app(prog_name="narrowcast")
