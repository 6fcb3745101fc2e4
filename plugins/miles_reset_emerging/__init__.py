"""What the optimizers of NVIDIA's emerging_optimizers remember.

Each rule was read off emerging-optimizers 0.3 and is held to the law of :mod:`miles_reset.testing`.
"""

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, scratch, variance

# Kept in float32 whatever the parameter's dtype is.
_ZEROS = Initial.ZEROS.as_dtype("float32")
_IDENTITY = Initial.identity().as_dtype("float32")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of emerging_optimizers."""
    orthogonalized = "emerging_optimizers.orthogonalized_optimizers"
    return [
        # Base of Muon, MOP, PolarGrad, Scion, SinkhornMuon and Spel.
        StateSchema(f"{orthogonalized}.orthogonalized_optimizer.OrthogonalizedOptimizer",
            momentum("momentum_buffer")),
        StateSchema(f"{orthogonalized}.adaptive_muon.AdaptiveMuon",
            momentum("momentum_buffer"), variance("moment2_buffer")),
        # The norm is taken anew before each update.
        StateSchema(f"{orthogonalized}.muon_hyperball.MuonHyperball",
            momentum("momentum_buffer"), scratch("hyperball_R")),
        StateSchema("emerging_optimizers.psgd.psgd.PSGDPro",
            momentum("exp_avg"), clock("step"),
            history("Q", Initial.identity("precond_init_scale")), history("L", Initial.ONES)),
        StateSchema("emerging_optimizers.riemannian_optimizers.normalized_optimizer.ObliqueSGD",
            momentum("momentum_buffer")),
        StateSchema("emerging_optimizers.riemannian_optimizers.normalized_optimizer.ObliqueAdam",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
        StateSchema("emerging_optimizers.scalar_optimizers.laprop.LaProp",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
        StateSchema("emerging_optimizers.scalar_optimizers.lion.Lion",
            momentum("exp_avg")),
        # Base of REKLS.
        StateSchema("emerging_optimizers.soap.soap.SOAP",
            momentum("exp_avg", _ZEROS), variance("exp_avg_sq", _ZEROS), clock("step"),
            history("L", _ZEROS), history("R", _ZEROS),
            history("Q_L", _IDENTITY), history("Q_R", _IDENTITY)),
    ]  # fmt: skip
