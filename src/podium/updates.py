"""The engine and the samples for a stretch of updates, from what was prepared. For training and for measuring it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from podium.data.feed import Feed, samples_per_block, train_blocks
from podium.engine.executables import Executable
from podium.engine.update import Engine
from podium.prepare import Prepared, spread_parameters

Waited = Callable[[float], None]


def build_engine(
    prepared: Prepared,
    waited: Waited = lambda seconds: None,
    made: Callable[[Executable], None] = lambda executable: None,
) -> Engine:
    """`waited` is told the seconds of every wait for other instances, `made` what the first update compiled."""
    recipe = prepared.recipe
    spread_parameters(prepared)
    return Engine(
        prepared.model,
        prepared.workload,
        prepared.optimiser,
        recipe.batch,
        prepared.local_replicas,
        recipe.seed,
        recipe.optim.clip_norm,
        precision=recipe.precision,
        instances=prepared.instances,
        reduction=recipe.engine.reduction,
        compile=recipe.engine.compile,
        pipeline=prepared.pipeline,
        peers=prepared.peers,
        waited=waited,
        made=made,
        shares=prepared.shares,
        spread=prepared.spread,
    )


def updates_per_block(prepared: Prepared) -> int:
    """How many updates this instance's samples are gathered for at once."""
    recipe, batch = prepared.recipe, prepared.recipe.batch
    num_local = batch.micro_batch * batch.num_accumulation * len(prepared.local_replicas)
    return samples_per_block(prepared.samples, num_local, recipe.engine.updates_per_call) // num_local


@contextmanager
def samples_of_updates(
    prepared: Prepared, first: int, last: int, waited: Waited = lambda seconds: None
) -> Iterator[Iterator[dict[str, Tensor]]]:
    """The samples of updates first … last - 1, one update at a time: (local replicas, accumulation, micro-batch, …).

    What is handed out is valid until the next is asked for; `waited` is told the seconds that a block was late.
    """
    if prepared.pipeline is not None and not prepared.pipeline.has_losses:
        yield ({} for _ in range(first, last))  # samples are for the device that has the first and the last block
        return
    recipe, batch, replicas = prepared.recipe, prepared.recipe.batch, prepared.local_replicas
    num_updates = updates_per_block(prepared)
    max_samples = num_updates * batch.micro_batch * batch.num_accumulation * len(replicas)
    blocks = train_blocks(
        seed=recipe.seed,
        num_samples=len(prepared.samples),
        batch=batch,
        replicas=replicas,
        first_update=first,
        last_update=last,
        updates_per_block=num_updates,
    )
    shape = (-1, len(replicas), batch.num_accumulation, batch.micro_batch)
    prefetch, device = recipe.engine.prefetch, prepared.device
    with Feed(prepared.samples, blocks, max_samples, prefetch=prefetch, device=device, waited=waited) as feed:
        yield _one_by_one(feed, shape)


def _one_by_one(feed: Feed, shape: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    for block in feed:
        rows = {name: tensor.view(*shape, *tensor.shape[1:]) for name, tensor in block.rows.items()}
        # Cut at once: torch takes longer over one row at a time.
        for update in zip(*(tensor.unbind() for tensor in rows.values()), strict=True):
            yield dict(zip(rows, update, strict=True))
