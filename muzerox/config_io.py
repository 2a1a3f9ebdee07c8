"""TOML files and ``a.b=c`` texts to and from :class:`~muzerox.config.Config`."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

from muzerox.config import Config
from muzerox.errors import ConfigError


def dumps(config: Config) -> str:
    """The configuration as TOML text; ``loads(dumps(config)) == config``."""
    lines: list[str] = []
    tree = config.to_dict()
    for name, value in tree.items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {_toml(value)}")
    for name, value in tree.items():
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *(f"{key} = {_toml(item)}" for key, item in value.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string, but for pairs of surrogates, which ensure_ascii makes, and a bare DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # keeps every bit of a float


def parse(text: str, source: str) -> dict[str, Any]:
    """TOML text to a nested dictionary; raises ConfigError naming ``source`` on bad syntax."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: bad syntax, and numbers of thousands of digits
        raise ConfigError(source, None, f"is not valid TOML: {error}") from None


def loads(text: str, source: str = "configuration") -> Config:
    """A Config from TOML text. Raises ConfigError."""
    return Config.from_dict(parse(text, source))


def read_tree(path: str | Path) -> dict[str, Any]:
    """The nested dictionary of a TOML file. Raises ConfigError when it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), None, "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), None, f"cannot be read: {_reason(error)}") from None
    return parse(text, str(path))


def load(path: str | Path) -> Config:
    """A Config from a TOML file. Raises ConfigError."""
    return Config.from_dict(read_tree(path))


def parse_assignment(text: str) -> tuple[str, Any]:
    """``"search.num_simulations=16"`` to ``("search.num_simulations", 16)``.

    The value is read as TOML where it is one, as ``none`` for absent, and as bare text otherwise.
    Raises ConfigError without an equals sign.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError("--set", text, "must look like path=value, for example search.num_simulations=16")
    value = value.strip()
    if value.lower() == "none":
        return path.strip(), None
    try:
        tree = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        tree = {}
    return path.strip(), tree["value"] if len(tree) == 1 else value


def fingerprint(config: Config) -> str:
    """Twelve hexadecimal digits that identify the configuration."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
