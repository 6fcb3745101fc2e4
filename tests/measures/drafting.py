"""Draft a schema of every optimizer in the tables of the tests, without the plugins that declare them.

Not one of the tests: `make draft-measure` runs it. It prints, for each package, for how many classes a draft
passes the law, and the names of the others. Pytest's ``-k`` chooses packages. Wrappers are left out.
"""

import importlib.util
import sys
import warnings
from collections import defaultdict
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from variants import Case, Table

from miles_reset.drafting import draft_schema
from miles_reset.errors import DraftError

FILES = sorted((Path(__file__).parent.parent / "plugins").glob("test_*.py"))
WANTED = 0.95
AT_MOST = 6
"""So many variants of a class are drafted for at once."""

PASSED: dict[str, list[str]] = defaultdict(list)
FAILED: dict[str, dict[str, str]] = defaultdict(dict)


def tables_in(path: Path) -> list[Table]:
    """Return the tables of a file of tests; none where what it tests is not installed."""
    spec = importlib.util.spec_from_file_location(f"measured_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
    except (ImportError, pytest.skip.Exception):
        return []
    return [value for value in vars(module).values() if isinstance(value, Table)]


def cases_of(table: Table) -> dict[str, list[Case]]:
    """Return the variants of each class in the table's first setting that it runs in."""
    found: dict[str, list[Case]] = defaultdict(list)
    first: dict[str, str] = {}
    for _, key, case in table._cases():
        name, setting = key
        left_out = key in table.refused or key in table.wrong
        if not left_out and setting == first.setdefault(name, setting):
            found[name].append(case)
    return found


ALL = [
    pytest.param(cases, id=f"{cases[0].package}-{name}")
    for path in FILES
    for table in tables_in(path)
    for name, cases in cases_of(table).items()
]


@pytest.mark.parametrize("cases", ALL)
@pytest.mark.timeout(600)
def test_a_draft_passes_the_law(cases: list[Case]) -> None:
    disabled = sorted({point.name for point in metadata.entry_points(group="miles_reset")})
    case, *others = cases[:: max(1, len(cases) // AT_MOST)]
    variants: dict[str, Any] = {str(one.options): one.build for one in others}
    draft = partial(
        draft_schema, case.build, parameters=case.parameters, variants=variants, disabled=disabled
    )
    try:
        drafted = draft()
        why = drafted.failure
    except DraftError as error:
        if "it is a wrapper" in str(error):
            pytest.skip("a wrapper: its rule is written by hand")
        why = str(error)
    if why:
        FAILED[case.package][case.cls.__name__] = why
    else:
        PASSED[case.package].append(case.cls.__name__)


def test_most_drafts_pass(capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = (sum(map(len, one.values())) for one in (PASSED, FAILED))
    with capsys.disabled():
        print()
        for package in sorted({*PASSED, *FAILED}):
            good, bad = PASSED[package], FAILED[package]
            print(f"{package:24} {len(good):4} of {len(good) + len(bad):4}  {', '.join(bad)}")
            for name, why in bad.items():
                print(f"    {name}: {why[:160]}")
        print(f"{'all':24} {passed:4} of {passed + failed:4}")
    assert passed >= WANTED * (passed + failed)
