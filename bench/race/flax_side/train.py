"""Trains a lane with JAX and Flax, and writes the weights and the time that the updates took.

    .venv/jax/bin/python bench/race/flax_side/train.py FOLDER        as `contenders/jax_flax.py` starts it

FOLDER holds `task.json`, the samples (`sample.NAME.npy`), their order and the weights. An update is one compiled call
whose parameters and optimiser state are donated; samples are on the device, and the call gathers its own. Nothing waits
for a result before the stretch has ended.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from models import MODELS  # type: ignore[import-not-found]


def optimiser_of(options: dict[str, Any]) -> optax.GradientTransformation:
    """Build the optimiser whose steps are those of torch's with these values."""
    if options["kind"] == "AdamW":
        b1, b2 = options["betas"]
        return optax.adamw(options["lr"], b1, b2, options["eps"], weight_decay=options["weight_decay"])
    assert options["kind"] == "SGD", options
    sgd = optax.sgd(options["lr"], options["momentum"])
    return optax.chain(optax.add_decayed_weights(options["weight_decay"]), sgd) if options["weight_decay"] else sgd


def nested(flat: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return arrays named `layer/leaf` as {layer: {leaf: array}}."""
    tree: dict[str, dict[str, Any]] = {}
    for name, array in flat.items():
        layer, leaf = name.split("/")
        tree.setdefault(layer, {})[leaf] = jax.numpy.asarray(array)
    return tree


def main() -> None:
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    jax.config.update("jax_default_prng_impl", task["generator"])
    samples = {name: jax.numpy.asarray(np.load(folder / f"sample.{name}.npy")) for name in task["fields"]}
    order = np.load(folder / "order.npy").reshape(-1, task["batch_size"])
    weights = np.load(folder / "weights.npz")
    params = nested({name: weights[name] for name in weights.files if not name.endswith(("/mean", "/var"))})
    stats = nested({name: weights[name] for name in weights.files if name.endswith(("/mean", "/var"))})
    build, mean_loss = MODELS[task["model"]]
    model, optimiser = build(task["options"]), optimiser_of(task["optimiser"])
    key = jax.random.key(0)

    def loss_of(params: Any, stats: Any, batch: Any, drawn: Any) -> Any:
        def apply(inputs: Any) -> Any:
            state = {"params": params, "batch_stats": stats}
            return model.apply(state, inputs, True, mutable=["batch_stats"], rngs={"dropout": drawn})

        return mean_loss(apply, batch)

    @partial(jax.jit, donate_argnums=0)
    def update(state: Any, samples: Any, chosen: Any, number: Any) -> Any:
        params, stats, moments = state
        batch = {name: rows[chosen] for name, rows in samples.items()}
        gradients, changed = jax.grad(loss_of, has_aux=True)(params, stats, batch, jax.random.fold_in(key, number))
        steps, moments = optimiser.update(gradients, moments, params)
        return optax.apply_updates(params, steps), changed.get("batch_stats", {}), moments

    state = (params, stats, optimiser.init(params))
    began = 0.0
    for number, chosen in enumerate(order):
        if number == task["num_warmup"]:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state = update(state, samples, chosen, np.uint32(number))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    trained = {f"{layer}/{leaf}": np.asarray(array) for part in state[:2] for layer, of in part.items()
               for leaf, array in of.items()}  # fmt: skip
    np.savez(folder / "trained.npz", **trained)  # type: ignore[arg-type]
    (folder / "done.json").write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
