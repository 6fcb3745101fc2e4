"""Classes by name, and plugins: in memory, on disk, and in an environment of their own."""

import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_reset import StateSchema, UnwrapRule, hookimpl


def class_named(dotted: str, *bases: type, **members: Any) -> type:
    """Return a class that looks as if a library had defined it under that name."""
    module, _, name = dotted.rpartition(".")
    return type(name, bases, {"__module__": module, **members})


def plugin(name: str, *records: StateSchema | UnwrapRule) -> ModuleType:
    """Return a plugin that declares these records."""
    module = ModuleType(name)
    schemas = [record for record in records if isinstance(record, StateSchema)]
    rules = [record for record in records if isinstance(record, UnwrapRule)]
    module.miles_reset_schemas = hookimpl(lambda: schemas)
    module.miles_reset_unwrap_rules = hookimpl(lambda: rules)
    return module


def install(folder: Path, source: str, *, name: str, module: str, distribution: str, version: str) -> None:
    """Write a plugin's module and its dist-info into a folder, as an installer would."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[miles_reset]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(source)


def fresh_environment(folder: Path) -> Path:
    """Make a virtual environment that also sees what is installed here; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout
    here = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    Path(packages.strip(), "here.pth").write_text(f"import site; {here}\n")
    for command in metadata.distribution("miles-reset").entry_points.select(group="console_scripts"):
        script = folder / "bin" / command.name
        script.write_text(f"#!{python}\nfrom {command.module} import {command.attr}\n{command.attr}()\n")
        script.chmod(0o755)
    return python
