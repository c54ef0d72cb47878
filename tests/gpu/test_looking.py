"""Inspection and profiles on a GPU. Needs a CUDA device.

`pytest -m gpu tests/gpu`, or `python tests/gpu/test_looking.py` where pytest is not installed.
"""

import json
import math
import tempfile
from pathlib import Path

from rl_lab.build import build_experiment
from rl_lab.cli import main
from rl_lab.composition import load_experiment
from rl_lab.profiling import profile_experiment, profile_run

SHORT = {
    "device": "cuda",
    "training.total_timesteps": 1200,
    "training.phases.0.duration_steps": 250,
    "evaluation.every": 600,
    "evaluation.episodes": 2,
    "buffer.storage": "device",
}


def composed(name="tdmpc2_swingup", **changes):
    return load_experiment(name, {**SHORT, **{key.replace("__", "."): value for key, value in changes.items()}})


def streams(folder, **changes):
    """Train, and return where every stream of chance is at the end, except evaluation's own."""
    experiment = build_experiment(composed(**changes), folder)
    folder.mkdir(parents=True)
    try:
        assert experiment.orchestrator(folder).run() == 0
        generators = experiment.seeds.get_state()["torch"]
        return {name: state.tolist() for name, state in generators.items() if name != "evaluate/act"}
    finally:
        experiment.close()


def test_captured_runs_are_looked_at_and_training_does_not_notice():
    with tempfile.TemporaryDirectory() as work:
        looked_at = streams(Path(work) / "with")
        assert looked_at == streams(Path(work) / "without", evaluation__inspect=False)
        lines = (Path(work) / "with" / "metrics.jsonl").read_text().splitlines()
        found = {record["key"]: record["value"] for record in map(json.loads, lines)}
        for name in ("consistency_error_1", "planner_improvement", "value_bias"):
            assert math.isfinite(found[f"eval/{name}"])
        assert list((Path(work) / "with" / "pictures").iterdir())
        assert not (Path(work) / "without" / "pictures").exists()


def check_profile(profile, *, captured):
    parts = {line.part for line in profile.lines}
    assert {"environment", "act", "host wait", "update"} <= parts
    assert abs(sum(line.seconds for line in profile.lines) - profile.seconds) < 1e-6 * profile.seconds + 1e-9
    assert profile.lines[-1].part == "other"
    assert 0.0 <= profile.lines[-1].seconds < 0.5 * profile.seconds
    (cost,) = profile.costs
    assert sum(cost.operations.values()) > 1e6
    assert cost.peaks["float32"] > 1e12
    assert (cost.kernels is not None) == captured
    if captured:
        assert cost.kernels > 30
        (update,) = (line for line in profile.lines if line.part == "update")
        assert cost.floor_seconds < cost.kernel_seconds < 0.1
        assert update.calls == profile.updates
    assert profile.memory["device, allocated"] > 2**20


def test_profile_of_captured_updates():
    check_profile(profile_experiment(composed(), cycles=50), captured=True)


def test_profile_of_updates_as_they_are():
    check_profile(profile_experiment(composed(training__capture="none"), cycles=20), captured=False)


def test_profile_and_eval_of_a_run():
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "run"
        words = [f"{key}={value}" for key, value in SHORT.items() if key != "device"]
        assert (
            main(["train", "tdmpc2_swingup", "experiment.device=cuda", *words, "--quiet", f"--run-dir={folder}"]) == 0
        )
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        check_profile(profile_run(folder, cycles=20), captured=True)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        assert main(["eval", str(folder), "--planner", "both", "--episodes", "2", "--dream"]) == 0
        assert (folder / "dream" / "value_calibration.png").is_file()


if __name__ == "__main__":
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name)
