"""Everything that miles_reset raises on purpose.

::

    ResetError
     + UnsupportedOptimizerState
     |  - UnknownOptimizerError
     |  - UndeclaredStateError
     |  - UnreachableStateError
     + PluginError
     |  - ConflictError
     + PolicyError
     + CheckpointError
     |  - UnsafeCheckpointError
     + RankDisagreementError
     + DraftError

Each carries its parts as attributes, says where and whose, and what to do.
A reset that raises one of them has changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOTHING_CHANGED = "Nothing was changed."


class ResetError(Exception):
    """Base of every error that miles_reset raises on purpose.

    It can be pickled, so that ranks and worker processes can hand it on.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, vars(self))


def _rebuild(cls: type[ResetError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ResetError:
    error = cls.__new__(cls, *args)
    vars(error).update(attributes)
    return error


class UnsupportedOptimizerState(ResetError):
    """A reset met something that it cannot bring to a fresh value, and changed nothing.

    Attributes:
        path: Where in the tree of optimizers, such as ``ChainedOptimizer[1].Lion``.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class UnknownOptimizerError(UnsupportedOptimizerState):
    """No plugin declares an optimizer, or a wrapper, that was found on the way.

    Attributes:
        path: Where in the tree it stands.
        type: Its class.
    """

    def __init__(
        self,
        path: str,
        type: type,  # noqa: A002  # the attribute's public name
        *,
        plugins: Sequence[str] = (),
        hint: str = "",
    ) -> None:
        name = f"{type.__module__}.{type.__qualname__}"
        loaded = ", ".join(plugins) or "none"
        hint = hint or "Install a plugin that declares it, or write one: docs/writing-a-plugin.md."
        super().__init__(
            path,
            f"No schema or unwrap rule for {name} at {path}. Loaded plugins: {loaded}. "
            f"{NOTHING_CHANGED} {hint}",
        )
        self.type = type


class UndeclaredStateError(UnsupportedOptimizerState):
    """An optimizer holds state that its schema does not name.

    Attributes:
        path: Where in the tree the optimizer stands.
        keys: The keys that the schema does not name, sorted.
        schema: The dotted name of the schema's class.
    """

    def __init__(self, path: str, keys: Sequence[str], schema: str, *, provider: str, declared: str) -> None:
        self.keys = tuple(keys)
        self.schema = schema
        named = ", ".join(repr(key) for key in self.keys)
        super().__init__(
            path,
            f"{path.rpartition('.')[2]} at {path} holds state that its schema does not declare: {named}. "
            f"Schema {schema} comes from {provider} and declares {declared}. {NOTHING_CHANGED} "
            "Declare it with momentum(), variance(), history(), clock(), kept() or scratch().",
        )


class UnreachableStateError(UnsupportedOptimizerState):
    """State exists but cannot be written now: offloaded, released, streamed to disk.

    Attributes:
        path: Where in the tree of optimizers.
        reason: Why, and what to do about it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, f"State at {path} cannot be reset now: {reason} {NOTHING_CHANGED}")
        self.reason = reason


class PluginError(ResetError):
    """A plugin could not be used.

    Attributes:
        plugin: The plugin's name.
        distribution: The installed distribution that it comes from, with its version.
    """

    def __init__(self, plugin: str, distribution: str, problem: str) -> None:
        super().__init__(
            f"Plugin {plugin!r} ({distribution}) {problem} "
            f"Mend or uninstall it, or disable it with MILES_RESET_DISABLE={plugin}."
        )
        self.plugin = plugin
        self.distribution = distribution


class ConflictError(PluginError):
    """Two plugins claim one class.

    Attributes:
        target: The dotted name that is claimed twice.
        claimants: The plugins that claim it, each as ``plugin 'name' (distribution version)``.
    """

    def __init__(self, target: str, claimants: Sequence[str], names: Sequence[str], why: str = "") -> None:
        self.target = target
        self.claimants = tuple(claimants)
        self.plugin = names[-1]
        self.distribution = ""
        how = why or (
            "Set override=True in the one that should win, "
            f"or disable one with MILES_RESET_DISABLE={self.plugin}."
        )
        Exception.__init__(self, f"{target} is claimed by {' and '.join(self.claimants)}. {how}")


class PolicyError(ResetError):
    """A resume policy is none, or cannot be carried out here.

    Attributes:
        part: The part, or the key, that it is about.
    """

    def __init__(self, part: str, problem: str) -> None:
        about = "" if part == "policy" else f", {part}"
        super().__init__(f"Policy{about}: {problem} {NOTHING_CHANGED}")
        self.part = part


class CheckpointError(ResetError):
    """A checkpoint, or a part of one, cannot be used.

    Attributes:
        path: The file or folder.
        part: The part of it, if it is about one.
    """

    def __init__(self, path: str, part: str, problem: str) -> None:
        of = f"{part} of " if part else ""
        super().__init__(f"Checkpoint: {of}{path} {problem} {NOTHING_CHANGED}")
        self.path = path
        self.part = part


class UnsafeCheckpointError(CheckpointError):
    """A file would have to import or call something that is not on the allow-list.

    Attributes:
        path: The file.
        part: The part of it, if it is about one.
        global_name: The dotted name that the file asks for.
    """

    def __init__(self, path: str, global_name: str) -> None:
        super().__init__(
            path,
            "",
            f"asks for {global_name}, which is not on the allow-list, so it was not unpickled. If you trust "
            f'the file, put allow = ["{global_name}"] into the policy.',
        )
        self.global_name = global_name


class RankDisagreementError(ResetError):
    """Ranks do not agree on what to do, or one of them refuses, so none does it.

    Attributes:
        verdicts: What each rank says, by rank.
    """

    def __init__(self, verdicts: Mapping[int, str], why: str = "one refuses, so none goes on") -> None:
        each = {
            rank: said.replace(NOTHING_CHANGED, "").rstrip(" .") for rank, said in sorted(verdicts.items())
        }
        said = "; ".join(f"rank {rank}: {verdict}" for rank, verdict in each.items())
        super().__init__(f"The ranks do not agree: {why}. Of them, {said}. {NOTHING_CHANGED}")
        self.verdicts = dict(verdicts)


class DraftError(ResetError):
    """No schema can be drafted: the optimizer cannot be built here, or not be stepped.

    Attributes:
        target: What was to be built.
    """

    def __init__(self, target: str, problem: str) -> None:
        how = (
            "Give its options, other parameters, or a factory: a function that is handed a list of "
            "parameters and returns the optimizer, or a miles_reset.testing.Trial that says how to step it."
        )
        super().__init__(f"{target} cannot be built or stepped: {problem}. {how}")
        self.target = target
