"""Plans and reports as trees."""

import pytest
import torch
from rich.console import Console

from miles_reset import plan_reset
from miles_reset.render import render


def stepped(cls, count=1, **options):
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = cls(weights, **options)
    optimizer.step()
    return optimizer


def drawn(account, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render(account))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_plan_is_a_tree_of_wrappers_and_leaves_with_their_slots():
    plan = plan_reset({"actor": [stepped(torch.optim.AdamW, 2)], "critic": stepped(torch.optim.NAdam)})
    assert drawn(plan) == [
        str(plan).splitlines()[0],
        "└── dict",
        "    ├── [actor] list",
        "    │   └── [0] AdamW",
        "    │       slot        role      fresh value  outcome          values",
        "    │       step        clock     0            filled in place       2",
        "    │       exp_avg     momentum  0            filled in place       2",
        "    │       exp_avg_sq  variance  0            filled in place       2",
        "    └── [critic] NAdam",
        "        step        clock     0            filled in place       1",
        "        mu_product  history   1 (scalar)   filled in place       1",
        "        exp_avg     momentum  0            filled in place       1",
        "        exp_avg_sq  variance  0            filled in place       1",
    ]


def test_a_report_says_what_was_done():
    plan = plan_reset(stepped(torch.optim.SGD, momentum=0.9, dampening=0.5))
    report = plan.apply()
    planned, done = drawn(plan), drawn(report)
    assert planned[0] == str(plan).splitlines()[0]
    assert done[0] == str(report).splitlines()[0] != planned[0]
    assert done[1:] == planned[1:]
    assert done[-1].split() == ["momentum_buffer", "momentum", "absent", "removed", "1"]


def test_a_slot_says_where_it_lives_unless_that_is_the_state():
    optimizer = stepped(torch.optim.AdamW)
    optimizer.param_groups[0]["step"] = 7
    (line,) = [line for line in drawn(plan_reset(optimizer)) if "(group)" in line]
    assert line.split() == ["step", "(group)", "clock", "absent", "removed", "1"]


def test_thousands_of_leaves_that_are_alike_are_one_node():
    plan = plan_reset([stepped(torch.optim.AdamW) for _ in range(1000)] + [None] * 1000)
    lines = drawn(plan)
    assert len(lines) < 10
    assert "    ├── [*] AdamW (1,000 alike)" in lines
    assert any(
        line.split() == ["│", "exp_avg", "momentum", "0", "filled", "in", "place", "1,000"] for line in lines
    )
    assert lines[-2:] == ["    └── [*] None (1,000 alike)", "        left alone: stub: holds no optimizer"]


def test_what_is_left_alone_stands_at_its_place():
    lines = drawn(plan_reset({"first": stepped(torch.optim.AdamW), "second": None}))
    assert lines[-2:] == ["    └── [second] None", "        left alone: stub: holds no optimizer"]


@pytest.mark.parametrize("optimizer", [None, [], torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])])
def test_a_plan_that_reaches_no_state_says_so(optimizer):
    assert drawn(plan_reset(optimizer))[0].startswith("No ")


def test_a_label_is_never_taken_for_markup_or_for_a_path():
    lines = drawn(plan_reset({"/red": stepped(torch.optim.AdamW), "a.b": stepped(torch.optim.AdamW)}))
    assert [line for line in lines if "AdamW" in line] == ["    ├── [/red] AdamW", "    └── [a.b] AdamW"]
