"""Figures of a decomposition, drawn without a display; computes nothing but the order of columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pdlib.method.truth import permute_to_identity


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


def matched_components(cosines: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw `|cos|` of the matched components of each site, in descending order, and write it whole.

    Args:
        cosines: site → `[matched]`.
        path: a PNG.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for site, values in cosines.items():
        axes.plot(np.arange(1, len(values) + 1), values, label=site)
    axes.set(xlabel="matched component", ylabel="|cos| of the rank-one matrices", ylim=(-0.02, 1.02))
    if cosines:
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)
