import csv
import io
import json
import math

import pytest

from rl_lab.cli import main
from rl_lab.cli.curves import Curve, mean_curve


def make_run(folder, name, seed, means, *, summary=True, every=1000):
    folder.mkdir(parents=True)
    lines = []
    for i, mean in enumerate(means):
        tags = {"phase": "main", "agent_steps": i * every // 2, "updates": i, "episodes": i}
        for key, value in (
            ("train/loss", 0.5 / (i + 1)),
            ("eval/return_mean", mean),
            ("eval/return_std", i + 0.25),
            ("eval/returns", [mean, mean]),
        ):
            lines.append(json.dumps({"ts": 1.0, "step": i * every, "key": key, "value": value, "tags": tags}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps({"name": name, "seed": seed}))
    else:
        (folder / "config.yaml").write_text(f"experiment:\n  name: {name}\n  seed: {seed}\n")
    return folder


def table(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_of_several_runs_sorted_by_experiment_and_seed(tmp_path, capsys):
    make_run(tmp_path / "e/ppo/b", "ppo", 1, [20.0, 475.5])
    make_run(tmp_path / "e/ppo/a", "ppo", 10, [30.0], summary=False)
    make_run(tmp_path / "e/dqn/c", "dqn", 0, [None])
    assert main(["curves", str(tmp_path / "e"), str(tmp_path / "e/ppo/b")]) == 0  # one run given twice counts once
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "experiment,seed,env_steps,agent_steps,return_mean,return_std"
    rows = [tuple(row.values()) for row in table(text)]
    assert rows == [
        ("dqn", "0", "0", "0", "nan", "0.25"),
        ("ppo", "1", "0", "0", "20.0", "0.25"),
        ("ppo", "1", "1000", "500", "475.5", "1.25"),
        ("ppo", "10", "0", "0", "30.0", "0.25"),
    ]


def test_another_key(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0, 40.0])
    assert main(["curves", str(tmp_path / "a"), "--key", "train/loss"]) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows[0]) == ["experiment", "seed", "env_steps", "agent_steps", "train/loss"]
    assert [row["train/loss"] for row in rows] == ["0.5", "0.25"]


def test_offline_evaluations_at_one_step_stay_apart(tmp_path, capsys):
    make_run(tmp_path / "a", "bc", 0, [1.0, 2.0, 3.0], every=0)
    assert main(["curves", str(tmp_path / "a")]) == 0
    rows = table(capsys.readouterr().out)
    assert [(row["env_steps"], row["return_mean"], row["return_std"]) for row in rows] == [
        ("0", "1.0", "0.25"),
        ("0", "2.0", "1.25"),
        ("0", "3.0", "2.25"),
    ]


def test_a_torn_last_line_is_left_out_and_a_bad_line_is_named(tmp_path, capsys):
    folder = make_run(tmp_path / "a", "ppo", 1, [20.0])
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"ts": 1.0, "step": 5, "key": "eval/return_mean", "va')
    assert main(["curves", str(folder)]) == 0
    assert len(table(capsys.readouterr().out)) == 1
    (folder / "metrics.jsonl").write_text(whole + '"eval/return_mean" is no record\n' + whole)
    assert main(["curves", str(folder)]) == 2
    assert "line 5" in capsys.readouterr().err


def test_mistakes_are_explained(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0])
    for words, text in (
        ([str(tmp_path / "nowhere")], "no run in"),
        ([str(tmp_path), "--key", "eval/return_meen"], "eval/return_mean"),
        ([str(tmp_path), "--key", "eval/returns"], "lists"),
        ([], "RUN"),
    ):
        assert main(["curves", *words]) == 2
        assert text in capsys.readouterr().err


def test_a_run_without_records_is_reported_beside_the_others(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0])
    make_run(tmp_path / "b", "ppo", 2, [])
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    assert main(["curves", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert len(table(captured.out)) == 1
    assert len(captured.err.splitlines()) == 2


def test_mean_over_seeds_is_taken_where_all_seeds_are():
    first = Curve("x", 0, [(0, 0, 0.0, None), (10, 10, 10.0, None), (20, 20, 20.0, None)])
    second = Curve("x", 1, [(5, 5, 1.0, None), (15, 15, 3.0, None), (40, 40, 9.0, None)])
    merged = mean_curve([first, second])
    assert [entry[0] for entry in merged] == [5, 10, 15, 20]
    assert merged[0] == (5, 3.0, 1.0, 5.0)
    assert merged[1] == (10, 6.0, 2.0, 10.0)
    assert math.isclose(merged[3][1], (20 + 3 + 6 / 5) / 2)
    assert mean_curve([Curve("x", 0, [(0, 0, 1.0, None)]), Curve("x", 1, [(9, 9, 1.0, None)])]) == []


def test_plot_draws_the_mean_and_sums_up(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0, 100.0, 400.0])
    make_run(tmp_path / "b", "ppo", 2, [30.0, 300.0, 500.0])
    make_run(tmp_path / "c", "bad", 2, [float("nan")])
    assert main(["curves", str(tmp_path), "--plot"]) == 0
    text = capsys.readouterr().out
    assert "ppo: eval/return_mean over env_steps, mean and range of 2 runs" in text
    assert "nothing to draw" in text  # the run whose only value is not finite
    assert text.splitlines()[-1].split() == ["ppo", "2", "2000", "450.0", "400.0", "500.0", "450.0"]


def test_curves_need_no_torch_and_no_numpy(tmp_path):
    import subprocess
    import sys

    make_run(tmp_path / "a", "ppo", 1, [20.0])
    program = (
        "import sys\nfrom rl_lab.cli import main\nassert main(['curves', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'numpy', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True)


@pytest.mark.parametrize("kind", ["unreadable config", "no config"])
def test_a_run_without_a_name_is_called_after_its_folder(tmp_path, kind, capsys):
    folder = make_run(tmp_path / "strange", "x", 1, [1.0], summary=False)
    if kind == "no config":
        (folder / "config.yaml").unlink()
    else:
        (folder / "config.yaml").write_text("experiment: [")
    assert main(["curves", str(folder)]) == 0
    assert table(capsys.readouterr().out)[0]["experiment"] == "strange"
