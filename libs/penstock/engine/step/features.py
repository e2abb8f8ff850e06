"""Hidden states out of a step, for whoever guesses from them how a text goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.step.batch import Rows
from penstock.engine.step.run import Run


class Features:
    """The hidden states of some rows of a step after some layers. The step fills `values`."""

    def __init__(self, layers: Sequence[int], rows: Sequence[int], values: Tensor) -> None:
        """`layers` are numbers of layers behind which states are kept, growing, each fewer than the model has: in the
        last layer most rows are not computed. `rows` are numbers of the step's rows."""
        self.layers = layers
        self.rows = rows
        self.values = values
        """[rows, layers * hidden]: of each row, its state after the first of the layers, then after the next."""
        self._chosen = torch.tensor(rows, dtype=torch.int64, device=values.device)

    def keep(self, layers: int, x: Tensor) -> None:
        """Takes the states [N, hidden] of all rows of the step after so many layers."""
        if layers in self.layers:
            width, at = x.shape[1], self.layers.index(layers)
            self.values[:, at * width : (at + 1) * width] = x.index_select(0, self._chosen)

    def hand_over(self, order: Sequence[Run]) -> None:
        """Gives each of the step's runs, in the order of its rows, what it has asked for."""
        begin = 0
        for run in order:
            if run.featured:
                run.features = self.values[begin : begin + run.featured_tokens]
                begin += run.featured_tokens


def featured_rows(order: Sequence[Rows]) -> list[int]:
    """Numbers of the rows that have features, when the runs' rows are laid end to end."""
    rows: list[int] = []
    end = 0
    for run in order:
        end += run.tokens
        rows.extend(range(end - run.featured_tokens, end))
    return rows
