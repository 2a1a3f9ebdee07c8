"""``python -m muzerox``: the ``muzerox`` command."""

from muzerox.cli import command

command()
