"""A picture of attention time by pipeline phase and rank: at home, as planned, as measured."""

from __future__ import annotations

from pathlib import Path

from distca.train.metrics.phase_table import PhaseTable

_NAMES = {"at_home": "at home, planned", "planned": "disaggregated, planned", "measured": "measured"}


def plot_phases(path: Path, table: PhaseTable, stages: int) -> None:
    """Draw one heat map per series, each as multiples of its own mean over all ranks and phases.

    Args:
        path: the .png or .svg to write.
        table: at least one step.
        stages: pipeline stages, marked by lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = {name: getattr(table, name) for name in _NAMES}
    shown = {name: values for name, values in series.items() if values is not None and values.sum() > 0}
    phases, ranks = next(iter(shown.values())).shape
    width = max(6.0, 1.6 + 0.3 * phases)  # the titles need this much
    figure = Figure(figsize=(width, 0.9 + len(shown) * (0.75 + 0.22 * max(ranks, 4))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    highest = max(float((values / values.mean()).max()) for values in shown.values())
    for axes, (name, values) in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown.items(), strict=True):
        image = axes.imshow((values / values.mean()).T, cmap="viridis", vmin=0, vmax=highest, aspect="auto")
        for stage in range(1, stages):
            axes.axhline(stage * ranks // stages - 0.5, color="white", linewidth=0.8)
        axes.axvline(phases // 2 - 0.5, color="white", linewidth=1.6)
        level = table.levels(name)
        said = f"{_NAMES[name]}: slowest / mean {level['phases']:.2f}"
        # No wider than the map.
        said += (
            f", with linear layers {level['with_linear']['phases']:.2f}" if "with_linear" in level else " over phases"
        )
        axes.set_title(said, loc="left", fontsize=9)
        axes.set_ylabel("rank, by stage", fontsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=7)
    axes.set_xlabel("phase: all forward | all backward", fontsize=8)
    bar = figure.colorbar(image, ax=figure.axes, fraction=0.03)
    bar.set_label("attention time, 1 = mean", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path)
