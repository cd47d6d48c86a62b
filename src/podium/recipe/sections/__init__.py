"""The sections of a recipe, one module each. They import neither torch nor the engine, so that recipes load quickly."""
