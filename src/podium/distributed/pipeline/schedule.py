"""The order in which the devices of a pipeline run the parts of the micro-batches. Pure; `runtime.py` executes it.

    sequential    a micro-batch runs forward and backward before the next begins: least memory, one device at a time
    interleaved   devices alternate between forward and backward, with few micro-batches in flight (1F1B)
    grouped       all run forward, then all backward: as fast as interleaved, but all activations are kept (GPipe)

Every part runs the micro-batches in ascending order, forward and backward, so all three add gradients in the order of
an uncut model and give the same bits.
"""

from typing import Literal, NamedTuple

from podium.recipe.sections.parallel import Schedule

_STEPS = {"forward": 1, "backward": 2}  # approximate durations; doubled for a part with a device of its own


class Action(NamedTuple):
    kind: Literal["forward", "backward"]
    part: int
    micro_batch: int


def max_in_flight(schedule: Schedule, num_devices: int, num_micro_batches: int) -> int:
    """Return the maximum number of micro-batches that have begun and not ended, and so keep activations."""
    most = {"sequential": 1, "interleaved": num_devices + 2, "grouped": num_micro_batches}[schedule]
    return min(most, num_micro_batches)


def actions(schedule: Schedule, num_devices: int, num_micro_batches: int) -> list[list[Action]]:
    """Return the actions of each device in order, found by simulation: a free device takes the most urgent action
    whose inputs are available."""
    last = num_devices  # parts 0 … last; the last one is on device 0, like the first
    limit = max_in_flight(schedule, num_devices, num_micro_batches)
    ended: dict[Action, int] = {}
    next_of = {(kind, part): 0 for kind in _STEPS for part in range(last + 1)}
    orders: list[list[Action]] = [[] for _ in range(num_devices)]
    free_at = [0] * num_devices
    now = 0

    def ready(action: Action) -> bool:
        kind, part, micro_batch = action
        if micro_batch == num_micro_batches:
            return False
        if kind == "forward":
            if part == 0:
                return micro_batch < next_of["backward", 0] + limit
            return ended.get(Action("forward", part - 1, micro_batch), now + 1) <= now
        if schedule == "grouped" and next_of["forward", part] < num_micro_batches:
            return False
        return all(
            ended.get(action, now + 1) <= now
            for action in (
                Action("forward", part, micro_batch),
                *([Action("backward", part + 1, micro_batch)] if part < last else []),
            )
        )

    while sum(map(len, orders)) < 2 * (last + 1) * num_micro_batches:
        for device, order in enumerate(orders):
            if free_at[device] > now:
                continue
            parts = [part for part in range(last, -1, -1) if part % num_devices == device]
            waiting = [Action(kind, part, next_of[kind, part]) for kind in ("backward", "forward") for part in parts]
            if device == 0:  # new micro-batches first, to keep the other devices busy, as far as the limit allows
                waiting.insert(0, waiting.pop())
            chosen = next((action for action in waiting if ready(action)), None)
            if chosen is not None:
                order.append(chosen)
                next_of[chosen.kind, chosen.part] += 1
                free_at[device] = ended[chosen] = now + _STEPS[chosen.kind] * (1 if device == 0 else 2)
        now += 1
    return orders
