"""The optimizers that an installed library defines, and whether the names claimed in it are there.

What defines an optimizer is found in the library's files first, so that only those modules are imported:
in a process of its own, which runs this file as a script.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from miles_reset.libraries import Resolved, Status, look_up

_CLASS = re.compile(r"^class\s+(\w+)\s*\(([^)]*)\)", re.M)
_NO_PARTS = {"tests", "test", "testing", "benchmarks", "examples", "__pycache__", "_vendor", "include", "lib"}
_TORCH = "Adam AdamW SGD LBFGS RMSprop Adagrad Adadelta Adamax NAdam RAdam Rprop ASGD SparseAdam Muon"
_LARGEST = 4_000_000
_FORKS = sys.platform == "linux"
"""Whether a process that has imported torch can go on as several, each for a library."""

Job = tuple[str, list[str], list[str]]


@dataclass(frozen=True)
class Library:
    """What was found in one library.

    Attributes:
        name: Its top-level package.
        optimizers: For each optimizer that it defines, the names of its bases, the nearest first.
        resolved: What became of the names that are claimed in it.
        problems: What could not be imported, and why.
    """

    name: str
    optimizers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    resolved: Mapping[str, Resolved] = field(default_factory=dict)
    problems: Sequence[str] = ()


def is_installed(library: str) -> bool:
    """Say whether a top-level package is there, without importing it."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(library) is not None
    return False


def find_all(claimed: Mapping[str, Sequence[str]], timeout: float) -> list[Library]:
    """List the optimizers of libraries, and look claimed names up.

    Args:
        claimed: The names that are claimed in each, by top-level package.
        timeout: How many seconds one library may take to be imported.
    """
    jobs = [
        (library, list(modules_with_optimizers(library)), list(names)) for library, names in claimed.items()
    ]
    jobs = [job for job in jobs if job[1] or job[2]]
    portions = [jobs] if _FORKS and jobs else [[job] for job in jobs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [library for found in pool.map(partial(_ask, timeout=timeout), portions) for library in found]


def _ask(jobs: list[Job], timeout: float) -> list[Library]:
    """Look into libraries, in another process."""
    answers: dict[str, Any] = {}
    problem = f"import took more than {timeout:g} s"
    try:
        # -P: the folder of this file holds modules, such as `schema`, that hide others of their names.
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=json.dumps({"jobs": jobs, "timeout": timeout}).encode(),
            capture_output=True,
            timeout=60 + timeout * (len(jobs) if _FORKS else 1),
        )
    except subprocess.TimeoutExpired:
        pass
    else:
        answers = json.loads(done.stdout) if done.returncode == 0 else {}
        problem = f"import ended Python with exit status {done.returncode}"
    return [_library(job, answers.get(job[0], problem)) for job in jobs]


def _library(job: Job, answer: Any) -> Library:
    library, _, targets = job
    if isinstance(answer, str):
        return Library(library, {}, dict.fromkeys(targets, Resolved(Status.FAILED, answer)), [answer])
    resolved = {name: Resolved(Status(word), what) for name, (word, what) in answer["targets"].items()}
    return Library(library, answer["optimizers"], resolved, answer["problems"])


def modules_with_optimizers(library: str) -> Iterator[str]:
    """Yield the modules of a library whose text defines what may be an optimizer, without importing any."""
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for module, text in _texts(library):
        for name, bases in _CLASS.findall(text):
            names = set(re.findall(r"(\w+)\s*(?:,|$|\[)", bases.strip() + ","))
            found.setdefault(module, []).append((name, names))
    known = {"Optimizer", *_TORCH.split()}
    while True:
        new = {
            name
            for classes in found.values()
            for name, bases in classes
            if name not in known
            and any(base in known or base.endswith(("Optimizer", "Optim")) for base in bases)
        }
        if not new:
            break
        known |= new
    for module, classes in found.items():
        if any(
            bases & known or any(b.endswith(("Optimizer", "Optim")) for b in bases) for _, bases in classes
        ):
            yield module


def _texts(library: str) -> Iterator[tuple[str, str]]:
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(library)
    if spec is None:
        return
    roots = [Path(path) for path in spec.submodule_search_locations or ()]
    if library == "torch":
        roots = [root / "optim" for root in roots]
    files = [(path, root) for root in roots for path in sorted(root.rglob("*.py"))]
    if not roots and spec.origin and spec.origin.endswith(".py"):
        files = [(Path(spec.origin), Path(spec.origin).parent)]
    for path, root in files:
        parts = path.relative_to(root).with_suffix("").parts
        if _NO_PARTS & set(parts[:-1]) or parts[-1].startswith("test_") or path.stat().st_size > _LARGEST:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "optim" not in text.lower():
            continue
        inside = [part for part in parts if part != "__init__"]
        base = [library] if roots else []
        yield ".".join([*base, *(["optim"] if library == "torch" else []), *inside]), text


def optimizers_of(library: str, modules: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Import modules into this process, and return the optimizers that they define, and what failed."""
    from torch.optim import Optimizer

    found: dict[str, list[str]] = {}
    problems: list[str] = []
    for name in modules:
        try:
            module = importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  # a library may fail in any way, and even exit
            problems.append(f"import of {name} failed: {error!r}"[:200])
            continue
        for cls in list(vars(module).values()):
            try:
                mine = isinstance(cls, type) and issubclass(cls, Optimizer) and cls.__module__ == name
            except Exception:  # noqa: BLE001  # an object that is odd is no optimizer
                continue
            if mine and cls.step is not Optimizer.step and not getattr(cls, "__abstractmethods__", None):
                names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
                found[names[0]] = names[1:]
    return found, problems


def look_into(job: Job) -> dict[str, Any]:
    """Look into one library, importing it into this process."""
    library, modules, targets = job
    optimizers, problems = optimizers_of(library, modules)
    looked_up = {target: look_up(target) for target in targets}
    answers = {target: (one.status, one.detail) for target, one in looked_up.items()}
    return {"optimizers": optimizers, "problems": problems, "targets": answers}


def look_into_each(jobs: Sequence[Job], timeout: float) -> dict[str, Any]:
    """Look into libraries, each in a fork of this process, several at a time.

    Returns:
        What was found in each, or in words why nothing was.
    """
    import torch.optim  # noqa: F401  # once for all

    answers: dict[str, Any] = {}
    waiting = list(jobs)
    running: dict[int, tuple[str, Path, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                job = waiting.pop(0)
                path = Path(folder, job[0])
                if not (pid := os.fork()):
                    os.setsid()
                    path.write_text(json.dumps(look_into(job)))
                    os._exit(0)  # some leave threads behind that never end
                running[pid] = (job[0], path, time.monotonic() + timeout)
            for pid, (library, path, deadline) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                late = not ended and time.monotonic() > deadline
                if late:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                if ended and not status:
                    answers[library] = json.loads(path.read_text())
                elif ended:
                    code = os.waitstatus_to_exitcode(status)
                    answers[library] = f"import ended Python with exit status {code}"
                elif late:
                    answers[library] = f"import took more than {timeout:g} s"
                if ended or late:
                    del running[pid]
            time.sleep(0.02)
    return answers


if __name__ == "__main__":
    # Libraries print while they are imported: they get the standard error for it, and the answer the output.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        asked = json.load(sys.stdin)
        if _FORKS:
            found_in_each = look_into_each(asked["jobs"], asked["timeout"])
        else:
            found_in_each = {job[0]: look_into(job) for job in asked["jobs"]}
        json.dump(found_in_each, output)
