"""The optimizers that need more than a table: starts that are computed, and memories outside of the state."""

from miles_reset import Initial, StateSchema, clock, history, kept, momentum, scratch, variance
from miles_reset_pytorch_optimizer._moments import HERE, STEP
from miles_reset_pytorch_optimizer._starts import (
    adam,
    after_warmup,
    as_usual,
    bound,
    d0,
    decay,
    own,
    packed,
    rate_before_sgd,
    small,
    starting_rate,
    whole_mask,
    without_gradients,
    zeros_in,
    zeros_of_momentum,
)

_M, _V = momentum("exp_avg"), variance("exp_avg_sq")
_D = history("d", Initial.computed(d0), at="group")
_K = clock("k", at="group")
_COUNT = clock("step", at="group")  # The constructor puts a zero there.
_X0 = history("x0", Initial.COPY)
_WEIGHTED = history("numerator_weighted", at="group")
_SQUARES = history("gsq_weighted", at="group")
_AVERAGED = (history("z", Initial.COPY), STEP,
    history("weight_sum", at="group"), history("lr_max", Initial.constant(-1.0), at="group"),
    kept("train_mode", at="group"))  # fmt: skip
_LOW_RANK = (_M, _V, history("projector"), STEP)
_SCALE = history("scaling_grad", Initial.ABSENT)

COMPUTED = [
    # The step size is found on the way, and kept in the groups.
    StateSchema(f"{HERE}.dadapt.DAdaptAdaGrad",
        history("alpha_k", Initial.constant(1e-6)), history("sk"), history("weighted_sk"), _X0,
        _D, _K, STEP, _SQUARES, history("sk_sq_weighted", at="group"), history("sk_l1", at="group")),
    StateSchema(f"{HERE}.dadapt.DAdaptAdam", _M, _V, history("s"), _D, _COUNT, _WEIGHTED),
    StateSchema(f"{HERE}.dadapt.DAdaptSGD",
        history("z", Initial.COPY), history("s"), _X0, _D, _COUNT, _WEIGHTED,
        scratch("g0_norm", at="group")),
    StateSchema(f"{HERE}.dadapt.DAdaptAdan",
        _M, _V, momentum("exp_avg_diff"), history("s"), history("previous_grad", Initial.ABSENT_ENTRY),
        _D, _K, STEP, _SQUARES),
    StateSchema(f"{HERE}.dadapt.DAdaptLion", _M, history("s"), _D, _COUNT, _WEIGHTED),
    StateSchema(f"{HERE}.prodigy.Prodigy",
        _M, _V, history("s"), history("p0", Initial.COPY), clock("step", Initial.ONES, at="group"),
        history("d", Initial.group("d0"), at="group"), history("d_max", Initial.group("d0"), at="group"),
        history("d_numerator", at="group"), history("d_de_nom", Initial.ABSENT, at="group"),
        history("d_hat", Initial.ABSENT, at="group")),
    # Averages of the weights. The rules hold in training and in evaluation mode.
    StateSchema(f"{HERE}.schedulefree.ScheduleFreeSGD", *_AVERAGED),
    StateSchema(f"{HERE}.schedulefree.ScheduleFreeAdamW", *_AVERAGED, _V, variance("max_exp_avg_sq")),
    StateSchema(f"{HERE}.schedulefree.ScheduleFreeRAdam", *_AVERAGED, _V),
    StateSchema(f"{HERE}.splus.SPlus",
        momentum("momentum"), history("ema"), history("sides"), history("q_sides", Initial.identity()),
        kept("param_buffer"), STEP),
    # Groups that are written over by the optimizer itself.
    StateSchema(f"{HERE}.sgd.ASGD",
        history("lr", Initial.computed(own("lr")), at="group"),
        history("theta", Initial.computed(own("theta")), at="group"),
        history("prev_*_norm", Initial.ABSENT, at="group"),
        scratch("curr_*_norm", at="group")),
    StateSchema(f"{HERE}.swats.SWATS",
        _M, _V, variance("max_exp_avg_sq"), history("exp_avg2"), momentum("momentum_buffer", Initial.ABSENT),
        history("lr", Initial.computed(rate_before_sgd), at="group"),
        history("phase", Initial.computed(adam), at="group"), STEP),
    # Low rank. The projector is an object in the state.
    StateSchema(f"{HERE}.galore.GaLore", *_LOW_RANK),
    StateSchema(f"{HERE}.fira.Fira", *_LOW_RANK, _SCALE),
    StateSchema(f"{HERE}.conda.Conda", *_LOW_RANK),
    StateSchema(f"{HERE}.apollo.APOLLO", *_LOW_RANK, _SCALE),
    StateSchema(f"{HERE}.utils.galore.GaLoreProjector",
        history("ortho_matrix", Initial.NONE, at="attribute"),
        clock("last_svd_step", Initial.constant(-1), at="attribute"),
        *(kept(key, at="attribute") for key in ("rank", "update_proj_gap", "scale", "projection_type"))),
    StateSchema(f"{HERE}.lora_rite.LoRARite",
        *(history(f"{key}_{side}") for key in ("m", "v", "basis", "escape") for side in "lr"),
        clock("step"), STEP),
    # Some of the weights, or some of their bits.
    StateSchema(f"{HERE}.sara.SaRA",
        history("mask", Initial.computed(small)), history("_mask_indices", Initial.EMPTY, at="attribute"),
        momentum("exp_avg", Initial.computed(packed)), variance("exp_avg_sq", Initial.computed(packed)),
        variance("max_exp_avg_sq", Initial.computed(packed)), STEP),
    StateSchema(f"{HERE}.spam.SPAM",
        _M, _V, history("mask", Initial.computed(whole_mask)), clock("total_step", at="named"),
        clock("current_step", Initial.computed(after_warmup), at="named"),
        scratch("warmup", at="attribute"), STEP),
    StateSchema(f"{HERE}.spam.StableSPAM",
        _M, _V, history("m_norm_t"), history("v_norm_t"), history("m_max_t"),
        clock("total_step", at="attribute"),
        history("warmup", Initial.computed(decay), at="attribute"), STEP),
    StateSchema(f"{HERE}.flash_adamw.FlashAdamW",
        _M, _V, momentum("exp_avg::*"), variance("exp_avg_sq::*"), kept("error_bits"),
        history("param_absmax", Initial.EMPTY, at="attribute"), STEP),
    # Preconditioners.
    StateSchema(f"{HERE}.shampoo.Shampoo",
        momentum("momentum_buffer", Initial.either("momentum", Initial.ABSENT_ENTRY, Initial.ABSENT)),
        history("pre_cond_*", Initial.identity("matrix_eps")), history("inv_pre_cond_*"), STEP),
    StateSchema(f"{HERE}.psgd.Kron",
        momentum("momentum_buffer", Initial.computed(zeros_of_momentum)),
        history("Q", Initial.identity().as_dtype("float32")), kept("expressions"),
        clock("update_counter", Initial.ABSENT, at="group"), STEP, ready=as_usual),
    # Others.
    StateSchema(f"{HERE}.fadam.FAdam",
        momentum("momentum", Initial.computed(zeros_in("momentum_dtype"))),
        variance("fim", Initial.computed(zeros_in("fim_dtype"))), STEP),
    StateSchema(f"{HERE}.fromage.Fromage", history("max", Initial.computed(bound)), STEP),
    StateSchema(f"{HERE}.grokfast.GrokFastAdamW",
        _M, _V, history("grok_exp_avg", Initial.ABSENT_ENTRY), STEP),
    StateSchema(f"{HERE}.ranger21.Ranger21",
        momentum("grad_ma"), momentum("neg_grad_ma"), variance("variance_ma"), variance("max_variance_ma"),
        history("lookahead_params", Initial.COPY), clock("lookahead_step", at="attribute"),
        history("current_lr", Initial.computed(starting_rate), at="attribute"), STEP),
    StateSchema(f"{HERE}.scion.SCIONLight", STEP, ready=without_gradients),
    StateSchema(f"{HERE}.demo.DeMo", history("delta"), _COUNT,
        scratch("data_transmit", at="attribute"), scratch("data_receive", at="attribute")),
    StateSchema(f"{HERE}.lomo.AdaLOMO",
        *(variance(key, at="attribute") for key in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")),
        clock("num_steps", at="attribute"), scratch("grad_norms", at="attribute"),
        scratch("clip_coef", at="attribute")),
]  # fmt: skip
