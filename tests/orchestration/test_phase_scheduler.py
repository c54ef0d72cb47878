"""PhaseScheduler against a slow reference model, and each of its rules by itself."""

import itertools
import json
import math
import random
from fractions import Fraction

import pytest

from rl_lab.core.errors import UserError
from rl_lab.core.phase import Hook, Phase
from rl_lab.orchestration.phase_scheduler import CALLS_PER_EVENT, PhaseScheduler

COLLECT, EVALUATE = Hook("collect"), Hook("evaluate")
BATCHLESS = "update_population"  # the one hook of these tests that needs no source


class DeadCycleError(Exception):
    """A whole cycle did nothing."""


class NotReadyError(Exception):
    """An offline phase was entered without data."""


def reference(phases, *, num_envs, ready, total_timesteps=None):
    """Yield (phase, hook, calls) as design.md, section 4, says. `ready(source, steps)` rules on readiness."""
    collected = 0

    def can_run(phase, hook):
        return hook.name == BATCHLESS or ready(hook.source or phase.buffer, collected)

    def capped(phase):
        return phase.type == "online" and total_timesteps is not None and collected >= total_timesteps

    for phase in phases:
        if capped(phase):
            continue
        if phase.type == "offline" and not all(can_run(phase, hook) for hook in phase.hooks if hook.is_update):
            raise NotReadyError
        steps = updates = cycles = 0
        debt = [Fraction(0) for _ in phase.hooks]
        over = False
        while not over:
            something = False
            for position, hook in enumerate(phase.hooks):
                if hook.name == "collect":
                    accrues = [hook.ratio is not None and can_run(phase, hook) for hook in phase.hooks]
                    yield phase.name, "collect", hook.times
                    taken = hook.times * num_envs
                    collected += taken
                    steps += taken
                    for place, other in enumerate(phase.hooks):
                        if accrues[place]:
                            debt[place] += Fraction(other.ratio).limit_denominator(1000) * taken
                    something = True
                elif hook.name == "evaluate":
                    for _ in range(hook.times):
                        yield phase.name, "evaluate", 1
                    something = True
                elif can_run(phase, hook):
                    calls = hook.times
                    if hook.ratio is not None:
                        calls = math.floor(debt[position])
                        debt[position] -= calls
                    while calls > 0:
                        now = min(calls, 64)
                        yield phase.name, hook.name, now
                        calls -= now
                        updates += now
                        something = True
            cycles += 1
            if not something:
                raise DeadCycleError
            if phase.duration_steps is not None:
                over = steps >= phase.duration_steps
            elif phase.duration_updates is not None:
                over = updates >= phase.duration_updates
            else:
                over = cycles >= (phase.duration_cycles or 1)
            over = over or capped(phase)


def make_scheduler(phases, *, ready, total_timesteps=None):
    scheduler = PhaseScheduler(
        phases,
        total_timesteps=total_timesteps,
        ready=lambda source: ready(source, scheduler.agent_steps),
        needs_source=lambda hook: hook != BATCHLESS,
    )
    return scheduler


def drive(scheduler, num_envs):
    """Yield what the scheduler asks for, and do it."""
    while (hook := scheduler.next_action()) is not None:
        yield scheduler.current_phase().name, hook.name, hook.times
        steps = hook.times * num_envs if hook.name == "collect" else 0
        scheduler.advance(hook.name, steps=steps)


def listed(actions, limit):
    """The first actions and how they end."""
    seen = []
    try:
        for action in itertools.islice(actions, limit):
            seen.append(action)
    except DeadCycleError:
        return seen, "dead cycle"
    except NotReadyError:
        return seen, "offline without data"
    except UserError as error:
        return seen, "offline without data" if "offline" in str(error) else "dead cycle"
    return seen, "end" if len(seen) < limit else "cut"


RATIOS = (0.1, 0.25, 0.3, 0.5, 0.7, 1.0, 1.5, 3.14, 1 / 3, 20.0)


def random_phase(rng, index):
    kind = rng.choice(["online", "online", "online", "offline", "eval_only"])
    hooks = []
    if kind == "eval_only":
        hooks = [Hook("evaluate", times=rng.randint(1, 2)) for _ in range(rng.randint(1, 2))]
        duration = rng.choice([{}, {"duration_cycles": rng.randint(1, 3)}])
        return Phase(f"phase {index}", type=kind, hooks=tuple(hooks), **duration)
    collects = kind == "online" and rng.random() < 0.8
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(["update_agent", "update_model", BATCHLESS])
        source = rng.choice([None, None, "other"])
        roll = rng.random()
        if collects and roll < 0.5:
            hooks.append(Hook(name, ratio=rng.choice(RATIOS), source=source))
        elif roll < 0.9:
            hooks.append(Hook(name, times=rng.randint(1, 4), source=source))
        else:
            hooks.append(Hook(name, times=rng.choice([64, 65, 128, 150]), source=source))
    if rng.random() < 0.3:
        hooks.append(EVALUATE)
    if collects:
        hooks += [Hook("collect", times=rng.choice([1, 1, 2, 5, 40])) for _ in range(rng.choice([1, 1, 2]))]
    rng.shuffle(hooks)
    durations = ["duration_cycles"]
    if collects:
        durations.append("duration_steps")
    if any(hook.is_update for hook in hooks):
        durations.append("duration_updates")
    duration = rng.choice(durations)
    length = rng.randint(1, 6) if duration == "duration_cycles" else rng.randint(1, 120)
    return Phase(f"phase {index}", type=kind, hooks=tuple(hooks), buffer="replay", **{duration: length})


def random_curriculum(seed):
    """Phases, number of environments, readiness and cap."""
    rng = random.Random(seed)
    phases = [random_phase(rng, index) for index in range(rng.randint(1, 4))]
    thresholds = {name: rng.choice([0, 0, 1, 7, 30, 150, math.inf]) for name in ("replay", "other")}
    gap = rng.choice([0, 0, 0, 13])  # a source may also stop being ready

    def ready(source, steps):
        return steps >= thresholds[source] and (not gap or steps // gap % 3 != 2)

    total = rng.choice([None, None, rng.randint(1, 300)])
    return phases, {"num_envs": rng.choice([1, 1, 2, 3, 8]), "ready": ready, "total_timesteps": total}


def scheduler_of(phases, settings):
    return make_scheduler(phases, ready=settings["ready"], total_timesteps=settings["total_timesteps"])


BLOCK = 400


@pytest.mark.parametrize("block", range(8))
def test_equals_the_reference_model(block):
    endings = {"end": 0, "dead cycle": 0, "offline without data": 0, "cut": 0}
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        phases, settings = random_curriculum(seed)
        expected = listed(reference(phases, **settings), 250)
        scheduler = scheduler_of(phases, settings)
        actual = listed(drive(scheduler, settings["num_envs"]), 250)
        assert actual == expected, f"seed {seed}: {phases}, {settings}"
        steps = sum(calls for _, hook, calls in expected[0] if hook == "collect") * settings["num_envs"]
        updates = sum(calls for _, hook, calls in expected[0] if hook.startswith("update_"))
        assert (scheduler.agent_steps, scheduler.updates) == (steps, updates) or expected[1] == "cut"
        endings[expected[1]] += 1
    assert all(count > 2 for count in endings.values()), f"the random schedules are one-sided: {endings}"


def test_restored_at_every_point_it_goes_on_the_same():
    num_points = 0
    for seed in range(150):
        phases, settings = random_curriculum(seed)
        scheduler, actions, states = scheduler_of(phases, settings), [], []

        def save(scheduler=scheduler, states=states, actions=actions):
            states.append((len(actions), json.dumps(scheduler.get_state())))

        ending = "cut"
        try:
            save()
            for _ in range(40):
                if scheduler.next_action() is None:
                    ending = "end"
                    break
                save()
                action = next(drive(scheduler, settings["num_envs"]))
                actions.append(action)
                hook = action[1]
                scheduler.advance(hook, steps=action[2] * settings["num_envs"] if hook == "collect" else 0)
                save()
        except UserError:
            ending = "error"
        for position, state in states:
            restored = scheduler_of(phases, settings)
            restored.set_state(json.loads(state))
            assert json.loads(json.dumps(restored.get_state())) == json.loads(state)
            rest, how = listed(drive(restored, settings["num_envs"]), len(actions) - position + 1)
            assert rest[: len(actions) - position] == actions[position:], f"seed {seed} at {position}"
            if ending != "cut":
                assert how == "end" if ending == "end" else how not in ("end", "cut")
        num_points += len(states)
    assert num_points > 3000


def test_the_state_is_the_same_before_and_after_looking_ahead():
    phases = [
        Phase("a", hooks=(COLLECT, Hook("update_agent", ratio=0.5)), duration_steps=3),
        Phase("b", type="eval_only", hooks=(EVALUATE,)),
    ]
    scheduler = PhaseScheduler(phases)
    while True:
        before = scheduler.get_state()
        action = scheduler.next_action()
        scheduler.current_phase()
        assert scheduler.get_state() == before
        if action is None:
            break
        scheduler.advance(action, steps=1 if action.name == "collect" else 0)


def test_a_state_is_a_copy():
    scheduler = PhaseScheduler([Phase("a", hooks=(COLLECT, Hook("update_agent", ratio=0.5)), duration_steps=100)])
    state = scheduler.get_state()
    text = json.dumps(state)
    scheduler.advance("collect", steps=8)
    scheduler.advance("update_agent")
    assert json.dumps(state) == text
    other = PhaseScheduler(scheduler.phases)
    other.set_state(state)
    other.advance("collect", steps=8)
    assert json.dumps(state) == text


def run(phases, *, num_envs=1, limit=10_000, **keywords):
    scheduler = PhaseScheduler(phases, **keywords)
    actions = list(itertools.islice(drive(scheduler, num_envs), limit))
    assert len(actions) < limit, "the curriculum does not end"
    return scheduler, [(hook, calls) for _, hook, calls in actions]


def test_the_tutorial_of_the_seed():
    hooks = (COLLECT, Hook("update_world_model"), Hook("update_controller"))
    scheduler = PhaseScheduler([Phase("joint", hooks=hooks, buffer="replay", duration_steps=16)])
    for cycle in range(2):
        phase = scheduler.current_phase()
        assert phase["name"] == "joint"
        assert phase.progress == cycle / 2
        assert scheduler.next_action().name == "collect"
        scheduler.advance("collect", steps=8)
        assert scheduler.next_action().name == "update_world_model"
        scheduler.advance("update_world_model")
        scheduler.advance("update_controller")
    assert scheduler.next_action() is None
    assert scheduler.is_finished()
    assert scheduler.current_phase().progress == 1.0
    assert (scheduler.agent_steps, scheduler.updates) == (16, 4)


def test_next_action_is_idempotent():
    calls = []

    def ready(source):
        calls.append(source)
        return len(calls) % 2 == 0

    phase = Phase("a", hooks=(Hook("update_agent"), COLLECT), buffer="replay", duration_cycles=5)
    scheduler = PhaseScheduler([phase], ready=ready)
    first = scheduler.next_action()
    asked = len(calls)
    for _ in range(5):
        assert scheduler.next_action() is first
        scheduler.current_phase(), scheduler.progress(), scheduler.is_finished(), scheduler.get_state()
    assert len(calls) == asked


def test_an_action_says_calls_and_source():
    hooks = (
        Hook("update_memory", times=3, source="sequences"),
        Hook("update_vae", times=2),
        Hook("update_agent", ratio=2),
    )
    scheduler = PhaseScheduler([Phase("a", hooks=(*hooks, COLLECT), buffer="replay", duration_cycles=2)])
    assert scheduler.next_action() == Hook("update_memory", times=3, source="sequences")
    scheduler.advance("update_memory")
    assert scheduler.next_action() == Hook("update_vae", times=2, source="replay")
    scheduler.advance(scheduler.next_action())
    assert scheduler.next_action() == Hook("collect", source="replay")
    scheduler.advance("collect", steps=4)
    scheduler.advance("update_memory")
    scheduler.advance("update_vae")
    assert scheduler.next_action() == Hook("update_agent", times=8, source="replay")


def test_advance_with_another_action_is_an_error_and_changes_nothing():
    scheduler = PhaseScheduler([Phase("a", hooks=(COLLECT, Hook("update_agent")), duration_cycles=1)])
    before = scheduler.get_state()
    with pytest.raises(ValueError, match=r"advance\('update_agent'\), but the next action is 'collect'"):
        scheduler.advance("update_agent")
    assert scheduler.get_state() == before
    scheduler.advance("collect", steps=1)
    scheduler.advance("update_agent")
    with pytest.raises(ValueError, match="the next action is 'None'"):
        scheduler.advance("collect")


def test_a_curriculum_needs_a_phase():
    with pytest.raises(ValueError, match="at least one phase"):
        PhaseScheduler([])


def test_current_phase_belongs_to_the_next_action():
    phases = [
        Phase("first", hooks=(COLLECT,), duration_cycles=1),
        Phase("second", type="eval_only", hooks=(EVALUATE,)),
    ]
    scheduler = PhaseScheduler(phases)
    assert scheduler.current_phase().name == "first"
    scheduler.advance("collect", steps=1)
    assert scheduler.current_phase().name == "second"  # asked before next_action, as the seed does
    assert scheduler.progress() == 0.0
    scheduler.advance("evaluate")
    assert scheduler.current_phase().name == "second"
    assert scheduler.progress() == 1.0


@pytest.mark.parametrize("length", range(1, 14))
def test_a_duration_is_overshot_by_less_than_a_cycle_and_no_hook_is_dropped(length):
    hooks = (Hook("collect", times=2), Hook("update_agent", times=3), EVALUATE)
    cycle = [("collect", 2), ("update_agent", 3), ("evaluate", 1)]
    for duration, per_cycle in (("duration_steps", 4), ("duration_updates", 3), ("duration_cycles", 1)):
        scheduler, actions = run([Phase("a", hooks=hooks, **{duration: length})], num_envs=2)
        cycles = math.ceil(length / per_cycle)
        assert actions == cycle * cycles
        assert 0 <= cycles * per_cycle - length < per_cycle
        assert (scheduler.agent_steps, scheduler.updates) == (4 * cycles, 3 * cycles)


def test_cycles_counts_those_that_next_action_has_passed():
    hooks = (COLLECT, Hook("update_agent"))
    phases = [Phase(name, hooks=hooks, buffer="replay", duration_cycles=2) for name in ("a", "b")]
    scheduler = make_scheduler(phases, ready=lambda source, steps: steps >= 2)
    seen = []
    while (hook := scheduler.next_action()) is not None:
        seen.append((hook.name, scheduler.cycles))
        scheduler.advance(hook, steps=1 if hook.name == "collect" else 0)
    assert seen == [
        ("collect", 0),
        *[("collect", 1), ("update_agent", 1)],
        *[("collect", 2), ("update_agent", 2)],
        *[("collect", 3), ("update_agent", 3)],
    ]
    assert scheduler.cycles == 4


def test_every_phase_counts_from_its_own_start():
    phases = [Phase(name, hooks=(Hook("collect", times=4),), duration_steps=6) for name in ("a", "b")]
    _, actions = run(phases)
    assert actions == [("collect", 4)] * 4


def test_progress_goes_from_zero_to_one():
    scheduler = PhaseScheduler([Phase("a", hooks=(COLLECT, Hook("update_agent")), duration_steps=10)])
    seen = []
    while (hook := scheduler.next_action()) is not None:
        seen.append((hook.name, scheduler.current_phase().progress))
        scheduler.advance(hook, steps=4 if hook.name == "collect" else 0)
    assert seen == [
        ("collect", 0.0),
        ("update_agent", 0.4),
        ("collect", 0.4),
        ("update_agent", 0.8),
        ("collect", 0.8),
        ("update_agent", 1.0),
    ]


@pytest.mark.parametrize("times", [1, 63, 64, 65, 128, 1000])
def test_a_long_update_is_split(times):
    phase = Phase("vae", type="offline", hooks=(Hook("update_vae", times=times), EVALUATE), duration_cycles=2)
    scheduler, actions = run([phase])
    calls = [count for hook, count in actions if hook == "update_vae"]
    assert max(calls) <= CALLS_PER_EVENT == 64
    assert len(calls) == 2 * math.ceil(times / 64)
    assert sum(calls) == scheduler.updates == 2 * times
    assert [hook for hook, _ in actions].count("evaluate") == 2


def test_collect_is_atomic():
    _, actions = run([Phase("a", hooks=(Hook("collect", times=5000),), duration_cycles=2)])
    assert actions == [("collect", 5000)] * 2


def test_a_stop_inside_a_long_update_is_remembered():
    phase = Phase("vae", type="offline", hooks=(Hook("update_vae", times=200),), duration_cycles=1)
    scheduler = PhaseScheduler([phase])
    scheduler.advance("update_vae")
    scheduler.advance("update_vae")
    restored = PhaseScheduler([phase])
    restored.set_state(json.loads(json.dumps(scheduler.get_state())))
    assert [calls for _, _, calls in drive(restored, 1)] == [64, 8]


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.7, 1.0, 1.7, 1 / 3, 2 / 3, 5.0, 0.001])
@pytest.mark.parametrize(("times", "num_envs"), [(1, 1), (3, 1), (1, 8), (7, 5)])
def test_ratio_makes_exactly_the_calls_that_are_owed(ratio, times, num_envs):
    """The number of calls is floor(ratio x steps) at every moment, so num_envs does not change the algorithm."""
    hooks = (Hook("collect", times=times), Hook("update_agent", ratio=ratio))
    scheduler = PhaseScheduler([Phase("a", hooks=hooks, duration_cycles=300)])
    steps = calls = 0
    exact = Fraction(ratio).limit_denominator(1000)
    for _, hook, count in drive(scheduler, num_envs):
        if hook == "collect":
            assert calls == math.floor(exact * steps)
            steps += count * num_envs
        else:
            calls += count
    assert steps == 300 * times * num_envs
    assert calls == math.floor(exact * steps)


def test_a_tenth_of_a_call_per_step():
    hooks = (COLLECT, Hook("update_agent", ratio=0.1))
    _, actions = run([Phase("a", hooks=hooks, duration_steps=1000)])
    positions = [i for i, (hook, _) in enumerate(actions) if hook == "update_agent"]
    assert len(positions) == 100
    assert [position - n for n, position in enumerate(positions)] == list(range(10, 1001, 10))


def test_ratio_is_exact_after_many_steps():
    """0.7 x 86243510 is 60370457, but not in floating point."""
    hooks = (COLLECT, Hook("update_agent", ratio=0.7))
    scheduler = PhaseScheduler([Phase("a", hooks=hooks, duration_steps=10**9)])
    state = scheduler.get_state()
    scheduler.set_state(state | {"ratio_steps": [0, 86243509], "ratio_calls": [0, 60370456]})
    scheduler.advance("collect", steps=1)
    assert scheduler.next_action() == Hook("update_agent")


def test_no_debt_accrues_while_the_source_is_not_ready():
    """Steps that were taken before the source was ready are never paid for: no burst of updates."""
    hooks = (Hook("collect", times=10), Hook("update_agent", ratio=0.5), Hook("update_model", times=2))
    scheduler = make_scheduler(
        [Phase("a", hooks=hooks, buffer="replay", duration_steps=60)], ready=lambda source, steps: steps >= 30
    )
    actions = [(hook, calls) for _, hook, calls in drive(scheduler, 1)]
    waiting = [("collect", 10)] * 2
    becoming_ready = [("collect", 10), ("update_model", 2)]
    assert actions == waiting + becoming_ready + [("collect", 10), ("update_agent", 5), ("update_model", 2)] * 3
    assert scheduler.updates == 3 * 5 + 4 * 2


def test_debt_says_what_is_owed():
    hooks = (COLLECT, Hook("update_agent", ratio=0.4), Hook("update_model"))
    scheduler = PhaseScheduler([Phase("a", hooks=hooks, duration_cycles=2)])
    assert scheduler.debt() == {1: 0.0}
    scheduler.advance("collect", steps=8)
    assert scheduler.debt() == {1: pytest.approx(3.2)}
    scheduler.advance("update_agent")
    assert scheduler.debt() == {1: pytest.approx(0.2)}
    scheduler.advance("update_model")
    scheduler.advance("collect", steps=2)
    scheduler.advance("update_agent")
    scheduler.advance("update_model")
    assert scheduler.is_finished()
    assert scheduler.debt() == {}


def test_online_an_update_on_a_source_that_is_not_ready_is_skipped_and_counts_nothing():
    """Defect 7."""
    hooks = (COLLECT, Hook("update_agent"), Hook("update_memory", source="sequences"), Hook(BATCHLESS))
    scheduler = make_scheduler(
        [Phase("a", hooks=hooks, buffer="replay", duration_updates=7)],
        ready=lambda source, steps: steps >= {"replay": 2, "sequences": 3}[source],
    )
    assert [hook for _, hook, _ in drive(scheduler, 1)] == [
        *("collect", BATCHLESS),
        *("collect", "update_agent", BATCHLESS),
        *("collect", "update_agent", "update_memory", BATCHLESS),
        *("collect", "update_agent", "update_memory", BATCHLESS),
    ]
    assert scheduler.updates == 9


def test_offline_without_data_is_an_error_on_entry():
    phases = [
        Phase("gather", hooks=(COLLECT,), buffer="replay", duration_steps=5),
        Phase(
            "train",
            type="offline",
            hooks=(EVALUATE, Hook("update_vae", times=500), Hook("update_memory", source="sequences")),
            buffer="replay",
            duration_cycles=1,
        ),
    ]
    scheduler = PhaseScheduler(phases, ready=lambda source: source == "replay")
    for _ in range(5):
        scheduler.advance("collect", steps=1)
    for _ in range(2):  # and it stays one
        with pytest.raises(UserError) as caught:
            scheduler.next_action()
        message = str(caught.value)
        for word in ("'train'", "offline", "'update_memory'", "training.phases[1]", "'sequences'", "min_size"):
            assert word in message


def test_offline_hooks_without_a_batch_need_no_data():
    phase = Phase("train", type="offline", hooks=(Hook(BATCHLESS),), duration_updates=3)
    scheduler = make_scheduler([phase], ready=lambda source, steps: False)
    assert len(list(drive(scheduler, 1))) == 3


def test_a_dead_cycle_is_an_error():
    phases = [
        Phase("warm-up", hooks=(COLLECT,), duration_cycles=1),
        Phase("train", hooks=(Hook("update_agent"), Hook("update_model")), buffer="replay", duration_updates=3),
    ]
    scheduler = PhaseScheduler(phases, ready=lambda source: False)
    scheduler.advance("collect", steps=1)
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            scheduler.next_action()
        for word in ("'train'", "without a step", "training.phases[1].workflow_hooks", "update_model", "add 'collect'"):
            assert word in str(caught.value)


def test_a_cycle_in_which_collect_took_no_step_is_dead_too():
    scheduler = PhaseScheduler([Phase("a", hooks=(COLLECT,), duration_steps=10)])
    scheduler.advance("collect", steps=3)
    scheduler.advance("collect", steps=0)
    with pytest.raises(UserError, match="without a step"):
        scheduler.next_action()


def test_a_cycle_that_only_evaluates_is_alive():
    phase = Phase("a", hooks=(EVALUATE, Hook("update_agent")), buffer="replay", duration_cycles=3)
    _, actions = run([phase], ready=lambda source: False)
    assert actions == [("evaluate", 1)] * 3


def test_eval_only_runs_one_cycle_unless_told_otherwise():
    once = Phase("a", type="eval_only", hooks=(EVALUATE, Hook("evaluate", times=3)))
    twice = Phase("b", type="eval_only", hooks=(EVALUATE,), duration_cycles=2)
    scheduler, actions = run([once, twice])
    assert actions == [("evaluate", 1)] * 6
    assert (scheduler.agent_steps, scheduler.updates) == (0, 0)


def test_total_timesteps_ends_online_phases_and_no_other():
    phases = [
        Phase("online 1", hooks=(Hook("collect", times=4), Hook("update_agent")), duration_steps=100),
        Phase("offline", type="offline", hooks=(Hook("update_vae"),), duration_updates=2),
        Phase("online 2", hooks=(COLLECT,), duration_steps=100),
        Phase("online 3", hooks=(Hook("update_agent"),), duration_updates=5),
        Phase("last", type="eval_only", hooks=(EVALUATE,)),
    ]
    scheduler = PhaseScheduler(phases, total_timesteps=10)
    actions = [(phase, hook) for phase, hook, _ in drive(scheduler, 1)]
    assert actions == [
        *[("online 1", "collect"), ("online 1", "update_agent")] * 3,
        *[("offline", "update_vae")] * 2,
        ("last", "evaluate"),
    ]
    assert scheduler.agent_steps == 12


def test_total_timesteps_counts_over_phases():
    phases = [Phase(name, hooks=(COLLECT,), duration_steps=6) for name in ("a", "b", "c")]
    scheduler = PhaseScheduler(phases, total_timesteps=9)
    assert [phase for phase, _, _ in drive(scheduler, 1)] == ["a"] * 6 + ["b"] * 3


def test_a_larger_total_extends_a_finished_run():
    def made(total):
        return PhaseScheduler([Phase("a", hooks=(COLLECT,), duration_steps=total)], total_timesteps=total)

    scheduler = made(5)
    list(drive(scheduler, 1))
    assert scheduler.is_finished()
    state = json.loads(json.dumps(scheduler.get_state()))
    same, longer = made(5), made(8)
    same.set_state(state)
    longer.set_state(state)
    assert same.is_finished()
    assert not longer.is_finished()
    assert len(list(drive(longer, 1))) == 3


def test_advance_takes_the_updates_that_were_made():
    scheduler = PhaseScheduler([Phase("a", hooks=(COLLECT, Hook("update_agent", times=4)), duration_updates=6)])
    scheduler.advance("collect", steps=1)
    scheduler.advance("update_agent", updates=2)
    assert scheduler.updates == 2
    assert scheduler.next_action().name == "collect"
