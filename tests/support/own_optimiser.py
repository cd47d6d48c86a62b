"""An optimiser and schedules of a user for tests, in a file beside their workload."""

from pathlib import Path

from tests.support.own import RECIPE, WORKLOAD, write_own

LION = """\
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"] = torch.zeros_like(param)
                    state["count"] = 0
                state["count"] += 1
                mean = state["mean"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                lr = group["lr"] / (1 + 0.1 * group["step"] + 0.01 * state["count"])
                param.sub_(torch.sign(mean * first + param.grad * (1 - first)), alpha=lr)
                mean.mul_(second).add_(param.grad, alpha=1 - second)


def halves(update, total_updates):
    return 0.5 ** (4 * update / total_updates)
"""
OPTIM = "optim: { name: lion.py:Lion, lr: 1e-2, weight_decay: 0.1, options: { betas: [0.9, 0.98] } }"
SCHEDULE = "schedule: { name: lion.py:halves, warmup: 2up }"


def write_lion(folder: Path, code: str = LION, optim: str = OPTIM, workload: str = WORKLOAD) -> Path:
    """Writes a workload, an optimiser and a schedule; returns the recipe."""
    (folder / "lion.py").write_text(code)
    return write_own(folder, workload, RECIPE.replace("optim: { name: adamw, lr: 1e-2 }", f"{optim}\n{SCHEDULE}"))
