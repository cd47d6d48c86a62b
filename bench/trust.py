"""What the chain of digests and the audit cost a training, in processor time.

    python -m bench.trust           some minutes; writes bench/results/trust.md
    python -m bench.trust --quick   to see that it works, not to measure

Processor time of this process, as other work on the machine would disturb wall time. Chain: updates and links in turns,
medians; the share counts how many records the recipe writes (`engine.updates_per_call`, validations, checkpoints).
Audit: two engines on the same recipe, of which one audits, make the same updates in turns; one instance, which checks
itself, so an audit is one more replica to compute.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.where import when_and_where
from podium.distributed.digest import joined_digest, tensor_digests
from podium.engine.update import Engine
from podium.recipe.loading import load_recipe
from podium.training.build import Training, build_training
from podium.training.chain import chained
from podium.training.feeding import build_engine, samples_of_updates
from podium.ui import console

RESULTS = Path(__file__).parent / "results" / "trust.md"
#: of the training's processor time; what the chain has to stay below
TARGET = 0.005
_GENERATED = "workload.data.source=generated"
_AUDITS = (
    ("mnist", "batch.replicas=4"),
    ("neuron/quick", "batch.replicas=2"),
    ("neuron/quick", "batch.replicas=8"),
    ("cnn/quick", "batch.replicas=2"),
    ("bert/quick", "batch.replicas=2"),
)
_CHAINS = (
    ("mnist", "batch.micro=8"),
    ("mnist",),
    ("neuron/quick",),
    ("cnn/quick",),
    ("gpt2/quick",),
    ("bert/quick",),
    ("cosmology/quick",),
)


def seconds_of(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def updates_per_record(training: Training) -> float:
    """Return how many updates a record of the recipe stands for."""
    recipe, lengths = training.recipe, training.task.lengths
    every = [recipe.engine.updates_per_call]
    every += [lengths.updates(each) for each in (recipe.valid.every, recipe.checkpoint.every)]
    total = lengths.total_updates
    due = {update for each in every if each for update in range(each, total + 1, each)} | {total}
    return total / len(due)


def chain_row(name: str, overrides: tuple[str, ...], num: int) -> tuple[str, float]:
    """Return a row of the table, and the share."""
    training = build_training(load_recipe(name, [_GENERATED, "engine.threads=1", *overrides]), fresh=True)
    engine, progress = build_engine(training), training.state.progress
    updates, links = [], []
    with samples_of_updates(training, 0, num + 2) as every:
        for number, samples in enumerate(every):

            def update(number: int = number, samples: dict = samples) -> None:
                engine.update(number, samples, 1e-5)
                engine.collect()

            took, progress.update = seconds_of(update), number + 1
            link = seconds_of(lambda: chained(training))
            if number >= 2:
                updates.append(took)
                links.append(link)
    took, link, each = statistics.median(updates), statistics.median(links), updates_per_record(training)
    share = link / (each * took)
    size = sum(param.numel() * param.element_size() for param in training.state.model.parameters()) / 1e6
    shown = " ".join((name, *overrides))
    return f"| {shown} | {size:.1f} | {1e3 * took:.1f} | {1e3 * link:.2f} | {each:.0f} | {share:.2%} |", share


def audit_row(name: str, overrides: tuple[str, ...], num: int) -> str:
    """Return a row of the table: an update with and without an audit, and one that could have had one, in turns."""
    every, took = [], list[list[float]]()
    for share in (0.0, 1e-12, 1.0):
        keys = [_GENERATED, "engine.threads=1", *overrides, f"engine.audit={share}"]
        training = build_training(load_recipe(name, keys), fresh=True)
        every.append((training, build_engine(training)))
        took.append([])
    replicas = every[0][0].recipe.batch.num_replicas
    with samples_of_updates(every[0][0], 0, num + 2) as samples_of_all:
        for number, samples in enumerate(samples_of_all):
            for place in range(len(every)) if number % 2 else reversed(range(len(every))):
                engine = every[place][1]

                def update(engine: Engine = engine, number: int = number, samples: dict = samples) -> None:
                    engine.update(number, samples, 1e-5)
                    engine.collect()

                seconds = seconds_of(update)
                if number >= 2:
                    took[place].append(seconds)
    plain = statistics.median(took[0])
    watched, audited = ([b / a - 1 for a, b in zip(took[0], side, strict=True)] for side in took[1:])
    shown = " ".join((name, *overrides))
    extra = statistics.median(audited)
    return (
        f"| {shown} | {1e3 * plain:.1f} | {1 / replicas:.0%} | {extra:.0%} | {extra:.2f} % | "
        f"{statistics.median(watched):+.1%} |"
    )


def large_digest(rounds: int) -> str:
    """Return what a digest of the weights of GPT-2 small takes."""
    model = build_training(load_recipe("gpt2/small", [_GENERATED, "engine.memory_check=off"]), fresh=True).state.model
    tensors = model.state_dict()
    size = sum(
        tensor.numel() * tensor.element_size() for tensor in {t.data_ptr(): t for t in tensors.values()}.values()
    )
    took = min(seconds_of(lambda: joined_digest(tensor_digests(tensors.items()))) for _ in range(rounds))
    return (
        f"GPT-2 small, {size / 1e6:.0f} MB: {1e3 * took:.0f} ms, {size / took / 1e9:.1f} GB/s (the best of {rounds})."
    )


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    where = when_and_where(os.getloadavg()[0])
    rows = []
    for name, *overrides in _CHAINS[: 2 if quick else None]:
        row, share = chain_row(name, tuple(overrides), 4 if quick else 20)
        rows.append(row)
        console.out.print(row + ("" if share < TARGET else "  ABOVE"), soft_wrap=True)
    audits = []
    for name, *overrides in _AUDITS[: 1 if quick else None]:
        audits.append(audit_row(name, tuple(overrides), 4 if quick else 30))
        console.out.print(audits[-1], soft_wrap=True)
    lines = [
        "# What trust costs",
        "",
        f"{where}. Processor time of one process with one thread, by `python -m bench.trust`, whose first lines say "
        "what is compared. The recipes have one replica: an instance with several pays the same for longer updates.",
        "",
        "## The chain",
        "",
        "| recipe, generated samples | weights, MB | update, ms | link, ms | updates per record | share |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Wanted: below {TARGET:.1%}. A record is 73 bytes longer. {large_digest(2 if quick else 7)}",
        "",
        "## Audits",
        "",
        "One instance, which checks itself: medians of the ratios of updates made in turns. Watched: `engine.audit` is",
        "above 0, but this update is not audited.",
        "",
        "| recipe, generated samples | update, ms | one replica of it | an audit adds | `engine.audit: 0.01` costs "
        "| watched |",
        "|---|---|---|---|---|---|",
        *audits,
    ]
    if not quick:
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
