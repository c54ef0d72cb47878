"""The documents: their code runs, their commands parse, their messages are the real ones, their links lead somewhere."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from rl_lab.cli import COMMANDS, Parser, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
GUIDE = ROOT / "docs" / "new_algorithm.md"
FENCE = re.compile(r"^```(\w*)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """Return (title, text) of the fenced blocks of one language."""
    return [(title, text) for found, title, text in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for _, text in blocks(page, "bash") for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(command: str) -> int:
    program, *words = shlex.split(command)
    assert program == "rl-lab"
    return main(words)


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """A folder with the files of the guide, as a user would have it."""
    for language in ("python", "yaml"):
        for title, text in blocks(GUIDE, language):
            if title:
                path = tmp_path / title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_the_guide_has_all_its_files(guide):
    found = {str(path.relative_to(guide)) for path in guide.rglob("*") if path.is_file()}
    assert {"reinforce.py", "my_parts.py", "configs/workflow/reinforce.yaml"} <= found
    assert {"configs/experiment/reinforce_cartpole.yaml", "configs/components/q_network/normed.yaml"} <= found
    assert len((guide / "reinforce.py").read_text().splitlines()) <= 60


def test_the_commands_of_the_guide_run_and_its_algorithm_learns(guide, capsys):
    for command in commands(GUIDE):
        before = set(guide.glob("experiments/*/*"))
        assert run(command) == 0, (command, capsys.readouterr())
        for folder in set(guide.glob("experiments/*/*")) - before:
            summary = json.loads((folder / "summary.json").read_text())
            target = 0.9 if "probe/" in command else 150.0
            assert summary["finished"]
            assert summary["best_evaluation"]["return_mean"] >= target, command
    assert len(list(guide.glob("experiments/*/*"))) == 2


@pytest.mark.parametrize("block", [text for _, text in blocks(GUIDE, "console")], ids=lambda text: text.split("\n")[0])
def test_the_messages_of_the_guide_are_the_real_ones(block, guide, capsys):
    command, _, expected = block.partition("\n")
    assert run(command.removeprefix("$ ")) == 2
    said = capsys.readouterr()
    assert said.err.strip() == expected.strip()
    assert not list(guide.glob("experiments/*/*/metrics.jsonl"))


def parse(words: list[str]) -> None:
    """Give a command line to the parser of its command."""
    name, *rest = words
    if name in ("--help", "--version"):
        return
    assert name in COMMANDS, f"rl-lab has no command '{name}'"
    command = importlib.import_module(f"rl_lab.cli.{name.replace('-', '_')}")
    parser = Parser(prog=name, allow_abbrev=False)
    command.add_arguments(parser)
    if rest != ["--help"]:
        parser.parse(rest)


def as_rl_lab(command: str) -> list[str] | None:
    """Return the words after `rl-lab`, whichever way it is called; None for other programs."""
    words = shlex.split(command.split(" > ")[0])
    for prefix in (["rl-lab"], ["python", "-m", "rl_lab"]):
        if words[: len(prefix)] == prefix:
            return words[len(prefix) :]
    if words[0] == "python" and words[1].endswith("scripts/train.py"):
        return ["train", *words[2:]]
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page != GUIDE], ids=named)
def test_commands_in_blocks_work(page, monkeypatch, capsys):
    folder = ROOT
    for command in commands(page):
        if command.startswith("cd "):
            folder = (folder / command.removeprefix("cd ")).resolve()
            assert folder.is_dir(), command
            continue
        words = as_rl_lab(command)
        if words is None:
            check_other(command, folder)
            continue
        parse(words)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        if words[0] == "train" and not any("RUN" in word for word in words):
            shown = words if "--cfg" in words or "--dry-run" in words else [*words, "--dry-run"]
            assert main(shown) == 0, (command, capsys.readouterr())
        elif words[0] in ("list", "--help", "--version", "check-env"):
            assert main(words) == 0, (command, capsys.readouterr())


def check_other(command: str, folder: Path) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert words, command
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets), command
    elif program == "python":
        script = folder / words[0]
        assert script.is_file(), command
        for flag in (word for word in words[1:] if word.startswith("--")):
            assert f'"{flag}"' in script.read_text(), command
    else:
        assert program in ("pytest", "tensorboard", "pip", "python3", "git"), f"no check for: {command}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_in_sentences_parse(page):
    text = FENCE.sub("", page.read_text())
    for command in re.findall(r"`(rl-lab [^`]+)`", text):
        if not command.startswith("rl-lab COMMAND"):
            parse(shlex.split(command.replace("\\|", "|").split(" > ")[0])[1:])


@pytest.mark.parametrize("text", [text for _, text in blocks(ROOT / "README.md", "python")])
def test_the_code_of_the_readme_runs(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "README.md", "exec"), {})
    assert capsys.readouterr().out


def slug(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", re.sub(r"`", "", heading).strip().lower())
    return words.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{named(page)} links to {target}"
        if anchor:
            headings = [slug(line.lstrip("#")) for line in linked.read_text().splitlines() if line.startswith("#")]
            assert anchor in headings, f"{named(page)} links to {target}"


def files_named(page: Path) -> list[str]:
    return re.findall(r"`((?:src|docs|examples|scripts|tests|benchmarks)/[\w./]+)`", FENCE.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_pages_name_exist(page):
    left_of_maps = {"src/rl_lab/"}
    for path in files_named(page):
        assert path in left_of_maps or (ROOT / path).exists(), f"{named(page)} names {path}"


@pytest.mark.parametrize("path", [*PAGES, *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")])
def test_no_place_of_a_machine_and_no_open_end(path):
    text = path.read_text()
    assert not re.search(r"(?<![\w.])/(?:work|tmp|home|root|Users|mnt)/", text)
    assert not re.search(r"\b(?:TODO|FIXME|TBD|XXX)\b", text)
