"""`parallel.shard` on real processes: the same bits and files as without it, kills and resumes included."""

import pytest
import torch

from podium.checkpoints import reading
from podium.distributed.digest import weights_sha256
from podium.distributed.instances import Instances
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.topology import build_topology
from podium.training.build import build_training
from podium.training.feeding import build_engine, samples_of_updates
from tests.support.crew import Crew
from tests.support.outcomes import outcome
from tests.support.processes import assert_user_error, started
from tests.support.recipes import TINY, eight

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("workload", "num_instances"), [("bert", 2), ("cnn", 4), ("gpt2", 4)])
def test_shards_of_the_optimiser_give_the_same_bits(workload, num_instances, podium, tmp_path, outcome_alone):
    """With lamb, with half precision rounded by chance and an average of the weights, with clipping."""
    done = podium("train", *eight(workload), "parallel.shard=optimiser", "--instances", num_instances, "--out", "run",
                  timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(eight(workload))


def test_fast_reduction_takes_shards_too(podium, tmp_path):
    for name, shard in (("with", "optimiser"), ("without", "none")):
        done = podium("train", *eight("gpt2"), "engine.reduction=fast", f"parallel.shard={shard}", "--instances", 2,
                      "--out", name)  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "with")) == outcome(Run(tmp_path / "without"))


def change(path, before: str, after: str) -> None:
    text = (path / "recipe.yaml").read_text()
    assert before in text
    (path / "recipe.yaml").write_text(text.replace(before, after))


@pytest.mark.parametrize(("before", "after"), [(("optimiser", 4), ("none", 1)), (("none", 2), ("optimiser", 4))])
def test_a_stopped_run_resumes_with_and_without_shards(before, after, podium, tmp_path, outcome_alone):
    (shard, count), (next_shard, next_count) = before, after
    args = ["train", *eight("gpt2"), "train.time_limit=0.01s", f"parallel.shard={shard}", "--out", "run"]
    done = podium(*args, "--instances", count)
    assert done.returncode == 75, done.stderr
    change(tmp_path / "run", "time_limit: 0.01", "time_limit: null")
    change(tmp_path / "run", f"shard: {shard}", f"shard: {next_shard}")
    assert reading.load_latest(tmp_path / "run" / "checkpoints", pytest.fail).update < 8
    done = podium("resume", "run", "--instances", next_count, timeout=300)
    assert done.returncode == 0, done.stderr
    assert outcome(Run(tmp_path / "run")) == outcome_alone(eight("gpt2"))


KILLED = [*TINY["mnist"], "workload.data.generated_train=2048", "batch.micro=2", "batch.replicas=4", "optim.name=adamw",
          "optim.momentum=null", "train.length=40up", "checkpoint.every=4up", "engine.updates_per_call=2"]  # fmt: skip


def test_a_killed_instance_and_a_killed_run_lose_nothing(podium, tmp_path):
    assert podium("train", *KILLED, "--out", "straight").returncode == 0
    shard = [*KILLED, "parallel.shard=optimiser", "--instances", 2, "--out", "run"]
    with started("train", *shard, cwd=tmp_path) as launched:
        launched.until_records(tmp_path / "run", 4)
        launched.instances[1].kill()
        launched.until_records(tmp_path / "run", 12)
        launched.kill_all()
    assert podium("resume", "run", "--instances", 4).returncode == 0
    assert outcome(Run(tmp_path / "run"))[::2] == outcome(Run(tmp_path / "straight"))[::2]


def test_another_optimisers_state_is_refused_by_all(podium, tmp_path):
    args = ["train", *eight("mnist"), "train.time_limit=0.01s", "parallel.shard=optimiser", "--out", "run"]
    assert podium(*args, "optim.name=adamw", "optim.momentum=null", "--instances", 2).returncode == 75
    change(tmp_path / "run", "name: adamw", "name: momentum")
    done = podium("resume", "run", "--instances", 2, "--accept-changes")
    assert done.returncode == 2, done.stderr
    assert "the saved optimiser state does not belong to momentum with this model" in done.stderr


#: weights within 1e-6 of one another want gradients well away from 0, where adam's first steps amplify rounding
SPREAD = ["engine.reduction=fast", "optim.name=momentum", "optim.betas=null", "optim.lr=0.01", "precision=32.32",
          "average.method=exponential", "average.every=2up"]  # fmt: skip


def tensors_of(run: Run) -> dict:
    found = reading.load_latest(run.checkpoints, pytest.fail)
    return {
        f"{kind}/{name}": t for kind in ("weights", "optimiser", "average") for name, t in getattr(found, kind).items()
    }


def assert_close(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def not_spread(run_alone) -> dict:
    return tensors_of(run_alone([*eight("gpt2"), *SPREAD]))


@pytest.mark.parametrize("num_instances", [2, 4])
def test_spread_parameters_end_at_the_same_weights_within_1e_6(num_instances, podium, tmp_path, not_spread):
    """Clipping, accumulation, several replicas per instance, recomputed blocks, tied weights, an average, a report."""
    args = [*eight("gpt2"), *SPREAD, "parallel.shard=parameters", "log.report=true"]
    done = podium("train", *args, "--instances", num_instances, "--out", "run", timeout=300)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert_close(tensors_of(run), not_spread)
    assert (run.path / "report.html").exists()
    found = reading.load_latest(run.checkpoints, pytest.fail)
    training = build_training(run.recipe())
    found.restore(training.state.model, training.state.optimiser)
    assert weights_sha256(training.state.model) == run.summary()["weights_sha256"]
    assert podium("validate", "run").returncode == 0


@pytest.mark.parametrize(("before", "after"), [(("parameters", 4), ("optimiser", 2)), (("none", 1), ("parameters", 2))])
def test_a_stopped_run_resumes_with_and_without_spread_parameters(before, after, podium, tmp_path, not_spread):
    (shard, count), (next_shard, next_count) = before, after
    args = ["train", *eight("gpt2"), *SPREAD, "train.time_limit=0.01s", f"parallel.shard={shard}", "--out", "run"]
    done = podium(*args, "--instances", count)
    assert done.returncode == 75, done.stderr
    change(tmp_path / "run", "time_limit: 0.01", "time_limit: null")
    change(tmp_path / "run", f"shard: {shard}", f"shard: {next_shard}")
    done = podium("resume", "run", "--instances", next_count, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_close(tensors_of(Run(tmp_path / "run")), not_spread)


def state_held(instances: Instances, shard: str) -> tuple[int, int]:
    """Bytes of optimiser state and of weights that an instance holds after an update."""
    name, *overrides = eight("gpt2")
    recipe = load_recipe(name, [*overrides, "precision=32.32", "engine.reduction=fast", f"parallel.shard={shard}"])
    training = build_training(recipe, build_topology(8, instances.count), instances, 1)
    engine = build_engine(training)
    with samples_of_updates(training, 0, 1) as samples:
        engine.update(0, next(samples), 1e-3)
    state = sum(tensor.nbytes for slots in training.state.optimiser.state.values() for tensor in slots.values())
    params = training.state.optimiser.names if shard == "parameters" else training.state.model.parameters()
    return state, sum(param.nbytes for param in params)


@pytest.fixture(scope="module")
def crew():
    crew = Crew(4, __name__)
    yield crew
    crew.close()


@pytest.mark.parametrize("count", [2, 4])
def test_an_instance_holds_its_share_alone(crew, count):
    crew.join(count)
    whole = crew.run(state_held, "none")[0]
    optimiser, parameters = (crew.run(state_held, shard) for shard in ("optimiser", "parameters"))
    assert sum(state for state, _ in optimiser) == whole[0]
    assert max(state for state, _ in optimiser) <= 1.2 * whole[0] / count
    assert {weights for _, weights in optimiser} == {whole[1]}
    for place in (0, 1):
        assert sum(held[place] for held in parameters) == whole[place]
        assert max(held[place] for held in parameters) <= 1.2 * whole[place] / count


def test_what_cannot_be_spread_is_one_sentence(podium):
    args = [*eight("gpt2"), "parallel.shard=parameters", "--instances", 2, "--out", "run"]
    assert_user_error(podium("train", *args), "engine.reduction=fast", "parallel.shard=optimiser, which keeps the bits")
