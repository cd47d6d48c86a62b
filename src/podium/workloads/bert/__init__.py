"""BERT: predicts masked words."""
