"""WorkerPool: equal to the serial environments, whatever its workers do; nothing is left when it or its owner ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium.vector import AutoresetMode

from rl_lab.core.batch import tree_leaves
from rl_lab.core.errors import UserError
from rl_lab.core.seeding import SeedTree
from rl_lab.core.workflow import Act
from rl_lab.data.collector import RolloutCollector
from rl_lab.envs import wire, worker
from rl_lab.envs.make import make_env
from rl_lab.envs.pool import EnvironmentFault, WorkerPool, _History
from rl_lab.envs.worker_process import Request

from .chaos_worlds import KINDS, MODULE, arm

TIMEOUT = 1.5
WORDS = {
    "kill": "was killed by SIGKILL",
    "exit": "exited with code 3",
    "raise": "raised RuntimeError: the motor is off (environment {row})",
    "hang": "hung for more than 1.5 s",
    "observation": "returned an observation that is not finite (environment {row})",
    "reward": "returned a reward that is not finite (environment {row})",
    "shape": "(environment {row})",
    "babble": "answered with nonsense",
    "forge": "answered with arrays",
}
_pools = []


@pytest.fixture(autouse=True)
def closed_pools():
    yield
    while _pools:
        _pools.pop().close()


def make_pool(id, num_envs, workers=2, **settings):
    _pools.append(make_env(id, num_envs, workers=workers, **settings))
    return _pools[-1]


def make_chaos(folder, num_envs=4, name="Chaos", **settings):
    id, kwargs = f"{MODULE}:{name}-v0", {"folder": str(folder)}
    return make_pool(id, num_envs, kwargs=kwargs, allow=["tests"], worker_timeout=TIMEOUT, **settings)


def make_calm(num_envs=4):
    return make_env(f"{MODULE}:Chaos-v0", num_envs, allow=["tests"])


@pytest.fixture(scope="module")
def cart_poles():
    """A pool that several tests use, because a process takes a while to start."""
    pool = make_env("tiny/CartPole", 3, workers=2)
    yield pool
    pool.close()


def assert_same(left, right):
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    else:
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tolist() == right.tolist() if left.dtype == object else left.tobytes() == right.tobytes()


class Player:
    """Plays random actions, resets what ended, and keeps everything that it saw."""

    def __init__(self, env, seed=0):
        self.env, self.generator = env, np.random.default_rng(seed)
        self.episodes = [0] * env.num_envs
        self.steps = [0] * env.num_envs
        self.records = [env.reset(seed=self.seeds())]

    def seeds(self):
        return [1000 * row + episode for row, episode in enumerate(self.episodes)]

    def actions(self):
        space = self.env.single_action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return self.generator.integers(space.n, size=self.env.num_envs)
        return self.generator.uniform(-1.0, 1.0, (self.env.num_envs, *space.shape)).astype(np.float32)

    def step(self, before_reset=None):
        self.records.append(self.env.step(self.actions()))
        done = self.records[-1][2] | self.records[-1][3]
        self.steps = [0 if ended else count + 1 for ended, count in zip(done, self.steps, strict=True)]
        if done.any():
            self.episodes = [episode + int(ended) for ended, episode in zip(done, self.episodes, strict=True)]
            if before_reset is not None:
                before_reset(np.flatnonzero(done))
            self.records.append(self.env.reset(seed=self.seeds(), options={"reset_mask": done}))

    def play(self, num_steps):
        for _ in range(num_steps):
            self.step()
        return self.records


@pytest.mark.parametrize(
    ("id", "settings"),
    [
        ("tiny/CartPole", {"max_episode_steps": 20}),
        ("tiny/Pendulum", {"max_episode_steps": 50, "action_repeat": 3}),
        ("tiny/GridWorld", {"frame_stack": 2, "resize": 16}),
        ("Pendulum-v1", {"max_episode_steps": 30}),
        ("FrozenLake-v1", {"action_repeat": 2}),
        (f"{MODULE}:Chaos-v0", {"allow": ["tests"], "frame_stack": 3}),
    ],
)
def test_equal_to_serial(id, settings):
    serial, pool = make_env(id, 5, **settings), make_pool(id, 5, **settings)
    for name in ("num_envs", "single_observation_space", "single_action_space", "observation_space", "action_space"):
        assert getattr(pool, name) == getattr(serial, name), name
    assert pool.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert pool.render_mode == serial.render_mode
    assert_same(Player(pool).play(60), Player(serial).play(60))
    assert pool.restarts == 0


def test_arrays_are_the_callers(cart_poles):
    serial, pool = Player(make_env("tiny/CartPole", 3)), Player(cart_poles)
    for _ in range(5):
        pool.step(), serial.step()
        assert_same(pool.records[-1], serial.records[-1])
        for record in pool.records:
            record[0][:] = -1.0
    os.kill(cart_poles.pids[0], signal.SIGKILL)  # the comparison after a replay does not look at the caller's arrays
    pool.step(), serial.step()
    assert_same(pool.records[-1], serial.records[-1])


def test_more_workers_than_rows():
    assert len(make_pool("tiny/CartPole", 1, workers=5).pids) == 1


def test_workers_work_at_the_same_time(tmp_path):
    pool = Player(make_chaos(tmp_path, 2))
    for row in range(2):
        arm(tmp_path, "slow", pool.seeds()[row], 1)
    began = time.monotonic()
    pool.step()
    assert 0.6 <= time.monotonic() - began < 1.1  # 0.6 s each


def test_rendering(cart_poles):
    serial = make_env("tiny/CartPole", 3)
    assert_same(cart_poles.reset(seed=4), serial.reset(seed=4))
    np.testing.assert_array_equal(cart_poles.render_frames(), serial.render_frames())
    np.testing.assert_array_equal(np.stack(cart_poles.render()), serial.render_frames())


def test_rendering_that_cannot_be_is_no_fault():
    pool = make_pool("CartPole-v1", 3)
    pool.reset(seed=0)
    with pytest.raises(UserError, match="render=True"):
        pool.render_frames()
    pool.step(np.zeros(3, np.int64))
    assert pool.restarts == 0


@pytest.mark.parametrize("kinds", [KINDS[0::2], KINDS[1::2]], ids=" ".join)
def test_faults_leave_no_trace(kinds, tmp_path):
    """Three faults of each kind at random steps: every transition is what the serial environments give."""
    chance = np.random.default_rng(len(kinds[0]))
    pool, serial = Player(make_chaos(tmp_path)), Player(make_calm())
    descriptors = psutil.Process().num_fds()
    planned = dict(zip(chance.choice(60, size=3 * len(kinds), replace=False).tolist(), 3 * kinds, strict=True))
    expected = []
    for step in range(60):
        if step in planned:
            row = int(chance.integers(4))
            arm(tmp_path, planned[step], pool.seeds()[row], pool.steps[row] + 1)
            first = row // 2 * 2
            expected.append((f"environments {first} to {first + 1}", WORDS[planned[step]].format(row=row)))
        began = time.monotonic()
        pool.step(), serial.step()
        assert time.monotonic() - began < TIMEOUT + 5.0
    assert_same(pool.records, serial.records)
    assert len(list(tmp_path.glob("*.done"))) == len(planned)
    assert pool.env.restarts >= len(planned)
    for words in expected:
        assert any(all(part in told for part in words) for told in pool.env.incidents), words
    assert psutil.Process().num_fds() == descriptors
    assert _seconds_of(pool.env.incidents) < 5.0


def _seconds_of(incidents):
    return max(float(incident.rsplit(" in ", 1)[1].removesuffix(" s")) for incident in incidents)


def test_faults_in_resets_and_in_both_workers(tmp_path):
    """Rows that are reset, rows that are not, and workers that fail at the same time."""
    pool, serial = Player(make_chaos(tmp_path)), Player(make_calm())
    kinds = iter(("kill", "raise", "shape"))

    def arm_reset(rows):
        if (kind := next(kinds, None)) is not None:
            arm(tmp_path, kind, pool.seeds()[rows[0]], 0)

    for step in range(60):
        if step == 10:
            for row in (1, 2):
                arm(tmp_path, "kill", pool.seeds()[row], pool.steps[row] + 1)
        pool.step(arm_reset), serial.step()
    assert_same(pool.records, serial.records)
    assert len(list(tmp_path.glob("*.done"))) == 5
    assert pool.env.restarts == 5


def test_fault_in_the_first_reset(tmp_path):
    arm(tmp_path, "kill", 1000, 0)
    assert_same(Player(make_chaos(tmp_path)).play(3), Player(make_calm()).play(3))


def test_resets_without_seeds_are_restored_too(tmp_path):
    """A row that is reset without a seed goes on with its generator, also in a worker that was replaced."""
    pool, serial = make_chaos(tmp_path, 3), make_calm(3)
    generator = np.random.default_rng(0)
    records = {env: [env.reset(seed=[5, 6, 7], options={"offset": 2.5})] for env in (pool, serial)}
    for step in range(30):
        actions = generator.uniform(-1, 1, (3, 2)).astype(np.float32)
        mask = np.array([step % 7 == 6, step % 5 == 4, True])
        for env, seen in records.items():
            seen.append(env.step(actions))
            done = seen[-1][2] | seen[-1][3] | mask
            seen.append(env.reset(options={"reset_mask": done, "offset": float(step)}))
        if step in (9, 20):
            os.kill(pool.pids[step % 2], signal.SIGKILL)
    assert_same(records[pool], records[serial])
    assert pool.restarts == 2


def test_first_reset_without_seeds(tmp_path):
    pool = make_chaos(tmp_path, 2)
    first, _ = pool.reset()
    assert not np.array_equal(first["state"][0], first["state"][1])
    os.kill(pool.pids[0], signal.SIGKILL)
    pool.step(np.zeros((2, 2), np.float32))  # compares what row 0 shows after its replay
    assert pool.restarts == 1


def test_interrupted_step_is_repeated_from_the_same_state(tmp_path):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    pool, serial = Player(make_chaos(tmp_path)), Player(make_calm())
    pool.play(6), serial.play(6)
    arm(tmp_path, "slow", pool.seeds()[1], pool.steps[1] + 1)
    state = pool.generator.bit_generator.state
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            pool.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    pool.generator.bit_generator.state = state
    assert_same(pool.play(8), serial.play(8))
    assert all("was interrupted" in incident for incident in pool.env.incidents)


@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_the_same_step_failing_twice_names_it(kind, tmp_path):
    pool = Player(make_chaos(tmp_path))
    pool.play(4)
    row = 3
    seed, steps = pool.seeds()[row], pool.steps[row]
    arm(tmp_path, kind, seed, steps + 1, forever=True)
    actions = pool.actions()
    with pytest.raises(EnvironmentFault, match="failed twice at the same step") as caught:
        pool.env.step(actions)
    fault = caught.value
    assert (fault.environment, fault.seed, fault.steps) == (row, seed, steps)
    assert fault.action == actions[row].tolist()
    assert str(row) in str(fault)
    assert str(seed) in str(fault)
    assert str(fault.action) in str(fault)
    assert pool.env.restarts == 1
    assert kind != "raise" or "the motor is off" in fault.detail
    # The other rows were not stepped for good: mended, the pool goes on from where it was.
    (tmp_path / f"{seed}-{steps + 1}").unlink()
    serial = Player(make_calm())
    serial.play(4)
    pool.records.append(pool.env.step(actions))
    serial.records.append(serial.env.step(serial.actions()))
    assert_same(pool.records, serial.records)


def test_a_replay_failing_once_is_tried_again_and_twice_is_named(tmp_path):
    pool, serial = Player(make_chaos(tmp_path)), Player(make_calm())
    pool.play(5), serial.play(5)
    seed = pool.seeds()[1]
    arm(tmp_path, "raise", seed, 2)
    os.kill(pool.env.pids[0], signal.SIGKILL)
    assert_same(pool.play(1), serial.play(1))
    assert pool.env.restarts == 2
    arm(tmp_path, "raise", seed, 3, forever=True)
    os.kill(pool.env.pids[0], signal.SIGKILL)
    third = pool.env._history._actions[2, 1].tolist()
    with pytest.raises(EnvironmentFault, match="could not be restored") as caught:
        pool.step()
    assert (caught.value.environment, caught.value.seed, caught.value.action) == (1, seed, third)


def test_a_reset_failing_twice_names_it(tmp_path):
    pool = make_chaos(tmp_path)
    arm(tmp_path, "raise", 77, 0, forever=True)
    with pytest.raises(EnvironmentFault, match="failed twice at the same reset") as caught:
        pool.reset(seed=[1, 2, 77, 3])
    assert (caught.value.environment, caught.value.seed, caught.value.action) == (2, 77, None)


@pytest.mark.parametrize(
    ("name", "num_steps", "what"), [("Unseeded", 0, "another observation"), ("Moody", 3, "other rewards")]
)
def test_a_row_that_does_not_come_back_is_never_silent(name, num_steps, what, tmp_path):
    pool = Player(make_chaos(tmp_path, name=name))
    pool.play(num_steps)
    os.kill(pool.env.pids[1], signal.SIGKILL)
    with pytest.raises(EnvironmentFault, match=what) as caught:
        pool.step()
    assert (caught.value.environment, caught.value.seed) == (2, pool.seeds()[2])


class Policy:
    """Acts by its generator and what it sees, so that one wrong observation would change everything after it."""

    def __call__(self, observations, state, *, explore, generator):
        noise = torch.rand(observations["state"].shape[0], 2, generator=generator)
        return Act(torch.tanh(observations["state"][:, :2] + noise))


def same_batches(left, right):
    for name in ("observations", "actions", "rewards", "terminated", "truncated", "next_observations"):
        pairs = zip(tree_leaves(getattr(left, name)), tree_leaves(getattr(right, name)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs), name


def test_collector_over_a_pool(tmp_path):
    pool, serial = make_chaos(tmp_path), make_calm()
    collectors = [RolloutCollector(env, SeedTree(3)) for env in (pool, serial)]
    for part in range(3):
        ours, theirs = (collector.collect(Policy(), 30) for collector in collectors)
        same_batches(ours.trajectory, theirs.trajectory)
        assert (ours.steps, ours.episodes, ours.extras) == (theirs.steps, theirs.episodes, theirs.extras)
        os.kill(pool.pids[part % 2], signal.SIGKILL)
    assert pool.restarts == 2
    # What a checkpoint holds comes back in another pool, and goes on the same.
    states = [collector.get_state() for collector in collectors]
    assert_same(states[0]["observations"], states[1]["observations"])
    seeds = SeedTree(3)
    resumed = RolloutCollector(make_chaos(tmp_path), seeds)
    seeds.set_state(collectors[0].seeds.get_state())
    assert resumed.set_state(states[0])
    same_batches(resumed.collect(Policy(), 30).trajectory, collectors[1].collect(Policy(), 30).trajectory)


def test_workers_are_light(cart_poles):
    for pid in cart_poles.pids:
        process = psutil.Process(pid)
        assert process.num_threads() == 1
        assert not [entry.path for entry in process.memory_maps() if "libtorch" in entry.path]


def test_signals_are_left_to_the_owner(cart_poles):
    restarts = cart_poles.restarts
    cart_poles.reset(seed=0)
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in cart_poles.pids:
            os.kill(pid, number)
        cart_poles.step(np.zeros(3, np.int64))
    assert cart_poles.restarts == restarts


def test_close_leaves_no_child(tmp_path):
    pool = make_chaos(tmp_path)
    player = Player(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    player.step()
    pids = pool.pids
    pool.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    pool.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        player.step()


def test_close_ends_a_worker_that_is_stuck(tmp_path):
    pool = make_chaos(tmp_path, 1)
    pool.reset(seed=[5])
    arm(tmp_path, "hang", 5, 1)
    pool._workers[0].send(Request("step", [0], np.zeros((1, 2), np.float32)))
    [pid] = pool.pids
    began = time.monotonic()
    pool.close()
    assert not psutil.pid_exists(pid)
    assert time.monotonic() - began < 4.0


def test_forgotten_pool_is_closed():
    pool = make_env("tiny/CartPole", 1, workers=1)
    [pid] = pool.pids
    del pool
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_its_owner(busy, tmp_path):
    """Kill -9 of the owner, with the workers waiting or stuck in a step: they are gone within two seconds."""
    arm(tmp_path, "hang", 1000, 1 if busy else 9)
    script = f"""
import numpy as np, time
from rl_lab.envs import wire, worker
from rl_lab.envs.make import make_env
pool = make_env("{MODULE}:Chaos-v0", 2, workers=2, allow=["tests"], kwargs={{"folder": {str(tmp_path)!r}}})
pool.reset(seed=[0, 1000])
print(*pool.pids, flush=True)
pool.step(np.zeros((2, 2), np.float32))
time.sleep(60)
"""
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )
    with owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.2)
        assert all(_runs(pid) for pid in pids)
        owner.kill()
    deadline = time.monotonic() + 2.0
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # of an orphan, init's to reap
    except psutil.NoSuchProcess:
        return False


def test_own_package_from_another_folder(tmp_path, monkeypatch):
    """Workers search where the owner searches, and not in the working directory."""
    package, elsewhere = tmp_path / "lib" / "my_worlds", tmp_path / "elsewhere"
    package.mkdir(parents=True), elsewhere.mkdir()
    (package / "__init__.py").write_text(
        "import gymnasium\ngymnasium.register(id='Mine-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    (elsewhere / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.chdir(elsewhere)
    pool = make_pool("my_worlds:Mine-v0", 2, allow=["my_worlds"])
    serial = make_env("my_worlds:Mine-v0", 2, allow=["my_worlds"])
    assert_same(pool.reset(seed=0), serial.reset(seed=0))


@pytest.mark.parametrize(
    ("id", "settings", "key"),
    [
        ("CartPole-v9", {}, "environment.id"),
        ("tests.envs.chaos_worlds:Chaos-v0", {}, "environment.id"),
        ("tiny/CartPole", {"kwargs": {"size": (3, 3)}}, "environment.kwargs"),
        ("tiny/CartPole", {"workers": -1}, "environment.workers"),
        ("tiny/CartPole", {"worker_timeout": 0}, "environment.worker_timeout"),
    ],
)
def test_mistakes_are_told_as_such(id, settings, key):
    children = psutil.Process().children()
    with pytest.raises(UserError) as caught:
        make_pool(id, 2, **{"workers": 2, **settings})
    assert caught.value.key == key
    assert psutil.Process().children() == children


def test_wrong_calls_change_nothing(cart_poles):
    restarts = cart_poles.restarts
    before, _ = cart_poles.reset(seed=0)
    for actions in (np.zeros(2, np.int64), np.zeros((3, 1), np.int64), np.zeros(3)):
        with pytest.raises(ValueError, match="actions are"):
            cart_poles.step(actions)
    serial = make_env("tiny/CartPole", 3)
    np.testing.assert_array_equal(serial.reset(seed=0)[0], before)
    assert_same(cart_poles.step(np.ones(3, np.int64)), serial.step(np.ones(3, np.int64)))
    assert cart_poles.restarts == restarts


def test_a_step_before_the_first_reset_is_refused():
    with pytest.raises(gymnasium.error.ResetNeeded):
        make_pool("tiny/CartPole", 1).step(np.zeros(1, np.int64))


@pytest.mark.parametrize(
    "answer",
    [
        (np.zeros((1, 4), np.float64), np.ones(1, np.float32), np.zeros(1, bool), np.zeros(1, bool), {}),
        (np.zeros((2, 4), np.float32), np.ones(2, np.float32), np.zeros(2, bool), np.zeros(2, bool), {}),
        (np.zeros((1, 5), np.float32), np.ones(1, np.float32), np.zeros(1, bool), np.zeros(1, bool), {}),
        (np.zeros((1, 4), np.float32), np.ones(1, np.float64), np.zeros(1, bool), np.zeros(1, bool), {}),
        (np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, int), np.zeros(1, bool), {}),
    ],
)
def test_a_worker_sees_that_an_environment_lies(answer, monkeypatch):
    rows = worker._Rows("tiny/CartPole", 1, {})
    rows.reset([0], [3], None)
    monkeypatch.setattr(rows._envs[0], "step", lambda actions: answer)
    with pytest.raises(worker._LieError):
        rows.step([0], np.zeros(1, np.int64))


def test_frames_arrive_as_they_were_sent():
    left, right = socket.socketpair()
    reader = wire.Reader(right)
    with left, right:
        for size in (3, 100_000):  # the second is more than the buffer holds
            array = np.random.default_rng(size).normal(size=size)
            header = wire.encode({"arrays": wire.layout_of([array])})
            sender = threading.Thread(target=wire.send, args=(left, header, [array]))
            sender.start()
            told, start, end = reader.read()
            sender.join()
            assert told == header
            np.testing.assert_array_equal(reader.arrays([["<f8", [size]]], start, end)[0], array)
            for layout in ([["<f8", [size - 1]]], [["<f8", [size]]] * 2, [["|O", [size]]]):
                with pytest.raises((wire.WireError, TypeError)):
                    reader.arrays(layout, start, end)


@pytest.mark.parametrize("sent", [b"\0" * 9, b"\xff" * 8, b"\0\0\0\0\xff\xff\xff\xff"])
def test_what_is_no_frame_is_refused(sent):
    left, right = socket.socketpair()
    with left, right:
        left.sendall(sent)
        with pytest.raises(wire.WireError):
            wire.Reader(right).read()


def test_half_a_frame_is_an_end():
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(b"\x08\0\0\0\x08\0\0\0half")
        with pytest.raises(EOFError):
            wire.Reader(right).read()


def test_history_against_plain_lists():
    generator = np.random.default_rng(0)
    num_envs = 3
    history = _History(num_envs, gymnasium.spaces.Box(-1, 1, (2,), np.float32))
    plain = [[] for _ in range(num_envs)]
    longest = 0
    for step in range(20000):
        for row in range(num_envs):
            if step == 0 or generator.uniform() < (0.01, 0.02, 0.05)[row]:
                seed = int(generator.integers(99)) if step == 0 or row < 2 or generator.uniform() < 0.5 else None
                plain[row] = [] if seed is not None else plain[row]
                plain[row].append((seed, {"at": step}, []))
                history.reset(row, seed, {"at": step})
        actions = generator.uniform(-1, 1, (num_envs, 2)).astype(np.float32)
        history.step(actions)
        for row in range(num_envs):
            plain[row][-1][2].append(actions[row])
        longest = max(longest, *(sum(len(taken) for *_, taken in episodes) for episodes in plain))
        if step % 97 == 0:
            for row in range(num_envs):
                kept = [(seed, options, taken.tolist()) for seed, options, taken in history.episodes(row)]
                assert kept == [(seed, options, np.array(taken).tolist()) for seed, options, taken in plain[row]]
                assert history.num_steps(row) == len(plain[row][-1][2])
    assert len(history._actions) <= 4 * longest


@pytest.mark.chaos
def test_two_hundred_faults(tmp_path):
    """Faults of all kinds, in steps and resets, sometimes in both workers: training's data does not know of them."""
    chance = np.random.default_rng(7)
    pool, serial = Player(make_chaos(tmp_path, 6)), Player(make_calm(6))
    armed = 0

    def arm_reset(rows):
        nonlocal armed
        if chance.uniform() < 0.1:
            armed += 1
            arm(tmp_path, chance.choice(KINDS[:5]), pool.seeds()[rows[0]], 0)

    while armed < 200:
        if chance.uniform() < 0.4:
            rows = [int(chance.integers(3)), 3 + int(chance.integers(3))]
            for row in rows if chance.uniform() < 0.2 else rows[:1]:
                armed += 1
                arm(tmp_path, chance.choice(KINDS), pool.seeds()[row], pool.steps[row] + 1)
        pool.step(arm_reset), serial.step()
    assert_same(pool.records, serial.records)
    assert len(list(tmp_path.glob("*.done"))) == armed
    assert pool.env.restarts >= armed
    assert _seconds_of(pool.env.incidents) < 5.0


@pytest.mark.chaos
def test_fifty_owners_leave_no_orphan(tmp_path):
    for trial in range(50):
        folder = tmp_path / str(trial)
        folder.mkdir()
        test_no_worker_outlives_its_owner(trial % 2 == 1, folder)


def test_a_worker_cannot_start(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EnvironmentFault, match="did not start: it exited with code 1"):
        WorkerPool("tiny/CartPole", 2, workers=2)
