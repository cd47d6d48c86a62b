"""Four small models of one's own, trained by `podium.fit`, Lightning, Accelerate and a loop written by hand.

    python -m bench.own_models            several minutes; prints a table and writes bench/results/own_models.md
    python -m bench.own_models --quick    a minute; to see that it works, not to measure

A 1-D regression, classes of a table, a small U-Net on images, and a transformer of Hugging Face's library that starts
from a local folder. The same samples, initial weights, micro-batch, epochs and AdamW everywhere; validation after every
epoch, the last weights saved. Seconds are those of the whole call, alternating; which one is first changes from round
to round. Lines are those of the function that trains, without blank ones. After that, `podium.fit` trains each model
for an epoch on 1, 2, 3 and 4 processes, and the digests of the weights are compared.
"""

import argparse
import contextlib
import inspect
import io
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import podium
from bench.where import when_and_where

RESULTS = Path(__file__).parent / "results" / "own_models.md"
MICRO_BATCH, LR = 32, 1e-3
PROCESSES = (1, 2, 3, 4)
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its samples: `x` and `y` for training, the last eighth of them for validation."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    loss_name: str
    epochs: int

    @property
    def num_train(self) -> int:
        return len(self.x) * 7 // 8


class UNet(nn.Module):
    """Two scales down and up, with a skip connection at each."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down1, self.down2 = _block(1, width), _block(width, 2 * width)
        self.middle = _block(2 * width, 4 * width)
        self.up2, self.up1 = _block(6 * width, 2 * width), _block(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        one = self.down1(image)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.middle(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([F.interpolate(low, scale_factor=2.0), two], dim=1))
        one = self.up1(torch.cat([F.interpolate(two, scale_factor=2.0), one], dim=1))
        output: Tensor = self.out(one)
        return output


def _block(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.BatchNorm2d(num_out), nn.ReLU())


class Classifier(nn.Module):
    """A transformer of Hugging Face's library from a local folder, and a head on its first token."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        from transformers import BertModel  # loaded here: it takes long

        self.body = BertModel.from_pretrained(folder, add_pooling_layer=False)
        self.head = nn.Linear(self.body.config.hidden_size, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(tokens).last_hidden_state[:, 0])
        return output


def cases(folder: Path, scale: float) -> list[Case]:
    """Build the four; `scale` multiplies the numbers of samples."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(1)
    draws = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws)

    def size(number: int) -> int:
        return max(256, int(number * scale) // 256 * 256)

    signals = normal(size(8192), 1, 128)
    trend = signals.flatten(1)[:, ::16].sum(dim=1, keepdim=True)
    table = normal(size(16384), 20)
    classes = (table[:, :5].cumsum(dim=1).argmax(dim=1)).long()
    images = normal(size(1024), 1, 32, 32)
    masks = (F.avg_pool2d(images, 5, 1, 2) > 0).float()
    tokens = torch.randint(5, 500, (size(2048), 32), generator=draws)
    bert = BertModel(
        BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        add_pooling_layer=False,
    )  # fmt: skip
    bert.save_pretrained(folder / "bert")
    return [
        Case("1-D regression", nn.Sequential(
            nn.Conv1d(1, 16, 5), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(16, 32, 5), nn.ReLU(), nn.Flatten(),
            nn.Linear(864, 64), nn.ReLU(), nn.Linear(64, 1)), signals, trend, F.mse_loss, "mse", 24),
        Case("classes of a table", nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
             nn.Linear(128, 5)), table, classes, F.cross_entropy, "cross_entropy", 24),
        Case("U-Net on images", UNet(), images, masks, F.binary_cross_entropy_with_logits, "bce", 8),
        Case("transformer, fine-tuned", Classifier(str(folder / "bert")), tokens, tokens[:, 0] % 2, F.cross_entropy,
             "cross_entropy", 12),
    ]  # fmt: skip


# --- the four ways; every function is what a person writes ----------------------------------------------------------


def with_podium(case: Case, model: nn.Module, folder: Path) -> float:
    n = case.num_train
    run = podium.fit(
        model, train=(case.x[:n], case.y[:n]), valid=(case.x[n:], case.y[n:]), loss=case.loss_name,
        length=f"{case.epochs}ep", micro_batch=MICRO_BATCH, optim={"name": "adamw", "lr": LR}, out=folder,
        log={"report": False},
    )  # fmt: skip
    return float(run.summary["valid"]["last"]["loss"])


def with_lightning(case: Case, model: nn.Module, folder: Path) -> float:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = case.loss(self.model(x), y)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("valid_loss", case.loss(self.model(x), y), batch_size=len(y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    n = case.num_train
    train = DataLoader(TensorDataset(case.x[:n], case.y[:n]), MICRO_BATCH, shuffle=True)
    valid = DataLoader(TensorDataset(case.x[n:], case.y[n:]), 256)
    trainer = lightning.Trainer(
        max_epochs=case.epochs, accelerator="cpu", default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, logger=False,
    )  # fmt: skip
    trainer.fit(Module(), train, valid)
    return float(trainer.callback_metrics["valid_loss"])


def with_accelerate(case: Case, model: nn.Module, folder: Path) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    n = case.num_train
    train = DataLoader(TensorDataset(case.x[:n], case.y[:n]), MICRO_BATCH, shuffle=True)
    valid = DataLoader(TensorDataset(case.x[n:], case.y[n:]), 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
    for _ in range(case.epochs):
        model.train()
        for x, y in train:
            loss = case.loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        total = count = 0.0
        with torch.inference_mode():
            for x, y in valid:
                total += float(case.loss(model(x), y)) * len(y)
                count += len(y)
    accelerator.save_model(model, str(folder))
    return total / count


def with_a_loop(case: Case, model: nn.Module, folder: Path) -> float:
    n = case.num_train
    x, y = case.x[:n], case.y[:n]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    for _ in range(case.epochs):
        model.train()
        order = torch.randperm(n)
        for start in range(0, n - MICRO_BATCH + 1, MICRO_BATCH):
            rows = order[start : start + MICRO_BATCH]
            loss = case.loss(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.eval()
        with torch.inference_mode():
            valid = float(case.loss(model(case.x[n:]), case.y[n:]))
    folder.mkdir(parents=True)
    torch.save(model.state_dict(), folder / "model.pt")
    return valid


WAYS = {"podium.fit": with_podium, "Lightning": with_lightning, "Accelerate": with_accelerate, "loop": with_a_loop}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    where = when_and_where(os.getloadavg()[0])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    lines = [
        "| model | way | lines | seconds | of the loop's speed | validation loss |",
        "|---|---|---:|---:|---:|---:|",
    ]
    equal = ["| model | weights on 1, 2, 3 and 4 processes |", "|---|---|"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in cases(folder, 0.1 if args.quick else 1.0):
            lines += _measured(case, folder, 1 if args.quick else args.rounds)
            print("\n".join(lines[-len(WAYS) :]), flush=True)
            equal += [_compared(case, folder)]
            print(equal[-1], flush=True)
    lines += ["", *equal]
    about = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    page = "\n".join([f"# Models of one's own\n\n{where}\n\n{about}\n", *lines, ""])
    if not args.quick:
        RESULTS.write_text(page, encoding="utf-8")


def _measured(case: Case, folder: Path, num_rounds: int) -> list[str]:
    start = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    losses: dict[str, float] = {}
    ways = list(WAYS.items())
    for number in range(num_rounds + 1):  # the first is a warm-up
        for place in range(len(ways)):
            name, train = ways[(place + number) % len(ways)]
            case.model.load_state_dict(start)
            began = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                losses[name] = train(case, case.model, folder / f"{case.name}-{name}-{number}")
            if number:
                seconds[name].append(time.perf_counter() - began)
    case.model.load_state_dict(start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, train in WAYS.items():
        written = [line for line in inspect.getsource(train).splitlines()[1:] if line.strip()]
        rows.append(
            f"| {case.name} | {name} | {len(written)} | {median[name]:.1f} | {median['loop'] / median[name]:.2f} | "
            f"{losses[name]:.4f} |"
        )
    return rows


def _compared(case: Case, folder: Path) -> str:
    """Train with four replicas on 1, 2, 3 and 4 processes, and return a row that says whether the weights are equal."""
    start = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    digests = set()
    for count in PROCESSES:
        case.model.load_state_dict(start)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run = podium.fit(
                case.model, train=(case.x, case.y), valid=0.125, loss=case.loss_name, length="1ep", micro_batch=8,
                replicas=4, instances=count, optim={"name": "adamw", "lr": LR}, out=folder / f"{case.name}-on-{count}",
                log={"report": False},
            )  # fmt: skip
        digests.add(str(run.summary["weights_sha256"]))
    case.model.load_state_dict(start)
    return f"| {case.name} | {f'equal ({digests.pop()[:12]})' if len(digests) == 1 else 'DIFFER'} |"


if __name__ == "__main__":
    main()
