"""Classification of grey images of 28 × 28 pixels."""
