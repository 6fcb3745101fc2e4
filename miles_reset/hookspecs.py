"""The hooks that a plugin implements.

A plugin is a module, or any object, with functions marked :data:`hookimpl`, named by an entry
point of the group ``miles_reset``. Hooks take no arguments and return records; they are called
once, when the registry is built. A whole plugin::

    # miles_reset_lion.py
    from miles_reset import StateSchema, hookimpl, momentum

    @hookimpl
    def miles_reset_schemas():
        return [StateSchema("lion_pytorch.lion_pytorch.Lion", momentum("exp_avg"))]

    # pyproject.toml
    [project.entry-points.miles_reset]
    lion = "miles_reset_lion"
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from miles_reset.checkpoint.reader import CheckpointReader, SafeGlobal
from miles_reset.scheduler import SchedulerRule
from miles_reset.schema import StateSchema
from miles_reset.wrapper import UnwrapRule

PROJECT = "miles_reset"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as the implementation of a hook."""


@hookspec
def miles_reset_schemas() -> Iterable[StateSchema]:  # type: ignore[empty-body]  # a spec has no body
    """Declare what optimizer classes hold.

    Example::

        @hookimpl
        def miles_reset_schemas():
            return [
                StateSchema("torch.optim.nadam.NAdam",
                    momentum("exp_avg"), variance("exp_avg_sq"),
                    history("mu_product", Initial.ONES), clock("step")),
            ]

    Returns:
        One :class:`StateSchema` a class.
    """


@hookspec
def miles_reset_unwrap_rules() -> Iterable[UnwrapRule]:  # type: ignore[empty-body]  # a spec has no body
    """Declare how to reach the optimizers inside wrappers.

    Example::

        @hookimpl
        def miles_reset_unwrap_rules():
            return [
                UnwrapRule("accelerate.optimizer.AcceleratedOptimizer", "optimizer"),
                UnwrapRule("mylib.Lookahead", "base",
                    history("slow", Initial.COPY), clock("count", at="group")),
            ]

    Returns:
        One :class:`UnwrapRule` a class.
    """


@hookspec
def miles_reset_checkpoint_readers() -> Iterable[CheckpointReader]:  # type: ignore[empty-body]  # a spec
    """Declare how to read formats of checkpoints.

    Example::

        from miles_reset.checkpoint import Checkpoint, CheckpointReader, plain_parts

        def open_mylib(source):
            state = source.file("state.pt")
            return Checkpoint(str(source.path), "mylib", {"optimizer": state.part("opt")})

        @hookimpl
        def miles_reset_checkpoint_readers():
            return [CheckpointReader("mylib", lambda path: (path / "mylib.json").exists(), open_mylib)]

    Returns:
        One :class:`~miles_reset.checkpoint.CheckpointReader` a format.
    """


@hookspec
def miles_reset_scheduler_rules() -> Iterable[SchedulerRule]:  # type: ignore[empty-body]  # a spec
    """Declare what schedulers own in param groups, and how they come back.

    Example::

        from miles_reset.scheduler import SchedulerRule

        @hookimpl
        def miles_reset_scheduler_rules():
            return [SchedulerRule("mylib.WarmupDecay", owns=("lr", "weight_decay"))]

    Returns:
        One :class:`~miles_reset.scheduler.SchedulerRule` a class.
    """


@hookspec
def miles_reset_safe_globals() -> Iterable[SafeGlobal]:  # type: ignore[empty-body]  # a spec has no body
    """Name classes and functions that do nothing but hold data, and may be unpickled.

    Example::

        from miles_reset.checkpoint import SafeGlobal

        @hookimpl
        def miles_reset_safe_globals():
            return [SafeGlobal("mylib.config.TrainConfig")]

    Returns:
        One :class:`~miles_reset.checkpoint.SafeGlobal` a name.
    """
