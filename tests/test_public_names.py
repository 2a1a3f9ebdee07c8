"""What the packages promise by name, and what README and docs use of them, is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

PACKAGES = ("muzerox", "predictor", "tuner")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def names_used(block: str) -> set[tuple[str, str]]:
    """Modules of ours, and the names that Python code takes from them."""
    used = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            used |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PACKAGES:
            used.add((node.value.id, node.attr))
    return used


def test_names_in_the_documentation_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M)]
    used = set().union(*map(names_used, blocks))
    assert {("muzerox", "train"), ("tuner", "tune")} <= used
    for module, name in used:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_files_that_the_documentation_names_are_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for path in re.findall(r"`((?:muzerox|predictor|tuner|benchmarks|tests|docs)/[\w./-]*\w)/?`", page.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
