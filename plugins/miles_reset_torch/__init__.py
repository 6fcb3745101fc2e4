"""What the optimizers of torch.optim remember, and how torch's own wrappers are unwrapped.

Each rule was read off torch 2.6 to 2.14 and is held to the law of :mod:`miles_reset.testing`.
"""

from typing import Any

from miles_reset import (
    Initial,
    StateSchema,
    UnwrapRule,
    clock,
    history,
    hookimpl,
    kept,
    momentum,
    variance,
)
from miles_reset.checkpoint import CheckpointReader, SafeGlobal
from miles_reset.scheduler import SchedulerRule
from miles_reset_torch._checkpoints import READERS, SAFE_GLOBALS
from miles_reset_torch._schedulers import SCHEDULERS

# megatron-core writes the count into the groups when it saves and loads, and HybridDeviceOptimizer
# keeps master weights in the state of its children.
_ADAM = (
    momentum("exp_avg"), variance("exp_avg_sq"), variance("max_exp_avg_sq"), clock("step"),
    clock("step", Initial.ABSENT, at="group"), kept("master_param"),
)  # fmt: skip

# Made anew where n_iter is 0.
_LBFGS = ("d", "t", "old_dirs", "old_stps", "ro", "H_diag", "prev_flat_grad", "prev_loss", "al")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torch.optim."""
    return [
        StateSchema("torch.optim.adadelta.Adadelta",
            variance("square_avg"), history("acc_delta"), clock("step")),
        StateSchema("torch.optim.Adafactor",
            variance("row_var"), variance("col_var"), variance("variance"), clock("step")),
        StateSchema("torch.optim.adagrad.Adagrad",
            variance("sum", Initial.default("initial_accumulator_value")), clock("step")),
        StateSchema("torch.optim.adam.Adam", *_ADAM),
        StateSchema("torch.optim.adamw.AdamW", *_ADAM),
        StateSchema("torch.optim.adamax.Adamax",
            momentum("exp_avg"), variance("exp_inf"), clock("step")),
        StateSchema("torch.optim.asgd.ASGD",
            history("ax"), clock("mu", Initial.ONES.as_dtype("scalar")),
            clock("eta", Initial.group("lr").as_dtype("scalar")), clock("step")),
        StateSchema("torch.optim.lbfgs.LBFGS",
            clock("n_iter"), clock("func_evals"), *(history(key, Initial.ABSENT) for key in _LBFGS)),
        StateSchema("torch.optim.Muon",
            momentum("momentum_buffer")),
        StateSchema("torch.optim.nadam.NAdam",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step"),
            history("mu_product", Initial.ONES.as_dtype("scalar"))),
        StateSchema("torch.optim.radam.RAdam",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
        StateSchema("torch.optim.rmsprop.RMSprop",
            variance("square_avg"), momentum("momentum_buffer"), history("grad_avg"),
            clock("step")),
        StateSchema("torch.optim.rprop.Rprop",
            history("prev"), history("step_size", Initial.group("lr")), clock("step")),
        StateSchema("torch.optim.sgd.SGD",
            momentum("momentum_buffer", Initial.SGD_BUFFER)),
        StateSchema("torch.optim.sparse_adam.SparseAdam",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
    ]  # fmt: skip


def _is_remote(wrapper: Any) -> str | None:
    return "its optimizers are in other processes (RPC). Reset each where it is."


def _holds_none(wrapper: Any) -> None:
    return None


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of torch's own wrappers.

    Optimizers that step in the backward pass (_apply_optimizer_in_backward) are reached from no optimizer:
    reset the list that _get_in_backward_optimizers(module) returns.
    """
    return [
        # Copies its own groups down to its child at each step, and the child's back after it. A load leaves
        # copies of the child's state in its own, where nothing reads them but a later save.
        UnwrapRule("torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
            "optim", history("state", Initial.EMPTY, at="attribute"), stale_groups="delete"),
        # Its state and groups are those of what it holds.
        UnwrapRule("torch.distributed.optim.named_optimizer._NamedOptimizer", "_optimizer"),
        # From the source of torch 2.14, not run here: needs workers over RPC.
        UnwrapRule("torch.distributed.optim.optimizer.DistributedOptimizer", _holds_none, ready=_is_remote),
        # Averages parameters every so many steps, counted from the start.
        UnwrapRule("torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
            "optim", clock("averager.step", at="attribute")),
    ]  # fmt: skip


@hookimpl
def miles_reset_scheduler_rules() -> list[SchedulerRule]:
    """Return what the schedulers of torch own, and how they come back."""
    return SCHEDULERS


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the readers of what torch.save and torch.distributed.checkpoint write."""
    return READERS


@hookimpl
def miles_reset_safe_globals() -> list[SafeGlobal]:
    """Return what numpy's arrays of numbers are made of: saved random number states hold some."""
    return SAFE_GLOBALS
