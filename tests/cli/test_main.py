import argparse
import io
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rl_lab.cli
from rl_lab.cli import COMMANDS, main
from rl_lab.core.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Replace `rl-lab doctor` by a command that a test defines."""

    def install(run):
        fake = types.ModuleType("rl_lab.cli.doctor")
        fake.add_arguments = lambda parser: parser.add_argument("--allow", action="append", default=[])
        fake.run = run
        monkeypatch.setitem(sys.modules, "rl_lab.cli.doctor", fake)

    return install


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list"], ["train", "--help"], ["list", "runs"]])
def test_quick_commands_are_quick(words, tmp_path):
    program = (
        "import sys\nfrom rl_lab.cli import main\nstatus = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'hydra', 'omegaconf', 'gymnasium', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_help_names_every_command_and_every_command_has_its_file(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n  {name} " in text
        assert main([name, "--help"]) == 0
        assert f"usage: rl-lab {name}" in capsys.readouterr().out


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: rl-lab" in capsys.readouterr().err


def test_version_is_the_installed_one(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rl-lab {version('rl-lab')}\n"


def test_module_and_script_are_the_command_line():
    module = subprocess.run([sys.executable, "-m", "rl_lab", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout.startswith("rl-lab ")
    script = [sys.executable, str(ROOT / "scripts" / "train.py"), "+experiment=x", "--dryrun"]
    answer = subprocess.run(script, capture_output=True, text=True)
    assert answer.returncode == 2
    assert "rl-lab train: unknown flag '--dryrun'" in answer.stderr


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("check_env", "check-env"), ("curve", "curves")])
def test_an_unknown_command_gets_the_nearest_one(word, near, capsys):
    assert main([word]) == 2
    text = capsys.readouterr().err
    assert f"unknown command '{word}'" in text
    assert f"rl-lab {near}" in text
    assert "Traceback" not in text


def test_a_missing_argument_is_named(capsys):
    assert main(["resume"]) == 2
    assert "RUN" in capsys.readouterr().err


def test_an_argument_too_many_is_named(capsys):
    assert main(["check-env", "a", "b"]) == 2
    assert "unknown argument 'b'" in capsys.readouterr().err


def test_user_errors_and_interrupts_have_their_status_and_no_traceback(command, capsys):
    def mistaken(arguments):
        raise UserError("no such thing", key="experiment.seed", value=-1, remedy="use another")

    command(mistaken)
    assert main(["doctor"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: no such thing")
    assert "experiment.seed" in text
    assert "Traceback" not in text

    def interrupted(arguments):
        raise KeyboardInterrupt

    command(interrupted)
    assert main(["doctor"]) == 130


def test_a_fault_of_ours_is_not_hidden(command, capsys):
    def faulty(arguments):
        raise ZeroDivisionError("ours")

    command(faulty)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "in faulty" in text
    assert "fault: ZeroDivisionError: ours" in text.splitlines()[-2]


@pytest.mark.parametrize("kind", ["numpy", "torch", "GPU"])
def test_memory_that_is_used_up_is_no_defect(kind, command, capsys):
    import numpy as np
    import torch

    def greedy(arguments):
        if kind == "GPU":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        (np if kind == "numpy" else torch).empty(2**55)

    command(greedy)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: memory is used up: ")
    assert "buffer.batch_size" in text
    assert len(text.splitlines()) == 2


def test_the_status_of_the_command_is_returned(command):
    command(lambda arguments: 75)
    assert main(["doctor"]) == 75


def test_threads_are_limited_before_the_command_runs_and_a_given_number_stays(command, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    seen = {}
    command(lambda arguments: seen.update(os.environ) or 0)
    assert main(["doctor"]) == 0
    assert (seen["OMP_NUM_THREADS"], seen["MKL_NUM_THREADS"]) == ("3", "1")


def test_allowed_packages_may_lie_in_the_working_directory(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    seen = []
    command(lambda arguments: seen.append(sys.path[-1] == str(tmp_path)) or 0)
    main(["doctor"])
    main(["doctor", "--allow", "mine"])
    assert seen == [False, True]


def test_a_reader_that_leaves_is_no_fault(tmp_path):
    program = "import sys\nfrom rl_lab.cli import main\nsys.exit(main(['--help']))"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


def test_an_ascii_terminal_is_served(command):
    def mistaken(arguments):
        raise UserError("é ✓")

    command(mistaken)
    program = "from rl_lab.core.errors import UserError\nimport rl_lab.cli as c\n"
    program += "def run(words):\n    raise UserError('caf\\u00e9')\nc._run = run\nraise SystemExit(c.main([]))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "error: caf?\n")


def test_main_may_be_called_again_after_the_command_named_list():
    for _ in range(2):  # rl_lab.cli.list hides the built-in of that name inside rl_lab.cli
        assert main(iter(["list", "buffers"])) == 0
    assert isinstance(rl_lab.cli.list, types.ModuleType)


def test_parser_takes_flags_between_words():
    parser = rl_lab.cli.Parser(prog="x", allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--flag")
    assert parser.parse(["a=1", "--flag", "3", "b=-2"]) == argparse.Namespace(words=["a=1", "b=-2"], flag="3")
    with pytest.raises(UserError, match="--flag"):
        parser.parse(["a=1", "--flg=3"])
    with pytest.raises(UserError, match="--fla"):
        parser.parse(["--fla", "3"])


def test_standard_output_may_be_anything(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["--version"]) == 0
    assert sys.stdout.getvalue().startswith("rl-lab")
