"""Figures of a decomposition, drawn without a display; computes nothing but the order of columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdlib.method.truth import permute_to_identity

_MATRICES = 6  # in one figure


def permuted_importance(importance: Mapping[str, Any], path: Path) -> None:
    """Draw each site's lower importance `[features, C]`, its columns matched to the features.

    Args:
        importance: site → values in [0, 1].
        path: the PNG to write; its folder is made.
    """
    figure = Figure(figsize=(1 + 4 * len(importance), 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(importance), squeeze=False)[0]
    image: Any = None
    for axis, (site, values) in zip(axes, importance.items(), strict=True):
        image = axis.imshow(permute_to_identity(np.asarray(values)), vmin=0, vmax=1, cmap="Blues", aspect="auto")
        axis.set(title=site, xlabel="component (permuted)", ylabel="active feature")
    figure.colorbar(image, ax=axes, label="causal importance")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)


def matched_components(
    cosines: Mapping[str, np.ndarray], path: Path, *, matrices: Mapping[str, np.ndarray] | None = None
) -> None:
    """Draw `|cos|` of the matched components of each site, and beside it the matrices of small ones; write it whole.

    Args:
        cosines: site → `[matched]`, in descending order.
        path: a PNG.
        matrices: site → `|cos|` of all its components, partners on the diagonal, `[C, C']`; the first six are drawn.
    """
    drawn = list((matrices or {}).items())[:_MATRICES]
    figure = Figure(figsize=(6 + 4 * len(drawn), 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + len(drawn), squeeze=False)[0]
    for site, values in cosines.items():
        axes[0].plot(np.arange(1, len(values) + 1), values, label=site)
    axes[0].set(xlabel="matched component", ylabel="|cos| of the rank-one matrices", ylim=(-0.02, 1.02))
    if cosines:
        axes[0].legend(fontsize="small")
    for axis, (site, values) in zip(axes[1:], drawn, strict=True):
        image = axis.imshow(values, vmin=0, vmax=1, cmap="Blues", interpolation="nearest")
        axis.set(title=site, xlabel="component of B (permuted)", ylabel="component of A (permuted)")
        if axis is axes[-1]:
            figure.colorbar(image, ax=axes[1:], label="|cos|")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
