"""A draft says what a fresh optimizer holds, or that it does not know, and becomes a plugin with a test."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import zeros_like
from typer.testing import CliRunner

from miles_reset import StateSchema
from miles_reset.cli import app
from miles_reset.drafting import Drafted, draft_schema
from miles_reset.drafting.writing import Call, write_distribution
from miles_reset.errors import DraftError

draft = partial(draft_schema, disabled=["torch"])


class Toy(torch.optim.Optimizer):
    """Moves along the gradient and what ``direction`` makes of its state."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9, start: float = 0.3) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "start": start})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.direction(p, p.grad, self.state[p], group), alpha=group["lr"])

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        raise NotImplementedError


class Many(Toy):
    """Has a key for each word that is the same whatever the data."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.generator = torch.Generator().manual_seed(7)
        self.count = 0
        self.schedule = [1, "warm"]
        self.seen: dict[int, float] = {}
        self.param_groups[0]["peak"] = -1.0

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        if not state:
            state.update(
                zero=zeros_like(p), one=torch.ones_like(p), rate=torch.full_like(p, group["lr"]),
                copy=p.clone(),
                third=0.25, steps=0, none=None, pair=[zeros_like(p), zeros_like(p)],
                table=torch.linspace(0, 1, 5), diagonal=torch.eye(4) * 2, queue=[],
            )  # fmt: skip
        for key in ("zero", "one", "rate", "copy"):
            state[key].lerp_(grad, 0.1)
        state["third"] *= group["beta"]
        state["steps"] += 1
        state["none"] = grad.clone() if state["none"] is None else state["none"].lerp(grad, 0.5)
        for one in state["pair"]:
            one.add_(grad)
        state["diagonal"].add_(grad.norm())
        state["queue"].append(float(grad.sum()))
        group["peak"] = max(group["peak"], float(grad.max()))
        self.count += 1
        self.schedule = [self.count, "hot"]
        self.seen[self.count] = state["third"]
        noise = torch.randn(p.shape, generator=self.generator)
        memory = sum(
            (state[key] for key in ("zero", "one", "rate", "copy")), state["none"] + state["pair"][0]
        )
        scale = (
            state["third"] + state["diagonal"].sum() + sum(state["queue"]) + group["peak"] + len(self.seen)
        )
        return grad + 0.1 * memory + 0.01 * scale + 0.01 * noise + 0.001 * self.schedule[0] * state["steps"]


class FirstGradient(Toy):
    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        if "mean" not in state:
            state["mean"] = grad.clone()
        return state["mean"].lerp_(grad, 0.1)


class JointGate(Toy):
    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        if not state:
            state["mean"], state["before"] = zeros_like(p), grad.clone()
        state["mean"].lerp_(grad - state["before"], 0.1)
        state["before"].copy_(grad)
        return grad + state["mean"]


class Built(Toy):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, self.param_groups[0]["start"])

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        return grad / state["sum"].addcmul_(grad, grad).sqrt()


class OptionSGD(Toy):
    def __init__(self, params: Any, raw: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.param_groups[0]["raw"] = raw

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        if "m" not in state:
            state["m"] = grad.clone()
        else:
            state["m"].mul_(group["beta"]).add_(grad, alpha=0.5 if group["raw"] else 1)
        return state["m"]


class Hidden(Toy):
    """Remembers in a place where nobody looks, for as long as its parameters live."""

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        mean = self.hidden(p)
        return mean.lerp_(grad, 0.1)

    def hidden(self, p: Any) -> Any:
        return p.__dict__.setdefault("_hidden", zeros_like(p))


class Random(Toy):
    """Holds what no word says: a number that is drawn when the optimizer is built."""

    drawn = 0

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for p in self.param_groups[0]["params"]:
            self.state[p]["drawn"] = p.detach().exp()

    def direction(self, p: Any, grad: Any, state: Any, group: Any) -> Any:
        return state["drawn"].lerp_(grad, 0.1)


def words(drafted: Drafted) -> dict[str, str]:
    return {
        slot.key: str(slot.initial if slot.initial is not None else slot.role)
        for slot in drafted.schema.slots
    }


@pytest.fixture(scope="module")
def many() -> Drafted:
    return draft(Many)


def test_a_word_is_found_for_each_key(many: Drafted) -> None:
    drafted = many
    assert drafted.decided, drafted.failure
    assert words(drafted) == {
        "zero": "0", "one": "1", "rate": "group's lr", "copy": "copy of parameter", "third": "0.25",
        "steps": "0", "none": "none", "pair": "0", "table": "kept", "diagonal": "identity x 2.0 (float32)",
        "queue": "empty",
        "peak": "-1.0", "generator": "seeded with 7", "count": "0", "seen": "empty",
        "schedule": "computed by _fresh_schedule",
    }  # fmt: skip
    places = {slot.key: str(slot.at) for slot in drafted.schema.slots}
    assert (places["zero"], places["peak"], places["count"]) == ("state", "group", "attribute")
    roles = {slot.key: str(slot.role) for slot in drafted.schema.slots}
    assert (roles["steps"], roles["count"]) == ("clock", "clock")
    assert str(drafted).startswith(f"{Many.__module__}.Many: passes the law")


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (FirstGradient, {"mean": "absent"}),
        (JointGate, {"mean": "0", "before": "absent with its entry"}),
        (Built, {"sum": "default start"}),
    ],
)
def test_what_cannot_be_had_in_place_is_given_up(cls: type[Toy], found: dict[str, str]) -> None:
    drafted = draft(cls)
    assert drafted.decided, drafted.failure
    assert words(drafted) == found
    assert [one.in_place for one in drafted.decisions] == ["absent" not in word for word in found.values()]


def test_variants_that_need_two_words_get_a_condition() -> None:
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    drafted = draft(momentum, variants={"dampening": partial(momentum, dampening=0.5)})
    assert words(drafted) == {"momentum_buffer": "absent if dampening else 0"}
    assert drafted.variants == ("as given", "dampening")


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (torch.optim.NAdam, {"step": "0", "mu_product": "1 (float32)", "exp_avg": "0", "exp_avg_sq": "0"}),
        (torch.optim.Rprop, {"step": "0", "prev": "0", "step_size": "group's lr"}),
        (torch.optim.Muon, {"momentum_buffer": "0"}),
    ],
)
def test_torch_s_own_are_found(cls: type, found: dict[str, str]) -> None:
    drafted = draft(cls)
    assert drafted.decided, drafted.failure
    assert words(drafted) == found


def test_what_is_forgotten_is_told() -> None:
    assert draft(torch.optim.SGD).forgetful == ("as given",)


def test_what_cannot_be_decided_is_refused_and_not_guessed() -> None:
    drafted = draft(Random, limit=20)
    assert not drafted.decided
    (one,) = drafted.decisions
    assert one.undecided
    assert str(one.slot.initial).startswith("refused: undecided: ")


def test_memory_in_no_known_place_is_refused() -> None:
    drafted = draft(Hidden)
    assert not drafted.decided
    assert drafted.schema.ready is not None
    assert "was not found" in str(drafted.schema.ready(None))


class Unsaved(FirstGradient):
    def state_dict(self) -> Any:
        raise NotImplementedError("it cannot be saved")


def test_state_that_cannot_be_saved_is_drafted_without(tmp_path: Path) -> None:
    drafted = draft(Unsaved)
    assert drafted.decided, drafted.failure
    assert not drafted.loads
    assert "it cannot be saved" in drafted.notes[0]
    *_, test = write_distribution(drafted, tmp_path, Call("lib.Unsaved"))
    assert "round_trips=[False]" in test.read_text()


def test_an_optimizer_that_cannot_be_built_or_wraps_another_is_refused() -> None:
    with pytest.raises(
        DraftError, match=r"Toy cannot be built or stepped: NotImplementedError.* factory: a function"
    ):
        draft(Toy)

    class Wrapper(Many):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.inner = torch.optim.SGD(self.param_groups)

    with pytest.raises(DraftError, match=r"a wrapper, with an optimizer under 'inner'"):
        draft(Wrapper)


LIBRARY = """
import torch

class Calm(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, beta=0.9, nesterov=False):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), decay=1.0, start=p.flatten().clone())
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                state["decay"] *= group["beta"]
                mean = state["mean"] + 0.1 * state["start"].view_as(p)
                p.sub_(mean, alpha=group["lr"] / (1 - state["decay"]))


class Lost(Calm):
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.state[p]["lost"].lerp_(p.grad, 0.1), alpha=0.1)


def lost(parameters):
    optimizer = Lost(parameters)
    for p in parameters:
        optimizer.state[p]["lost"] = p.detach().exp()
    return optimizer
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def run_tests_of(folder: Path, plugin: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={plugin}", "-c", f"{plugin}/pyproject.toml"]
    return run(folder, sys.executable, "-m", "pytest", *options, plugin)


@pytest.mark.slow
def test_the_command_writes_a_plugin_whose_test_passes_or_says_what_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harpsichord_calm.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    invoke = partial(CliRunner().invoke, app)
    options = ["--kwargs", "lr=0.1", "--kwargs", "lr=0.2,beta=0.8"]
    done = invoke(["draft", "harpsichord_calm.Calm", *options, "--out", str(tmp_path / "calm"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["decided"], said["untried"], said["variants"]) == (
        True,
        ["nesterov"],
        ["as given", "lr=0.2,beta=0.8"],
    )
    assert sorted(
        str(path.relative_to(tmp_path / "calm"))
        for path in (tmp_path / "calm").rglob("*.*")
        if path.is_file()
    ) == [
        "README.md",
        "pyproject.toml",
        "src/miles_reset_harpsichord_calm.py",
        "tests/test_harpsichord_calm.py",
    ]
    source = (tmp_path / "calm" / "src" / "miles_reset_harpsichord_calm.py").read_text()
    assert '"harpsichord_calm.Calm"' in source
    assert (
        'momentum("mean"), history("decay", Initial.ONES), history("start", Initial.computed(_flat))'
        in source
    )
    again = invoke(["draft", "harpsichord_calm.Calm", "--out", str(tmp_path / "calm")])
    assert again.exit_code == 2
    assert "there already" in again.output.replace("\n", "")

    done = invoke(["draft", "--factory", "harpsichord_calm:lost", "--out", str(tmp_path / "lost")])
    assert done.exit_code == 1, done.output
    assert "Undecided" in done.output

    tested = run_tests_of(tmp_path, "calm")
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr
    tested = run_tests_of(tmp_path, "lost")
    assert "1 failed" in tested.stdout, tested.stdout + tested.stderr
    assert "undecided" in tested.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give a class"),
        (["torch.optim.Nope"], "cannot be imported"),
        (["no_such_module.Adam"], "cannot be imported"),
        (["torch.optim.Adam", "--kwargs", "0.1"], "give each as name=value"),
        (["torch.optim.Adam", "--kwargs", "lr=x"], "cannot be read"),
    ],
)
def test_a_wrong_use_of_the_command_is_told(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["draft", *arguments], terminal_width=300)
    assert done.exit_code == 2
    assert complaint in " ".join(done.output.replace("│", " ").split())


def test_the_table_names_who_claims_a_class_and_what_was_not_tried() -> None:
    done = CliRunner().invoke(app, ["draft", "torch.optim.Adam"], terminal_width=300)
    assert done.exit_code == 0
    assert "plugin 'torch'" in done.stdout
    assert "amsgrad" in done.stdout
    assert "exp_avg" in done.stdout


def test_a_word_is_written_as_it_is_read(many: Drafted, tmp_path: Path) -> None:
    drafted = many
    write_distribution(drafted, tmp_path, Call(f"{__name__}.Many"), plugin="many")
    namespace: dict[str, Any] = {}
    exec((tmp_path / "src" / "miles_reset_many.py").read_text(), namespace)
    (schema,) = namespace["miles_reset_schemas"]()
    assert isinstance(schema, StateSchema)
    assert [(s.key, s.role, s.at, str(s.initial)) for s in schema.slots] == [
        (s.key, s.role, s.at, str(s.initial)) for s in drafted.schema.slots
    ]
