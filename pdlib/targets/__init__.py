"""Models to decompose: each module builds a `Target`, a frozen function of (params, *batch)."""
