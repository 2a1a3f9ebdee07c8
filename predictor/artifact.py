"""Arrays and plain values in a directory: ``arrays.npz`` and ``meta.json``, without pickle."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

_ARRAYS, _META = "arrays.npz", "meta.json"


class ArtifactError(ValueError):
    """A saved predictor that cannot be read or written; ``str(error)`` is one line."""


def save(directory: str | os.PathLike[str], tree: Any, meta: Mapping[str, Any]) -> None:
    """Writes a pytree of arrays and a dictionary that JSON can hold. Raises ArtifactError."""
    folder = Path(directory)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Each under another name first: a reader sees the old file or the new one, never half of one.
        with (folder / f"{_ARRAYS}.part").open("wb") as file:
            np.savez(file, allow_pickle=False, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
        (folder / f"{_META}.part").write_text(json.dumps(meta, indent=1) + "\n")
        for name in (_ARRAYS, _META):
            (folder / f"{name}.part").replace(folder / name)
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror}") from error


def load(directory: str | os.PathLike[str], like: Any) -> tuple[Any, dict[str, Any]]:
    """What :func:`save` wrote: a pytree of the structure, shapes and dtypes of ``like``, and the dictionary.

    Raises:
      ArtifactError: something is missing, corrupt, or of another shape.
    """
    folder = Path(directory)
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    try:
        # Opened here: numpy leaves a file open that is no archive.
        with (folder / _ARRAYS).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads((folder / _META).read_text())
    except OSError as error:
        raise ArtifactError(f"{error.filename or folder}: {error.strerror}") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{folder}: not a saved predictor: {' '.join(str(error).split())}") from error
    if not isinstance(meta, dict):
        raise ArtifactError(f"{folder / _META}: must be an object")
    for name, leaf in wanted.items():
        if name not in arrays or arrays[name].shape != leaf.shape or arrays[name].dtype != leaf.dtype:
            raise ArtifactError(f"{folder}: {name} is missing or of another shape: saved by another version")
    return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted]), meta
