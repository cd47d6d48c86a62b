"""Nothing that comes from a socket or a file is unpickled: not by Podium, and by no function of torch that it uses."""

import ast
from pathlib import Path

import pytest

import podium

SOURCES = sorted(Path(podium.__file__).parent.rglob("*.py"))
#: modules that unpickle, or whose store does; torch's elastic launcher meets through one
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal",
           "multiprocessing.connection", "multiprocessing.managers", "torch.distributed.elastic",
           "torch.distributed.rpc", "torch.distributed.launcher", "torch.distributed.run"}  # fmt: skip
#: names of torch, numpy and pandas that unpickle what they receive or read
NAMES = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
         "recv_object_list", "C10dRendezvousBackend", "DynamicRendezvousHandler", "LocalElasticAgent", "elastic_launch",
         "read_pickle", "TCPRendezvous"}  # fmt: skip


def found_in(tree: ast.AST) -> list[str]:
    """What must not be there."""
    found = []
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            found += [alias.name for alias in part.names if _is_module(alias.name)]
        elif isinstance(part, ast.ImportFrom) and part.module:
            whole = [part.module, *(f"{part.module}.{alias.name}" for alias in part.names)]
            found += [name for name in whole if _is_module(name)]
            found += [alias.name for alias in part.names if alias.name in NAMES]
        elif isinstance(part, ast.Attribute) and part.attr in NAMES:
            found.append(part.attr)
        elif isinstance(part, ast.Call):
            name, keys = ast.unparse(part.func), {key.arg: key.value for key in part.keywords}
            if name == "torch.load" and ast.unparse(keys.get("weights_only", ast.Constant(False))) != "True":
                found.append(ast.unparse(part))
            if "allow_pickle" in keys and ast.unparse(keys["allow_pickle"]) != "False":
                found.append(ast.unparse(part))
    return found


def _is_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "import torch.distributed.elastic.agent.server.api",
     "from torch.distributed import rpc", "dist.all_gather_object(a, b)", "torch.load(f)",
     "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)",
     "from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend"],
)  # fmt: skip
def test_it_would_be_found(text):
    assert found_in(ast.parse(text))


#: pipes to processes that a training has started itself, through which bytes go and nothing else
ONLY_BYTES = "dataset_processes.py"


def test_no_source_unpickles():
    assert len(SOURCES) > 100
    found = {path.name: found_in(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    allowed = {"multiprocessing.connection", "multiprocessing.connection.Connection", "multiprocessing.connection.Pipe"}
    found[ONLY_BYTES] = [name for name in found[ONLY_BYTES] if name not in allowed]
    assert {path: names for path, names in found.items() if names} == {}
    (only_bytes,) = [path.read_text(encoding="utf-8") for path in SOURCES if path.name == ONLY_BYTES]
    called = {part.attr for part in ast.walk(ast.parse(only_bytes)) if isinstance(part, ast.Attribute)}
    assert not called & {"send", "recv"}, "these pickle"


def test_torchs_own_store_is_used_where_its_launcher_asks_for_it_and_nowhere_else():
    """It asks nobody who they are."""
    users = {path.name for path in SOURCES if "TCPStore" in path.read_text(encoding="utf-8")}
    assert users == {"point.py", "sockets.py"}
