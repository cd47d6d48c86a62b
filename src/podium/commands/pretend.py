"""`podium train RECIPE --pretend`: a pod's recipe on this machine, for a few updates, before it is queued.

What the pod would refuse is refused here, in the same words: by its own checks with the real numbers
(`pretend/pod.py`), and by trainings of a small form with the same structure (`pretend/small.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from podium.check.trials import Trial, Trials, first_differing_update, trial_folder
from podium.commands.placing import place_instances
from podium.errors import TrainingFailed, UserError
from podium.pretend.pod import Pod, build_pod, rates
from podium.pretend.small import NUM_UPDATES, VALIDATED_AFTER, small_recipe, with_stand_in
from podium.recipe.loading import Recipe, load_recipe, to_yaml
from podium.recipe.section import is_own_name
from podium.runs.folder import check_free
from podium.topology import possible_instances
from podium.ui import console
from podium.ui.console import number
from podium.ui.table import Table
from podium.workloads.registry import own_member

_RESUMED_AFTER = 1
_GB, _MB = 1e9, 1e6


def pretend(
    name: str, overrides: Sequence[str], out: Path | None, num_instances: str | None, hosts: str | None
) -> None:
    """Say what the pod of a recipe will be, and train a small form of it. `out`: a folder for the small trainings."""
    recipe = load_recipe(name, overrides)
    if out is not None:
        check_free(out)
    if num_instances is None and ":" not in (hosts or ""):
        num_instances = str(_most_instances(recipe))
    topology = place_instances(recipe, num_instances, _named(hosts))
    real, replaced = with_stand_in(recipe)
    _check_starting_weights(recipe)
    with trial_folder(out, "pretend") as folder:
        with console.progress_display(what="pretending") as display:
            display.update(0, 3, {"now": "the pod's own numbers"})
            pod = build_pod(real, topology, {part: _own(recipe, part) for part in ("optim", "schedule")})
            small = small_recipe(real, pod.lengths, pod.lr)
            path = folder / "small.yaml"
            path.write_text(to_yaml(small.tree()), encoding="utf-8")
            trials, counts = Trials(folder, str(path), [], NUM_UPDATES), _counts(small)
            display.update(1, 3, {"now": f"training on {_counted(counts[0], 'instance')}"})
            first = _good(trials.train(counts[0]))
            display.update(2, 3, {"now": f"resuming on {_counted(counts[1], 'instance')}"})
            then = _good(trials.train_resumed(first, counts[1], _RESUMED_AFTER))
            _check_weights(first, then, small)
            display.update(3, 3, {"now": "done"})
        _tell(name, pod, small, replaced, first, counts)
    if out is not None:
        console.say(f"the small recipe and its trainings are in {out}")


def _most_instances(recipe: Recipe) -> int:
    """Return as many instances as the replicas and stages allow: one for each device of a pod."""
    possible = possible_instances(recipe.batch.num_replicas, recipe.parallel.num_stages, blocks=recipe.blocks)
    return max(possible, default=recipe.parallel.num_stages)


def _named(hosts: str | None) -> str | None:
    """Return the names of hosts; where only their number is given, some names."""
    if hosts is None or not hosts.isdecimal():
        return hosts
    if not 1 <= int(hosts) <= 65_536:
        raise UserError(f"--hosts {hosts}: expected their names, or how many: 1 to 65,536")
    return ",".join(f"host{index}" for index in range(int(hosts)))


def _own(recipe: Recipe, part: Literal["optim", "schedule"]) -> object:
    own: str = getattr(recipe, part).name
    return own_member(own, f"{part}.name") if is_own_name(own) else None


def _check_starting_weights(recipe: Recipe) -> None:
    start = recipe.workload.init_from
    if start is not None and not start.path.expanduser().exists():
        raise UserError(f"workload.init_from.path = {start.path} does not exist")


def _counts(small: Recipe) -> tuple[int, int]:
    """Return the numbers of instances to train on, and to resume on: the minimum, and another one where bits are the
    same on both and this machine is not asked for more."""
    possible = list(possible_instances(small.batch.num_replicas, small.parallel.num_stages, blocks=small.blocks))
    if small.parallel.num_stages > 1 or len(possible) == 1:
        return possible[0], possible[0]
    exact = small.engine.reduction == "exact" and small.parallel.shard != "parameters"
    return (possible[0] if exact and small.parallel.shard == "none" else possible[1]), possible[1]


def _good(trial: Trial) -> Trial:
    if not trial.problem:
        return trial
    sentence = trial.problem.rstrip(".")
    raise (UserError if trial.code == UserError.exit_code else TrainingFailed)(sentence)


def _check_weights(first: Trial, then: Trial, small: Recipe) -> None:
    if first.sha256 != then.sha256 and small.engine.reduction == "exact":
        where = first_differing_update(first.run, then.run)
        raise TrainingFailed(
            f"resumed after update {_RESUMED_AFTER}, the small form has other weights than trained without a break"
            f"{f' ({where})' if where else ''}: `podium check` finds why"
        )


# --- what is shown ---------------------------------------------------------------------------------------------------


def _tell(name: str, pod: Pod, small: Recipe, replaced: str, first: Trial, counts: tuple[int, int]) -> None:
    console.show_table(_pod_table(name, pod, small, replaced, counts, first.run.summary()["num_parameters"]))
    if pod.anatomy is not None:
        console.show_table(_bytes_table(pod))
    console.show_table(_tried_table(pod, small, first, counts))


def _pod_table(name: str, pod: Pod, small: Recipe, replaced: str, counts: tuple[int, int], num_params: int) -> Table:
    batch, little, topology = pod.recipe.batch, small.batch, pod.topology
    stages = topology.num_stages
    sizes = sorted(set(topology.host_sizes))
    rows = [
        ["replicas", f"{batch.num_replicas:,}", "the same, in turn"],
        ["stages", _stages(pod), "the same, a process each" if stages > 1 else "the same"],
        ["instances", f"{topology.num_instances:,}", " then ".join(map(str, dict.fromkeys(counts)))],
        ["hosts", _hosts(pod, sizes), "this one"],
        ["micro-batch", str(batch.micro_batch), str(little.micro_batch)],
        ["accumulation", f"{batch.num_accumulation:,}", f"{little.num_accumulation:,}"],
        ["global batch", f"{batch.global_batch:,}", f"{little.global_batch:,}"],
        ["model", _model(pod), f"{num_params:,}, as many blocks"],
        ["number format", _precision(pod.recipe), _tried_precision(pod.recipe, small)],
        ["samples", f"{pod.num_samples:,}", "random ones" if replaced else "the same"],
        ["updates", f"{pod.lengths.total_updates:,} ({number(_epochs(pod))} epochs)", f"the first {NUM_UPDATES}"],
        *([f"rate, update {update + 1:,}", f"{rate:.4g}", _tried_rate(update)] for update, rate in rates(pod)),
    ]
    if stages > 1:
        order = f"{pod.recipe.parallel.schedule}, {_in_flight(pod)}"
        rows.append(["pipeline's order", order, "the same"])
    caption = f"{replaced}:\nrandom samples stand in, and their number is assumed" if replaced else ""
    return Table(f"{name}, pretended", ["", "the pod", "tried here"], rows, caption)


def _stages(pod: Pod) -> str:
    layers = pod.topology.stage_layers
    if pod.topology.num_stages == 1:
        return "1"
    return f"{pod.topology.num_stages}" + (f" with {', '.join(map(str, layers))} layers" if layers else "")


def _hosts(pod: Pod, sizes: list[int]) -> str:
    num_hosts = len(pod.topology.hosts)
    if num_hosts == 1:
        return "1; --hosts 16 spreads them"
    each = " or ".join(map(str, sizes))
    return f"{num_hosts:,}, {each} instances each"


def _model(pod: Pod) -> str:
    return f"{pod.anatomy.num_params:,} parameters" if pod.anatomy is not None else "unknown size"


def _precision(recipe: Recipe) -> str:
    section = recipe.precision
    half = "" if section.mode == "32.32" else f" {section.half}"
    if section.loss_scale == "auto":
        return f"{section.mode}{half}, scale auto"
    return f"{section.mode}{half}" + ("" if section.loss_scale == 1 else f", scale {section.loss_scale:g}")


def _tried_precision(pod: Recipe, small: Recipe) -> str:
    return "the same" if pod.precision == small.precision else "loss scale 1"


def _epochs(pod: Pod) -> float:
    return pod.lengths.total_updates / pod.lengths.updates_per_epoch


def _tried_rate(update: int) -> str:
    return "the same" if update < NUM_UPDATES else "not reached"


def _in_flight(pod: Pod) -> str:
    return "" if pod.anatomy is None else f"at most {pod.anatomy.in_flight} micro-batches in flight"


def _bytes_table(pod: Pod) -> Table:
    assert pod.anatomy is not None
    devices = pod.anatomy.devices
    unit, name = (_GB, "GB") if max(one.peak for one in devices) >= _GB else (_MB, "MB")
    columns = ["stage", "work", "weights", "grads", "state", "sums", "acts", "step", "most"]
    rows = []
    for stage, one in enumerate(devices):
        parts = (one.weights, one.gradients, one.optimiser, one.sums, one.activations, one.step, one.peak)
        rows.append([str(stage), f"{one.work:.0%}", *(f"{part / unit:.2f}" for part in parts)])
    caption = (
        f"{name} by a formula, nothing measured: most = weights + gradients + state of the\n"
        "optimiser + sums of gradients + the larger of activations and what a step takes"
    )
    sizes = pod.topology.host_sizes
    if len(sizes) > 1:
        host = max(
            sum(devices[pod.topology.stage_of(instance)].peak for instance in pod.topology.instances_on(index))
            for index in range(len(sizes))
        )
        caption += f"\na host needs at most {host / unit:.1f} {name}"
    return Table("bytes of each instance", columns, rows, caption)


def _tried_table(pod: Pod, small: Recipe, first: Trial, counts: tuple[int, int]) -> Table:
    summary = first.run.summary()
    train, valid = summary["train"]["last"], summary["valid"]["last"]
    same = small.engine.reduction == "exact"
    on = f" on {_counted(counts[1], 'instance')}" if counts[0] != counts[1] else ""
    found = [
        ["counts, spans and shards of the pod", "they fit"],
        [f"{_counted(NUM_UPDATES, 'update')}", f"loss {number(train['loss'])}"],
        [f"a validation after update {VALIDATED_AFTER}", f"loss {number(valid['loss'])}"],
        ["a checkpoint after every update", "written, the first read"],
        [f"resumed after update {_RESUMED_AFTER}{on}", "the same weights" if same else "trained on"],
    ]
    if pod.anatomy is None:
        found.append(["bytes of each instance", pod.unknown])
    return Table("tried", ["what", "found"], found, f"the small form: weights_sha256 {first.sha256[:16]}…")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
