import torch


class Calm(torch.optim.Optimizer):
    def __init__(self, params: object, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["decay"] = 1.0
                state["mean"].lerp_(p.grad, 1 - group["beta"])
                state["decay"] *= group["beta"]
                p.sub_(state["mean"], alpha=group["lr"] / (1 - state["decay"]))
