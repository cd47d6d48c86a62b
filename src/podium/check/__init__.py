"""Whether a recipe, with the user's own model too, keeps what Podium promises. `commands/check.py` puts it together."""
