"""The shell: one thin function a verb, each calling what Python calls.

Errors go to stderr in one or a few lines: exit code 2 for bad input, 1 for a failed run; `--debug`, anywhere
on the line, shows the traceback. Verbs import what they need when they run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.errors import InputError, ToolkitError, closest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Controlled ablations for quantized LoRA: profile, select, plan, run, table, figure.",
)

Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout where left out.")]


def _emit(record: Any, output: Path | None) -> None:
    """A record to its file, or to stdout."""
    if output is None:
        print(json.dumps(record.to_json(), indent=1, ensure_ascii=False))
    else:
        record.save(output)
        print(f"wrote {output}", file=sys.stderr)


def _check(output: Path | None) -> None:
    """Refuse an output that cannot be written before long work is done for it."""
    if output is not None:
        from toolkit.records.io import check_output

        check_output(output)


def _print(text: str, output: Path | None) -> None:
    """A text to its file, or to stdout."""
    from toolkit.records.io import atomic

    if output is None:
        print(text)
        return
    with atomic(output) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {output}", file=sys.stderr)


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

    _check(output)
    chosen = {"quantizers": quantizer} if quantizer else {}
    _emit(measure(model, include_head=include_head, **chosen), output)


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
            _emit(chosen, output)
        else:
            _print(as_text(chosen, layers, form), output)
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
        print(f"only {len(found)} draws exist of the {asked} asked for; all are written", file=sys.stderr)
    print(f"wrote {sum(map(len, found))} selections to {output}", file=sys.stderr)


@app.command()
def plan(
    base: Annotated[str, typer.Option(help="Quantizer of the layers that are not protected.")],
    protect: Annotated[Path | None, typer.Option(help="Selection file: the layers kept in 16 bit.")] = None,
    adapt: Annotated[Path | None, typer.Option(help="Selection file: the layers that get an adapter.")] = None,
    rank: Annotated[int | None, typer.Option(help="Adapter rank; without it there are no adapters.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Adapter alpha (default 16).")] = None,
    scaler: Annotated[str | None, typer.Option(help="Scaler key: lora (default), rslora or 'fixed(value=…)'.")] = None,
    output: Output = None,
) -> None:
    """Write the per-layer plan: which layers stay in 16 bit, which are quantized, which get an adapter.

    Example: toolkit plan --protect top.json --base nf4 --rank 8 --alpha 16 --scaler rslora -o plan.json
    """
    from toolkit.records.plan import Plan
    from toolkit.records.selection import Selection

    of_adapters = {name: value for name, value in (("alpha", alpha), ("scaler", scaler)) if value is not None}
    if rank is None and of_adapters:
        raise InputError(f"--{' and --'.join(of_adapters)} without --rank: a plan without a rank has no adapters")
    protected = Selection.load(protect) if protect else None
    adapted = Selection.load(adapt) if adapt else None
    _emit(Plan.protecting(protected, base, adapt=adapted, rank=rank, **of_adapters), output)


Study = Annotated[Path, typer.Argument(help="A study's folder or its study.yaml.")]


@app.command()
def run(
    study: Study,
    model: Annotated[str | None, typer.Option(help="Model instead of the study's: an id or a local directory.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text instead of the study's: [NAME=]python-topics, wikitext2 or a file; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results (default: the study's own).")] = None,
    small: Annotated[bool, typer.Option("--small", help="The study's small form.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16 where the device has it).")
    ] = None,
) -> None:
    """Run a study; runs already on disk are skipped, an interrupted one goes on where it stopped.

    Example: toolkit run studies/ranking-control --small --out demo
    """
    from toolkit.runs.runner import run as start

    results = start(study, model=model, texts=text, out=out, small=small, device=device, dtype=dtype)
    print(f"results in {results}", file=sys.stderr)


@app.command()
def lock(
    study: Study,
    out: Annotated[Path | None, typer.Option(help="Folder of the results (default: the study's own).")] = None,
    small: Annotated[bool, typer.Option("--small", help="The study's small form.")] = False,
    model: Annotated[str | None, typer.Option(help="Model instead of the study's, as `run` will be given it.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Text instead of the study's, as `run` will be given it; repeatable.")
    ] = None,
) -> None:
    """Seal a study's analysis before its first run; prints the hash that every report will carry.

    Example: toolkit lock studies/ranking-control --small --out demo
    """
    from toolkit.records.lock import Lock
    from toolkit.runs.locking import lock as seal

    path = seal(study, out=out, small=small, model=model, texts=text)
    print(Lock.load(path).hash)
    print(f"locked in {path}", file=sys.stderr)


@app.command()
def table(
    study: Study,
    format: Annotated[str, typer.Option("--format", help="md, json, csv or latex.")] = "md",
    paired: Annotated[bool, typer.Option("--paired", help="Each arm's paired difference to the base, ± s.e.")] = False,
    output: Output = None,
) -> None:
    """Print a study's table from its reports alone.

    Example: toolkit table studies/ranking-control --format md
    """
    from toolkit.analysis.table import table as make

    _check(output)
    _print(make(study, format=format, paired=paired), output)


@app.command()
def figure(
    study: Study,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .pdf or .svg.")],
    kind: Annotated[
        str, typer.Option("--kind", help="strips (draws and arms) or effects (what each layer alone is worth).")
    ] = "strips",
) -> None:
    """Draw a study: its draws as strips with the judged selections marked, or single-layer effects against error.

    Example: toolkit figure studies/ranking-control --kind effects -o effects.png
    """
    from toolkit.analysis.figure import figure as draw

    _check(output)
    print(draw(study, output, kind=kind))


@app.command()
def judge(
    selections: Annotated[Path, typer.Option("--selections", help="Folder of selection files: arms and their draws.")],
    results: Annotated[Path | None, typer.Option("--results", help="CSV file of scores.")] = None,
    side: Annotated[str, typer.Option(help="less or greater: where a better score lies.")] = "less",
    control: Annotated[str | None, typer.Option(help="The law to judge by, where there are several.")] = None,
    test: Annotated[
        str | None, typer.Option(help="each budget, or all budgets joint (default: joint if it can).")
    ] = None,
    level: Annotated[float, typer.Option(help="Of the family of claims.")] = 0.05,
    correction: Annotated[str, typer.Option(help="holm, max-t or none.")] = "holm",
    margin: Annotated[float, typer.Option(help="The smallest gap that matters.")] = 0.0,
    margin_reason: Annotated[str | None, typer.Option(help="Why a smaller one does not.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Metric to judge; repeatable (default: all).")] = None,
    unit: Annotated[str, typer.Option(help="Unit of the scores, for sentences.")] = "units",
    format: Annotated[str, typer.Option("--format", help="md, json, csv or latex.")] = "md",
    figure: Annotated[Path | None, typer.Option(help="Also draw strips: .png, .pdf or .svg.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="Write an empty scores file instead, one line a selection and seed.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the template, such as 0,1,2.")] = "0",
    output: Output = None,
) -> None:
    """Judge scores computed anywhere: the same tests, table, figure and sentences as a study's.

    Columns of the CSV: selection (hash, 8 or more digits of it, or file name), model, budget, seed, metric, value;
    optional row or window.

    Example: toolkit judge --selections selections --results results.csv --side greater
    """
    from toolkit.analysis import judge as judging

    for path in (output, figure):
        _check(path)
    if template is not None:
        if results is not None or len(metric or []) > 1:
            raise InputError("--template writes a file of one --metric, and reads no --results")
        try:
            numbers = [int(seed) for seed in seeds.split(",")]
        except ValueError:
            raise InputError(f"cannot read --seeds {seeds!r}: write integers with commas, such as 0,1,2") from None
        print(f"wrote {judging.template(selections, template, metric=(metric or ['loss'])[0], seeds=numbers)}")
        return
    if results is None:
        raise InputError("--results names the CSV file of scores; --template FILE writes one to fill in")
    declared: dict[str, Any] = {"side": side, "test": test, "correction": correction}
    text = judging.judge(
        selections,
        results,
        format,
        **declared,
        control=control,
        level=level,
        margin=margin,
        margin_reason=margin_reason,
        metrics=metric or (),
        unit=unit,
        figure=figure,
    )
    _print(text, output)


@app.command()
def certify(
    study: Study,
    output: Annotated[Path, typer.Option("-o", "--output", help="Certificate to write.")],
    partial: Annotated[bool, typer.Option("--partial", help="Although runs are missing; it is exploratory.")] = False,
) -> None:
    """Write a study as one file that anyone can verify without a GPU, and print its identifier.

    Example: toolkit certify studies/ranking-control -o control.json
    """
    from toolkit.analysis.certificates import certify as make
    from toolkit.analysis.methods import identifier

    certificate = make(study, output, partial=partial)
    for reason in certificate.exploratory:
        print(f"exploratory: {reason}", file=sys.stderr)
    print(identifier(certificate))
    print(f"wrote {output}", file=sys.stderr)


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(help="Certificate file.")],
    results: Annotated[Path | None, typer.Option(help="The study's results, to compare the reports too.")] = None,
) -> None:
    """Make every draw of a certificate again and compute every number again; print how to cite it.

    Example: toolkit verify control.json
    """
    from toolkit.analysis.verification import verify as check

    print(check(certificate, results).text)


@app.command()
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Folder of certificates.")],
    format: Annotated[str, typer.Option("--format", help="md, json or csv.")] = "md",
    verify: Annotated[bool, typer.Option("--verify", help="Verify each fully, not by its seal alone.")] = False,
    output: Output = None,
) -> None:
    """Place selectors between chance (0) and oracle (1) from certificates alone.

    Example: toolkit leaderboard certificates --format md
    """
    from toolkit.analysis.leaderboard import leaderboard as make
    from toolkit.analysis.leaderboard import render
    from toolkit.records.io import atomic

    _check(output)
    text = render(make(folder, verify=verify), format)
    if output is None:
        print(text)
        return
    with atomic(output) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {output}", file=sys.stderr)


@app.command()
def compare(
    selector: Annotated[str, typer.Argument(help="Selector key, of any installed plug-in.")],
    model: Annotated[str, typer.Option(help="A Hugging Face id, a local directory, or `demo`.")] = "demo",
    budget: Annotated[
        list[str] | None, typer.Option(help="layers=0.2, parameters=0.1 or bytes=512MiB; repeatable (default: 3).")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Draws of each law.")] = 99,
    text: Annotated[
        list[str] | None, typer.Option(help="[NAME=]python-topics, wikitext2 or a file; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="At most this many tokens of each text.")] = 16384,
    window: Annotated[int, typer.Option(help="Tokens a window.")] = 512,
    batch: Annotated[int, typer.Option(help="Windows a forward pass.")] = 4,
    base: Annotated[str, typer.Option(help="Quantizer of the layers that are not protected.")] = "nf4",
    control: Annotated[
        str | None, typer.Option(help="The law whose draws give the claim's p (default: same memory, nothing else).")
    ] = None,
    headroom: Annotated[bool, typer.Option(help="Measure each layer alone, and the reference selections.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the results (default: compare-SELECTOR).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The certificate (default: control.json there).")
    ] = None,
) -> None:
    """Judge a selector against chance at the same memory, under every standard law: verdict and certificate.

    Example: toolkit compare top-error --model demo --budget layers=0.1 --draws 19 --tokens 2048 --no-headroom
    """
    from toolkit.comparison import BUDGETS
    from toolkit.comparison import compare as judge_it

    _check(output)
    made = judge_it(
        selector,
        model,
        budgets=budget or BUDGETS,
        draws=draws,
        texts=text,
        tokens=tokens,
        window=window,
        batch=batch,
        base=base,
        control=control,
        headroom=headroom,
        seed=seed,
        out=out,
        certificate=output,
        device=device,
        dtype=dtype,
    )
    print("\n".join(made.sentences))
    print(
        f"certificate {made.path}; toolkit verify {made.path} checks it, toolkit table {made.folder}", file=sys.stderr
    )


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


def main(arguments: list[str] | None = None) -> int:
    """The shell's entry point; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    given = [a for a in given if a != "--debug"]
    try:
        try:
            app(given, prog_name="toolkit")
        finally:
            sys.stdout.flush()  # so that a reader that went away is noticed here
    except ToolkitError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as end:  # typer's own: help, usage errors
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # its mark of a reader that went away, as `head` does
            return 0
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command goes on from there", file=sys.stderr)
        return 130
    except BrokenPipeError:  # noticed only in the flush above
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to write goes nowhere
        return 0
    except Exception as error:  # not foreseen: one line all the same, and the place for those who ask
        if debug:
            raise
        reason = " ".join(str(error).split())[:300]
        print(f"error: unexpected {type(error).__name__}: {reason} (--debug shows where)", file=sys.stderr)
        return 1
    return 0
