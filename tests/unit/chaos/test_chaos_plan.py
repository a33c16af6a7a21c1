"""Plans of faults: read with clear errors, and the same each time for a seed."""

from pathlib import Path

import pytest

from eagleray.actors.chaos import ChaosPlan, load_plan
from eagleray.platform.errors import UsageError


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 3", "needs `faults` or `storm`"),
        ("faults: [{kind: burn}]", "faults.0.kind"),
        ("faults: [{role: store, rank: 1}]", "role store has no rank"),
        ("faults: [{kind: hang, role: loader}]", "role loader cannot hang"),
        ("storm: {kind: hang, roles: [process, gang]}", "role gang cannot hang"),
        ("faults: [{stepp: 1}]", "faults.0.stepp"),
        ("storm: {every_s: 0}", "storm.every_s"),
        ("storm: {roles: []}", "storm.roles"),
        ("faults: [", "is not YAML"),
        ("- 1", "the plan"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_plan(path)
    assert problem in caught.value.what


def test_a_plan_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.yaml cannot be read"):
        load_plan(tmp_path / "gone.yaml")


def test_a_storm_is_the_same_for_the_same_seed() -> None:
    plan = ChaosPlan.model_validate(
        {"seed": 5, "storm": {"roles": ["process", "loader"], "every_s": "20s", "count": 50}}
    )
    gusts = list(plan.gusts())
    assert gusts == list(plan.gusts())
    assert len(gusts) == 50
    assert all(10 <= wait_s <= 30 for wait_s, _ in gusts)
    assert {fault.role for _, fault in gusts} == {"process", "loader"}
    assert gusts != list(plan.model_copy(update={"seed": 6}).gusts())
