"""The flags of Megatron and of miles as a resume policy."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_reset import PolicyError
from miles_reset.policy import ResumePolicy

TRACKER = "latest_checkpointed_iteration.txt"
_FRESH = {"optimizer": "fresh", "scheduler": "fresh", "iteration": "fresh", "rng": "fresh"}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--resume-policy`` and ``--reset-optimizer-states`` where the parser does not have them yet."""
    known = {option for action in parser._actions for option in action.option_strings}
    if "--resume-policy" not in known:
        parser.add_argument(
            "--resume-policy",
            metavar="FILE",
            help="A policy file (TOML or YAML) that says, part by part, what comes back from a checkpoint.",
        )
    if "--reset-optimizer-states" not in known:
        parser.add_argument(
            "--reset-optimizer-states",
            action="store_true",
            help="Bring the optimizer to what a fresh one holds after each rollout.",
        )
    return parser


def policy_from_args(args: Any) -> ResumePolicy:
    """Return what the arguments of Megatron or miles say about a resume. Any of them may be missing.

    What the policy file says by hand beats what follows from flags; a flag that contradicts it is refused.

    ============================================== =====================================================
    ``resume_policy``                              the policy file
    ``no_load_optim``, ``debug_disable_optimizer`` optimizer fresh; scheduler and iteration come back
    ``no_load_rng``                                rng fresh
    ``finetune``                                   optimizer, scheduler, iteration, rng fresh
    ``use_checkpoint_opt_param_scheduler``         scheduler comes back; it must be there
    ``override_opt_param_scheduler``               scheduler comes back, its settings are the code's
    ``reset_optimizer_states``                     a reset after each rollout
    ``no_save_optim``, ``ckpt_step``               nothing: which checkpoint, and what is saved next
    ``load`` without a tracker file                a fresh start: nothing has to be there
    ============================================== =====================================================

    The last is miles' rule. Where miles has applied it already, and has set the flags itself, they are not
    taken for a choice made by hand.

    Raises:
        PolicyError: The policy file is none, or a flag contradicts it, or two flags contradict each other.
    """
    path = getattr(args, "resume_policy", None)
    policy = ResumePolicy.from_file(path) if path else ResumePolicy()
    if _on(args, "use_checkpoint_opt_param_scheduler") and _on(args, "override_opt_param_scheduler"):
        problem = "--use-checkpoint-opt_param-scheduler contradicts --override-opt_param-scheduler."
        raise PolicyError("scheduler", problem)
    for flag, choices in _by_hand(args, set_by_miles=_set_by_miles(args)):
        for part, wanted in choices.items():
            _check(policy, part, wanted, flag)
        policy = policy.infer(choices, flag)
    if because := fresh_start(args):
        policy = policy.infer({**_FRESH, "on_missing": "fresh"}, because)
    return policy


def _by_hand(args: Any, *, set_by_miles: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each flag that is set, with the choices that it stands for."""
    finetune = _on(args, "finetune") and not set_by_miles
    if finetune:
        yield "--finetune", _FRESH
    if _on(args, "no_load_optim") and not set_by_miles:
        yield "--no-load-optim", {"optimizer": "fresh"}
    if _on(args, "debug_disable_optimizer"):
        yield "--debug-disable-optimizer", {"optimizer": "fresh"}
    if _on(args, "no_load_rng") and not set_by_miles:
        yield "--no-load-rng", {"rng": "fresh"}
    if _on(args, "use_checkpoint_opt_param_scheduler") and not finetune:
        yield "--use-checkpoint-opt_param-scheduler", {"scheduler": "restore"}
    if _on(args, "reset_optimizer_states"):
        yield "--reset-optimizer-states", {"reset": {"every": 1, "unit": "rollout"}}


def _check(policy: ResumePolicy, part: str, wanted: Any, flag: str) -> None:
    """Refuse a flag that contradicts what the policy file says by hand."""
    if policy.chosen_by(part) != "policy":
        return
    said = getattr(policy, part)
    if part == "reset":
        schedule = policy.reset
        agrees = schedule.every == 1 and schedule.unit == "rollout"
        said = f"every={schedule.every}, at={schedule.at}, unit={schedule.unit}"
    elif wanted == "restore":
        agrees = said in ("restore", "restore-if-present")
    else:
        agrees = said == wanted or (part == "iteration" and said == 0 and not isinstance(said, str))
    if not agrees:
        problem = f"the policy file says {said}, and {flag} says otherwise: leave one of them out."
        raise PolicyError(part, problem)


def _on(args: Any, name: str) -> bool:
    return bool(getattr(args, name, False))


def fresh_start(args: Any) -> str:
    """Say why nothing is resumed, if so."""
    load = getattr(args, "load", None)
    if adapter_folder(args) is not None or not hasattr(args, "load"):
        return ""
    if _replaced(args):
        return f"miles found no {TRACKER} under --load"
    if not load:
        return "there is no --load"
    named = (Path(load) / TRACKER).exists() or getattr(args, "ckpt_step", None) is not None
    return "" if named else f"--load {load} has no {TRACKER}"


def _set_by_miles(args: Any) -> bool:
    """Say whether miles has set the flags of a fresh start itself."""
    return _all_set(args) and _replaced(args)


def _all_set(args: Any) -> bool:
    return all(_on(args, flag) for flag in ("no_load_optim", "no_load_rng", "finetune"))


def _replaced(args: Any) -> bool:
    """Say whether miles loads another model, since there was nothing to resume."""
    load, asked = getattr(args, "load", None), getattr(args, "requested_load", None)
    if asked is not None:
        return bool(load != asked)
    return load is not None and load == getattr(args, "ref_load", None) and _all_set(args)


def adapter_folder(args: Any) -> Path | None:
    """Return the folder of the adapter that is resumed: ``lora_adapter_path``, or ``load`` if it is one."""
    if path := getattr(args, "lora_adapter_path", None):
        return Path(path)
    load = getattr(args, "load", None)
    for folder in (Path(load), Path(load) / "adapter") if load else ():
        if any(folder.glob("adapter_megatron_*.pt")) or (folder / "miles_reset_manifest.json").exists():
            return folder
    return None
