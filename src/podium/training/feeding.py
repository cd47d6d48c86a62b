"""The engine, and the samples for a range of updates. Used by training and by measurements of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from podium.data.feed import Feed, buffer_bytes
from podium.data.sample_plan import lengths_for, samples_per_block, train_blocks
from podium.engine.audit import AuditOptions
from podium.engine.update import Engine, Events, UpdateOptions
from podium.training.build import Training

Waited = Callable[[float], None]


def build_engine(training: Training, events: Events | None = None) -> Engine:
    """Build the engine that makes the updates of a training; it calls `events`."""
    recipe = training.recipe
    options = UpdateOptions(
        recipe.batch,
        recipe.seed,
        recipe.optim.clip_norm,
        stochastic_rounding=recipe.precision.rounds_stochastically,
        compile=recipe.engine.compile,
        graph=recipe.engine.graph,
        audit=_audit_options(training),
    )
    return Engine(training.task, training.state, training.parallelism, options, events)


def _audit_options(training: Training) -> AuditOptions | None:
    topology = training.placement.topology

    @contextmanager
    def samples(update: int, replica: int) -> Iterator[Mapping[str, Tensor]]:
        one = range(replica, replica + 1)
        with samples_of_updates(training, update, update + 1, replicas=one) as every:
            yield next(every)

    def place(index: int) -> str:
        return f"instance {index} on {topology.host_of(index)}"

    share = training.recipe.engine.audit
    return AuditOptions(share, samples, place) if share else None


def updates_per_block(training: Training) -> int:
    """Return how many updates this instance's samples are gathered for at once."""
    recipe, batch = training.recipe, training.recipe.batch
    num_local = batch.micro_batch * batch.num_accumulation * len(training.placement.replicas)
    return samples_per_block(training.task.train_source, num_local, recipe.engine.updates_per_call) // num_local


def feed_bytes(training: Training) -> int:
    """Return the memory that the feed of this instance will take."""
    recipe, batch, source = training.recipe, training.recipe.batch, training.task.train_source
    num_local = batch.micro_batch * batch.num_accumulation * len(training.placement.replicas)
    total = training.task.lengths.total_updates
    num_updates = min(updates_per_block(training), total)
    return buffer_bytes(source, num_local * num_updates, recipe.engine.prefetch, -(-total // num_updates))


@contextmanager
def samples_of_updates(
    training: Training, first: int, last: int, waited: Waited = lambda seconds: None, replicas: range | None = None
) -> Iterator[Iterator[dict[str, Tensor]]]:
    """Yield an iterator over the samples of updates first … last - 1, one update at a time: (local replicas,
    accumulation, micro-batch, …).

    Samples are valid until the next ones are requested; `waited` is called with the seconds that a block was late.
    `replicas`: others than those of this instance.
    """
    if not training.parallelism.takes_samples:
        yield ({} for _ in range(first, last))  # only the device with the first and the last block needs samples
        return
    recipe, batch, replicas = training.recipe, training.recipe.batch, replicas or training.placement.replicas
    source, num_updates = training.task.train_source, min(updates_per_block(training), last - first)
    max_samples = num_updates * batch.micro_batch * batch.num_accumulation * len(replicas)
    blocks = train_blocks(
        seed=recipe.seed,
        num_samples=len(source),
        batch=batch,
        replicas=replicas,
        first_update=first,
        last_update=last,
        updates_per_block=num_updates,
        lengths=lengths_for(batch, source),
    )
    shape = (-1, len(replicas), batch.num_accumulation, batch.micro_batch)
    prefetch, device = recipe.engine.prefetch, training.placement.device
    with Feed(source, blocks, max_samples, prefetch=prefetch, device=device, waited=waited) as feed:
        yield _one_by_one(feed, shape)


def _one_by_one(feed: Feed, shape: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    for block in feed:
        rows = {name: tensor.view(*shape, *tensor.shape[1:]) for name, tensor in block.rows.items()}
        # Unbound all at once: indexing one row at a time takes torch longer.
        for update in zip(*(tensor.unbind() for tensor in rows.values()), strict=True):
            yield dict(zip(rows, update, strict=True))
