"""SEC6: nothing that the lab does opens a connection to another machine; those to this one are blocked, too."""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import rl_lab
from rl_lab import cli
from rl_lab.cli import demo, doctor
from tests.security.artefacts import DQN, PPO
from tests.security.sandbox import Job, Report, run_guarded

# Runs in every process of a test, also in those that the lab starts: Python imports a module of this name by itself.
SITE = """
import os, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.sendmsg"):
        if event in ("socket.connect", "socket.sendto") and not isinstance(arguments[1], tuple):
            return  # a file
        with open(os.environ["ATTEMPTS"], "a") as file:
            file.write(f"{event} {arguments[1:]}\\n")
        raise PermissionError(f"no network in this test: {event}")

sys.addaudithook(refuse)
"""


def run_offline(folder: Path, *calls) -> tuple[list[Report], list[str]]:
    """Run calls without a network; return their reports and the attempts to reach one."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    attempts = folder / "attempts.txt"
    environment = {"PYTHONPATH": str(folder / "site"), "ATTEMPTS": str(attempts)}

    def offline(call) -> int:
        if "refuse" not in globals():
            exec(SITE, globals())
        return call()

    reports = run_guarded([Job(partial(offline, call), folder, [folder]) for call in calls], environment)
    return reports, attempts.read_text().splitlines() if attempts.exists() else []


def command(*words: str):
    return partial(cli.main, list(words))


def play(path: str) -> int:
    policy = rl_lab.load_policy(path)
    return 0 if policy.act([[0.0] * 4]).shape == (1,) else 1


def short_demo() -> int:
    demo.TARGET = 10.0  # so that the first evaluation ends it
    return cli.main(["demo", "--gif", "demo.gif"])


def test_the_lab_needs_no_network(lab, tmp_path):
    few = "training.total_timesteps=64"
    reports, attempts = run_offline(
        tmp_path,
        command("train", *DQN, few, "logging.tensorboard=true", "--run-dir", "dqn"),
        command("train", *PPO, few, "environment.id=CartPole-v1", "--run-dir", "ppo", "--quiet"),
        command("resume", "dqn", "training.total_timesteps=128", "--quiet"),
        command("eval", "dqn", "--episodes", "1"),
        command("export", "ppo", "out"),
        partial(play, "out"),
        command("list"),
        command("list", "environments"),
        command("list", "runs", "--root", "."),
        command("curves", "dqn", "ppo"),
        command("check-env", "tiny/CartPole"),
        short_demo,
    )
    assert [report.code for report in reports] == [0] * len(reports), [report.output for report in reports]
    assert attempts == []


def short_doctor() -> int:
    doctor.FAMILIES, doctor._RENDERERS = doctor.FAMILIES[:2], ()  # the others are not ours, and slow
    return cli.main(["doctor"])


def test_the_doctor_needs_no_network(tmp_path):
    (report,), attempts = run_offline(tmp_path, short_doctor)
    assert report.code == 0, report.output
    assert attempts == []


@pytest.mark.parametrize("elsewhere", [True, False])
def test_attempts_are_noticed_and_blocked(elsewhere, tmp_path):
    """Also in processes that a command starts, and when they are caught."""
    address = ("192.0.2.1", 80) if elsewhere else ("127.0.0.1", 9)
    program = (
        f"import socket\ntry: socket.create_connection({address}, timeout=5)\nexcept PermissionError: print('blocked')"
    )

    def connect() -> int:
        try:
            socket.create_connection(address, timeout=5)
        except PermissionError:
            print("blocked")
        return subprocess.run([sys.executable, "-c", program], stdout=1, env=os.environ).returncode

    (report,), attempts = run_offline(tmp_path, connect)
    assert report.output.split() == ["blocked", "blocked"]
    assert len(attempts) == 2
