"""`verifier="auto"`: tree and verifier as the drafter's calibration says."""

from __future__ import annotations

from exittrain.drafters.base import Drafter
from exittrain.drafters.calibration import REMEDY, Calibration, Choice
from exittrain.errors import InputError
from exittrain.law.sampling import Sampling
from exittrain.models.target import TargetModel

AUTO = "auto"


def choose_auto(target: TargetModel, drafter: Drafter | None, sampling: Sampling, budget: int) -> Choice:
    """The longest calibrated block at this temperature among trees of at most `budget` nodes (`Calibration.choose`).

    Hashes the weights of drafter and target: decode many prompts in one call, or choose once and name what was chosen.
    Raises InputError for no drafter, no calibration, one of other weights, top-k or top-p, or none that small.
    """
    if drafter is None:
        raise InputError("verifier 'auto' goes by a drafter's calibration and there is no drafter: name a verifier")
    calibration = calibration_for(target, drafter.calibration, sampling, drafter.name)
    if calibration.drafter_fingerprint != drafter.fingerprint():
        raise InputError(f"the calibration beside {drafter.name} is of other weights (or of another dtype): {REMEDY}")
    return calibration.choose(sampling.temperature, budget)


def calibration_for(
    target: TargetModel, calibration: Calibration | None, sampling: Sampling, drafter: str
) -> Calibration:
    """The calibration, if there is one and it is of this target, top-k and top-p. drafter: its name, for messages.

    Raises:
        InputError: one line with the remedy.
    """
    if calibration is None:
        raise InputError(f"drafter {drafter} has no calibration for verifier 'auto': {REMEDY}, or name a verifier")
    if calibration.target_fingerprint != target.fingerprint():
        raise InputError(f"the calibration beside {drafter} is of another target (or of another dtype): {REMEDY}")
    if (calibration.top_k, calibration.top_p) != (sampling.top_k, sampling.top_p):
        raise InputError(
            f"the calibration beside {drafter} is of top_k {calibration.top_k} and top_p {calibration.top_p:g}, not "
            f"{sampling.top_k} and {sampling.top_p:g}: {REMEDY}"
        )
    return calibration
