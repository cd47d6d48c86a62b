"""Jobs on hosts that ssh reaches: checked, started, watched and ended together."""
