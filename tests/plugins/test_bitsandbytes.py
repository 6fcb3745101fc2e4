"""Hold the optimizers of bitsandbytes to the law of a reset, in 8 bits and in 32, as they run on a CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from variants import Case, Options, Refusal, Setting, Table, build, cast, no_gradient, step_some

from miles_reset import UnreachableStateError, default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

pytest.importorskip("bitsandbytes")

from bitsandbytes import optim
from bitsandbytes.optim.ademamix import _ReferenceAdEMAMix

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")

CLASSES: dict[str, Any] = {
    **{
        name: cls
        for name, cls in inspect.getmembers(optim, inspect.isclass)
        if issubclass(cls, torch.optim.Optimizer)
    },
    "_ReferenceAdEMAMix": _ReferenceAdEMAMix,
}
"""Every optimizer that can be built; their bases, Optimizer1State and Optimizer2State, are none of them."""

EACH: dict[str, list[Options]] = {
    "AdEMAMix": [{}, {"t_alpha": 6, "t_beta3": 6}, {"betas": (0.8, 0.9, 0.95)}],
    "Adagrad": [{}, {"weight_decay": 0.05}],
    "Adam": [{}, {"weight_decay": 0.05}, {"betas": (0.5, 0.8)}],
    "AdamW": [{}, {"weight_decay": 0.0}],
    "LAMB": [{}, {"max_unorm": 0.0}],
    "LARS": [{"lr": 0.05, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "max_unorm": 0.0}],
    "Lion": [{}, {"weight_decay": 0.05}],
    "PytorchLARS": [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ],
    "RMSprop": [{}, {"alpha": 0.9}],
    "SGD": [{"lr": 0.05, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}],
    "_ReferenceAdEMAMix": [{}, {"t_alpha": 6, "t_beta3": 6}],
}
"""The options by the algorithm."""


def variants_of(name: str) -> list[Options]:
    algorithm = name.removeprefix("Paged").removesuffix("8bit").removesuffix("32bit")
    variants = EACH[algorithm]
    if name == "LAMB8bit":
        variants = [{}]  # max_unorm is refused
    if "optim_bits" in inspect.signature(CLASSES[name]).parameters and not name.endswith("bit"):
        variants = [*variants, variants[0] | {"optim_bits": 8}]
    return variants


def with_a_large_one(name: str, parameters: Parameters) -> Parameters:
    """Add a parameter of 4096 elements: no smaller one is kept in 8 bits."""
    large = parameters[0].detach().repeat(8, 11)[:, :64]
    return [*parameters, torch.nn.Parameter(large.contiguous())]


SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), once=True),
    "lr changed": Setting(law={"hyperparameters": {"lr": 0.05}}, once=True),
}
REFUSED: dict[tuple[str, str], Refusal] = {
    **{
        (name, setting): (RuntimeError, "broadcast shape")
        for name in ("AdEMAMix32bit", "PagedAdEMAMix32bit")
        for setting in SETTINGS
    },
    ("PytorchLARS", "bfloat16"): (AssertionError, "^$|float32"),
}
TABLE = Table(
    CLASSES,
    {name: variants_of(name) for name in CLASSES},
    SETTINGS,
    REFUSED,
    adapt=with_a_large_one,
    package="bitsandbytes",
    sample=8,
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_bitsandbytes_cannot_step(case: Case, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("8bit")])
def test_codes_are_zero_and_their_tables_are_kept(name: str) -> None:
    parameters = with_a_large_one(name, sample_parameters())
    trial = step_some(build(CLASSES[name], parameters, variants_of(name)[0]))
    state = trial.optimizer.state[parameters[-1]]
    assert state["state1"].dtype == torch.uint8
    tables = {key: state[key].clone() for key in state if key.startswith("qmap")}
    reset_optimizer_states(trial.optimizer)
    assert all(torch.equal(state[key], table) for key, table in tables.items())
    assert {key for key in state if not torch.as_tensor(state[key]).any()} == state.keys() - tables.keys()
    assert trial.optimizer.initialized is False


@pytest.fixture
def manager() -> Iterator[optim.GlobalOptimManager]:
    """Return the one object that holds what is overridden, and empty it again."""
    manager = optim.GlobalOptimManager.get_instance()
    yield manager
    manager.initialize()


def test_a_reset_is_fresh_where_a_parameter_has_bits_of_its_own(manager: optim.GlobalOptimManager) -> None:
    def with_one_in_32_bits(parameters: Parameters) -> Trial:
        manager.override_config(parameters[-1], "optim_bits", 32)
        trial = trial_of(optim.Adam8bit(parameters), parameters)
        step = trial.step

        def step_and_look(i: int) -> None:
            step(i)
            kinds = [trial.optimizer.state[parameter]["state1"].dtype for parameter in parameters[-2:]]
            assert kinds == [torch.uint8, torch.float32]

        trial.step = step_and_look
        return trial

    def parameters() -> Parameters:
        return with_a_large_one("", with_a_large_one("", sample_parameters()))

    assert_reset_is_fresh(with_one_in_32_bits, parameters=parameters, warmups=(4,), further=5)


@pytest.mark.parametrize(("saved", "live", "wanted"), [("Adam8bit", "Adam", 32), ("Adam", "Adam8bit", 8)])
def test_state_of_other_bits_than_a_fresh_optimizer_would_make_is_refused(
    saved: str, live: str, wanted: int
) -> None:
    parameters = with_a_large_one("", sample_parameters())
    old, new = (step_some(build(CLASSES[name], parameters, {})).optimizer for name in (saved, live))
    new.load_state_dict(old.state_dict())
    with pytest.raises(UnreachableStateError, match=f"{wanted} bits"):
        reset_optimizer_states(new)


def test_what_older_versions_keep_is_reset_too() -> None:
    parameters = with_a_large_one("", sample_parameters())
    optimizer = step_some(build(optim.Adam8bit, parameters, {})).optimizer
    state = optimizer.state[parameters[-1]]
    older = {"max1": 1, "max2": 1, "new_max1": 1, "new_max2": 1, "gnorm_vec": 100}
    state.update({key: torch.ones(size) for key, size in older.items()})
    reset_optimizer_states(optimizer)
    assert not any(state[key].any() for key in older)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_claimed(name: str) -> None:
    claim = default_registry().find(CLASSES[name])
    assert claim is not None
    assert claim.provider.plugin == "bitsandbytes"
