from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

from narrowcast.report import read_environment


def test_versions_are_those_installed() -> None:
    packages = dict(read_environment().packages)
    assert packages["numpy"] == metadata.version("numpy")
    assert packages["narrowcast"] == metadata.version("narrowcast")


def test_cores_are_those_of_this_process() -> None:
    assert read_environment().num_cores == len(os.sched_getaffinity(0))


def test_python_is_this_one() -> None:
    assert read_environment().python == platform.python_version()


def test_reading_the_environment_imports_no_framework() -> None:
    code = (
        "import sys; from narrowcast.report import read_environment; read_environment()"
        "; sys.exit(bool({'torch', 'jax', 'keras', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
