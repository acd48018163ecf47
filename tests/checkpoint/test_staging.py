"""All files or none: kills at every step, full disks, names that lead outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from narrowcast.checkpoint import locate, staged
from narrowcast.errors import CheckpointError

OWNED = re.compile(r"data-\d+")


def write(folder, **files):
    with staged(folder, owned=OWNED) as staging:
        for name, text in files.items():
            (staging / name.replace("_", "-")).write_text(text)


def read(folder, *names):
    """What a reader sees: the text of each file, `None` where there is none."""
    paths = [locate(folder, name) for name in names]
    return [path.read_text() if path.exists() else None for path in paths]


def test_files_replace_older_ones_and_others_stay(tmp_path):
    (tmp_path / "tokenizer").write_text("mine")
    write(tmp_path, data_1="old", data_2="old")
    write(tmp_path, data_1="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-1", "tokenizer"]
    assert read(tmp_path, "data-1", "tokenizer") == ["new", "mine"]


def test_an_error_in_the_block_leaves_the_folder_as_it_was(tmp_path):
    write(tmp_path, data_1="old")

    def interrupted():
        with staged(tmp_path, owned=OWNED) as staging:
            (staging / "data-1").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-1"]
    assert read(tmp_path, "data-1") == ["old"]


KILLED = textwrap.dedent(
    """
    import os, re, sys
    from pathlib import Path
    from narrowcast.checkpoint import staged

    calls = 0
    def killing(function):
        def wrapper(*args, **kwargs):
            global calls
            if calls == int(sys.argv[2]):
                os._exit(9)
            calls += 1
            return function(*args, **kwargs)
        return wrapper

    methods = [(Path, name) for name in ("rename", "replace", "unlink", "rmdir", "write_text")]
    for owner, name in [*methods, (os, "fsync")]:
        setattr(owner, name, killing(getattr(owner, name)))
    with staged(Path(sys.argv[1]), owned=re.compile(r"data-\\d+")) as staging:
        for name in ("data-1", "data-3", "manifest"):
            (staging / name).write_text("new")
    """
)


def test_a_kill_at_any_step_leaves_the_old_files_or_the_new_ones(tmp_path):
    seen = set()
    for step in range(100):
        folder = tmp_path / str(step)
        write(folder, data_1="old", data_2="old", manifest="old")
        status = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(step)], check=False).returncode
        state = read(folder, "data-1", "data-2", "data-3", "manifest")
        assert state in (["old", "old", None, "old"], ["new", None, "new", "new"]), f"killed at step {step}"
        seen.add(tuple(state))
        # And a later save works whatever was left behind.
        write(folder, data_7="newer", manifest="newer")
        assert read(folder, "data-1", "data-2", "data-3", "data-7", "manifest") == [None, None, None, "newer", "newer"]
        assert sorted(path.name for path in folder.iterdir()) == ["data-7", "manifest"]
        if status == 0:
            break
    else:
        pytest.fail("the save never ran to its end")
    assert step > 10
    assert len(seen) == 2


def test_a_full_disk_is_an_error_that_names_the_folder_and_changes_nothing(tmp_path):
    script = textwrap.dedent(
        """
        import re, resource, signal, sys
        from pathlib import Path
        from narrowcast.checkpoint import staged
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with staged(Path(sys.argv[1]), owned=re.compile("data")) as staging:
                (staging / "data").write_bytes(bytes(10_000))
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    write(tmp_path, data_1="old")
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith(f"CheckpointError Saving to {str(tmp_path)!r} failed: File too large.")
    assert "What the folder held before is unchanged" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-1"]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b"])
def test_a_name_that_leads_outside_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        locate(tmp_path, name)


def test_a_name_that_is_not_a_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "data-1")
    with pytest.raises(CheckpointError, match="not a regular file"):
        locate(tmp_path, "data-1")
