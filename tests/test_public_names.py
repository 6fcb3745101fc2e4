"""The names that users import: they change here on purpose, or not at all."""

import inspect

import pytest

import miles_reset

NAMES = [
    "CheckpointError",
    "ConflictError",
    "Initial",
    "PartialReport",
    "PluginError",
    "PolicyError",
    "RankDisagreementError",
    "Registry",
    "ResetError",
    "ResetPlan",
    "ResetReport",
    "ResumePlan",
    "ResumePolicy",
    "ResumeReport",
    "Role",
    "Slot",
    "StateSchema",
    "UndeclaredStateError",
    "UnknownOptimizerError",
    "UnreachableStateError",
    "UnsafeCheckpointError",
    "UnsupportedOptimizerState",
    "UnwrapRule",
    "clock",
    "default_registry",
    "history",
    "hookimpl",
    "kept",
    "load_registry",
    "momentum",
    "open_checkpoint",
    "plan_reset",
    "plan_resume",
    "reset_optimizer_states",
    "reset_some_states",
    "scratch",
    "variance",
]


def test_the_public_names_are_these_in_this_order() -> None:
    assert miles_reset.__all__ == NAMES == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    docstring = inspect.getdoc(getattr(miles_reset, name))
    assert docstring
    assert docstring.splitlines()[0].endswith((".", "?", ":"))


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(miles_reset, name))])
def test_the_public_methods_of_a_public_class_say_what_they_do(name: str) -> None:
    cls = getattr(miles_reset, name)
    silent = [
        method
        for method, value in vars(cls).items()
        if not method.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod)))
        and not inspect.getdoc(getattr(cls, method))
    ]
    assert silent == []


def test_nothing_else_is_public_but_the_modules() -> None:
    extra = {name for name in vars(miles_reset) if not name.startswith("_")} - set(NAMES)
    assert {name for name in extra if not inspect.ismodule(getattr(miles_reset, name))} == set()
