"""A policy carried out: what comes back, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import subprocess
import sys
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_reset import (
    CheckpointError,
    PolicyError,
    ResetError,
    ResumePolicy,
    UndeclaredStateError,
    UnsafeCheckpointError,
    open_checkpoint,
    plan_resume,
)
from miles_reset.testing import same_bits


def adam(
    count: int = 2, rate: float = 0.1, steps: int = 0, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    weights = [torch.nn.Parameter(torch.full((3,), i + 1.0, dtype=dtype)) for i in range(count)]
    named = more.pop("names", None)
    optimizer = torch.optim.Adam(
        list(zip(named, weights, strict=True)) if named else weights, lr=rate, **more
    )
    return step(optimizer, steps)


def step(optimizer: Any, steps: int = 1) -> Any:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for i, weight in enumerate(group["params"]):
                weight.grad = torch.full_like(weight, i + 1.0)
        optimizer.step()
    return optimizer


def alike(one: Any, two: Any) -> bool:
    """Say whether nested values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and same_bits(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(alike(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(alike, one, two))
    return bool(one == two)


def policy(**choices: Any) -> ResumePolicy:
    return ResumePolicy.from_dict({"scheduler": "fresh", "iteration": "restore-if-present", **choices})


def refused(
    match: str, saved: Any, live: Any, kind: type[ResetError] = CheckpointError, /, **choices: Any
) -> str:
    """Return what is said where a plan is refused, once it is seen that nothing has changed."""
    before, address = copy.deepcopy(live.state_dict()), id(live.state)
    with pytest.raises(kind, match=match) as caught:
        plan_resume(policy(**choices), saved, optimizer=live)
    assert alike(live.state_dict(), before)
    assert id(live.state) == address
    return str(caught.value)


ADAM = ("step", "exp_avg", "exp_avg_sq")

# The optimizer


def test_what_was_saved_comes_back_to_the_bit() -> None:
    run = adam(steps=3)
    resumed = adam(rate=0.7)
    for weight, there in zip(resumed.param_groups[0]["params"], run.param_groups[0]["params"], strict=True):
        weight.data.copy_(there.data)
    plan_resume(policy(), {"optimizer": run.state_dict()}, optimizer=resumed).apply()
    for one in (run, resumed):
        step(one, 4)
    assert alike(run.state_dict(), resumed.state_dict())
    assert alike(run.param_groups[0]["params"], resumed.param_groups[0]["params"])


SEED_CASE = [
    ("state", "restore", "restore", 3),
    ("state", "fresh", "fresh", 0),
    ("state", "reset", "reset", 0),
    ("null", "restore-if-present", "fresh", 0),
    ("null", "fresh", "fresh", 0),
    ("null", "restore", None, 0),
    ("null", "reset", None, 0),
    ("absent", "restore-if-present", "fresh", 0),
    ("absent", "restore", None, 0),
]


@pytest.mark.parametrize(("saved", "action", "outcome", "steps"), SEED_CASE)
@pytest.mark.parametrize(("iteration", "count"), [(7, 800), (41, 12), (None, 5)])
def test_an_optimizer_that_was_not_saved(
    saved: str, action: str, outcome: str | None, steps: int, iteration: int | None, count: int
) -> None:
    entry = {"state": adam(steps=3).state_dict(), "null": None}
    state = {"iteration": iteration, "scheduler": {"last_epoch": count}}
    state |= {"optimizer": entry[saved]} if saved in entry else {}
    live = adam(steps=2)
    if outcome is None:
        said = refused(
            "null in the file" if saved == "null" else "no such key", state, live, optimizer=action
        )
        assert f"the policy says {action}" in said
        return
    report = plan_resume(policy(optimizer=action), state, optimizer=live).apply()
    line = next(line for line in report.parts if line.part == "optimizer")
    assert (line.outcome, line.action, line.chosen_by) == (outcome, action, "policy")
    assert report.iteration == (iteration or 0)
    assert {int(entry["step"]) for entry in live.state.values()} == {steps}


def test_a_reset_takes_hyper_parameters_from_the_file_and_no_history() -> None:
    run = adam(steps=5, rate=0.25, weight_decay=0.3, amsgrad=True)
    resumed = adam(rate=0.1, steps=2)
    report = plan_resume(
        policy(optimizer="reset"), {"optimizer": run.state_dict()}, optimizer=resumed
    ).apply()
    assert resumed.param_groups[0]["lr"] == 0.25
    assert resumed.param_groups[0]["weight_decay"] == 0.3
    assert not any(value.any() for entry in resumed.state.values() for value in entry.values())
    assert report.reset is not None
    assert report.reset.changed == 6


def test_parameters_are_matched_by_name() -> None:
    run = adam(names=["w1", "w2"], steps=1)
    resumed = adam(names=["w2", "w1"])
    plan_resume(policy(), {"optimizer": run.state_dict()}, optimizer=resumed).apply()
    first, second = run.param_groups[0]["params"]
    now_second, now_first = resumed.param_groups[0]["params"]
    assert alike(resumed.state[now_first], run.state[first])
    assert alike(resumed.state[now_second], run.state[second])
    assert resumed.param_groups[0]["param_names"] == ["w2", "w1"]


def test_the_model_gives_the_names_that_the_live_optimizer_lacks() -> None:
    model = torch.nn.ParameterDict(
        {"b": torch.nn.Parameter(torch.ones(3)), "a": torch.nn.Parameter(torch.ones(3))}
    )
    run = adam(names=["a", "b"], steps=1)
    resumed = torch.optim.Adam([model["b"], model["a"]])
    plan_resume(policy(), {"optimizer": run.state_dict()}, optimizer=resumed, model=model).apply()
    first = run.state[run.param_groups[0]["params"][0]]
    assert same_bits(resumed.state[model["a"]]["exp_avg"], first["exp_avg"])


def test_names_that_do_not_fit_are_named() -> None:
    run = adam(names=["w1", "w2"], steps=1)
    said = refused("does not fit group 0", {"optimizer": run.state_dict()}, adam(names=["w1", "w3"]))
    assert "missing are ['w3'], too many are ['w2']" in said


WRONG = {
    "has 1 parameters in group 0, the live one 2": lambda: adam(1, steps=1).state_dict(),
    "has 2 param groups, the live one 1": lambda: {
        **(saved := adam(steps=1).state_dict()),
        "param_groups": saved["param_groups"] * 2,
    },
    "lacks 'exp_avg_sq' of parameter 1 of group 0": lambda: without("exp_avg_sq"),
    "lacks 'step' of parameter 1": lambda: without("step"),
    r"has 'exp_avg' of shape \(4,\) for parameter 0 of group 0, whose is \(3,\)": lambda: reshaped(),
    "has a list as the state of parameter 0": lambda: {**adam(steps=1).state_dict(), "state": {0: []}},
    "has state of parameters that no group lists": lambda: {**adam(steps=1).state_dict(), "state": {9: {}}},
    "is no optimizer's state": lambda: {"state": {}},
    "is no optimizer's state: 'state' or": lambda: {"state": [], "param_groups": {}},
    "has no list of params in group 0": lambda: {"state": {}, "param_groups": [{"params": 3}]},
}


def without(key: str) -> dict[str, Any]:
    saved = adam(steps=1).state_dict()
    del saved["state"][1][key]
    return saved


def reshaped() -> dict[str, Any]:
    saved = adam(steps=1).state_dict()
    saved["state"][0]["exp_avg"] = torch.ones(4)
    return saved


@pytest.mark.parametrize("said", WRONG)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(said: str) -> None:
    refused(said, {"optimizer": WRONG[said]()}, adam(steps=2))


def test_state_that_was_never_made_is_accepted() -> None:
    run = adam()
    run.param_groups[0]["params"][0].grad = torch.ones(3)
    run.step()
    resumed = adam()
    plan_resume(policy(), {"optimizer": run.state_dict()}, optimizer=resumed).apply()
    assert len(resumed.state) == 1


def test_an_entry_that_groups_lack_stays_as_it_is_and_is_said() -> None:
    saved = adam(steps=1, betas=(0.5, 0.6)).state_dict()
    del saved["param_groups"][0]["betas"]
    resumed = adam(betas=(0.7, 0.8))
    plan = plan_resume(policy(), {"optimizer": saved}, optimizer=resumed)
    assert plan.notes == ("group 0 lacks betas: the live values stay",)
    plan.apply()
    assert resumed.param_groups[0]["betas"] == (0.7, 0.8)


def test_state_keeps_the_dtype_of_a_fresh_one_where_a_load_would_cast_it() -> None:
    def nadam(steps: int = 0) -> Any:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return step(torch.optim.NAdam([weight]), steps)

    run, resumed = nadam(3), nadam()
    plan = plan_resume(policy(), {"optimizer": run.state_dict()}, optimizer=resumed)
    plan.apply()
    assert plan.notes == ()
    (right,), (entry,) = run.state.values(), resumed.state.values()
    assert entry["mu_product"].dtype is torch.float32, "which a plain load casts to bfloat16"
    assert alike(entry, right)


@pytest.mark.parametrize(("saved", "live"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("build", [torch.optim.Adam, lambda p: torch.optim.SGD(p, momentum=0.9)])
def test_a_run_in_another_dtype_can_step_and_the_cast_is_said(build: Any, saved: str, live: str) -> None:
    def of(dtype: str, steps: int) -> Any:
        return step(build([torch.nn.Parameter(torch.ones(3, dtype=getattr(torch, dtype)))]), steps)

    resumed = of(live, 0)
    plan = plan_resume(policy(), {"optimizer": of(saved, 2).state_dict()}, optimizer=resumed)
    plan.apply()
    step(resumed)
    assert any("is cast to the dtype of a fresh one" in note for note in plan.notes)
    (entry,) = resumed.state.values()
    key = "exp_avg" if "exp_avg" in entry else "momentum_buffer"
    assert entry[key].dtype is getattr(torch, live)


def test_what_was_loaded_is_no_alias_of_what_is_kept() -> None:
    saved = {"optimizer": adam(steps=2).state_dict()}
    kept = copy.deepcopy(saved)
    resumed = adam()
    plan = plan_resume(policy(), saved, optimizer=resumed)
    plan.apply()
    step(resumed, 2)
    plan_resume(policy(optimizer="fresh"), saved, optimizer=resumed).apply()
    assert alike(saved, kept)
    plan.apply()
    assert {int(entry["step"]) for entry in resumed.state.values()} == {2}


def test_an_optimizer_that_cannot_be_made_fresh_is_refused_in_the_plan() -> None:
    live = adam(steps=1)
    next(iter(live.state.values()))["unheard of"] = torch.ones(1)
    refused("unheard of", {"iteration": 3}, live, UndeclaredStateError, optimizer="fresh")


# Other parts


@pytest.mark.parametrize(
    ("saved", "said"),
    [(-1, "is -1"), ("7", "is '7'"), (True, "is True"), (7.5, "is 7.5"), ([7], r"is \[7\]")],
)
def test_an_iteration_that_is_no_count_is_refused(saved: Any, said: str) -> None:
    refused(said, {"iteration": saved, "optimizer": None}, adam(), optimizer="fresh")


@pytest.mark.parametrize(("action", "iteration"), [("restore", 7), ("fresh", 0), (12, 12), (0, 0)])
def test_the_iteration_is_restored_fresh_or_set(action: Any, iteration: int) -> None:
    chosen = policy(optimizer="fresh", iteration=action, iteration_unit="rollout")
    plan = plan_resume(chosen, {"iteration": 7}, optimizer=adam())
    assert (plan.iteration, plan.unit) == (iteration, "rollout")
    assert f"at rollout {iteration}," in str(plan)


class Counter:
    """A part of a trainer's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("action", "count"), [("restore", 5), ("restore-if-present", 5), ("fresh", 1), (None, 5)]
)
def test_extras_are_parts_too(action: str | None, count: int) -> None:
    live = Counter(1)
    chosen = policy(optimizer="fresh", **({"extras": {"dataloader": action}} if action else {}))
    saved = {"iteration": 1, "dataloader": Counter(5).state_dict()}
    plan_resume(chosen, saved, optimizer=adam(), extras={"dataloader": live}).apply()
    assert live.count == count


def test_an_extra_that_the_trainer_does_not_give_is_refused() -> None:
    said = refused("dataloader", {}, adam(), PolicyError, optimizer="fresh", extras={"dataloader": "fresh"})
    assert "the trainer gives none" in said


def test_a_grad_scaler_comes_back() -> None:
    run, live = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (256.0, 65536.0))
    saved = {"iteration": 1, "scaler": run.state_dict()}
    plan_resume(policy(optimizer="fresh"), saved, optimizer=adam(), extras={"grad_scaler": live}).apply()
    assert live.get_scale() == 256.0


def rng_state(names: tuple[str, str, str]) -> dict[str, Any]:
    return dict(zip(names, (random.getstate(), np.random.get_state(), torch.get_rng_state()), strict=True))


@pytest.mark.parametrize(
    "names",
    [
        ("python", "numpy", "cpu"),
        ("random_rng_state", "np_rng_state", "torch_rng_state"),
        ("random_state", "numpy_random_seed", "torch_manual_seed"),
    ],
)
def test_random_numbers_go_on_where_they_were(names: tuple[str, str, str], repeatable: None) -> None:
    state = rng_state(names)
    right = random.random(), np.random.rand(), torch.rand(1)
    plan = plan_resume(policy(optimizer="fresh"), {"rng": state}, optimizer=adam())
    elsewhere = random.random(), np.random.rand(), torch.rand(1)
    assert elsewhere != right, "a plan changes nothing"
    plan.apply()
    assert (random.random(), np.random.rand(), torch.rand(1)) == right


@pytest.mark.parametrize("kind", ["python", "numpy", "cpu", "all"])
def test_random_numbers_that_are_none_are_refused(kind: str) -> None:
    state: Any = {**rng_state(("python", "numpy", "cpu")), kind: "none"} if kind != "all" else {"mine": 1}
    refused("rng of .*(cannot be restored|holds no state)", {"rng": state}, adam(), optimizer="fresh")


# Overrides


def test_overrides_come_last() -> None:
    run, resumed = adam(steps=2, rate=0.5), adam(rate=0.1)
    chosen = policy(overrides={"lr": 0.3, "weight_decay": 0.2, "betas": [0.8, 0.9]})
    plan = plan_resume(chosen, {"optimizer": run.state_dict()}, optimizer=resumed)
    assert plan.rates == (0.3,)
    plan.apply()
    group = resumed.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.3, 0.2, (0.8, 0.9))


def test_an_override_that_is_nowhere_is_refused_with_the_nearest() -> None:
    said = refused(
        "overrides", {"optimizer": adam().state_dict()}, adam(), PolicyError, overrides={"weight_decy": 1}
    )
    assert (
        "'weight_decy' is in no param group and no setting of a scheduler; the nearest is 'weight_decay'"
        in said
    )


def test_an_overridden_rate_is_the_one_that_the_schedule_starts_from() -> None:
    def built(rate: float) -> tuple[Any, Any]:
        optimizer = adam(rate=rate)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        seen = []
        for _ in range(steps):
            seen.append(optimizer.param_groups[0]["lr"])
            step(optimizer)
            scheduler.step()
        return seen

    run, right, resumed = built(1.0), built(0.5), built(0.1)
    rates(*run, 10)
    saved = copy.deepcopy(
        {"optimizer": run[0].state_dict(), "scheduler": run[1].state_dict(), "iteration": 10}
    )
    chosen = ResumePolicy.from_dict({"iteration": 10, "overrides": {"lr": 0.5}})
    plan = plan_resume(chosen, saved, optimizer=resumed[0], scheduler=resumed[1])
    assert plan.rates == (0.45,)
    plan.apply()
    assert rates(*resumed, 10) == rates(*right, 20)[10:]


def test_a_rate_that_a_scheduler_would_overwrite_is_refused() -> None:
    optimizer = adam()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 30)
    chosen = ResumePolicy.from_dict({"optimizer": "fresh", "scheduler": "fresh", "overrides": {"lr": 0.5}})
    with pytest.raises(PolicyError, match="'lr' is not what OneCycleLR starts from"):
        plan_resume(chosen, {"iteration": 1}, optimizer=optimizer, scheduler=scheduler)


# Files


def file_of(folder: Path, **more: Any) -> Path:
    path = folder / "state.pt"
    torch.save({"optimizer": adam(steps=2).state_dict(), "iteration": 4, **more}, path)
    return path


def test_a_file_is_read_part_by_part(tmp_path: Path) -> None:
    path = file_of(tmp_path, scheduler=None)
    found = open_checkpoint(path)
    there = {name: str(saved.presence) for name, saved in found.parts.items()}
    assert there["optimizer"] == there["iteration"] == "present"
    assert there["scheduler"] == "null in the file"
    assert there["rng"] == "no such key in the file"
    assert found.read("iteration") == 4
    assert found.to_dict()["parts"]["optimizer"]["bytes"] == 2 * (12 + 12 + 4)
    with pytest.raises(CheckpointError, match=r"scheduler of .* is not there: null in the file"):
        found.read("scheduler")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("where", ["optimizer", "iteration", "unheard of"])
@pytest.mark.parametrize("action", ["restore", "fresh"])
def test_nothing_in_a_hostile_file_runs(where: str, action: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    path = file_of(tmp_path, **{where: Hostile(str(made))})
    said = refused("posix.mkdir", path, adam(), UnsafeCheckpointError, optimizer=action)
    assert 'put allow = ["posix.mkdir"] into the policy' in said
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile(str(made))))
    refused("torn, or no file of torch's", tmp_path / "plain.pt", adam())
    assert not made.exists()


def test_what_a_policy_allows_is_unpickled(tmp_path: Path) -> None:
    path = file_of(tmp_path, args=Fraction(1, 3))
    refused(r"fractions\.Fraction", path, adam(), UnsafeCheckpointError)
    plan_resume(policy(allow=["fractions.Fraction"]), path, optimizer=adam()).apply()


TRUNCATIONS = [i / 20 for i in range(20)]


@pytest.mark.parametrize("kept", TRUNCATIONS)
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    path = file_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    said = refused("is empty" if not kept else "is torn", path, adam(steps=1))
    assert str(path) in said


def test_a_flipped_bit_never_becomes_a_fresh_start(tmp_path: Path) -> None:
    path = file_of(tmp_path)
    whole, right = path.read_bytes(), adam(steps=2)
    for at in range(0, len(whole) * 8, len(whole) * 8 // 400):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        live = adam()
        try:
            report = plan_resume(policy(), path, optimizer=live).apply()
        except ResetError as error:
            assert str(path) in str(error) or "optimizer" in str(error)  # noqa: PT017
            assert not live.state
        else:  # in the bytes of nothing that came back
            assert report.iteration == 4
            assert next(line.outcome for line in report.parts if line.part == "optimizer") == "restore"
            assert alike(live.state_dict(), right.state_dict())


def flip_a_moment(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    moment = adam(steps=2).state_dict()["state"][0]["exp_avg"].numpy().tobytes()
    whole[whole.index(moment) + 1] ^= 4
    path.write_bytes(whole)


@pytest.mark.parametrize("action", ["restore", "fresh", "reset"])
def test_a_flipped_bit_of_a_moment_is_found_where_it_is_read(action: str, tmp_path: Path) -> None:
    flip_a_moment(path := file_of(tmp_path))
    if action == "restore":
        refused(r"is torn: a tensor of shape .* differs from its checksum", path, adam(steps=1))
    else:
        plan_resume(policy(optimizer=action), path, optimizer=adam(steps=1)).apply()


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = file_of(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    live = adam()
    plan_resume(policy(), path, optimizer=live).apply()
    assert alike(live.state_dict(), adam(steps=2).state_dict())


def test_paths_that_are_none(tmp_path: Path) -> None:
    refused("is not there. To start without one", tmp_path / "none", adam())
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused("cannot be opened: (Too many levels|Symlink loop)", tmp_path / "loop", adam())
    (tmp_path / "empty").mkdir()
    refused("is an empty folder", tmp_path / "empty", adam())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    refused("is of no format that a plugin reads", tmp_path / "other", adam())
    (tmp_path / "secret.pt").touch(mode=0)
    if os.geteuid():
        refused("cannot be read: Permission denied", tmp_path / "secret.pt", adam())


@pytest.mark.parametrize("content", [[1, 2], 7, torch.ones(3), "text"])
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "other.pt")
    refused("not a mapping", tmp_path / "other.pt", adam())


@pytest.mark.parametrize("junk", [1, "text", [], (1,), torch.ones(2), {"state": 1, "param_groups": 2}, b"x"])
@pytest.mark.parametrize("part", ["optimizer", "iteration"])
def test_a_part_of_another_type_is_refused(part: str, junk: Any, tmp_path: Path) -> None:
    if part == "iteration" and isinstance(junk, int):
        pytest.skip("that is one")
    refused(f"{part}|param groups", file_of(tmp_path, **{part: junk}), adam())


@pytest.mark.parametrize("junk", [1, "text", [], [1, 2], (1,), torch.ones(2), {"last_epoch": 1}, b"x"])
def test_a_scheduler_of_another_type_is_refused(junk: Any, tmp_path: Path) -> None:
    live = adam()
    scheduler = torch.optim.lr_scheduler.StepLR(live, 3)
    before = copy.deepcopy((live.state_dict(), scheduler.state_dict()))
    with pytest.raises(CheckpointError, match="scheduler"):
        plan_resume(ResumePolicy(), file_of(tmp_path, scheduler=junk), optimizer=live, scheduler=scheduler)
    assert alike((live.state_dict(), scheduler.state_dict()), before)


@pytest.mark.parametrize("junk", [1, "text", [], (1,), torch.ones(2), {"cpu": torch.ones(3)}, b"x"])
def test_random_numbers_of_another_type_are_refused(junk: Any, tmp_path: Path) -> None:
    refused("rng", file_of(tmp_path, rng=junk), adam())


def test_a_missing_checkpoint_is_a_fresh_start_only_if_the_policy_says_so(tmp_path: Path) -> None:
    live = adam(steps=2)
    report = plan_resume(policy(on_missing="fresh"), tmp_path / "none", optimizer=live).apply()
    assert report.iteration == 0
    assert not any(value.any() for entry in live.state.values() for value in entry.values())
    assert {line.reason for line in report.parts if line.outcome == "fresh"} == {"there is no checkpoint"}
    torn = tmp_path / "torn.pt"
    torn.write_bytes(b"PK")
    refused("is torn", torn, adam(), on_missing="fresh")


LEAN = """
import os, sys, torch
from miles_reset import ResumePolicy, plan_resume
optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
plan_resume(ResumePolicy(optimizer="fresh"), {"iteration": 1}, optimizer=optimizer).apply()
def counted():
    fields = dict(line.split() for line in open("/proc/self/io").read().replace(":", "").splitlines())
    return int(fields["rchar"]), int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
read, resident = counted()
report = plan_resume(ResumePolicy(optimizer="fresh"), sys.argv[1], optimizer=optimizer).apply()
assert report.iteration == 4, report
now = counted()
print(now[0] - read, now[1] - resident)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says")
def test_what_is_not_restored_is_not_read(tmp_path: Path) -> None:
    size = 1 << 30
    state = {
        0: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros(size // 8),
            "exp_avg_sq": torch.zeros(size // 8),
        }
    }
    saved = {"state": state, "param_groups": adam(1).state_dict()["param_groups"]}
    path = tmp_path / "large.pt"
    torch.save({"optimizer": saved, "iteration": 4}, path)
    done = subprocess.run([sys.executable, "-c", LEAN, str(path)], capture_output=True, text=True, check=True)
    read, resident = map(int, done.stdout.split())
    assert read < size * 0.02
    assert resident < 50 << 20


# What is said


def test_a_plan_reads_as_a_table_and_as_data(caplog: pytest.LogCaptureFixture) -> None:
    saved = {"optimizer": adam(steps=1, rate=0.5).state_dict(), "iteration": 9}
    plan = plan_resume(policy(optimizer="fresh"), saved, optimizer=adam())
    text = str(plan)
    assert text.splitlines()[0] == "to resume at iteration 9, learning rate 0.1."
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert rows[2] == "optimizer fresh (policy) fresh what was saved is not read"
    assert rows[4] == "iteration restore-if-present (policy) restore from the mapping['iteration']"
    assert plan.to_dict()["parts"][0]["reason"] == "what was saved is not read"
    with caplog.at_level(logging.INFO, "miles_reset"):
        report = plan.apply()
    assert "resumed at iteration 9, learning rate 0.1." in caplog.text
    assert str(report).startswith("resumed at iteration 9")
    assert report.to_dict()["reset"]["leaves"] == 1


# What was found by trying to break it


def test_names_decide_which_group_s_rate_it_is() -> None:
    def of(order: str, rates: list[float]) -> Any:
        groups = [
            {"params": [(n, torch.nn.Parameter(torch.ones(3)))], "lr": r}
            for n, r in zip(order, rates, strict=True)
        ]
        return torch.optim.Adam(groups)

    saved, live = of("ab", [1.0, 0.01]).state_dict(), of("ba", [0.5, 0.5])
    refused("does not fit group 0", {"optimizer": saved}, live, optimizer="reset")
    scheduler = torch.optim.lr_scheduler.StepLR(live, 3)
    chosen = ResumePolicy.from_dict({"optimizer": "fresh", "iteration": 1})
    plan = plan_resume(
        chosen, {"optimizer": saved, "scheduler": scheduler.state_dict()}, optimizer=live, scheduler=scheduler
    )
    assert any("does not fit group 0" in note for note in plan.notes)


def test_names_as_keys_are_names() -> None:
    run = adam(names=["a", "b"], steps=1)
    saved = run.state_dict()
    renamed = {
        "state": {"ab"[key]: entry for key, entry in saved["state"].items()},
        "param_groups": saved["param_groups"],
    }
    renamed["param_groups"] = [{**saved["param_groups"][0], "params": ["a", "b"]}]
    del renamed["param_groups"][0]["param_names"]
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(3)) for name in "ba"})
    resumed = torch.optim.Adam([model["b"], model["a"]])
    plan_resume(policy(), {"optimizer": renamed}, optimizer=resumed, model=model).apply()
    assert alike(resumed.state[model["a"]], run.state[run.param_groups[0]["params"][0]])
    resumed.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def odd(change: Any) -> dict[str, Any]:
    saved = adam(steps=1).state_dict()
    change(saved)
    return {"optimizer": saved}


ODD = {
    "state of parameters that no group lists": lambda s: s.update(
        state={str(k): v for k, v in s["state"].items()}
    ),
    "lists a parameter twice": lambda s: s["param_groups"][0].update(params=[0, 0]),
    "names for another number": lambda s: s["param_groups"][0].update(param_names=["a"]),
    "as a tensor of another kind": lambda s: s["state"][0].update(exp_avg=torch.ones(3, device="meta")),
    "has a str as 'exp_avg'": lambda s: s["state"][0].update(exp_avg="hello"),
    "larger than what was saved of it": lambda s: s["state"][0].update(z=torch.zeros(1).expand(5 * 10**8)),
}


@pytest.mark.parametrize("said", ODD)
def test_odd_content_is_refused_by_the_plan(said: str) -> None:
    refused(said, odd(ODD[said]), adam())


def test_a_plan_does_not_touch_a_rate_that_is_a_tensor() -> None:
    live = adam(rate=torch.tensor(0.1), foreach=False)  # type: ignore[arg-type]
    plan_resume(policy(optimizer="fresh", overrides={"lr": 0.5}), {"iteration": 1}, optimizer=live)
    assert live.param_groups[0]["lr"] == torch.tensor(0.1)


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "iteration", "rng"])
def test_an_extra_does_not_take_the_place_of_a_part(name: str) -> None:
    with pytest.raises(PolicyError, match="is a part of its own"):
        plan_resume(policy(optimizer="fresh"), {}, optimizer=adam(), extras={name: Counter(1)})


@pytest.mark.parametrize("live", [object(), 3])
def test_a_live_part_that_cannot_load_is_refused(live: Any) -> None:
    with pytest.raises(PolicyError, match=r"has no load_state_dict\(\)"):
        plan_resume(policy(optimizer="fresh"), {}, optimizer=adam(), extras={"data": live})


def test_a_failure_midway_says_what_has_changed() -> None:
    class Fails(Counter):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("no")

    saved = {"iteration": 1, "data": {"count": 1}}
    plan = plan_resume(policy(optimizer="fresh"), saved, optimizer=adam(), extras={"data": Fails(1)})
    with pytest.raises(ResetError, match=r"midway: .*Changed for certain: optimizer\. Build"):
        plan.apply()


def test_a_small_file_takes_no_long_time_and_no_large_memory(tmp_path: Path) -> None:
    many: Any = []
    for _ in range(40):
        many = [many, many]
    path = tmp_path / "state.pt"
    torch.save({"optimizer": many, "iteration": 1}, path)
    assert plan_resume(policy(optimizer="fresh"), path, optimizer=adam()).apply().iteration == 1
    refused("is no optimizer's state", path, adam())
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
    refused("is compressed", tmp_path / "bomb.pt", adam())


def test_what_is_allowed_is_imported_only_if_the_file_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('ran')")
    sys.path.insert(0, str(tmp_path))
    try:
        plan_resume(policy(allow=["evil_module.x"], optimizer="fresh"), file_of(tmp_path), optimizer=adam())
    finally:
        sys.path.remove(str(tmp_path))
    assert "evil_module" not in sys.modules
