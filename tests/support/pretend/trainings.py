"""Trainings in processes that stay for many of them, on pretended devices or, to compare, on the CPU.

    python -m tests.support.pretend.trainings FOLDER INDEX COUNT PORT     one such process, started by `trained`

Each is one of COUNT instances of every training in FOLDER/trainings.json: {name: [recipe, override, …]}. A name that
ends with `+` goes on with the run of that name without it.
"""

import json
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from podium.distributed.instances import Instances
from podium.errors import PodiumError
from podium.machine.device import resolve_device, use_device
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.topology import build_topology
from podium.train import resume, train
from podium.ui import console


def main() -> None:
    folder, (index, count, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    trainings = json.loads((folder / "trainings.json").read_text())
    device = use_device(resolve_device("auto", index))
    instances = Instances.alone()
    if count > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=index == 0, wait_for_workers=False)
        # Each on a host of its own, as far as it knows: no memory is shared, so all tensors are sent.
        instances = Instances.join(store, index, count, 100.0, None, device)
    console.write_everything_to(folder / f"instance-{index}.log")
    answers: dict[str, dict] = {}
    device_module = sys.modules.get("pretend_device")
    for name, recipe in trainings.items():
        if device_module is not None:
            device_module.waits.clear()
            device_module.messages.clear()
        try:
            answers[name] = _trained(folder, name, recipe, instances)
            if device_module is not None:
                answers[name]["waits"] = {" in ".join(what): num for what, num in device_module.waits.items()}
                answers[name]["messages"] = list(device_module.messages)
        except PodiumError as error:  # the same on all instances
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        except BaseException as error:
            traceback.print_exc()
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
            if count > 1:
                break  # the others do not know
    (folder / f"answers-{index}.json").write_text(json.dumps(answers))


def _trained(folder: Path, name: str, overrides: list[str], instances: Instances) -> dict:
    recipe = load_recipe(overrides[0], overrides[1:])
    parallel, count = recipe.parallel, instances.count
    topology = build_topology(recipe.batch.num_replicas, count, ("here",), parallel.num_stages, parallel.stage_layers)
    out = folder / name.rstrip("+").replace("/", "-")
    if name.endswith("+"):
        run = resume(Run(out), recipe, topology, instances, accept_changes=True)
    else:
        run = train(recipe, out, topology, instances)
    instances.barrier()
    summary = run.summary()
    return {"weights": summary["weights_sha256"], "valid": summary["valid"], "run": str(out)}


if __name__ == "__main__":
    main()
