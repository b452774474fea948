"""docs/reproduction.md and its figures, made of the studies' results alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.studies.study import DIRECTION, FAILS, HOLDS

Kept = Mapping[str, Any]

HEAD = """# Reproduction: the literature's claims at the size of a CPU

Written by `make reproduce` from the small files in `examples/studies/results`; each names its command,
seeds and versions. The models are those of `examples/`, 12 blocks of width 128 trained for 300 steps
on 154,000 bytes of Python's documentation, unless a row says otherwise. Where there are several seeds
a figure is the median, with the smallest and the largest.

A claim *holds* where its numbers do, *holds in direction* where only the sign or the order does, and
otherwise *does not hold at this size*: which is a statement about this size, not about the paper.
"""

TIMES = """Times are of a machine that did other work too. The runs that several studies read (14 architectures,
three seeds) were there before; they take half an hour on two cores."""


def write(results: Sequence[Kept], docs: Path) -> None:
    """Write the page, and one SVG for each study that has charts."""
    folder = docs / "reproduction"
    folder.mkdir(parents=True, exist_ok=True)
    for kept in results:
        if kept["charts"]:
            draw(kept["charts"], folder / f"{kept['study']}.svg")
    verdicts = Counter(finding["verdict"] for kept in results for finding in kept["findings"])
    count = (
        f"{verdicts[HOLDS]} hold, {verdicts[DIRECTION]} hold in direction, {verdicts[FAILS]} do not "
        "hold at this size"
    )
    lines = [HEAD, f"Of {sum(verdicts.values())} claims: {count}.\n"]
    lines += ["| paper | claim | measured | verdict | study |", "| --- | --- | --- | --- | --- |"]
    lines += [row for kept in results for row in rows(kept)]
    lines += ["", "## The studies", ""]
    lines += ["| study | command | seeds | took | torch |", "| --- | --- | --- | --- | --- |"]
    for kept in results:
        seeds = ", ".join(map(str, kept["seeds"]))
        lines.append(
            f"| {kept['study']} | `{kept['command']}` | {seeds} | {kept['minutes']} min | "
            f"{kept['torch']} |"
        )
    lines += [
        "",
        TIMES,
        "",
    ]
    for kept in results:
        if kept["charts"]:
            lines += [
                f"### {kept['study']}",
                "",
                f"![{kept['study']}](reproduction/{kept['study']}.svg)",
            ]
            lines += [""]
    (docs / "reproduction.md").write_text("\n".join(lines), encoding="utf-8")


def rows(kept: Kept) -> list[str]:
    name = kept["study"]
    link = f"[{name}](#{name})" if kept["charts"] else name
    return [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        for f in kept["findings"]
        for cells in [(f["paper"], f["claim"], f["measured"], f["verdict"], link)]
    ]


def draw(charts: Sequence[Kept], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same figures from the same results
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(charts), figsize=(6.4 * len(charts), 4), squeeze=False, layout="constrained"
    )
    for axis, chart in zip(axes[0], charts, strict=True):
        for curve in chart["curves"]:
            axis.plot(curve["x"], curve["y"], marker="." if len(curve["x"]) < 40 else "",
                      label=curve["label"])  # fmt: skip
        axis.set(title=chart["title"], xlabel=chart["x"], ylabel=chart["y"])
        axis.title.set_fontsize(10)
        if chart["log_x"]:
            axis.set_xscale("log", base=2)
        if chart["log_y"]:
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
