"""`rrs_wor`: recursive rejection sampling over children drawn without replacement (Sequoia, arXiv 2402.12374)."""

from __future__ import annotations

from exittrain.verify.rrs import Rrs


class RrsWor(Rrs):
    """As `rrs`, and after a rejection q(x) <- 0, q renormalised: the way the tree was drawn says so (`rejected`)."""

    name = "rrs_wor"
    drawn = ("without_replacement",)
