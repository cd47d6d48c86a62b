"""What each command of the command line does; `cli` reads the options and calls it."""
