"""What verbs share: the app, options that recur, and output to a file or to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Controlled ablations for quantized LoRA: selections of layers, their random controls, and verdicts.",
)

Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write; stdout where left out.")]
Out = Annotated[  # text: as a path, an empty one would be the current folder
    str | None, typer.Option(metavar="PATH", help="Folder for the results (default: the study's own).")
]
Study = Annotated[Path, typer.Argument(help="A study's folder or its study.yaml.")]


def emit(record: Any, output: Path | None) -> None:
    """A record to its file, or to stdout."""
    if output is None:
        print(json.dumps(record.to_json(), indent=1, ensure_ascii=False))
    else:
        record.save(output)
        print(f"wrote {output}", file=sys.stderr)


def check(output: Path | None) -> None:
    """Refuse an output that cannot be written before long work is done for it."""
    if output is not None:
        from toolkit.records.io import check_output

        check_output(output)


def show(text: str, output: Path | None) -> None:
    """A text to its file, or to stdout."""
    from toolkit.records.io import atomic

    if output is None:
        print(text)
        return
    with atomic(output) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {output}", file=sys.stderr)
