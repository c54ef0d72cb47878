import io
import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.orchestration import dashboard
from rl_lab.orchestration.dashboard import Dashboard, Status, chart, duration, most_important, number, panel

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def a_status(**changes):
    values = {
        "name": "dqn_cartpole",
        "phase": "main",
        "phase_progress": 0.4,
        "phase_index": 1,
        "num_phases": 3,
        "env_steps": 24_690,
        "agent_steps": 12_345,
        "updates": 3_000,
        "episodes": 123,
        "total_steps": 100_000,
        "steps_per_second": 2345.6,
        "eta_seconds": 4000.0,
        "metrics": {"train/q": 7.0, "train/td_loss": 0.0123, "collect/episode_return": 120.5},
        "evaluations": [(1000, 20.0), (2000, 480.0), (3000, 470.0)],
        "checkpoint_age_seconds": 12.0,
        "warnings": ["the disk is nearly full"],
    }
    return Status(**(values | changes))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_it_prints_plain_lines_at_most_every_ten_seconds(clock):
    stream = io.StringIO()
    shown = Dashboard(stream=stream)
    shown.start(a_status())
    for _ in range(100):
        clock[0] += 0.25
        shown.update(a_status())
    shown.close()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert lines[0] == "dqn_cartpole: 3 phases, 100,000 agent steps planned"
    assert lines[1] == "warning: the disk is nearly full"
    assert len(lines) == 4  # 25 s: two lines of progress
    for text in ("phase 2/3 main", "40 %", "env_steps 24,690", "agent_steps 12,345/100,000", "updates 3,000"):
        assert text in lines[2]
    for text in ("episodes 123", "collect/episode_return 120.5", "td_loss 0.0123", "2,346 steps/s", "ETA 1:06:40"):
        assert text in lines[2]


def test_every_evaluation_has_a_line_of_its_own(clock):
    stream = io.StringIO()
    shown = Dashboard(stream=stream)
    shown.start(a_status())
    for _ in range(5):
        shown.evaluation(a_status(warnings=[]))
    shown.message("stopped [early]")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 7
    assert lines[1].startswith("evaluation at 3,000 env_steps: return 470 (best 480)  env_steps 24,690")
    assert lines[-1] == "stopped [early]"


def test_the_panel_shows_everything(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    stream = io.StringIO()
    shown = Dashboard(console=True, stream=stream)
    shown.start(a_status())
    shown.message("a [message] stays")
    shown.evaluation(a_status(agent_steps=54_321))
    shown.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for word in (
        *("dqn_cartpole", "phase 2/3 main", "40 %", "env_steps 24,690", "agent_steps 54,321 / 100,000"),
        *("updates 3,000", "episodes 123", "2,346 steps/s", "ETA 1:06:40", "checkpoint 0:00:12 ago"),
        *("train/td_loss 0.0123", "collect/episode_return 120.5", "evaluation 470 at 3,000", "best 480"),
        *("warning: the disk is nearly full", "a [message] stays", "█"),
    ):
        assert word in text, word


def test_the_panel_is_not_redrawn_more_often_than_a_person_can_see(clock):
    stream = io.StringIO()
    with Dashboard(console=True, stream=stream) as shown:
        shown.start(a_status())
        before = len(stream.getvalue())
        for _ in range(100):
            clock[0] += 0.001
            assert not shown.due
            shown.update(a_status())
        assert len(stream.getvalue()) == before
        clock[0] += 1.0
        assert shown.due
        shown.update(a_status())
        assert len(stream.getvalue()) > before


def test_the_cursor_comes_back_when_the_run_raises():
    stream, stdout = io.StringIO(), sys.stdout
    shown = Dashboard(console=True, stream=stream)

    def run():
        with shown:
            shown.start(a_status())
            assert HIDE in stream.getvalue()
            assert SHOW not in stream.getvalue()
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run()
    assert stream.getvalue().rindex(SHOW) > stream.getvalue().rindex(HIDE)
    assert sys.stdout is stdout
    shown.close()


def test_the_last_picture_is_the_last_status():
    stream = io.StringIO()
    with Dashboard(console=True, stream=stream) as shown:
        shown.start(a_status(episodes=1))
        shown.evaluation(a_status(episodes=77))
    assert "77" in stream.getvalue()[-4000:]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("ending", ["raise RuntimeError('boom')", "sys.exit(0)"])
def test_in_a_terminal_it_is_live_and_restores_it_without_close(ending):
    import pty

    program = (
        "import sys\nfrom rl_lab.orchestration.dashboard import Dashboard, Status\n"
        "d = Dashboard()\nd.start(Status('my_run', phase='main'))\nd.update(Status('my_run', phase='main'))\n" + ending
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=slave, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    output = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux reports the end of a terminal so
            break
        if not part:
            break
        output += part
    process.wait(timeout=10)
    os.close(master)
    text = output.decode()
    assert "my_run" in text
    assert text.count(HIDE) == text.count(SHOW) == 1
    assert text.index(HIDE) < text.index(SHOW)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    shown = Dashboard(stream=stream)
    shown.start(a_status())
    shown.evaluation(a_status())
    assert "\x1b" not in stream.getvalue()
    assert "evaluation at" in stream.getvalue()


class BrokenStream(io.StringIO):
    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError("nobody reads")


@pytest.mark.parametrize("console", [True, False, None])
@pytest.mark.parametrize("kind", ["broken", "closed"])
def test_a_stream_that_fails_does_not_stop_the_run(console, kind, clock):
    stream = BrokenStream() if kind == "broken" else io.StringIO()
    if kind == "closed":
        stream.close()
    stdout = sys.stdout
    shown = Dashboard(console=console, stream=stream)
    shown.start(a_status())
    for _ in range(3):
        clock[0] += 60
        shown.update(a_status())
        shown.evaluation(a_status())
        shown.message("hello")
    shown.close()
    assert sys.stdout is stdout


def test_a_panel_that_fails_becomes_plain_lines(monkeypatch):
    stream = io.StringIO()
    shown = Dashboard(console=True, stream=stream)
    shown.start(a_status())

    def broken(*_):
        raise ZeroDivisionError("in the panel")

    monkeypatch.setattr(dashboard, "panel", broken)
    shown.evaluation(a_status())
    shown.evaluation(a_status())
    assert stream.getvalue().rindex(SHOW) > stream.getvalue().rindex(HIDE)
    assert "could not be drawn: ZeroDivisionError: in the panel; the run goes on" in stream.getvalue()
    assert stream.getvalue().rstrip().splitlines()[-1].startswith("evaluation at 3,000")


def test_a_status_that_cannot_be_shown_does_not_stop_the_run(clock):
    stream = io.StringIO()
    shown = Dashboard(stream=stream)
    clock[0] += 60
    shown.update(a_status(metrics={"loss": "text"}))
    assert "the run goes on" in stream.getvalue()


def test_an_ascii_stream_is_served():
    raw = io.BytesIO()
    for console in (True, False):
        stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
        with Dashboard(console=console, stream=stream) as shown:
            shown.start(a_status(name="café"))
            shown.evaluation(a_status(name="café"))
            shown.message("naïve")
        stream.detach()
    text = raw.getvalue().decode("ascii")
    assert "evaluation at 3,000" in text
    assert "na?ve" in text


names = st.text(max_size=30)
floats = st.floats()


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 150),
    height=st.integers(1, 60),
    unicode=st.booleans(),
    status=st.builds(
        Status,
        name=names,
        phase=names,
        phase_progress=floats,
        phase_index=st.integers(0, 20),
        num_phases=st.integers(1, 20),
        env_steps=st.integers(0, 10**15),
        total_steps=st.none() | st.integers(1, 10**12),
        steps_per_second=floats,
        updates_per_second=floats,
        eta_seconds=st.none() | floats,
        metrics=st.dictionaries(names, floats, max_size=12),
        evaluations=st.lists(st.tuples(st.integers(0, 10**9), floats), max_size=30).map(sorted),
        checkpoint_age_seconds=st.none() | floats,
        warnings=st.lists(names, max_size=5),
    ),
)
def test_any_status_fits_any_terminal(width, height, unicode, status):
    from rich.console import Console

    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    for line in console.render_lines(panel(status, width, height, unicode), pad=False):
        assert sum(segment.cell_length for segment in line) <= width
    dashboard.progress_line(status)
    dashboard.evaluation_line(status)


def test_while_only_updates_happen_their_rate_is_shown():
    learning = a_status(steps_per_second=0.0, updates_per_second=4.5, eta_seconds=None)
    assert dashboard.progress_line(learning).endswith("  4.5 updates/s")
    both = a_status(steps_per_second=2.0, updates_per_second=4.5, eta_seconds=None)
    assert dashboard.progress_line(both).endswith("  2 steps/s")


def test_chart_rises_with_the_values():
    levels = " ▁▂▃▄▅▆▇█"

    def heights(lines):
        return [sum(levels.index(line[i]) for line in lines) for i in range(len(lines[0]))]

    rising = [(i * 10, float(i**2)) for i in range(12)]
    for num_rows in (1, 4):
        found = heights(chart(rising, 40, num_rows))
        assert len(found) == 12
        assert found == sorted(found)
        assert (found[0], found[-1]) == (1, 8 * num_rows)
    assert heights(chart([(i, float(i)) for i in range(1000)], 40, 2))[-1] == 16
    assert len(chart([(i, float(i)) for i in range(1000)], 40, 2)[0]) == 40
    assert chart([(0, 3.0), (5, 3.0)], 40, 1) == ["██"]
    assert chart([], 40, 3) == chart([(0, math.nan)], 40, 3) == []
    assert all(character.isascii() for line in chart(rising, 40, 4, unicode=False) for character in line)


def test_returns_and_losses_come_before_the_rest():
    metrics = {
        "time/fps": 1.0,
        "eval/return_mean": 2.0,
        "train/q": 3.0,
        "train/loss": 4.0,
        "collect/episode_return": 5.0,
    }
    assert [key for key, _ in most_important(metrics, 9)] == [
        *("collect/episode_return", "train/loss", "train/q", "time/fps", "eval/return_mean")
    ]
    assert most_important(metrics, 1) == [("collect/episode_return", 5.0)]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (475.0, "475"), (0.012345, "0.01235"), (1234.5, "1,234"), (-12.345, "-12.35"), (3e9, "3.00e+09")],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (90061, "1d 1:01:01"), (-5, "0:00:00"), (math.inf, "?")],
)
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text
