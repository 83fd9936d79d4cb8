"""How a decomposition is trained: pure functions of arrays. Knows no file, no model and no run."""
