"""What the optimizers of torch-optimi remember.

Read off torch-optimi 0.3.3. A parameter's state is made where it has no ``kahan_comp``, which may be None.
With gradient release it also holds the parameter's group, and a count of its own; what accumulates in the
moments between steps is history like the rest.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, kept, momentum, variance

_LAYOUT = (kept("setup", at="group"), kept("group"))
_CLOCKS = (clock("step"), clock("step", at="group"), *_LAYOUT)
_KAHAN = history("kahan_comp")
_MEANS = (momentum("exp_avg"), variance("exp_avg_sq"))
_ADAM = (*_MEANS, _KAHAN, *_CLOCKS)

# Made from the first gradient, and then all of a parameter's state is made anew.
_REMADE = Initial.ABSENT
_AS_IN_TORCH = Initial.either(
    "dampening", Initial.either("torch_init", _REMADE, Initial.ZEROS), Initial.ZEROS
)


def _squared_epsilon(parameter: Any, group: Any, optimizer: Any) -> Any:
    return parameter.new_tensor(group["eps"] ** 2)


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torch-optimi."""
    return [
        StateSchema("optimi.adam.Adam", *_ADAM),
        StateSchema("optimi.adamw.AdamW", *_ADAM),
        StateSchema("optimi.adan.Adan",
            momentum("exp_avg", _REMADE), variance("exp_avg_sq", _REMADE), history("exp_avg_diff", _REMADE),
            history("prev_grad", _REMADE), history("kahan_comp", _REMADE), *_CLOCKS),
        StateSchema("optimi.lion.Lion", momentum("exp_avg"), _KAHAN, *_LAYOUT),
        StateSchema("optimi.radam.RAdam", *_ADAM),
        StateSchema("optimi.ranger.Ranger", *_ADAM, history("la_param", Initial.COPY)),
        StateSchema("optimi.sgd.SGD",
            momentum("exp_avg", _AS_IN_TORCH), history("kahan_comp", _AS_IN_TORCH), *_LAYOUT),
        StateSchema("optimi.stableadamw.StableAdamW",
            *_ADAM, history("eps_sq", Initial.computed(_squared_epsilon)), variance("mean_square")),
    ]  # fmt: skip
