"""Claimed names, looked up in libraries that behave and in libraries that do not."""

import re
import sys
import textwrap

import pytest

from miles_reset.libraries import Status, resolve


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return a function that puts a library where Python finds it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, source, version=None):
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        if version is not None:
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (info / "top_level.txt").write_text(name.partition(".")[0])

    return write


def look_up(target, **options):
    (answer,) = resolve([target], **options).values()
    return answer.status, answer.detail


def test_a_class_that_is_there_is_ok(library):
    library("harpsichord.keys", "class Adam:\n    class Slow: pass")
    assert look_up("harpsichord.keys.Adam") == (Status.OK, "ok")
    assert look_up("harpsichord.keys.Adam.Slow") == (Status.OK, "ok")


def test_an_alias_is_said_for_it_matches_no_class(library):
    library("harpsichord", "from spinet import Adam")
    library("spinet", "class Adam: pass")
    assert look_up("harpsichord.Adam") == (Status.ALIAS, "alias of spinet.Adam")


@pytest.mark.parametrize("name", ["harpsichord.Lion", "harpsichord.keys.Lion", "harpsichord.lion"])
def test_a_stale_claim_names_the_library_and_its_version(library, name):
    library("harpsichord", "lion = 1", version="2.1")
    assert look_up(name) == (Status.STALE, "not found in harpsichord 2.1")


def test_a_library_that_shares_a_namespace_is_told_from_its_neighbours(library, tmp_path):
    library("clavier.core", "")
    for name in ("clavier-core", "clavier-extras"):
        info = tmp_path / f"{name.replace('-', '_')}-3.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n")
        (info / "top_level.txt").write_text("clavier")
    assert look_up("clavier.core.Adam") == (Status.STALE, "not found in clavier-core 3.0")


def test_a_library_that_is_not_installed_is_not_asked():
    assert look_up("virginal.Adam") == (Status.NOT_INSTALLED, "library not installed")


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("raise RuntimeError('out of tune')", r"import of harpsichord failed: RuntimeError\('out of tune'\)"),
        ("import virginal", r"import of harpsichord failed: ModuleNotFoundError\(.*'virginal'.*\)"),
        ("import os; os._exit(3)", "import ended Python with exit status 3"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "import ended Python with exit status -11",
        ),
    ],
)
def test_a_library_that_fails_spoils_no_other_one(library, source, detail):
    library("harpsichord", source)
    library("spinet", "class Adam: pass")
    answers = resolve(["harpsichord.Adam", "spinet.Adam"])
    assert answers["harpsichord.Adam"].status is Status.FAILED
    assert re.fullmatch(detail, answers["harpsichord.Adam"].detail)
    assert answers["spinet.Adam"].status is Status.OK


def test_a_library_that_hangs_is_given_up(library):
    library("harpsichord", "import time; time.sleep(60)")
    assert look_up("harpsichord.Adam", timeout=0.5) == (Status.FAILED, "import took more than 0.5 s")


def test_what_a_library_prints_does_not_get_into_the_answer(library, capfd):
    library("harpsichord", "import os\nprint('{')\nos.write(1, b'}')\nclass Adam: pass")
    assert look_up("harpsichord.Adam") == (Status.OK, "ok")
    assert capfd.readouterr().out == ""


def test_modules_of_miles_reset_hide_no_others(library):
    library("schema", "class Adam: pass")  # the name of a module beside the one that is run
    assert look_up("schema.Adam") == (Status.OK, "ok")


def test_nothing_is_imported_here(library):
    library("harpsichord.keys", "class Adam: pass")
    look_up("harpsichord.keys.Adam")
    assert not {"harpsichord", "harpsichord.keys"} & sys.modules.keys()
