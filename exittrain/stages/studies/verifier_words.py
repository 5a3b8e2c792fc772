"""The study `verifiers` in a few sentences and one plot. Pure."""

from __future__ import annotations

from exittrain.stages.evaluation import intervals as iv
from exittrain.stages.reporting.figures import PALETTE, figure, svg
from exittrain.stages.studies.choices import Contest, fastest, longest
from exittrain.stages.studies.verifier_tables import Findings

MARKERS = "osD^v*"


def advice(found: Findings) -> list[str]:
    """One line a temperature: what to serve with, which family wins, what is fastest here."""
    return [_line(found, temperature) for temperature in found.temperatures]


def _line(found: Findings, temperature: float) -> str:
    options = found.at(temperature)
    best, quick = longest(options, found.split), fastest(options, found.split)
    parts = [f"{best.name}, longest expected block {_short(found.heldout(best))}"]
    widest = [one for one in found.contests if one.temperature == temperature][-1:]  # the largest budget comes last
    parts += [_family_words(one) for one in widest]
    line = f"temperature {temperature:g}: {'; '.join(parts)}."
    if quick is not None:
        speed = quick.tokens_per_second(found.heldout(quick).value)
        line += "" if speed is None else f" Most tokens/s here: {quick.name} (about {_rounded(speed)})."
    return line


def _family_words(contest: Contest) -> str:
    gap = contest.difference
    if contest.verdict == "sampled wins":
        return f"sampled trees beat fixed ones by {_short(gap, '+')} on held-out contexts"
    if contest.verdict == "fixed wins":
        return f"fixed trees beat sampled ones by {_short(_negative(gap), '+')} on held-out contexts"
    why = "too few held-out sequences for an interval" if gap.low is None else "too close to call"
    return f"sampled against fixed trees {_short(gap, '+')} on held-out contexts, {why}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _negative(gap: iv.Estimate) -> iv.Estimate:
    low, high = (None if bound is None else -bound for bound in (gap.high, gap.low))
    return iv.Estimate(-gap.value, low, high)


def _short(estimate: iv.Estimate, sign: str = "") -> str:
    known = estimate.low is not None and estimate.high is not None
    bounds = f" [{estimate.low:.2f}, {estimate.high:.2f}]" if known else ""
    return f"{estimate.value:{sign}.2f}{bounds}"


def plot(found: Findings) -> str:
    """Expected block length against budget, a panel a temperature; drawn trees dashed, a colour a kind of trees.
    Verifiers that give the same are one line, named by the first."""
    kinds = list(dict.fromkeys(law.trees for law in found.laws))
    shades = {trees: PALETTE[index % len(PALETTE)] for index, trees in enumerate(kinds)}
    rules = list(dict.fromkeys(option.verifier for option in found.options))
    temperatures = found.temperatures
    with figure(min(13.0, 1.2 + 3.4 * len(temperatures)), 4.6, len(temperatures), share=True) as (made, axes):
        for axis, temperature in zip(axes, temperatures, strict=True):
            for law in found.laws:
                if law.temperature == temperature:
                    points = [
                        (budget, found.split.mean(option.expected, "all")) for budget, option in law.options.items()
                    ]
                    axis.plot(
                        *zip(*points, strict=True), "-" if law.family == "fixed" else "--", color=shades[law.trees],
                        marker=MARKERS[rules.index(law.verifiers[0]) % len(MARKERS)], markersize=4.5,
                        label=f"{law.trees} + {law.verifiers[0]}",
                    )  # fmt: skip
            budgets = sorted({option.budget for option in found.options})
            axis.set_xscale("log", base=2)
            axis.set_xticks(budgets, [str(budget) for budget in budgets])
            axis.set_xlabel("drafted nodes")
            axis.set_title(f"temperature {temperature:g}")
        axes[0].set_ylabel("expected block length")
        handles = {text: line for axis in axes for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
        made.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(temperatures) + 1))
        return svg(made, "block-length", "Expected block length by budget, fixed trees solid and drawn trees dashed")
