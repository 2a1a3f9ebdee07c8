"""Checkpoints of a run by orbax: atomic, no pickle, written while training goes on.

``checkpoints/<updates>/`` holds two items: ``agent``, the parameters alone, and ``state``, everything training is made
of, replay included. A checkpoint counts as saved once :meth:`Checkpoints.finished` returns it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.errors import CheckpointError


@functools.cache
def _orbax() -> ModuleType:
    """orbax, which is slow to import and not needed by every use of the package.

    It logs to stderr what it also raises, and warnings that are not for the user; neither is shown.
    """
    import orbax.checkpoint
    from absl import logging as absl_logging

    absl_logging.get_absl_logger().addFilter(lambda r: r.levelno > logging.ERROR or "orbax" not in Path(r.pathname).parts)
    return orbax.checkpoint


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(tree: Any) -> Any:
    """Copies that later donation of the device's buffers cannot touch; keys as their data. NumPy arrays are taken as they are."""

    def leaf(x: Any) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else np.array(jax.random.key_data(x) if _is_key(x) else x)

    return jax.tree.map(leaf, tree)


def _template(tree: Any) -> Any:
    """Host arrays of the right shapes and dtypes for ``tree`` of arrays or ShapeDtypeStructs."""

    def leaf(x: Any) -> np.ndarray:
        x = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        return np.empty(x.shape, x.dtype)

    return jax.tree.map(leaf, tree)


def _as_arrays(saved: Any, like: Any, *, on_device: bool) -> Any:
    """What was restored, its keys as such.

    Where not ``on_device`` an accelerator is left to whoever knows where each part goes: a replay may be more than one holds.
    """

    def leaf(x: np.ndarray, target: Any) -> jax.Array | np.ndarray:
        if _is_key(target):
            return jax.random.wrap_key_data(jnp.array(x))
        # A copy: on CPU an array may share its host buffer, which donation must not hand on.
        return jnp.array(x, copy=True) if on_device else x

    return jax.tree.map(leaf, saved, like)


@contextmanager
def _late_reads_silenced() -> Iterator[None]:
    """No tracebacks of reads that nobody waits for.

    orbax closes its event loop at the first read that fails. Each of the others then prints a traceback at any later
    time, so the silence stays when the block fails: tensorstore's threads when they find the loop closed, and asyncio
    when it drops a task, or what a task waited for, that had already failed.
    """
    before = sys.unraisablehook
    tasks = logging.getLogger("asyncio")

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, RuntimeError) or str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    def keep(record: logging.LogRecord) -> bool:
        return "exception was never retrieved" not in record.getMessage()

    sys.unraisablehook = hook
    tasks.addFilter(keep)
    yield
    sys.unraisablehook = before
    tasks.removeFilter(keep)


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      directory: the run's ``checkpoints`` folder.
      writable: opening for writing creates the folder and removes what killed saves left behind.
      keep: checkpoints kept, newest first.
    """

    def __init__(self, directory: Path, *, writable: bool, keep: int = 2):
        self.directory, self._writable, self._keep = directory.resolve(), writable, keep
        self._pending: list[int] = []
        if writable:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):
                    shutil.rmtree(leftover)
            except OSError as error:
                raise CheckpointError(str(self.directory), None, f"cannot be written: {error.strerror}") from None

    @functools.cached_property
    def _manager(self) -> Any:
        """Made at the first need, which for a new run comes after its first update: orbax takes a while to import."""
        ocp = _orbax()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep if self._writable else None,
            create=False,
            read_only=not self._writable,
            enable_async_checkpointing=self._writable,
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest saved step; None when there is none."""
        if not self.directory.is_dir() or not any(self.directory.iterdir()):
            return None
        return self._manager.latest_step()

    def save(self, step: int, state: Any, params: Any) -> None:
        """Starts to save; returns once the values are copied. Raises CheckpointError when this or an earlier save failed."""
        ocp = _orbax()
        items = {"agent": ocp.args.StandardSave(_to_host(params)), "state": ocp.args.StandardSave(_to_host(state))}
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items))
        self._pending.append(step)

    def finished(self, *, wait: bool = False) -> list[int]:
        """Steps that have come to lie on the disk since the last call; with ``wait``, blocks until no save is under way.

        Raises CheckpointError when a save failed.
        """
        if not self._pending:
            return []
        if wait or not self._manager.is_saving_in_progress():
            done, self._pending = self._pending, []
            with self._writing():
                self._manager.wait_until_finished()  # a save that failed is no longer in progress either: only this tells
        else:  # the newest is under way, which began once those before it had ended
            done, self._pending = self._pending[:-1], self._pending[-1:]
        return [step for step in done if (self.directory / str(step)).is_dir()]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what orbax raises when a save failed, in the background too, into a CheckpointError."""
        try:
            yield
        except Exception as error:  # of many kinds: of the system, of tensorstore, of orbax; all mean the same to the user
            raise CheckpointError(str(self.directory), None, f"cannot be written: {_why(error)}") from error

    def restore_state(self, like: Any) -> Any:
        """The newest state, shaped like ``like`` (arrays or ShapeDtypeStructs). Raises CheckpointError.

        In NumPy arrays where there is an accelerator, on which a runtime places what belongs there.
        """
        return self._restore("state", like, on_device=jax.default_backend() == "cpu")

    def restore_params(self, like: Any) -> Any:
        """The newest parameters. Raises CheckpointError."""
        return self._restore("agent", like, on_device=True)

    def _restore(self, item: str, like: Any, *, on_device: bool) -> Any:
        step = self.latest()
        if step is None:
            raise CheckpointError(str(self.directory), None, "holds no checkpoint")
        path = self.directory / str(step) / item
        template = _template(like)
        try:
            with _late_reads_silenced():
                restored = self._manager.restore(
                    step, args=_orbax().args.Composite(**{item: _orbax().args.StandardRestore(template)})
                )[item]
        except Exception as error:  # orbax raises many kinds on a damaged folder; all mean the same to the user
            older = sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and int(p.name) < step)
            hint = f"; delete the folder {path.parent} to go on from step {older[-1]}" if older else ""
            raise CheckpointError(
                str(path), None, f"is corrupt or does not fit this configuration ({_first_line(error)}){hint}"
            ) from error
        for (name, want), saved in zip(jax.tree.leaves_with_path(template), jax.tree.leaves(restored), strict=True):
            if (saved.shape, saved.dtype) != (want.shape, want.dtype):  # which orbax lets pass
                raise CheckpointError(
                    str(path),
                    None,
                    f"does not fit this configuration: {jax.tree_util.keystr(name, simple=True, separator='.')} is "
                    f"{saved.dtype}{list(saved.shape)}, and the configuration makes it {want.dtype}{list(want.shape)}",
                )
        return _as_arrays(restored, like, on_device=on_device)

    def close(self) -> None:
        """Waits for saves under way and releases threads. Raises CheckpointError when one failed and nobody was told."""
        if "_manager" in self.__dict__:
            try:
                self.finished(wait=True)
            finally:
                self._manager.close()


def _why(error: Exception) -> str:
    """The system's reason where there is one; tensorstore has its number at the end of a very long line."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or _first_line(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
