"""What each command of the command line does; `cli.py` reads the options and calls it."""
