"""What a freshly built optimizer holds where no word says it, and what keeps a reset waiting."""

from typing import Any

# Starts that are computed


def d0(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the estimate of the step size that the constructor was given, as the number that it was."""
    return optimizer.defaults["d"]


def own(key: str) -> Any:
    """Return a group entry of the constructor's, for an optimizer that writes its own over it."""

    def given(parameter: Any, group: Any, optimizer: Any) -> Any:
        if len(optimizer.param_groups) > 1:
            raise ValueError(f"it writes {key!r} of its groups itself, and what each started with is lost")
        return optimizer.defaults[key]

    given.__name__ = f"the constructor's {key}"
    return given


def rate_before_sgd(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the group's rate, unless SWATS has gone over to SGD and put a rate of its own there."""
    return group["lr"] if group["phase"] == "adam" else own("lr")(parameter, group, optimizer)


def adam(parameter: Any, group: Any, optimizer: Any) -> Any:
    return "adam"


def bound(parameter: Any, group: Any, optimizer: Any) -> Any:
    return parameter.norm() * optimizer.p_bound


def zeros_in(name: str) -> Any:
    """Return zeros in the dtype that an attribute names."""

    def zeros(parameter: Any, group: Any, optimizer: Any) -> Any:
        return parameter.new_zeros(parameter.shape, dtype=getattr(optimizer, name))

    zeros.__name__ = f"{name} zeros"
    return zeros


def zeros_of_momentum(parameter: Any, group: Any, optimizer: Any) -> Any:
    return parameter.new_zeros(parameter.shape, dtype=group["mu_dtype"])


def small(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return which weights SaRA trains: those that are small now."""
    return parameter.detach().abs() < group["threshold"]


def packed(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return a zero for each weight that SaRA trains."""
    return parameter.new_zeros(int(small(parameter, group, optimizer).sum()))


def whole_mask(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return SPAM's mask where it trains every weight; elsewhere a fresh one is drawn at random."""
    if optimizer.density < 1:
        raise ValueError("a fresh optimizer draws its masks at random where the density is below one")
    return optimizer.state[parameter]["mask"].new_ones(parameter.shape)


def after_warmup(parameter: Any, group: Any, optimizer: Any) -> Any:
    return optimizer.warmup_epoch + 1


def decay(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return a new cosine decay: the live one computes each rate from the one before."""
    live = optimizer.warmup
    return None if live is None else type(live)(1.0, optimizer.t_max, eta_min=live.eta_min)


def starting_rate(parameter: Any, group: Any, optimizer: Any) -> Any:
    return optimizer.starting_lr


# What cannot be reset now


def without_gradients(optimizer: Any) -> str | None:
    """SCIONLight has no state: it leaves its momentum in the gradients, for the next backward to add to."""
    groups = [group for group in optimizer.param_groups if group["momentum"] != 1.0]
    if any(parameter.grad is not None for group in groups for parameter in group["params"]):
        return "its momentum is in the gradients, which no reset writes. Call its zero_grad() first."
    return None


def as_usual(optimizer: Any) -> str | None:
    """Kron's factors are declared for the scale and dtype that all but experiments have."""
    for group in optimizer.param_groups:
        scale, dtype = group["precondition_init_scale"], str(group["precondition_dtype"])
        if scale != 1.0 or dtype != "torch.float32":
            return f"its preconditioners start with scale {scale} in {dtype}; only 1.0 in float32 is known."
    return None
