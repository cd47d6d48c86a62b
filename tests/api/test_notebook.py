"""A notebook trains, shows progress and the run, is interrupted without losing either, and goes on."""

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow

SET_UP = """
import os, signal, threading, time
from pathlib import Path
import numpy as np
import torch
from torch import nn
import podium

torch.manual_seed(1)
x = np.random.normal(size=(128, 3))
y = (x**2).sum(axis=1)
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
quick = dict(train=(x, y), valid=(x, y), loss="mse", micro_batch=8, replicas=2,
             log={"tensorboard": False, "report": False})
"""
FIT = "one = podium.fit(model, length='2ep', out='one', **quick)\none"
TWO = """
two = podium.fit(model, length='2ep', out='two', instances=2, **quick)
print(one.summary['weights_sha256'] == two.summary['weights_sha256'])
"""
OWN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
    def forward(self, x):
        return self.linear(x)

print(podium.fit(Net(), length='1ep', out='own', **quick).state)
try:
    podium.fit(Net(), length='1ep', out='refused', instances=2, **quick)
except podium.UserError as error:
    print(error, Path('refused').exists())
"""
INTERRUPTED = """
def interrupt(run):
    while not (run / 'metrics.jsonl').exists() or not (run / 'metrics.jsonl').stat().st_size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, args=[Path('stopped')]).start()
stopped = podium.fit(model, length='100000ep', out='stopped', **quick)
print(stopped.state, stopped.summary['updates'] < stopped.summary['total_updates'], len(stopped.checkpoints) > 0)
print(stopped.last.predict(x).shape)
"""


def test_a_notebook_trains_shows_and_survives_an_interrupt(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (SET_UP, FIT, TWO, OWN, INTERRUPTED)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def texts(cell: int) -> str:
        return "".join(
            output.get("text", "") for output in notebook.cells[cell].outputs if output.get("name") == "stdout"
        )

    shown = [output["data"]["text/html"] for output in notebook.cells[1].outputs if "data" in output]
    assert "<progress" in shown[0]
    assert "valid/loss" in shown[-1]
    assert "<svg" in shown[-1]
    assert texts(2).strip() == "True"
    assert texts(3).startswith("done\n")
    assert "Net is defined in the notebook" in texts(3)
    assert texts(3).strip().endswith("False")
    assert texts(4).splitlines() == ["interrupted True True", "(128, 1)"]
