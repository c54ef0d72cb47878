"""What a stranger's configuration may build at all, counted out."""

import ast
import importlib
import inspect
import pkgutil
import re

import pytest
import torch
from torch import nn

from rl_lab.core.errors import UserError
from rl_lab.targets import OUR_PACKAGES, TORCH_NAMESPACES, resolve_target

REACHES_OUT = re.compile(r"\b(import_module|__import__|open|exec|eval|system|popen|Popen|urlopen|load_library)\s*\(")
# What parts may import of the standard library: nothing that knows files, processes, sockets or modules.
HARMLESS = {
    *("__future__", "abc", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools"),
    *("math", "operator", "types", "typing", "warnings", "weakref", "numpy", "torch", "rl_lab"),
}
# Parts that must know more, and what a configuration can make of that at the worst:
KNOWS_MORE = {
    # files without names, in the run's folder or one that the configuration states: a disk may be full for a while
    "rl_lab.data.disk": {"mmap", "os", "pathlib", "shutil", "tempfile"},
    # arrays of .npz files that the configuration states are read, without pickles; nothing is written
    "rl_lab.data.offline": {"glob", "hashlib", "open", "pathlib", "zipfile", "zlib"},
    # one thread that reads rows of the replay
    "rl_lab.data.prefetch": {"concurrent"},
    # pictures and words in memory: what a configuration can state is drawn, and never the name of a file
    "rl_lab.components.drawings": {"PIL"},
}


def admitted(module_path: str) -> dict[str, object]:
    """Return what the rule lets a configuration name in a module."""
    module, found = importlib.import_module(module_path), {}
    for name in vars(module):
        try:
            found[f"{module_path}.{name}"] = resolve_target({"_target_": f"{module_path}.{name}"}, "node")
        except UserError:
            continue
    return found


def our_modules() -> list[str]:
    found = []
    for package in OUR_PACKAGES:
        module = importlib.import_module(package)
        found.append(package)
        if hasattr(module, "__path__"):
            found += [entry.name for entry in pkgutil.walk_packages(module.__path__, f"{package}.")]
    return found


@pytest.mark.parametrize("namespace", TORCH_NAMESPACES)
def test_of_torch_only_parts_that_reach_out_nowhere(namespace):
    found = admitted(namespace)
    assert len(found) >= 10
    for path, target in found.items():
        if inspect.isclass(target):
            assert issubclass(target, (nn.Module, torch.optim.Optimizer)), path
            source = inspect.getsource(target.__init__) if "__init__" in vars(target) else ""
        else:
            assert target.__module__ == "torch.nn.functional", path
            source = re.sub(r'import_module\(\s*"torch[\w.]*"\s*\)', "", inspect.getsource(target))
        code = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
        assert not REACHES_OUT.search(code), path


def test_torch_has_what_is_kept_out():
    """Why the rule is this narrow: deeper in torch.nn are functions that import any module by its name."""
    module = importlib.import_module("torch.nn.attention._fa4")
    assert "import_module" in inspect.getsource(module._fa4_import_module)
    assert module._fa4_import_module.__module__.startswith("torch.nn.")
    with pytest.raises(UserError, match="may not be used"):
        resolve_target({"_target_": "torch.nn.attention._fa4._fa4_import_module"}, "node")


@pytest.mark.parametrize("module", our_modules())
def test_of_ours_only_public_names(module):
    for path, target in admitted(module).items():
        assert not path.rpartition(".")[2].startswith("_"), path
        assert target.__module__.startswith(OUR_PACKAGES) or issubclass(target, (nn.Module, torch.optim.Optimizer)), (
            path
        )


@pytest.mark.parametrize("module", our_modules())
def test_our_parts_know_no_files_processes_or_modules(module):
    """A part that reads a file would read any that a stranger names: decide first what it may read."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    admitted_names = HARMLESS | KNOWS_MORE.get(module, set())
    for node in ast.walk(tree):
        names = [entry.name for entry in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(name.partition(".")[0] in admitted_names for name in names), names
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            forbidden = {"open", "eval", "exec", "compile", "__import__"} - admitted_names
            assert node.func.id not in forbidden, node.lineno
