"""The demo's picture: seconds of a step and accuracy above, memory over time below.

Large letters and few words, so that it can be read on a phone.
"""

import _plots

GREY, ORANGE, BLUE, GREEN, _ = _plots.COLOURS
STEP_PARTS = (("computing_s", BLUE, "computing"), ("codec_s", ORANGE, "codec"),
              ("exchange_s", GREY, "waiting for the link"))  # fmt: skip
METHOD_COLOURS = (GREY, ORANGE, BLUE)
MIB = 2**20


def draw(link, between, memory, path):
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    figure, (step, accuracy, held) = plt.subplots(
        3, 1, figsize=(8, 11.5), height_ratios=[2.8, 4, 4], layout="constrained"
    )
    step.set_title(f"Two ranks, {between}:\nmilliseconds of a step", loc="left")
    _draw_step(step, link)
    _draw_accuracy(accuracy, link)
    _draw_memory(held, memory)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_step(axes, link):
    longest = max(result["step_s"] for result in link.values())
    for row, result in enumerate(link.values()):
        left = 0.0
        for key, colour, _ in STEP_PARTS:
            axes.barh(row, 1e3 * result[key], left=1e3 * left, color=colour, height=0.62)
            left += result[key]
        fewer = f", {result['ratio']:.0f}x fewer bytes" if result["ratio"] > 1.05 else ""
        inside = left > 0.6 * longest
        axes.annotate(
            f"{1e3 * result['step_s']:.0f} ms{fewer}",
            (1e3 * left, row), xytext=(-8 if inside else 8, 0), textcoords="offset points",
            va="center", ha="right" if inside else "left", color="white" if inside else "black",
            fontweight="bold",
        )  # fmt: skip
    axes.set_yticks(range(len(link)), [name.replace("Compression", "") for name in link])
    axes.invert_yaxis()
    axes.tick_params(left=False)
    handles = [axes.barh(0, 0, color=colour) for _, colour, _ in STEP_PARTS]
    axes.legend(
        handles, [label for *_, label in STEP_PARTS], loc="upper center",
        bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=13, columnspacing=1.0,
        handlelength=1.2,
    )  # fmt: skip


def _draw_accuracy(axes, link):
    for result, colour in zip(link.values(), METHOD_COLOURS, strict=True):
        seconds, percent = zip(*result["curve"], strict=True)
        axes.plot(seconds, percent, color=colour, linewidth=3)
        axes.plot(seconds[-1], percent[-1], "o", color=colour, markersize=9)
    axes.set(xlabel="seconds of training", xlim=(0, None))
    axes.set_title("Test accuracy, % (the same steps)", loc="left")
    lines = [
        f"{name}: {run['accuracy']:.1f} % in {run['total_s']:.0f} s" for name, run in link.items()
    ]
    _write(axes, zip(lines, METHOD_COLOURS, strict=True), top=0.42)


def _write(axes, lines, top):
    """Coloured lines at the right, from `top` of the panel downwards."""
    for row, (line, colour) in enumerate(lines):
        axes.annotate(
            line, (0.99, top - 0.11 * row), xycoords="axes fraction", ha="right", va="top",
            color=colour, fontweight="bold",
        )  # fmt: skip


def _draw_memory(axes, memory):
    free, plain, planned = memory["free"], memory["plain"], memory["planned"]
    for run, colour, style in ((free, GREY, ":"), (planned, GREEN, "-"), (plain, ORANGE, "-")):
        if run["curve"]:
            moments, sizes = zip(*run["curve"], strict=True)
            axes.plot(moments, [size / MIB for size in sizes], style, color=colour, linewidth=2)
    # Runs are of different lengths; the planned one is what matters, if it has points at all.
    longest = planned["curve"] or free["curve"]
    end = longest[-1][0] if longest else 1.0
    limit = memory["limit"] / MIB
    axes.axhline(limit, color="black", linewidth=2)
    axes.set(xlim=(0, end), ylim=(0, 1.4 * memory["needs"] / MIB), xlabel="seconds")
    axes.set_title("Memory of a network under a limit, MiB", loc="left")
    axes.annotate(
        f"the limit, {limit:,.0f} MiB", (end, limit), xytext=(-4, 6), textcoords="offset points",
        color="black", fontweight="bold", ha="right",
    )  # fmt: skip
    if plain["error"]:
        # Where it was when an allocation was refused.
        moment, size = max(plain["curve"] or [(0.0, memory["limit"])], key=lambda point: point[1])
        axes.plot(moment, size / MIB, "x", color=ORANGE, markersize=16, markeredgewidth=4)
    if planned["error"]:
        outcome = "failed, see the text"
    else:
        outcome = f"trains, loss {planned['losses'][0]:.2f} to {planned['losses'][-1]:.2f}"
    lines = [
        (f"plain, no limit: {memory['needs'] / MIB:,.0f} MiB", GREY),
        ("plain: out of memory" if plain["error"] else "plain: trained", ORANGE),
        (f"planned: {outcome}", GREEN),
    ]
    _write(axes, lines, top=0.99)
