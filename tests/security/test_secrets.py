"""SEC5: what is secret stays in the environment: it is in no file of a run, in no message, on no screen."""

import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import rl_lab
from rl_lab import cli
from rl_lab.core.errors import UserError
from rl_lab.trust import check_secrets
from tests.security.artefacts import DQN, PPO, copy
from tests.security.sandbox import Job, Report, run_guarded

CANARY = "canary-9d2f4c71a0b8"
SHARP = "canary'\"\\ 5e/é:#{}"  # one that is written differently by everybody who writes it
VARIABLES = {"CANARY": CANARY, "SHARP": SHARP, "ACTIVATION": "relu"}
SHORT = "training.total_timesteps=64"

# Ten runs with secrets in the environment: what is typed, besides the experiment.
RUNS = [
    [*DQN, "+algorithm.api_key=${oc.env:CANARY}"],
    [*DQN, "+algorithm.password=${oc.env:CANARY}", "+algorithm.again=${algorithm.password}"],
    [*DQN, "+algorithm.tokens=['${oc.env:CANARY}']", "components.q_network.activation=${oc.env:ACTIVATION}"],
    [*DQN, "+algorithm.url='https://me:${oc.env:CANARY}@localhost'"],
    [*DQN, "+algorithm.login={token: '${oc.env:SHARP}', user: me}"],
    [*DQN, "+algorithm.secrets.a=${oc.env:SHARP}", "logging.tensorboard=true"],
    [*PPO, "+algorithm.api_key=${oc.env:CANARY}"],
    [*PPO, "+algorithm.access_token=${oc.env:CANARY,null}", "logging.tensorboard=true"],
    [*PPO, "+algorithm.key=${oc.env:SHARP}", "+algorithm.copies=['${algorithm.key}', '${algorithm.key}']"],
    ["hidden", "experiment.seed=3"],
]
# What makes a message: a secret in a place where it does not fit.
WRONG = [
    "training.total_timesteps=${oc.env:%s}",
    "training.resume_path=${oc.env:%s}",
    "workflow.gamma=${oc.env:%s}",
    "components.q_network.hidden=['${oc.env:%s}']",
    "components.q_network.activation=${oc.env:%s}",
    "components.q_network._target_='rl_lab.components.${oc.env:%s}'",
    "+components.q_network.url=${oc.env:%s}",
    "environment.id=${oc.env:%s}",
    "environment.kwargs={length: '${oc.env:%s}'}",
    "experiment.device=${oc.env:%s}",
    "buffer.storage=${oc.env:%s}",
    "optimizers.agent.optimizer.lr=${oc.env:%s}",
    "training.phases=[{name: a, duration_steps: 64, workflow_hooks: ['${oc.env:%s}']}]",
]
# Secrets that are written out.
LITERAL = [
    f"+algorithm.api_key={CANARY}",
    f"+algorithm.auth_token={CANARY}",
    f"++algorithm.PASSWORD={CANARY}",
    f"+algorithm.client_secret={CANARY}",
    f"+algorithm.login={{user: me, password: {CANARY}}}",
    f"+algorithm.api_keys=[a,{CANARY}]",
    f"+algorithm.secrets={{first: {CANARY}}}",
    f"+algorithm.credentials.me={CANARY}",
    f"+algorithm.token='${{oc.env:MISSING,{CANARY}}}'",
    f"+algorithm.token='${{oc.env:CANARY}}{CANARY}'",
    f"+environment.kwargs.key={CANARY}",
]


def shows(data: bytes) -> bool:
    """Whether a secret is in a file or on the screen, in any way of writing it."""
    ways = {CANARY, SHARP, repr(SHARP)[1:-1], json.dumps(SHARP)[1:-1], yaml.safe_dump(SHARP).strip()}
    return any(way.encode(code) in data for way in ways for code in ("utf-8", "utf-16-le", "latin-1"))


def files_that_show(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and shows(path.read_bytes())]


def run_all(folder: Path, words: list[list[str]]) -> list[Report]:
    jobs = [Job(partial(cli.main, entry), folder, [folder]) for entry in words]
    return run_guarded(jobs, VARIABLES)


def make_own_experiment(folder: Path) -> None:
    path = folder / "configs" / "experiment" / "hidden.yaml"
    path.parent.mkdir(parents=True)
    shipped = (Path(rl_lab.__file__).parent / "configs" / "experiment" / "dqn_cartpole.yaml").read_text()
    path.write_text(shipped.replace("algorithm:\n", "algorithm:\n  wandb_api_key: ${oc.env:CANARY}\n"))


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_runs_do_not_tell(number, lab, tmp_path):
    make_own_experiment(tmp_path)
    words = RUNS[number]
    train = ["train", *words, SHORT, "evaluation.episodes=1", "--run-dir", "run"]
    use = [["export", "run", "out", "--allow", "oc.env"], ["eval", "run", "--episodes", "1", "--allow", "oc.env"]]
    reports = run_all(tmp_path, [train, *use])
    assert [report.code for report in reports] == [0, 0, 0], [report.output for report in reports]
    assert not shows("".join(report.output for report in reports).encode())
    assert files_that_show(tmp_path) == []
    for name in ("run/config.yaml", "out/config.yaml", "out/agent/manifest.json"):
        assert "${oc.env:" in (tmp_path / name).read_text()


@pytest.mark.parametrize("number", [1, 4])
def test_printed_configurations_do_not_tell(number, lab, tmp_path):
    written, resolved = run_all(
        tmp_path, [["train", *RUNS[number], "--cfg", "job", *flags] for flags in ([], ["--resolve"])]
    )
    assert (written.code, resolved.code) == (0, 0)
    assert not shows((written.output + resolved.output).encode())
    assert "${oc.env:" in written.output
    assert "${" not in resolved.output
    assert resolved.output.count("(from the environment)") == (2 if number == 1 else 1)


def test_a_run_with_a_secret_goes_on(lab, tmp_path):
    """The same command continues it; a bare `resume` reads a file that may be a stranger's, so it asks."""
    words = ["train", *RUNS[0], "logging.folder=runs", "--quiet"]
    first, again = run_all(tmp_path, [[*words, SHORT], [*words, "training.total_timesteps=128"]])
    assert (first.code, again.code) == (0, 0), first.output + again.output
    (run,) = (tmp_path / "runs" / "dqn_cartpole").iterdir()
    assert json.loads((run / "summary.json").read_text())["agent_steps"] == 128
    refused, allowed = run_all(tmp_path, [["resume", str(run)], ["resume", str(run), "--quiet", "--allow", "oc.env"]])
    assert refused.problem(2) is None
    assert "--allow oc.env" in refused.output
    assert allowed.problem(0) is None
    assert files_that_show(tmp_path) == []


def test_messages_do_not_tell(lab, tmp_path):
    texts = [*(text % "CANARY" for text in WRONG), *(text % "SHARP" for text in WRONG[:4])]
    words = [["train", *DQN, SHORT, text, "--run-dir", "run"] for text in texts]
    for entry, report in zip(words, run_all(tmp_path, words), strict=True):
        assert report.problem(2) is None, (entry, report)
        assert not shows(report.output.encode()), report.output
    assert list(tmp_path.iterdir()) == []


def test_the_search_finds_a_secret(lab, tmp_path):
    (report,) = run_all(tmp_path, [["train", *DQN, SHORT, f"+algorithm.note={CANARY}", "--run-dir", "run", "--quiet"]])
    assert report.code == 0
    assert files_that_show(tmp_path) == [str(tmp_path / "run" / "config.yaml")]
    assert shows(f"x {SHARP} y".encode())
    assert shows(repr({"a": SHARP}).encode())


def test_literal_secrets_are_refused_before_anything_is_written(lab, tmp_path):
    flags = [[], ["--dry-run"], ["--cfg", "job"]]
    commands = [["train", *DQN, SHORT, text, *flags[i % 3]] for i, text in enumerate(LITERAL)]
    for entry, report in zip(commands, run_all(tmp_path, commands), strict=True):
        assert report.problem(2) is None, (entry, report)
        assert not shows(report.output.encode()), report.output
        assert "${oc.env:NAME}" in report.output
    assert list(tmp_path.iterdir()) == []


def test_literal_secrets_are_refused_on_resume_and_from_python(lab, tmp_path):
    run = copy(lab / "dqn", tmp_path / "copied")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def train() -> int:
        try:
            rl_lab.train("dqn_cartpole", run_dir="run", algorithm__api_key=CANARY)
        except UserError as error:
            print(error)
            return 2
        return 0

    jobs = [partial(cli.main, ["resume", str(run), f"algorithm.api_key={CANARY}"]), train]
    for report in run_guarded([Job(job, tmp_path, [tmp_path]) for job in jobs], VARIABLES):
        assert report.problem(2) is None, report
        assert not shows(report.output.encode())
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"algorithm": {"api_key": "${oc.env:X}"}},
        {"algorithm": {"api_key": ""}},
        {"algorithm": {"api_key": None}},
        {"algorithm": {"api_key": "???"}},
        {"algorithm": {"num_tokens": 32, "key_size": 0.5, "use_tokens": True}},
        {"components": {"tokenizer": {"_target_": "rl_lab.components.nets.MLP", "activation": "relu"}}},
        {"components": {"secrets": {"_target_": "rl_lab.components.nets.MLP"}}},
        {"algorithm": {"note": "nothing secret"}},
    ],
)
def test_what_is_no_secret(config):
    check_secrets(OmegaConf.create(config))


@pytest.mark.parametrize("value", [12345678, 0.5])
@pytest.mark.parametrize("key", ["password", "my_secret"])
def test_numbers_can_be_secret(key, value):
    with pytest.raises(UserError, match="secret must not be written") as caught:
        check_secrets(OmegaConf.create({"algorithm": {key: value}}))
    assert str(value) not in str(caught.value)
