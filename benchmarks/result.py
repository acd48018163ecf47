"""What every benchmark does with its figures: a table for the eye, and JSON for docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from narrowcast.plan.table import Column, Table
from narrowcast.report import read_environment

__all__ = ["write"]


def write(
    script: str,
    *,
    claim: str,
    rows: Sequence[Mapping[str, object]],
    holds: bool,
    notes: Sequence[str] = (),
    num_threads: int = 1,
) -> None:
    """Prints a benchmark's table and writes `results/<script>.json`.

    Args:
        script: the script's `__file__`.
        claim: what is claimed, as a heading.
        rows: the table, a mapping of column to cell; all with the same columns, the first names the row.
        holds: whether the claim holds.
        notes: sentences below the table.
        num_threads: the threads that computed.
    """
    environment = read_environment(num_threads=num_threads)
    name = Path(script).stem
    table = Table(
        tuple(Column(column, is_right=index > 0) for index, column in enumerate(rows[0])),
        tuple(tuple(str(cell) for cell in row.values()) for row in rows),
        (*notes, "holds" if holds else "DOES NOT HOLD"),
        title=claim,
    )
    print(table.to_text())
    result = {
        "claim": claim,
        "holds": holds,
        "rows": [dict(row) for row in rows],
        "notes": list(notes),
        "environment": {**asdict(environment), "packages": dict(environment.packages)},
    }
    path = Path(__file__).parent / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
