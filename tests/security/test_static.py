"""SEC3: nothing in the package can turn data into code. There is no list of exceptions."""

import ast
from pathlib import Path

import pytest

import rl_lab

SOURCE = Path(rl_lab.__file__).parent
FILES = {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

MODULES = {
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle", "copyreg"),
    *("runpy", "code", "codeop", "torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
}
NAMES = {
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.breakpoint"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv", "os.posix_spawn", "pty.spawn"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.export.load", "torch.serialization.load"),
    *("numpy.load", "numpy.save", "numpy.savez", "numpy.fromfile", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("yaml.FullLoader", "hydra.utils.instantiate", "hydra.utils.call", "hydra.utils.get_object", "pydoc.locate"),
}
BUILTINS = {name.removeprefix("builtins.") for name in NAMES if name.startswith("builtins.")}
KEYWORDS = {"allow_pickle": True, "shell": True, "weights_only": False}


def aliases(tree: ast.AST) -> dict[str, str]:
    """Return what the names of a file stand for: {"np": "numpy", "load": "torch.load"}."""
    found = {name: f"builtins.{name}" for name in (*BUILTINS, "getattr")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for entry in node.names:
                found[entry.asname or entry.name.partition(".")[0]] = (
                    entry.name if entry.asname else entry.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {entry.asname or entry.name: f"{node.module}.{entry.name}" for entry in node.names}
    return found


def full_name(node: ast.AST, known: dict[str, str]) -> str:
    """Write a chain of attributes with its first name as it was imported; anything else is '?'."""
    if isinstance(node, ast.Attribute):
        return f"{full_name(node.value, known)}.{node.attr}"
    if isinstance(node, ast.Call) and full_name(node.func, known) == "builtins.getattr" and len(node.args) >= 2:
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
        return f"{full_name(node.args[0], known)}.{name}"
    return known.get(node.id, "?") if isinstance(node, ast.Name) else "?"


def is_forbidden_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def code_from_data(tree: ast.AST) -> list[str]:
    """Return what in a file could turn data into code, used or only mentioned."""
    known, found = aliases(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [entry.name for entry in node.names if is_forbidden_module(entry.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{entry.name}" for entry in node.names)]
            found += [name for name in names if is_forbidden_module(name) or name in NAMES]
        elif isinstance(node, (ast.Attribute, ast.Call)) or (isinstance(node, ast.Name) and type(node.ctx) is ast.Load):
            name = full_name(node, known)
            if name in NAMES or is_forbidden_module(name):
                found.append(name)
        if isinstance(node, ast.Call):
            arguments = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if full_name(node.func, known).endswith("import_module"):
                found += [name for name in arguments if is_forbidden_module(str(name))]
            for keyword in node.keywords:
                wanted = KEYWORDS.get(keyword.arg or "")
                safe = isinstance(keyword.value, ast.Constant) and keyword.value.value != wanted
                if wanted is not None and not safe:
                    found.append(f"{keyword.arg}=")
    return found


@pytest.mark.parametrize("name", FILES)
def test_data_never_becomes_code(name):
    assert code_from_data(FILES[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "import torch.hub",
        "from torch import hub",
        "from cloudpickle import dumps",
        "from joblib.memory import Memory",
        "import shelve, json",
        "import dill",
        "import marshal",
        "eval('1')",
        "exec(text)",
        "run = eval",
        "from builtins import exec as run",
        "import builtins\nbuiltins.eval('1')",
        "__import__('os')",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load",
        "import torch\nread = torch.load",
        "import torch\ngetattr(torch, 'load')(path)",
        "import torch\ntorch.hub.load('x')",
        "import numpy as np\nnp.load(path)",
        "read(path, allow_pickle=flag)",
        "read(path, allow_pickle=True)",
        "read(path, weights_only=False)",
        "run(words, shell=True)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "import os\nos.system('x')",
        "import importlib\nimportlib.import_module('pickle')",
        "import hydra.utils\nhydra.utils.instantiate(node)",
    ],
)
def test_the_search_finds_it(text):
    assert code_from_data(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)",
        "model.eval()",
        "class Settings:\n    compile: bool = True",
        "yaml.safe_load(text)",
        "run(words, shell=False)",
        "from safetensors.torch import load as load_safetensors\nload_safetensors(data)",
    ],
)
def test_the_search_lets_pass(text):
    assert code_from_data(ast.parse(text)) == []


def test_there_are_files_to_search():
    assert {"trust.py", "policies.py", "orchestration/checkpoint.py"} <= FILES.keys()
