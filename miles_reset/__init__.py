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

from miles_reset.discovery import default_registry, load_registry
from miles_reset.errors import (
    ConflictError,
    PluginError,
    ResetError,
    UndeclaredStateError,
    UnknownOptimizerError,
    UnreachableStateError,
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

__all__ = [
    "ConflictError",
    "Initial",
    "PluginError",
    "Registry",
    "ResetError",
    "ResetPlan",
    "ResetReport",
    "Role",
    "Slot",
    "StateSchema",
    "UndeclaredStateError",
    "UnknownOptimizerError",
    "UnreachableStateError",
    "UnsupportedOptimizerState",
    "UnwrapRule",
    "clock",
    "default_registry",
    "history",
    "hookimpl",
    "kept",
    "load_registry",
    "momentum",
    "plan_reset",
    "reset_optimizer_states",
    "scratch",
    "variance",
]
