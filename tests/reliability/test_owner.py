"""REL20: a run folder has one owner; the second is told who it is, and a killed owner leaves no lock."""

import fcntl
import os
import signal
import socket
import threading
import time

import pytest

from rl_lab.core.errors import UserError
from rl_lab.run_folder import is_owned, owned
from tests.reliability.workloads import train


def wait_until_owned(folder):
    deadline = time.monotonic() + 30
    while not is_owned(folder):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_two_owners_a_hundred_times(warm, folder):
    run = folder / "run"
    run.mkdir()
    for _ in range(100):
        child = warm.start(["list"], folder / "log", ("own", str(run)))
        wait_until_owned(run)
        with pytest.raises(UserError) as refusal, owned(run):  # at once: the name may not even be written
            pass
        assert f"another process owns this run: process {child.pid} on {socket.gethostname()}" in str(refusal.value)
        child.signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        with owned(run):  # the lock has gone with the process
            assert is_owned(run)
        assert not is_owned(run)


def test_a_second_run_refuses_and_the_first_goes_on(warm, folder):
    run = folder / "run"
    first = warm.start(train("dqn", run), folder / "first", ("slow_hooks", 0.05))
    wait_until_owned(run)
    assert warm.run(train("dqn", run), folder / "second") == 2
    said = (folder / "second").read_text()
    assert f"another process owns this run: process {first.pid} on" in said
    assert "remedy" in said
    first.signal(signal.SIGTERM)
    assert first.wait() == 75
    assert warm.run(train("dqn", run), folder / "third") == 0


def test_asking_whether_a_run_is_owned_does_not_lock_out_its_owner(tmp_path):
    with owned(tmp_path):
        pass
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            is_owned(tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            with owned(tmp_path):
                pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "text", ["", "process 999999999 on HERE\n", "\x1b[2J rubbish", "process 1 on somewhere else\n"]
)
def test_strange_names_in_a_lock(tmp_path, text):
    (tmp_path / ".lock").write_text(text.replace("HERE", socket.gethostname()))
    with owned(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    (tmp_path / ".lock").write_text(text.replace("HERE", socket.gethostname()))
    with open(tmp_path / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process owns this run") as refusal, owned(tmp_path):
            pass
    assert "\x1b" not in str(refusal.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), owned(tmp_path / "file" / "run"):
        pass
