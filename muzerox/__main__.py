"""``python -m muzerox``: the ``muzerox`` command."""

import sys

from muzerox.cli import main

sys.exit(main())
