"""TD-MPC2 looks at its episodes: with and without ends, discrete or not; what it says fits a world that is known."""

import math

import pytest
import torch

from rl_lab.core.phase import Hook, Phase
from rl_lab.core.seeding import SeedTree
from rl_lab.data.collector import RolloutCollector
from rl_lab.data.episodes import EpisodeRecord
from rl_lab.data.sources import ReplaySource
from rl_lab.envs.make import make_env
from rl_lab.orchestration.evaluation import play_and_inspect
from rl_lab.orchestration.loop import training_loop
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from tests.workflows.test_tdmpc import NUM_ENVS, build


def collector_of(workflow, seeds, probe, discrete):
    environment = make_env(f"probe/{probe}", NUM_ENVS, kwargs={"continuous": not discrete})
    return RolloutCollector(environment, seeds, initial_state=workflow.initial_state(NUM_ENVS))


@pytest.mark.parametrize("discrete", [False, True], ids=["continuous", "discrete"])
@pytest.mark.parametrize("episodic", [False, True], ids=["endless", "episodic"])
@pytest.mark.parametrize("plan", [False, True], ids=["policy", "planner"])
def test_every_variant_can_be_looked_at_and_keeps_its_state(discrete, episodic, plan):
    seeds = SeedTree(0)
    workflow = build(seeds, discrete=discrete, episodic=episodic, plan=plan, horizon=2)
    collector = collector_of(workflow, seeds, "delayed", discrete)
    before = [
        value.clone() for part in (workflow.encoder, workflow.critics, workflow.scale) for value in part.buffers()
    ]
    stream = workflow.generator.get_state()
    _, lengths, seen = play_and_inspect(collector, workflow.act, 12, workflow.inspect)
    assert max(lengths) == 2
    assert all(math.isfinite(value) for value in seen.metrics.values())
    assert {"consistency_error_1", "consistency_error_2", "value_bias", "planner_improvement"} <= seen.metrics.keys()
    assert ("termination_missed" in seen.metrics) == episodic
    assert torch.equal(workflow.generator.get_state(), stream)
    after = [value for part in (workflow.encoder, workflow.critics, workflow.scale) for value in part.buffers()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_a_trained_model_foresees_its_small_world():
    seeds = SeedTree(3)
    workflow = build(seeds)
    collector = collector_of(workflow, seeds, "delayed", False)
    source = ReplaySource(NUM_ENVS, seeds.numpy("source"), "cpu", capacity=4000, batch_size=64, min_size=100, window=1)
    phase = Phase("p", hooks=(Hook("collect", 8), Hook("update_agent", ratio=0.25)), buffer="data", duration_steps=1600)
    untrained = looked_at(workflow, collector)
    scheduler = PhaseScheduler([phase], ready=lambda name: source.ready)
    for _ in training_loop(workflow, scheduler, collector, {"data": source}):
        pass
    trained = looked_at(workflow, collector)
    # Two steps, the second of which brings one and ends: all of it can be foreseen, and nothing is left to be guessed.
    assert trained["termination_missed"] == trained["termination_false"] == 0.0
    assert trained["consistency_error_1"] < 0.1 * trained["unchanged_error_1"]
    assert trained["reward_error"] < 0.1 < untrained["reward_error"]
    assert abs(trained["value_bias"]) < 0.1 < abs(untrained["value_bias"])
    assert trained["value_correlation"] > 0.9
    assert trained["value_tail"] == 0.0
    assert abs(trained["planner_improvement"]) < 0.1


def looked_at(workflow, collector):
    record = EpisodeRecord(16)
    collector.collect_episodes(workflow.act, 16, record=record)
    with torch.no_grad():
        return workflow.inspect(record.trajectory(), generator=torch.Generator().manual_seed(0)).metrics
