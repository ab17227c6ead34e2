"""The command line. Bad input ends with one line on stderr and exit status 2, a failed check with 1."""

from __future__ import annotations

import sys
import warnings

from . import measure, plans, training
from .common import app, prepare_devices

__all__ = ["app", "main", "measure", "plans", "prepare_devices", "training"]


def main() -> None:
    """Entry point of `jaxmoe`."""
    warnings.showwarning = _show_warning
    try:
        app()
    except (ValueError, FileNotFoundError) as e:
        print(f"jaxmoe: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:   # the loop has saved, and said how to go on
        sys.exit(130)
    except RuntimeError as e:
        print(f"jaxmoe: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(1)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Our warnings in one line on stderr; those of libraries as they are."""
    if category is UserWarning and "jaxmoe" in filename:
        print(f"jaxmoe: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr, end="")
