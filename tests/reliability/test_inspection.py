"""An inspection never moves what training uses: with and without it a run is the same."""

from tests.reliability.compare import differences, snapshot
from tests.reliability.workloads import train

MORE = ("environment.max_episode_steps=640", "workflow.gamma=0.9", "evaluation.every=40")


def test_training_does_not_notice_that_it_is_looked_at(warm, folder):
    found = []
    for look in ("true", "false"):
        words = train("tdmpc2", folder / look, *MORE, f"evaluation.inspect={look}")
        assert warm.run(words, folder / "log") == 0, (folder / "log").read_text()
        found.append({key: value for key, value in snapshot(folder / look).items() if not key.startswith("record")})
    assert len(list((folder / "true" / "pictures").iterdir())) > 2
    assert not (folder / "false" / "pictures").exists()
    # The evaluation's own generator has drawn more; it is seeded anew before every evaluation.
    assert differences(*found) == ["generators/torch/evaluate/act"]
