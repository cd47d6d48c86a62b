"""The simulator of neurons and their voltages."""
