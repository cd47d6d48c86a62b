"""Recipes: their sections and rules, the shipped files, and reading and checking a whole recipe."""
