import time

import pytest

from rl_lab.cli import doctor, main

GOOD = doctor.Family("good world", "json", "nothing", "print('fine')")


@pytest.fixture
def quick(monkeypatch):
    """Keep torch out: it takes seconds to import in another process."""
    answer = '{"cuda": "13.0", "threads": 1, "vectors": "AVX512", "gpus": ["Imaginary 9000, 80 GiB, capability 9.0"]}'
    monkeypatch.setattr(doctor, "_TORCH", f"print('noise')\nprint({answer!r})")
    monkeypatch.setattr(doctor, "FAMILIES", (GOOD,))


def test_report_has_versions_machine_and_environments(quick, monkeypatch, capsys):
    families = (
        GOOD,
        doctor.Family("absent world", "no_such_module_here", "rl-lab[absent]", ""),
        doctor.Family("absent part", "json.no_such_part.x", "rl-lab[part]", ""),
        doctor.Family("half a world", "json", "rl-lab[half]", "import no_such_imageio"),
        doctor.Family("broken world", "json", "nothing", "raise RuntimeError('no display')"),
        doctor.Family("deadly world", "json", "nothing", "import os; os.kill(os.getpid(), 11)"),
    )
    monkeypatch.setattr(doctor, "FAMILIES", families)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for package in ("python", "rl-lab", "torch", "numpy", "gymnasium", "hydra-core"):
        assert any(line.split()[:1] == [package] and line.split()[1][0].isdigit() for line in text.splitlines()), (
            package
        )
    for word in ("platform", "cores", "memory", "GiB free here", "OMP_NUM_THREADS", "AVX512", doctor.processor_name()):
        assert word in text
    assert "Imaginary 9000" in text
    lines = {line.strip()[2:15].strip(): line for line in text.splitlines() if line.startswith("  ")}
    assert lines["good world"].split() == ["✓", "good", "world"]
    assert 'pip install "rl-lab[absent]"' in lines["absent world"]
    assert 'pip install "rl-lab[part]"' in lines["absent part"]
    assert "No module named 'no_such_imageio': pip install \"rl-lab[half]\"" in lines["half a world"]
    assert "✗" in lines["broken world"]
    assert "pip" not in lines["broken world"]
    assert "RuntimeError: no display" in lines["broken world"]
    assert "signal 11" in lines["deadly world"]
    assert len(text.splitlines()) <= 50


def test_an_import_that_hangs_is_given_up(quick):
    start = time.monotonic()
    works, text = doctor.attempt("import time; time.sleep(60)", timeout=0.3)
    assert not works
    assert "0.3 s" in text
    assert time.monotonic() - start < 10


def test_status_tells_whether_the_essentials_work(quick, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "FAMILIES", (doctor.Family("tiny (ours)", "json", "x", "raise OSError('gone')"),))
    assert main(["doctor"]) == 1
    monkeypatch.setattr(doctor, "FAMILIES", (GOOD,))
    monkeypatch.setattr(doctor, "_TORCH", "import no_such_torch")
    assert main(["doctor"]) == 1
    assert "No module named 'no_such_torch'" in capsys.readouterr().out


def test_rendering_is_tried_only_where_mujoco_is(quick, monkeypatch, capsys):
    main(["doctor"])
    if not doctor._is_installed("mujoco"):
        assert "MUJOCO_GL=" not in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_is_installed", lambda module: True)
    monkeypatch.setattr(doctor, "_RENDER", "import os\nassert os.environ['MUJOCO_GL'] == 'osmesa', 'no such back-end'")
    main(["doctor"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "MUJOCO_GL=" in line]
    assert [(line[0], line[1]) for line in lines if len(line) > 1][-3:] == [
        ("✗", "MUJOCO_GL=egl"),
        ("✓", "MUJOCO_GL=osmesa"),
        ("✗", "MUJOCO_GL=glfw"),
    ]


def test_every_family_of_the_lab_is_tried():
    names = [family.name for family in doctor.FAMILIES]
    assert names == ["tiny (ours)", "classic control", "box2d", "mujoco", "dm_control", "atari", "minigrid"]
    for family in doctor.FAMILIES:
        compile(family.program, family.name, "exec")
