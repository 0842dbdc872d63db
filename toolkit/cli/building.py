"""Verbs that build: profile, selections, plan, and the list of components."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.output import Output, app, check, emit, show
from toolkit.errors import InputError, closest


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="A Hugging Face id, a local directory, or `demo`.")],
    quantizer: Annotated[
        list[str] | None,
        typer.Option("-q", "--quantizer", help="Quantizer key; may be repeated (default nf4)."),
    ] = None,
    include_head: Annotated[bool, typer.Option(help="Give the output head a row.")] = False,
    output: Output = None,
) -> None:
    """Measure every layer's quantization error in one pass over the weights.

    Example: toolkit profile demo --quantizer nf4 --quantizer 'nf4(block=128)' -o profile.json
    """
    from toolkit.weights.profiling import profile as measure

    check(output)
    chosen = {"quantizers": quantizer} if quantizer else {}
    emit(measure(model, include_head=include_head, **chosen), output)


@app.command()
def select(
    selector: Annotated[str, typer.Argument(help="Selector key, such as top-error or 'random-matched(roles=true)'.")],
    profile: Annotated[Path, typer.Option("--profile", help="Profile file.")],
    budget: Annotated[str | None, typer.Option(help="layers=0.2, parameters=0.1 or bytes=512MiB.")] = None,
    like: Annotated[list[Path] | None, typer.Option(help="Selection file to match; several with --chain.")] = None,
    within: Annotated[str | None, typer.Option(help="Tolerance of a matched selector (its option `within`).")] = None,
    match: Annotated[
        str | None, typer.Option(help="parameters, bytes, extra-bytes or adapter-parameters (its option `match`).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a random selector.")] = 0,
    count: Annotated[int | None, typer.Option("--draws", help="So many draws; -o is a folder, a file a draw.")] = None,
    chain: Annotated[bool, typer.Option("--chain", help="Nested families: a draw has a file a --like.")] = False,
    form: Annotated[
        str | None, typer.Option("--as", help="target-modules (PEFT), skip-modules (bitsandbytes) or names.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, a selector's option; repeatable.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write, a folder with --draws; stdout if left out.")
    ] = None,
) -> None:
    """Choose layers: by a ranking, from a list, or at random, matched to another selection.

    Example: toolkit select random-matched --profile profile.json --like top.json --seed 3 -o draw.json
    Families over budgets: toolkit select random-matched --profile profile.json --like top5.json --like top10.json
    --chain --draws 499 -o families
    """
    from toolkit.records.profile import Profile
    from toolkit.records.selection import Selection
    from toolkit.selection.exports import as_text, write_folder
    from toolkit.selection.select import chains, draws
    from toolkit.selection.select import select as choose

    named = {"within": within, "match": match}
    options = _pairs([*(set_ or []), *(f"{name}={value}" for name, value in named.items() if value is not None)])
    likes = [Selection.load(path) for path in like or []]
    if chain and not likes:
        raise InputError("--chain draws nested families: name the selections to match, each with --like")
    if chain and budget is not None:
        raise InputError("--chain takes its totals from the selections to match (--like): leave --budget out")
    if len(likes) > 1 and not chain:
        raise InputError(f"{len(likes)} selections to match (--like): only nested families (--chain) take several")
    if count is None and not chain:
        layers = Profile.load(profile)
        chosen = choose(selector, layers, budget, like=likes[0] if likes else None, seed=seed, **options)
        if form is None:
            emit(chosen, output)
        else:
            show(as_text(chosen, layers, form), output)
        return
    if output is None:
        raise InputError("several selections need a folder: name it with -o")
    layers, asked = Profile.load(profile), 1 if count is None else count
    if chain:
        found = chains(selector, layers, likes=likes, count=asked, seed=seed, **options)
    else:
        like_one = likes[0] if likes else None
        found = [[s] for s in draws(selector, layers, budget, like=like_one, count=asked, seed=seed, **options)]
    write_folder(output, found, layers, form)
    if len(found) < asked:
        print(
            f"only {len(found)} different draws were found of the {asked} asked for; all are written", file=sys.stderr
        )
    print(f"wrote {sum(map(len, found))} selections to {output}", file=sys.stderr)


@app.command()
def plan(
    base: Annotated[str, typer.Option(help="Quantizer of the layers that are not protected.")],
    protect: Annotated[Path | None, typer.Option(help="Selection file: the layers kept in 16 bit.")] = None,
    adapt: Annotated[Path | None, typer.Option(help="Selection file: the layers that get an adapter.")] = None,
    rank: Annotated[int | None, typer.Option(help="Adapter rank; without it there are no adapters.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Adapter alpha (default 16).")] = None,
    scaler: Annotated[str | None, typer.Option(help="Scaler key: lora (default), rslora or 'fixed(value=…)'.")] = None,
    initializer: Annotated[
        str | None,
        typer.Option(
            help="What the quantized layers start from: zero (default), loftq …; `toolkit list initializers`."
        ),
    ] = None,
    dataflow: Annotated[
        str | None, typer.Option(help="How it computes: stock (default), pact …; `toolkit list dataflows`.")
    ] = None,
    output: Output = None,
) -> None:
    """Write the per-layer plan: which layers stay in 16 bit, which are quantized, which get an adapter.

    Example: toolkit plan --protect top.json --base nf4 --rank 8 --alpha 16 --scaler rslora -o plan.json
    """
    from toolkit.records.plan import Plan
    from toolkit.records.selection import Selection
    from toolkit.registry import registry

    of_adapters = {name: value for name, value in (("alpha", alpha), ("scaler", scaler)) if value is not None}
    if rank is None and of_adapters:
        raise InputError(f"--{' and --'.join(of_adapters)} without --rank: a plan without a rank has no adapters")
    begun = {} if initializer is None else {"initializer": initializer}
    flow = {} if dataflow is None else {"dataflow": dataflow}
    if rank is None and initializer is not None and registry.make("initializer", initializer).needs_rank:
        raise InputError(f"--initializer {initializer} fits an adapter, and a plan without --rank has none")
    protected = Selection.load(protect) if protect else None
    adapted = Selection.load(adapt) if adapt else None
    emit(Plan.protecting(protected, base, adapt=adapted, rank=rank, **of_adapters, **begun, **flow), output)


def _pairs(items: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise InputError(f"cannot read --set {item!r}: write KEY=VALUE")
        if key.replace("-", "_") in options:
            raise InputError(f"option {key!r} is set twice; give it once")
        options[key.replace("-", "_")] = value
    return options


@app.command("list")
def list_(
    kind: Annotated[str | None, typer.Argument(help="Kind, in the plural: selectors, quantizers, scalers …")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain JSON.")] = False,
) -> None:
    """List the components of every installed plug-in, with their options and where they come from.

    Example: toolkit list selectors
    """
    from toolkit.interfaces import KINDS
    from toolkit.registry import registry

    plurals = {f"{name}s": name for name in KINDS}
    if kind is not None and kind not in plurals:
        raise InputError(f"no kind of component is called {kind!r}; {closest(kind, plurals)}")
    found = [
        {
            "kind": plural,
            "name": cls.name,
            "options": {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in cls.defaults().items()},
            "source": source,
            "summary": cls.summary(),
        }
        for plural, name in plurals.items()
        if kind in (None, plural)
        for cls, source in registry.of_kind(name).values()
    ]
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    _print_components(found, one_kind=kind is not None)


def _print_components(found: list[dict[str, Any]], *, one_kind: bool) -> None:
    from toolkit import spec

    keys = [spec.render(item["name"], item["options"]) for item in found]
    width = min(max(map(len, keys), default=0), 44)
    last = None
    for item, key in zip(found, keys, strict=True):
        if not one_kind and item["kind"] != last:
            print(f"{'' if last is None else chr(10)}{item['kind']}")
            last = item["kind"]
        indent = "" if one_kind else "  "
        if len(key) > width:
            print(f"{indent}{key}")
            key = ""
        print(f"{indent}{key:<{width}}  {item['summary']}  [{item['source']}]")
