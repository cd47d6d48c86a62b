"""GPT-2: predicts the next token of a text."""
