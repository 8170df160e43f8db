"""The table of items: every table and figure of the paper, by name."""

from __future__ import annotations

from typing import Any

from reproduction import age_paths, clouds, extensions, figure1, figure5, input_weights, regression, table1, table4
from reproduction.records import Item

ITEMS: dict[str, Item[Any, Any]] = {
    "figure1": figure1.ITEM,
    "table1": table1.ITEM,
    "figure3": clouds.item("figure3", "gaussian", "Gaussian data"),
    "figure4": clouds.item("figure4", "gamma", "Gamma(2, 2) data"),
    "table2": regression.item("gaussian", "Gaussian inputs"),
    "table3": regression.item("gamma", "Gamma(2, 2) inputs"),
    "figure5": figure5.ITEM,
    "table4": table4.ITEM,
    "figure6": age_paths.FIGURE6,
    "figure7": age_paths.FIGURE7,
    "extensions": extensions.ITEM,
    "input_weights": input_weights.ITEM,
}
