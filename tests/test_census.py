"""What a census counts, and how it is told."""

import json
from pathlib import Path
from typing import Any

import census
import pytest
import torch
from variants import Case, Setting, Table

HERE = Path(__file__).parent
FOUND = HERE / "data" / "census.json"
PAGE = HERE.parent / "docs" / "supported-optimizers.md"


def found_in(name: str, **options: Any) -> census.Finding:
    cls = getattr(torch.optim, name)
    (case,) = (
        param.values[0] for param in Table({name: cls}, {name: [options]}, {"": Setting()}, {}).cases()
    )
    assert isinstance(case, Case)
    found = census.begin(case)
    census.look_into(case, found)
    return found


@pytest.mark.parametrize(
    ("name", "options", "in_place", "zeroed", "cleared"),
    [
        ("AdamW", {}, True, "right", "right"),
        ("NAdam", {}, True, "wrong", "right"),
        ("SGD", {"momentum": 0.9}, True, "right", "right"),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}, False, "wrong", "right"),
    ],
)
def test_a_case_says_what_each_way_leads_to(
    name: str, options: dict[str, Any], in_place: bool, zeroed: str, cleared: str
) -> None:
    found = found_in(name, **options)
    assert found.target == f"torch.optim.{name.lower()}.{name}"
    assert found.in_place == in_place
    assert found.naive == {"zero everything": zeroed, "state.clear()": cleared}


def test_rules_are_those_that_the_schema_states() -> None:
    assert found_in("NAdam").rules == {
        "step": "0",
        "exp_avg": "0",
        "exp_avg_sq": "0",
        "mu_product": "1 (scalar)",
    }
    assert found_in("Adagrad").rules["sum"] == "default initial_accumulator_value"


def of_class(**other: Any) -> dict[str, Any]:
    whole = {"package": "p", "version": "1", "variants": 2, "passed": 2, "in_place": 1, "failed": []}
    return {
        **whole,
        "rules": {"a": "0", "b": "0", "c": "1"},
        "naive": {name: {} for name in census.WAYS},
        **other,
    }


def test_what_is_new_gone_or_changed_is_named() -> None:
    old = {"p.A": of_class(), "p.B": of_class(), "p.C": of_class()}
    new = {
        "p.A": of_class(version="2", rules={"a": "0", "b": "1", "d": "0"}),
        "p.B": of_class(version="2", failed=["test: off by 3"]),
        "p.D": of_class(version="2"),
    }
    assert list(census.compare(old, old)) == []
    assert list(census.compare(old, new)) == [
        "p: 1 -> 2",
        "p.A: 'b' is 1, and was 0",
        "p.A: 'c' is gone, and was 1",
        "p.A: 'd' is 0, and was not there",
        "p.B: test: off by 3",
        "p.C: gone",
        "p.D: new",
    ]


def test_the_page_is_what_was_found() -> None:
    """All but the last two tables, which need all packages to be there."""
    classes = json.loads(FOUND.read_text())
    assert all(one["passed"] == one["variants"] for one in classes.values())
    written = "\n".join(census.tables(classes))
    assert PAGE.read_text().split("\n## Wrappers\n")[0].rstrip("\n") == written.rstrip("\n")
