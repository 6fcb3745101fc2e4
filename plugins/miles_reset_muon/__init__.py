"""What the optimizers of muon-optimizer remember.

Read off muon-optimizer 0.1. Each class has a twin for one device, and each of those one that steps
by Adam too.
"""

from miles_reset import StateSchema, clock, hookimpl, momentum, variance

_MUON = (momentum("momentum_buffer"),)
_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of muon-optimizer."""
    return [
        StateSchema("muon.Muon", *_MUON),
        StateSchema("muon.SingleDeviceMuon", *_MUON),
        StateSchema("muon.MuonWithAuxAdam", *_MUON, *_ADAM),
        StateSchema("muon.SingleDeviceMuonWithAuxAdam", *_MUON, *_ADAM),
    ]
