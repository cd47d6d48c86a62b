"""The trainings of a certificate: each shipped workload with generated samples, tiny, so that all fit any device."""

_ALL = ["batch.replicas=8", "batch.accumulation=2", "optim.clip_norm=0.5", "schedule.warmup=2up", "engine.threads=1"]
#: recipe and overrides; dropout and batch norm are in them
_TINY = {
    "bert": ["bert/quick", "workload.data.samples=256", "workload.data.length=32", "workload.model.layers=2",
             "workload.model.hidden=32", "workload.model.vocabulary=200", "batch.micro=4"],
    "cnn": ["cnn/quick", "workload.data.image_size=16", "workload.data.samples=256", "workload.data.test_samples=64",
            "batch.micro=4"],
    "cosmology": ["cosmology/quick", "workload.data.samples=64", "workload.data.valid_samples=7",
                  "workload.model.width=1", "batch.micro=1"],
    "gpt2": ["gpt2/quick", "workload.data.samples=256", "workload.data.test_samples=40",
             "workload.data.sample.tokens=20", "workload.model.layers=2", "workload.model.hidden=16",
             "workload.model.heads=2", "workload.model.context=12", "workload.model.vocabulary=50", "batch.micro=4",
             "valid.max_samples=null"],
    "mnist": ["mnist", "workload.data.generated_train=512", "workload.data.generated_test=64", "batch.micro=4"],
    "neuron": ["neuron", "workload.data.samples=256", "batch.micro=4"],
}  # fmt: skip
WORKLOADS = tuple(_TINY)


def tiny(workload: str) -> tuple[str, list[str]]:
    """Return the recipe of a workload and what makes it tiny."""
    name, *overrides = _TINY[workload]
    return name, ["workload.data.source=generated", *overrides, *_ALL]
