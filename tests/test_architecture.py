"""The rules of the house: import contracts, no hidden chance, short files. No code from data: see tests/security."""

import ast
import re
from pathlib import Path

import pytest
from importlinter import cli as _cli  # noqa: F401  # importing it configures the linter
from importlinter.application.use_cases import lint_imports

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rl_lab"
FILES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

SEEDED = {"Generator", "SeedSequence", "PCG64", "BitGenerator", "default_rng", "RandomState"}  # where a seed is given
DRAWS_OF_TORCH = {
    *("rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli", "rand_like", "randn_like"),
    *("randint_like", "poisson", "normal_", "uniform_", "exponential_", "bernoulli_", "random_", "geometric_"),
    *("cauchy_", "log_normal_"),
}


def dotted(node: ast.AST) -> str:
    """Write a chain of attributes as it stands in the source; anything else is '?'."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def calls(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def imported_modules(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (entry.name for entry in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def values(call: ast.Call) -> list[ast.expr]:
    return [keyword.value for keyword in call.keywords if keyword.arg == "generator"]


def hidden_chance(tree: ast.AST) -> list[str]:
    """Return draws that come from nobody's named generator."""
    imports_random = "random" in imported_modules(tree)
    found = []
    for node, name in calls(tree):
        owner, _, method = name.rpartition(".")
        of_python = imports_random and owner == "random"
        of_numpy = owner in ("np.random", "numpy.random") and not (method in SEEDED and (node.args or node.keywords))
        named = any(dotted(argument).endswith("generator") for argument in [*node.args, *values(node)])
        of_torch = method in DRAWS_OF_TORCH and owner and not owner.endswith("generator")  # generator.normal(...)
        if of_python or of_numpy or (of_torch and not named):
            found.append(name)
    return found


def test_import_contracts_hold(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_logo=True, cache_dir=None), capsys.readouterr().out
    assert "kept, 0 broken" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in FILES if name != "core/seeding.py"])
def test_chance_comes_from_named_generators(name):
    assert hidden_chance(FILES[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "np.random.rand(3)",
        "import random\nrandom.random()",
        "torch.rand(3)",
        "x.normal_()",
        "torch.randperm(4, device=d)",
        "numpy.random.shuffle(x)",
        "torch.rand(3, generator=None)",
        "np.random.default_rng()",
    ],
)
def test_the_search_for_hidden_chance_finds_it(text):
    assert hidden_chance(ast.parse(text))


def test_the_search_for_hidden_chance_lets_named_generators_pass():
    text = """
torch.rand(3, generator=self.generator)
noise.normal(shape, generator)
self.generator.normal(0, 1)
np.random.default_rng(0)
np.random.Generator(bits)
np.random.RandomState(seed)
"""
    assert hidden_chance(ast.parse(text)) == []


def test_the_search_for_hidden_chance_has_something_to_look_at():
    draws = [name for tree in FILES.values() for _, name in calls(tree) if name.rpartition(".")[2] in DRAWS_OF_TORCH]
    assert "torch.rand" in draws  # DQN explores


@pytest.mark.parametrize("name", FILES)
def test_every_module_says_what_it_is(name):
    first = (ast.get_docstring(FILES[name]) or "").partition("\n")[0]
    assert len(first) > 10, "the first line of a module says what it is"


def test_files_are_named_by_what_they_define():
    assert not [name for name in FILES if re.search(r"(utils|helpers|misc|common)(\.py|/)", name)]


@pytest.mark.parametrize("path", sorted((SOURCE / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_an_algorithm_is_one_short_file(path):
    assert len(path.read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", sorted((SOURCE / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_an_algorithm_uses_components_core_and_the_pipeline_only(path):
    ours = {name for name in imported_modules(ast.parse(path.read_text())) if name.startswith("rl_lab")}
    allowed = ("rl_lab.core", "rl_lab.components", "rl_lab.data.pipeline")
    assert not [name for name in ours if not name.startswith(allowed)]


def test_the_loop_names_no_algorithm():
    for name, tree in FILES.items():
        if name.startswith("orchestration/"):
            assert not [module for module in imported_modules(tree) if "workflows" in module], name
