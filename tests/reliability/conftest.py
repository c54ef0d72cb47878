import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.reliability.warm import Warm


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


@pytest.fixture
def folder(memory_folder):
    path = Path(tempfile.mkdtemp(dir=memory_folder))
    yield path
    shutil.rmtree(path, ignore_errors=True)
