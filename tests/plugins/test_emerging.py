"""Hold every optimizer of emerging_optimizers to the law of a reset, and the two that Megatron derives."""

import importlib
import pkgutil
from typing import Any, get_args

import pytest
import torch
from torch.optim import Optimizer
from variants import (
    Case,
    Options,
    Refusal,
    Setting,
    Table,
    as_matrices,
    build,
    cast,
    no_gradient,
    step_some,
)

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

pytest.importorskip("emerging_optimizers")

import emerging_optimizers
from emerging_optimizers import mixin, registry
from emerging_optimizers.utils.sinkhorn_mapper import SinkhornMapper

for module in pkgutil.walk_packages(emerging_optimizers.__path__, f"{emerging_optimizers.__name__}."):
    importlib.import_module(module.name)  # an optimizer is registered when its module is imported

# Megatron, where torch.distributed is not initialized.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Could not determine rank:UserWarning"),
    pytest.mark.usefixtures("nothing_is_compiled"),
]

REGISTERED = {
    cls.__name__: cls for cls in map(registry.get_optimizer_cls, registry.get_optimizer_name_list())
}
"""Every class of the registry."""

MUON: list[Options] = [{}, {"nesterov": True}, {"momentum": 0.0}]
VARIANTS: dict[str, list[Options]] = {
    "AdaptiveMuon": [
        {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, **options}
        for options in (
            {"moment2_method": "adamuon"},
            {"moment2_method": "adamuon", "nesterov": True},
            {"moment2_method": "normuon"},
            {"moment2_method": "namo"},
        )
    ],
    "LaProp": [{}, {"correct_bias": False}, {"frob_normalize": True}],
    "Lion": [{}],
    "MOP": MUON,
    "Muon": MUON,
    "MuonHyperball": [{}, {"hyperball_radius": 2.0}],
    "ObliqueAdam": [{}, {"correct_bias": False}, {"dim": 1}],
    "ObliqueSGD": [{}, {"dim": 1}, {"momentum": 0.0}],
    "PSGDPro": [{}, {"momentum": 0.0}, {"precond_init_scale": 2.0}],
    "PolarGrad": MUON,
    "REKLS": [{"lr": 0.02}],
    "SOAP": [
        {"lr": 0.02, **options}
        for options in (
            {},
            {"nesterov": True},
            {"correct_bias": False},
            {"use_eigh": True},
            {"use_kl_shampoo": True},
            {"power_iter_steps": 2},
        )
    ],
    "Scion": [{}, {"momentum": 0.0}],
    "SinkhornMuon": [{}],
    "Spel": MUON,
}

SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "lr changed": Setting(law={"hyperparameters": {"lr": 0.05}}, once=True),
    "no gradient": Setting(build=no_gradient),
    "bfloat16": Setting(parameters=cast(torch.bfloat16)),
    "bfloat16, never loaded": Setting(parameters=cast(torch.bfloat16), law={"round_trips": (False,)}),
    **{
        f"{method} weight decay": Setting(
            lambda method=method: {"weight_decay": 0.05, "weight_decay_method": method}, once=True
        )
        for method in get_args(mixin.WeightDecayT)
    },
}

NEVER: dict[str, Refusal] = {
    "MOP": (NotImplementedError, "'BFloat16'"),
    "PSGDPro": (RuntimeError, "same dtype"),
    **dict.fromkeys(
        ("AdaptiveMuon", "Muon", "MuonHyperball", "PolarGrad", "Scion", "SinkhornMuon", "Spel"),
        (TypeError, "must be in float32"),
    ),
}
NOT_AFTER_A_LOAD: dict[str, Refusal] = {  # which casts their float32 state to bfloat16
    "REKLS": (RuntimeError, "same dtype"),
    "SOAP": (RuntimeError, "dtype"),
}
REFUSED = {
    **{(name, "bfloat16"): refusal for name, refusal in (NEVER | NOT_AFTER_A_LOAD).items()},
    **{(name, "bfloat16, never loaded"): refusal for name, refusal in NEVER.items()},
}


def adapt(name: str, parameters: Parameters) -> Parameters:
    if name in ("LaProp", "Lion", "PSGDPro"):
        return [parameter for parameter in parameters if parameter.ndim]
    matrices = as_matrices(parameters)
    if name == "SinkhornMuon":  # It takes only what its own map has normalized.
        normalized = SinkhornMapper(num_iters=50, eps=1e-8)
        return [torch.nn.Parameter(normalized(matrix.detach())) for matrix in matrices]
    return matrices


def has_history(name: str, options: Options) -> bool:
    """Without momentum, the buffer is the last gradient, and PSGDPro alone has more than the buffer."""
    return options.get("momentum") != 0 or name == "PSGDPro"


TABLE = Table(
    REGISTERED,
    VARIANTS,
    SETTINGS,
    REFUSED,
    adapt=adapt,
    has_history=has_history,
    package="emerging-optimizers",
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_emerging_optimizers_cannot_step(case: Case, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in NOT_AFTER_A_LOAD for options in VARIANTS[name]]
)
def test_reset_mends_state_that_a_load_has_cast(name: str, options: Options) -> None:
    parameters = adapt(name, cast(torch.bfloat16)())
    trial = step_some(build(REGISTERED[name], parameters, options))
    trial.reload()
    reset_optimizer_states(trial.optimizer)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    twin = step_some(build(REGISTERED[name], copies, options))
    step_some(trial)
    for parameter, copied in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, copied)
        mine, fresh = trial.optimizer.state[parameter], twin.optimizer.state[copied]
        assert mine.pop("step") == fresh.pop("step")
        assert mine.keys() == fresh.keys()
        assert [tensor.dtype for tensor in mine.values()] == [tensor.dtype for tensor in fresh.values()]
        assert all(map(torch.equal, mine.values(), fresh.values()))


@pytest.mark.parametrize("cls", REGISTERED.values())
def test_every_class_of_the_registry_is_claimed(cls: type[Optimizer]) -> None:
    claim = default_registry().find(cls)
    assert claim is not None
    assert claim.provider.plugin == "emerging"


def test_every_class_of_the_registry_has_variants_here() -> None:
    assert REGISTERED.keys() == VARIANTS.keys()


# What Megatron derives

ADAPTIVE = [{"moment2_method": method} for method in ("adamuon", "normuon", "namo")]
DERIVED: dict[str, list[Options]] = {
    "TensorParallelMuon": [
        {},
        {"nesterov": False},
        {"use_decoupled_weight_decay": False},
        {"tp_mode": "blockwise"},
        {"momentum": 0.0},
    ],
    "TensorParallelAdaptiveMuon": [*ADAPTIVE, {"nesterov": False}],
}
derived = pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, variants in DERIVED.items() for options in variants]
)


def build_derived(name: str, parameters: Parameters, options: Options, *, by_hand: bool = True) -> Trial:
    """Build one of Megatron's classes, and set what its constructor has to leave out.

    That of TensorParallelAdaptiveMuon in megatron-core 0.19 goes past that of AdaptiveMuon, which since
    emerging-optimizers 0.3 sets two attributes that its step reads.
    """
    megatron = pytest.importorskip("megatron.core.optimizer.emerging_optimizers")
    optimizer = getattr(megatron, name)(parameters, lr=0.02, **options)
    if by_hand:
        optimizer.scale_mode, optimizer.extra_scale_factor = "spectral", 1.0
    return trial_of(optimizer, parameters)


@derived
def test_reset_of_what_megatron_derives_is_fresh(name: str, options: Options) -> None:
    assert_reset_is_fresh(
        lambda parameters: build_derived(name, parameters, options),
        parameters=lambda: as_matrices(sample_parameters()),
        warmups=(1, 4),
        has_history=has_history(name, options),
    )


@derived
def test_what_megatron_derives_cannot_step_in_bfloat16(name: str, options: Options) -> None:
    trial = build_derived(name, as_matrices(cast(torch.bfloat16)()), options)
    with pytest.raises(TypeError, match="must be in float32"):
        trial.step(0)


@pytest.mark.parametrize("options", ADAPTIVE)
def test_megatron_cannot_step_its_adaptive_muon_by_itself(options: Options) -> None:
    parameters = as_matrices(sample_parameters())
    trial = build_derived("TensorParallelAdaptiveMuon", parameters, options, by_hand=False)
    with pytest.raises(AttributeError, match="scale_mode"):
        trial.step(0)
