"""Random numbers of blocks: the same whatever ran before."""

import torch
from torch import nn

from podium.transforms.seeding import seed_blocks, seed_torch

CPU = torch.device("cpu")


def blocks() -> list[nn.Module]:
    return [nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5)]


def test_a_block_draws_the_same_alone_and_after_others():
    together, alone = blocks(), blocks()
    seed_blocks(together, CPU)
    seed_blocks(alone, CPU)
    x = torch.ones(64)
    for update in range(3):
        seed_torch(CPU, "micro-batch", 0, update)
        drawn = [block(x) for block in together]
        seed_torch(CPU, "micro-batch", 0, update)
        torch.rand(7)  # whatever ran before
        assert torch.equal(alone[2](x), drawn[2])
        assert torch.equal(alone[3](x), drawn[3])
        assert not torch.equal(drawn[2], drawn[3])
        assert not torch.equal(drawn[0], drawn[2])


def test_places_differ():
    (block,) = seeded = [blocks()[2]]
    seed_blocks([nn.Identity(), *seeded], CPU)
    drawn = []
    for place in range(2):
        seed_torch(CPU, "micro-batch", place)
        drawn.append(block(torch.ones(64)))
    assert not torch.equal(*drawn)


def test_the_first_block_draws_as_if_nothing_were_said():
    first = nn.Dropout(0.5)
    seed_blocks([first], CPU)
    seed_torch(CPU, "micro-batch", 1)
    drawn = first(torch.ones(64))
    seed_torch(CPU, "micro-batch", 1)
    assert torch.equal(nn.Dropout(0.5)(torch.ones(64)), drawn)


def test_blocks_that_draw_nothing_are_left_alone():
    quiet = nn.Identity()
    seed_blocks([nn.Identity(), quiet], CPU)
    seed_torch(CPU, "micro-batch", 1)
    quiet(torch.ones(1))
    state = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    quiet(torch.ones(1))
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(moved, state)
