"""The command `octavo`: one parser, one place where errors become exit codes.

Exit codes: 0 done, 1 failure, 2 bad usage, 130 interrupted. Commands import what they need when they run, so that
`octavo --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from octavo.errors import ConfigError, OctavoError, UserError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. User errors are one line; `-v` shows where they come from."""
    from octavo.cli.parser import parse

    _find_modules_here()
    args = parse(sys.argv[1:] if argv is None else argv)
    verbose = getattr(args, "verbose", False)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away (`octavo models | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except OctavoError as error:
        return _fail(error, verbose, error.exit_code, show=isinstance(error, UserError))
    except OSError as error:
        return _fail(error, verbose, EXIT_FAILURE, show=True)
    except ModuleNotFoundError as error:
        advice = _missing_extra(error)
        return _fail(advice or error, verbose, EXIT_FAILURE, show=advice is not None)


def _find_modules_here() -> None:
    """`--draft module:Class` finds modules of the folder we are in; it comes last, so that they shadow nothing."""
    with suppress(FileNotFoundError):  # the folder may be gone
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def _missing_extra(error: ModuleNotFoundError) -> ModuleNotFoundError | None:
    """The error to show where an optional package is missing: it says which extra brings it."""
    from octavo.cli.common import EXTRA_OF

    extra = EXTRA_OF.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    advice = ModuleNotFoundError(f"{error.name} is not installed; pip install 'octavo[{extra}]'", name=error.name)
    advice.__cause__ = error
    return advice


def _fail(error: Exception, verbose: bool, code: int, *, show: bool) -> int:
    """Report `error` and return `code`. What is not the user's doing (`show` false) gets its traceback."""
    if verbose or not show:
        import traceback

        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, ConfigError) and error.option.isidentifier() and error.option.islower():
        message = "--" + error.option.replace("_", "-") + message.removeprefix(error.option)
    print(f"octavo: {message or type(error).__name__}", file=sys.stderr)
    return code
