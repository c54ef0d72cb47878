import gymnasium
import pytest


@pytest.fixture
def register():
    """Register environment classes for one test; returns the id."""
    registered = []

    def add(env_class):
        name = f"Toy{env_class.__name__}-v0"
        gymnasium.register(id=name, entry_point=env_class)
        registered.append(name)
        return name

    yield add
    for name in registered:
        del gymnasium.registry[name]
