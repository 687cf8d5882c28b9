"""`sn`: the groups of commands, and how a command ends.

    sn compress predict --model resnet50 --ranks 8 --gbit 1
    sn memory plan resnet50 --budget 60% -o plan.json

See command.py for the exit codes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence

import sn_compress
import sn_memory
from sn_compress import CompressError
from sn_memory import BudgetError, CapacityError, GraphError, PackError, PlanError

from .command import NO, USAGE, YES
from .compress import add_compress
from .memory import add_memory

_EXIT_CODES = """\
exit codes: 0 done, or yes; 1 the answer is no (over the budget, not a valid plan, does not fit);
2 no answer (wrong flags, paths or files; a library is missing)"""
# Errors whose message says what was wrong with the input. A missing package is an ImportError.
_INPUT_ERRORS = (CompressError, GraphError, PackError, PlanError, ImportError, ValueError)


def main(arguments: Sequence[str]) -> int:
    """Run one command; the status to exit with."""
    options = parser().parse_args(arguments)
    try:
        answer = options.run(options)
    except (BudgetError, CapacityError) as error:
        # Not a usage error: the request is infeasible.
        if options.json:
            _write(json.dumps({"answer": "no", "why": str(error), **_numbers(error)}, indent=1))
        return _fail(str(error), NO)
    except OSError as error:
        return _fail(_describe(error), USAGE)
    except _INPUT_ERRORS as error:
        return _fail(str(error), USAGE)
    _write(answer.shown(as_json=options.json))
    return YES if answer.yes else NO


def script() -> None:
    """Run as `sn`, and exit."""
    # They are None if the caller closed them, as with `sn ... >&-`.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - to the end of the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    # Names of files and modules may contain characters that the terminal's locale cannot show.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        # From standard output or standard error; main reports all others. The reader may have
        # closed the pipe, as in `sn ... | head`. Python's own last flush must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        enough = isinstance(error, BrokenPipeError)
        code = USAGE if enough else _fail(f"standard output: {error.strerror}", USAGE)
    except KeyboardInterrupt:
        code = 130  # a shell's exit code for an interrupted program
    except Exception:  # noqa: BLE001 - any bug; it must not look like the answer "no"
        traceback.print_exc()
        sys.stderr.write("sn: this is a fault of superneurons; please report it.\n")
        code = USAGE
    sys.exit(code)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="sn",
        description="Compress gradients on the wire; plan training within a memory budget.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_versions())
    groups = parser.add_subparsers(required=True, metavar="compress|memory")
    add_compress(groups)
    add_memory(groups)
    return parser


def _versions() -> str:
    return f"sn_compress {sn_compress.__version__}, sn_memory {sn_memory.__version__}"


def _numbers(error: BudgetError | CapacityError) -> dict[str, object]:
    kept = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {
        name: value for name, value in kept.items() if isinstance(value, int | float | str | None)
    }


def _describe(error: OSError) -> str:
    """Return the file and the reason."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _fail(text: str, code: int) -> int:
    # A file's name may hold what no terminal shows.
    sys.stderr.write("sn: " + text.encode(errors="backslashreplace").decode() + "\n")
    return code
