"""What the optimizers of apex remember that shard their state, and those that Megatron does not step with.

From the sources of apex at several commits, old and new, not run here: all of them need a GPU. FusedAdam
and FusedSGD, which Megatron steps with, are declared by its plugin.
"""

from miles_reset import Initial, StateSchema, clock, hookimpl, kept, momentum, scratch, variance

_SHARDED = "apex.contrib.optimizers"

_COUNT = clock("step", Initial.ABSENT, at="group")

# The shards of weights, and of what 16-bit weights lack of float32, are no memory of gradients.
_BUCKET = (
    momentum("exp_avg_shard", at="attribute"), variance("exp_avg_sq_shard", at="attribute"),
    kept("params_shard", at="attribute"), kept("param_remainders_shard", at="attribute"),
    *(
        kept(key, at="attribute")
        for key in (
            "able_to_fill", "bucket_size", "contiguous_buffer_offset", "dtype", "filled_size", "fragments",
            "grad_sync_dtype", "param_sync_dtype", "shard_size",
        )
    ),
)  # fmt: skip


# Moments in flat buffers, which are attributes, as both had them at first and LAMB has them still; later
# versions make them at the first step.
_FLAT = (
    momentum("_fp32_m", at="attribute"), variance("_fp32_v", at="attribute"),
    kept("_fp32_p", at="attribute"), scratch("_fp32_u", at="attribute"),
    clock("_step", at="attribute"), clock("step"),
)  # fmt: skip


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of apex."""
    adam = f"{_SHARDED}.distributed_fused_adam.DistributedFusedAdam"
    return [
        # A bucket holds the moments of many parameters; a parameter's entry says only where they are. Each
        # step makes the scales of 16-bit moments anew.
        StateSchema(adam,
            momentum("buckets", at="named"), clock("step", at="named"), kept("fragments"),
            scratch("_state_scales", at="attribute"), *_FLAT),
        StateSchema(f"{adam}.StateBucket", *_BUCKET),
        StateSchema(f"{_SHARDED}.distributed_fused_lamb.DistributedFusedLAMB",
            *_FLAT),
        StateSchema("apex.optimizers.fused_lamb.FusedLAMB",
            momentum("exp_avg"), variance("exp_avg_sq"), _COUNT),
        StateSchema("apex.optimizers.fused_adagrad.FusedAdagrad", variance("sum")),
    ]  # fmt: skip
