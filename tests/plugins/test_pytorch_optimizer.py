"""Hold the optimizers of pytorch-optimizer to the law of a reset; its wrappers are in a file of their own."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from variants import Options, Setting, Table, alone, as_matrices, cast, draw, step_some

from miles_reset import UnsupportedOptimizerState, plan_reset, reset_optimizer_states
from miles_reset.errors import UnreachableStateError
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

library = pytest.importorskip("pytorch_optimizer")
numpy = pytest.importorskip("numpy")


def defined() -> dict[str, type[Optimizer]]:
    """Return each optimizer that the package defines, public or not."""
    found: dict[str, type[Optimizer]] = {}
    for module in pkgutil.walk_packages(library.__path__, "pytorch_optimizer."):
        for name, cls in vars(importlib.import_module(module.name)).items():
            own = inspect.isclass(cls) and cls.__module__ == module.name
            if own and issubclass(cls, Optimizer):
                found[name] = cls
    return found


DEFINED = defined()
WRAPPERS = {
    "FriendlySAM", "GSAM", "LookSAM", "Lookahead", "Magma", "OrthoGrad", "PCGrad", "SAM",
    "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC", "WSAM",
}  # fmt: skip
"""Those that hold another optimizer: tests/plugins/test_pytorch_optimizer_wrappers.py."""
LEFT_OUT = {
    "BaseOptimizer": "abstract: each of its subclasses has a record of its own",
    "MuonBase": "abstract: each of its subclasses has a record of its own",
}
CLASSES = {name: cls for name, cls in sorted(DEFINED.items()) if name not in WRAPPERS | LEFT_OUT.keys()}


# How to build and to step

NEEDED: dict[str, Options] = {
    "AdaGC": {"warmup_steps": 4},
    "AdamMini": {"lr": 0.01, "num_embeds": 6, "num_heads": 2},
    "Amos": {"momentum": 0.9},
    "BSAM": {"num_data": 1000, "lr": 0.01, "rho": 0.01, "weight_decay": 0.5},
    "Fromage": {"p_bound": 2.0},
    "LaProp": {"steps_before_using_centered": 2},
    "PID": {"momentum": 0.9},
    "QHM": {"momentum": 0.9},
    "Ranger21": {"num_iterations": 40},
    "SGDW": {"momentum": 0.9},
    "SGDP": {"momentum": 0.9, "nesterov": True},
    "SpectralSphere": {"power_iteration_steps": 2, "msign_steps": 2, "solver_max_iterations": 3},
    "SaRA": {"threshold": 0.6, "lr": 0.2},
    "SM3": {"momentum": 0.9, "beta": 0.5},
}
"""What a constructor must be given, or what it takes for the optimizer to remember something soon."""

LOW_RANK = {"rank": 2, "update_proj_gap": 3, "scale": 1.0, "projection_type": "std"}
GROUPED = {"GaLore", "Fira", "APOLLO"}
MUONS = {name for name, cls in CLASSES.items() if issubclass(cls, DEFINED["MuonBase"])}
OF_A_MODEL = {"AdamMini", "LOMO", "AdaLOMO"}
FUSED = {"LOMO", "AdaLOMO"}
OF_A_GRAPH = {"AdaHessian", "SophiaH"}
OF_A_LOSS = {"AliG", "BSAM", "EmoNavi", "EmoLynx", "EmoFact"}
OF_RANKS = {"DeMo", "DistributedMuon"}


def make(cls: type[Any], parameters: Parameters, options: Options) -> Any:
    """Build an optimizer over groups, or over a module, where it wants such."""
    name, options = cls.__name__, NEEDED.get(cls.__name__, {}) | options
    if name in OF_A_MODEL:
        names = ("embed", "q_proj.weight", "norm", "bias", "wv.weight", "more")
        module = torch.nn.Module()
        for label, parameter in zip(names, parameters, strict=False):
            module.register_parameter(label.replace(".", "_") if "." not in label else label[:6], parameter)
        return cls(module, **options)
    if name in MUONS:
        matrices, others = (
            [p for p in parameters if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False)
        )
        return cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}], **options)
    if name in GROUPED:
        low_rank = LOW_RANK | {key: options.pop(key) for key in LOW_RANK.keys() & options.keys()}
        return cls([{"params": parameters[:2], **low_rank}, {"params": parameters[2:]}], **options)
    return cls(parameters, **options)


def losses(parameters: Parameters, i: int) -> Callable[[], float]:
    """Return a closure that gives a gradient, and a loss that goes up and down."""

    def closure() -> float:
        for parameter in parameters:
            parameter.grad = draw(parameter, 1000 + i)
        return 2.0 + (-1.5 if i % 3 else 1.0) * 0.9**i

    return closure


def stepping(optimizer: Any, parameters: Parameters) -> Callable[[int], None]:
    """Return what makes one step, with gradients for these parameters."""
    name = type(optimizer).__name__
    plain = trial_of(optimizer, parameters).step

    def with_closure(i: int) -> None:
        closure = losses(parameters, i)
        closure()  # Some look at the gradients before they ask for them.
        optimizer.step(closure)

    def with_graph(i: int) -> None:
        far = [parameter - draw(parameter, i) for parameter in parameters]
        loss = sum((distance**4 + distance**2).sum() for distance in far)
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, create_graph=True), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()

    def fused(i: int) -> None:
        optimizer.fused_backward(sum((p * draw(p, i)).sum() for p in parameters), 0.01)

    def step(i: int) -> None:
        torch.manual_seed(i)
        numpy.random.seed(i)
        if name in OF_A_LOSS:
            with_closure(i)
        elif name in OF_A_GRAPH:
            with_graph(i)
        elif name in FUSED:
            fused(i)
        else:
            plain(i)
        if name == "SCIONLight":
            optimizer.zero_grad()

    return step


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    optimizer = make(cls, parameters, options)
    return Trial(optimizer, stepping(optimizer, parameters), lambda: parameters)


def no_gradient(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Leave one parameter without a gradient for ever, and one for the first six steps."""
    optimizer = make(cls, parameters, options)
    early, late = (stepping(optimizer, parameters[first:]) for first in (2, 1))
    return Trial(optimizer, lambda i: (early if i < 6 else late)(i), lambda: parameters)


def adapt(name: str, parameters: Parameters) -> Parameters:
    if name == "Adan":  # It clips no scalar.
        return [p for p in parameters if p.ndim]
    if name == "LoRARite":
        return [
            torch.nn.Parameter(p.detach().clone()) for one in parameters[:2] for p in (one[:2], one[:, :2])
        ]
    if name in {"SpectralSphere", "AdaLOMO", "DeMo"}:
        return as_matrices(parameters)
    return parameters


# The variants

AMS: list[Options] = [{"ams_bound": True}]
ADANORM: list[Options] = [{"adanorm": True}]
D: list[Options] = [{"d0": 1e-3, "growth_rate": 1.5}, {"d0": 1e-2, "weight_decay": 0.05}]
PROJECTED: list[Options] = [{"projection_type": one} for one in ("reverse_std", "right", "left", "full")]

MORE: dict[str, list[Options]] = {
    "A2Grad": [{"variant": "inc"}, {"variant": "exp"}],
    "ADOPT": [{"weight_decay": 0.05}],
    "APOLLO": [{"scale_type": "channel"}, {"correct_bias": False}],
    "ASGD": [{"weight_decay": 0.05}],
    "AdEMAMix": [{"t_alpha_beta3": 6, "alpha": 8.0}],
    "AdaBelief": [*AMS, *ADANORM, {"rectify": True}],
    "AdaBound": AMS,
    "AdaFactor": [
        *AMS, {"betas": (None, 0.999)}, {"momentum_dtype": torch.float32}, {"relative_step": False},
    ],
    "AdaGO": [{"nesterov": True}],
    "AdaHessian": [{"update_period": 3}],
    "AdaMax": ADANORM,
    "AdaMuon": [{"weight_decay": 0.05}],
    "AdaNorm": AMS,
    "AdaPNM": [{"ams_bound": False}, *ADANORM],
    "AdaShift": [{"keep_num": 3}, {"reduce_func": None}],
    "Adai": [{"stable_weight_decay": True, "weight_decay": 0.05}, {"dampening": 0.9}],
    "Adalite": [{"fixed_decay": True}],
    "AdamC": AMS,
    "AdamP": [*ADANORM, {"nesterov": True}],
    "AdamS": [*AMS, *ADANORM],
    "AdamWSN": [{"subset_size": 2}],
    "Adan": [*ADANORM, {"max_grad_norm": 1.0}],
    "Aida": [*AMS, *ADANORM, {"rectify": True}],
    "Alice": [{"rank": 3, "leading_basis": 2, "update_interval": 3}],
    "AliG": [{"momentum": 0.9, "adjusted_momentum": one} for one in (False, True)] + [{"max_lr": 0.1}],
    "Amos": [{"momentum": 0.0}],
    "Ano": [{"logarithmic_schedule": True}],
    "ApolloDQN": [{"warmup_steps": 6}, {"rebound": "belief"}, {"weight_decay": 0.05}],
    "BCOS": [{"mode": "g"}, {"mode": "m"}],
    "BSAM": [{"adaptive": True}],
    "CAME": AMS,
    "Conda": [{"update_proj_gap": 3}, *({"update_proj_gap": 3} | one for one in PROJECTED)],
    "DAdaptAdaGrad": [*D, {"momentum": 0.9}],
    "DAdaptAdam": [*D, {"bias_correction": True}],
    "DAdaptAdan": D,
    "DAdaptLion": [{"d0": 1e-3}],
    "DAdaptSGD": D,
    "DASH": [
        {"momentum": 0.9}, {"block_size": 3, "precondition_frequency": 3}, {"inverse_root_method": "eigh"},
        {"betas": (0.0, 0.95), "start_preconditioning_step": 3},
    ],
    "DeMo": [{"weight_decay": 0.05, "compression_top_k": 2, "compression_chunk": 4}],
    "DiffGrad": [*AMS, *ADANORM, {"rectify": True}],
    "DualAdam": [{"switch_rate": 0.2}],
    "EmoFact": [{"use_shadow": True}],
    "EmoLynx": [{"use_shadow": True}],
    "EmoNavi": [{"use_shadow": True}],
    "Fira": [*PROJECTED],
    "FlashAdamW": [{"quantize": False}, {"compress_state_dict": False}, {"decouple_lr": True}],
    "Fromage": [{"p_bound": None}],
    "GaLore": [*PROJECTED],
    "GrokFastAdamW": [{"grokfast": False}, {"grokfast_after_step": 3}],
    "Kron": [
        {"memory_save_mode": "all_diag"}, {"memory_save_mode": "one_diag"}, {"min_ndim_triangular": 3},
        {"pre_conditioner_update_probability": 0.4, "balance_prob": 0.5}, {"mu_dtype": torch.bfloat16},
    ],
    "LARS": [{"nesterov": True}, {"dampening": 0.5}],
    "LaProp": [{"centered": True}, *AMS],
    "Lamb": [*ADANORM, {"rectify": True}, {"pre_norm": True}, {"grad_averaging": False}],
    "Lion": ADANORM,
    "LoRARite": [{"apply_escape": True}, {"balance_param": True, "update_capping": 0.1}],
    "MADGRAD": [{"momentum": 0.0}],
    "MARS": [
        *AMS, {"mars_type": "lion"}, {"mars_type": "shampoo"}, {"optimize_1d": True}, {"cautious": True},
    ],
    "Muon": [{"nesterov": False}, {"weight_decay": 0.05}],
    "Nero": [{"constraints": False}],
    "NorMuon": [{"nesterov": False}, {"update_scale": "match_rms"}],
    "NovoGrad": [{"grad_averaging": True}],
    "PID": [{"momentum": 0.0}, {"dampening": 0.5}],
    "Prodigy": [*D, {"safeguard_warmup": True}, {"bias_correction": True}, {"beta3": 0.9}],
    "QHAdam": [{"nus": (0.7, 1.0)}],
    "RAdam": [*ADANORM, {"degenerated_to_sgd": True}],
    "ROSE": [{"stabilize": False}],
    "Ranger": [*ADANORM, {"k": 3}],
    "Ranger21": [{"lookahead_merge_time": 3}, {"num_warm_up_iterations": 3}, {"disable_lr_scheduler": True}],
    "SCION": [{"constraint": True}],
    "SCIONLight": [{"momentum": 1.0}],
    "SGDW": [{"momentum": 0.0}, {"nesterov": True}, {"dampening": 0.5}],
    "SGDSaI": [{"momentum": 0.0}],
    "SM3": [{"momentum": 0.0, "beta": 0.0}],
    "SOAP": [
        {"precondition_frequency": 2}, {"precondition_1d": True}, {"max_precondition_dim": 7},
        {"normalize_gradient": True, "correct_bias": False},
    ],
    "SPAM": [{"update_proj_gap": 3, "warmup_epoch": 2, "grad_accu_steps": 2}],
    "SPlus": [{"inverse_steps": 2}, {"max_dim": 7}],
    "SRMM": [{"memory_length": 3}, {"memory_length": None}],
    "SWATS": [*AMS, {"nesterov": True}, {"eps": 10.0}],
    "SaRA": [*AMS, {"progressive_iter": 3}, {"lambda_rank": 0.1}],
    "ScalableShampoo": [
        {"start_preconditioning_step": 2, "preconditioning_compute_steps": 2} | one
        for one in (*({"graft_type": graft, "block_size": 3} for graft in range(5)), {"use_svd": True})
    ],
    "ScheduleFreeAdamW": [*AMS, {"warmup_steps": 6, "r": 0.5}, {"decoupling_c": 5}],
    "ScheduleFreeRAdam": [{"silent_sgd_phase": False}],
    "ScheduleFreeSGD": [{"warmup_steps": 6, "r": 0.5}],
    "Shampoo": [{"momentum": 0.9}, {"preconditioning_compute_steps": 3}, {"matrix_eps": 1e-2}],
    "SignSGD": [{"momentum": 0.0}],
    "SimplifiedAdEMAMix": [{"beta1_warmup": 6, "alpha": 2.0}],
    "SophiaH": [{"update_period": 3}],
    "SpectralSphere": [{"nesterov": False}],
    "StableAdamW": [{"kahan_sum": False}],
    "StableSPAM": [{"update_proj_gap": 3}, {"t_max": 8}],
    "VSGD": [{"weight_decay": 0.05}],
    "Yogi": [{"initial_accumulator": 1e-3}],
}  # fmt: skip


def variants(name: str) -> list[Options]:
    by_one = [{"foreach": False}] if "foreach" in inspect.signature(CLASSES[name]).parameters else []
    return [{}, *MORE.get(name, []), *by_one]


SETTINGS = {
    "plain": Setting(build=build, law={"further": 4}),
    "many steps": Setting(build=build, law={"warmups": (1, 7), "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(build=build, parameters=cast(torch.bfloat16), once=True),
}
REFUSED: dict[tuple[str, str], tuple[type[Exception], str]] = {
    ("AdaGC", "bfloat16"): (RuntimeError, "expected dtype"),  # after a load
    ("Kron", "bfloat16"): (RuntimeError, "expected scalar type"),
    ("LoRARite", "bfloat16"): (NotImplementedError, "not implemented for 'BFloat16'"),
}
TABLE = Table(
    CLASSES,
    {name: variants(name) for name in CLASSES},
    SETTINGS,
    REFUSED,
    adapt=adapt,
    has_history=lambda name, options: name != "LOMO",
    package="pytorch-optimizer",
    sample=20,
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    with alone() if case.cls.__name__ in OF_RANKS else contextlib.nullcontext():
        hold(case)


@pytest.mark.parametrize(("case", "error", "message"), TABLE.refusals())
def test_what_the_library_cannot_step(case: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case.step_load_and_step()


def test_every_optimizer_of_the_library_is_held_to_the_law() -> None:
    assert {*CLASSES, *WRAPPERS, *LEFT_OUT} == DEFINED.keys()
    assert all(inspect.isabstract(DEFINED[name]) for name in LEFT_OUT)


# What a table of options does not reach


@pytest.mark.parametrize("name", sorted(name for name in CLASSES if name.startswith(("DAdapt", "Prodigy"))))
def test_a_step_size_that_grew_is_fresh_in_all_groups(name: str) -> None:
    """It grows along gradients that agree, and the groups share it."""
    made: list[Any] = []

    def agreeing(parameters: Parameters) -> Trial:
        optimizer = CLASSES[name]([{"params": parameters[:2]}, {"params": parameters[2:]}], d0=1e-4)
        made.append(optimizer)

        def step(i: int) -> None:
            for parameter in parameters:
                parameter.grad = 1 + 0.1 * draw(parameter, i)
            optimizer.step()

        return Trial(optimizer, step, lambda: parameters)

    assert_reset_is_fresh(agreeing, warmups=(6,), further=7)
    assert sum(all(group["d"] > 1e-4 for group in one.param_groups) for one in made) >= 4


@pytest.mark.parametrize("name", ["ScheduleFreeSGD", "ScheduleFreeAdamW", "ScheduleFreeRAdam", "SPlus"])
def test_a_reset_in_evaluation_mode_is_fresh(name: str) -> None:
    """The weights that are averaged stand in the parameters then; SPlus keeps those that it trains beside."""

    def evaluated(parameters: Parameters) -> Trial:
        optimizer = CLASSES[name](parameters)
        plain = trial_of(optimizer, parameters).step

        def step(i: int) -> None:
            optimizer.train()
            plain(i)
            optimizer.eval()

        def weights() -> list[Any]:
            return [optimizer.state.get(p, {}).get("param_buffer", p) for p in parameters]

        return Trial(optimizer, step, weights)

    assert_reset_is_fresh(evaluated, warmups=(3, 4), further=5)


@pytest.mark.parametrize("bits", [24, 32])
def test_bits_of_weights_in_the_state_are_kept(bits: int) -> None:
    def with_bits(parameters: Parameters) -> Trial:
        parameters = [p for p in parameters if p.is_floating_point()]
        optimizer = CLASSES["FlashAdamW"](parameters, master_weight_bits=bits, weight_decay=0.1)
        for parameter in parameters:  # The first step would make them.
            lacking = torch.zeros_like(parameter, dtype=torch.int8 if bits == 24 else torch.int16)
            optimizer.state[parameter]["error_bits"] = lacking

        def weights() -> list[Any]:
            return [*parameters, *(optimizer.state[p]["error_bits"] for p in parameters)]

        return Trial(optimizer, trial_of(optimizer, parameters).step, weights)

    assert_reset_is_fresh(with_bits, parameters=cast(torch.bfloat16), warmups=(4,), further=5)


def test_the_largest_weight_that_flash_adamw_met_is_forgotten() -> None:
    parameters = cast(torch.bfloat16)()
    optimizer = CLASSES["FlashAdamW"](parameters, lr=0.5, check_numerics=True)
    step_some(trial_of(optimizer, parameters))
    assert optimizer.param_absmax
    reset_optimizer_states(optimizer)
    assert optimizer.param_absmax == {}


def test_the_rate_that_swats_puts_in_place_of_its_own_goes() -> None:
    trial = build(CLASSES["SWATS"], sample_parameters(), {"eps": 10.0})
    for i in range(4):
        trial.step(i)
    group = trial.optimizer.param_groups[0]
    assert group["phase"] == "sgd"
    assert group["lr"] != 1e-3
    reset_optimizer_states(trial.optimizer)
    assert (group["phase"], group["lr"]) == ("adam", 1e-3)


# What is refused


def stepped(name: str, **options: Any) -> Any:
    parameters = sample_parameters()
    return step_some(trial_of(CLASSES[name](parameters, **options), parameters)).optimizer


def test_masks_that_are_drawn_at_random_are_refused() -> None:
    with pytest.raises(UnsupportedOptimizerState, match="draws its masks at random"):
        plan_reset(stepped("SPAM", density=0.5))


def test_preconditioners_that_start_otherwise_are_refused() -> None:
    with pytest.raises(UnreachableStateError, match=r"in torch\.float64; only"):
        plan_reset(stepped("Kron", precondition_dtype=torch.float64))


def test_rates_of_several_groups_that_are_written_over_are_refused() -> None:
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = CLASSES["ASGD"]([{"params": [first]}, {"params": [second], "lr": 0.5}])
    step_some(trial_of(optimizer, [first, second]))
    with pytest.raises(UnsupportedOptimizerState, match="'lr' of its groups itself"):
        plan_reset(optimizer)


def test_momentum_in_the_gradients_is_refused_until_it_is_gone() -> None:
    optimizer = stepped("SCIONLight")
    with pytest.raises(UnreachableStateError, match=r"Call its zero_grad\(\) first"):
        plan_reset(optimizer)
    optimizer.zero_grad()
    reset_optimizer_states(optimizer)
