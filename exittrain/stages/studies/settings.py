"""Suites: a list of tasks, or a study, which measures one question over many settings on the same contexts.

One YAML each in eval/suites; a study's settings can be overridden as `suite.contexts=64`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from exittrain.config.load import parse_yaml
from exittrain.config.schema import Positive, Section, Temperature
from exittrain.errors import InputError, nearest
from exittrain.records.share import share_names, share_path

FixedVerifier = Literal["tev", "predraw", "residual"]
AnyVerifier = Literal["tev", "predraw", "residual", "rrs", "rrs_wor", "traversal", "block"]
AnyBuilder = Literal["best_first", "beam", "static", "sampled_iid", "sampled_wor"]


class TaskSuite(Section):
    """A name for several tasks of `eval`."""

    name: str
    description: str
    tasks: list[str]


class Study(Section):
    """What all studies share. contexts: positions in the tasks' sequences; draws: verdicts a tree as the cross-check of
    its expectation (0: none); drafters: names among the run's, or none for the study's own choice."""

    name: str
    description: str
    tasks: Annotated[list[str], Field(min_length=1)]
    drafters: list[str] | None = None
    contexts: Positive = 256
    draws: Annotated[int, Field(ge=0)] = 16
    max_new_tokens: Positive = 48  # of the target's answers to a benchmark, in which contexts lie, and of decoding
    bootstrap: Positive = 2000
    depth: Positive = 8
    width: Positive = 8


class VerifierStudy(Study):
    """Builders x verifiers x temperatures x budgets; half of the contexts choose, the other half report."""

    study: Literal["verifiers"]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    budgets: Annotated[list[Positive], Field(min_length=1)]
    builders: Annotated[list[AnyBuilder], Field(min_length=1)]
    verifiers: Annotated[list[AnyVerifier], Field(min_length=1)]
    prompts: Positive = 8  # decoded for the cross-check and for seconds a round


class TraversalStudy(Study):
    """The ablations of arXiv 2505.12398: traversal beside rrs_wor on chains, binary trees and EAGLE's sparse tree.

    All depths, and the draws, are of one temperature (1 where it is asked for); the others have depth 5 alone, as the
    paper's own table. depth and width are not used.
    """

    study: Literal["traversal-paper"]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    chain_depths: Annotated[list[Positive], Field(min_length=1)]
    binary_depths: Annotated[list[Positive], Field(min_length=1)]


class TevStudy(Study):
    """Drafters x {predraw, tev} x budgets on best-first trees, with verifier milliseconds.

    timed: trees on which the verifiers are timed, one at a time, `repeats` times each (0: none).
    """

    study: Literal["tev-paper"]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    budgets: Annotated[list[Positive], Field(min_length=1)]
    verifiers: Annotated[list[FixedVerifier], Field(min_length=1)]
    timed: Annotated[int, Field(ge=0)] = 32
    repeats: Positive = 5


class OracleStudy(Study):
    """C*(N), tree efficiency, and where the gap lies: root, interior, horizon.

    depth, width: of the drafters' trees, the oracle's have no such limit. draws is not used: all is exact.
    """

    study: Literal["oracle"]
    temperatures: Annotated[list[Temperature], Field(min_length=1)]
    budgets: Annotated[list[Positive], Field(min_length=1)]


SCHEMAS: dict[str | None, type[TaskSuite] | type[Study]] = {
    None: TaskSuite,
    "verifiers": VerifierStudy,
    "traversal-paper": TraversalStudy,
    "tev-paper": TevStudy,
    "oracle": OracleStudy,
}


def load_suite(name: str, overrides: Sequence[str] = ()) -> TaskSuite | Study:
    """A suite of eval/suites by name. overrides: `suite.key=value`, values in YAML.

    Raises:
        InputError: no such suite (the nearest is named), an unknown key or a bad value.
    """
    known = [entry.removesuffix(".yaml") for entry in share_names("eval/suites") if entry.endswith(".yaml")]
    if name not in known:
        raise InputError(f"no suite {name!r}{nearest(name, known)} (known: {', '.join(sorted(known))})")
    tree: dict[str, Any] = yaml.safe_load(share_path(f"eval/suites/{name}.yaml").read_text(encoding="utf-8"))
    schema = SCHEMAS[tree.get("study")]
    for override in overrides:
        key, _, value = override.removeprefix("suite.").partition("=")
        if key in ("name", "description", "study"):
            raise InputError(f"suite {name}: {key!r} says what the suite is and cannot be set")
        tree[key] = parse_yaml(value, f"suite.{key}")
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        hint = nearest(place, list(schema.model_fields)) if fault["type"] == "extra_forbidden" else ""
        raise InputError(f"suite {name}: {place}: {fault['msg']}{hint}") from None
