"""Builders by name."""

from __future__ import annotations

from exittrain.build.base import Builder, TreeShape
from exittrain.build.beam import build_beam
from exittrain.build.best_first import build_best_first
from exittrain.build.oracle import build_oracle
from exittrain.build.sampled import SampledBuilder, build_sampled_iid, build_sampled_wor, gapless_paths
from exittrain.build.static import build_static, rank_paths
from exittrain.errors import InputError, nearest

BUILDERS: dict[str, Builder] = {
    "best_first": build_best_first,
    "beam": build_beam,
    "static": build_static,
    "sampled_iid": build_sampled_iid,
    "sampled_wor": build_sampled_wor,
    "oracle": build_oracle,
}


def get_builder(name: str) -> Builder:
    """The builder of that name; InputError with the nearest one otherwise."""
    if name not in BUILDERS:
        raise InputError(f"no builder {name!r}{nearest(name, list(BUILDERS))} (known: {', '.join(BUILDERS)})")
    return BUILDERS[name]


def drawn_by(name: str) -> str:
    """How that builder's trees are drawn, what `Verifier.check` asks: "top", "iid" or "without_replacement".

    Raises InputError as `get_builder`.
    """
    builder = get_builder(name)
    return builder.drawn if isinstance(builder, SampledBuilder) else "top"


def deepest_level(name: str, shape: TreeShape) -> int:
    """The deepest level that builder's trees of this shape may have."""
    return shape.depth if name in ("best_first", "beam", "oracle") else max(map(len, rank_paths(shape)))


def check_shape(name: str, shape: TreeShape) -> None:
    """Raises InputError where that builder cannot fill the shape (see `rank_paths`, `gapless_paths`)."""
    if drawn_by(name) != "top":
        gapless_paths(shape)
    elif name == "static":
        rank_paths(shape)
