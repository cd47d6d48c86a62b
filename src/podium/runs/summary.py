"""`summary.json` as a run writes it: at its start, when it ends, and after its report."""

from dataclasses import asdict

from podium.distributed.digest import sha256_of
from podium.engine.audit import audited
from podium.engine.compile_cache import Executable
from podium.machine.memory import peak_bytes
from podium.runs.folder import Run
from podium.runs.monitoring import Monitoring
from podium.topology import usable_cores
from podium.training.build import Training
from podium.training.clock import Clock, Utilisation
from podium.training.progress import summary


class SummaryWriter:
    """Writes the summary of one run, on instance 0; all instances call it."""

    def __init__(self, run: Run, training: Training, clock: Clock, monitoring: Monitoring) -> None:
        self._run, self._training, self._clock, self.monitoring = run, training, clock, monitoring
        self._utilisation = Utilisation(len(usable_cores()))
        #: once the first update has been made, where the recipe asks for compilation
        self.executable: Executable | None = None

    def write(self, state: str, *, weights: bool = True) -> None:
        """Write the summary of now. `weights`: with their checksum, which is collective; else that of before stays."""
        training = self._training
        if weights and state in ("done", "interrupted"):
            self.monitoring.measure_energy()
        digest = _weights_sha256(training) if weights else None
        if not training.placement.is_lead:
            return
        self._run.write_summary(
            {
                **summary(training.state.progress, training.task.lengths, self._clock.seconds(), state),
                "cpu_percent": round(self._utilisation.percent_since_start(), 1),
                "memory_peak_bytes": peak_bytes() or None,
                "weights_sha256": digest or self._run.summary().get("weights_sha256"),
                "topology": training.placement.topology.record(),
                "recipe_sha256": training.recipe.sha256(),
                "num_parameters": sum(param.numel() for param in training.state.model.parameters()),
                **self.monitoring.summary(),
                **_audited(training),
                **({"executable": asdict(self.executable)} if self.executable else {}),
            }
        )


def _audited(training: Training) -> dict[str, int]:
    recipe = training.recipe
    share, num_updates = recipe.engine.audit, training.state.progress.update
    return {"audited_updates": audited(recipe.seed, share, num_updates)} if share else {}


def _weights_sha256(training: Training) -> str | None:
    """Digest the whole model, on instance 0."""
    with training.parallelism.whole_model() as model:
        digest = sha256_of(training.parallelism.weights(model))
    return digest if training.placement.is_lead else None
