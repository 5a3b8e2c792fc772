"""What papers print, as data beside the suites (eval/published), for the studies that stand next to it.

Block lengths count the bonus token, there as here. Read strictly: a figure under a misspelt key is an error.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict

from exittrain.records.share import share_path
from exittrain.stages.evaluation.tables import Table

Shape = Literal["chain", "binary", "eagle"]
Rule = Literal["predraw", "tev"]


class Pair(NamedTuple):
    """Block lengths of token-level and traversal verification on trees of one kind."""

    token_level: float
    traversal: float

    @property
    def gain(self) -> float:
        """Of traversal over token level, in percent."""
        return gain_percent(self.traversal, self.token_level)


class Figures(BaseModel):
    """source: the paper; counts: what its block length counts; differs: sentences, theirs beside ours."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: str
    counts: str
    differs: tuple[str, ...]


class TraversalFigures(Figures):
    """arXiv 2505.12398. depth_5: by pair of models, temperature 1; temperatures, depths: the first of those pairs."""

    depth_5: dict[str, dict[Shape, Pair]]
    temperatures: dict[float, dict[Shape, Pair]]
    depths: dict[Shape, dict[int, Pair]]


class TevFigures(Figures):
    """The TEV paper, Qwen3-4B, mean over its tasks. Drafters: "warm", "control", and objectives of math.md.

    objectives: by temperature and drafter, budget 64; crossed: by drafter and verifier, budget 64, temperature 1;
    budgets: by temperature, budget and drafter; milliseconds: by temperature, budget and verifier.
    """

    objectives: dict[float, dict[str, float]]
    crossed: dict[str, dict[Rule, float]]
    budgets: dict[float, dict[int, dict[str, float]]]
    milliseconds: dict[float, dict[int, dict[Rule, float]]]


Kind = TypeVar("Kind", bound=Figures)


def read_figures(name: str, kind: type[Kind]) -> Kind:
    """eval/published/<name>.yaml."""
    return kind.model_validate(yaml.safe_load(share_path(f"eval/published/{name}.yaml").read_text(encoding="utf-8")))


def gain_percent(value: float, control: float) -> float:
    return 100.0 * (value / control - 1.0)


def differs_table(figures: Figures) -> Table:
    """What keeps the published figures from being the same measurement."""
    return Table(
        "What differs between the published figures and this study",
        f"Published: {figures.source}; {figures.counts}.",
        ("theirs and ours",),
        tuple((line,) for line in figures.differs),
    )
