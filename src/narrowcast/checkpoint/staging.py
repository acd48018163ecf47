"""Several files that change together: all of them or none, also when the process is killed or the disk is full.

New files are written to a staging folder inside the target folder and forced to disk. One rename then turns the staging
folder into the commit folder: that is the moment at which the new files count. Moving them to their final names comes
after and can be interrupted at will: a reader looks in the commit folder first (`locate`), and the next save finishes
the move.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowcast.errors import CheckpointError

__all__ = ["folder_of", "locate", "staged"]

_COMMIT = ".narrowcast-commit"
_STAGING_PREFIX = ".narrowcast-staging-"
_REMOVE = ".remove"
_HOST = re.sub(r"[^A-Za-z0-9.]", "", socket.gethostname()) or "host"


def folder_of(name: str | Path) -> Path:
    """Returns the folder that a user named.

    Raises:
        CheckpointError: the name is empty (which would mean the folder that the process happens to be in) or holds a
            zero byte.
    """
    if not str(name).strip() or "\0" in str(name):
        raise CheckpointError("The name of the folder is empty or holds a zero byte", got={"folder": str(name)})
    return Path(name)


def locate(folder: Path, name: str) -> Path:
    """Returns where the file `name` of a saved folder lies: in its place, or in a commit that was interrupted.

    Args:
        folder: the saved folder.
        name: a plain file name.

    Raises:
        CheckpointError: `name` is not a plain file name, or leads out of the folder.
    """
    if not name or name in {".", ".."} or Path(name).name != name or "\\" in name or "\0" in name:
        raise CheckpointError(
            "A saved model names a file outside its folder",
            got={"name": name},
            expected="a plain file name",
            fix="Do not load this folder unless you trust where it came from",
        )
    committed = folder / _COMMIT / name
    path = committed if committed.exists() or name in _stale(folder) else folder / name
    # Links are followed, since caches of models link their files, but only to a regular file: a device or a pipe would
    # make the reader wait without end.
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{name!r} in the saved folder is not a regular file", fix="Save the model again")
    return path


@contextmanager
def staged(folder: Path, *, owned: re.Pattern[str]) -> Iterator[Path]:
    """Gives a folder to write into; when the block ends without an error, its files replace those of `folder`.

    Args:
        folder: the target; made if missing. Files in it that are not replaced stay, except those that match `owned`.
        owned: matches the names of files that belong to the saved model: those not written again are removed.

    Raises:
        CheckpointError: the files cannot be written (disk full, no permission). The folder is as it was.
    """
    staging: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _finish(folder)
        staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING_PREFIX}{_HOST}-{os.getpid()}-", dir=folder))
        yield staging
        names = {path.name for path in staging.iterdir()}
        stale = sorted(path.name for path in folder.iterdir() if owned.fullmatch(path.name) and path.name not in names)
        (staging / _REMOVE).write_text("\n".join(stale), encoding="utf-8")
        # As any new file has it: safetensors writes files that the owner alone may read.
        mode = stat.S_IMODE((staging / _REMOVE).stat().st_mode)
        for path in staging.iterdir():
            path.chmod(mode)
            _sync(path)
        _sync(staging)
        staging.rename(folder / _COMMIT)
        staging = None
        _sync(folder)
        _finish(folder)
    except OSError as error:
        raise CheckpointError(
            f"Saving to {str(folder)!r} failed: {error.strerror or error}. What the folder held before is unchanged",
            fix="Free disk space, or choose another folder (a name that no file has), and save again",
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _finish(folder: Path) -> None:
    """Moves the files of a commit to their places; also one that an earlier process did not finish."""
    commit = folder / _COMMIT
    if commit.is_dir():
        stale = _stale(folder)
        for path in sorted(commit.iterdir()):
            if path.name != _REMOVE:
                path.replace(folder / path.name)
        for name in stale:
            (folder / Path(name).name).unlink(missing_ok=True)
        _sync(folder)
        # Last: while the list stands, a killed process's removals are done by the next save.
        (commit / _REMOVE).unlink(missing_ok=True)
        commit.rmdir()
    for leftover in folder.glob(_STAGING_PREFIX + "*"):
        # Only of processes that are gone: another process may be saving at this moment.
        if _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)


def _stale(folder: Path) -> list[str]:
    """The files that an interrupted commit has still to remove: they do not belong to the saved model any more."""
    remove = folder / _COMMIT / _REMOVE
    return remove.read_text(encoding="utf-8").splitlines() if remove.exists() else []


def _is_abandoned(staging: Path) -> bool:
    """Whether nobody writes to a staging folder any more: its process is gone, or it was silent for an hour."""
    host, _, rest = staging.name.removeprefix(_STAGING_PREFIX).rpartition("-")[0].rpartition("-")
    if host == _HOST and rest.isdigit() and int(rest) != os.getpid():
        try:
            os.kill(int(rest), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
    try:
        newest = max((path.stat().st_mtime for path in [staging, *staging.iterdir()]), default=0.0)
    except OSError:
        return False
    return time.time() - newest > 3600


def _sync(path: Path) -> None:
    """Forces a file or a folder's entries to disk. Windows cannot open folders, and its renames need no sync."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
