"""One command makes every page anew, and the tuned contenders are what their names say."""

from importlib.util import find_spec
from pathlib import Path

import torch
from bench.figures import FIGURES
from bench.race.contenders import CONTENDERS
from bench.race.contenders.pytorch_tuned import channels_last, fused, laid_out
from torch import nn

ROOT = Path(__file__).parents[2]


def test_every_page_of_results_is_made_anew():
    pages = {path.stem for path in (ROOT / "bench/results").glob("*.md")}
    assert pages <= FIGURES.keys()
    for module, *_ in FIGURES.values():
        assert find_spec(module) is not None, module
    readme = (ROOT / "bench/README.md").read_text(encoding="utf-8")
    assert all(f"results/{page}.md" in readme for page in FIGURES)


def test_every_contender_is_there():
    assert all(find_spec(contender.module) is not None for contender in CONTENDERS.values())


def test_a_fused_optimiser_makes_the_steps_of_the_plain_one():
    def trained(fuse: bool, build) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimiser = build(model.parameters())
        optimiser = fused(optimiser) if fuse else optimiser
        assert optimiser.param_groups[0]["fused"] is (True if fuse else None)
        for _ in range(3):
            optimiser.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimiser.step()
        return [param.detach() for param in model.parameters()]

    for build in (
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    ):
        for plain, tuned in zip(trained(False, build), trained(True, build), strict=True):
            torch.testing.assert_close(plain, tuned)


def test_images_and_weights_of_convolutions_are_laid_out_with_channels_last():
    model, image, label = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.rand(2, 3, 8, 8), torch.zeros(2)
    assert channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert laid_out([image, label], True)[0].is_contiguous(memory_format=torch.channels_last)
    assert not channels_last(nn.Linear(2, 2))
    assert laid_out([image], False)[0] is image
