"""The shape of the code: stages import only those before them, and the core names no component."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import toolkit
from toolkit.interfaces import KINDS
from toolkit.registry import registry

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "toolkit").rglob("*.py"))

STAGES = ["weights", "selection", "runs", "analysis"]
ABOVE = ["toolkit.cli", "toolkit.comparison"]
"""What puts the stages together."""

PLAIN_WORDS = {"all", "none", "density", "fixed", "residual", "wikitext2"}
"""Component names that are also words of the core: a column, an answer in a message, a text's source."""


def test_import_contracts_hold():
    cli = pytest.importorskip("importlinter.cli", reason="needs import-linter (the test extra)")
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_contracts_cover_every_stage():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    assert [name for name in reversed(layers) if name not in ABOVE] == [f"toolkit.{s}" for s in STAGES]
    folders = {p.parent.name for p in (ROOT / "toolkit").glob("*/__init__.py")}
    assert folders == {*STAGES, "interfaces", "records", "schemas", "cli"}


def test_the_contracts_can_break(tmp_path):
    """The same contracts on a copy in which one module imports a later stage."""
    pytest.importorskip("importlinter", reason="needs import-linter (the test extra)")
    import shutil

    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "plugins" / "toolkit_plugins", tmp_path / "toolkit_plugins")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / "toolkit" / "weights" / "layers.py"
    module.write_text(module.read_text() + "\nimport toolkit.analysis.statistics.inference\n")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "toolkit.weights.layers -> toolkit.analysis.statistics.inference" in done.stdout


def component_names():
    return {name for kind in KINDS for name in registry.of_kind(kind)}


def literals(source):
    """String literals of a module that are neither docstrings nor defaults of arguments and fields: (line, text)."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            skipped |= {id(n) for d in [*node.args.defaults, *node.args.kw_defaults] if d for n in ast.walk(d)}
        if isinstance(node, ast.ClassDef):
            skipped |= {id(n) for s in node.body if isinstance(s, ast.AnnAssign) and s.value for n in ast.walk(s.value)}
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def named(source, names):
    return [(line, text) for line, text in literals(source) if text.partition("(")[0].strip() in names]


def test_the_core_never_names_a_component():
    names = component_names()
    assert {"nf4", "top-error", "random-matched", "rslora", "stock"} <= names
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in CORE
        for line, text in named(path.read_text(), names - PLAIN_WORDS)
    }
    assert not found


@pytest.mark.parametrize("code", ["if name == 'nf4': pass", "x = {'top-error': 1}", "make('nf4(block=128)')"])
def test_the_scan_finds_names(code):
    assert len(named(code, {"nf4", "top-error"})) == 1


@pytest.mark.parametrize(
    "code", ["def f(base='nf4', *, q=('nf4',)): 'nf4'", "class A:\n    base: str = 'nf4'", "'nf4'", "x = 'see nf4'"]
)
def test_the_scan_passes_defaults_and_prose(code):
    assert not named(code, {"nf4"})


def started(code):
    """Modules loaded by a fresh interpreter after some code."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"torch", "transformers", "bitsandbytes", "peft", "datasets", "scipy", "matplotlib"}


def test_import_toolkit_costs_nothing():
    assert not started("import toolkit") & (HEAVY | {"numpy", "pydantic", "pluggy", "yaml"})


def test_selections_tables_and_files_start_without_torch():
    code = "\n".join(
        [
            "import toolkit.schemas, toolkit.records.report, toolkit.records.study",
            "import toolkit.selection.select, toolkit.selection.matching, toolkit.selection.similarity",
            "import toolkit.analysis.printing.table, toolkit.analysis.printing.figure",
            "import toolkit.analysis.reading.windows",
            "from toolkit.registry import registry",
            "registry.of_kind('selector'), registry.of_kind('scaler')",
        ]
    )
    assert not started(code) & HEAVY


def test_every_public_name_is_where_it_is_said_to_be():
    for name in toolkit.__all__:
        assert getattr(toolkit, name) is getattr(toolkit, name), name
    with pytest.raises(AttributeError, match="no attribute 'profil'"):
        toolkit.profil  # noqa: B018


def test_type_checkers_and_editors_see_every_public_name():
    """The names that are imported when first used stand as imports too, each from where it really comes."""
    tree = ast.parse((ROOT / "toolkit" / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    seen = {name.asname: node.module for node in block.body for name in node.names}
    assert seen == toolkit._HOME


def test_no_module_shares_a_name_with_a_public_function():
    modules = {p.stem for p in (ROOT / "toolkit").glob("*.py")} | {p.name for p in (ROOT / "toolkit").iterdir()}
    assert not modules & set(toolkit.__all__)
