"""Runs a job here, small, the way a target would run it, with what goes wrong there: before anyone waits in a queue."""
