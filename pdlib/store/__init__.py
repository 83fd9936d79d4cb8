"""Where it is kept: two-item steps on disk, written atomically, opened by mapping. Only this room writes checkpoints."""
