"""The command line, `torpor`."""

from torpor.service.cli.main import main

__all__ = ["main"]
