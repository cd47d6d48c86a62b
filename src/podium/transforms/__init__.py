"""Changes to a built model before it trains: precision, seeding, recomputation, a trap for non-finite values."""
