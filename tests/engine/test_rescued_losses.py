"""Losses that are not recorded yet, read from what the instances have published: as if all had told them."""

import pytest
import torch

from podium.contract import Loss
from podium.distributed.lost import InstanceLost
from podium.engine.losses import PendingLosses

SIZES = [2, 1]


def made(num_updates: int, ledgers: list[torch.Tensor], first: int = 7) -> list[PendingLosses]:
    """Two instances, with two replicas and with one, after some updates."""
    both = [PendingLosses() for _ in SIZES]
    for update in range(first, first + num_updates):
        for index, size in enumerate(SIZES):
            for replica in range(size):
                value = torch.tensor(0.1 * update + 0.01 * (2 * index + replica))
                both[index].add(Loss(value, 4, {"accuracy": (torch.tensor(1.0 + replica), 8)}))
            both[index].publish(ledgers[index], update)
            both[index].complete()
    return both


def ledgers() -> list[torch.Tensor]:
    return [torch.zeros(64, dtype=torch.float64) for _ in SIZES]


def test_every_instance_reads_the_same_losses_in_the_order_of_one_instance():
    kept = ledgers()
    both = made(3, kept)
    first, second = (pending.rescued(kept, index, 3, SIZES) for index, pending in enumerate(both))
    assert first == second
    expected = [0.1 * update + 0.01 * replica for update in (7, 8, 9) for replica in (0, 1, 2)]
    assert [total for total, _ in first.parts["loss"]] == torch.tensor(expected).tolist()
    assert [count for _, count in first.parts["accuracy"]] == [8] * 9


def test_an_update_that_was_interrupted_does_not_count():
    kept = ledgers()
    both = made(2, kept)
    both[0].add(Loss(torch.tensor(5.0), 4, {"accuracy": (torch.tensor(1.0), 8)}))
    both[0].publish(kept[0], 9)
    assert len(both[0].rescued(kept, 0, 2, SIZES).parts["loss"]) == 6
    assert both[0].rescued(kept, 0, 2, SIZES) == both[1].rescued(kept, 1, 2, SIZES)


def test_what_another_instance_has_collected_and_written_over_is_not_read():
    kept = ledgers()
    both = made(2, kept)
    both[1].collect()
    both[1].add(Loss(torch.tensor(5.0), 4, {"accuracy": (torch.tensor(1.0), 8)}))
    assert len(both[0].rescued(kept, 0, 2, SIZES).parts["loss"]) == 6  # as long as nothing new is there
    both[1].publish(kept[1], 9)
    with pytest.raises(InstanceLost):
        both[0].rescued(kept, 0, 2, SIZES)


def test_more_than_there_is_room_for_is_not_taken_for_all():
    kept = [torch.zeros(16, dtype=torch.float64) for _ in SIZES]
    both = made(2, kept)
    assert not both[0].is_readable
    assert both[1].is_readable


class _Lost:
    count, index = 2, 0

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        raise InstanceLost(1, "its process has ended")


def test_losses_stay_where_an_instance_is_lost_while_they_are_collected():
    kept = ledgers()
    both = made(2, kept)
    with pytest.raises(InstanceLost):
        both[0].collect_alike(_Lost(), 2, SIZES)
    assert both[0].rescued(kept, 0, 2, SIZES) == both[1].rescued(kept, 1, 2, SIZES)
