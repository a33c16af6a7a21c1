"""Version skew is refused before anything runs, naming both sides."""

import platform

import pytest

from eagleray.platform.cluster.versions import Versions, VersionSkewError, check_same
from eagleray.platform.errors import InfeasibleError

OURS = Versions("2.60.0", "3.11.7", "0.1.0")


def test_here_is_this_interpreter() -> None:
    assert Versions.here().python == platform.python_version()


def test_equal_versions_pass() -> None:
    check_same(OURS, OURS, "host:1")


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (Versions("2.59.0", "3.11.7", "0.1.0"), "ray 2.59.0 there, 2.60.0 here"),
        (Versions("2.60.0", "3.11.8", "0.1.0"), "python 3.11.8 there, 3.11.7 here"),
        (Versions("2.60.0", "3.11.7", "0.2.0"), "eagleray 0.2.0 there, 0.1.0 here"),
    ],
)
def test_any_difference_is_refused_with_both_versions(theirs: Versions, named: str) -> None:
    with pytest.raises(VersionSkewError, match=named) as refused:
        check_same(theirs, OURS, "host:1")
    assert isinstance(refused.value, InfeasibleError)
    assert "host:1" in refused.value.what


def test_several_differences_are_named_at_once() -> None:
    with pytest.raises(VersionSkewError, match=r"ray .*; eagleray "):
        check_same(Versions("1", "3.11.7", "2"), OURS, "host:1")


def test_what_a_cluster_does_not_tell_is_not_held_against_it() -> None:
    check_same(Versions("2.60.0", "3.11.7", ""), OURS, "host:1")
