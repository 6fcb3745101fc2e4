"""Hold optimizers that step along projected gradients to the law of a reset: GaLore's, and APOLLO's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from variants import (
    Case,
    Options,
    Setting,
    Table,
    build,
    cast,
    not_finite,
    optimizers_in,
    step_some,
    step_with,
)

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters

galore_torch = pytest.importorskip("galore_torch")
apollo_torch = pytest.importorskip("apollo_torch")


class Mended(apollo_torch.QAPOLLOAdamW):
    """Asks bitsandbytes for no clipping at a percentile, which is gone there since 0.50."""

    __module__, __qualname__ = apollo_torch.QAPOLLOAdamW.__module__, "AdamW"  # as which a census lists it

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, no_deprecation_warning=False, **options)

    def get_config(self, *args: Any) -> Options:
        return super().get_config(*args) | {"percentile_clipping": 100, "max_unorm": 0.0}


def classes_of(package: Any, names: list[str]) -> dict[str, Any]:
    return {name: getattr(package, name) for name in names}


GALORE = ["GaLoreAdamW", "GaLoreAdafactor", "GaLoreAdamW8bit"]
IN_8_BITS = ("GaLoreAdamW8bit", "QAPOLLOAdamW")

PROJECTED: Options = {"rank": 2, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
FULL: Options = {}
BY_SVD: list[Options] = [PROJECTED, FULL, {**PROJECTED, "proj_type": "right"}]
IN_TWO: Options = {**PROJECTED, "proj_type": "full"}
BY_CHANCE: Options = {**PROJECTED, "proj": "random", "scale_type": "tensor"}
APOLLO: list[Options] = [
    BY_CHANCE,
    FULL,
    {**BY_CHANCE, "proj": "svd", "scale_type": "channel"},
    {**BY_CHANCE, "proj_type": "left"},
]
BY_HAND: Options = {"lr": 0.01, "relative_step": False}
VARIANTS: dict[str, list[Options]] = {
    "GaLoreAdamW": [*BY_SVD, {**PROJECTED, "correct_bias": False}],
    "GaLoreAdafactor": [*BY_SVD, {**PROJECTED, **BY_HAND, "beta1": 0.9}],
    "GaLoreAdamW8bit": [{**PROJECTED, "rank": 64}, *BY_SVD[1:]],
    "APOLLOAdamW": [*APOLLO, {**BY_CHANCE, "disable_nl": True}, {**BY_CHANCE, "scale_front": True}],
    "QAPOLLOAdamW": APOLLO,
}
MORE = {"GaLoreAdamW": [IN_TWO], "GaLoreAdafactor": [IN_TWO]}
"""What the copies of GaLore's classes in apollo-torch cannot step by."""

OF_A_GROUP = {*PROJECTED, "proj", "scale_type"}


def in_groups(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Give matrices the options of a projection, and the others none."""
    projection = {key: value for key, value in options.items() if key in OF_A_GROUP}
    options = {key: value for key, value in options.items() if key not in OF_A_GROUP}
    if cls.__name__ == "AdamW" and issubclass(cls, torch.optim.Optimizer):
        options["no_deprecation_warning"] = True
    matrices, others = ([p for p in parameters if (p.ndim == 2) == yes] for yes in (True, False))
    return step_with(cls([{"params": matrices, **projection}, {"params": others}], **options), parameters)


def adapt(name: str, parameters: Parameters) -> Parameters:
    """Add a matrix of which 64 ranks are 4096 numbers and more: no less is kept in 8 bits."""
    if name not in IN_8_BITS:
        return parameters
    large = parameters[0].detach().repeat(10, 12)
    return [*parameters, torch.nn.Parameter(large)]


SETTINGS = {
    "plain": Setting(build=in_groups),
    "many steps": Setting(build=in_groups, law={"warmups": (1, 5), "further": 12}, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), build=in_groups, once=True),
    "lr changed": Setting(
        build=in_groups, law={"hyperparameters": {"lr": 0.05, "relative_step": False}}, once=True
    ),
}
GALORE_TABLE = Table(
    classes_of(galore_torch, GALORE),
    {name: [*VARIANTS[name], *MORE.get(name, [])] for name in GALORE},
    SETTINGS,
    {},
    adapt=adapt,
    package="galore-torch",
    sample=3,
)
APOLLO_TABLE = Table(
    classes_of(apollo_torch, [*GALORE, "APOLLOAdamW"]) | {"QAPOLLOAdamW": Mended},
    VARIANTS,
    SETTINGS,
    {},
    adapt=adapt,
    package="apollo-torch",
    sample=3,
)


@pytest.fixture(autouse=True)
def without_a_gpu() -> Iterator[None]:
    """Let those in 8 bits step on a CPU: bitsandbytes does, and they wait for a GPU that there is not."""
    with mock.patch("torch.cuda.synchronize"):
        yield


@pytest.mark.parametrize("case", GALORE_TABLE.cases())
def test_a_reset_of_galore_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", APOLLO_TABLE.cases())
def test_a_reset_of_apollo_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("package", [galore_torch, apollo_torch])
@pytest.mark.parametrize("options", [PROJECTED, FULL])
def test_a_reset_of_adafactor_that_overflowed_is_fresh(package: Any, options: Options) -> None:
    """Its first step takes nothing of the second moment, but for what is not a number."""

    def spoiled(parameters: Parameters) -> Trial:
        return not_finite(package.GaLoreAdafactor, parameters, options, in_groups)

    assert_reset_is_fresh(spoiled, warmups=(4,), further=5)


def test_moments_stay_in_place_and_the_projector_goes() -> None:
    parameters = sample_parameters()
    optimizer = step_some(in_groups(apollo_torch.APOLLOAdamW, parameters, BY_CHANCE)).optimizer
    entry = optimizer.state[parameters[1]]
    before = dict(entry)
    assert before["exp_avg"].shape == (6, 2)
    reset_optimizer_states(optimizer)
    assert entry.keys() == before.keys() - {"projector", "scaled_grad"}
    assert all(entry[key] is before[key] for key in ("exp_avg", "exp_avg_sq"))
    assert entry["seed"] == 2


def test_a_projector_is_made_of_the_options_that_its_group_has_then() -> None:
    def built(parameters: Parameters) -> Trial:
        return in_groups(galore_torch.GaLoreAdamW, parameters, PROJECTED)

    hyperparameters = {"scale": 0.5, "update_proj_gap": 2}
    assert_reset_is_fresh(built, warmups=(4,), further=5, hyperparameters=hyperparameters)


# What there is


def test_bitsandbytes_of_today_cannot_step_quantized_apollo() -> None:
    parameters = [parameter for parameter in sample_parameters() if parameter.ndim == 2]
    with pytest.raises(KeyError, match="percentile_clipping"):
        build(apollo_torch.QAPOLLOAdamW, parameters, {"no_deprecation_warning": False}).step(0)


@pytest.mark.parametrize(("package", "table"), [(galore_torch, GALORE_TABLE), (apollo_torch, APOLLO_TABLE)])
def test_every_class_of_a_package_is_held_and_claimed(package: Any, table: Table) -> None:
    found = {cls for cls in vars(package).values() if isinstance(cls, type)}
    assert found >= set(optimizers_in(package).values())  # where several are called AdamW
    assert found == {Mended.__base__ if cls is Mended else cls for cls in table.classes.values()}
    for cls in found:
        claim = default_registry().find(cls)
        assert claim is not None
        assert claim.provider.plugin == package.__name__
