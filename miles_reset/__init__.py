"""Bring any optimizer, through any wrapper, to what a freshly built one would do next.

A trainer calls one function::

    from miles_reset import reset_optimizer_states

    print(reset_optimizer_states(optimizer))

A plugin declares what an optimizer remembers; see :mod:`miles_reset.hookspecs` for a whole one::

    from miles_reset import StateSchema, clock, hookimpl, momentum, variance

    @hookimpl
    def miles_reset_schemas():
        return [StateSchema("mylib.MyAdam", momentum("m"), variance("v"), clock("step"))]
"""

import typing

from miles_reset.discovery import default_registry, load_registry
from miles_reset.errors import (
    CheckpointError,
    ConflictError,
    PluginError,
    PolicyError,
    RankDisagreementError,
    ResetError,
    UndeclaredStateError,
    UnknownOptimizerError,
    UnreachableStateError,
    UnsafeCheckpointError,
    UnsupportedOptimizerState,
)
from miles_reset.hookspecs import hookimpl
from miles_reset.registry import Registry
from miles_reset.report import ResetReport
from miles_reset.reset import ResetPlan, plan_reset, reset_optimizer_states
from miles_reset.schema import (
    Initial,
    Role,
    Slot,
    StateSchema,
    clock,
    history,
    kept,
    momentum,
    scratch,
    variance,
)
from miles_reset.wrapper import UnwrapRule

if typing.TYPE_CHECKING:
    from miles_reset.checkpoint.opening import open_checkpoint
    from miles_reset.partial import PartialReport, reset_some_states
    from miles_reset.policy import ResumePolicy
    from miles_reset.receipt import ResumeReport
    from miles_reset.resume import ResumePlan, plan_resume

_LATER = {
    "PartialReport": "partial",
    "ResumePlan": "resume",
    "ResumePolicy": "policy",
    "ResumeReport": "receipt",
    "open_checkpoint": "checkpoint.opening",
    "plan_resume": "resume",
    "reset_some_states": "partial",
}
"""What is imported when it is first asked for: a whole reset needs neither pydantic nor YAML."""


def __getattr__(name: str) -> typing.Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


__all__ = [
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
