"""Where something was measured: the machine and the versions, read without importing any framework."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from narrowcast.report.records import Environment

__all__ = ["PACKAGES", "read_environment"]

PACKAGES = ("narrowcast", "torch", "torchao", "transformers", "jax", "keras", "numpy", "ml_dtypes", "safetensors")
"""The packages whose versions change what is measured."""


def read_environment(*, num_threads: int | None = None) -> Environment:
    """Returns the machine and the installed versions.

    Args:
        num_threads: the threads that the framework was told to use, where something was computed.

    Example:
        >>> read_environment(num_threads=2).num_threads
        2
    """
    return Environment(
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=num_threads,
        python=platform.python_version(),
        packages=tuple((name, version) for name in PACKAGES if (version := _version(name)) is not None),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The name and those features of the processor that decide which kernels run, where Linux tells them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in text.split("\n\n", 1)[0].splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    name = known.get("model name") or platform.machine()
    flags = set(known.get("flags", "").split())
    shown = [label for flag, label in _FEATURES if flag in flags]
    return f"{name} ({', '.join(shown)})" if shown else name


_FEATURES = (
    ("avx512_vnni", "AVX-512 VNNI"),
    ("avx_vnni", "AVX VNNI"),
    ("avx512_bf16", "AVX-512 BF16"),
    ("amx_int8", "AMX"),
)
