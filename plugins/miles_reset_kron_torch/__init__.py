"""What the optimizers of kron-torch remember: a momentum, preconditioners, and when these are due.

Read off kron-torch 0.3. Preconditioners start as identity matrices, or as ones where only a diagonal is kept.
"""

from typing import Any

from miles_reset import Initial, StateSchema, UnwrapRule, clock, history, hookimpl, kept, momentum

_DUE = (clock("_prob_step", at="attribute"), clock("_update_counter", at="attribute"))
_BALANCED_BY_CHANCE = history("rng", Initial.seeded(42), at="attribute")


def _identity(like: Any) -> Any:
    """Return an identity matrix, or the ones of its diagonal."""
    return like.new_zeros(like.shape).fill_diagonal_(1.0) if like.ndim == 2 else like.new_ones(like.shape)


def _identities(parameter: Any, group: Any, optimizer: Any) -> list[Any]:
    """Return a preconditioner for each dimension; the scale is that of their product."""
    held, dtype = optimizer.state[parameter]["Q"], group.get("precond_dtype")
    fresh = [_identity(one).float() if dtype is None else _identity(one).to(dtype) for one in held]
    return [one * group["precond_init_scale"] ** (1 / len(held)) for one in fresh]


def _of_its_dtype(key: str, *, is_identity: bool = False) -> Initial:
    """Return zeros, or an identity matrix, in the dtype that the optimizer computes in.

    A load casts what stands under the key to the weights' dtype.
    """

    def fresh(parameter: Any, group: Any, optimizer: Any) -> Any:
        held = optimizer.state[parameter][key]
        return (_identity(held) if is_identity else held.new_zeros(held.shape)).to(optimizer.dtype)

    return Initial.computed(fresh)


def _of_scale_one(optimizer: Any) -> str | None:
    """Say so where blocks start at another scale, which depends on their shapes."""
    scales = {group["precond_init_scale"] for group in optimizer.param_groups}
    return None if scales <= {1.0} else f"its preconditioners start at a scale of {scales}. Build it anew."


_ONE_SIDED = (
    momentum("momentum_buffer", _of_its_dtype("momentum_buffer")), clock("step"), kept("merged_shape"),
    history("Q", _of_its_dtype("Q", is_identity=True)), *_DUE,
)  # fmt: skip


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of kron-torch."""
    return [
        StateSchema("kron_torch.kron.Kron",
            momentum("momentum_buffer"), history("Q", Initial.computed(_identities)), clock("step"),
            kept("exprs"), kept("merged_shape"), *_DUE, _BALANCED_BY_CHANCE),
        # Splits a parameter into blocks, and numbers what each has.
        StateSchema("kron_torch.dist_kron.Kron",
            momentum("momentum_buffer_*"), history("Q_*", Initial.identity()), clock("step_*"),
            kept("exprs_*"), kept("merged_shape"), kept("partitioner"), *_DUE, _BALANCED_BY_CHANCE,
            ready=_of_scale_one),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of those that step matrices by themselves, and hold an Adam for the others."""
    return [
        UnwrapRule("kron_torch.kronos.Kronos", "_adam", *_ONE_SIDED),
        UnwrapRule("kron_torch.dist_onesidedkron.OneSidedKron", "_adam", *_ONE_SIDED),
    ]
