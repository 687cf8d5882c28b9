"""The demo's picture: seconds of a step and accuracy above, memory over time below.

Large letters and few words, so that it can be read on a phone.
"""

import _plots

GREY, ORANGE, BLUE, GREEN = _plots.COLOURS[0], _plots.COLOURS[1], _plots.COLOURS[2], "#009e73"
PARTS = (("computing_s", BLUE, "computing"), ("codec_s", ORANGE, "codec"),
         ("exchange_s", GREY, "waiting for the link"))  # fmt: skip
MIB = 2**20


def draw(link, between, memory, path):
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, (steps, learns, holds) = plt.subplots(
        3, 1, figsize=(8, 10.5), height_ratios=[2.4, 4, 4], layout="constrained"
    )
    _steps(steps, link)
    steps.set_title(f"Two ranks, {between}:\nmilliseconds of a step", loc="left")
    _learns(learns, link)
    _holds(holds, memory)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _steps(axes, link):
    longest = max(it["step_s"] for it in link.values())
    for place, it in enumerate(link.values()):
        left = 0.0
        for key, colour, _ in PARTS:
            axes.barh(place, 1e3 * it[key], left=1e3 * left, color=colour, height=0.62)
            left += it[key]
        fewer = f", {it['ratio']:.0f} times fewer bytes" if it["ratio"] > 1.05 else ""
        inside = left > 0.6 * longest
        axes.annotate(
            f"{1e3 * it['step_s']:.0f} ms{fewer}",
            (1e3 * left, place), xytext=(-8 if inside else 8, 0), textcoords="offset points",
            va="center", ha="right" if inside else "left", color="white" if inside else "black",
            fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(range(len(link)), list(link))
    axes.invert_yaxis()
    axes.tick_params(left=False)
    handles = [axes.barh(0, 0, color=colour) for _, colour, _ in PARTS]
    axes.legend(
        handles, [label for *_, label in PARTS], loc="upper center", bbox_to_anchor=(0.5, -0.22),
        ncols=3, frameon=False, fontsize=13, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip


def _learns(axes, link):
    colours = (GREY, ORANGE)
    for it, colour in zip(link.values(), colours, strict=True):
        seconds, percent = zip(*it["curve"], strict=True)
        axes.plot(seconds, percent, color=colour, linewidth=3)
        axes.plot(seconds[-1], percent[-1], "o", color=colour, markersize=9)
    axes.set(xlabel="seconds of training", xlim=(0, None))
    axes.set_title("Test accuracy, % (the same steps)", loc="left")
    said = [f"{name}: {it['accuracy']:.1f} % in {it['total_s']:.0f} s" for name, it in link.items()]
    _say(axes, zip(said, colours, strict=True), top=0.3)


def _say(axes, lines, top):
    """Coloured lines at the right, from `top` of the panel downwards."""
    for place, (line, colour) in enumerate(lines):
        axes.annotate(
            line, (0.99, top - 0.11 * place), xycoords="axes fraction", ha="right", va="top",
            color=colour, fontweight="bold",
        )  # fmt: skip


def _holds(axes, memory):
    free, plain, planned = memory["free"], memory["plain"], memory["planned"]
    end = max((moment for moment, _ in planned["curve"]), default=1.0)
    for run, colour, style in ((free, GREY, ":"), (planned, GREEN, "-"), (plain, ORANGE, "-")):
        if run["curve"]:
            moments, sizes = zip(*run["curve"], strict=True)
            sizes = [size / MIB for size in sizes]
            axes.plot(moments, sizes, style, color=colour, linewidth=2)
    limit = memory["limit"] / MIB
    axes.axhline(limit, color="black", linewidth=2)
    axes.set(xlim=(0, end), ylim=(0, 1.32 * memory["top"] / MIB), xlabel="seconds")
    axes.set_title("Memory of a network under a limit, MiB", loc="left")
    at = {"color": "black", "fontweight": "bold", "ha": "right"}
    axes.annotate(
        f"the limit, {limit:,.0f} MiB", (end, limit), xytext=(-4, 6), textcoords="offset points",
        **at,
    )  # fmt: skip
    if plain["ended"]:
        # Where it was when the next tensor was refused.
        moment, size = max(plain["curve"] or [(0.0, memory["limit"])], key=lambda it: it[1])
        axes.plot(moment, size / MIB, "x", color=ORANGE, markersize=16, markeredgewidth=4)
    text = [
        (f"plain, no limit: {memory['top'] / MIB:,.0f} MiB", GREY),
        ("plain: out of memory" if plain["ended"] else "plain: trained", ORANGE),
        (f"planned: trains, {planned['losses'][0]:.2f} to {planned['losses'][-1]:.2f} loss", GREEN),
    ]
    _say(axes, text, top=0.99)
