"""Convert this project's docstrings to Markdown, for the reference pages of the site.

Sections have NumPy's headings, but their entries are `name : description`, without a type, which
the signature has. A NumPy docstring parser would take the description for a type. So this Griffe
extension (mkdocstrings reads code with Griffe) converts entries to lists and examples to blocks.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_RULE = re.compile(r"-{3,}")
_ENTRY = re.compile(r"(\*{0,2}\w[\w*, ]*?)(?: : (.*))?")


class Docstrings(Extension):
    """Griffe extension that rewrites every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    r"""Return a docstring as Markdown.

    >>> print(markdown("Say.\n\nParameters\n----------\nname : of a person,\n    or none"))
    Say.
    <BLANKLINE>
    **Parameters**
    <BLANKLINE>
    - `name`: of a person, or none
    """
    output: list[str] = []
    section = example = False
    lines = text.splitlines()
    for place, line in enumerate(lines):
        rule = lines[place + 1].strip() if place + 1 < len(lines) else ""
        if example and not line.strip():
            output += ["```", ""]
            example = False
        elif line.startswith(">>> ") and not example:
            output += ["", "```pycon", line]
            example = True
        elif example:
            output.append(line)
        elif line.strip() and _RULE.fullmatch(rule):
            output += ["", f"**{line.strip()}**", ""]
            section = line.strip() not in ("Examples", "Notes")
        elif _RULE.fullmatch(line.strip()):
            continue
        elif section and line and not line.startswith(" "):
            # A sentence, as "Raises CompressError ...", ends the entries before it.
            match = _ENTRY.fullmatch(line)
            names = match and (match[2] is not None or lines_on(lines, place))
            if match and names:
                text_after = f": {match[2]}" if match[2] else ":"
                names_text = ", ".join(f"`{name.strip()}`" for name in match[1].split(","))
                output.append(f"- {names_text}{text_after}")
            else:
                output += ["", line] if output and output[-1].startswith(("-", "    ")) else [line]
                section = bool(match)
        elif section and output and output[-1].startswith("- "):
            output[-1] += f" {line.strip()}" if line.strip() else ""
        else:
            output.append(line)
    text = "\n".join([*output, "```"] if example else output)
    return re.sub(r"\n{3,}", "\n\n", text)


def lines_on(lines: list[str], place: int) -> bool:
    """Return whether the text after a line is indented below it."""
    return place + 1 < len(lines) and lines[place + 1].startswith("    ")
