"""How a run lives: its specification, its loop, its metrics, its resumption."""
