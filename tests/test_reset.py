"""The public functions: plans, reports, what they say and when they refuse."""

import json
import logging
from typing import Any

import pytest
import torch
from large import state_tensors, stepped_adamw
from rich.console import Console

from miles_reset import UndeclaredStateError, UnreachableStateError, plan_reset, reset_optimizer_states
from miles_reset.render import render


def stepped(optimizer: torch.optim.Optimizer, steps: int = 1) -> Any:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        optimizer.step()
    return optimizer


def weights(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]


def test_a_plan_changes_nothing_until_it_is_applied() -> None:
    optimizer = stepped(torch.optim.Adam(weights()))
    before = [tensor.clone() for state in optimizer.state.values() for tensor in state.values()]
    plan = plan_reset(optimizer)
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(map(torch.equal, before, after))
    report = plan.apply()
    assert not any(tensor.any() for tensor in after)
    assert report.counts == plan.counts == {"filled in place": 6}


@pytest.mark.parametrize("change", ["load", "replace", "remove", "add"])
def test_a_plan_that_no_longer_fits_is_refused(change: str) -> None:
    optimizer = stepped(torch.optim.Adam(weights()))
    plan = plan_reset(optimizer)
    state = list(optimizer.state.values())[1]
    if change == "load":
        optimizer.load_state_dict(optimizer.state_dict())
        state = list(optimizer.state.values())[1]
    elif change == "replace":
        state["exp_avg"] = torch.ones(3)
    elif change == "remove":
        del state["exp_avg"]
    else:
        state["max_exp_avg_sq"] = torch.ones(3)
    with pytest.raises(UnreachableStateError, match="has changed since the reset was planned"):
        plan.apply()
    assert state["step"] > 0


def test_a_plan_may_be_applied_again() -> None:
    optimizer = stepped(torch.optim.NAdam(weights()))
    plan = plan_reset(optimizer)
    plan.apply()
    stepped(optimizer)
    plan.apply()
    assert all(state["mu_product"] == 1 for state in optimizer.state.values())


def test_a_reset_before_the_first_step_says_that_it_found_no_state() -> None:
    report = reset_optimizer_states([torch.optim.Adam(weights()), torch.optim.SGD(weights())])
    assert str(report) == "No state was found in 2 optimizers: nothing reset."
    assert str(reset_optimizer_states(None)).startswith("No optimizer was reached: nothing reset.")


def test_a_table_has_a_line_for_each_slot_of_each_leaf() -> None:
    optimizers = [stepped(torch.optim.Adam(weights())), stepped(torch.optim.SGD(weights(), momentum=0.9))]
    assert str(plan_reset(optimizers)).splitlines() == [
        "8 values in 2 optimizers to reset.",
        "  slot             role      fresh value  outcome          values",
        "list[0].Adam",
        "  step             clock     0            filled in place  2",
        "  exp_avg          momentum  0            filled in place  2",
        "  exp_avg_sq       variance  0            filled in place  2",
        "list[1].SGD",
        "  momentum_buffer  momentum  -0.0         filled in place  2",
    ]


def test_many_leaves_that_are_alike_share_lines_of_a_table_but_not_of_the_data() -> None:
    plan = plan_reset([stepped(torch.optim.Adam(weights(1))) for _ in range(1000)])
    assert len(str(plan).splitlines()) == 6
    assert "list[*].Adam (1,000 alike)" in str(plan)
    assert len(plan.to_dict()["lines"]) == 3000


def test_plans_and_reports_are_plain_data_too() -> None:
    optimizer = stepped(torch.optim.SGD(weights(), momentum=0.9, dampening=0.5))
    data = reset_optimizer_states([optimizer, None]).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["lines"] == [
        {
            "path": "list[0].SGD",
            "key": "momentum_buffer",
            "at": "state",
            "role": "momentum",
            "fresh": "absent",
            "outcome": "removed",
            "values": 2,
            "plugin": "torch",
        }
    ]
    assert data["left_alone"] == [{"path": "list[1].None", "reason": "stub: holds no optimizer"}]


def test_rich_prints_a_tree() -> None:
    plan = plan_reset(stepped(torch.optim.Adam(weights())))
    printed, rendered = Console(width=100, record=True), Console(width=100, record=True)
    printed.print(plan)
    rendered.print(render(plan))
    assert printed.export_text() == rendered.export_text() != ""


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "miles_reset"):
        reset_optimizer_states(stepped(torch.optim.Adam(weights())))
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("INFO", "6 values in 1 optimizer reset.")


def test_undeclared_state_is_refused_or_left_alone_and_listed() -> None:
    optimizer = stepped(torch.optim.Adam(weights()))
    first, second = optimizer.state.values()
    second["z"], second["a"] = 1, 2
    with pytest.raises(UndeclaredStateError, match="does not declare: 'a', 'z'") as caught:
        reset_optimizer_states(optimizer)
    assert (caught.value.path, caught.value.keys) == ("Adam", ("a", "z"))
    assert caught.value.schema == "torch.optim.adam.Adam"
    assert first["step"] == 1
    report = reset_optimizer_states(optimizer, strict=False)
    assert report.left_alone == (("Adam", "not declared: 'a', 'z'"),)
    assert (first["step"], second["step"], second["z"], second["a"]) == (0, 0, 1, 2)


def test_state_under_a_name_is_refused_or_left_alone_and_listed() -> None:
    optimizer = stepped(torch.optim.Adam(weights()))
    optimizer.state["total"] = 5
    with pytest.raises(UndeclaredStateError, match="'total'"):
        reset_optimizer_states(optimizer)
    report = reset_optimizer_states(optimizer, strict=False)
    assert report.left_alone == (("Adam", "not declared: 'total'"),)
    assert optimizer.state["total"] == 5


def test_a_reset_works_in_any_mode_of_autograd_and_under_any_default_device() -> None:
    for context in (torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.device("meta")):
        optimizer = stepped(torch.optim.Adam(weights()))
        with context:
            reset_optimizer_states(optimizer)
        assert not any(tensor.any() for state in optimizer.state.values() for tensor in state.values())


def test_a_plan_whose_numbers_no_longer_hold_is_refused() -> None:
    optimizer = stepped(torch.optim.Rprop(weights()))
    plan = plan_reset(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UnreachableStateError, match="'step_size' has changed since"):
        plan.apply()


def test_what_a_reset_makes_can_be_stepped_on_though_it_was_made_under_inference() -> None:
    optimizer = stepped(torch.optim.Adam(weights()))
    first, second = optimizer.state.values()
    second["step"] = first["step"]
    with torch.inference_mode():
        reset_optimizer_states(optimizer)
    stepped(optimizer)
    assert first["step"] == second["step"] == 1


def broken_groups(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups = None  # type: ignore[assignment]


def broken_flag(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["differentiable"] = torch.zeros(2)


def broken_list(optimizer: torch.optim.Optimizer) -> None:
    held: list[object] = []
    held.append(held)
    next(iter(optimizer.state.values()))["exp_avg"] = held


@pytest.mark.parametrize("breaking", [broken_groups, broken_flag, broken_list])
def test_what_cannot_even_be_read_is_refused_with_its_place(breaking: Any) -> None:
    sound, broken = stepped_adamw(1), stepped_adamw(1)
    breaking(broken)
    with pytest.raises(
        UnreachableStateError, match=r"^State at list\[1\]\.AdamW .*: what it holds cannot be read"
    ):
        reset_optimizer_states([sound, broken])
    assert all(tensor.all() for tensor in state_tensors(sound))
