import sys
import types
from dataclasses import dataclass

import pytest

from rl_lab.cli import main
from rl_lab.core.errors import UserError


@dataclass
class Finding:
    name: str
    ok: bool
    detail: str = ""


@pytest.fixture
def findings(monkeypatch):
    """Stand in for the checks; return the list of findings they give and what they were asked."""
    given, asked = [], []

    def check_environment(id, allow=()):
        asked.append((id, allow))
        if id == "unknown":
            raise UserError("no environment is called that", key="environment.id", value=id, valid=["tiny/CartPole"])
        return given

    checks = types.ModuleType("rl_lab.envs.checks")
    checks.check_environment = check_environment
    monkeypatch.setitem(sys.modules, "rl_lab.envs.checks", checks)
    return given, asked


def test_all_is_well(findings, capsys):
    given, asked = findings
    given += [Finding("interface", True), Finding("determinism", True, "100 steps")]
    assert main(["check-env", "tiny/CartPole"]) == 0
    assert asked == [("tiny/CartPole", ())]
    assert capsys.readouterr().out.splitlines() == [
        *("✓ interface", "✓ determinism: 100 steps", "", "tiny/CartPole: all is well")
    ]


def test_a_failed_check_is_status_one(findings, capsys, monkeypatch):
    given, asked = findings
    monkeypatch.setattr(sys, "path", sys.path[:])
    given += [Finding("interface", True), Finding("replay", False, "step 7 differs")]
    assert main(["check-env", "mine:World-v0", "--allow", "mine"]) == 1
    assert asked == [("mine:World-v0", ("mine",))]
    text = capsys.readouterr().out
    assert "✗ replay: step 7 differs" in text
    assert "1 of 2 checks failed" in text


def test_an_unusable_id_is_the_users_mistake(findings, capsys):
    assert main(["check-env", "unknown"]) == 2
    assert "environment.id" in capsys.readouterr().err


def test_an_id_is_needed(capsys):
    assert main(["check-env"]) == 2
    assert "ID" in capsys.readouterr().err
