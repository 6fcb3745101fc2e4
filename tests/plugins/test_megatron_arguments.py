"""The flags of Megatron and of miles as a policy."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_reset import PolicyError
from miles_reset.policy import PARTS
from miles_reset_megatron import add_arguments, policy_from_args

DEFAULT = {
    "optimizer": "restore",
    "scheduler": "restore",
    "iteration": "restore",
    "rng": "restore-if-present",
}
FRESH = dict.fromkeys(DEFAULT, "fresh")

FLAGS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"no_load_optim": True}, {"optimizer": "fresh"}),
    ({"no_load_optim": None}, {}),
    ({"no_load_rng": True}, {"rng": "fresh"}),
    ({"no_load_optim": True, "no_load_rng": True}, {"optimizer": "fresh", "rng": "fresh"}),
    ({"finetune": True}, FRESH),
    ({"finetune": True, "use_checkpoint_opt_param_scheduler": True}, FRESH),
    ({"debug_disable_optimizer": True}, {"optimizer": "fresh"}),
    ({"no_save_optim": True}, {}),
    ({"ckpt_step": 12}, {}),
    ({"use_checkpoint_opt_param_scheduler": True}, {"scheduler": "restore"}),
    ({"override_opt_param_scheduler": True}, {}),
    ({"reset_optimizer_states": True}, {}),
    (
        {"no_load_optim": True, "use_checkpoint_opt_param_scheduler": True},
        {"optimizer": "fresh", "scheduler": "restore"},
    ),
]


def arguments(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**given)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "load"
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


@pytest.fixture
def policy_file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(("flags", "choices"), FLAGS, ids=[" ".join(flags) or "none" for flags, _ in FLAGS])
@pytest.mark.parametrize("with_load", [True, False])
def test_what_flags_say(
    flags: dict[str, Any], choices: dict[str, str], with_load: bool, checkpoint: Path
) -> None:
    policy = policy_from_args(arguments(**flags, **({"load": str(checkpoint)} if with_load else {})))
    assert {part: policy.action(part) for part in DEFAULT} == DEFAULT | choices
    assert policy.on_missing == "refuse"
    for part in PARTS:
        changed = part in choices
        assert policy.chosen_by(part).startswith("--") == changed, "it says which flag it was"


def test_no_load_optim_leaves_schedule_and_count(checkpoint: Path) -> None:
    policy = policy_from_args(arguments(load=str(checkpoint), no_load_optim=True))
    assert policy.chosen_by("optimizer") == "--no-load-optim"
    assert (policy.scheduler, policy.iteration) == ("restore", "restore")


def test_reset_optimizer_states_is_after_each_rollout() -> None:
    reset = policy_from_args(arguments(reset_optimizer_states=True)).reset
    assert (reset.every, reset.unit, reset.on_resume) == (1, "rollout", False)
    assert policy_from_args(arguments()).reset.every is None


class TestAFreshStart:
    def test_a_load_without_a_tracker(self, tmp_path: Path) -> None:
        for load in (tmp_path / "none", tmp_path):
            policy = policy_from_args(arguments(load=str(load)))
            assert {part: policy.action(part) for part in FRESH} == FRESH
            assert policy.on_missing == "fresh"
            assert policy.chosen_by("optimizer") == f"--load {load} has no latest_checkpointed_iteration.txt"

    def test_no_load_at_all(self) -> None:
        policy = policy_from_args(arguments(load=None))
        assert (policy.optimizer, policy.on_missing) == ("fresh", "fresh")
        assert policy.chosen_by("optimizer") == "there is no --load"

    def test_a_step_that_is_named_must_be_there(self, tmp_path: Path) -> None:
        policy = policy_from_args(arguments(load=str(tmp_path), ckpt_step=12))
        assert (policy.optimizer, policy.on_missing) == ("restore", "refuse")

    @pytest.mark.parametrize("told", [{"requested_load": "asked"}, {"ref_load": "ref"}])
    def test_flags_that_miles_set_itself_are_no_choice_by_hand(
        self, told: dict[str, str], policy_file: Any
    ) -> None:
        args = arguments(load="ref", no_load_optim=True, no_load_rng=True, finetune=True, **told)
        policy = policy_from_args(args)
        assert {part: policy.action(part) for part in FRESH} == FRESH
        assert policy.chosen_by("optimizer").startswith("miles found no")
        args.resume_policy = policy_file('optimizer = "reset"')
        assert policy_from_args(args).optimizer == "reset"

    def test_a_load_that_miles_replaced_is_not_resumed_from(self, checkpoint: Path) -> None:
        policy = policy_from_args(arguments(load=str(checkpoint), requested_load="asked", no_load_rng=True))
        assert (policy.optimizer, policy.iteration, policy.on_missing) == ("fresh", "fresh", "fresh")
        assert policy.chosen_by("rng") == "--no-load-rng"

    def test_an_adapter_needs_no_tracker(self, tmp_path: Path) -> None:
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_megatron_rank0.pt").touch()
        for given in ({"load": str(tmp_path)}, {"load": None, "lora_adapter_path": str(tmp_path)}):
            policy = policy_from_args(arguments(**given, no_load_optim=True))
            assert (policy.optimizer, policy.scheduler, policy.on_missing) == ("fresh", "restore", "refuse")


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ('optimizer = "restore"', {"no_load_optim": True}, "optimizer: .*says restore, and --no-load-optim"),
    ('optimizer = "restore-if-present"', {"no_load_optim": True}, "optimizer: .*--no-load-optim"),
    ('optimizer = "reset"', {"no_load_optim": True}, "optimizer: .*--no-load-optim"),
    ('optimizer = "restore"', {"debug_disable_optimizer": True}, "optimizer: .*--debug-disable-optimizer"),
    ('rng = "restore"', {"no_load_rng": True}, "rng: .*--no-load-rng"),
    ('scheduler = "restore"', {"finetune": True}, "scheduler: .*--finetune"),
    ("iteration = 12", {"finetune": True}, "iteration: .*says 12, and --finetune"),
    ('scheduler = "fresh"', {"use_checkpoint_opt_param_scheduler": True}, "scheduler: .*--use-checkpoint"),
    ("[reset]\nevery = 2", {"reset_optimizer_states": True}, "reset: .*--reset-optimizer-states"),
    (
        "",
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
        "scheduler: --use-checkpoint-opt_param-scheduler contradicts",
    ),
]


@pytest.mark.parametrize(("text", "flags", "said"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_a_flag_that_contradicts_the_file_is_refused(
    text: str, flags: dict[str, Any], said: str, policy_file: Any
) -> None:
    with pytest.raises(PolicyError, match=said):
        policy_from_args(arguments(resume_policy=policy_file(text), **flags))


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('optimizer = "fresh"', {"no_load_optim": True}),
        ("iteration = 0", {"finetune": True}),
        ('scheduler = "restore-if-present"', {"use_checkpoint_opt_param_scheduler": True}),
        ('[reset]\nevery = 1\nunit = "rollout"\non_resume = true', {"reset_optimizer_states": True}),
        ('optimizer = "reset"', {"no_load_rng": True, "no_save_optim": True, "ckpt_step": 3}),
    ],
)
def test_a_flag_that_says_the_same_is_not(text: str, flags: dict[str, Any], policy_file: Any) -> None:
    policy = policy_from_args(arguments(resume_policy=policy_file(text), **flags))
    part = text.split(" ")[0].strip("[]").splitlines()[0].strip("]")
    assert policy.chosen_by(part) == "policy"


def test_the_file_beats_what_follows_from_there_being_no_tracker(policy_file: Any, tmp_path: Path) -> None:
    text = policy_file('optimizer = "restore"\non_missing = "refuse"')
    policy = policy_from_args(arguments(load=str(tmp_path), resume_policy=text))
    assert (policy.optimizer, policy.on_missing, policy.scheduler) == ("restore", "refuse", "fresh")


def test_arguments_are_added_once() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reset-optimizer-states", action="store_true", help="miles' own")
    for _ in range(2):
        add_arguments(parser)
    args = parser.parse_args(["--resume-policy", "a.toml", "--reset-optimizer-states"])
    assert (args.resume_policy, args.reset_optimizer_states) == ("a.toml", True)
    args = add_arguments(argparse.ArgumentParser()).parse_args([])
    assert (args.resume_policy, args.reset_optimizer_states) == (None, False)
    assert policy_from_args(args).optimizer == "restore"


def test_the_plugin_imports_what_a_resume_needs_when_it_is_asked_for() -> None:
    code = """
import sys
import miles_reset_megatron
heavy = {"megatron", "miles", "pydantic", "yaml", "miles_reset_megatron._adapter"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
for name in miles_reset_megatron.__all__:
    assert callable(getattr(miles_reset_megatron, name)), name
assert not {"megatron", "miles"} & set(sys.modules)
try:
    miles_reset_megatron.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
