"""Signals that ask a process to stop. Used by training, and by the launcher, which hands them to its instances."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that ask to stop. SIGHUP, which a closing terminal sends, is one unless it is ignored, as under nohup."""
    always = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    return always if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (*always, signal.SIGHUP)
