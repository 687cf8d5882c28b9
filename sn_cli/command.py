"""Shared by all commands: answers, exit codes, checked paths, and JSON.

A command returns an Answer. Its exit code is 0, or 1 if the answer is no: the budget cannot be
kept, the plan is wrong, the model does not fit. It is 2 if there is no answer: a wrong flag, path
or file, a missing library. So a script can tell "it does not fit" from a usage error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

YES, NO, USAGE = 0, 1, 2


@dataclass(frozen=True)
class Answer:
    """The result of a command.

    Parameters
    ----------
    text
        Text for users.
    data
        The same for programs, serialisable by json.dumps.
    yes
        Whether the answer is yes; also True for commands without a yes-or-no question.
    """

    text: str
    data: dict[str, Any]
    yes: bool = True

    def shown(self, *, as_json: bool) -> str:
        """Return the text for standard output."""
        if not as_json:
            return self.text
        return json.dumps({"answer": "yes" if self.yes else "no", **self.data}, indent=1)


Run = Callable[[argparse.Namespace], Answer]


def add_command(commands: Any, name: str, run: Run, **words: str) -> argparse.ArgumentParser:
    """Add a command to a group, with the flag --json."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=words["help"],
        description=words.get("description", words["help"].capitalize() + "."),
        epilog=words.get("epilog"),
    )
    parser.add_argument("--json", action="store_true", help="answer as JSON on standard output")
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    return _number(text, lambda number: number > 0, "a number above 0")


def not_negative(text: str) -> float:
    """Parse a finite number, 0 or more."""
    return _number(text, lambda number: number >= 0, "a number, 0 or more")


def count(text: str) -> int:
    """Parse an integer, 1 or more."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 1, 2, 3 ...")
    return int(text)


def _number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and fits(number)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return number


def output_file(text: str) -> str:
    """Parse a path and check that it can be written, before the work begins."""
    folder = os.path.dirname(text) or "."
    if "\0" in text:
        raise argparse.ArgumentTypeError("the path contains a null byte; expected none")
    if os.path.isdir(text) or text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text} is a folder; expected the name of a file")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"the folder {folder} does not exist; create it first")
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no permission")
    return text


def picture_file(text: str) -> str:
    """Parse a path for a picture; also check for matplotlib before the work begins."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a picture needs matplotlib: pip install 'superneurons[report]'"
        )
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text}: expected a name that ends in .png")
    return output_file(text)


def page_file(text: str) -> str:
    """Parse a path for a page with pictures."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "a page has pictures, which need matplotlib: pip install 'superneurons[report]'"
        )
    return output_file(text)


def pyplot(font_size: int) -> Any:
    """Import pyplot for drawing to files; only when a picture is requested."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {"font.size": font_size, "axes.spines.top": False, "axes.spines.right": False}
    )
    return plt
