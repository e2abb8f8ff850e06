"""What forms have in common that show a picture whole, in cells, and what all forms read alike."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.reading import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class CellForm:
    """PictureForm of one part, but for what a model's own form adds. Sizes are pixels, or numbers of a vector."""

    patch: int
    """Side of a patch."""
    merge: int
    """So many patches in each direction are a cell."""
    token: int
    hidden_size: int
    n_layers: int
    n_heads: int
    intermediate_size: int
    rope_theta: float
    mean: tuple[float, ...]
    """Of red, green and blue, from 0 to 1: it is taken off, ..."""
    deviation: tuple[float, ...]
    """... and the rest divided by this."""

    @property
    def side(self) -> int:
        """That of a cell."""
        return self.patch * self.merge

    def embeddings(self, rows: int, columns: int) -> int:
        """One for each cell."""
        return rows * columns

    def shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """See PictureForm."""
        return 1, rows * self.side, columns * self.side


def with_bias(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A matrix and its bias, or a norm and its."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def rope_theta(vision: Reader) -> float:
    """Of a vision_config, in both spellings."""
    rope = vision.values.get("rope_parameters")
    return vision.inner({**vision.values, **(rope if isinstance(rope, dict) else {})}).number("rope_theta", 10000.0)


def levels(how: Reader, name: str, usual: tuple[float, ...]) -> tuple[float, ...]:
    """A number for each of three colours, of a preprocessor_config.json."""
    return how.numbers(name, len(usual)) if how.values.get(name) is not None else usual
