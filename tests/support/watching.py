"""Observers of a user for tests: one that writes down what it is told, one that meddles with all that it can reach."""

WATCHERS = """\
import json
import os
import random
import signal
import threading

import numpy as np
import torch

import podium


class Diary(podium.Observer):
    def _write(self, run, *entry):
        with (run / "diary.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\\n")

    def on_record(self, run, record):
        self._write(run, "record", record)

    def on_validation(self, run, update, metrics):
        self._write(run, "validation", update, metrics)

    def on_checkpoint(self, run, update, path):
        model = podium.load(run, checkpoint=update).model
        self._write(run, "checkpoint", update, path.name, sum(p.numel() for p in model.parameters()))

    def on_end(self, run, summary):
        self._write(run, "end", summary["state"], summary["weights_sha256"])


class Meddler:
    def __init__(self):
        self._meddle()

    def _meddle(self):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.backends.mkldnn.enabled = False
        torch.set_float32_matmul_precision("medium")
        os.environ["PODIUM_MEDDLED"] = "1"
        os.chdir("/")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def on_record(self, run, record):
        self._meddle()
        record.clear()

    def on_validation(self, run, update, metrics):
        self._meddle()
        metrics.clear()

    def on_checkpoint(self, run, update, path):
        self._meddle()
        raise SystemExit(5)


class Endless:
    def on_record(self, run, record):
        while True:
            try:
                threading.Event().wait()
            except Exception:
                pass


class Counting:
    def __init__(self, name):
        self.name, self.heard = name, 0

    def on_record(self, run, record):
        self.heard += 1
        (run / self.name).write_text(str(self.heard))


class Failing:
    def on_record(self, run, record):
        self.missing(record)
"""
