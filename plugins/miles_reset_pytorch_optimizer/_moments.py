"""The optimizers whose state starts at zero, at a number, or at a copy of the parameter.

They count their steps in the param group, where the count appears with the first step. Keys that an
option brings (``ams_bound``, ``adanorm``, ``use_shadow``, ...) stand beside those that are always there.
"""

from miles_reset import Initial, StateSchema, clock, history, kept, momentum, scratch, variance

HERE = "pytorch_optimizer.optimizer"
STEP = clock("step", Initial.ABSENT, at="group")

_M, _V = momentum("exp_avg"), variance("exp_avg_sq")
_ADAM = (_M, _V)
_AMS = (_M, _V, variance("max_exp_avg_sq"))
_NORM = history("exp_grad_adanorm")
_BUFFER = momentum("momentum_buffer")
_BELIEF = (_M, variance("exp_avg_var"), variance("max_exp_avg_var"))
_FACTORED = (_M, _V, variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), variance("exp_avg_sq_hat"),
    scratch("RMS"))  # fmt: skip
_ADALITE = (momentum("m_avg"), variance("v_avg"), variance("v_avg_0"), variance("v_avg_1"),
    momentum("m_avg_c"), momentum("m_avg_r"), momentum("m_avg_u"))  # fmt: skip
_EMOTIONS = (history("ema", Initial.EMPTY, at="named"), history("shadow", Initial.COPY))

# Slots, and the classes that have them.
_TABLE = [
    ((), "rose.ROSE", "lomo.LOMO"),
    (_ADAM, "adopt.ADOPT", "ano.Ano", "dual_adam.DualAdam", "exadam.EXAdam", "grams.Grams", "msvag.MSVAG",
        "padam.PAdam"),
    (_AMS, "adabound.AdaBound", "adamc.AdamC"),
    ((*_ADAM, _NORM), "adamp.AdamP", "radam.RAdam"),
    ((*_AMS, _NORM), "adams.AdamS"),
    ((*_ADAM, _NORM, scratch("weight_norm"), scratch("adam_norm"), scratch("trust_ratio")), "lamb.Lamb"),
    ((*_ADAM, _NORM, history("slow_buffer", Initial.COPY)), "ranger.Ranger"),
    ((*_AMS, _NORM, history("previous_grad")), "diffgrad.DiffGrad"),
    ((*_AMS, _NORM, momentum("neg_exp_avg")), "adapnm.AdaPNM"),
    ((*_AMS, history("last_grad")), "mars.MARS"),
    ((*_AMS, momentum("exp_mean_avg_beta2"), history("exp_avg_lr_1"), history("exp_avg_lr_2")),
        "laprop.LaProp"),
    ((*_ADAM, history("gamma", Initial.NONE, at="group")), "avagrad.AvaGrad"),
    ((*_ADAM, history("gamma", Initial.ABSENT)), "adagc.AdaGC"),
    ((*_ADAM, kept("subset_size")), "snsm.AdamWSN"),
    ((*_ADAM, momentum("exp_avg_slow")), "ademamix.AdEMAMix"),
    ((*_ADAM, history("num_sum"), history("den_sum")), "ademamix.SimplifiedAdEMAMix"),
    ((*_ADAM, history("exp_avg_lr")), "adamod.AdaMod"),
    ((*_ADAM, history("beta1_prod", Initial.ONES)), "adai.Adai"),
    ((*_ADAM, history("s")), "tam.AdaTAM"),
    ((*_ADAM, history("kahan_comp")), "adamw.StableAdamW"),
    ((*_ADAM, history("decay")), "amos.Amos"),
    ((*_ADAM, history("grad_queue", Initial.EMPTY)), "adashift.AdaShift"),
    ((momentum("exp_avg", Initial.group("initial_accumulator")),
        variance("exp_avg_sq", Initial.group("initial_accumulator"))), "yogi.Yogi"),
    ((*_ADAM, history("beta1_weight", Initial.ZEROS.as_dtype("float32")),
        history("beta2_weight", Initial.ZEROS.as_dtype("float32"))), "qhadam.QHAdam"),
    ((*_BELIEF, _NORM), "adabelief.AdaBelief", "aida.Aida"),
    ((*_BELIEF, history("exp_grad_norm")), "adanorm.AdaNorm"),
    ((_M, variance("exp_inf"), _NORM), "adamax.AdaMax"),
    ((_M, _NORM), "lion.Lion"),
    ((_M,), "tiger.Tiger"),
    ((_M, history("pbar")), "focus.FOCUS"),
    ((_M, variance("exp_hessian_diag_sq"), scratch("hessian")), "adahessian.AdaHessian"),
    ((momentum("momentum"), variance("hessian_moment"), scratch("hessian")), "sophia.SophiaH"),
    (_FACTORED, "adafactor.AdaFactor"),
    ((*_FACTORED, variance("exp_avg_res_row"), variance("exp_avg_res_col")), "came.CAME"),
    (_ADALITE, "adalite.Adalite"),
    ((variance("square_avg"), history("acc_delta")), "adadelta.AdaDelta"),
    ((_V, history("s"), history("n"), history("prev_param", Initial.COPY)), "adasmooth.AdaSmooth"),
    ((momentum("m"), variance("v"), history("r")), "adamg.AdamG"),
    ((momentum("m"), variance("v"), variance("v_mean"), kept("head"), kept("dimension"), kept("reduced")),
        "adam_mini.AdamMini"),
    ((momentum("m"), history("b")), "kate.Kate"),
    ((history("z"), history("n")), "ftrl.FTRL"),
    ((_BUFFER,), "aggmo.AggMo", "lars.LARS", "qhm.QHM", "sgd.SignSGD", "sso.SpectralSphere"),
    ((momentum("momentum_buffer", Initial.either("dampening", Initial.ABSENT, Initial.ZEROS)),), "sgd.SGDW"),
    ((momentum("momentum_buffer", Initial.COPY),), "sgd.AccSGD"),
    ((_BUFFER, history("gsnr", Initial.ABSENT)), "sgd.SGDSaI"),
    ((_BUFFER, variance("accumulator_*")), "sm3.SM3"),
    ((_BUFFER, scratch("step_size", at="group")), "alig.AliG"),
    ((momentum("momentum"),), "adamp.SGDP"),
    ((momentum("d"),), "scion.SCION"),
    ((momentum("m", Initial.ABSENT), variance("v", Initial.ABSENT)), "bcos.BCOS"),
    ((momentum("v", Initial.ABSENT),), "gravity.Gravity"),
    ((momentum("pos_momentum"), momentum("neg_momentum")), "pnm.PNM"),
    ((momentum("grad_buffer"), history("i_buffer"), history("d_buffer")), "pid.PID"),
    ((momentum("mov_avg_grad"), history("mov_avg_param")), "srmm.SRMM"),
    ((momentum("exp_avg_grad"), history("approx_hessian"), history("update")), "apollo.ApolloDQN"),
    ((momentum("momentum"), variance("s", Initial.ONES), scratch("noisy_gradient")), "sam.BSAM"),
    ((momentum("mug"), variance("bg", Initial.group("pbg2")), variance("bhg", Initial.group("pbhg2"))),
        "sgd.VSGD"),
    ((history("grad_sum_sq"), history("s"), history("x0", Initial.COPY), clock("k", at="named")),
        "madgrad.MADGRAD"),
    ((*_ADAM, *_EMOTIONS), "emonavi.EmoNavi"),
    ((_M, *_EMOTIONS), "emonavi.EmoLynx"),
    ((*_ADAM, variance("exp_avg_r"), variance("exp_avg_c"), *_EMOTIONS, scratch("prev_loss", at="attribute")),
        "emonavi.EmoFact"),
    # Those that keep moments only for what is no matrix.
    ((*_ADAM, _BUFFER), "muon.muon.Muon", "muon.distributed_muon.DistributedMuon", "muon.muon_clip.MuonClip"),
    ((*_ADAM, _BUFFER, variance("second_momentum_buffer")), "muon.normuon.NorMuon"),
    ((*_ADAM, _BUFFER, variance("v", Initial.group("v"))), "muon.adago.AdaGO"),
    ((*_ADAM, momentum("m"), variance("v")), "muon.adamuon.AdaMuon"),
]  # fmt: skip

# Where the state is there, the first step makes none of it, and some of it is the first gradient's.
_FROM_THE_FIRST_GRADIENT = {
    "a2grad.A2Grad": "avg_grad v_k v_kk x_k alpha_k",
    "adan.Adan": "exp_avg exp_avg_sq exp_avg_diff previous_grad exp_grad_adanorm",
    "dash.DASH": "blocks shape one_sided",
    "nero.Nero": "exp_avg_sq scale",
    "novograd.NovoGrad": "moments grads_ema",
    "racs.Alice": "U Q m v p phi",
    "racs.RACS": "s q theta",
    "shampoo.ScalableShampoo": "momentum pre_conditioner graft",
    "soap.SOAP": "exp_avg exp_avg_sq GG Q precondition_frequency shampoo_beta",
    "tam.TAM": "momentum_buffer s",
}

MOMENTS = [StateSchema(f"{HERE}.{name}", *slots, STEP) for slots, *names in _TABLE for name in names] + [
    StateSchema(f"{HERE}.{name}", *(history(key, Initial.ABSENT_ENTRY) for key in keys.split()), STEP)
    for name, keys in _FROM_THE_FIRST_GRADIENT.items()
]
