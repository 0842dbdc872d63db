"""Verbs that judge: table, figure, verdicts on any scores, certificates, and all of it for one selector."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.cli.output import Output, Study, app, check, show
from toolkit.errors import InputError


@app.command()
def table(
    study: Study,
    format: Annotated[str, typer.Option("--format", help="md, json, csv or latex.")] = "md",
    paired: Annotated[bool, typer.Option("--paired", help="Each arm's paired difference to the base, ± s.e.")] = False,
    output: Output = None,
) -> None:
    """Print a study's table from its reports alone, whether of selections or of fine-tuning and timing.

    Example: toolkit table studies/ranking-control --format md
    """
    from toolkit.analysis.printing.table import table as make

    check(output)
    show(make(study, format=format, paired=paired), output)


@app.command()
def figure(
    study: Study,
    output: Annotated[Path, typer.Option("-o", "--output", help="Picture to write: .png, .pdf or .svg.")],
    kind: Annotated[
        str, typer.Option("--kind", help="strips; effects (of selections); frontier or tuning (of fine-tuning).")
    ] = "strips",
) -> None:
    """Draw a study.

    Of selections: their draws as strips, or single-layer effects against error. Of fine-tuning: every run as strips,
    accuracy against throughput with peak memory, or the trials of the tuned lever.

    Example: toolkit figure studies/ranking-control --kind effects -o effects.png
    """
    from toolkit.analysis.printing.figure import figure as draw

    check(output)
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
    seeds: Annotated[str | None, typer.Option(help="Seeds of the template, such as 0,1,2 (default: 0).")] = None,
    output: Output = None,
) -> None:
    """Judge scores computed anywhere: the same tests, table, figure and sentences as a study's.

    Columns of the CSV: selection (hash, 8 or more digits of it, or file name), model, budget, seed, metric, value;
    optional row or window.

    Example: toolkit judge --selections selections --results results.csv --side greater
    """
    from toolkit.analysis import judge as judging

    for path in (output, figure):
        check(path)
    if template is not None:
        if results is not None or len(metric or []) > 1:
            raise InputError("--template writes a file of one --metric, and reads no --results")
        try:
            numbers = [int(seed) for seed in (seeds or "0").split(",")]
        except ValueError:
            raise InputError(f"cannot read --seeds {seeds!r}: write integers with commas, such as 0,1,2") from None
        print(f"wrote {judging.template(selections, template, metric=(metric or ['loss'])[0], seeds=numbers)}")
        return
    if seeds is not None:
        raise InputError("--seeds is for --template FILE: a file of scores has its seeds in a column")
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
    show(text, output)


@app.command()
def certify(
    study: Study,
    output: Annotated[Path, typer.Option("-o", "--output", help="Certificate to write.")],
    partial: Annotated[bool, typer.Option("--partial", help="Although runs are missing; it is exploratory.")] = False,
) -> None:
    """Write a study as one file that anyone can verify without a GPU, and print its identifier.

    Example: toolkit certify studies/ranking-control -o control.json
    """
    from toolkit.analysis.certificates.certifying import certify as make
    from toolkit.analysis.certificates.methods import identifier

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
    from toolkit.analysis.certificates.verification import verify as check

    print(check(certificate, results).text)


@app.command()
def leaderboard(
    folder: Annotated[Path, typer.Argument(help="Folder of certificates (*.json in it, not deeper).")],
    format: Annotated[str, typer.Option("--format", help="md, json or csv.")] = "md",
    verify: Annotated[bool, typer.Option("--verify", help="Verify each fully, not by its seal alone.")] = False,
    output: Output = None,
) -> None:
    """Place selectors between chance (0) and oracle (1) from certificates alone.

    Example: toolkit leaderboard certificates --format md
    """
    from toolkit.analysis.certificates.leaderboard import leaderboard as make
    from toolkit.analysis.certificates.leaderboard import render

    check(output)
    show(render(make(folder, verify=verify), format), output)


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

    check(output)
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
    print("\n".join([*made.sentences, *made.laws]))
    print(
        f"certificate {made.path}; toolkit verify {made.path} checks it, toolkit table {made.folder}", file=sys.stderr
    )
