import csv
import io
import itertools
import json
import math
from xml.etree import ElementTree

import pytest

from rl_lab.cli import main
from rl_lab.cli.chart import ticks
from rl_lab.cli.curve_files import Curve, Row
from rl_lab.cli.curves import mean_curve


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
    assert text.splitlines()[0] == "experiment,seed,env_steps,agent_steps,updates,return_mean,return_std"
    rows = [tuple(row.values()) for row in table(text)]
    assert rows == [
        ("dqn", "0", "0", "0", "0", "nan", "0.25"),
        ("ppo", "1", "0", "0", "0", "20.0", "0.25"),
        ("ppo", "1", "1000", "500", "1", "475.5", "1.25"),
        ("ppo", "10", "0", "0", "0", "30.0", "0.25"),
    ]


def test_the_name_of_an_unfinished_run_has_the_values_that_it_refers_to(tmp_path, capsys):
    folder = make_run(tmp_path / "a", "tdmpc2_${environment.task}", 1, [20.0], summary=False)
    with open(folder / "config.yaml", "a") as file:
        file.write("environment:\n  task: walker-walk\n")
    assert main(["curves", str(folder)]) == 0
    assert [row["experiment"] for row in table(capsys.readouterr().out)] == ["tdmpc2_walker-walk"]


def test_another_key(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0, 40.0])
    assert main(["curves", str(tmp_path / "a"), "--key", "train/loss"]) == 0
    rows = table(capsys.readouterr().out)
    assert list(rows[0]) == ["experiment", "seed", "env_steps", "agent_steps", "updates", "train/loss"]
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


def curve(seed, *points):
    return Curve("x", seed, [Row(x, x, None, y) for x, y in points])


def test_mean_over_seeds_is_taken_where_all_seeds_are():
    first = curve(0, (0, 0.0), (10, 10.0), (20, 20.0))
    second = curve(1, (5, 1.0), (15, 3.0), (40, 9.0))
    merged = mean_curve([first, second])
    assert [entry[0] for entry in merged] == [5, 10, 15, 20]
    assert merged[0] == (5, 3.0, 1.0, 5.0)
    assert merged[1] == (10, 6.0, 2.0, 10.0)
    assert math.isclose(merged[3][1], (20 + 3 + 6 / 5) / 2)
    assert mean_curve([curve(0, (0, 1.0)), curve(1, (9, 1.0))]) == []


def test_of_several_evaluations_at_one_step_the_last_counts():
    first, second = curve(0, (0, 1.0), (10, 9.0), (10, 2.0)), curve(1, (0, 1.0), (10, 4.0), (10, 4.0), (20, 8.0))
    assert mean_curve([first, second]) == [(0, 1.0, 1.0, 1.0), (10, 3.0, 2.0, 4.0)]


def test_offline_training_is_drawn_over_its_updates(tmp_path, capsys):
    make_run(tmp_path / "e/a", "bc", 0, [1.0, 2.0, 60.0], every=0)
    make_run(tmp_path / "e/b", "bc", 1, [1.0, 4.0, 80.0], every=0)
    make_run(tmp_path / "e/c", "ppo", 0, [1.0, 5.0])
    assert main(["curves", str(tmp_path / "e"), "--plot", "--svg", str(tmp_path / "x.svg")]) == 0
    text = capsys.readouterr().out
    assert "bc: eval/return_mean over updates" in text
    assert "ppo: eval/return_mean over env_steps" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["bc", "2", "2", "70", "60", "80", "70"] in rows
    assert ["ppo", "1", "1000", "5", "5", "5", "5"] in rows
    (bc, ppo), (bc_lines, _) = pictured(tmp_path / "x.svg")
    assert ("updates" in bc, "updates" in ppo) == (True, False)
    assert len({point.split(",")[0] for point in bc_lines[-1]}) == 3


def test_plot_draws_the_mean_and_sums_up(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [20.0, 100.0, 400.0])
    make_run(tmp_path / "b", "ppo", 2, [30.0, 300.0, 500.0])
    make_run(tmp_path / "c", "bad", 2, [float("nan")])
    assert main(["curves", str(tmp_path), "--plot"]) == 0
    text = capsys.readouterr().out
    assert "ppo: eval/return_mean over env_steps, mean and range of 2 runs" in text
    assert "nothing to draw" in text  # the run whose only value is not finite
    assert text.splitlines()[-1].split() == ["ppo", "2", "2000", "450.0", "400.0", "500.0", "450.0"]


def test_small_numbers_keep_their_digits(tmp_path, capsys):
    make_run(tmp_path / "a", "ppo", 1, [0.0, 0.00981, 12345.67])
    assert main(["curves", str(tmp_path), "--plot", "--key", "train/loss"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3:] == ["0.1667", "0.1667", "0.1667", "0.5"]
    assert main(["curves", str(tmp_path), "--plot"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[3:] == ["12345.7"] * 4


def test_a_picture_and_a_plot_can_both_be_had(tmp_path, capsys):
    make_run(tmp_path / "e/a", "ppo", 1, [20.0, 100.0])
    assert main(["curves", str(tmp_path / "e"), "--plot", "--svg", str(tmp_path / "x.svg")]) == 0
    text = capsys.readouterr().out
    assert "1 experiments, 1 runs" in text
    assert "ppo: eval/return_mean over env_steps" in text
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert main(["curves", str(tmp_path / "e"), "--svg", str(tmp_path / "x.svg")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


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


def pictured(path):
    """Return what a picture shows: titles and other words, and the points of its lines and bands."""
    root = ElementTree.fromstring(path.read_text())
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    words = [[text.text for text in panel.iter(f"{space}text")] for panel in panels]
    lines = [[line.get("points").split() for line in panel.iter(f"{space}polyline")] for panel in panels]
    return words, lines


def test_a_picture_has_a_panel_for_each_experiment_with_its_runs_and_published_scores(tmp_path, capsys):
    make_run(tmp_path / "e/a", "ppo<1>", 0, [0.0, 100.0, 200.0])
    make_run(tmp_path / "e/b", "ppo<1>", 1, [0.0, 300.0, 400.0])
    make_run(tmp_path / "e/c", "dqn", 0, [math.nan, 5.0, 7.0])
    (tmp_path / "p.csv").write_text("experiment,env_steps,return_mean,return_std,source\nppo<1>,2000,500,20,authors\n")
    picture = tmp_path / "deep/x.svg"
    assert main(["curves", str(tmp_path / "e"), "--svg", str(picture), "--published", str(tmp_path / "p.csv")]) == 0
    assert "2 experiments, 3 runs" in capsys.readouterr().out
    (dqn, ppo), (dqn_lines, ppo_lines) = pictured(picture)
    assert dqn[0] == "dqn (1 run)"
    assert len(dqn_lines) == 1
    assert len(dqn_lines[0]) == 2  # what is not a number is left out
    assert ppo[0] == "ppo<1> (2 runs)"
    assert "authors" in ppo
    assert {"0", "500", "2k"} <= set(ppo)
    *runs, mean = ppo_lines
    heights = [[float(point.split(",")[1]) for point in line] for line in (*runs, mean)]
    assert heights[2] == pytest.approx([(a + b) / 2 for a, b in zip(*heights[:2], strict=True)], abs=0.1)
    assert heights[0][0] > heights[0][1] > heights[1][1] > heights[1][2]  # up is less
    widths = [float(point.split(",")[0]) for point in mean]
    assert widths[1] - widths[0] == pytest.approx(widths[2] - widths[1], abs=0.1)


def test_curves_read_the_csv_that_they_wrote(tmp_path, capsys):
    make_run(tmp_path / "e/a", "ppo", 3, [1.0, 2.5])
    assert main(["curves", str(tmp_path / "e")]) == 0
    (tmp_path / "curves.csv").write_text(capsys.readouterr().out)
    assert main(["curves", str(tmp_path / "curves.csv")]) == 0
    assert capsys.readouterr().out == (tmp_path / "curves.csv").read_text()


def test_a_csv_without_updates_is_read(tmp_path, capsys):
    header = "experiment,seed,env_steps,agent_steps,"
    (tmp_path / "old.csv").write_text(f"{header}return_mean,return_std\nppo,0,5,5,1.0,2.0\n")
    assert main(["curves", str(tmp_path / "old.csv")]) == 0
    assert capsys.readouterr().out == f"{header}updates,return_mean,return_std\nppo,0,5,5,,1.0,2.0\n"


def test_a_csv_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "x.csv").write_text("experiment,seed,env_steps,agent_steps,score\nppo,0,1,1,2\n")
    assert main(["curves", str(tmp_path / "x.csv")]) == 2
    assert "no column 'return_mean'" in capsys.readouterr().err
    assert main(["curves", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "x.csv").write_text("experiment,seed,env_steps,agent_steps,return_mean\nppo,zero,1,1,2\n")
    assert main(["curves", str(tmp_path / "x.csv")]) == 2
    assert "line 2" in capsys.readouterr().err


def test_published_scores_need_a_picture(tmp_path, capsys):
    make_run(tmp_path / "e/a", "ppo", 0, [1.0])
    assert main(["curves", str(tmp_path / "e"), "--published", "p.csv"]) == 2
    assert "--svg" in capsys.readouterr().err


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1500, -120), (3, 3), (0, 0), (1e-9, 2e-9), (-5, 1e6), (0, 500)])
def test_ticks_are_few_round_and_cover_the_range(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def make_variant(folder, seed, means, **knobs):
    make_run(folder, "ppo", seed, means)
    lines = [f"experiment:\n  name: ppo\n  seed: {seed}\nworkflow:\n", *(f"  {key}: {knobs[key]}\n" for key in knobs)]
    (folder / "config.yaml").write_text("".join(lines))


def names_of(text):
    return [row["experiment"] for row in table(text)]


def test_runs_that_differ_in_more_than_their_seeds_are_told_apart(tmp_path, capsys):
    for seed in (0, 1):
        make_variant(tmp_path / f"e/a{seed}", seed, [1.0], gamma=0.9, trace=0.95)
    make_variant(tmp_path / "e/b", 0, [2.0], gamma=0.99, trace=0.95)
    make_variant(tmp_path / "e/c", 0, [3.0], gamma=0.9)
    make_run(tmp_path / "e/d", "dqn", 0, [4.0])  # nothing is known of its knobs
    assert main(["curves", str(tmp_path / "e")]) == 0
    low, high = "ppo [workflow.gamma=0.9, workflow.trace=0.95]", "ppo [workflow.gamma=0.99, workflow.trace=0.95]"
    without = "ppo [workflow.gamma=0.9, ~workflow.trace]"
    found = names_of(capsys.readouterr().out)
    assert found == sorted(["dqn", low, low, high, without])
    assert main(["curves", str(tmp_path / "e/a0"), str(tmp_path / "e/a1")]) == 0  # of one variant: no more to say
    assert names_of(capsys.readouterr().out) == ["ppo", "ppo"]


def test_a_variants_name_shows_few_keys_those_first_that_tell_most_apart(tmp_path, capsys):
    make_variant(tmp_path / "a", 0, [1.0], a=1, b=1, c=1, d=1, e=1)
    make_variant(tmp_path / "b", 0, [1.0], a=2, b=2, c=2, d=2, e=2)
    make_variant(tmp_path / "c", 0, [1.0], a=2, b=2, c=2, d=2, e=3)
    assert main(["curves", str(tmp_path)]) == 0
    assert names_of(capsys.readouterr().out) == [
        f"ppo [workflow.e={e}, workflow.a={a}, workflow.b={a}, 2 more]" for e, a in ((1, 1), (2, 2), (3, 2))
    ]


def test_all_names_show_as_many_keys_as_it_takes(tmp_path, capsys):
    for name, knobs in (("x", "2111"), ("y", "1211"), ("z", "1121"), ("w", "1112"), ("v", "1111")):
        make_variant(tmp_path / name, 0, [1.0], **dict(zip("abcd", knobs, strict=True)))
    assert main(["curves", str(tmp_path)]) == 0
    found = names_of(capsys.readouterr().out)
    assert len(set(found)) == 5
    assert not any("more" in name for name in found)


def test_how_a_run_is_evaluated_makes_it_no_variant(tmp_path, capsys):
    for seed in (0, 1):
        make_variant(tmp_path / str(seed), seed, [1.0], gamma=0.9)
        with open(tmp_path / str(seed) / "config.yaml", "a") as file:
            file.write(f"evaluation:\n  episodes: {10 + seed}\n")
    assert main(["curves", str(tmp_path)]) == 0
    assert names_of(capsys.readouterr().out) == ["ppo", "ppo"]


def test_published_scores_stand_beside_every_variant(tmp_path, capsys):
    make_variant(tmp_path / "e/a", 0, [20.0, 100.0], gamma=0.9)
    make_variant(tmp_path / "e/b", 0, [20.0, 300.0], gamma=0.99)
    (tmp_path / "p.csv").write_text("experiment,env_steps,return_mean,return_std,source\nppo,1000,250,10,paper\n")
    words = [str(tmp_path / "e"), "--svg", str(tmp_path / "x.svg"), "--published", str(tmp_path / "p.csv")]
    assert main(["curves", *words]) == 0
    assert (tmp_path / "x.svg").read_text().count(">paper<") == 2
