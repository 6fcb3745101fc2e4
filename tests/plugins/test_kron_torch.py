"""Hold the optimizers of kron-torch to the law of a reset."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import fake_cuda
from variants import Case, Options, Setting, Table, build, cast, no_gradient, optimizers_in, step_some

from miles_reset import UnreachableStateError, default_registry, reset_optimizer_states
from miles_reset.testing import Parameters, sample_parameters

kron_torch = pytest.importorskip("kron_torch")
kronos = pytest.importorskip("kron_torch.kronos")


class Soon(type(kron_torch.precond_update_prob_schedule())):  # type: ignore[misc]  # a class that a function makes
    """Update the preconditioners less often after the second step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or (1.0, 0.03, 0.5, 2)))

    def __repr__(self) -> str:
        return "soon"


CLASSES = {
    "Kron": kron_torch.Kron,
    "DistributedKron": kron_torch.DistributedKron,
    "Kronos": kronos.Kronos,
    "OneSidedKron": kron_torch.DistributedOneSidedKron,
}
COMMON: list[Options] = [
    {"lr": 0.02},
    {"preconditioner_update_probability": 0.3, "lr": 0.02},
    {"preconditioner_update_probability": Soon(), "lr": 0.02, "weight_decay": 0.05},
]
VARIANTS: dict[str, list[Options]] = dict.fromkeys(CLASSES, COMMON) | {
    "Kron": [
        *COMMON,
        {"memory_save_mode": "one_diag", "precond_init_scale": 2.0},
        {"memory_save_mode": "all_diag", "momentum_into_precond_update": False},
        {"mu_dtype": torch.bfloat16, "max_size_triangular": 6},
        {"merge_dims": False, "precond_init_scale": 0.5},
    ],
    "DistributedKron": [*COMMON, {"partition_grads": True, "block_size": 4, "memory_save_mode": "one_diag"}],
}

BFLOAT16 = cast(torch.bfloat16)
NEVER_LOADED = {"round_trips": (False,), "warmups": (6,)}  # within a period of four
SETTINGS = {
    "plain": Setting(law={"warmups": (6,)}),
    "many steps": Setting(law={"warmups": (1, 3, 12), "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=BFLOAT16, once=True),
    "never loaded": Setting(law=NEVER_LOADED),
    "never loaded, many steps": Setting(
        law={**NEVER_LOADED, "warmups": (1, 3, 12), "further": 12}, once=True
    ),
    "never loaded, no gradient": Setting(build=no_gradient, law=NEVER_LOADED, once=True),
    "never loaded, bfloat16": Setting(parameters=BFLOAT16, law=NEVER_LOADED, once=True),
}


def with_a_cube(name: str, parameters: Parameters) -> Parameters:
    """Add a parameter two of whose dimensions are taken for one; leave out a scalar that cannot be taken."""
    cube = torch.nn.Parameter(parameters[0].detach().reshape(2, 4, 6).cos())
    return [*(p for p in parameters if p.ndim or name not in TWO_SIDED), cube]


TWO_SIDED = ("Kron", "DistributedKron")
LOADED = [title for title in SETTINGS if "never" not in title]
TABLE = Table(
    CLASSES,
    VARIANTS,
    SETTINGS,
    {(name, title): (Exception, "[Ss]ubscript") for name in TWO_SIDED for title in LOADED},
    adapt=with_a_cube,
    package="kron-torch",
    sample=4,
)


def gather(whole: torch.Tensor, part: torch.Tensor, async_op: bool) -> Any:
    """Gather from the only rank, into a tensor of another shape than gloo would take."""
    whole.view(-1).copy_(part)
    return SimpleNamespace(wait=lambda: None)


@pytest.fixture(autouse=True)
def one_rank_without_a_gpu() -> Iterator[None]:
    """Let the CPU stand for a GPU, and compile nothing."""
    with fake_cuda(), mock.patch("torch.distributed.all_gather_into_tensor", gather):
        yield


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_what_cannot_step_after_a_load(case: Case, error: type[Exception], match: str) -> None:
    """Torch's load takes apart the strings that say how to multiply."""
    with pytest.raises(error, match=match):
        case.step_load_and_step()


def warm(name: str, options: Options) -> tuple[Any, Parameters]:
    parameters = with_a_cube(name, sample_parameters())
    return step_some(build(CLASSES[name], parameters, options)).optimizer, parameters


@pytest.mark.parametrize("name", TWO_SIDED)
def test_chance_and_counts_start_again(name: str) -> None:
    """Once in a hundred steps, by chance, preconditioners are balanced: too seldom for the tables to see."""
    optimizer, _ = warm(name, {"preconditioner_update_probability": 0.3})
    rng = optimizer.rng
    reset_optimizer_states(optimizer)
    assert optimizer.rng is rng
    assert rng.getstate() == random.Random(42).getstate()
    assert (int(optimizer._prob_step), int(optimizer._update_counter)) == (0, 0)


@pytest.mark.parametrize("name", CLASSES)
def test_preconditioners_stay_in_place(name: str) -> None:
    optimizer, parameters = warm(name, {})
    entry = optimizer.state[parameters[0]]
    held = {key: value for key, value in entry.items() if key.startswith("Q")}
    tensors = [tensor for value in held.values() for tensor in (value if type(value) is list else [value])]
    assert tensors
    before = [tensor.data_ptr() for tensor in tensors]
    reset_optimizer_states(optimizer)
    assert all(entry[key] is value for key, value in held.items())
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert all(torch.equal(tensor, torch.eye(len(tensor))) for tensor in tensors)


def test_blocks_of_another_scale_are_refused() -> None:
    optimizer, _ = warm("DistributedKron", {"precond_init_scale": 2.0})
    with pytest.raises(UnreachableStateError, match=r"scale of \{2.0\}"):
        reset_optimizer_states(optimizer)


def test_every_class_of_the_package_is_held_and_claimed() -> None:
    found = {cls.__qualname__ for cls in optimizers_in(kron_torch).values()}
    assert found == {cls.__qualname__ for cls in CLASSES.values()}  # of which two are called Kron
    for cls in CLASSES.values():
        claim = default_registry().find(cls)
        assert claim is not None
        assert claim.provider.plugin == "kron_torch"
