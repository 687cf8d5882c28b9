"""Where the sources of csrc/compress are: kernels are compiled from them at first use.

`importlib.resources` is the obvious way, but in an editable install the folder `sn_compress._csrc`
does not exist (it is mapped from csrc/compress when a wheel is made). So the package is asked
first and the source tree second.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def source(name: str) -> Path:
    """Return the path of a file of csrc/compress, such as `"pack.cu"`.

    Raises
    ------
    FileNotFoundError
        If neither the installed package nor the source tree has it.
    """
    folders = (_PACKAGE / "_csrc", _PACKAGE.parent / "csrc" / "compress")
    for folder in folders:
        path = folder / name
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"no source file {name!r} of sn_compress; looked in {' and '.join(map(str, folders))}. "
        "Install superneurons again, or run from a complete clone."
    )
