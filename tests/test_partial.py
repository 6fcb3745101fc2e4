"""Forgetting a part: what is chosen becomes fresh, all else keeps its bits, the report says how much."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from miles_reset import (
    Initial,
    StateSchema,
    UnsupportedOptimizerState,
    clock,
    hookimpl,
    load_registry,
    momentum,
    reset_some_states,
)
from miles_reset.partial import PartialReport
from miles_reset.testing import same_bits


def adam(step: float, gradient: float = 1.0, **options: Any) -> tuple[torch.Tensor, Any]:
    """Return a weight, and an Adam that has seen one gradient for so many steps."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, eps=1e-12, **options)
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    entry = optimizer.state[weight]
    entry["exp_avg"].fill_(gradient)
    entry["exp_avg_sq"].fill_(gradient**2)
    entry["step"].fill_(step)
    return weight, optimizer


def next_update(weight: torch.Tensor, optimizer: Any, gradient: float = 1.0) -> float:
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return (weight.detach() - before).abs().item()


# Slots: the clock, or one moment


@pytest.mark.parametrize(("gradient", "right"), [(1.0, 0.3162), (100.0, 1.0393)])
def test_the_clock_alone(gradient: float, right: float) -> None:
    weight, optimizer = adam(100_000)
    before = {key: value.clone() for key, value in optimizer.state[weight].items()}
    report = reset_some_states(optimizer, slots=["clock"])
    entry = optimizer.state[weight]
    assert entry["step"].item() == 0
    assert all(same_bits(entry[key], before[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert next_update(weight, optimizer, gradient) == pytest.approx(right, abs=5e-5)
    assert "0.3162 times a steady one's" in str(report)


@pytest.mark.parametrize(
    ("slots", "step", "right"),
    [
        (["variance"], 100_000, 31.6228),
        (["exp_avg_sq"], 100_000, 31.6228),
        (["momentum"], 100_000, 0.1),
        (["momentum", "variance"], 100_000, 3.1623),
        (["momentum", "variance"], 1000, 2.5153),
        (["variance"], 10, 3.3082),
        (["momentum", "variance", "clock"], 1000, 1.0),
    ],
)
def test_a_moment_and_what_the_report_says_of_the_clock(slots: list[str], step: int, right: float) -> None:
    weight, optimizer = adam(step)
    if step == 10:  # the moments that go with so early a clock
        optimizer.state[weight]["exp_avg"].fill_(1 - 0.9**10)
        optimizer.state[weight]["exp_avg_sq"].fill_(1 - 0.999**10)
    report = reset_some_states(optimizer, slots=slots)
    assert next_update(weight, optimizer) == pytest.approx(right, rel=2e-3)
    said = re.findall(r"is ([\d.]+) times", str(report))
    assert said == ([] if right == 1.0 else said)
    if step > 10 and right != 1.0:
        assert float(said[0]) == pytest.approx(right, rel=1e-3)
        assert f"clock kept at {step:,}" in str(report)


def test_a_clock_that_is_a_number_and_history_beside_it() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.NAdam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[weight]["step"] = 7  # a number, as older files have it
    reset_some_states(optimizer, slots=["clock"])
    assert optimizer.state[weight]["step"] == 0
    assert optimizer.state[weight]["mu_product"].item() != 1, "it is history, and was not named"


# Parameters


def two_groups() -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.Adagrad(
        [{"params": weights[:2]}, {"params": weights[2:]}], initial_accumulator_value=0.5
    )
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    return weights, optimizer


def test_parameters_by_choice() -> None:
    weights, optimizer = two_groups()
    held = {id(weight): optimizer.state[weight]["sum"].data_ptr() for weight in weights}
    report = reset_some_states(optimizer, parameters=[weights[1]])
    assert [optimizer.state[weight]["sum"].tolist() for weight in weights] == [
        [1.5] * 2,
        [0.5] * 2,
        [1.5] * 2,
    ]
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [1, 0, 1]
    assert all(optimizer.state[weight]["sum"].data_ptr() == held[id(weight)] for weight in weights)
    assert [(line.slot, line.reset, line.of) for line in report.lines] == [("step", 1, 3), ("sum", 2, 6)]
    assert report.fraction == 3 / 9


def test_a_clock_in_a_group_goes_with_the_whole_group() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = schedulefree.AdamWScheduleFree([{"params": weights[:2]}, {"params": weights[2:]}])
    optimizer.train()
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    ks = lambda: [group["k"] for group in optimizer.param_groups]  # noqa: E731
    report = reset_some_states(optimizer, parameters=weights[:1])
    assert ks() == [1, 1]
    assert "shared by what is kept" in str(report)
    reset_some_states(optimizer, parameters=weights[:2])
    assert ks() == [0, 1]


# Rows


def test_one_slot_of_a_stack() -> None:
    stack, other = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.Adam([stack, other])
    for weight in (stack, other):
        weight.grad = torch.ones(3, 2)
    optimizer.step()
    moment, address = optimizer.state[stack]["exp_avg"], optimizer.state[stack]["exp_avg"].data_ptr()
    before = optimizer.state[other]["exp_avg"].clone()
    report = reset_some_states(optimizer, rows={stack: [1]})
    assert moment[:, 0].tolist() == pytest.approx([0.1, 0.0, 0.1])
    assert optimizer.state[stack]["exp_avg_sq"][:, 1].tolist() == pytest.approx([0.001, 0.0, 0.001])
    assert optimizer.state[stack]["exp_avg"].data_ptr() == address
    assert same_bits(optimizer.state[other]["exp_avg"], before)
    assert optimizer.state[stack]["step"].item() == 1
    lines = {line.slot: line for line in report.lines}
    assert (lines["exp_avg"].reset, lines["exp_avg"].of) == (2, 12)
    assert lines["step"].why == "shared by what is kept"
    assert "clock kept at 1" in report.notes[0]


def test_rows_of_a_value_that_does_not_start_at_zero() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.Adagrad([weight], initial_accumulator_value=0.25)
    weight.grad = torch.ones(4, 2)
    optimizer.step()
    reset_some_states(optimizer, rows={weight: [0, 3]}, slots=["sum"])
    assert optimizer.state[weight]["sum"][:, 0].tolist() == [0.25, 1.25, 1.25, 0.25]


def test_rows_of_a_copy_of_the_weights_become_the_weights() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))
    optimizer = schedulefree.SGDScheduleFree([weight], lr=0.5)
    optimizer.train()
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    z = optimizer.state[weight]["z"]
    old = z.clone()
    weight.data.add_(10)
    reset_some_states(optimizer, rows={weight: [2]}, slots=["z"])
    assert same_bits(z[2], weight.detach()[2])
    assert same_bits(z[:2], old[:2])


def test_the_momentum_of_muon_has_rows_too() -> None:
    emerging = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers")
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = emerging.Muon([weight])
    weight.grad = torch.randn(4, 3)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    old = momentum.clone()
    reset_some_states(optimizer, rows={weight: [2]})
    assert not momentum[2].any()
    assert all(same_bits(momentum[i], old[i]) for i in (0, 1, 3))


# All but the largest


def sgd_holding(values: torch.Tensor) -> tuple[torch.Tensor, torch.optim.Optimizer, nn.Parameter]:
    weight = nn.Parameter(torch.zeros_like(values))
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = values.clone()
    optimizer.step()
    return optimizer.state[weight]["momentum_buffer"], optimizer, weight


@pytest.mark.parametrize(
    ("values", "keep", "survive"),
    [
        (torch.arange(1.0, 11.0), 0.1, [9]),
        (torch.ones(10), 0.1, [0]),
        (torch.ones(10), 0.3, [0, 1, 2]),
        (torch.tensor([5.0, -7.0, *[0.0] * 8]), 0.1, [1]),
        (torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0]), 0.6, [1, 2, 3]),
        (torch.tensor([1.0, math.nan, -3.0, math.inf]), 0.5, [2, 3]),
        (torch.arange(1.0, 11.0), 0.0, []),
        (torch.arange(1.0, 11.0), 1.0, list(range(10))),
        (torch.arange(1.0, 13.0).reshape(4, 3), 0.25, [9, 10, 11]),
    ],
)
def test_pruning_keeps_exactly_the_ratio(values: torch.Tensor, keep: float, survive: list[int]) -> None:
    moment, optimizer, _ = sgd_holding(values)
    address = moment.data_ptr()
    report = reset_some_states(optimizer, keep=keep)
    left = torch.zeros(values.numel(), dtype=torch.bool)
    left[survive] = True
    assert torch.equal(moment.flatten()[left], values.flatten()[left])
    assert not moment.flatten()[~left].any()
    assert moment.data_ptr() == address
    assert len(survive) == round(keep * values.numel())
    assert report.fraction == (0 if keep == 1 else 1 - len(survive) / values.numel())


def test_a_tensor_larger_than_a_quantile_takes() -> None:
    moment, optimizer, _ = sgd_holding(torch.arange(16_777_217, dtype=torch.float32))
    report = reset_some_states(optimizer, keep=0.1)
    assert moment.count_nonzero().item() == round(0.1 * 16_777_217)
    assert f"{report.fraction:.2%}" == "90.00%"


def test_a_random_choice_is_the_same_for_the_same_seed() -> None:
    kept = []
    for seed in (1, 1, 2):
        moment, optimizer, _ = sgd_holding(torch.ones(1000))
        reset_some_states(optimizer, keep=0.25, seed=seed)
        kept.append(moment.nonzero().flatten().tolist())
    assert kept[0] == kept[1] != kept[2]
    assert len(kept[0]) == len(kept[2]) == 250


def test_only_the_chosen_parameters_are_pruned() -> None:
    base, lora = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.Adam([base, lora])
    for weight in (base, lora):
        weight.grad = torch.arange(1.0, 11.0)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[base].items()}
    report = reset_some_states(optimizer, parameters=[lora], keep=0.1)
    assert all(same_bits(value, before[key]) for key, value in optimizer.state[base].items())
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.state[lora][key].nonzero().flatten().tolist() == [9]
    shares = {line.slot: line.reset / line.of for line in report.lines}
    assert shares == {"step": 0, "exp_avg": 0.45, "exp_avg_sq": 0.45}


# Refused


def momentum_sgd() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    _, optimizer, weight = sgd_holding(torch.ones(4, 2))
    return weight, optimizer


@pytest.mark.parametrize(
    ("choice", "match"),
    [
        ({"slots": ["momemtum_buffer"]}, "the nearest is 'momentum_buffer'"),
        ({"slots": "momentum"}, "not a list of names"),
        ({"keep": 1.5}, "a ratio from 0 to 1"),
        ({"keep": math.nan}, "a ratio from 0 to 1"),
        ({"seed": 3}, "a seed is for keep"),
        ({"parameters": [torch.zeros(7)]}, "in no param group here"),
        ({"rows": {torch.zeros(7): [0]}}, "in no param group here"),
        ({"rows": {torch.zeros(7): [7]}}, "not all rows"),
        ({"rows": {torch.zeros(7): [-1]}}, "not all rows"),
        ({"rows": {torch.zeros(()): [0]}}, "not all rows"),
        ({"rows": {}, "keep": 0.5}, "cannot be combined"),
    ],
)
def test_a_choice_that_makes_no_sense_changes_nothing(choice: dict[str, Any], match: str) -> None:
    weight, optimizer = momentum_sgd()
    before = optimizer.state[weight]["momentum_buffer"].clone()
    with pytest.raises(ValueError, match=match) as caught:
        reset_some_states(optimizer, **choice)
    assert "Nothing was changed." in str(caught.value)
    assert same_bits(optimizer.state[weight]["momentum_buffer"], before)


def test_what_is_not_made_of_rows_is_refused() -> None:
    adafactor = torch.optim.Adafactor([weight := nn.Parameter(torch.zeros(4, 4))])
    weight.grad = torch.ones(4, 4)
    adafactor.step()
    before = adafactor.state[weight]["row_var"].clone()
    with pytest.raises(UnsupportedOptimizerState, match="has no rows to reset apart"):
        reset_some_states(adafactor, rows={weight: [1]})
    assert same_bits(adafactor.state[weight]["row_var"], before)


def test_history_that_is_no_moment_is_reset_in_part_only_by_name() -> None:
    weight = nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.Rprop([weight], lr=0.5)
    for gradient in (1.0, 1.0):
        weight.grad = torch.full((4, 2), gradient)
        optimizer.step()
    with pytest.raises(UnsupportedOptimizerState, match="name it in slots"):
        reset_some_states(optimizer, keep=0.5)
    reset_some_states(optimizer, rows={weight: [1]}, slots=["step_size"])
    assert optimizer.state[weight]["step_size"][:, 0].tolist() == pytest.approx([0.6, 0.5, 0.6, 0.6])


def test_what_is_given_up_when_fresh_is_given_up_whole() -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD(weights, momentum=0.9, dampening=0.5)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(UnsupportedOptimizerState, match="would be removed, which cannot be done in part"):
        reset_some_states(optimizer, rows={weights[0]: [1]})
    reset_some_states(optimizer, parameters=weights[:1])
    assert "momentum_buffer" not in optimizer.state[weights[0]]
    assert optimizer.state[weights[1]]["momentum_buffer"].tolist() == [1.0] * 3


class Gated(torch.optim.SGD):
    """Makes two things behind one presence test."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"mean": parameter.grad.clone(), "count": 1}


class GatedPlugin:
    @hookimpl
    def miles_reset_schemas(self) -> list[StateSchema]:
        gate = momentum("mean", Initial.ABSENT_ENTRY)
        return [StateSchema(f"{Gated.__module__}.Gated", gate, clock("count"))]


def test_an_entry_is_given_up_whole() -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    optimizer = Gated(weights)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    registry = load_registry(plugins=[GatedPlugin()], entry_points=False)
    with pytest.raises(UnsupportedOptimizerState, match="with its whole entry only"):
        reset_some_states(optimizer, slots=["clock"], registry=registry)
    report = reset_some_states(optimizer, parameters=weights[1:], registry=registry)
    assert list(optimizer.state) == weights[:1]
    assert report.fraction == 0.5


def test_a_count_for_each_weight_is_no_count_to_speak_of() -> None:
    weight, optimizer = adam(7)
    optimizer.state[weight]["step"] = torch.tensor([7.0, 9.0])
    report = reset_some_states(optimizer, slots=["variance"])
    assert [line.of for line in report.lines if line.slot == "step"] == [2]


def test_nothing_is_said_of_the_next_update_where_nothing_was_reset() -> None:
    _, optimizer = adam(1)
    report = reset_some_states(optimizer, parameters=[])
    assert (report.fraction, report.notes) == (0, ())


def test_a_tensor_that_what_is_kept_shares_is_refused() -> None:
    weights, optimizer = two_groups()
    optimizer.state[weights[0]]["step"] = optimizer.state[weights[1]]["step"]
    with pytest.raises(UnsupportedOptimizerState, match="shares its tensor with state that is kept"):
        reset_some_states(optimizer, parameters=weights[:1])
    assert optimizer.state[weights[1]]["step"].item() == 1
    reset_some_states(optimizer, parameters=weights[:2])
    assert optimizer.state[weights[1]]["step"].item() == 0


def test_an_undeclared_class_is_refused() -> None:
    weight, optimizer = momentum_sgd()
    with pytest.raises(UnsupportedOptimizerState, match="No schema"):
        reset_some_states(optimizer, registry=load_registry(entry_points=False))
    assert optimizer.state[weight]["momentum_buffer"].all()


def test_without_a_choice_it_is_the_whole_reset() -> None:
    weight, optimizer = adam(50)
    report = reset_some_states(optimizer)
    assert next_update(weight, optimizer) == pytest.approx(1.0)
    assert isinstance(report, PartialReport)
    assert report.fraction == 1
    assert report.notes == ()
    assert report.to_dict()["lines"][0] == {"slot": "step", "role": "clock", "reset": 1, "of": 1, "why": ""}
