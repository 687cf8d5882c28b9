"""Panels that the demo and the accuracy study draw."""

import math

# Okabe and Ito's palette, distinguishable with every kind of colour vision; grey is plain Horovod.
COLOURS = ("#5f6368", "#d55e00", "#0072b2", "#009e73", "#cc79a7")


def new_figure():
    """Return (figure, (wide axes, narrow axes)), drawn without a display."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    return plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=[5, 4], layout="constrained")


def running_mean(values, width):
    """Return the mean of the last `width` values at each position, of fewer at the start."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[end] - sums[max(0, end - width)]) / min(end, width) for end in range(1, len(sums))
    ]


def label_ends(axes, ends, size=11):
    """Label curves right of their ends, a line's height apart: [(x, y, text, colour)]."""
    axes.figure.draw_without_rendering()  # the layout determines the height of a panel in points
    points = axes.get_window_extent().height * 72 / axes.figure.dpi
    low, high = axes.get_ylim()
    lowest = float("-inf")
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        wanted = (y - low) / (high - low) * points
        lowest = max(wanted, lowest + 1.25 * size)
        axes.annotate(
            text,
            (x, y),
            xytext=(8, lowest - wanted),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=size,
            fontweight="bold",
            annotation_clip=False,
        )


def bars_of_bytes(axes, rows):
    """Draw bytes per rank and step on a log scale; rows: [(name, bytes, colour)], plain first."""
    plain = rows[0][1]
    for place, (name, size, colour) in enumerate(rows):
        axes.barh(place, size, color=colour, height=0.4)
        fewer = f" ({plain / size:.0f}x fewer)" if size < plain else ""
        axes.annotate(
            f"{name}: {size:,.0f}{fewer}",
            (0, place - 0.22),
            xycoords=("axes fraction", "data"),
            xytext=(3, 3),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
        )
    axes.set_xscale("log")
    # A log axis has no zero: from a power of ten below the smallest, every bar has a length.
    axes.set_xlim(10 ** math.floor(math.log10(min(row[1] for row in rows)) - 0.3), plain * 1.5)
    axes.set_ylim(len(rows) - 0.6, -0.7)
    axes.set_yticks([])
    axes.set_title("bytes sent per rank and step (log scale)", loc="left")
