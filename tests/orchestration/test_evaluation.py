"""Inspection: who gets the episodes, what becomes of what is seen, and that training does not notice."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act, Inspection, Workflow
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.episodes import EpisodeRecord
from rl_lab.envs.make import make_env
from rl_lab.orchestration.evaluation import Evaluator
from rl_lab.orchestration.pictures import png, write_picture
from rl_lab.orchestration.recorder import Recorder


class Plain(Workflow):
    """Acts, and looks at nothing."""

    def act(self, observations, state=None, *, explore=True, generator=None):
        return Act(torch.randint(2, (len(observations),), generator=generator))


class Looking(Plain):
    """Counts what it is shown."""

    def inspect(self, trajectory, *, generator):
        assert not torch.is_grad_enabled()
        self.seen = trajectory
        drawn = torch.rand(3, generator=generator)
        return Inspection(
            {"rows": trajectory["valid"].sum(), "drawn": drawn.sum()}, {"grey": np.full((2, 3, 3), 9, np.uint8)}
        )


@dataclass(eq=False)
class Planning(Plain):
    network: nn.Module
    plan: bool = True


def evaluator_of(workflow, seed=0):
    collector = RolloutCollector(make_env("tiny/CartPole", 2), SeedTree(seed), stream="evaluate")
    inspect = workflow.inspect if workflow.inspects else None
    return Evaluator(collector, workflow.act, 4, counters=lambda: (7, 7), inspect=inspect)


def test_a_workflow_says_what_it_offers():
    assert Looking().inspects
    assert not Plain().inspects
    assert Planning(nn.Identity()).has_planner()
    assert not Plain().has_planner()
    with pytest.raises(NotImplementedError, match="Plain has nothing to inspect"):
        Plain().inspect(None, generator=None)


def test_nothing_is_kept_for_a_workflow_that_does_not_look(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("episodes were kept")

    monkeypatch.setattr(EpisodeRecord, "__init__", refuse)
    evaluator_of(Plain())()
    with pytest.raises(AssertionError, match="episodes were kept"):
        evaluator_of(Looking())()


def test_metrics_join_the_evaluation_and_returns_do_not_depend_on_looking():
    looking, plain = evaluator_of(workflow := Looking()), evaluator_of(Plain())
    for _ in range(3):
        seen, expected = looking(), plain()
        assert seen["return_mean"] == expected["return_mean"]
        assert (
            int(seen["rows"]) == sum(looking.last.lengths) == int(workflow.seen.rewards[workflow.seen["valid"]].sum())
        )
    assert looking.history == plain.history
    assert set(seen) == {*expected, "rows", "drawn"}


def test_chance_comes_from_the_number_of_the_evaluation():
    first = evaluator_of(Looking())
    drawn = [float(first()["drawn"]) for _ in range(3)]
    assert len(set(drawn)) == 3
    second = evaluator_of(Looking())
    second.set_state(first.get_state())
    second.history.pop()  # as if the third had not been saved
    assert float(second()["drawn"]) == drawn[2]


def test_png_round_trip_and_refusals(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    path = write_picture(tmp_path / "pictures", 120, "strip", png(torch.from_numpy(pixels)))
    assert path == tmp_path / "pictures" / "0000000120_strip.png"
    np.testing.assert_array_equal(np.asarray(Image.open(path)), pixels)
    for wrong in (pixels.astype(np.float32), pixels[..., :2], pixels[0], pixels[:0]):
        with pytest.raises(ValueError, match=r"it must be uint8 \[H, W, 3\]"):
            png(wrong)
    with pytest.raises(ValueError, match="letters, digits"):
        write_picture(tmp_path, 0, "../strip", b"")


def test_only_the_newest_pictures_of_a_name_are_kept(tmp_path):
    for step in (5, 10, 100, 20):
        write_picture(tmp_path, step, "strip", b"x", max_kept=2)
        write_picture(tmp_path, step, "other_strip", b"x", max_kept=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000010_other_strip.png",
        "0000000020_other_strip.png",
        "0000000020_strip.png",
        "0000000100_other_strip.png",
        "0000000100_strip.png",
    ]


def test_pictures_reach_the_folder_and_tensorboard(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=True, dashboard=None)
    recorder.open(None, env_steps=0, resumed=False)
    recorder.write_pictures({"grey": np.full((2, 3, 3), 9, np.uint8)}, 30)
    recorder.close()
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["0000000030_grey.png"]
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"eval/grey" in events
    assert b"\x89PNG" in events


def test_a_disk_that_refuses_a_picture_does_not_stop_the_run(tmp_path):
    (tmp_path / "pictures").write_text("in the way")
    recorder = Recorder(tmp_path, tensorboard=False, dashboard=None)
    recorder.write_pictures({"grey": np.zeros((2, 3, 3), np.uint8)}, 30)
    assert "picture could not be written" in json.dumps(recorder.warnings)
