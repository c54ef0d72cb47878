import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.reliability.compare import snapshot
from tests.reliability.warm import Warm
from tests.reliability.workloads import SEGMENTS, train


@pytest.fixture(scope="session")
def warm():
    process = Warm()
    yield process
    process.close()


@pytest.fixture(scope="session")
def memory_folder():
    """A folder in memory where there is one: what a process leaves when it is killed does not depend on the disk."""
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="rl-lab-tests-", dir=parent))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def reference(warm, memory_folder):
    """Run a workload without a stop, once for all tests; return its folder, which nobody changes, and what is in it."""

    @functools.cache
    def run(name):
        folder, log = memory_folder / f"reference-{name}", memory_folder / f"reference-{name}.log"
        assert warm.run(train(name, folder), log, SEGMENTS) == 0, log.read_text()
        return folder, snapshot(folder)

    return run


@pytest.fixture
def folder(memory_folder):
    path = Path(tempfile.mkdtemp(dir=memory_folder))
    yield path
    shutil.rmtree(path, ignore_errors=True)
