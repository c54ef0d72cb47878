"""UserError: one screen with key, value, nearest names and remedy."""

import pytest

from rl_lab.core.errors import UserError


def lines(error):
    return str(error).split("\n")


def test_says_everything_in_order():
    error = UserError(
        "there is no such phase type",
        key="training.phases[0].type",
        value="onlin",
        valid=["online", "offline", "eval_only"],
        remedy="choose one of them",
    )
    assert lines(error) == [
        "there is no such phase type",
        "  key:      training.phases[0].type",
        "  value:    'onlin'",
        "  nearest:  online, offline",
        "  valid:    eval_only, offline, online",
        "  remedy:   choose one of them",
    ]
    assert error.key == "training.phases[0].type"
    assert error.value == "onlin"
    assert error.valid == ["eval_only", "offline", "online"]
    assert error.remedy == "choose one of them"


def test_says_only_what_it_knows():
    assert lines(UserError("it is broken")) == ["it is broken"]
    assert lines(UserError("it is broken", remedy="mend it")) == ["it is broken", "  remedy:   mend it"]
    assert "nearest" not in str(UserError("no", value="zzzz", valid=["online"]))
    assert "nearest" not in str(UserError("no", valid=["online"]))


def test_none_is_a_value_too():
    error = UserError("nothing was given", key="environment.id", value=None)
    assert "  value:    None" in lines(error)
    assert "  value:    None" in lines(error.under("x"))
    assert "value" not in str(UserError("nothing was given").under("x"))


def test_stays_on_one_screen():
    error = UserError("too much", value="x" * 10_000, valid=[f"name_{i:04}" for i in range(1000)])
    assert len(str(error)) < 1000
    assert len(lines(error)) < 10
    assert "(1000 in all)" in str(error)
    assert "…" in str(error)


def test_valid_names_may_be_anything_that_has_a_name():
    error = UserError("no", value=4, valid=[3, 1, 3])
    assert error.valid == ["1", "3"]
    assert "  valid:    1, 3" in lines(error)


@pytest.mark.parametrize(
    ("key", "expected"),
    [("type", "training.phases[2].type"), (None, "training.phases[2]"), ("a.b", "training.phases[2].a.b")],
)
def test_under_places_the_key_below_a_parent(key, expected):
    error = UserError("two\nlines", key=key, value="onlin", valid=["online"], remedy="choose")
    moved = error.under("training.phases[2]")
    assert isinstance(moved, UserError)
    assert moved.key == expected
    assert (moved.problem, moved.value, moved.valid, moved.remedy) == ("two\nlines", "onlin", ["online"], "choose")
    same = UserError("two\nlines", key=expected, value="onlin", valid=["online"], remedy="choose")
    assert str(moved) == str(same)
    assert error.key == key


def test_under_can_be_repeated():
    assert UserError("no", key="c").under("b").under("a").key == "a.b.c"
    assert lines(UserError("no", key="c").under("b").under("a")) == ["no", "  key:      a.b.c"]


def test_is_an_exception_that_prints_itself():
    with pytest.raises(UserError, match="remedy:   mend it"):
        raise UserError("it is broken", remedy="mend it")


def test_the_nearest_name_may_be_written_in_capitals():
    error = UserError("no such game", key="task", value="boxing", valid=["Boxing", "Pong", "Qbert"])
    assert "nearest:  Boxing" in str(error)
