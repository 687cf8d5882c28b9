"""matplotlib for the benchmarks: into files, without a display."""

from __future__ import annotations

from typing import Any


def pyplot(font_size: int | None = None) -> Any:
    """matplotlib.pyplot; with a font size, of axes without a frame.

    Imported where a picture is drawn: a machine that only measures may be without it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    if font_size is not None:
        plt.rcParams["font.size"] = font_size
        plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    return plt
