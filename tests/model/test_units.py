"""Quantities as Kubernetes writes them, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gputile.model.units import Quantity, host_mebibytes, millicores, quantity, show_memory, unix_seconds


@pytest.mark.parametrize(
    ("written", "value"),
    [
        pytest.param(7, Fraction(7), id="a-number"),
        pytest.param("7", Fraction(7), id="a-number-in-text"),
        pytest.param(" 7 ", Fraction(7), id="blanks-around-it"),
        pytest.param(0.1, Fraction(1, 10), id="a-float-is-what-was-written"),
        pytest.param("0.1", Fraction(1, 10), id="a-decimal-is-exact"),
        pytest.param(".5", Fraction(1, 2), id="no-digit-before-the-point"),
        pytest.param("5.", Fraction(5), id="no-digit-after-the-point"),
        pytest.param("+5", Fraction(5), id="a-plus-sign"),
        pytest.param("-5", Fraction(-5), id="a-minus-sign"),
        pytest.param("100n", Fraction(1, 10**7), id="nano"),
        pytest.param("5u", Fraction(5, 10**6), id="micro"),
        pytest.param("500m", Fraction(1, 2), id="milli"),
        pytest.param("3k", Fraction(3000), id="k-is-a-thousand"),
        pytest.param("3Ki", Fraction(3072), id="Ki-is-1024"),
        pytest.param("1M", Fraction(10**6), id="M"),
        pytest.param("1Mi", Fraction(2**20), id="Mi"),
        pytest.param("1.5Gi", Fraction(3 * 2**29), id="Gi-with-a-fraction"),
        pytest.param("1T", Fraction(10**12), id="T"),
        pytest.param("1Pi", Fraction(2**50), id="Pi"),
        pytest.param("1E", Fraction(10**18), id="E-alone-is-exa"),
        pytest.param("1Ei", Fraction(2**60), id="Ei"),
        pytest.param("1E3", Fraction(1000), id="E-with-a-number-is-an-exponent"),
        pytest.param("1e-3", Fraction(1, 1000), id="a-negative-exponent"),
        pytest.param(1e22, Fraction(10**22), id="a-float-that-prints-with-an-exponent"),
    ],
)
def test_quantity(written: Quantity, value: Fraction) -> None:
    assert quantity(written) == value


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(written, id=name)
        for name, written in {
            "none": None,
            "true": True,
            "empty": "",
            "a-word": "two",
            "a-point": ".",
            "a-suffix-alone": "Gi",
            "a-capital-K": "3K",
            "small-letters": "3gi",
            "bytes": "3GB",
            "two-suffixes": "3kM",
            "a-blank-inside": "3 Gi",
            "hexadecimal": "0x10",
            "two-signs": "--3",
            "not-a-number": float("nan"),
            "infinity": float("inf"),
            "an-exponent-of-three-digits": "1e100",
            "forty-digits": "9" * 40,
            "a-comma": "1,5",
            "a-line-break-inside": "1\n2",
        }.items()
    ],
)
def test_no_quantity(written: Quantity) -> None:
    assert quantity(written) is None


def test_a_number_too_long_to_print_is_no_quantity() -> None:
    assert quantity(16**5000) is None


@settings(max_examples=100)
@given(st.text())
def test_any_text_is_a_quantity_or_none(text: str) -> None:
    assert quantity(text) is None or isinstance(quantity(text), Fraction)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        pytest.param("0.5", 500, id="half-a-core"),
        pytest.param("500m", 500, id="in-millicores"),
        pytest.param(2, 2000, id="two-cores"),
        pytest.param("0.0001", 1, id="rounded-up"),
        pytest.param("1500001u", 1501, id="rounded-up-from-micro"),
        pytest.param(0, 0, id="nothing"),
        pytest.param("many", None, id="no-quantity"),
        pytest.param(None, None, id="none"),
    ],
)
def test_millicores(written: Quantity, value: int | None) -> None:
    assert millicores(written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        pytest.param("1Gi", 1024, id="a-GiB"),
        pytest.param(2**20, 1, id="bytes"),
        pytest.param("1", 1, id="a-byte-is-rounded-up"),
        pytest.param("1G", 954, id="decimal-giga-is-rounded-up"),
        pytest.param("32819852Ki", 32051, id="Ki-as-the-kubelet-writes-it"),
        pytest.param(0, 0, id="nothing"),
        pytest.param("much", None, id="no-quantity"),
    ],
)
def test_host_mebibytes(written: Quantity, value: int | None) -> None:
    assert host_mebibytes(written) == value


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        pytest.param(3072, "3 GiB", id="whole-GiB"),
        pytest.param(3000, "3000 MiB", id="others-stay-MiB"),
        pytest.param(512, "512 MiB", id="less-than-a-GiB"),
        pytest.param(0, "0 MiB", id="nothing"),
    ],
)
def test_show_memory(amount: int, text: str) -> None:
    assert show_memory(amount) == text


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        pytest.param("1970-01-01T00:01:00Z", 60.0, id="as-kubernetes-writes-it"),
        pytest.param("1970-01-01T00:01:00.250000Z", 60.25, id="with-microseconds-as-in-a-lease"),
        pytest.param("1970-01-01T02:01:00+02:00", 60.0, id="with-an-offset"),
        pytest.param("1970-01-01T00:01:00", 60.0, id="without-an-offset-it-is-utc"),
        pytest.param("0001-01-01T00:00:00Z", -62135596800.0, id="the-first-second-of-the-calendar"),
        pytest.param("yesterday", None, id="no-time"),
        pytest.param("", None, id="empty"),
        pytest.param(None, None, id="missing"),
    ],
)
def test_a_time_in_seconds_since_1970(written: str | None, seconds: float | None) -> None:
    assert unix_seconds(written) == seconds
