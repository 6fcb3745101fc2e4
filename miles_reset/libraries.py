"""Whether the classes that plugins claim are there in the installed libraries.

The only place where a library is imported to learn something about it. Each is imported in a process
of its own, which runs this file as a script: one that fails, hangs, prints or crashes spoils nothing else.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import repeat

TIMEOUT = 120.0
"""How many seconds one library may take to be imported."""


class Status(enum.StrEnum):
    """What a claimed name stands for in the installed library."""

    OK = "ok"
    ALIAS = "alias"
    """It is there, and is a class of another name: a claim under an alias matches nothing."""
    STALE = "not found"
    NOT_INSTALLED = "library not installed"
    FAILED = "import failed"


@dataclass(frozen=True)
class Resolved:
    """What became of one claimed name.

    Attributes:
        status: The answer in a word.
        detail: The answer in full, such as ``not found in megatron-core 0.19.2``.
    """

    status: Status
    detail: str


def resolve(targets: Iterable[str], timeout: float = TIMEOUT) -> dict[str, Resolved]:
    """Look dotted class names up in the installed libraries.

    Args:
        targets: The names.
        timeout: How many seconds one library may take to be imported.
    """
    of_library: dict[str, list[str]] = {}
    for target in targets:
        of_library.setdefault(target.partition(".")[0], []).append(target)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(_ask, of_library, of_library.values(), repeat(timeout))
        return {target: resolved for answer in answers for target, resolved in answer.items()}


def _ask(library: str, targets: list[str], timeout: float) -> dict[str, Resolved]:
    """Look the names of one library up, in another process."""
    try:
        if importlib.util.find_spec(library) is None:
            return dict.fromkeys(targets, Resolved(Status.NOT_INSTALLED, Status.NOT_INSTALLED))
        # -P: the folder of this file holds modules, such as `schema`, that hide others of their names.
        done = subprocess.run(
            [sys.executable, "-P", __file__, *targets],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        problem = f"import took more than {timeout:g} s"
    except (ImportError, ValueError) as error:  # from find_spec, for a library that hides itself
        problem = f"import failed: {error}"
    else:
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            return {target: Resolved(Status(word), detail) for target, (word, detail) in answer.items()}
        problem = f"import ended Python with exit status {done.returncode}"
    return dict.fromkeys(targets, Resolved(Status.FAILED, problem))


def look_up(target: str) -> Resolved:
    """Look one dotted class name up, importing its library into this process."""
    module, names = None, target.split(".")
    for end in range(1, len(names)):
        name = ".".join(names[:end])
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a library may fail in any way
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                names = names[end - 1 :]
                break
            return Resolved(Status.FAILED, f"import of {name} failed: {error!r}")
    else:
        names = names[-1:]
    found: object = module
    for name in names:
        found = getattr(found, name, None)
    if not isinstance(found, type):
        return Resolved(Status.STALE, f"not found in {_version(target)}")
    own = f"{found.__module__}.{found.__qualname__}"
    if own != target:
        return Resolved(Status.ALIAS, f"alias of {own}")
    return Resolved(Status.OK, Status.OK)


def _version(target: str) -> str:
    """Name the distribution that a dotted name would come from, and its version."""
    library = target.partition(".")[0]
    dashed = target.replace(".", "-").replace("_", "-")
    distributions = _distributions().get(library, [])
    # Several distributions may share a namespace: the longest that the dotted name starts with.
    likely = [name for name in distributions if dashed.startswith(name.lower().replace("_", "-"))]
    for name in sorted(likely or distributions, key=len, reverse=True):
        return f"{name} {metadata.version(name)}"
    return library


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions that each top-level package comes from; it takes a second to know."""
    return metadata.packages_distributions()


if __name__ == "__main__":
    # Libraries print while they are imported: they get the standard error for it, and the answer the output.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        resolved = {target: look_up(target) for target in sys.argv[1:]}
        json.dump({target: (found.status, found.detail) for target, found in resolved.items()}, output)
