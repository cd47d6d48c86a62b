"""What a machine with accelerators is asked once: whether it keeps the promises, and what that costs."""
