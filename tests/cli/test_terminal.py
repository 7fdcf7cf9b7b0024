"""Tables and bars: never wider than the terminal, whatever they show."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gputile.cli.live_view import Screen
from gputile.cli.render.terminal import LEAST, bar, level, shortened, since, size, table, width
from gputile.text.terminal import bare

NAMES = st.text("abc-019", min_size=1, max_size=60)


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(0, 10**6).map(str)), min_size=1, max_size=8), st.integers(40, 200))
def test_a_table_is_never_wider_than_the_terminal(rows: list[tuple[str, str, str]], columns: int) -> None:
    lines = table(["NAME", "MODEL", "FREE"], rows, right=(2,), shrink={1: 0, 0: 5}, columns=columns)
    assert len(lines) == len(rows) + 1
    assert all(width(line) <= columns for line in lines)
    for row, line in zip(rows, lines[1:], strict=True):
        assert line.endswith(row[2]), "numbers are never cut"


@given(NAMES, st.integers(LEAST, 80), st.integers(0, 6))
def test_a_short_name_keeps_its_ends(name: str, wide: int, end: int) -> None:
    cut = shortened(name, wide, end)
    assert len(cut) <= wide
    if len(name) > wide:
        assert cut.endswith(name[len(name) - end :])
        assert name.startswith(cut.partition("…")[0])
    else:
        assert cut == name


@given(st.floats(-1, 3), st.integers(1, 60))
def test_a_bar_is_as_long_as_it_should_be(share: float, wide: int) -> None:
    assert width(bar(share, wide)) == wide
    assert len(bar(share, wide, blocks=False)) == wide + 2
    assert width(level(share)) == 1


@pytest.mark.parametrize(
    ("share", "drawn"),
    [
        pytest.param(0.0, "····", id="nothing"),
        pytest.param(0.001, "▏···", id="a-small-share-is-visible"),
        pytest.param(0.5, "██··", id="half"),
        pytest.param(1.7, "████", id="more-than-all"),
    ],
)
def test_bars(share: float, drawn: str) -> None:
    assert bare(bar(share, 4)) == drawn


@pytest.mark.parametrize(("share", "sign"), [(0.0, "·"), (0.05, "▁"), (0.99, "▇"), (1.0, "█"), (1.5, "█")], ids=str)
def test_only_a_full_card_is_drawn_full(share: float, sign: str) -> None:
    assert bare(level(share)) == sign


@pytest.mark.parametrize(
    ("mebibytes", "text"), [(0, "0"), (512, "512Mi"), (81920, "80Gi"), (81559, "79.6Gi"), (15 * 1024**2, "15Ti")]
)
def test_sizes(mebibytes: int, text: str) -> None:
    assert size(mebibytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (119, "119s"),
        (150, "2m30s"),
        (3600, "60m"),
        (3 * 3600 + 720, "3h12m"),
        (90_000, "25h"),
        (10**6, "11d"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert since(seconds) == text


def test_what_did_not_change_is_not_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    for lines in (["a"], ["a"], ["b"]):
        screen.show(lines)
    assert capsys.readouterr().out == "a\n\nb\n\n"
