"""The default install stays light. Counted: what rl-lab needs without going through torch, torch itself left out."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRA_MODULES = {"pytest", "hypothesis", "ruff", "mypy", "importlinter", "_pytest", "xdist"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def default_requirements(name: str) -> list[str]:
    """Return what a distribution asks for on this machine when no extra is given."""
    parsed = [Requirement(text) for text in metadata.requires(name) or []]
    return [normalized(r.name) for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def needed_besides_torch() -> set[str]:
    found, waiting = set(), default_requirements("rl-lab")
    while waiting:
        name = waiting.pop()
        if name != "torch" and name not in found:
            found.add(name)
            waiting += default_requirements(name)
    return found


def installed_bytes(name: str) -> int:
    files = metadata.files(name)
    assert files, f"{name} does not list its files"
    paths = {Path(file.locate()) for file in files}  # pip's compiled copies included
    return sum(path.stat().st_size for path in paths if path.is_file())


def modules_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_walk_finds_what_is_needed():
    found = needed_besides_torch()
    assert {"numpy", "hydra-core", "omegaconf", "rich"} <= found
    assert not {"torch", "sympy", "networkx", "pytest"} & found


def test_at_most_25_packages():
    found = needed_besides_torch()
    assert len(found) <= 25, sorted(found)


def test_at_most_150_megabytes():
    sizes = {name: installed_bytes(name) for name in needed_besides_torch()}
    assert sizes["numpy"] > 10**6  # files are really found
    assert sum(sizes.values()) <= 150 * 10**6, sizes


def test_the_package_and_its_command_line_import_neither_torch_nor_hydra():
    for statement in ("import rl_lab", "import rl_lab.cli"):
        assert not {"torch", "hydra", "omegaconf", "gymnasium"} & modules_after(statement), statement


def test_nothing_of_an_extra_is_imported_by_default():
    statement = (
        "import pkgutil, importlib, rl_lab\n"
        "for entry in pkgutil.walk_packages(rl_lab.__path__, 'rl_lab.'):\n"
        "    if not entry.name.endswith('__main__'):\n"
        "        importlib.import_module(entry.name)"
    )
    loaded = modules_after(statement)
    assert {"torch", "hydra", "safetensors"} <= loaded  # everything was really imported
    assert not EXTRA_MODULES & loaded


def imported_by(nodes) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {entry.name.partition(".")[0] for entry in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"rl_lab"}


def test_every_import_of_the_package_is_a_declared_dependency():
    """What a module imports at once belongs to the default install; what a function imports may be of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    default = {normalized(Requirement(text).name) for text in project["dependencies"]}
    default |= {"omegaconf", "pyyaml"}  # Hydra's own interface is made of them
    default |= {"triton"}  # comes with torch where there is a GPU; asked for in a try statement
    extras = {
        normalized(Requirement(text).name)
        for name, texts in project["optional-dependencies"].items()
        for text in texts
        if name != "dev"
    }
    provides = metadata.packages_distributions()
    at_once, later = set(), set()
    for path in (ROOT / "src" / "rl_lab").rglob("*.py"):
        tree = ast.parse(path.read_text())
        at_once |= imported_by(tree.body)
        later |= imported_by(ast.walk(tree))
    assert {"torch", "numpy"} <= at_once
    for names, declared in ((at_once, default), (later, default | extras)):
        owners = {name: {normalized(owner) for owner in provides.get(name, [name])} for name in names}
        assert not [name for name, found in owners.items() if not found & declared]
