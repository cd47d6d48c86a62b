"""Small recipes, as a name and overrides: a tiny one of every workload, and two forms of it that many tests train."""

import os

#: a few updates of each workload on generated data: dropout and batch norm included
TINY = {
    "bert": [
        "bert/quick",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "workload.data.length=32",
        "workload.model.layers=2",
        "workload.model.hidden=32",
        "workload.model.vocabulary=200",
        "workload.model.dropout=0.1",
        "workload.model.attention_dropout=0.1",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=6",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "cnn": [
        "cnn/quick",
        "workload.data.source=generated",
        "workload.data.image_size=16",
        "workload.data.samples=160",
        "workload.data.test_samples=64",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=48",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "cosmology": [
        "cosmology/quick",
        "workload.data.source=generated",
        "workload.data.samples=20",
        "workload.data.valid_samples=7",
        "workload.model.width=1",
        "batch.micro=1",
        "train.length=2ep",
        "valid.micro=4",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "gpt2": [
        "gpt2/quick",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "workload.data.test_samples=40",
        "workload.data.sample.tokens=20",
        "workload.model.layers=2",
        "workload.model.hidden=16",
        "workload.model.heads=2",
        "workload.model.context=12",
        "workload.model.vocabulary=50",
        "workload.model.dropout=0.1",
        "batch.micro=8",
        "train.length=2ep",
        "valid.every=1ep",
        "valid.micro=12",
        "valid.max_samples=null",
        "checkpoint.every=1ep",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "mnist": [
        "mnist",
        "workload.data.source=generated",
        "workload.data.generated_train=256",
        "workload.data.generated_test=64",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=48",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
    "neuron": [
        "neuron",
        "workload.data.source=generated",
        "workload.data.samples=160",
        "batch.micro=8",
        "train.length=2ep",
        "valid.micro=12",
        "engine.updates_per_call=5",
        "log.tensorboard=false",
        "log.report=false",
        "engine.threads=1",
    ],
}

#: dropout, batch norm (neuron), accumulation, 8 replicas, clipping, a schedule that looks at the validation loss
EIGHT = ["batch.micro=4", "batch.accumulation=2", "batch.replicas=8", "optim.clip_norm=0.5", "schedule.warmup=3up",
         "train.length=8up", "valid.every=4up"]  # fmt: skip
#: cnn: statistics shared by two replicas, images mixed, half precision rounded by chance, an average of the weights
#: gpt2: blocks computed again in backward, in half precision
#: bert: packed rows with masks drawn anew, lamb
OWN_OF_EIGHT = {
    "bert": ["workload.data.samples=256", "workload.data.packed=true", "workload.data.redraw=pairs",
             "optim.name=lamb", "optim.bias_correction=false"],
    "cnn": ["workload.data.samples=256", "workload.model.norm.span=2", "workload.data.augment.mixup=0.2",
            "workload.data.augment.cutmix=1.0", "precision=16.16", "average.method=exponential", "average.every=2up"],
    "cosmology": ["workload.data.samples=128", "workload.model.lambda_rho=1e-3", "batch.micro=1"],
    "gpt2": ["workload.data.samples=256", "parallel.recompute=true", "precision=16.32", "valid.max_samples=29"],
    "mnist": ["workload.data.generated_train=512"],
    "neuron": ["workload.data.samples=256"],
}  # fmt: skip


def eight(workload: str) -> list[str]:
    return [*TINY[workload], *EIGHT, *OWN_OF_EIGHT[workload]]


NUM_KILLS = int(os.environ.get("PODIUM_KILLS", "6"))
#: what each workload has besides: enough samples, and for cnn everything that is drawn or kept from update to update
MORE = {
    "mnist": ["workload.data.generated_train=2048"],
    "neuron": ["workload.data.samples=1024"],
    "cnn": ["workload.data.samples=2048", "workload.data.augment.mixup=0.2", "precision.mode=16.16",
            "average.method=exponential", "average.every=3up"],
}  # fmt: skip
NUM_KILLS_EACH = -(-NUM_KILLS // len(MORE))
LONG = ["batch.micro=2", "batch.replicas=4", "schedule.warmup=3up",
        f"train.length={max(120, 20 * NUM_KILLS)}up", "valid.every=20up", "checkpoint.every=4up",
        "engine.updates_per_call=2"]  # fmt: skip


def recipe_of(workload: str) -> list[str]:
    return [*TINY[workload], *MORE[workload], *LONG]
