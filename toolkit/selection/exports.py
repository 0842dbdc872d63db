"""A selection as other programs read it, and many selections as a folder of files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from toolkit.errors import InputError, closest
from toolkit.records.io import atomic, check_output
from toolkit.records.profile import Profile
from toolkit.records.selection import Selection

Form = Literal["target-modules", "skip-modules", "names"]


def as_text(selection: Selection, profile: Profile, form: str) -> str:
    """A selection as text: a JSON value, or one name a line.

    target-modules: for PEFT's `target_modules`: a list of names. PEFT takes an entry for every module whose path ends
    in it; where a chosen name so ends the path of another layer, one regular expression that matches whole paths is
    written in place of the list, which PEFT takes too.

    skip-modules: for `llm_int8_skip_modules` of bitsandbytes in transformers: a list of names. The output head is among
    them (unless it has a row of its own in the profile), as a list that is given replaces the default, which leaves
    the head out. transformers takes an entry for a regular expression of the beginning of a path, and for its end; a
    name that would so match another layer is written as an expression of the whole path.

    names: one name a line, in model order.

    Raises:
        InputError: another form; a selection of other weights; or an expert of a stack, which is no module.
    """
    if form not in get_args(Form):
        raise InputError(f"no export is called {form!r}; {closest(form, get_args(Form))}")
    profile.expect(selection.model, selection.fingerprint, "the selection to export")
    if form == "names":
        return "\n".join(selection.layers)
    for name in selection.layers:
        if name.endswith("]"):
            raise InputError(
                f"layer {name!r} is one expert of a stack, held with the others in one parameter: {form} name modules, "
                "and it is none; names lists it"
            )
    known = list(dict.fromkeys([*profile.names, *([profile.head] if profile.head else [])]))
    if form == "target-modules":
        if any(_ends(other, name) for name in selection.layers for other in known if other != name):
            return json.dumps("|".join(map(re.escape, selection.layers)))
        return json.dumps(selection.layers, indent=1)
    skipped = list(selection.layers)
    if profile.head is not None and profile.head not in profile.names:
        skipped.append(profile.head)
    return json.dumps([_skip_entry(name, known) for name in skipped], indent=1)


def _ends(path: str, name: str) -> bool:
    """Whether PEFT takes a path for an entry that is not equal to it."""
    return path.endswith(f".{name}")


def _skip_entry(name: str, known: list[str]) -> str:
    """The name itself where transformers takes it for no other path, else an expression of the whole path."""
    pattern = re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))")  # as transformers.quantizers matches a path
    if any(path != name and (pattern.match(path) or path.endswith(name)) for path in known):
        return re.escape(name) + "$"
    return name


def write_folder(
    folder: Path, draws: Sequence[Sequence[Selection]], profile: Profile, form: str | None = None
) -> list[Path]:
    """Write draws as files, each atomically: `draw-00000.json` …, or `draw-00000-1.json` … for families of several.

    The last number is that of the matched selection, in the order given, from 1. With `form` each file holds that
    export. A file that is there with the same content stays.

    Raises:
        InputError: `folder` is a file, or holds a file of one of these names with other content: then nothing is
            written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; several selections need a folder")
    ending = "txt" if form == "names" else "json"
    texts: dict[Path, str] = {}
    for number, draw in enumerate(draws):
        for at, selection in enumerate(draw, 1):
            path = folder / f"draw-{number:05}{f'-{at}' if len(draw) > 1 else ''}.{ending}"
            whole = json.dumps(selection.to_json(), indent=1, ensure_ascii=False) if form is None else None
            texts[path] = (whole or as_text(selection, profile, form or "")) + "\n"
    for path, text in texts.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != text.encode("utf-8")):
            raise InputError(
                f"{path} exists with other content: name another folder, or remove the files of the earlier draws"
            )
    for path, text in texts.items():
        if not path.exists():
            check_output(path)
            with atomic(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return list(texts)
