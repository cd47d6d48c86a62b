"""`podium on-host`: what `podium submit ssh` asks on every host. Not for people; answers in JSON."""

from pathlib import Path

from podium.submit.ssh import on_host


def check() -> None:
    """Print what must fit before a training starts here."""
    on_host.answer(on_host.facts(on_host.given()))


def start(run: Path, host: str) -> None:
    """Start this host's part of a run."""
    on_host.answer({"pid": on_host.start(on_host.Part(run, host), on_host.given())})


def share(study: Path, host: str, at_once: int) -> int:
    """Train this host's share of a study; return its exit code."""
    from podium.submit.ssh.share import train_share

    return train_share(study, host, at_once)


def state(run: Path, host: str) -> None:
    """Print whether this host's part is there."""
    on_host.answer(on_host.state(on_host.Part(run, host)))


def stop(run: Path, host: str) -> None:
    """Have this host's part save and end."""
    on_host.answer({"stopped": on_host.stop(on_host.Part(run, host))})
