"""Photographs of any size: where they are stored, which crops are taken, and how these are decoded."""
