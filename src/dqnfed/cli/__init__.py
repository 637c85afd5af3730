"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import logging
import sys

from rich.logging import RichHandler
from rich.markup import escape

from dqnfed.cli.common import app, errors

# Importing a room registers its commands, in the order of the help page.
from dqnfed.cli import training as training, models as models, results as results  # isort: skip
from dqnfed.cli import data as data, research as research, deploy as deploy, site as site  # isort: skip

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; errors that a user can mend are one message, not a traceback."""
    verbose = any(flag in sys.argv for flag in ("-v", "--verbose"))
    quiet = any(flag in sys.argv for flag in ("-q", "--quiet"))
    level = logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING
    handler = RichHandler(console=errors, show_path=False, show_time=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    try:
        app()
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if verbose:
            raise
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("interrupted; what was finished is saved")
        sys.exit(130)
