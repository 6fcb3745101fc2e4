"""Stand-ins for the FusedAdam of Transformer Engine and of apex, which need a GPU."""

from typing import Any

import torch


class FusedAdamLike(torch.optim.Optimizer):
    """Stand in for FusedAdam of Transformer Engine: its name, its state, plain arithmetic.

    The step count is in the param group and is made by the first step. With ``capturable`` it is
    an int tensor of shape [1]. The state of a parameter holds the two moments and no step, and with
    ``master_weights`` the parameter in fp32. A load leaves all of it in fp32.
    """

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"
    __qualname__ = "FusedAdam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        **formats: Any,
    ) -> None:
        if not adam_w_mode or set(formats.values()) - {torch.float32, False}:
            raise NotImplementedError("FusedAdamLike decouples the weight decay, and holds all in fp32")
        self.capturable, self.master_weights = capturable, master_weights
        self.use_decoupled_grad = use_decoupled_grad
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Count the step in each group that has parameters, and update them."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.ones(1, dtype=torch.int) if self.capturable else 1
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad" if self.use_decoupled_grad else "grad")
                if grad is not None:
                    self._update(param, grad.float(), group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        self.initialize_state(param)
        state, (beta1, beta2), step = self.state[param], group["betas"], int(group["step"])
        mean = state["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1**step)
        square = state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2) / (1 - beta2**step)
        weight = state["master_param"] if self.master_weights else param
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mean / (square.sqrt() + group["eps"]), alpha=-group["lr"])
        param.copy_(weight)

    def initialize_state(self, param: torch.Tensor) -> None:
        """Make the state of a parameter that has none."""
        if not self.state[param]:
            self.state[param] |= {key: torch.zeros_like(param).float() for key in ("exp_avg", "exp_avg_sq")}
            if self.master_weights:
                self.state[param]["master_param"] = param.detach().clone().float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Write a value in fp32 into the state."""
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but for its cast of the state to the dtype of the parameter."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            if index in state_dict["state"]:
                self.state[param] |= state_dict["state"][index]


class ApexFusedAdamLike(FusedAdamLike):
    """Stand in for FusedAdam of apex, which has the same state, but for master weights."""

    __module__ = "apex.optimizers.fused_adam"
    __qualname__ = "FusedAdam"
