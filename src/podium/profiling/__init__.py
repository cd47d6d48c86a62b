"""Where the time and the memory of a training go, measured over a few updates of it. Used by `podium profile`."""
