"""REL17: random curricula against the reference model of tests/orchestration/test_phase_scheduler.py, in numbers."""

import json

import pytest

from rl_lab.core.errors import UserError
from tests.orchestration.test_phase_scheduler import drive, listed, random_curriculum, reference, scheduler_of

BLOCK = 1000


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(10))
def test_ten_thousand_curricula_with_a_restore_at_a_random_place(block):
    for seed in range(100_000 + block * BLOCK, 100_000 + (block + 1) * BLOCK):
        phases, settings = random_curriculum(seed)
        expected = listed(reference(phases, **settings), 200)
        scheduler, num_envs = scheduler_of(phases, settings), settings["num_envs"]
        before = []
        try:
            for _ in range(seed % 37):
                action = next(drive(scheduler, num_envs), None)
                if action is None:
                    break
                before.append(action)
                scheduler.advance(action[1], steps=action[2] * num_envs if action[1] == "collect" else 0)
        except UserError:
            pass
        restored = scheduler_of(phases, settings)
        restored.set_state(json.loads(json.dumps(scheduler.get_state())))
        rest, ending = listed(drive(restored, num_envs), 200 - len(before))
        assert (before + rest, ending) == expected, f"seed {seed}"
